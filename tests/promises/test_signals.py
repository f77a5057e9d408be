"""A signal at any hook of a fit: the run that resumes equals the one that never stopped.

Signals to several ranks, at random moments and during a save are in ``tests/callbacks/test_preemption.py``.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AtomicCheckpointIO, Preemption, Prefetch
from lightning_turbo.errors import TurboWarning
from tests.integration.resuming import assert_same
from tests.promises.runs import end_of
from tests.promises.stopped_runs import Sends, handlers_put_back, stops
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists", "ignore:The dirpath has changed")

VALUES = [5.0, 4.0, 4.5, 4.6, 4.7, 4.8, 4.9]  # by epoch; the best is that of epoch 1, and epoch 3 is the last
STEPS = 4 * 4


class Net(LightningModule):
    """Draws random numbers in its steps."""

    def __init__(self, step=None):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.signals_at = step
        self.seen = []

    def training_step(self, batch, index):
        if self.global_step == self.signals_at:
            self.signals_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        self.seen.append(batch[0][:, 0].tolist())
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.log("val", VALUES[self.current_epoch])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(folder, *callbacks, path=None, step=None, **settings):
    """Train until EarlyStopping ends the run, and return what must be the same in a run that was stopped."""
    torch.manual_seed(0 if path is None else 1)
    best = ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val", save_top_k=2)
    steps = ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1)
    stopping = EarlyStopping("val", patience=2)
    settings = {"max_epochs": 7, "strategy": "turbo", "default_root_dir": folder, **settings}
    trainer = quiet_trainer(
        callbacks=[Prefetch(), best, steps, stopping, *callbacks], enable_checkpointing=True, **settings
    )
    net, data = Net(step), TensorDataset(torch.arange(64.0).sin().view(16, 4))
    trainer.fit(
        net, DataLoader(data, 4, shuffle=True), DataLoader(data, 8), ckpt_path=path,
        **unpickling(False if path else None),
    )  # fmt: skip
    return {
        **end_of(trainer, "*step*.ckpt"),
        "epoch": trainer.current_epoch,
        "early stopping": (stopping.wait_count, stopping.best_score, stopping.stopped_epoch),
        "best": (Path(best.best_model_path).name, best.best_model_score),
        "top": {Path(file).name: score for file, score in best.best_k_models.items()},
        "last samples": net.seen[-1],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    ended = fit(tmp_path_factory.mktemp("whole"))
    assert (ended["steps"], ended["best"][0]) == (STEPS, "epoch=1-step=8.ckpt")
    return ended


# Hook, in which of its calls; after how many steps the run ends.
AT = [
    ("on_sanity_check_start", 1, 1), ("on_train_start", 1, 1),
    ("on_train_epoch_start", 2, 5), ("on_train_batch_start", 6, 6), ("on_before_backward", 6, 6),
    ("on_before_optimizer_step", 6, 6), ("on_train_batch_end", 6, 6),
    ("on_train_batch_start", 8, 8), ("on_train_batch_end", 8, 8), ("on_validation_start", 2, 8),
    ("on_validation_batch_start", 3, 8), ("on_validation_batch_end", 4, 8), ("on_validation_epoch_end", 2, 8),
    ("on_validation_end", 2, 8), ("on_train_epoch_end", 2, 8), ("on_save_checkpoint", 2, 4),
]  # fmt: skip


@pytest.mark.parametrize(("hook", "nth", "steps"), AT)
def test_a_run_stopped_in_a_hook_and_resumed_equals_one_that_never_stopped(hook, nth, steps, whole, tmp_path):
    stops(fit, tmp_path, Preemption(), Sends(hook, nth))
    path = Preemption.resume_path(tmp_path)
    assert Path(path).name == "preempted.ckpt"
    assert torch.load(path, weights_only=False)["global_step"] == steps
    assert_same(fit(tmp_path, path=path), whole)


def test_a_signal_in_a_training_step_ends_the_run_after_it(whole, tmp_path):
    stops(fit, tmp_path, Preemption(), step=5)
    path = Preemption.resume_path(tmp_path)
    assert torch.load(path, weights_only=False)["global_step"] == 6
    assert_same(fit(tmp_path, path=path), whole)


def test_a_run_that_is_stopped_in_every_epoch_equals_one_that_never_stopped(whole, tmp_path):
    for hook, nth in (("on_validation_start", 1), ("on_train_batch_start", 3), ("on_validation_end", 1)):
        stops(fit, tmp_path, Preemption(), Sends(hook, nth), path=Preemption.resume_path(tmp_path))
    assert_same(fit(tmp_path, path=Preemption.resume_path(tmp_path)), whole)


@pytest.mark.parametrize(("settings", "hook", "nth"), [
    ({}, "on_train_batch_start", 16), ({}, "on_validation_start", 4), ({}, "on_train_epoch_end", 4),
    ({"max_epochs": 3}, "on_validation_end", 3), ({"max_epochs": -1, "max_steps": 8}, "on_validation_start", 2),
    ({"max_steps": 10}, "on_train_batch_start", 10), ({"max_steps": 10}, "on_train_epoch_end", 3),
    ({}, "on_train_end", 1),
])  # fmt: skip
def test_a_run_that_ends_by_itself_is_not_stopped(settings, hook, nth, tmp_path):
    """EarlyStopping, ``max_steps`` or ``max_epochs`` ends it, with its last hooks; then the program is called."""
    called = []
    whole = fit(tmp_path / "whole", **settings)
    with handlers_put_back():
        signal.signal(signal.SIGTERM, lambda *_: called.append(list(tmp_path.rglob("preempted.ckpt"))))
        ended = fit(tmp_path / "signal", Preemption(), Sends(hook, nth), **settings)
    assert called == [[]]
    assert_same(ended, whole)


@pytest.mark.parametrize(("action", "status"), [
    (lambda: None, Preemption.EXIT_STATUS), (lambda: sys.exit(-1), -1),
])  # fmt: skip
@pytest.mark.parametrize("background", [False, True])
def test_the_programs_handler_is_called_once_after_the_save(action, status, background, whole, tmp_path):
    """Handlers that return, that end the process, and one as submitit's, which requeues the job and exits."""
    complete = []

    def handler(number, frame=None):
        file = torch.load(tmp_path / "best" / "preempted.ckpt", weights_only=False)
        complete.append((signal.Signals(number).name, file["global_step"]))
        os.kill(os.getpid(), number)  # is without effect by now
        action()

    with handlers_put_back():
        signal.signal(signal.SIGUSR2, handler)
        plugins = [AtomicCheckpointIO(background=True)] if background else None
        sends = Sends("on_before_backward", 6, "SIGUSR2")
        stops(fit, tmp_path, Preemption(), sends, status=status, plugins=plugins)
    assert complete == [("SIGUSR2", 6)]
    assert_same(fit(tmp_path, path=Preemption.resume_path(tmp_path)), whole)


def test_a_program_that_goes_on_after_the_end_is_called_for_no_earlier_signal(tmp_path):
    called = []
    with handlers_put_back():
        signal.signal(signal.SIGTERM, lambda *_: called.append(1))
        trainer_callbacks = Preemption(), Sends("on_train_batch_start", 2)
        with pytest.raises(SystemExit):
            fit(tmp_path, *trainer_callbacks)
        fit(tmp_path, trainer_callbacks[0])
    assert called == [1]


def test_a_fit_in_a_thread_says_that_it_obeys_the_time_limit_alone(tmp_path):
    ended = []

    def run(preemption):
        with pytest.raises(SystemExit) as end:
            fit(tmp_path, preemption)
        ended.append(end.value.code)

    def start(*args):
        thread = threading.Thread(target=run, args=args, name="trains")
        thread.start()
        thread.join()

    with pytest.warns(TurboWarning, match=r"main thread.*thread 'trains'.* on SIGTERM.*signals=\(\), time_limit="):
        start(Preemption(signals=("SIGTERM",), time_limit=1e-3))
    start(Preemption(signals=(), time_limit=1e-3))
    assert ended == [Preemption.EXIT_STATUS] * 2
    assert Path(Preemption.resume_path(tmp_path)).name == "preempted.ckpt"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_of_submitit_is_requeued_after_the_save(tmp_path, monkeypatch):
    """submitit's local executor starts the job again, as Slurm does; the second start ends the run."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    class Job:
        def __call__(self, folder):
            path = Preemption.resume_path(folder)
            callbacks = [] if path else [Sends("on_before_backward", 6, "SIGUSR2")]
            return path and Path(path).name, fit(folder, Preemption(), *callbacks, path=path)

        def checkpoint(self, folder):
            assert Preemption.resume_path(folder) is not None
            return submitit.helpers.DelayedSubmission(self, folder)

    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=6)
    path, ended = executor.submit(Job(), tmp_path).result()
    assert path == "preempted.ckpt"
    assert_same(ended, fit(tmp_path / "whole"))
