"""The other techniques around the step under a real Trainer."""

import copy
import math

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import (
    ApexAMP,
    DropBiasBeforeNorm,
    EffectiveBatchSize,
    ExactAccumulation,
    MemoryFormat,
    TurboStrategy,
    cyclic_lr,
    lr_range,
)
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn import set_memory_format
from lightning_turbo.optim import lr_factor
from tests.trainers import quiet_trainer
from tests.versions import FINDS_RATES

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")


class Net(LightningModule):
    """A small convolution network on noise with a signal; notes the learning rate of every optimizer step."""

    def __init__(self, schedule=None, lr=0.1, batch_size=4, n=40):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
        self.schedule, self.lr, self.batch_size, self.n = schedule, lr, batch_size, n
        self.rates, self.losses = [], []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def train_dataloader(self):
        x = torch.randn(self.n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.mean((1, 2, 3))[:, None]), batch_size=self.batch_size)

    test_dataloader = train_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self.trainer)}


def fit(model, *callbacks, path=None, **flags):
    trainer = quiet_trainer(**{"max_epochs": 3, "callbacks": list(callbacks), **flags})
    trainer.fit(model, ckpt_path=path)
    return trainer


# cyclic_lr


def preview(base_lr, max_lr, steps, **cycle):
    """The rates of a plain loop."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = cyclic_lr(optimizer, base_lr, max_lr, **cycle)["scheduler"], []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def by_epochs(optimizer, trainer):
    return cyclic_lr(optimizer, 0.01, 0.5, epochs_up=1, epochs_down=0.5, trainer=trainer)


@pytest.mark.parametrize(("accumulate", "per_epoch"), [(1, 10), (4, 3)])
def test_the_trainer_sizes_the_cycle_and_steps_it(accumulate, per_epoch):
    fit(model := Net(by_epochs), accumulate_grad_batches=accumulate)
    cycle = {"epochs_up": 1, "epochs_down": 0.5, "steps_per_epoch": per_epoch}
    assert model.rates == pytest.approx(preview(0.01, 0.5, steps=3 * per_epoch, **cycle))


def test_a_skipped_step_does_not_advance_the_cycle():
    class Spikes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx in (0, 3) else loss

    model = Spikes(lambda o, t: cyclic_lr(o, 0.001, 0.05, step_size_up=4, trainer=t))
    fit(model, max_epochs=1, plugins=[ApexAMP("O1", loss_scale="dynamic", dtype=torch.bfloat16)])
    steps = [0, 0, 1, 2, 2, 3, 4, 5, 6, 7]  # made before each of the ten batches, two of which are skipped
    cycle = preview(0.001, 0.05, steps=8, step_size_up=4)
    assert model.rates == pytest.approx([cycle[step] for step in steps])


@pytest.mark.filterwarnings("ignore:.*The parameter.*")
def test_a_cycle_in_epochs_is_sized_after_the_trials_of_the_batch_size_finder():
    model = Net(by_epochs)
    trainer = fit(model, BatchSizeFinder(mode="power", steps_per_trial=2, init_val=2, max_trials=2), max_epochs=2)
    steps = 40 // model.batch_size
    assert steps == trainer.num_training_batches < 20
    assert trainer.lr_scheduler_configs[0].scheduler.total_size == steps + round(steps / 2)
    expected = preview(0.01, 0.5, steps=2 * steps, epochs_up=1, epochs_down=0.5, steps_per_epoch=steps)
    assert model.rates[-2 * steps :] == pytest.approx(expected)


@pytest.fixture
def _no_tqdm_monitor(monkeypatch):
    """Lightning's finder shows a bar of tqdm, which keeps a thread for the process."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.usefixtures("_no_tqdm_monitor")
def test_lr_range_proposes_bounds_and_leaves_the_model_alone():
    model = Net(n=1600, batch_size=20)
    before = copy.deepcopy(model.state_dict())
    found = lr_range(quiet_trainer(max_epochs=1), model, min_lr=1e-5, max_lr=10.0, num_training=60)
    assert 1e-5 < found.base_lr < found.max_lr < 10.0
    assert found.losses[found.lrs.index(found.base_lr)] > found.losses[found.lrs.index(found.max_lr)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.lr == 0.1


# EffectiveBatchSize


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


def test_it_accumulates_and_the_scaled_rates_are_seen_by_all(tmp_path):
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


def test_a_second_run_and_a_test_between_keep_the_size():
    trainer = fit(Net(lr=0.01), EffectiveBatchSize(8, batch_size=4), max_epochs=1)
    trainer.test(Net(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(lr=0.01))
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (2, 10)


class Silent(Net):
    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=None, sampler=[[0, 1], [2, 3]])


def test_a_loader_that_does_not_know_its_batch_size_is_believed():
    assert fit(Silent(), EffectiveBatchSize(4, batch_size=2)).accumulate_grad_batches == 2


def one_cycle(optimizer, trainer):
    steps = int(trainer.estimated_stepping_batches)
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}


@pytest.mark.filterwarnings("ignore:Be aware that when using", "ignore:You're resuming from a")  # by the finder
@pytest.mark.usefixtures("_no_tqdm_monitor")
@pytest.mark.parametrize("finder", [False, pytest.param(True, marks=FINDS_RATES)])
def test_the_estimate_of_the_steps_counts_the_accumulation(finder):
    finders = [LearningRateFinder(num_training_steps=5, update_attr=False)] if finder else []
    trainer = fit(Net(one_cycle), *finders, EffectiveBatchSize(16, batch_size=4), limit_val_batches=0)
    steps = [trainer.lr_scheduler_configs[0].scheduler.total_steps]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(Net(one_cycle, n=72))  # other data
    steps.append(trainer.lr_scheduler_configs[0].scheduler.total_steps)
    assert steps == [9, 25]  # three epochs of ceil(10 / 4) steps, five of ceil(18 / 4)
    assert trainer.global_step == 9 + 10


@pytest.mark.parametrize(("make", "message"), [
    (lambda: lr_range(quiet_trainer(), Net(), max_lr=math.inf), r"expected 0 < min_lr < max_lr, got .*inf"),
    (lambda: lr_range(3, Net()), r"lr_range\(trainer\): expected a Trainer, got 3"),
    (lambda: EffectiveBatchSize(8, batch_size=0), "batch_size: expected an integer of 1 or more, got 0"),
    (lambda: fit(Net(), EffectiveBatchSize(10, batch_size=4)), r"=10\): expected a multiple of 4, .* for example 12\."),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=2)), r"batch_size=2\): expected the batch size .*has 4"),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=4), accumulate_grad_batches=3),
     r"accumulate_grad_batches=3\) sets it too"),
    (lambda: fit(Net(), EffectiveBatchSize(8, batch_size=4), GradientAccumulationScheduler({0: 2})),
     "GradientAccumulationScheduler sets accumulate_grad_batches too"),
    (lambda: DropBiasBeforeNorm(3), r"DropBiasBeforeNorm\(network\): expected a path .* got 3"),
    (lambda: DropBiasBeforeNorm("nets").setup(quiet_trainer(), Net(), "fit"), r"one of \['net'\], got 'nets'"),
])  # fmt: skip
def test_impossible_values_are_refused(make, message):
    with pytest.raises((ValueError, TypeError, MisconfigurationException), match=message):
        make()


def test_batches_of_a_window_that_an_epoch_left_open_do_not_count_in_the_next():
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 5 else None  # after the first batch of the second window

    settings = {"accumulate_grad_batches": 4, "max_epochs": 3}
    fit(exact := Ends(), ExactAccumulation(), **settings)
    fit(plain := Ends(), **settings)
    assert all(torch.equal(a, b) for a, b in zip(exact.parameters(), plain.parameters(), strict=True))


# DropBiasBeforeNorm and MemoryFormat


def test_a_checkpoint_with_biases_can_be_tested_without():
    trainer = fit(old := Net(), max_epochs=1)
    trainer.save_checkpoint("old.ckpt")
    expected = trainer.test(old, verbose=False)[0]["loss"]
    for callback in (DropBiasBeforeNorm(), DropBiasBeforeNorm("net")):
        tester = quiet_trainer(callbacks=[callback])
        got = tester.test(model := Net(), ckpt_path="old.ckpt", verbose=False)[0]["loss"]
        assert model.net[0].bias is None
        assert got == pytest.approx(expected, rel=1e-4)


class Calls(LightningModule):
    """Has no forward, as where the training step calls the network: with so many networks, and one without norms."""

    def __init__(self, networks=1):
        super().__init__()
        self.head = nn.Linear(4, 2)
        for number in range(networks):
            setattr(self, f"net{number}", nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))


def test_a_module_without_a_forward_has_its_one_network_traced():
    callback = DropBiasBeforeNorm()
    callback.setup(quiet_trainer(), module := Calls(), "fit")
    assert module.net0[0].bias is None
    for networks, named in ((2, r"\['net0', 'net1'\]"), (0, r"\['head'\]")):
        with pytest.raises(
            ValueError, match=f"expected the name of a child, for example one of {named}, because Calls"
        ):
            DropBiasBeforeNorm().setup(quiet_trainer(), Calls(networks), "fit")


def test_biases_go_before_the_optimizer_is_made_and_a_checkpoint_without_them_loads_into_the_original(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.callbacks.drop_bias.rank_zero_info", said.append)
    callback = DropBiasBeforeNorm()
    trainer = fit(dropped := Net(lr=0.01), callback, max_epochs=1)
    fit(whole := Net(lr=0.01), max_epochs=1)
    trainer.test(dropped, verbose=False)  # which sets the callback up again
    assert callback.report.dropped == {"net.0": "net.1"}
    assert said == [f"DropBiasBeforeNorm: {callback.report}"]
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == 5
    # The bias moves all activations before the norm, which rounds in another way.
    assert dropped.losses == pytest.approx(whole.losses, rel=1e-4)
    trainer.save_checkpoint("small.ckpt")
    original, x = Net.load_from_checkpoint("small.ckpt", weights_only=True).eval(), torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(original(x), dropped.eval()(x), rtol=1e-5, atol=1e-6)
    fit(again := Net(lr=0.01), DropBiasBeforeNorm(), path="small.ckpt", max_epochs=2)
    assert again.net[0].bias is None


@pytest.mark.parametrize("make", [
    lambda: {"callbacks": [MemoryFormat()]}, lambda: {"strategy": TurboStrategy(memory_format="channels_last")},
], ids=["callback", "strategy"])  # fmt: skip
def test_the_memory_format_is_that_of_the_weights_that_train(make):
    fit(model := Net(lr=0.01), max_epochs=1, **make())
    assert model.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    fit(plain := Net(lr=0.01), MemoryFormat("contiguous"), max_epochs=1)
    assert plain.net[0].weight.is_contiguous()
    assert model.losses == pytest.approx(plain.losses, rel=1e-4)


def test_without_layers_the_memory_format_says_why():
    class Flat(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 1))

    class Later(Flat):
        def configure_model(self):
            self.net = Net().net
            set_memory_format(self, "channels_last")

    with pytest.warns(NoEffectWarning, match="Flat has no 2D or 3D layers"):
        fit(Flat(), MemoryFormat("channels_last"), max_epochs=1)
    with pytest.warns(NoEffectWarning, match="Later makes its layers in configure_model, after setup. Call"):
        fit(model := Later(), MemoryFormat("channels_last"), max_epochs=1)
    assert model.net[0].weight.is_contiguous(memory_format=torch.channels_last)
