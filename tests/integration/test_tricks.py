"""The other techniques around the step under a real Trainer."""

import copy
import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import (
    ApexAMP,
    DropBiasBeforeNorm,
    EffectiveBatchSize,
    ExactAccumulation,
    GradToNone,
    MemoryFormat,
    cyclic_lr,
    lamb,
    lr_range,
)
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from lightning_turbo.nn import set_memory_format
from lightning_turbo.optim import preview
from tests.versions import FINDS_RATES

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*isinstance.treespec, LeafSpec.* is deprecated",
    "ignore:.*smaller than the logging interval.*",
    "ignore:Experiment logs directory",
    "ignore:.set_vital. is deprecated",
)
FLAGS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(LightningModule):
    """A small convolution network on noise with a signal; notes the learning rate of every optimizer step."""

    example_input_array = torch.zeros(2, 1, 6, 6)

    def __init__(self, schedule=None, lr=0.1, batch_size=4, n=40):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
        self.schedule, self.lr, self.batch_size, self.n = schedule, lr, batch_size, n
        self.rates, self.losses = [], []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.n, 1, 6, 6, generator=generator)
        return DataLoader(TensorDataset(x, x.mean((1, 2, 3), keepdim=False)[:, None]), batch_size=self.batch_size)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self.trainer)}


def fit(model, callbacks=(), ckpt_path=None, **flags):
    trainer = Trainer(**{**FLAGS, "max_epochs": 3, **flags}, callbacks=list(callbacks))
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


class StopAt(Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint("stopped.ckpt")
            trainer.should_stop = True


# cyclic_lr


def by_epochs(optimizer, trainer):
    return cyclic_lr(optimizer, 0.01, 0.5, epochs_up=1, epochs_down=0.5, trainer=trainer)


@pytest.mark.parametrize(("accumulate", "per_epoch"), [(1, 10), (4, 3)])
def test_the_trainer_sizes_the_cycle_and_steps_it(accumulate, per_epoch):
    model = Net(by_epochs)
    fit(model, accumulate_grad_batches=accumulate)
    expected = preview(
        0.01, 0.5, steps=3 * per_epoch, epochs_up=1, epochs_down=0.5, steps_per_epoch=per_epoch
    ).lr[0]  # fmt: skip
    assert model.rates == pytest.approx(expected)


@pytest.mark.parametrize("precision", ["16-mixed", "ApexAMP"])
def test_a_skipped_step_does_not_advance_the_cycle(precision):
    class Spikes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx in (0, 3) else loss

    if precision == "ApexAMP":
        flags = {"plugins": [ApexAMP("O1", loss_scale="dynamic", dtype=torch.bfloat16)]}
    else:
        from lightning.pytorch.plugins.precision import MixedPrecision

        flags = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))]}
    model = Spikes(lambda o, t: cyclic_lr(o, 0.001, 0.05, steps_up=4, trainer=t))
    fit(model, max_epochs=2, **flags)
    advanced = preview(0.001, 0.05, steps=17, steps_up=4).lr[0]
    # 20 batches, four of them skipped: the rate stands still after each of those.
    skipped, at, expected = {0, 3, 10, 13}, 0, []
    for batch in range(20):
        expected.append(advanced[at])
        at += batch not in skipped
    assert model.rates == pytest.approx(expected)


def test_a_run_shorter_than_the_rise_is_warned_of():
    model = Net(lambda o, t: cyclic_lr(o, 0.001, 0.05, epochs_up=2, trainer=t))
    with pytest.warns(TurboWarning, match="makes 10 steps, fewer than the 20 steps"):
        fit(model, max_epochs=1)


@pytest.mark.filterwarnings("ignore:.*The parameter.*", "error:This run makes")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_cycle_in_epochs_is_sized_after_the_trials_of_the_batch_size_finder(mode):
    model = Net(by_epochs)
    finder = BatchSizeFinder(mode=mode, steps_per_trial=2, init_val=2, max_trials=2, margin=0.0)
    trainer = fit(model, [finder], max_epochs=2)
    assert model.batch_size == 4
    expected = preview(0.01, 0.5, steps=20, epochs_up=1, epochs_down=0.5, steps_per_epoch=10).lr[0]
    assert model.rates[-20:] == pytest.approx(expected)
    assert trainer.lr_scheduler_configs[0].scheduler.total_size == 15


@pytest.fixture
def _no_tqdm_monitor(monkeypatch):
    """Lightning's finder shows a bar of tqdm, which keeps a thread for the process."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.usefixtures("_no_tqdm_monitor")
def test_lr_range_proposes_bounds_and_leaves_the_model_alone():
    model = Net(n=1600, batch_size=20)
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(**FLAGS, max_epochs=1)
    found = lr_range(trainer, model, min_lr=1e-5, max_lr=10.0, num_training=60)
    assert 1e-5 < found.base_lr < found.max_lr < 10.0
    assert found.losses[found.lrs.index(found.base_lr)] > found.losses[found.lrs.index(found.max_lr)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.lr == 0.1


@pytest.mark.usefixtures("_no_tqdm_monitor")
def test_a_constant_loss_comes_out_constant():
    class Constant(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0.0 + 3.0

    with pytest.raises(ValueError, match="never fell below its start of 3 between"):
        lr_range(Trainer(**FLAGS, max_epochs=1), Constant(n=80), num_training=20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_lr": 1.0, "max_lr": 0.1}, r"expected 0 < min_lr < max_lr, got \(1.0, 0.1\)"),
        ({"min_lr": None}, r"expected 0 < min_lr < max_lr, got \(None, 1.0\)"),
        ({"max_lr": math.inf}, r"expected 0 < min_lr < max_lr, got .*inf"),
        ({"early_stop_threshold": "x"}, r"early_stop_threshold\): expected a number above 0, or None, got 'x'"),
        ({"num_training": 2}, r"num_training\): expected a whole number of at least 5, got 2"),
        ({"mode": "cubic"}, r"mode\): expected 'exponential' or 'linear', got 'cubic'"),
    ],
)
def test_lr_range_refuses_the_impossible(arguments, message):
    with pytest.raises(ValueError, match=message):
        lr_range(Trainer(**FLAGS), Net(), **arguments)


# EffectiveBatchSize


def plain(model, window, lr, epochs, warmup=0, factor=1.0):
    """Accumulation, scaled learning rate and warm-up in a plain loop."""
    rates, step = [], 0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = list(model.train_dataloader())
    for _ in range(epochs):
        for start in range(0, len(batches), window):
            share = 1 / factor + (1 - 1 / factor) * step / warmup if step < warmup else 1.0
            optimizer.param_groups[0]["lr"] = lr * factor * share
            optimizer.zero_grad()
            for x, y in batches[start : start + window]:
                (nn.functional.mse_loss(model(x), y) / window).backward()
            optimizer.step()
            rates.append(lr * factor * share)
            step += 1
    return rates


@pytest.mark.parametrize(("rule", "factor"), [("linear", 5.0), ("sqrt", 5**0.5), (None, 1.0)])
@pytest.mark.parametrize("warmup", [0, 3])
def test_it_accumulates_scales_and_warms_up(rule, factor, warmup):
    model, reference = Net(lr=0.02), Net(lr=0.02)
    callback = EffectiveBatchSize(20, rule, warmup)
    trainer = fit(model, [callback])
    plain(reference, 5, 0.02, 3, warmup, factor)
    assert trainer.accumulate_grad_batches == 5
    assert callback.effective_batch_size == 20
    assert model.lr == 0.02  # the hyper-parameter is the user's
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # the product of the rates rounds in another order


class OwnRates:
    """A schedule in timm's manner, with base values of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.base_values = [group["lr"] for group in optimizer.param_groups]

    def step(self, made):
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base * 0.9**made

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("kind", ["cyclic", "own rates"])
def test_any_schedule_is_scaled(kind):
    class Scheduled(Net):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step(len(self.rates)) if kind == "own rates" else scheduler.step()

    make = {
        "cyclic": lambda o, t: cyclic_lr(o, 0.001, 0.05, steps_up=2, trainer=t),
        "own rates": lambda o, t: {"scheduler": OwnRates(o), "interval": "step"},
    }[kind]
    fit(model := Scheduled(make), [EffectiveBatchSize(8)])
    fit(other := Scheduled(make), accumulate_grad_batches=2)
    assert model.rates == pytest.approx([2 * rate for rate in other.rates])


@pytest.mark.parametrize("stop", [1, 7, 13])
def test_its_run_goes_on_as_if_never_stopped(stop):
    def run(callbacks=(), ckpt_path=None):
        model = Net(lambda o, t: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2, 0.7), "interval": "step"}, lr=0.01)
        model.train_dataloader = lambda: StatefulDataLoader(Net.train_dataloader(model).dataset, batch_size=4)
        fit(model, [EffectiveBatchSize(8, "linear", 4), *callbacks], ckpt_path)
        return model

    whole = run()
    run([StopAt(stop)])
    resumed = run(ckpt_path="stopped.ckpt")
    assert whole.rates[-len(resumed.rates) :] == resumed.rates
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_checkpoint_of_another_size_or_without_the_callback_is_scaled_by_the_size_of_the_resumed_run():
    for callbacks in ([EffectiveBatchSize(8, "linear", 100)], []):
        trainer = fit(Net(lr=0.01), callbacks, max_epochs=1)
        trainer.save_checkpoint("stopped.ckpt")
        fit(model := Net(lr=0.01), [EffectiveBatchSize(16)], "stopped.ckpt", max_epochs=2)
        assert model.rates[-1] == pytest.approx(0.04)
        state = torch.load("stopped.ckpt", weights_only=True)
        assert list(state["callbacks"].values()) == [{"warmup_done": 5}] * len(callbacks)
        assert state["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01


def test_a_checkpoint_whose_rates_carry_the_factor_is_refused():
    with pytest.raises(ValueError, match=r"saved learning rates times 2\.0\. Start from its weights alone"):
        EffectiveBatchSize(8).load_state_dict({"factor": 2.0, "warmup_done": 5})


def test_ranks_count(monkeypatch):
    monkeypatch.setattr("lightning_turbo.callbacks.effective_batch_size._ranks", lambda trainer: 2)
    assert fit(Net(), [EffectiveBatchSize(16)], max_epochs=1).accumulate_grad_batches == 2


def test_it_logs_the_effective_batch_size(tmp_path):
    fit(Net(), [EffectiveBatchSize(8), LearningRateMonitor()], logger=CSVLogger(tmp_path), max_epochs=1)
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert {"effective_batch_size", "lr_factor"} <= set(text.splitlines()[0].split(","))
    assert "8.0" in text


def test_a_target_out_of_reach_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"target=10\): expected a multiple of 4, .* The nearest: 8 and 12"):
        fit(Net(), [EffectiveBatchSize(10)])
    with pytest.raises(ValueError, match=r"expected a multiple of 4, .* The nearest: 4\."):
        fit(Net(), [EffectiveBatchSize(3)])


def test_a_loader_that_does_not_tell_its_size_needs_help():
    class Silent(Net):
        def train_dataloader(self):
            return DataLoader(super().train_dataloader().dataset, batch_size=None, sampler=[[0, 1], [2, 3]])

    with pytest.raises(ValueError, match=r"has no batch_size. Pass batch_size=\.\.\. to EffectiveBatchSize"):
        fit(Silent(), [EffectiveBatchSize(4)])
    trainer = fit(Silent(), [EffectiveBatchSize(4, batch_size=2)])
    assert trainer.accumulate_grad_batches == 2


@pytest.mark.filterwarnings("ignore:.*The parameter.*", "ignore:.*Scaler.*", "ignore:.*LeafSpec.*")
def test_with_the_batch_size_finder_the_target_is_kept():
    model = Net(batch_size=2, n=60)
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=5, max_trials=2)
    callback = EffectiveBatchSize(16)
    trainer = fit(model, [finder, callback], max_epochs=1)
    assert 16 % model.batch_size == 0  # found 5 or 10, which do not divide 16
    assert trainer.train_dataloader.batch_size == model.batch_size
    assert trainer.accumulate_grad_batches * model.batch_size == 16


# A finder goes on from a checkpoint of its own, of which Lightning warns.
_its_own_checkpoint = pytest.mark.filterwarnings("ignore:Be aware that when using", "ignore:You're resuming from a")


class Trials(Callback):
    """Notes what the trials of a finder see; the finders put this class's callbacks away meanwhile."""

    def __init__(self, model):
        self.seen, self.batches = set(), model.training_step
        model.training_step = self.step

    def step(self, batch, batch_idx):
        trainer = self.batches.__self__.trainer
        if self not in trainer.callbacks:
            self.seen.add(trainer.accumulate_grad_batches)
        return self.batches(batch, batch_idx)


def one_cycle(optimizer, trainer):
    steps = int(trainer.estimated_stepping_batches)
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}


def length(trainer):
    return trainer.lr_scheduler_configs[0].scheduler.total_steps


@_its_own_checkpoint
@pytest.mark.usefixtures("_no_tqdm_monitor")
@pytest.mark.parametrize("finder", [False, pytest.param(True, marks=FINDS_RATES)])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_estimate_of_the_steps_counts_the_accumulation(finder, batch_size):
    finders = [LearningRateFinder(num_training_steps=5, update_attr=False)] if finder else []
    callbacks = [*finders, EffectiveBatchSize(16, batch_size=batch_size)]
    model = Net(one_cycle)
    callbacks.append(trials := Trials(model))
    trainer = fit(model, callbacks, limit_val_batches=0)
    assert length(trainer) == trainer.global_step == 9  # ceil(10 / 4) steps an epoch
    assert trials.seen == ({1} if finder else set())
    trainer.fit_loop.max_epochs = 5
    trainer.fit(again := Net(one_cycle, n=72))  # other data
    assert length(trainer) == 25  # ceil(18 / 4) steps an epoch
    assert trainer.global_step == 9 + 10
    assert "setup_data" not in vars(trainer.fit_loop)
    assert model.rates[0] == again.rates[0]


def test_the_accumulation_is_known_before_the_loader_if_the_batch_size_is():
    def by_hand(optimizer, trainer):
        steps = 10 * trainer.max_epochs // trainer.accumulate_grad_batches
        return {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}

    trainer = fit(Net(by_hand), [EffectiveBatchSize(20, batch_size=4)])
    assert trainer.lr_scheduler_configs[0].scheduler.T_max == trainer.global_step == 6
    with pytest.warns(TurboWarning, match=r"CosineAnnealingLR was made for 30 steps.*batches=5 the run makes 6\."):
        fit(Net(by_hand), [EffectiveBatchSize(20)])


@pytest.mark.filterwarnings("ignore:.*The parameter.*", "ignore:.*Scaler.*", "ignore:.*LeafSpec.*")
def test_the_batch_size_finder_tries_sizes_without_accumulation():
    def run(size):
        model = Net(one_cycle, batch_size=size, n=60)
        finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=4, max_trials=1)
        trials = Trials(model)
        trainer = fit(model, [finder, EffectiveBatchSize(16), trials], max_epochs=2)
        assert trials.seen == {1}
        return trainer

    trainer = run(2)
    assert length(trainer) == trainer.global_step == 8


@FINDS_RATES
@_its_own_checkpoint
@pytest.mark.usefixtures("_no_tqdm_monitor")
def test_a_second_fit_with_the_learning_rate_finder_is_scaled_anew():
    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    trainer = fit(first := Net(lr=0.01), [finder, EffectiveBatchSize(8, "linear", 3)], max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second := Net(lr=0.01))
    expected = pytest.approx([0.01, 0.04 / 3, 0.05 / 3, 0.02, 0.02])  # after the finder's
    assert second.rates[-5:] == first.rates[-5:] == expected


@pytest.mark.parametrize(
    ("callbacks", "flags", "message"),
    [
        ([GradientAccumulationScheduler({0: 2})], {}, "GradientAccumulationScheduler sets accumulate_grad_batches too"),
        ([], {"accumulate_grad_batches": 2}, r"Trainer\(accumulate_grad_batches=2\) sets it too"),
    ],
)
def test_two_owners_of_the_accumulation_are_refused(callbacks, flags, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(Net(), [EffectiveBatchSize(8), *callbacks], **flags)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, r"target\): expected at least 1, got 0"),
        ((8.0,), TypeError, r"target\): expected an int, got 8.0"),
        ((8, "cubic"), ValueError, "lr_rule: expected 'linear', 'sqrt' or None, got 'cubic'"),
        ((8, None, -1), ValueError, r"warmup_steps\): expected at least 0, got -1"),
    ],
)
def test_impossible_batch_sizes_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        EffectiveBatchSize(*arguments)


def test_a_window_of_a_checkpoint_that_was_only_tested_is_forgotten():
    class Tested(Net):
        def test_step(self, batch, batch_idx):
            pass

        test_dataloader = Net.train_dataloader

    fit(Tested(), [ExactAccumulation(), StopAt(1)], accumulate_grad_batches=4, max_epochs=1)
    trainer = Trainer(**FLAGS, max_epochs=1, accumulate_grad_batches=4, callbacks=[ExactAccumulation()])
    trainer.test(Tested(), ckpt_path="stopped.ckpt", verbose=False)
    trainer.fit(after := Tested())
    fit(fresh := Tested(), [ExactAccumulation()], accumulate_grad_batches=4, max_epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), fresh.parameters(), strict=True))


# DropBiasBeforeNorm and MemoryFormat


def test_biases_go_before_the_optimizer_is_made():
    callback = DropBiasBeforeNorm()
    trainer = fit(dropped := Net(lr=0.01), [callback])
    fit(whole := Net(lr=0.01))
    assert callback.report.dropped == {"net.0": "net.1"}
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == 5
    # The bias moves all activations before the norm, which rounds in another way.
    assert torch.stack(dropped.losses).tolist() == pytest.approx(torch.stack(whole.losses).tolist(), rel=1e-4)


def test_a_checkpoint_with_biases_fits_and_testing_works():
    class Tested(Net):
        def test_step(self, batch, batch_idx):
            self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

        test_dataloader = Net.train_dataloader

    trainer = fit(old := Tested(), max_epochs=1)
    trainer.save_checkpoint("old.ckpt")
    expected = trainer.test(old, verbose=False)[0]["loss"]
    for callback in (DropBiasBeforeNorm(), DropBiasBeforeNorm("net")):
        tester = Trainer(**FLAGS, callbacks=[callback])
        got = tester.test(model := Tested(), ckpt_path="old.ckpt", verbose=False)[0]["loss"]
        assert model.net[0].bias is None
        assert got == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_of_the_smaller_network_loads_without_the_callback():
    trainer = fit(dropped := Net(lr=0.01), [callback := DropBiasBeforeNorm()], max_epochs=1)
    trainer.save_checkpoint("small.ckpt")
    assert callback.report.dropped
    plain = Net.load_from_checkpoint("small.ckpt", weights_only=True).eval()
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(plain(x), dropped.eval()(x), rtol=1e-5, atol=1e-6)
    again = Net(lr=0.01)
    fit(again, [DropBiasBeforeNorm()], "small.ckpt", max_epochs=2)
    assert again.net[0].bias is None


@pytest.mark.parametrize("network", [None, "net"])
def test_a_momentum_encoder_stays_paired_with_its_network(network):
    class Momentum(Net):
        def __init__(self):
            super().__init__()
            self.target = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, *args):
            for a, b in zip(self.net.parameters(), self.target.parameters(), strict=True):
                b.data.mul_(0.9).add_(a.data, alpha=0.1)

    fit(plain := Momentum())
    with pytest.warns(NoEffectWarning, match="its copy in target, which has the same parameters, keeps"):
        fit(model := Momentum(), [DropBiasBeforeNorm(network)])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("named", [False, True])
def test_example_inputs_are_read_as_lightning_reads_them(named):
    class TwoInputs(Net):
        def forward(self, x, shift=0.0, scale=1.0):
            return self.net(x * scale + shift)

    model, x, scale = TwoInputs(), torch.zeros(2, 1, 6, 6), torch.ones(())
    model.example_input_array = {"scale": scale, "x": x} if named else [x, 0.0, scale]
    (callback := MemoryFormat("measure", rounds=1)).setup(Trainer(**FLAGS), model, "fit")
    assert callback.chosen in callback.times.seconds


def test_what_the_callbacks_refuse():
    with pytest.raises(TypeError, match=r"DropBiasBeforeNorm\(network\): expected a path .* got 3"):
        DropBiasBeforeNorm(3)
    with pytest.raises(ValueError, match=r"network='nets'\): Net has no such submodule; expected .*'net'"):
        DropBiasBeforeNorm("nets").setup(Trainer(**FLAGS), Net(), "fit")
    model = Net()
    model.example_input_array = None
    with pytest.raises(ValueError, match=r"MemoryFormat\('measure'\): Net has no example_input_array"):
        fit(model, [MemoryFormat()])
    with pytest.raises(ValueError, match=r"MemoryFormat\(memory_format\): expected 'measure', .* got 'nhwc'"):
        MemoryFormat("nhwc")
    with pytest.raises(ValueError, match=r"rounds\): expected a whole number of at least 1, got 0"):
        MemoryFormat(rounds=0)


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous", "measure"])
def test_the_memory_format_changes_no_number(memory_format):
    callback = MemoryFormat(memory_format, rounds=1)
    fit(changed := Net(lr=0.01), [callback], precision="bf16-mixed" if memory_format == "measure" else None)
    fit(alike := Net(lr=0.01), precision="bf16-mixed" if memory_format == "measure" else None)
    assert callback.chosen in ("channels_last", "contiguous")
    assert (callback.times is not None) == (memory_format == "measure")
    # Another kernel adds in another order; bfloat16 rounds the activations to 8 bits.
    tolerance = 5e-2 if memory_format == "measure" else 1e-4
    assert torch.stack(changed.losses).tolist() == pytest.approx(torch.stack(alike.losses).tolist(), rel=tolerance)


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
        fit(Flat(), [MemoryFormat("channels_last")], max_epochs=1)
    with pytest.warns(NoEffectWarning, match="Later makes its layers in configure_model, after setup. Call"):
        fit(model := Later(), [MemoryFormat("channels_last")], max_epochs=1)
    assert model.net[0].weight.is_contiguous(memory_format=torch.channels_last)


# All of them together


class Everything(Net):
    def configure_optimizers(self):
        optimizer = lamb(self, lr=0.01)
        schedule = cyclic_lr(optimizer, 0.001, 0.01, epochs_up=1, trainer=self.trainer, mode="triangular2")
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self):
        return StatefulDataLoader(super().train_dataloader().dataset, batch_size=3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("stop", [4, 15, 26])  # 14 batches an epoch, windows of 4, 4, 4 and 2
def test_together_they_go_on_as_if_never_stopped(level, stop):
    def run(callbacks=(), ckpt_path=None):
        own = [
            DropBiasBeforeNorm(),
            MemoryFormat("channels_last"),
            EffectiveBatchSize(12, "sqrt", 3),
            ExactAccumulation(weight=batch_length),
            GradToNone("all"),
        ]
        fit(model := Everything(), [*own, *callbacks], ckpt_path, plugins=[ApexAMP(level)])
        return model

    whole = run()
    run([StopAt(stop)])
    resumed = run(ckpt_path="stopped.ckpt")
    assert len(resumed.rates) < len(whole.rates)
    assert whole.rates[-len(resumed.rates) :] == resumed.rates
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def batch_length(batch):
    return len(batch[0])
