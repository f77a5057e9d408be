"""Networks, callbacks and loops at every level: each row trains as float32 does and leaves nothing behind."""

import copy
import functools
import gc

import pytest
import torch
import torch.nn.utils.prune
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo.amp.half import HalfCalls
from lightning_turbo.errors import AmpUsageError
from tests.integration.regression import LEVELS, Regression, apart, batches, fit, flat, layers

# torch's compiler reads it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


# Rows: functions that create a module and callbacks, and arguments of the Trainer.


def with_modules(change):
    """Return a function that creates the module with a changed network."""

    def make():
        module = Regression()
        module.net = change()
        return module

    return make


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.lstm(x[..., None])[0][:, -1])


def parametrized():
    net = layers()
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.spectral_norm(net[2])
    return net


def pruned():
    net = layers()
    nn.utils.prune.l1_unstructured(net[0], "weight", 0.25)
    return net


class Toggling(Regression):
    """Two alternating optimizers. The weights of the other one need no gradient meanwhile."""

    automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert all(p.requires_grad is (id(p) in own) for p in self.parameters())
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class AllRepeated(Regression):
    """Uses activation checkpointing for the whole network."""

    def training_step(self, batch, index):
        features, target = batch
        net = lambda x: self.net(x).float()  # noqa: E731
        out = checkpoint(net, features.clone().requires_grad_(), use_reentrant=True)
        return (out - target).square().mean()


class DoubleBackward(Regression):
    def training_step(self, batch, index):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).float().sum(), x, create_graph=True)
        return self.loss(batch) + 0.1 * slope.square().mean()


class Demanding(torch.optim.SGD):
    """Requires a closure and returns its result."""

    def step(self, closure):
        loss = closure()
        super().step()
        return loss


class WithClosure(Regression):
    def optimizer_step(self, epoch, index, optimizer, closure):
        assert isinstance(optimizer.step(closure=closure), torch.Tensor)

    def configure_optimizers(self):
        return Demanding(self.parameters(), lr=0.1)


def plain_of(net):
    plain = layers()
    plain.load_state_dict(net.state_dict())
    return plain


class Copying(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 0:
            twin = copy.deepcopy(module.net)
            assert torch.equal(flat(twin), flat(module.net))
            dtype = next(twin.parameters()).dtype  # half at O3
            assert torch.equal(twin(batch[0].to(dtype)), plain_of(twin).to(dtype)(batch[0].to(dtype)))

    def teardown(self, trainer, module, stage):
        twin = copy.deepcopy(module)
        assert torch.equal(flat(twin), flat(module))


class Momentum(Regression):
    """A second network follows the first one through ``.data`` and is called in each step."""

    def __init__(self):
        super().__init__()
        self.follower = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, index):
        for mine, theirs in zip(self.follower.parameters(), self.net.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
        with torch.no_grad():
            goal = self.follower(batch[0]).float()
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]).float(), goal + 0.5)


def average():
    return [StochasticWeightAveraging(0.05, swa_epoch_start=1)]


def pruning():
    return [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=True, verbose=0)]


ROWS = {
    "plain": (Regression, list, {}),
    "pruning": (Regression, pruning, {}),
    "pruned before": (with_modules(pruned), list, {}),
    "stochastic weight averaging": (Regression, average, {}),
    "follower moved by .data": (Momentum, list, {}),
    "toggle_optimizer": (Toggling, list, {}),
    "deep copies": (Regression, lambda: [Copying()], {}),
    "demanded closure": (WithClosure, list, {}),
    "parametrizations": (with_modules(parametrized), list, {}),
    "tied weights": (with_modules(Tied), list, {}),
    "LSTM": (with_modules(Recurrent), list, {}),
    "checkpointing of the whole network": (AllRepeated, list, {}),
    "compiled": (with_modules(lambda: torch.compile(layers(), backend="eager")), list, {"max_epochs": 1}),
    "double backward": (DoubleBackward, list, {}),
    "accumulation": (Regression, list, {"accumulate_grad_batches": 4}),
}


@functools.cache
def in_float32(row):
    make, callbacks, settings = ROWS[row]
    return fit(make(), callbacks=callbacks(), **settings)


# float16 comes with a loss scale. Only O2 and O3 have hooks and half copies.
CASES = [
    *(("plain", level, torch.bfloat16) for level in LEVELS),
    *(("plain", level, torch.float16) for level in ("O1", "O2")),
    *((row, "O1", torch.float16) for row in ("toggle_optimizer", "demanded closure", "accumulation")),
    *((row, "O2", torch.float16) for row in ROWS if row != "plain"),
    *((row, "O3", torch.bfloat16) for row in ROWS if row != "plain"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "level", "dtype"), CASES)
def test_each_kind_of_network_and_loop_trains_as_float32_does(row, level, dtype):
    make, callbacks, settings = ROWS[row]
    wanted, module = in_float32(row), make()
    hooks = hooks_of(module)
    scaled = dtype is torch.float16 and level in ("O1", "O2")
    plugin = ApexAMP(level, dtype=dtype, scaler=ApexGradScaler(max_scale=1024.0) if scaled else None)
    fit(module, plugin, callbacks=callbacks(), **settings)
    assert apart(module, wanted, make()) < {"O0": 1e-5, "O3": 0.12}.get(level, 0.06)
    assert hooks_of(module) == hooks
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert {p.dtype for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()} == {torch.float32}
    ours, theirs = ([vars(each).keys() for each in one.trainer.optimizers] for one in (module, wanted))
    assert ours == theirs


def hooks_of(module):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return [len(getattr(part, kind)) for part in [*module.modules()][:4] for kind in kinds]


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_failed_run_leaves_nothing_behind(level):
    class Failing(Regression):
        def training_step(self, batch, index):
            def fail(*_):
                raise KeyboardInterrupt

            if index == 1:
                self.net[2].register_forward_pre_hook(fail)
            return self.loss(batch)

    module = Failing()
    hooks = hooks_of(module)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(module, ApexAMP(level))
    del module.net[2]._forward_pre_hooks[next(reversed(module.net[2]._forward_pre_hooks))]
    assert hooks_of(module) == hooks
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


# Plain loops


@pytest.mark.parametrize("goes_on", ["trains", "saves", "loads"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_plain_loop_survives_a_keyboard_interrupt_in_a_call(level, goes_on):
    def interrupt(*_):
        raise KeyboardInterrupt

    net, (x, y) = layers(), next(iter(batches()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    dtypes, state = {p.dtype for p in net.parameters()}, copy.deepcopy(net.state_dict())
    handle = net[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    handle.remove()
    if goes_on == "trains":
        with amp.scale_loss(nn.functional.mse_loss(net(x).float(), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    elif goes_on == "loads":  # as in a script that restores its best weights
        net.load_state_dict({name: torch.full_like(value, 1 / 3) for name, value in state.items()})
        third = torch.tensor(1 / 3)
        assert net.state_dict()["0.weight"][0, 0] == (third if level == "O2" else third.bfloat16().float())
    else:  # as in a script that saves its weights
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert {p.dtype for p in net.parameters()} == dtypes
    assert net(x).dtype is torch.float32
    assert (goes_on == "saves") == torch.equal(net.state_dict()["0.weight"], state["0.weight"])
    amp.shutdown()


@pytest.mark.parametrize("make", [layers, Recurrent])
def test_no_half_copy_outlives_its_backward_pass(make):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    for x, y in batches():
        with amp.scale_loss(nn.functional.mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    gc.collect()
    shapes = {param.shape for param in net.parameters()}
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert not [each for each in tensors if each.dtype is torch.bfloat16 and each.shape in shapes]
    amp.shutdown()


def test_keep_fp32_modules_in_a_trainer():
    module = fit(Regression(), ApexAMP("O2", keep_fp32_modules=["net"]))
    assert torch.equal(flat(module), flat(fit(Regression())))
    with pytest.raises(AmpUsageError, match="keep_fp32_modules: expected a name"):
        fit(Regression(), ApexAMP("O2", keep_fp32_modules=["net.9"]))


def test_an_error_in_half_precision_says_what_to_do():
    class Spectrum(Regression):
        def loss(self, batch):
            return torch.fft.rfft(self.net(batch[0])).abs().mean()

    module = Spectrum()
    module.net.append(type("Fourier", (nn.Linear,), {"forward": lambda self, x: torch.fft.rfft(x).real})(1, 1))
    with pytest.raises(RuntimeError, match=r"(?s)BFloat16.*keep_fp32_modules=\[its name or its class\]"):
        fit(module, ApexAMP("O2"))


@pytest.mark.parametrize(
    ("said", "advised"), [("expected scalar type Half but found Float", True), ("no space", False)]
)
def test_only_dtype_errors_get_advice(said, advised):
    calls = HalfCalls([nn.Linear(1, 1)], torch.float16)
    with pytest.raises(RuntimeError) as error, calls.forward_context():
        raise RuntimeError(said)
    first, *advice = str(error.value).splitlines()
    assert first == said
    assert ("keep_fp32_modules" in "".join(advice)) is advised
