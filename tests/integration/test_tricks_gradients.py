"""ExactAccumulation against the gradients of big batches, and GradToNone, which changes no number, in a Trainer."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, ExactAccumulation, GradToNone
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer


def gradients(parameters):
    return [p.grad.float().clone() for p in parameters if p.grad is not None]


class Net(LightningModule):
    """Notes the gradients of each step, and before each forward pass whether there are any."""

    def __init__(self, lr=0.1, skip=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(1))
        self.lr, self.skip, self.gradients, self.held = lr, skip, [], []

    def loss(self, x):
        return self.net(x).square().mean()

    def parameters_of(self, optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    def training_step(self, batch, batch_idx):
        updated = [p for optimizer in self.trainer.optimizers for p in self.parameters_of(optimizer)]
        self.held.append(any(p.grad is not None for p in updated))
        return None if batch_idx == self.skip else self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(gradients(self.parameters_of(optimizer)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches(n, size=3):
    return DataLoader(torch.randn(n, 4, generator=torch.Generator().manual_seed(7)), batch_size=size)


def fit(model, *callbacks, n=18, level=None, **flags):
    plugins = [ApexAMP(level, loss_scale="dynamic")] if level else []
    settings = {"max_epochs": 2, "plugins": plugins, "callbacks": list(callbacks), **flags}
    quiet_trainer(**settings).fit(model, batches(n))
    return model


# ExactAccumulation


def big_batches(n, windows, lr=0.1, clip=None, mean_of_batches=False):
    """One big batch a step, in a plain loop of an epoch for each length of the windows."""
    model, seen = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for accumulate in windows:
        for start in range(0, n, 3 * accumulate):
            window = list(batches(n))[start // 3 : start // 3 + accumulate]
            optimizer.zero_grad()
            if mean_of_batches:
                torch.stack([model.loss(x) for x in window]).mean().backward()
            else:
                model.loss(torch.cat(window)).backward()
            seen.append(gradients(model.parameters()))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model, seen


def close(model, reference, seen, tolerance=1e-6):
    ours, theirs = [[*model.gradients, [*model.parameters()]], [*seen, [*reference.parameters()]]]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # once a process
def test_a_batch_without_a_loss_does_not_count():
    model, reference = Net(lr=0.0, skip=1), Net()
    fit(model, ExactAccumulation(), n=9, max_epochs=1, accumulate_grad_batches=4)
    first, _, last = batches(9)
    reference.loss(torch.cat([first, last])).backward()
    close(model, Net(), [gradients(reference.parameters())])


SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)
PRECISIONS = {
    "32": (list, 1e-6),
    # The scale is a power of two, so float32 gradients lose nothing by it.
    "O0, scaled": (lambda: [ApexAMP("O0", loss_scale=1024.0)], 1e-6),
    # bfloat16 has 8 bits: the gradients of single batches round at 2^-8, those of the big batch elsewhere.
    "O1": (lambda: [ApexAMP("O1", loss_scale=1024.0)], 2e-2),
    "O2": (lambda: [ApexAMP("O2", loss_scale="dynamic")], 2e-2),
    # float16 has 11 bits. Lightning refuses it on a CPU only because its default scaler is CUDA's.
    "16-mixed": (lambda: [MixedPrecision("16-mixed", "cpu", SCALER)], 1e-3),
}


@pytest.mark.parametrize(("n", "accumulate", "weight", "clip", "precision"), [
    (30, 16, None, None, "32"),  # 10 batches in one window; below in windows of 4, 4, 2
    # The last batch has 2 samples.
    (29, 4, None, None, "32"), (29, 4, len, None, "32"), (29, 4, lambda x: torch.tensor(len(x)), None, "32"),
    (30, 4, None, 0.05, "32"), *((30, 4, len, 0.05, precision) for precision in PRECISIONS),
])  # fmt: skip
def test_every_window_equals_the_big_batch(n, accumulate, weight, clip, precision):
    plugins, tolerance = PRECISIONS[precision]
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "plugins": plugins()}
    model = fit(Net(), ExactAccumulation(weight), n=n, **settings)
    alike = n == 29 and weight is None  # every batch counts the same
    close(model, *big_batches(n, [accumulate] * 2, clip=clip, mean_of_batches=alike), tolerance)


def test_a_scheduled_accumulation_is_followed():
    model = fit(Net(), GradientAccumulationScheduler({0: 4, 1: 16}), ExactAccumulation(), n=30)
    close(model, *big_batches(30, [4, 16]))


@pytest.mark.parametrize(("n", "accumulate", "weight"), [(30, 5, None), (30, 1, None), (29, 1, len)])
def test_where_every_window_is_full_it_says_so(n, accumulate, weight):
    with pytest.warns(NoEffectWarning, match="ExactAccumulation changes nothing here"):
        fit(Net(), ExactAccumulation(weight), n=n, max_epochs=1, accumulate_grad_batches=accumulate)


class Manual(Net):
    automatic_optimization = False


class Quasi(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Second(ExactAccumulation):
    state_key = "second"  # Lightning itself refuses two with the same key


@pytest.mark.parametrize(("model", "make", "message"), [
    (Manual, list, "manual optimization divides its losses itself"),
    (Net, lambda: [Second()], "several of them"),
    (Quasi, list, "LBFGS runs a batch several times"),
    (Net, lambda: [Second(3)], r"ExactAccumulation\(weight\): expected a function .* got 3"),
])  # fmt: skip
def test_what_accumulates_otherwise_is_refused(model, make, message):
    with pytest.raises((MisconfigurationException, TypeError), match=message):
        fit(model(), ExactAccumulation(), *make())


# GradToNone


class Clears(Net):
    """Manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Keeps(Net):
    """Never clears its gradients."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Lookahead(torch.optim.Optimizer):
    """As it is widespread: an Optimizer that never calls its constructor."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, {}

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Lars:
    """Only claims to be an Optimizer."""

    __class__ = property(lambda self: torch.optim.Optimizer)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name in ("param_groups", "state", "defaults", "zero_grad", "state_dict", "load_state_dict"):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def step(self, closure=None):
        return self.inner.step(closure)


class Forwards(Lars):
    """Its inner optimizer answers for it."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


# Lightning asks a protocol, which since Python 3.12 sees nothing that __getattr__ gives.
LOOKS_PAST_GETATTR = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Lightning refuses such a wrapper")


def wrapped(wrap):
    class Wraps(Net):
        def configure_optimizers(self):
            return wrap(super().configure_optimizers())

    return Wraps


def same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(("make", "flags", "warning"), [
    (Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, ""),
    (Net, {"accumulate_grad_batches": 2, "level": "O2"}, ""),
    pytest.param(wrapped(Forwards), {}, "", marks=LOOKS_PAST_GETATTR),
    (Keeps, {}, "Keeps.optimizer_zero_grad decides when gradients are cleared"),
    (Clears, {}, "manual optimization clears gradients itself"),
    (wrapped(Lookahead), {}, r"Lookahead does not call Optimizer.__init__"),
    pytest.param(
        wrapped(Lars), {"level": "O2"}, r"Lars does not call Optimizer.__init__", marks=LOOKS_PAST_GETATTR
    ),
])  # fmt: skip
def test_the_numbers_stay_and_the_gradients_go_or_it_warns(make, flags, warning):
    plain = fit(make(), **flags)
    with pytest.warns(NoEffectWarning, match=warning) if warning else nullcontext():
        released = fit(make(), GradToNone(), **flags)
    same(plain, fit(make(), strategy="turbo", **flags))  # says so in its log
    same(plain, released)
    window = flags.get("accumulate_grad_batches", 1)
    if not warning:
        assert plain.held[2 * window]
        assert not released.held[2 * window]
    if window == 2:
        assert released.held[2 * window + 1]  # in mid-window they have to stay


def test_the_last_step_of_weight_averaging_has_its_gradients():
    def run(*callbacks, **flags):
        model = Net()
        model.net.insert(1, nn.BatchNorm1d(8))
        averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return fit(model, averaging, *callbacks, max_epochs=3, gradient_clip_val=0.5, **flags)

    plain = run()
    with pytest.warns(NoEffectWarning, match="StochasticWeightAveraging makes one more step with the last gradients"):
        same(plain, run(GradToNone()))
    same(plain, run(strategy="turbo"))


def test_what_it_refuses_and_bucket_views_of_ddp():
    strategy = SimpleNamespace(handles_gradient_accumulation=True)
    trainer = SimpleNamespace(strategy=strategy, model=SimpleNamespace(gradient_as_bucket_view=True))
    with pytest.raises(MisconfigurationException, match="keeps and clears gradients itself"):
        GradToNone().setup(trainer, Net(), "fit")
    with pytest.warns(NoEffectWarning, match="gradients are views of DDP's buckets"):
        GradToNone().on_train_start(trainer, Net())
