"""ExactAccumulation in a Trainer, compared with the gradients of large batches in a plain loop."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, ExactAccumulation
from lightning_turbo.callbacks.exact_accumulation import _sum_over_ranks
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer


def gradients(parameters):
    return [p.grad.float().clone() for p in parameters if p.grad is not None]


class Net(LightningModule):
    """Records the gradients of each step."""

    def __init__(self, lr=0.1, skip=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(1))
        self.lr, self.skip, self.gradients = lr, skip, []

    def loss(self, x):
        return self.net(x).square().mean()

    def training_step(self, batch, batch_idx):
        return None if batch_idx == self.skip else self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(gradients(p for group in optimizer.param_groups for p in group["params"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches(n, size=3):
    return DataLoader(torch.randn(n, 4, generator=torch.Generator().manual_seed(7)), batch_size=size)


def fit(model, *callbacks, n=18, level=None, **flags):
    plugins = [ApexAMP(level, loss_scale="dynamic")] if level else []
    settings = {"max_epochs": 2, "plugins": plugins, "callbacks": list(callbacks), **flags}
    quiet_trainer(**settings).fit(model, batches(n))
    return model


def big_batches(n, windows, lr=0.1, clip=None, mean_of_batches=False):
    """Train on one large batch per step in a plain loop, one epoch for each window length."""
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


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # only once per process
def test_a_batch_without_a_loss_does_not_count():
    model, reference = Net(lr=0.0, skip=1), Net()
    fit(model, ExactAccumulation(), n=9, max_epochs=1, accumulate_grad_batches=4)
    first, _, last = batches(9)
    reference.loss(torch.cat([first, last])).backward()
    close(model, Net(), [gradients(reference.parameters())])


SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)
PRECISIONS = {
    "32": (list, 1e-6),
    # The scale is a power of two, so float32 gradients stay exact.
    "O0, scaled": (lambda: [ApexAMP("O0", loss_scale=1024.0)], 1e-6),
    # bfloat16 has 8 bits of precision. Gradients of small batches and of the large batch are rounded differently.
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
def test_every_accumulation_window_equals_one_large_batch(n, accumulate, weight, clip, precision):
    plugins, tolerance = PRECISIONS[precision]
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "plugins": plugins()}
    model = fit(Net(), ExactAccumulation(weight), n=n, **settings)
    alike = n == 29 and weight is None  # every batch counts the same
    close(model, *big_batches(n, [accumulate] * 2, clip=clip, mean_of_batches=alike), tolerance)


def test_exact_accumulation_follows_a_gradient_accumulation_scheduler():
    model = fit(Net(), GradientAccumulationScheduler({0: 4, 1: 16}), ExactAccumulation(), n=30)
    close(model, *big_batches(30, [4, 16]))


@pytest.mark.parametrize(("n", "accumulate", "weight"), [(30, 5, None), (30, 1, None), (29, 1, len)])
def test_exact_accumulation_warns_if_every_window_is_full(n, accumulate, weight):
    with pytest.warns(NoEffectWarning, match="ExactAccumulation has no effect"):
        fit(Net(), ExactAccumulation(weight), n=n, max_epochs=1, accumulate_grad_batches=accumulate)


class Manual(Net):
    automatic_optimization = False


class Quasi(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Second(ExactAccumulation):
    state_key = "second"  # Lightning refuses two callbacks with the same key


@pytest.mark.parametrize(("model", "make", "message"), [
    (Manual, list, "manual optimization divides its losses itself"),
    (Net, lambda: [Second()], "several of these"),
    (Quasi, list, "got LBFGS, which runs it several times"),
    (Net, lambda: [Second(3)], r"ExactAccumulation\(weight\): expected a function .* got 3"),
])  # fmt: skip
def test_exact_accumulation_refuses_other_kinds_of_accumulation(model, make, message):
    with pytest.raises((MisconfigurationException, TypeError), match=message):
        fit(model(), ExactAccumulation(), *make())


def test_a_strategy_that_accumulates_is_refused_only_in_training():
    strategy = type("DeepSpeedStrategy", (), {"handles_gradient_accumulation": True})()
    callback = ExactAccumulation()
    trainer = SimpleNamespace(strategy=strategy, callbacks=[callback])
    for stage in ("validate", "test", "predict"):
        callback.setup(trainer, Net(), stage)
        callback.setup(trainer, Manual(), stage)
    with pytest.raises(MisconfigurationException, match=r"DeepSpeedStrategy accumulates too\. Remove"):
        callback.setup(trainer, Net(), "fit")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_an_accumulation_window_without_a_loss_does_not_change_the_weights():
    class Never(Net):
        def training_step(self, batch, batch_idx):
            return None

    model = fit(Never(), ExactAccumulation(), n=9, max_epochs=1, accumulate_grad_batches=2)
    assert model.gradients == [[], []]
    assert all(map(torch.equal, model.parameters(), Net().parameters()))


@pytest.mark.parametrize("total", [3, 2.5, torch.tensor(3), torch.tensor(2.5, dtype=torch.float16)])
def test_weights_of_ranks_are_added_in_float64(total):
    def reduce(own, reduce_op):
        assert reduce_op == "sum"
        return own + 2**40 + 0.25  # from the other ranks

    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=reduce)
    assert _sum_over_ranks(strategy, total).item() == float(total) + 2**40 + 0.25


def test_an_unfinished_accumulation_window_does_not_count_in_the_next_epoch():
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 5 else None  # after the first batch of the second window

    settings = {"accumulate_grad_batches": 4, "max_epochs": 3}
    exact = fit(Ends(), ExactAccumulation(), n=30, **settings)
    plain = fit(Ends(), n=30, **settings)
    assert all(torch.equal(a, b) for a, b in zip(exact.parameters(), plain.parameters(), strict=True))
