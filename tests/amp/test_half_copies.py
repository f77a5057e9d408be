"""Half copies of weights and buffers: torch.func, hooks, exports, writes, sparse gradients and RNNs."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo.errors import AmpStateError, AmpUsageError
from tests.amp.loops import initialized
from tests.integration.regression import Regression, apart, fit, flat, layers
from tests.tables import every_pair
from tests.trainers import quiet_trainer

# Weights that are not parameters


def gradients_at_moved_weights(net, x):
    net.zero_grad()
    functional_call(net, {name: 1.5 * p for name, p in net.named_parameters()}, (x,)).float().square().mean().backward()
    return torch.cat([p.grad.float().flatten() for p in net.parameters()])


def gradients_of_samples(net, x):
    weights = {name: p.detach() for name, p in net.named_parameters()}
    one = grad(lambda w, sample: functional_call(net, w, (sample[None],)).float().square().mean())
    return torch.cat([g.float().flatten(1) for g in vmap(one, (None, 0))(weights, x).values()], 1)


def outputs_of_an_ensemble(net, x):
    weights, buffers = stack_module_state([net, copy.deepcopy(net)])
    return vmap(lambda w, b: functional_call(net, (w, b), (x,)).float(), (0, 0))(weights, buffers)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("what", [gradients_at_moved_weights, gradients_of_samples, outputs_of_an_ensemble])
def test_weights_of_torch_func_are_cast_with_gradients(what, level):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    wanted = what(layers(), x)
    net, _ = initialized(layers(), level)
    torch.testing.assert_close(what(net, x), wanted, rtol=0.1, atol=0.1 * float(wanted.detach().abs().max()))


# User code in a backward pass


def test_hooks_and_overrides_see_the_float32_parameters_in_a_backward_pass():
    seen = []

    class Looking(Regression):
        def look(self, *_):
            seen.append({(type(p), p.dtype) for p in self.parameters()})

        def training_step(self, batch, index):
            loss = self.loss(batch)
            loss.register_hook(self.look)
            return loss

        def backward(self, loss):
            super().backward(loss)
            self.look()
            assert all(p.grad is not None for p in self.parameters())
            for p in self.parameters():
                p.grad.zero_()

    module = Looking()
    module.net[2].register_full_backward_hook(module.look)
    assert torch.equal(flat(fit(module, ApexAMP("O2", loss_scale=128.0))), flat(Looking()))
    assert len(seen) == 3 * 4 * 3
    assert all(each == {(nn.Parameter, torch.float32)} for each in seen)


class Blocks(nn.Module):
    """Uses activation checkpointing for a module, a function of two modules, or the whole network."""

    def __init__(self, way, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = layers()[0], nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), layers()[2]
        self.way, self.reentrant = way, reentrant
        self.dtypes = []
        self.middle[1].register_forward_pre_hook(self.record)

    def record(self, module, args):
        self.dtypes.append((args[0].dtype, module.weight.dtype))

    def body(self, x):
        return torch.tanh(self.middle(x)) + x

    def forward(self, x):
        part = self.middle if self.way == "module" else self.body
        x = self.first(x)
        if not self.training:
            return self.last(part(x))
        return self.last(checkpoint(part, x, use_reentrant=self.reentrant))


@every_pair(
    ("level", "way", "reentrant", "kept"),
    ["O2", "O3"], ["module", "function", "whole"], [True, False], [(), ("net.middle",)],
)  # fmt: skip
def test_checkpointing_recomputes_the_same_dtypes(level, way, reentrant, kept):
    class Repeating(Regression):
        def loss(self, batch):
            x = batch[0].clone().requires_grad_()
            whole = way == "whole" and self.training
            out = checkpoint(self.net, x, use_reentrant=reentrant) if whole else self.net(x)
            assert out.dtype is torch.float32
            return nn.functional.mse_loss(out, batch[1])

    def make():
        torch.manual_seed(0)
        module = Repeating()
        module.net = Blocks("module" if way == "whole" else way, reentrant and way != "whole")
        return module

    module, wanted = fit(make(), ApexAMP(level, keep_fp32_modules=kept)), fit(make())
    assert apart(module, wanted, make()) < (0.06 if level == "O2" else 0.2)
    assert len(module.net.dtypes) > 24  # it was recomputed
    assert set(module.net.dtypes) == {(torch.float32,) * 2 if kept else (torch.bfloat16,) * 2}


# Exports during a run


EXPORTS = {"trace": lambda module, x: torch.jit.trace(module.net, x)(x)}
if hasattr(torch.compiler, "is_exporting"):  # since torch 2.7
    EXPORTS["export"] = lambda module, x: torch.export.export(module.net, (x,), strict=False).module()(x)


class Exporting(Callback):
    def __init__(self):
        self.made = {}

    def on_train_epoch_end(self, trainer, module):
        x = torch.ones(2, 4)
        with torch.no_grad():
            wanted = module.net(x)
        self.made = {name: (export(module, x), wanted) for name, export in EXPORTS.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_network_can_be_exported_during_a_run(level):
    class Forwarding(Regression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def loss(self, batch):
            return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    callback = Exporting()
    module = fit(Forwarding(), ApexAMP(level), max_epochs=2, callbacks=[callback])
    for made, wanted in callback.made.values():
        assert made.dtype is torch.float32
        torch.testing.assert_close(made, wanted, rtol=0.05, atol=0.05)
    assert torch.equal(flat(module), flat(fit(Forwarding(), ApexAMP(level), max_epochs=2)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_scripting_during_a_run_is_refused_with_a_remedy(level):
    net, _ = initialized(layers(), level)
    with pytest.raises(AmpStateError, match=r"torch.jit.script: expected .*after the run, or use torch.jit.trace"):
        torch.jit.script(net)
    amp.shutdown()
    torch.jit.script(net)


# Accumulation in buffers


class Counting(nn.Module):
    def __init__(self, replaces, below=None):
        super().__init__()
        self.replaces, self.below = replaces, below
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(4, 4))

    def forward(self, x):
        if self.training and self.replaces:
            self.count = self.count + 1
            self.average = self.average + 0.001 * x.detach().mean()
        elif self.training:
            self.count += 1
            self.average.add_(x.detach().mean(), alpha=0.001)
        x = x * (self.average[0] / self.average.detach().mean())
        return x if self.below is None else self.below(x)


class MakesAverage(nn.Module):
    """Creates its buffer in its first call from its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        with torch.no_grad():
            if self.mean is None:
                self.mean = torch.zeros_like(x[0])
            self.mean.mul_(0.99).add_(x.detach().mean(0), alpha=0.01)
        return x


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_buffer_created_in_a_call_is_float32_and_accumulates_exactly(level):
    net = nn.Sequential(nn.Linear(4, 2), MakesAverage())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(1.0)
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), opt_level=level, dtype=torch.bfloat16, verbosity=0)
    for _ in range(1000):
        net(torch.ones(3, 4))
    state = net.state_dict()["1.mean"]
    amp.shutdown()
    assert state.dtype is torch.float32
    assert abs(state.mean() - 1.0) < 0.01


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_buffers_accumulate_exactly(level, replaces, alone):
    net = nn.Sequential(Counting(replaces), nn.Linear(4, 2)) if alone else Counting(replaces, nn.Linear(4, 2))
    part = net[0] if alone else net
    initialized(net, level)
    for _ in range(300):
        assert net(torch.full((2, 4), 2.0)).dtype is torch.float32
    assert part.count == 300
    assert part.average.dtype is torch.float32
    assert abs(part.average.mean() - 1.6) < 0.01
    amp.shutdown()
    assert not net._forward_hooks
    assert not part._forward_pre_hooks


class Averaging(nn.Module):
    """A module with weights, whose buffer a function writes."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.write(self.average, self.average[:4] * 0.99 + 0.01 * x.mean(0))
        return self.layer(x) + self.average[:4].to(x.dtype)


BUFFER_WRITES = {
    "copy_": lambda buffer, new: buffer.copy_(new),
    "data =": lambda buffer, new: setattr(buffer, "data", new),
    "set_": lambda buffer, new: buffer.set_(new.to(buffer.dtype)),
    "another shape": lambda buffer, new: setattr(buffer, "data", torch.cat([new, new[:1]])),
}


@pytest.mark.parametrize("write", BUFFER_WRITES)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_buffer_that_a_call_writes_in_any_way_is_as_in_float32(level, write):
    twin = Averaging(BUFFER_WRITES[write])
    net, _ = initialized(copy.deepcopy(twin), level)
    for _ in range(100):
        net(torch.full((2, 4), 2.0))
        twin(torch.full((2, 4), 2.0))
    assert net.average.dtype is torch.float32
    torch.testing.assert_close(net.average, twin.average, rtol=0.01, atol=0.01)


class Recurrent(nn.Module):
    """Keeps its state in a buffer, with its graph."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(1, 4))

    def forward(self, x):
        self.state = torch.tanh(self.layer(x + self.state))
        return self.state


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_flow_through_a_state_in_a_buffer(level):
    twin = Recurrent()
    net, _ = initialized(copy.deepcopy(twin), level)
    for each in (net, twin):
        for _ in range(3):
            out = each(torch.ones(1, 4))
        out.float().sum().backward()
    torch.testing.assert_close(net.layer.weight.grad, twin.layer.weight.grad, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_network_created_in_inference_mode_is_called_in_it(level):
    x = torch.ones(2, 4)
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 4), Averaging(lambda *_: None))
        expected = net(x)
        amp.initialize(net, opt_level=level, dtype=torch.bfloat16, verbosity=0)
        for _ in range(2):
            torch.testing.assert_close(net(x).float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [
    lambda: nn.BatchNorm1d(4, affine=False, momentum=0.001),
    lambda: nn.InstanceNorm1d(4, track_running_stats=True, momentum=0.001),
    lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.001),
])  # fmt: skip
def test_running_statistics_stay_float32(make):
    x, norm, twin = torch.randn(8, 4, 16) + 3.0, make(), make()
    net, _ = initialized(nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 1)))
    for _ in range(50):
        net(x)
        twin(x.bfloat16().float())
    torch.testing.assert_close(norm.running_mean, twin.running_mean, rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(norm.running_var, twin.running_var, rtol=5e-3, atol=1e-3)
    net.eval()
    assert net(x).dtype is torch.float32


# Sparse gradients


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_stay_sparse(kind, level):
    ids = torch.tensor([[1, 2, 2], [3, 1, 0]])
    wanted = kind(8, 4, sparse=True)
    net = nn.Sequential(copy.deepcopy(wanted), nn.Flatten())
    wanted(ids).square().sum().backward()
    net, optimizer = initialized(net, level)
    with amp.scale_loss(net(ids).square().sum(), optimizer) as scaled:
        scaled.backward()
    gradient = net[0].weight.grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense().float(), wanted.weight.grad.to_dense(), rtol=0.02, atol=0.02)
    optimizer.step()


# Recurrent networks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_has_its_own_weights_after_a_call(kind):
    net, optimizer = initialized(kind(4, 4))
    for _ in range(2):
        out = net(torch.ones(3, 2, 4))[0]
        assert all(weight is own for weight, own in zip(net._flat_weights, net.parameters(), strict=True))
        with amp.scale_loss(out.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


# Parameters that a call writes

WRITES = {
    "in place": lambda part: torch.no_grad()(part.weight.clamp_)(max=0.5),
    "p.data =": lambda part: setattr(part.weight, "data", part.weight.data.clamp(max=0.5)),
    "copy_": lambda part: torch.no_grad()(part.weight.copy_)(part.weight.clamp(max=0.5)),
    "a new parameter": lambda part: setattr(part, "weight", nn.Parameter(part.weight.detach().clamp(max=0.5))),
}


class Clipping(nn.Linear):
    def __init__(self, write):
        super().__init__(4, 1)
        self.write = write

    def forward(self, x):
        self.write(self)
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_that_a_call_writes_is_refused_unless_its_module_is_kept(write, mode):
    net = nn.Sequential(nn.Linear(4, 4), Clipping(WRITES[write]))
    nn.init.ones_(net[1].weight)
    before = [p.clone() for p in net.parameters()]
    initialized(net)
    said = r"wrote to 'weight' of Clipping.*outside of the call.*keep_fp32_modules=\['1'\]"
    for _ in range(2):
        with pytest.raises(AmpUsageError, match=said), mode():
            net(torch.ones(2, 4))
    net[1].write = lambda part: None
    net(torch.ones(2, 4))  # nothing of the failed calls is left
    net[1].write = WRITES[write]
    assert all(map(torch.equal, net.parameters(), before))
    WRITES[write](net[1])  # between calls it may
    amp.shutdown()
    nn.init.ones_(net[1].weight)
    initialized(net, keep_fp32_modules=["1"])
    net(torch.ones(2, 4))
    assert (net[1].weight == 0.5).all()


# Number of operations


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(self.body(x) + x)


class Counted(pl.LightningModule):
    """A network with the layers of ResNet-50: 53 convolutions, each with a batch norm, and a linear layer."""

    def __init__(self):
        super().__init__()
        stem = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
        self.net = nn.Sequential(*stem, *(Residual(4) for _ in range(26)), *head)
        self.operations = []

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch), torch.zeros(len(batch), dtype=torch.long))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9, foreach=True)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 3, 8, 8), batch_size=2)

    def on_train_batch_start(self, batch, index):
        self.mode = Counter()
        self.mode.__enter__()

    def on_train_batch_end(self, outputs, batch, index):
        self.mode.__exit__(None, None, None)
        self.operations.append(self.mode.count)


class Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(*plugins):
    module = Counted()
    quiet_trainer(max_epochs=1, plugins=[*plugins]).fit(module)
    return module.operations[-1]


def test_a_step_runs_no_more_operations_than_lightnings_mixed_precision():
    stock = operations(MixedPrecision("bf16-mixed", "cpu"))
    assert stock > 300
    scaled = operations(MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", 1024.0)))
    for level in ("O1", "O2"):
        assert operations(ApexAMP(level)) <= stock
        assert operations(ApexAMP(level, dtype=torch.float16, loss_scale=1.0)) <= stock
        scaler = ApexGradScaler(max_scale=1024.0)
        assert operations(ApexAMP(level, dtype=torch.float16, scaler=scaler)) <= scaled + 2
