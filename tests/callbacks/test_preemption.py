"""Preemption: a signal to any rank, or a time limit, ends a run so that nothing is lost."""

import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.run
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AtomicCheckpointIO, ExactResume, Preemption, PrefetchLoader, TurboDDPStrategy
from lightning_turbo.callbacks import preemption
from lightning_turbo.errors import TurboWarning
from tests.integration.recording import Numbers, RecordingModel
from tests.integration.resuming import assert_same
from tests.ranks import end, rank_command, start, start_ranks
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:You defined a `validation_step`")


class SendsSignal(Callback):
    """Sends this process a signal once, in a hook at a given step."""

    def __init__(self, step=None, hook="on_train_batch_start", number=signal.SIGTERM, times=1):
        def tell(trainer, *_):
            if trainer.global_step == step and not self.sent:
                self.sent = True
                for _ in range(times):
                    os.kill(os.getpid(), number)

        self.sent = False
        setattr(self, hook, tell)


def fit(folder, *callbacks, path=None, loader=PrefetchLoader, workers=0, **settings):
    """Train 3 epochs of 6 batches."""
    torch.manual_seed(0)
    model = RecordingModel()
    settings = {"max_epochs": 3, "default_root_dir": folder, **settings}
    trainer = quiet_trainer(callbacks=list(callbacks), **settings)
    data = loader(Numbers(24), batch_size=4, shuffle=True, num_workers=workers)
    trainer.fit(model, data, DataLoader(Numbers(4), 4), ckpt_path=path, **unpickling(False if path else None))
    return model


def ends(run, *args, **kwargs):
    """Run until Preemption ends the run, and return the path of the checkpoint to resume from."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            run(*args, **kwargs)
        assert end.value.code == Preemption.EXIT_STATUS == 75
        os.kill(os.getpid(), signal.SIGTERM)  # also while the process ends
    finally:
        signal.signal(signal.SIGTERM, before)
        for name in ("SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    return Preemption.resume_path(args[0])


@pytest.mark.parametrize(("strategy", "step", "hook"), [
    ("turbo", 2, "on_train_batch_start"), ("turbo", 2, "on_before_backward"), ("turbo", 5, "on_train_batch_end"),
    ("turbo", 6, "on_validation_start"), ("turbo", 6, "on_train_epoch_start"), ("auto", 2, "on_before_backward"),
])  # fmt: skip
def test_a_preempted_and_resumed_run_equals_an_uninterrupted_one(strategy, step, hook, tmp_path):
    settings = {"strategy": strategy}
    own = [ExactResume()] if strategy == "auto" else []
    whole = fit(tmp_path / "whole", *own, **settings)
    stopped = [*own, Preemption(), SendsSignal(step, hook, times=2)]
    path = ends(fit, tmp_path / "preempted", *stopped, **settings)
    first = torch.load(path, weights_only=False)["global_step"]
    assert first in (step, step + 1)
    rest = fit(tmp_path / "preempted", *own, Preemption(), path=path, **settings)
    assert rest.seen == whole.seen[first:]
    assert rest.losses == whole.losses[first:]
    assert_same(rest.state_dict(), whole.state_dict())
    assert [other for other in whole.others if other[0] == "val"][-len(rest.others) :] == rest.others


def test_preemption_ends_after_the_accumulation_window_and_the_validation(tmp_path):
    settings = {"accumulate_grad_batches": 3, "val_check_interval": 3, "num_sanity_val_steps": 0}
    path = ends(fit, tmp_path, Preemption(), SendsSignal(1, "on_after_backward"), **settings)
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == 2
    validated = saved["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]["completed"]
    assert validated == 2


def test_preemption_saves_next_to_other_checkpoints_and_waits_for_background_saves(tmp_path):
    saves = ModelCheckpoint(tmp_path / "saves", "{step}", every_n_train_steps=2)
    io = AtomicCheckpointIO(background=True)
    settings = {"enable_checkpointing": True, "plugins": [io], "strategy": "turbo"}
    path = ends(fit, tmp_path, saves, Preemption(), SendsSignal(3), **settings)
    assert Path(path) == tmp_path / "saves" / "preempted.ckpt"
    assert torch.load(path, weights_only=False)["global_step"] == 4


def test_ctrl_c_ends_as_other_signals_do_where_it_is_one_of_them(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            fit(tmp_path, Preemption(signals=("SIGINT",)), SendsSignal(2, number=signal.SIGINT))
        assert end.value.code == Preemption.EXIT_STATUS
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_existing_signal_handler_is_called_and_restored(tmp_path):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append("own"))
    try:
        own = signal.getsignal(signal.SIGUSR1)
        fit(tmp_path, Preemption(), max_epochs=1)
        assert signal.getsignal(signal.SIGUSR1) is own
        with pytest.raises(SystemExit):
            fit(tmp_path, Preemption(), SendsSignal(2, number=signal.SIGUSR1))
        assert received == ["own"]
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_preemption_leaves_other_signals_alone_and_all_of_them_in_a_thread(tmp_path):
    handlers = []
    reads = Callback()
    reads.on_train_batch_start = lambda *_: handlers.append(signal.getsignal(signal.SIGUSR2))
    fit(tmp_path, Preemption(signals=("SIGUSR1",)), reads, max_epochs=1)
    assert set(handlers) == {signal.SIG_DFL}
    with pytest.warns(TurboWarning, match="main thread.* SIGTERM, SIGUSR1, SIGUSR2"), ThreadPoolExecutor(1) as thread:
        thread.submit(fit, tmp_path, Preemption(), reads, max_epochs=1)
    assert set(handlers) == {signal.SIG_DFL}
    assert len(handlers) == 12


class TellsAt(Callback):
    """A source that says so from a step on."""

    def __init__(self, step):
        self.step, self.is_told, self.asked = step, False, 0

    def on_train_batch_start(self, trainer, *_):
        self.is_told = trainer.global_step >= self.step

    def source(self):
        self.asked += 1
        return self.is_told


def test_a_source_in_a_thread_ends_the_run_and_a_handler_of_the_program_may_be_one(tmp_path, recwarn):
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    waits = Callback()
    waits.on_after_backward = lambda trainer, *_: trainer.global_step != 7 or told.wait(60)  # for the main thread
    try:
        preemption = Preemption(source=told.is_set, ending="return")
        with ThreadPoolExecutor(1) as thread:
            thread.submit(fit, tmp_path, preemption, SendsSignal(7), waits, strategy="turbo").result()
            # A run that no signal ends.
            told.clear()
            assert preemption.ended
            path = Preemption.resume_path(tmp_path)
            assert torch.load(path, weights_only=False)["global_step"] == 8
            resumed = thread.submit(fit, tmp_path, preemption, path=path, strategy="turbo").result()
            assert not preemption.ended
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_same(resumed.state_dict(), fit(tmp_path, strategy="turbo").state_dict())
    assert [str(each.message) for each in recwarn if "Preemption" in str(each.message)] == []


@pytest.mark.parametrize("step", [3, 5])  # within an epoch, and with its last batch
def test_fit_returns_and_calls_no_hook_that_would_count_the_epoch_as_over(step, tmp_path):
    hooks = []
    ends = Callback()
    ends.on_train_epoch_end = ends.on_train_end = lambda *_: hooks.append("end")
    ends.teardown = lambda *_, stage: hooks.append("teardown")
    before = signal.getsignal(signal.SIGTERM)
    fit(tmp_path, Preemption(ending="return"), ends, SendsSignal(step), strategy="turbo")
    assert hooks == [*(["end"] if step == 5 else []), "teardown"]
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = fit(tmp_path, path=Preemption.resume_path(tmp_path), strategy="turbo")
    assert_same(resumed.state_dict(), fit(tmp_path, strategy="turbo").state_dict())


def test_a_function_as_the_ending_saves_once_for_each_time_and_the_training_goes_on(tmp_path):
    def save(trainer):
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    tells, sends = TellsAt(9), SendsSignal(3)
    went_on = fit(tmp_path, Preemption(source=tells.source, ending=save), tells, sends, strategy="turbo")
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["10.ckpt", "4.ckpt"]
    assert tells.asked == 17, "after each step but the last one"
    whole = fit(tmp_path, strategy="turbo").state_dict()
    assert_same(went_on.state_dict(), whole)
    for path in tmp_path.glob("*.ckpt"):
        assert_same(fit(tmp_path, path=path, strategy="turbo").state_dict(), whole)


@pytest.mark.parametrize("loader", [DataLoader, PrefetchLoader])
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_worker_processes_ignore_the_signal(loader, method, tmp_path):
    class SignalsWorkers(SendsSignal):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGTERM)
                time.sleep(0.2)

    def made(*args, **kwargs):
        return loader(*args, multiprocessing_context=method, **kwargs)

    path = ends(fit, tmp_path, Preemption(), SignalsWorkers(3), loader=made, workers=2)
    assert torch.load(path, weights_only=False)["global_step"] == 4
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_preemption_ends_before_the_time_limit(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    takes = Callback()
    seconds = {2: 30.0}  # one step is long
    takes.on_train_batch_end = lambda trainer, *_: now.__setitem__(0, now[0] + seconds.get(trainer.global_step, 5.0))
    path = ends(fit, tmp_path, Preemption(time_limit=timedelta(seconds=140)), takes)
    # After 5, 35, 40, ...: less than 2 * 30 + 14 seconds are left after 70.
    assert torch.load(path, weights_only=False)["global_step"] == 9
    fit(tmp_path, Preemption(time_limit=1e6), takes, max_epochs=1)


def save_in_order(folder, *names, **content):
    """Save files, each newer than the one before."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.zeros(1000), "optimizer_states": [], **content}, folder / name)
        os.utime(folder / name, (number, number))


def test_resume_path_is_the_newest_complete_checkpoint(tmp_path):
    assert Preemption.resume_path(tmp_path / "no such folder") is None
    save_in_order(tmp_path, "a/old.ckpt", "whole.ckpt", "half.ckpt", "empty.ckpt", "a/other.pt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:3000])
    (tmp_path / "empty.ckpt").write_bytes(b"")
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    assert Preemption.resume_path(tmp_path) == str(tmp_path / "whole.ckpt")
    assert zipfile.is_zipfile(tmp_path / "whole.ckpt")
    (tmp_path / "whole.ckpt").unlink()
    assert Preemption.resume_path(str(tmp_path)) == str(tmp_path / "a" / "old.ckpt")


def test_resume_path_looks_into_linked_folders_once(tmp_path):
    save_in_order(tmp_path, "disk/last.ckpt")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "linked").symlink_to("../disk")
    (tmp_path / "disk" / "above").symlink_to("../runs")
    assert Preemption.resume_path(runs) == str(runs / "linked" / "last.ckpt")


def test_resume_path_skips_files_that_vanish(tmp_path, monkeypatch):
    save_in_order(tmp_path, "kept.ckpt", "gone.ckpt", "gone too.ckpt")
    stat = Path.stat

    def vanishes(path, **arguments):
        if path.name == "gone.ckpt":
            path.unlink()
        found = stat(path, **arguments)
        if path.name == "gone too.ckpt":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", vanishes)
    assert Preemption.resume_path(tmp_path) == str(tmp_path / "kept.ckpt")


def test_resume_path_skips_files_of_weights_alone(tmp_path):
    saves = [
        ModelCheckpoint(tmp_path, "full-{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(tmp_path, "weights-{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True),
    ]
    fit(tmp_path, *saves, max_steps=3, enable_checkpointing=True)
    now = time.time()
    os.utime(tmp_path / "weights-step=3.ckpt", (now + 5, now + 5))
    path = Preemption.resume_path(tmp_path)
    assert path == str(tmp_path / "full-step=2.ckpt")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"signals": "SIGTERM"}, TypeError, "signals.: expected names of signals, .* got 'SIGTERM'"),
    ({"signals": ("SIGNONE",)}, ValueError, "signals.: expected names of signals, .* got .'SIGNONE'"),
    ({"signals": ("SIGKILL",)}, ValueError, "signals.: expected names of signals"),
    ({"signals": (15,)}, ValueError, "signals.: expected names of signals"),
    ({"time_limit": "1h"}, TypeError, "time_limit.: expected seconds, a timedelta or None, got '1h'"),
    ({"time_limit": 0}, ValueError, "time_limit.: expected more than 0 seconds, got 0"),
    ({"source": True}, TypeError, "source.: expected a function or None, got True"),
    ({"ending": "stop"}, ValueError, "ending.: expected 'exit' or 'return', got 'stop'"),
])  # fmt: skip
def test_impossible_values_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Preemption(**arguments)


class Job:
    """A Trainer in a Slurm job that Lightning requeues after SIGUSR2."""

    def __init__(self, folder):
        self.requeued, self.saved = [], []
        environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
        self._accelerator_connector = SimpleNamespace(cluster_environment=environment)
        self._signal_connector = SimpleNamespace(_original_handlers={})
        self.strategy = SimpleNamespace(barrier=lambda name: None)
        self.checkpoint_callback, self.default_root_dir, self.global_step = None, folder, 3
        self.save_checkpoint = self.saved.append


@pytest.mark.parametrize("ends", [False, True])
def test_the_slurm_requeue_signal_is_handled_by_lightning_after_a_step(ends, tmp_path):
    job = Job(tmp_path)
    callback = Preemption(signals=("SIGUSR1",))
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR2, lambda number, frame: job.requeued.append(number))
    try:
        callback._listen(job)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert job.requeued == []  # not in the middle of a step
        callback._obey(job)
        callback._obey(job)
        assert job.requeued == [signal.SIGUSR2]
        if ends:
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(SystemExit) as end:
                callback._obey(job)
            assert end.value.code == Preemption.EXIT_STATUS
        assert job.saved == []  # Lightning has
        callback.teardown(job, None, "fit")
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(job.requeued) == 2  # restores Lightning's handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_requeue_signal_that_the_program_handles_is_one_like_others(tmp_path):
    """Lightning leaves it to the program then, and does not save."""
    job, called = Job(tmp_path), []
    job.strategy.checkpoint_io = SimpleNamespace(teardown=lambda: None)
    callback = Preemption(signals=("SIGUSR2",))
    before = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(list(job.saved)))
    job._signal_connector._original_handlers[signal.SIGUSR2] = signal.getsignal(signal.SIGUSR2)
    try:
        callback._listen(job)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert called == []
        with pytest.raises(SystemExit) as end:
            callback._obey(job)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert end.value.code == Preemption.EXIT_STATUS
    assert called == [[tmp_path / "preempted.ckpt"]]


def test_workers_ignore_the_signals_and_call_the_loaders_worker_init_fn_during_the_run():
    called, before = [], signal.getsignal(signal.SIGUSR2)
    callback = Preemption(signals=("SIGUSR2",))
    loaders = [DataLoader(Numbers(4), worker_init_fn=own) for own in (called.append, None)]
    try:
        for loader in loaders:
            assert callback._process(0, lambda given: given, loader) is loader
            loader.worker_init_fn(len(called) + 5)
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            signal.signal(signal.SIGUSR2, before)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert called == [5]
    kept = loaders.pop(0)
    del loader, loaders  # one of them is deleted before the run ends
    callback.teardown(None, None, "fit")
    assert kept.worker_init_fn == called.append


class DrawsFromNumPy(Numbers):
    """Samples of NumPy's global numbers, which ``seed_everything(workers=True)`` seeds in each worker process."""

    def __getitem__(self, index):
        return torch.tensor(np.random.rand(4), dtype=torch.float32), index


def test_workers_are_seeded_as_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # as seed_everything(workers=True) does

    def samples(*callbacks):
        seen = []
        torch.manual_seed(1)
        see = Callback()
        see.on_train_batch_start = lambda trainer, module, batch, index: seen.append(batch[0].clone())
        trainer = quiet_trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[see, *callbacks])
        trainer.fit(RecordingModel(), DataLoader(DrawsFromNumPy(8), batch_size=2, num_workers=2))
        return torch.cat(seen)

    assert torch.equal(samples(Preemption()), samples())


# Two ranks.


RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SAMPLES = TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(0)), torch.arange(240))
STEPS = 2 * 240 // 2 // 4 // 2  # epochs, ranks, batch size, window


class Net(LightningModule):
    """Draws random numbers, and records its samples."""

    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.folder = folder

    def training_step(self, batch, index):
        time.sleep(0.005)
        with open(self.folder / f"seen.{RANK}", "a") as file:
            print(self.trainer.global_step, *batch[1].tolist(), file=file)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        time.sleep(0.01)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class KilledInTheWrite(AtomicCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if Path(path).name == "preempted.ckpt":
            sync = os.fsync
            os.fsync = lambda file: (sync(file), os.kill(os.getpid(), signal.SIGKILL))
        super().save_checkpoint(checkpoint, path, storage_options)


def train(folder, kill=False, handles=False):
    """Train on a rank until a signal ends the run, and resume from its checkpoint.

    With ``kill``, rank 0 kills itself while it writes ``preempted.ckpt``. With ``handles``, the program has a handler
    that ends rank 0.
    """
    folder = Path(folder)
    if handles:

        def handler(number, frame=None):
            (folder / f"handled.{RANK}").write_text(str(Preemption.resume_path(folder)))
            if RANK == 0:
                sys.exit(3)

        signal.signal(signal.SIGUSR2, handler)
    save = ModelCheckpoint(folder / "saves", "{step}", every_n_train_steps=8, save_top_k=1, monitor="step", mode="max")
    io = KilledInTheWrite() if kill and RANK == 0 else AtomicCheckpointIO()
    trainer = quiet_trainer(
        devices=RANKS, strategy=TurboDDPStrategy(checkpoint_io=io), max_epochs=2, accumulate_grad_batches=2,
        enable_checkpointing=True, callbacks=[save, Preemption()], val_check_interval=12, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip
    path = Preemption.resume_path(folder)
    model = Net(folder)
    torch.manual_seed(RANK)
    data = PrefetchLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=1)
    trainer.fit(model, data, DataLoader(SAMPLES, 120), ckpt_path=path, weights_only=False)
    torch.save(model.state_dict(), folder / f"end.{RANK}")


def start_two(folder, *kill, torchrun=False):
    """Start two ranks, and return their processes."""
    if torchrun:
        command = ["--standalone", "--nproc-per-node", "2", *rank_command(train, folder)]
        return [start(torch.distributed.run.main, [command], folder / "output")]
    return start_ranks(train, [folder, *kill], folder / "output")


def seen(folder):
    """Return the lines that each rank wrote about its samples."""
    return [(folder / f"seen.{rank}").read_text().splitlines() if (folder / f"seen.{rank}").exists() else []
            for rank in range(2)]  # fmt: skip


def wait_for(condition, processes, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline and all(process.is_alive() for process in processes):
        time.sleep(0.005)


def joined(processes, folder):
    """Wait for the processes, and return their exit statuses."""
    for process in processes:
        process.join(120)
    alive = [process.is_alive() for process in processes]
    for process in processes:
        end(process)
    assert not any(alive), (folder / "output").read_text()[-3000:]
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert joined(start_two(folder), folder) == [0, 0], (folder / "output").read_text()[-3000:]
    assert len(seen(folder)[0]) == 2 * STEPS
    return folder


def pids(folder, processes, torchrun):
    """Return the process IDs of the ranks."""
    if not torchrun:
        return [process.pid for process in processes]
    children = Path(f"/proc/{processes[0].pid}/task/{processes[0].pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []  # the run is finished


def signal_until_the_end(folder, moments, torchrun=False):
    """Send one or two signals to a rank at each of these moments, and return the number of preemptions."""
    preempted = 0
    for number, moment in enumerate([*moments, None]):
        before = len(seen(folder)[0])
        processes = start_two(folder, torchrun=torchrun)
        if moment is not None:
            rank, steps, name, twice = moment
            # After the last step the original handlers are restored, and a signal kills the process.
            steps = min(steps, 2 * STEPS - 16 - before)
            wait_for(lambda: len(seen(folder)[rank]) > before + steps, processes)  # noqa: B023
            ranks = pids(folder, processes, torchrun)
            for _ in range((1 + twice) * (steps >= 0)):
                if all(process.is_alive() for process in processes):
                    os.kill(ranks[rank], getattr(signal, name))
                time.sleep(0.02)
        codes = joined(processes, folder)
        if codes == [0] * len(codes):
            return preempted
        output = (folder / "output").read_text()
        expected = {75} if not torchrun else {1}  # that of torchrun
        assert set(codes) == expected, (number, codes, output[-3000:])
        assert not torchrun or not re.search(r"exitcode: (?!75)", output), output[-3000:]
        preempted += 1
    raise AssertionError(f"not finished after {preempted} preemptions: {(folder / 'output').read_text()[-3000:]}")


def same_end(folder, undisturbed):
    assert seen(folder) == seen(undisturbed), "a sample was used twice, never or in another order"
    for rank in range(2):
        ours, theirs = (torch.load(each / f"end.{rank}", weights_only=True) for each in (folder, undisturbed))
        assert_same(ours, theirs, f"rank {rank}")


@pytest.mark.distributed
def test_a_signal_to_one_of_two_ranks_preempts_both_without_loss(undisturbed, tmp_path):
    assert signal_until_the_end(tmp_path, [(1, 3, "SIGTERM", True)]) == 1
    same_end(tmp_path, undisturbed)


@pytest.mark.distributed
def test_each_rank_calls_the_programs_handler_after_the_save(tmp_path):
    processes = start_two(tmp_path, False, True)
    wait_for(lambda: len(seen(tmp_path)[1]) > 4, processes)
    os.kill(processes[1].pid, signal.SIGUSR2)
    assert joined(processes, tmp_path) == [3, Preemption.EXIT_STATUS], (tmp_path / "output").read_text()[-3000:]
    paths = {(tmp_path / f"handled.{rank}").read_text() for rank in range(2)}
    assert paths == {str(tmp_path / "saves" / "preempted.ckpt")}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_signals_at_thirty_random_moments_preempt_without_loss(seed, undisturbed, tmp_path):
    """Ten signals in each of three series, one of which is started by torchrun."""
    chance = random.Random(seed)
    preempted, series = 0, 0
    while preempted < 10:
        folder = tmp_path / str(series)
        folder.mkdir()
        moments = [
            (chance.randrange(2), chance.randrange(30), chance.choice(("SIGTERM", "SIGUSR1", "SIGUSR2")),
             chance.random() < 0.5)
            for _ in range(5)
        ]  # fmt: skip
        preempted += signal_until_the_end(folder, moments, torchrun=seed == 2)
        same_end(folder, undisturbed)
        series += 1


@pytest.mark.slow
@pytest.mark.distributed
def test_a_kill_during_the_save_keeps_the_previous_checkpoint(undisturbed, tmp_path):
    processes = start_two(tmp_path, True)
    wait_for(lambda: len(seen(tmp_path)[1]) > 40, processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    processes[0].join(120)
    assert processes[0].exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()[-3000:]
    end(processes[1])
    path = Preemption.resume_path(tmp_path)
    step = torch.load(path, weights_only=False)["global_step"]
    assert Path(path).name == f"step={step}.ckpt"
    assert step % 8 == 0
    for rank in range(2):
        kept = seen(tmp_path)[rank][: 2 * step]
        (tmp_path / f"seen.{rank}").write_text("".join(f"{line}\n" for line in kept))
    assert signal_until_the_end(tmp_path, []) == 0
    same_end(tmp_path, undisturbed)


class Share(torch.utils.data.IterableDataset):
    """A stream with so many samples on each rank, in every epoch or in one after another."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        length = self.lengths[RANK]
        return iter(torch.arange(length[self.epoch] if isinstance(length, tuple) else length).float()[:, None])


class Means(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.net(batch).mean()

    def validation_step(self, batch, index):
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_on_shares(folder, lengths, *settings):
    """Train two epochs on streams, and write the error of this rank, if there is one."""
    trainer = quiet_trainer(devices=RANKS, strategy="turbo_ddp", max_epochs=2, **dict(settings))
    said = "none"
    try:
        trainer.fit(Means(), DataLoader(Share(lengths), 2), DataLoader(Share([4, 4]), 2))
    except RuntimeError as error:
        said = str(error)
    (folder / f"said.{RANK}").write_text(said)
    if said != "none":
        os._exit(1)  # as an error in a script: the other rank waits for this one


@pytest.mark.distributed
@pytest.mark.parametrize(("lengths", "settings", "ends", "goes_on"), [
    ((20, 16), (), "rank 1 with batch 8", "rank 0 with batch 8"),
    ((2, 8), (), "rank 0 with batch 1", "rank 1 with batch 1"),
    ((20, 14), (("accumulate_grad_batches", 4),), "rank 1 with batch 7", "rank 0 with batch 8"),
    ((20, 18), (("accumulate_grad_batches", 4),), "", ""),  # three steps each
    ((16, 16), (), "", ""),
    ((8, 0), (), "rank 1 with no batch", "rank 0 with batch 1"),
    (((8, 0), 8), (), "rank 0 with no batch", "rank 1 with batch 1"),
    (((8, 0), (8, 0)), (), "", ""),
])  # fmt: skip
def test_ranks_with_different_numbers_of_batches_are_named(lengths, settings, ends, goes_on, tmp_path):
    codes = joined(start_ranks(train_on_shares, [tmp_path, lengths, *settings], tmp_path / "output"), tmp_path)
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2) if (tmp_path / f"said.{rank}").exists()]
    if not ends:
        assert codes == [0, 0], (tmp_path / "output").read_text()[-3000:]
        return
    assert any(f"got an end of the epoch on {ends}, and none on {goes_on}." in each for each in said), said
    assert codes != [0, 0]
