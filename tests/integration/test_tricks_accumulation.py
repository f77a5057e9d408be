"""ExactAccumulation under a real Trainer, against the gradients of big batches."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import ApexAMP, ExactAccumulation
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import FLAGS

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's loader


class Points(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


class Net(LightningModule):
    def __init__(self, lr=0.1, momentum=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.lr, self.momentum, self.gradients, self.skip = lr, momentum, [], ()

    def loss(self, x):
        return self.net(x).square().mean()

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.skip else self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append([p.grad.float().clone() for p in parameters])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def size(batch):
    return len(batch)


def size_on_device(batch):
    return torch.tensor(len(batch))


def fit(model, n, batch_size, accumulate, callbacks, **flags):
    trainer = Trainer(**{**FLAGS, "max_epochs": 2, "accumulate_grad_batches": accumulate, **flags}, callbacks=callbacks)
    trainer.fit(model, DataLoader(Points(n), batch_size=batch_size))
    return trainer


def big_batches(n, batch_size, accumulate, epochs=2, lr=0.1, clip=None, mean_of_batches=False):
    """One big batch a step, in a plain loop."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = list(DataLoader(Points(n), batch_size=batch_size))
    seen = []
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            if mean_of_batches:
                torch.stack([model.loss(x) for x in window]).mean().backward()
            else:
                model.loss(torch.cat(window)).backward()
            seen.append([p.grad.clone() for p in model.parameters()])
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model, seen


def close(model, reference, seen, rtol=1e-6, atol=1e-6):
    assert len(model.gradients) == len(seen)
    for a, b in zip(model.gradients, seen, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
    for x, y in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # once a process
def test_a_batch_without_a_loss_does_not_count():
    model, reference = Net(lr=0.0), Net()
    model.skip = (1,)
    fit(model, 12, 3, 4, [ExactAccumulation()], max_epochs=1, limit_train_batches=3)
    batches = list(DataLoader(Points(12), batch_size=3))
    reference.loss(torch.cat([batches[0], batches[2]])).backward()
    for a, b in zip(model.gradients[0], reference.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-6, atol=1e-6)


PRECISIONS = {
    "32": (dict, 1e-6),
    # The scale is a power of two, so float32 gradients lose nothing by it.
    "O0, scaled": (lambda: {"plugins": [ApexAMP("O0", loss_scale=1024.0)]}, 1e-6),
    # bfloat16 has 8 bits: the gradients of single batches round at 2^-8, those of the big batch elsewhere.
    "O1": (lambda: {"plugins": [ApexAMP("O1", loss_scale=1024.0)]}, 2e-2),
    "O2": (lambda: {"plugins": [ApexAMP("O2", loss_scale="dynamic")]}, 2e-2),
    # float16 has 11 bits. Lightning refuses it on a CPU only because its default scaler is CUDA's.
    "16-mixed": (
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]},
        1e-3,
    ),
}


@pytest.mark.parametrize(("n", "accumulate", "weight", "clip", "precision"), [
    (30, 4, None, None, "32"), (30, 16, None, None, "32"),  # 10 batches: windows of 4, 4, 2, and of 10
    (29, 4, None, None, "32"), (29, 4, size, None, "32"), (29, 4, size_on_device, None, "32"),  # the last has 2 samples
    *((30, 4, weight, 0.05, precision) for precision in PRECISIONS for weight in (None, size)),
])  # fmt: skip
def test_every_window_equals_the_big_batch(n, accumulate, weight, clip, precision):
    make, tolerance = PRECISIONS[precision]
    model = Net()
    fit(model, n, 3, accumulate, [ExactAccumulation(weight)], gradient_clip_val=clip, **make())
    alike = n == 29 and weight is None  # every batch counts the same
    reference = big_batches(n, 3, accumulate, clip=clip, mean_of_batches=alike)
    close(model, *reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("n", "accumulate", "weight"), [(30, 5, None), (30, 1, None), (29, 1, size)], ids=["even", "one", "one rank"]
)
def test_where_every_window_is_full_it_says_so(n, accumulate, weight):
    with pytest.warns(NoEffectWarning, match="ExactAccumulation changes nothing here"):
        fit(Net(), n, 3, accumulate, [ExactAccumulation(weight)], max_epochs=1)


def test_a_scheduled_accumulation_is_followed():
    model = Net(lr=0.0)
    fit(model, 30, 3, 1, [GradientAccumulationScheduler({0: 4, 1: 16}), ExactAccumulation()])
    seen = big_batches(30, 3, 4, epochs=1, lr=0.0)[1] + big_batches(30, 3, 16, epochs=1, lr=0.0)[1]
    close(model, Net(), seen)


class Manual(Net):
    automatic_optimization = False


class Quasi(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Second(ExactAccumulation):
    state_key = "second"  # Lightning itself refuses two with the same key


@pytest.mark.parametrize(("model", "callbacks", "message"), [
    (Manual, [], "manual optimization divides its losses itself"),
    (Net, [Second], "several of them"),
    (Quasi, [], "LBFGS runs a batch several times"),
    (Net, [lambda: Second(3)], r"ExactAccumulation\(weight\): expected a function .* got 3"),
])  # fmt: skip
def test_what_accumulates_otherwise_is_refused(model, callbacks, message):
    with pytest.raises((MisconfigurationException, TypeError), match=message):
        fit(model(), 30, 3, 1, [ExactAccumulation(), *[make() for make in callbacks]])
