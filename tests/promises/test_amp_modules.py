"""Modules of users at O0-O3, each beside stock Lightning or a plain loop: trained alike, or refused with a remedy."""

import copy
import io
import pickle
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo.errors import AmpStateError, AmpUsageError
from tests.trainers import quiet_trainer

LEVELS = ("O0", "O1", "O2", "O3")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Model(pl.LightningModule):
    def __init__(self, net, poison=()):
        super().__init__()
        self.net, self.poison, self.rates = net, poison, []

    def loss_of(self, out, index):
        return (out.float() - 1).square().mean() * (torch.inf if index in self.poison else 1.0)

    def training_step(self, x, index):
        return self.loss_of(self.net(x), index)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, index):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def train_dataloader(self):
        return torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))


def fit(module, **how):
    quiet_trainer(max_epochs=1, **how).fit(module)
    return module


def weights(module):
    return torch.cat([p.detach().float().flatten() for p in module.parameters()])


# Modules whose hash follows their state


class Measured(Model):
    """Has a metric beside its network and one in it."""

    def __init__(self):
        super().__init__(layers())
        self.error, self.net.inner = torchmetrics.MeanSquaredError(), torchmetrics.MeanMetric()

    def training_step(self, x, index):
        for metric, values in ((self.error, (x, x + 1)), (self.net.inner, (x,))):
            metric.update(*values)
        return self.loss_of(self.net[:3](x), index)


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_with_metrics_trains_and_is_restored(level):
    module = fit(Measured(), plugins=[ApexAMP(level)])
    assert module.error.compute() == 1.0
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())


def test_an_overflow_in_a_checked_step_of_a_module_with_metrics_does_not_end_the_run():
    module = Measured()
    module.train_dataloader = lambda: torch.ones(110, 2, 4)
    module.poison = (49,)
    plugin = ApexAMP("O1", dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0))
    fit(module, plugins=[plugin])
    assert int(plugin.scaler.skipped_steps) == 1


# Weights beside the module tree


class Tied(nn.Module):
    """Its decoder has the encoder's weight in a tuple, which no module lists."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4)
        self.decoder = (self.encoder.weight,)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.encoder(x)), self.decoder[0].t())


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_beside_the_module_tree_trains_or_is_refused_by_name(level):
    stock = fit(Model(Tied()), precision="bf16-mixed")
    module = Model(Tied())
    try:
        fit(module, plugins=[ApexAMP(level, dtype=BF16)])
    except AmpUsageError as error:
        assert level == "O2"  # at O3 the weight itself is half
        assert "decoder" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(weights(module), weights(stock), rtol=0.05, atol=0.02)


# Kept modules


class Normalized(nn.Module):
    """Subtracts a large mean, which its input must have all bits for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.body = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)

    def forward(self, x):
        return self.body(self.norm(x))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_kept_module_gets_the_networks_input_unrounded(level):
    x = 1000 + torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", BF16):
        stock = Normalized()(x)
    net = amp.initialize(Normalized(), opt_level=level, dtype=BF16, keep_fp32_modules=["norm"], verbosity=0)
    torch.testing.assert_close(net(x), stock.float(), rtol=0.02, atol=0.02)


# Copies and pickles


LOADS = """
import io, pickle, sys, torch
sys.modules["lightning_turbo"] = None  # as if it were not installed
net = pickle.load(sys.stdin.buffer)
print(next(net.parameters()).dtype, net(torch.ones(1, 4)).dtype)
"""


def test_a_pickle_made_in_the_run_loads_and_runs_without_this_package():
    net = layers()
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O2", dtype=BF16, verbosity=0)
    net(torch.ones(2, 4))
    file = io.BytesIO()
    pickle.dump(net, file)
    assert b"lightning_turbo" not in file.getvalue()
    ran = subprocess.run([sys.executable, "-c", LOADS], input=file.getvalue(), capture_output=True, check=True)
    assert ran.stdout.split() == [b"torch.float32", b"torch.float32"]


class Copying(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.net = copy.deepcopy(module.net)


def test_a_copy_made_in_the_run_is_a_float32_network():
    copying, plain, x = Copying(), layers(), torch.randn(5, 4)
    fit(Model(layers()), plugins=[ApexAMP("O2")], callbacks=[copying])
    plain.load_state_dict(copying.net.state_dict())
    assert torch.equal(copying.net(x), plain(x))


# Skipped steps and schedulers


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_advances_no_scheduler(level):
    plugin = ApexAMP(level, dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0))
    module = fit(Model(layers(), poison=(2,)), plugins=[plugin])
    plain = fit(Model(layers()))
    assert module.rates == [*plain.rates[:2], plain.rates[1], *plain.rates[2:5]]


# What is refused


def in_a_cache(net, x):
    with parametrize.cached():
        return net(x)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_calls_within_parametrize_cached_are_refused(level):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    amp.initialize(net, opt_level=level, dtype=BF16, verbosity=0)
    with pytest.raises(AmpUsageError, match=r"outside of torch.nn.utils.parametrize.cached.*or use O1"):
        in_a_cache(net, torch.ones(2, 4))
    amp.shutdown()
    amp.initialize(net, opt_level="O1", dtype=BF16, verbosity=0)
    in_a_cache(net, torch.ones(2, 4))


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Has the name of Lightning's, which needs DeepSpeed."""


@pytest.mark.parametrize("level", LEVELS)
def test_deepspeed_is_refused(level):
    with pytest.raises(AmpUsageError, match=r"got DeepSpeedStrategy\. Use DeepSpeed's own precision"):
        fit(Model(layers()), plugins=[ApexAMP(level)], strategy=DeepSpeedStrategy(torch.device("cpu")))


class DTensor(torch.Tensor):
    """Has the name of torch's sharded tensor, which needs a process group."""


@pytest.mark.parametrize("level", LEVELS)
def test_sharded_parameters_are_refused_where_weights_are_cast(level):
    net = nn.Linear(4, 2)
    net.weight = nn.Parameter(net.weight.detach().as_subclass(DTensor))
    if level in ("O0", "O1"):
        amp.initialize(net, opt_level="O1", verbosity=0)
        return
    with pytest.raises(AmpUsageError, match=r"sharded by FSDP2\. Use O1, or .*MixedPrecisionPolicy"):
        amp.initialize(net, opt_level=level, verbosity=0)


# Borders of loops


def backward(loss, optimizer, **how):
    with amp.scale_loss(loss, optimizer, **how) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulated_passes_equal_one_pass_of_the_sum(level):
    ends, x = [], torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
    for parts in (1, 4):
        net = layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, optimizer, opt_level=level, dtype=torch.float16, loss_scale=128.0, verbosity=0)
        for part in x.flatten(0, 1).chunk(parts):
            backward(net(part).square().mean() / parts, optimizer)
        optimizer.step()
        amp.shutdown()
        ends.append(weights(net))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_an_overflow_skips_one_step_and_gradients_set_to_none_are_forgotten():
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O1", dtype=torch.float16, verbosity=0)
    before = weights(net)
    backward(net(torch.ones(1, 4)).sum() * torch.inf, optimizer)
    optimizer.step()
    assert torch.equal(weights(net), before)
    backward(net(torch.ones(1, 4)).sum() * torch.inf, optimizer)
    optimizer.zero_grad()
    backward(net(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert not torch.equal(weights(net), before)
    assert weights(net).isfinite().all()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 1}}


def test_calls_without_initialize_and_other_optimizers_are_refused():
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(AmpStateError, match=r"before amp\.initialize"):
        backward(net(torch.ones(1, 4)).sum(), optimizer)
    amp.initialize(net, opt_level="O1", verbosity=0)
    with pytest.raises(AmpUsageError, match="expected optimizers of the last"):
        backward(net(torch.ones(1, 4)).sum(), optimizer)
