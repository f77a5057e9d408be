"""Settings that are applied to the Trainer of a script, and what is read from it before measuring."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune.candidates import Settings
from lightning_turbo.tune.probe import Probe, change_loader, period_of, trainer_in_construction


def probe_of(*orders, **settings):
    """Return a probe that gets these orders, and has these settings."""
    orders = iter(orders)
    task = {"settings": dataclasses.asdict(Settings(**settings)), "folder": "written", "look": 0.0}
    return Probe(RoundTimer(lambda event: next(orders)), task)


def plain_trainer(**options):
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


def test_settings_become_those_of_the_trainer():
    trainer = plain_trainer()
    before = trainer.strategy.precision_plugin
    probe = probe_of(strategy={"lean": False}, callbacks={"FusedOptimizers": {}})
    callbacks = probe.prepare(trainer)
    assert [type(each).__name__ for each in callbacks] == ["FusedOptimizers", "Probe"]
    assert type(trainer.strategy).__name__ == "TurboStrategy"
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.strategy.precision_plugin is before
    probe_of(precision="bf16-mixed").prepare(trainer)
    assert trainer.strategy.precision_plugin.precision == "bf16-mixed"
    probe_of(opt_level="O1").prepare(trainer)
    assert type(trainer.strategy.precision_plugin).__name__ == "ApexAMP"


def test_the_learning_rate_finder_is_not_measured():
    """The finder runs the Trainer without the callbacks of the script."""
    trainer, probe = plain_trainer(), probe_of()
    probe.prepare(trainer)
    trainer.strategy.setup_environment()
    save = trainer.strategy.save_checkpoint
    trainer.callbacks = [*trainer.callbacks, probe]
    trainer.strategy.setup_environment()
    muted = trainer.strategy.save_checkpoint
    assert trainer.callbacks[0] is probe
    assert muted is not save
    trainer.strategy.setup_environment()
    assert trainer.strategy.save_checkpoint is muted, "once, however often the Trainer runs"


WORKERS = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 2}


@pytest.mark.parametrize(("settings", "workers", "changed"), [
    ({"num_workers": 2, "persistent_workers": True}, 0, WORKERS),
    ({"num_workers": 2}, 1, {**WORKERS, "persistent_workers": False}),
    ({"persistent_workers": True, "pin_memory": True}, 1, {"persistent_workers": True, "pin_memory": True}),
    ({"persistent_workers": True, "pin_memory": True}, 0, {"persistent_workers": False, "pin_memory": True}),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_a_loader_with_other_arguments_has_the_same_batches(settings, workers, changed):
    def make():
        torch.manual_seed(0)
        return DataLoader(torch.arange(12), 4, shuffle=True, num_workers=workers)

    loader = make()
    assert change_loader(loader, settings) is loader
    assert {name: getattr(loader, name) for name in changed} == changed
    plain = [batch.tolist() for batch in make()]
    torch.manual_seed(0)
    assert [batch.tolist() for batch in loader] == plain


def test_what_is_no_dataloader_stays_as_it_is():
    batches = [1, 2]
    assert change_loader(batches, {"num_workers": 2}) is batches


def test_a_version_of_lightning_without_the_patched_trainer_is_reported():
    with pytest.raises(RuntimeError, match="No Trainer is under construction"):
        trainer_in_construction()


@pytest.mark.parametrize(("options", "epochs", "period"), [
    ({"check_val_every_n_epoch": 1, "val_check_batch": 8}, 3, 8),
    ({"check_val_every_n_epoch": 1, "val_check_batch": 2}, 3, 8),  # four validations in each
    ({"check_val_every_n_epoch": 2, "val_check_batch": 8}, 3, 16),
    ({"check_val_every_n_epoch": 4, "val_check_batch": 8}, 3, 8),  # it never validates
    ({"check_val_every_n_epoch": None, "val_check_batch": 20}, 3, 20),
    ({"check_val_every_n_epoch": None, "val_check_batch": 5}, 3, 8),
    ({"check_val_every_n_epoch": 2, "val_check_batch": 8, "skip": True}, 3, 8),
])  # fmt: skip
def test_training_and_validation_repeat_themselves_after_some_batches(options, epochs, period):
    loop = SimpleNamespace(_combined_loader=object(), skip=options.pop("skip", False))
    fit = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop))
    assert period_of(SimpleNamespace(fit_loop=fit, **options), 8, epochs) == period
