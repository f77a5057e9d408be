"""What a network keeps between its calls at O2, beside stock ``bf16-mixed``: averages, counters, codebooks."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo.errors import AmpUsageError
from tests.tables import every_pair
from tests.trainers import quiet_trainer

BF16 = torch.bfloat16
DATA = torch.randn(24, 16, 4, generator=torch.Generator().manual_seed(1)) + 2.0


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def train(part, level, between=lambda part: None):
    """Train a network around ``part``: in float32, under torch's autocast as ``bf16-mixed`` does, or at O2."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    if level == "O2":
        amp.initialize(net, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    for x in DATA:
        between(part)
        with torch.autocast("cpu", BF16, enabled=level == "bf16-mixed"):
            out = net(x)
        optimizer.zero_grad()
        (out.float() - 1).square().mean().backward()  # without a loss scale there is nothing to unscale
        optimizer.step()
    amp.shutdown()


def compare(make, kept, rtol=0.02, atol=0.005, stock="bf16-mixed", **how):
    """Compare what ``kept`` returns after training at O2 and in stock precision."""
    ends = []
    for level in ("O2", stock):
        torch.manual_seed(0)
        part = make()
        train(part, level, **how)
        ends.append(kept(part).detach().float())
    torch.testing.assert_close(*ends, rtol=rtol, atol=atol)


# Running averages

NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4, momentum=0.01),
    "batch norm without weights": lambda: nn.BatchNorm1d(4, momentum=0.01, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(16, momentum=0.01, track_running_stats=True),
    "instance norm with weights": lambda: nn.InstanceNorm1d(16, momentum=0.01, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("norm", NORMS)
def test_running_statistics(norm):
    # Beside float32, because torch's instance norm rounds its statistics under autocast.
    compare(NORMS[norm], lambda part: torch.cat([part.running_mean, part.running_var]), stock="32-true")


class Average(nn.Module):
    """Keeps a moving average of its input, beside nothing, a weight, or a module with weights."""

    def __init__(self, write, beside="nothing"):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.write = write
        self.weight = nn.Parameter(torch.ones(4)) if beside == "a weight" else None
        self.layer = nn.Linear(4, 4) if beside == "a module" else None

    def forward(self, x):
        with torch.no_grad():
            self.write(self, 3.0 + 0.1 * x.detach().float().mean(0))
        x = x - 0.01 * self.mean.to(x.dtype)
        x = x if self.weight is None else x * self.weight
        return x if self.layer is None else self.layer(x)


def by_lerp(part, now):
    part.mean.lerp_(now.to(part.mean.dtype), 0.001)


def by_mul_and_add(part, now):
    part.mean.mul_(0.999).add_(now.to(part.mean.dtype), alpha=0.001)


def by_copy(part, now):
    part.mean.copy_(0.999 * part.mean + 0.001 * now)


def by_a_new_tensor(part, now):
    part.mean = 0.999 * part.mean + 0.001 * now.to(part.mean.dtype)


@pytest.mark.parametrize("beside", ["nothing", "a weight", "a module"])
@pytest.mark.parametrize("write", [by_lerp, by_mul_and_add, by_copy, by_a_new_tensor])
def test_a_moving_average_in_a_buffer(write, beside):
    # The average moves by 0.001 of a distance of about 2 in each step, less than half precision can hold. The first
    # of 24 writes is in half precision.
    compare(lambda: Average(write, beside), lambda part: part.mean - 1, rtol=0.06, atol=0.0)


# Counters


class Counter(nn.Module):
    def __init__(self, first, beside):
        super().__init__()
        self.register_buffer("count", torch.tensor(first))
        self.layer = nn.Linear(4, 4) if beside else nn.Identity()

    def forward(self, x):
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("first", [2**24 - 3, 2044.0], ids=["integer", "float"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_counter(first, beside):
    compare(lambda: Counter(first, beside), lambda part: part.count - first, rtol=0.0, atol=0.0)


def by_a_wider_tensor(part, one):
    part.count = part.count + one.float()


def by_an_activation(part, one):
    part.count = part.count + one


def by_registering(part, one):
    part.register_buffer("count", part.count + one)


def in_place(part, one):
    part.count.add_(one)


def from_an_activation(part, one):
    """As data-dependent initialization does, in the first call."""
    if not hasattr(part, "began"):
        part.began, part.count = True, 0 * one
    part.count.add_(one)


def in_a_buffer_of_its_own(part, one):
    if not hasattr(part, "own"):
        part.register_buffer("own", 0 * one)
    part.own += one
    part.count = part.own


class Numbered(nn.Module):
    """Counts its calls in a buffer, in a number or a vector."""

    def __init__(self, write, shape, beside):
        super().__init__()
        self.register_buffer("count", torch.zeros(shape))
        self.write = write
        self.layer = nn.Linear(4, 4) if beside else nn.Identity()

    def forward(self, x):
        self.write(self, (0 * x.detach().mean(0) + 1)[: self.count.numel()].view_as(self.count))
        return self.layer(x)


@every_pair(
    ("write", "level", "shape", "beside", "mode"),
    [by_a_wider_tensor, by_an_activation, by_registering, in_place, from_an_activation, in_a_buffer_of_its_own],
    ["O2", "O3"],
    [(), (4,)],
    [False, True],
    [torch.enable_grad, torch.inference_mode],  # in training and in a Trainer's validation
)
def test_a_count_that_calls_write_in_any_way_but_data(write, level, shape, beside, mode):
    net = nn.Sequential(nn.Linear(4, 4), Numbered(write, shape, beside))
    amp.initialize(net, opt_level=level, dtype=BF16, verbosity=0)
    with mode():
        for _ in range(300):  # 256 is the last integer that bfloat16 counts to
            net(torch.ones(2, 4))
    count = net[1].count
    amp.shutdown()
    assert count.dtype is torch.float32
    assert count.tolist() == torch.full(shape, 300.0).tolist()


# Codebooks


class Codebook(nn.Module):
    """A vector quantizer whose codes are moving averages of the inputs next to them, in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x):
        flat = x.detach().float()
        which = nn.functional.one_hot(torch.cdist(flat, self.codes.float()).argmin(1), 8).float()
        with torch.no_grad():
            self.sizes.mul_(0.99).add_(which.sum(0), alpha=0.01)
            self.sums.mul_(0.99).add_(which.T @ flat, alpha=0.01)
            self.codes.copy_(self.sums / self.sizes[:, None].clamp(min=1e-3))
        return x + ((which @ self.codes.float()).to(x.dtype) - x).detach()


class Projected(Codebook):
    """The same, with weights in the module itself."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x * self.gain)


@pytest.mark.parametrize("make", [Codebook, Projected])
def test_a_codebook(make):
    compare(make, lambda part: torch.cat([part.codes.flatten(), part.sizes]), rtol=0.03, atol=0.03)


# A resumed run


class Averaging(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), Average(by_mul_and_add, "a weight"), nn.Linear(4, 1))

    def training_step(self, x, index):
        return (self.net(x).float() - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("plugin", [
    lambda: ApexAMP("O2", dtype=BF16), lambda: ApexAMP("O3", dtype=BF16),
    lambda: ApexAMP("O2", dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0)),
    lambda: MixedPrecision("bf16-mixed", "cpu"),
], ids=["O2", "O3", "O2 with a scale", "bf16-mixed"])  # fmt: skip
def test_a_resumed_run_has_the_averages_of_one_that_never_stopped(plugin, tmp_path):
    def fit(epochs, **how):
        module, trainer = Averaging(), quiet_trainer(max_epochs=epochs, plugins=[plugin()])
        trainer.fit(module, DataLoader(DATA, batch_size=None), **how)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return module.state_dict()

    whole = fit(2)
    fit(1)
    resumed = fit(2, ckpt_path=tmp_path / "end.ckpt")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


# Momentum encoders


class Encoder(nn.Module):
    """An encoder and its slow copy, moved within the call or between calls."""

    def __init__(self, move, within):
        super().__init__()
        self.online, self.move, self.within = nn.Linear(4, 4), move, within
        self.slow = copy.deepcopy(self.online).requires_grad_(False)
        self.average = AveragedModel(self.online, multi_avg_fn=get_ema_multi_avg_fn(0.99)).requires_grad_(False)
        with torch.no_grad():
            self.slow.weight.zero_()

    def follow(self):
        with torch.no_grad():
            self.move(self)

    def forward(self, x):
        if self.within:
            self.follow()
        return self.online(x) - 0.1 * self.slow(x) - 0.1 * self.average(x)


def each(change):
    def move(encoder):
        for slow, fast in zip(encoder.slow.parameters(), encoder.online.parameters(), strict=True):
            change(slow, fast)

    return move


MOVES = {
    "lerp_": each(lambda slow, fast: slow.lerp_(fast, 0.01)),
    "p.data =": each(lambda slow, fast: setattr(slow, "data", 0.99 * slow.data + 0.01 * fast.data)),
    "copy_": each(lambda slow, fast: slow.copy_(0.99 * slow + 0.01 * fast)),
    "AveragedModel": lambda encoder: encoder.average.update_parameters(encoder.online),
}


def slow_weights(part):
    module = part.average.module if part.average.n_averaged else part.slow
    return module.weight - (part.online.weight if part.average.n_averaged else 0)


@pytest.mark.parametrize("move", MOVES)
def test_a_momentum_encoder_that_is_moved_between_calls(move):
    compare(lambda: Encoder(MOVES[move], within=False), slow_weights, between=Encoder.follow)


@pytest.mark.parametrize("move", MOVES)
def test_a_momentum_encoder_that_its_call_moves_is_refused_with_the_remedy(move):
    with pytest.raises((AmpUsageError, RuntimeError), match="outside of the call"):
        train(Encoder(MOVES[move], within=True), "O2")
