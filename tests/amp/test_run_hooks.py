"""A copy or a pickle of a network that is made during a run is the plain float32 network."""

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.utils import parametrizations

from lightning_turbo import ApexAMP, amp
from lightning_turbo.plugins import nonfinite
from tests.trainers import quiet_trainer

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Repeated(nn.Module):
    """Has one module in several places."""

    def __init__(self):
        super().__init__()
        self.layer, norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.before, self.after = nn.Sequential(self.layer, norm), nn.Sequential(norm, self.layer)

    def forward(self, x):
        return self.after(self.before(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        return self.lstm(x)[0]


class WithState(nn.Linear):
    """Defines ``__getstate__``."""

    def __getstate__(self):
        return {**vars(self), "saved": True}


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.encoder(x.bfloat16()).to(self.head.weight.dtype))


class Listed(Frozen):
    """Also keeps its weights in a list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.3))
        self.all_weights = [self.weight, (self.head.weight, self.encoder.weight)]

    def forward(self, x):
        return nn.functional.linear(super().forward(x @ self.all_weights[0]), self.all_weights[1][0])


NETWORKS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "tied": Tied,
    "recurrent": Recurrent,
    "a module in several places": Repeated,
    "with __getstate__": lambda: WithState(4, 4),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    "a part frozen in half": Frozen,
    "weights in a list": Listed,
}


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    assert b"lightning_turbo" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deep copy": copy.deepcopy,
    "deep copy of a list": lambda net: copy.deepcopy([net, net])[1],
    "torch.save": saved,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
}


def of_run(net):
    """Return what a run adds to a module: hooks, attributes, dtypes."""
    hooks = [len(getattr(part, name)) for part in net.modules() for name in HOOKS]
    return hooks, [sorted(vars(part)) for part in net.modules()], [p.dtype for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("network", "way"), [
    (network, way) for network in NETWORKS for way in WAYS
    if network != "parametrized" or way.startswith("deep")  # torch cannot pickle a parametrized module
])  # fmt: skip
def test_a_copy_is_a_plain_float32_network(network, way, level, dtype):
    if network == "parametrized" and way in ("torch.save", "pickle"):
        pytest.skip("torch pickles no parametrized module")
    plain, net = NETWORKS[network](), NETWORKS[network]()
    before = of_run(plain)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, dtype=dtype, loss_scale=1.0, verbosity=0)
    twins = []
    for _ in range(2):
        with amp.scale_loss(net(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        twins.append(WAYS[way](net))
    if network == "with __getstate__":
        assert twins[0].saved
        del twins[0].saved, twins[1].saved
    for twin in twins:
        assert of_run(twin) == before
    plain.load_state_dict(twins[1].state_dict())
    in_run = net.state_dict()
    assert all(torch.equal(value, in_run[name]) for name, value in twins[1].state_dict().items())
    x = torch.randn(3, 4)
    for module in (plain, twins[1]):
        module.eval()
    assert torch.equal(twins[1](x), plain(x))
    if network == "tied":
        assert twins[1].last.weight is twins[1].first.weight
    if network == "weights in a list":
        first, (second, third) = twins[1].all_weights
        assert (first is twins[1].weight, second is twins[1].head.weight) == (True, True)
        assert third is twins[1].encoder.weight
    # The network itself is unchanged by the copy: half in calls, and restored at the end.
    with amp.scale_loss(net(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    amp.shutdown()
    assert of_run(net) == before
    assert torch.equal(twins[1](x), plain(x))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_shallow_copy_has_no_hooks(level):
    net = nn.Linear(4, 4)
    before = of_run(net)
    amp.initialize(net, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    twin = copy.copy(net)
    assert of_run(twin) == before
    amp.shutdown()
    assert of_run(net) == before


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_submodule_copied_within_a_call_is_float32(level):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x):
            self.twins = [copy.deepcopy(self.net), copy.deepcopy(self)]
            return self.net(x * self.mask)

    net = Lazy()
    amp.initialize(net, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    net(torch.ones(2, 4))
    for twin in net.twins:
        assert {tensor.dtype for tensor in twin.state_dict().values()} == {torch.float32}
        assert not any(part._forward_pre_hooks for part in twin.modules())
    amp.shutdown()


def test_hooks_of_the_user_are_copied_and_removed_by_their_handles():
    net, seen = nn.Linear(4, 4), []
    before = net.register_forward_pre_hook(lambda *_: seen.append("before"))
    amp.initialize(net, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    during = net.register_forward_hook(lambda *_: seen.append("during"))
    copy.deepcopy(net)(torch.ones(1, 4))
    assert seen == ["before", "during"]
    before.remove()
    during.remove()
    amp.shutdown()
    assert not net._forward_pre_hooks
    assert not net._forward_hooks


# In a Trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Attribute 'net' is an instance of `nn.Module`",
    "ignore:You defined a `validation_step`",
    "ignore:Found keys",
)


class Lit(pl.LightningModule):
    def __init__(self, net, poison=False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.poison = net, poison

    def on_train_start(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, x, index):
        return (self.net(x) - self.teacher(x) - 1).square().mean() * (torch.inf if self.poison else 1.0)

    def validation_step(self, x, index):
        self.teacher(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Best(Callback):
    def on_train_epoch_end(self, trainer, module):
        self.best = copy.deepcopy(module.net)
        self.whole = copy.deepcopy(module)
        module.opponent = copy.deepcopy(module.net)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def is_plain(net):
    twin = layers()
    twin.load_state_dict(net.state_dict())
    x = torch.randn(5, 4)
    return of_run(net) == of_run(layers()) and torch.equal(net(x), twin(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_of_callbacks_and_pickles_in_checkpoints_are_plain(level, tmp_path):
    module, best = Lit(layers()), Best()
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    flags = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [best, checkpoint]}
    data = torch.randn(8, 4)
    trainer = quiet_trainer(plugins=[ApexAMP(level, dtype=torch.bfloat16)], **flags)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module, loader)
    for net in (best.best, best.whole.net, best.whole.teacher, module.net, module.teacher, module.opponent):
        assert is_plain(net)
    assert b"lightning_turbo" not in (tmp_path / "last.ckpt").read_bytes()
    loaded = Lit.load_from_checkpoint(tmp_path / "last.ckpt", strict=False, weights_only=False)
    assert is_plain(loaded.net)
    assert torch.equal(loaded.net(data), module.net(data))
    trainer.validate(module, loader, verbose=False)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_made_during_the_search_for_nonfinite_values_is_plain(level, monkeypatch):
    monkeypatch.setattr(nonfinite, "LOOK_EVERY", 1)
    module, best = Lit(layers(), poison=True), Best()
    plugin = ApexAMP(level, dtype=torch.float16)
    quiet_trainer(plugins=[plugin], max_epochs=1, callbacks=[best]).fit(
        module, torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
    )
    assert is_plain(best.best)
