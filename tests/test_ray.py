"""Ray Train: reports within epochs, the strategy, and runs of two real workers (slow, with Ray alone)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_turbo import AtomicCheckpointIO, ExactResume, Preemption, Prefetch, TurboDDPStrategy, _optional
from lightning_turbo import ray as turbo_ray
from lightning_turbo.errors import LightningMismatchError, MissingExtraError
from lightning_turbo.ray import RayTurboDDPStrategy, ReportSteps
from tests.registry import make_model
from tests.trainers import quiet_trainer


@pytest.fixture
def rays(monkeypatch):
    """Ray's names that this package uses, for tests of what it does before and after it calls them."""
    turbo_ray._with_ray.cache_clear()
    names = SimpleNamespace(reports=[], RayDDPStrategy=type("RayDDPStrategy", (pl.strategies.DDPStrategy,), {}))
    train, of_lightning = ModuleType("ray.train"), ModuleType("ray.train.lightning")
    train.report = lambda metrics, checkpoint: names.reports.append((metrics, checkpoint))
    # A report copies the folder.
    train.Checkpoint = SimpleNamespace(
        from_directory=lambda folder: torch.load(Path(folder, ReportSteps.CHECKPOINT_NAME), weights_only=False)
    )
    of_lightning.RayDDPStrategy = names.RayDDPStrategy
    monkeypatch.setattr(_optional, "require", lambda module, needed_by: None)
    for module in (ModuleType("ray"), train, of_lightning):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield names
    turbo_ray._with_ray.cache_clear()


@pytest.mark.parametrize("make", [RayTurboDDPStrategy, lambda: ReportSteps(1)], ids=["strategy", "callback"])
def test_the_extra_is_named_where_ray_is_not_installed(make, monkeypatch):
    turbo_ray._with_ray.cache_clear()
    monkeypatch.setattr(_optional, "installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"needs the package ray, .* pip install '\.\[ray\]'"):
        make()


def test_the_strategy_is_rays_too_and_expects_no_signal(rays, monkeypatch):
    monkeypatch.setattr(pl.strategies.DDPStrategy, "setup_environment", lambda self: None)  # no ranks are needed
    strategy = RayTurboDDPStrategy(find_unused_parameters=True)
    assert isinstance(strategy, rays.RayDDPStrategy)
    assert isinstance(strategy, TurboDDPStrategy)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    trainer.state.fn = TrainerFn.FITTING
    strategy.connect(make_model(pl))
    trainer.lightning_module.trainer = trainer
    strategy.setup_environment()
    (preemption,) = [each for each in trainer.callbacks if isinstance(each, Preemption)]
    assert preemption._signals == []
    assert any(isinstance(each, ExactResume) for each in trainer.callbacks)


def test_ray_with_the_other_name_of_lightning_is_refused(rays):
    sys.modules["ray.train.lightning"].RayDDPStrategy = type("RayDDPStrategy", (), {})
    with pytest.raises(LightningMismatchError, match=r"Import lightning\.pytorch in this program, or uninstall"):
        RayTurboDDPStrategy()


@pytest.mark.parametrize(("in_worker", "refused"), [(True, True), (False, False)])
def test_the_strategy_of_other_launchers_is_refused_in_a_worker(in_worker, refused, rays, monkeypatch):
    def get_context():
        if not in_worker:
            raise RuntimeError("outside of a train function")

    utilities = SimpleNamespace(get_context=get_context)
    monkeypatch.setitem(sys.modules, "ray.train.v2.api.train_fn_utils", utilities)
    assert RayTurboDDPStrategy().preemption
    if not refused:
        assert TurboDDPStrategy().preemption
        return
    with pytest.raises(MisconfigurationException, match=r"Write prepare_trainer\(Trainer\(strategy=RayTurboDDPStr"):
        pl.Trainer(accelerator="cpu", strategy="turbo_ddp", logger=False)


class Counts(pl.Callback):
    """Has a state that changes with each batch, and comes after the report in the Trainer's list."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}


def fit(*callbacks, path=None, **settings):
    torch.manual_seed(0)
    model = BoringModel()
    data = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(callbacks=[*callbacks, Prefetch()], strategy="turbo", max_epochs=2, **settings)
    trainer.fit(model, DataLoader(data, 2, shuffle=True), ckpt_path=path, weights_only=False if path else None)
    return trainer, model.state_dict()


@pytest.mark.parametrize("background", [False, True])
def test_a_complete_file_is_reported_every_few_steps_and_at_the_end_of_each_epoch(background, rays, tmp_path):
    settings = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    settings["plugins"] = [AtomicCheckpointIO(background=background)]
    trainer, whole = fit(ReportSteps(3), Counts(), **settings)
    assert trainer.global_step == 10
    steps = [(metrics["epoch"], metrics["step"]) for metrics, _ in rays.reports]
    assert steps == [(0, 3), (0, 5), (1, 6), (1, 9), (1, 10)]
    for metrics, saved in rays.reports:
        assert saved["global_step"] == metrics["step"]
        assert saved["callbacks"]["Counts"]["batches"] == 2 * metrics["step"]
    for number, (_, saved) in enumerate(list(rays.reports)):
        rays.reports.clear()
        torch.save(saved, path := tmp_path / f"{number}.ckpt")
        _, resumed = fit(ReportSteps(3), Counts(), path=path, **settings)
        later = [step for step in steps if step[1] > saved["global_step"]]
        assert [(metrics["epoch"], metrics["step"]) for metrics, _ in rays.reports] == later
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (1.5, TypeError)])
def test_impossible_numbers_of_steps_are_refused(steps, error, rays):
    with pytest.raises(error, match="every_n_steps: expected an integer"):
        ReportSteps(steps)


@pytest.mark.parametrize("kind", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_strategies_that_shard_the_model_are_refused(kind, rays):
    strategy = object.__new__(getattr(pl.strategies, kind))  # DeepSpeed is not installed
    trainer = SimpleNamespace(strategy=strategy, callbacks=[])
    with pytest.raises(MisconfigurationException, match=f"one file with the weights of all ranks, .* got {kind}"):
        ReportSteps(1).setup(trainer, make_model(pl), "fit")
    ReportSteps(1).setup(trainer, make_model(pl), "validate")  # reports nothing


# Two workers of Ray, each case in a program of its own; fast forms are above, and with gloo ranks without Ray in
# tests/integration/test_resume_changes.py and tests/callbacks/test_preemption.py.


def run(case, folder):
    """Run a case of ``tests/ray_runs.py``, and return what it found."""
    command = [sys.executable, Path(__file__).with_name("ray_runs.py"), case, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return json.loads((folder / "found.json").read_text())


real = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'"),
]


def with_ray(function):
    for mark in real:
        function = mark(function)
    return function


@with_ray
def test_a_killed_worker_costs_no_sample_and_no_bit_of_the_weights(tmp_path):
    found = run("killed", tmp_path)
    assert found["files"][:2] == ["0.0", "0.1"]
    assert len(found["files"]) == 4, "two workers went on"
    assert found["files"][2] in ("2.0", "4.0"), "from within the epoch"
    assert found["counted"] == [0, 0]
    assert found["same"]


@with_ray
def test_one_worker_goes_on_for_two(tmp_path):
    found = run("raised", tmp_path)
    assert "planted in a step" in found["error"]
    assert found["files"] in (["0.0", "0.1", "2.0"], ["0.0", "0.1", "4.0"])
    assert found["counted"] == [0, 0]


@with_ray
def test_an_elastic_run_goes_on_without_a_node_that_is_switched_off(tmp_path):
    found = run("elastic", tmp_path)
    assert found["files"][:2] == ["0.0", "0.1"]
    assert len(found["files"]) == 3, "one worker went on"
    assert found["counted"] == [0, 0]


@with_ray
def test_all_workers_report_before_a_node_is_taken_away(tmp_path):
    found = run("drained", tmp_path)
    assert len(found["files"]) == 3, "one worker went on"
    since = int(found["files"][2].split(".")[0])
    assert 3 <= since < 12, "from within the epoch, in which nothing else is reported"
    assert found["counted"] == [0, 0]


@with_ray
def test_the_strategy_of_other_launchers_is_an_error_that_says_what_to_write(tmp_path):
    assert "Write prepare_trainer(Trainer(strategy=RayTurboDDPStrategy()" in run("refused", tmp_path)["error"]


@with_ray
def test_a_file_that_is_written_in_the_background_is_whole_when_it_is_reported(tmp_path):
    found = run("background", tmp_path)
    assert found["steps"] == [[3, 3], [6, 6], [8, 8]]
    assert set(found["ranks"]) == {2}
