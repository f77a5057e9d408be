"""ExactAccumulation under a real Trainer, against the gradients of big batches."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import ApexAMP, ExactAccumulation
from lightning_turbo.errors import NoEffectWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning's own
    "ignore:'set_vital' is deprecated",  # torchdata's loader
)
FLAGS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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


@pytest.mark.parametrize(("n", "accumulate", "weight", "clip"), [
    (30, 4, None, None), (30, 4, None, 0.05), (30, 16, None, None),  # 10 batches: windows of 4, 4, 2, and of 10
    (29, 4, None, None), (29, 4, size, None), (29, 4, size_on_device, None),  # the last batch has 2 samples
])  # fmt: skip
def test_the_last_window_equals_the_big_batch(n, accumulate, weight, clip):
    model = Net()
    fit(model, n, 3, accumulate, [ExactAccumulation(weight)], gradient_clip_val=clip)
    alike = n == 29 and weight is None  # every batch counts the same
    close(model, *big_batches(n, 3, accumulate, clip=clip, mean_of_batches=alike))


def test_lightning_alone_gets_it_wrong():
    """The gap that the callback closes is still there."""
    model = Net(lr=0.0)
    fit(model, 30, 3, 4, [], max_epochs=1)
    _, seen = big_batches(30, 3, 4, epochs=1, lr=0.0)
    ratios = [a[0].norm() / b[0].norm() for a, b in zip(model.gradients, seen, strict=True)]
    assert torch.stack(ratios).tolist() == pytest.approx([1.0, 1.0, 0.5], rel=1e-5)


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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weight", [None, size])
def test_it_is_right_with_every_precision(precision, weight):
    make, tolerance = PRECISIONS[precision]
    model = Net()
    fit(model, 30, 3, 4, [ExactAccumulation(weight)], gradient_clip_val=0.5, **make())
    close(model, *big_batches(30, 3, 4, clip=0.5), rtol=tolerance, atol=tolerance)


class StopAt(Callback):
    """Saves a checkpoint after a batch and ends the run."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint("stopped.ckpt")
            trainer.should_stop = True


@pytest.mark.parametrize("stop", [1, 3, 8, 11])  # in mid-window, at its end, in the short one, in the next epoch
@pytest.mark.parametrize("weight", [None, size])
def test_save_load_go_on_equals_never_having_stopped(stop, weight):
    def run(callbacks, ckpt_path=None, **flags):
        model = Net(momentum=0.9)
        trainer = Trainer(**FLAGS, max_epochs=2, accumulate_grad_batches=4, callbacks=callbacks, **flags)
        trainer.fit(model, StatefulDataLoader(Points(29), batch_size=3), ckpt_path=ckpt_path)
        return model

    whole = run([ExactAccumulation(weight)])
    run([ExactAccumulation(weight), StopAt(stop)], min_epochs=0)
    resumed = run([ExactAccumulation(weight)], ckpt_path="stopped.ckpt")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


SCALES = {
    "32": list,
    "O1": lambda: [ApexAMP("O1", dtype=torch.float16, loss_scale=128.0)],
    "O2": lambda: [ApexAMP("O2", dtype=torch.float16, max_loss_scale=1024.0)],
    "16-mixed": lambda: [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
}


@pytest.mark.filterwarnings("ignore:The checkpoint at .* holds no loss scaler's state")
@pytest.mark.parametrize(("saved", "loaded"), [("32", "O1"), ("O1", "O2"), ("O2", "16-mixed"), ("16-mixed", "32")])
def test_a_window_goes_on_at_another_scale(saved, loaded):
    def run(precision, callbacks, **settings):
        model = Net(lr=1.0)
        plugins = SCALES[precision]()
        trainer = Trainer(**FLAGS, max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks, plugins=plugins)
        trainer.fit(model, StatefulDataLoader(Points(15), batch_size=3), **settings)
        return model

    whole = run("32", [ExactAccumulation()])
    run(saved, [ExactAccumulation(), StopAt(3)])
    resumed = run(loaded, [ExactAccumulation()], ckpt_path="stopped.ckpt")
    start, end, again = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (Net(), whole, resumed))
    assert torch.allclose(end, again, rtol=0.02, atol=0.01)
    assert (end - start).abs().max() > 0.15


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
])  # fmt: skip
def test_what_accumulates_otherwise_is_refused(model, callbacks, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(model(), 30, 3, 1, [ExactAccumulation(), *[make() for make in callbacks]])


def test_an_impossible_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight: expected .* got -1"):
        fit(Net(), 30, 3, 4, [ExactAccumulation(lambda batch: -1)])
    with pytest.raises(TypeError, match=r"ExactAccumulation\(weight\): expected a function .* got 3"):
        ExactAccumulation(3)
