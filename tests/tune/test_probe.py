"""Settings that are applied to the Trainer of a script, and what is read from it before measuring."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune.candidates import Settings
from lightning_turbo.tune.describe import describe_network
from lightning_turbo.tune.probe import Probe, change_loader, prepare_trainer, trainer_in_construction


@pytest.mark.parametrize(("layers", "convolutions", "norms"), [
    ([nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)], True, True),
    ([nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4)], True, True),
    ([nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)], False, True),
    ([nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)], True, False),
    ([nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)], True, False),  # this keeps a part of the bias
    ([nn.Linear(1, 4), nn.BatchNorm1d(4)], False, False),
])  # fmt: skip
def test_a_candidate_needs_the_layers_that_it_changes(layers, convolutions, norms):
    found = describe_network(nn.Sequential(*layers))
    assert (found["convolutions"], found["norms"], found["float32 weights"]) == (convolutions, norms, True)


@pytest.mark.parametrize(("dtype", "found"), [(torch.float64, False), (torch.bfloat16, True)])
def test_a_network_with_one_float64_weight_is_not_a_float32_network(dtype, found):
    network = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1).to(dtype))
    assert describe_network(network)["float32 weights"] == found


def probe_of(*orders, mode="step"):
    """Return a probe that gets these orders."""
    orders = iter(orders)
    return Probe(RoundTimer(lambda event: next(orders)), mode)


def plain_trainer(**options):
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


def prepare(trainer, probe, ranks=1, **settings):
    task = {"settings": dataclasses.asdict(Settings(**settings)), "ranks": ranks, "batch_size": 0}
    return prepare_trainer(trainer, task, probe)


@pytest.mark.parametrize(("strategy", "kind"), [({}, "DDPStrategy"), ({"static_graph": True}, "TurboDDPStrategy")])
def test_a_script_of_one_device_is_measured_on_several_ranks(strategy, kind):
    trainer = plain_trainer()
    before = trainer.strategy.precision_plugin
    prepare(trainer, probe_of(), ranks=2, strategy=strategy)
    made = trainer.strategy
    assert type(made).__name__ == kind
    assert made.parallel_devices == [torch.device("cpu")] * 2
    assert type(made.cluster_environment).__name__ == "TorchElasticEnvironment"
    assert made.precision_plugin is before
    assert made._ddp_kwargs.get("static_graph", False) == bool(strategy)


def test_the_learning_rate_finder_is_not_measured():
    """The finder runs the Trainer without the callbacks of the script."""
    trainer, probe = plain_trainer(), probe_of()
    prepare(trainer, probe)
    trainer.strategy.setup_environment()
    assert probe.validation is None
    trainer.callbacks = [*trainer.callbacks, probe]
    trainer.strategy.setup_environment()
    begun = probe.validation
    assert trainer.callbacks[0] is probe
    trainer.strategy.setup_environment()
    assert probe.validation is begun is not None, "once, however often the Trainer runs"


@pytest.mark.parametrize(("settings", "workers", "changed"), [
    ({"persistent_workers": True, "pin_memory": True}, 1, {"persistent_workers": True, "pin_memory": True}),
    ({"persistent_workers": True, "pin_memory": True}, 0, {"persistent_workers": False, "pin_memory": True}),
    ({}, 1, {"persistent_workers": False, "pin_memory": False}),
])  # fmt: skip
def test_loader_settings_are_applied_and_persistent_workers_need_workers(settings, workers, changed):
    loader = DataLoader([1.0, 2.0], num_workers=workers)
    assert change_loader(loader, settings, 0, probe_of()) is loader
    assert {name: getattr(loader, name) for name in changed} == changed


def test_a_version_of_lightning_without_the_patched_trainer_is_reported():
    with pytest.raises(RuntimeError, match="No Trainer is under construction"):
        trainer_in_construction()


OUTPUTS = [{"loss": torch.tensor(1.0)}, {}, None, torch.tensor(2.0), torch.ones(2)]


def test_only_scalar_losses_are_compared():
    probe = probe_of({"order": "round", "lead": 0, "steps": 99})
    probe.validation = SimpleNamespace(since_step=0.0)
    for outputs in OUTPUTS:
        probe.on_train_batch_end(None, None, outputs, None, 0)
    assert [loss.item() for loss in probe.losses] == [1.0, 2.0]


def test_a_script_without_epoch_boundaries_continues_with_further_rounds():
    rounds, heard = {"order": "round", "lead": 0, "steps": 1}, []
    orders = iter([{"order": "border"}, rounds, {"order": "border"}, rounds])

    def ask(event):
        heard.append(event["event"])
        return next(orders)

    probe = Probe(RoundTimer(ask, warmup=1), mode="one batch")
    probe.validation = SimpleNamespace(since_step=0.0)
    for _ in range(2):
        probe.on_train_batch_end(SimpleNamespace(num_training_batches=8), None, None, None, 0)
    assert heard == ["ready", "border", "round", "border"]
    assert probe.borders == []
