"""EffectiveBatchSize in a Trainer: it accumulates as a plain loop does, and schedulers see the scaled learning rate."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_turbo import EffectiveBatchSize
from lightning_turbo.optim import lr_factor
from tests.convolutions import Net, fit
from tests.versions import FINDS_RATES

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")


def train_plainly(model, window, rates):
    """Accumulation in a plain loop, with a learning rate for each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = list(model.train_dataloader()) * 3
    for step, start in enumerate(range(0, len(batches), window)):
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        for batch in batches[start : start + window]:
            (model.loss(batch) / window).backward()
        optimizer.step()


def warmed_up(optimizer, trainer):
    return {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 5, total_iters=3), "interval": "step"}


def test_effective_batch_size_accumulates_and_scales_the_learning_rates(tmp_path):
    model, reference = Net(warmed_up, lr=0.02 * lr_factor("linear", 20, 4)), Net()
    monitor = LearningRateMonitor()
    trainer = fit(model, EffectiveBatchSize(20, batch_size=4), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    rates = [0.02, 0.02 + 0.08 / 3, 0.02 + 0.16 / 3, 0.1, 0.1, 0.1]
    assert model.rates == pytest.approx(rates)
    train_plainly(reference, 5, rates)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert trainer.accumulate_grad_batches == 5
    trainer.save_checkpoint("scaled.ckpt")
    saved = torch.load("scaled.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.1)
    head, *rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert {"effective_batch_size", "lr-SGD"} <= set(head.split(","))
    assert any("20.0" in row for row in rows)


def test_a_second_fit_and_a_test_in_between_keep_the_effective_batch_size():
    trainer = fit(Net(lr=0.01), EffectiveBatchSize(8, batch_size=4), max_epochs=1)
    trainer.test(Net(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(lr=0.01))
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (2, 10)


class Silent(Net):
    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=None, sampler=[[0, 1], [2, 3]])


def test_a_loader_without_a_batch_size_is_accepted():
    assert fit(Silent(), EffectiveBatchSize(4, batch_size=2)).accumulate_grad_batches == 2


def one_cycle(optimizer, trainer):
    steps = int(trainer.estimated_stepping_batches)
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}


@pytest.mark.filterwarnings("ignore:Be aware that when using", "ignore:You're resuming from a")  # set by the finder
@pytest.mark.usefixtures("_no_tqdm_monitor")
@pytest.mark.parametrize("finder", [False, pytest.param(True, marks=FINDS_RATES)])
def test_estimated_stepping_batches_includes_the_accumulation(finder):
    finders = [LearningRateFinder(num_training_steps=5, update_attr=False)] if finder else []
    trainer = fit(Net(one_cycle), *finders, EffectiveBatchSize(16, batch_size=4), limit_val_batches=0)
    steps = [trainer.lr_scheduler_configs[0].scheduler.total_steps]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(Net(one_cycle, n=72))  # other data
    steps.append(trainer.lr_scheduler_configs[0].scheduler.total_steps)
    assert steps == [9, 25]  # three epochs of ceil(10 / 4) steps, five of ceil(18 / 4)
    assert trainer.global_step == 9 + 10


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fit(Manual(), EffectiveBatchSize(8, batch_size=4)), "manual optimization sets its own windows. Remove"),
    (lambda: EffectiveBatchSize(8, batch_size=0), "batch_size: expected an integer of 1 or more, got 0"),
    (lambda: fit(Net(), EffectiveBatchSize(10, batch_size=4)), r"=10\): expected a multiple of 4, .* for example 12\."),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=2)), r"batch_size=2\): expected the batch size .*has 4"),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=4), accumulate_grad_batches=3),
     r"accumulate_grad_batches=3\) sets it too"),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=4), GradientAccumulationScheduler({0: 2})),
     "GradientAccumulationScheduler sets accumulate_grad_batches too"),
])  # fmt: skip
def test_impossible_values_are_refused(make, message):
    with pytest.raises((ValueError, TypeError, MisconfigurationException), match=message):
        make()
