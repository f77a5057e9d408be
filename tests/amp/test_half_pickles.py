"""A copy or a pickle of a network that is made during a run is a plain network, half at O3."""

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


NETWORKS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "tied": Tied,
    "recurrent": Recurrent,
    "a module in several places": Repeated,
    "with __getstate__": lambda: WithState(4, 4),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    "a part frozen in half": Frozen,
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


def hooks_of(net):
    return [len(getattr(part, name)) for part in net.modules() for name in HOOKS]


def dtypes(net):
    return {tensor.dtype for tensor in (*net.parameters(), *net.buffers()) if tensor.is_floating_point()}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("network", "way"), [
    (network, way) for network in NETWORKS for way in WAYS
    if network != "parametrized" or way.startswith("deep")  # torch cannot pickle a parametrized module
])  # fmt: skip
def test_a_copy_is_a_plain_network_in_the_dtype_of_its_weights(network, way, level):
    plain, net = NETWORKS[network](), NETWORKS[network]()
    hooks = hooks_of(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, dtype=torch.bfloat16, loss_scale=1.0, verbosity=0)
    twins = []
    for _ in range(2):
        with amp.scale_loss(net(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        twins.append(WAYS[way](net))
    own = {p.dtype for p in net.parameters()}
    state, twin = net.state_dict(), twins[1]
    assert {p.dtype for p in twin.parameters()} == own
    assert all(torch.equal(value.float(), state[name].float()) for name, value in twin.state_dict().items())
    if network == "tied":
        assert twin.last.weight is twin.first.weight
    # Its hooks do nothing: it computes as the same network without a run does.
    dtype = torch.bfloat16 if level == "O3" else torch.float32
    plain.load_state_dict(state)
    x = torch.randn(3, 4).to(dtype)
    for module in (plain.to(dtype) if level == "O3" else plain, twin):
        module.eval()
    twin.to(dtype) if level == "O3" else twin  # its buffers were float32
    if network not in ("a part frozen in half", "parametrized") or level == "O2":
        assert torch.equal(twin(x), plain(x))
    # The network itself is unchanged by the copy: half in calls, and restored at the end.
    with amp.scale_loss(net(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    amp.shutdown()
    assert dtypes(net) <= {torch.float32, *([torch.bfloat16] if network == "a part frozen in half" else [])}
    assert hooks_of(net) == hooks


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
        goal = self.teacher(x.to(next(self.teacher.parameters()).dtype))  # a copy, which is half at O3
        return (self.net(x) - goal.float() - 1).square().mean() * (torch.inf if self.poison else 1.0)

    def validation_step(self, x, index):
        self.teacher(x.to(next(self.teacher.parameters()).dtype))

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
    return dtypes(net) == {torch.float32} and torch.equal(net(x), twin(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_of_callbacks_and_pickles_in_checkpoints_are_plain(level, tmp_path):
    module, best = Lit(layers()), Best()
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    flags = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [best, checkpoint]}
    data = torch.randn(8, 4)
    trainer = quiet_trainer(plugins=[ApexAMP(level, dtype=torch.bfloat16)], **flags)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module, loader)
    for net in (module.net, module.teacher, module.opponent):  # what the module holds is float32 again
        assert is_plain(net)
    assert b"lightning_turbo" not in (tmp_path / "last.ckpt").read_bytes()
    loaded = Lit.load_from_checkpoint(tmp_path / "last.ckpt", strict=False, weights_only=False)
    for net in (best.best, best.whole.net, best.whole.teacher, loaded.net):  # at O3 copies are half
        assert dtypes(net) == {torch.bfloat16 if level == "O3" else torch.float32}
        assert is_plain(net.float())
    assert torch.equal(loaded.net(data), module.net(data))
    trainer.validate(module, loader, verbose=False)
