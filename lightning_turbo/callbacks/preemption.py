"""``Preemption``: ends a run on a signal, so that another one goes on from the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import expect, is_list, is_number
from lightning_turbo._distributed import error_under_way, host_group, rank_and_size
from lightning_turbo._lightning import Callback, LightningModule, Trainer, check_binding, rank_zero_info
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import handlers_before_run, is_fitting, keep_handlers, requeue_signal

__all__ = ["Preemption", "attach_preemption"]

_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2")


class Preemption(Callback):
    """Save and end a run on a signal, or when its time is nearly over, so that another run goes on.

    A signal to any rank is shared with all ranks, on the host, after each optimizer step. All of them save one
    checkpoint, ``preempted.ckpt``, after the same step, at most one behind the signal's, once what is due after that
    step is done (validation, other checkpoints). Then they end with exit status 75. With ``ExactResume``, as under the
    turbo strategies, a run that goes on from the file equals one that never stopped. ``"turbo_ddp"`` adds
    ``Preemption(signals=("SIGTERM",))`` if there is none.

    The file lies where ``ModelCheckpoint`` saves, else in the Trainer's ``default_root_dir``; the next preemption
    replaces it. Another signal while it is written changes nothing. Worker processes of loaders ignore the signals.

    In a Slurm job that Lightning requeues (``SLURMEnvironment(auto_requeue=True)``), its signal is shared with
    all ranks in the same way, and then left to Lightning, which saves ``hpc_ckpt_N.ckpt`` and requeues the job.

    Args:
        signals: Names of the signals; those that the system does not have are left out of the default. A handler of
            the program's own is called too.
        time_limit: Seconds, or a ``timedelta``, from now until the process has to have ended. The run ends when less
            is left than twice its longest step, validations and saves included, and a tenth of the limit, of which at
            most a minute. ``None``: no limit.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a signal is unknown or cannot be handled, or the limit is not above 0.

    Note:
        Signals are handled by Python in the main thread; a fit in another thread obeys the time limit alone. A signal
        during a validation waits for its end. Gradients are in no checkpoint, so that the run ends at the end of an
        accumulation window. torchrun kills what still runs 30 seconds after its own signal.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import Preemption
        >>> trainer = Trainer(accelerator="cpu", callbacks=[Preemption(time_limit=3600)], logger=False)
        >>> path = Preemption.resume_path("runs")  # trainer.fit(model, ckpt_path=path)
    """

    EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again

    def __init__(self, signals: Sequence[str] = _NAMES, time_limit: float | timedelta | None = None) -> None:
        check_binding("Preemption")
        seconds = time_limit.total_seconds() if isinstance(time_limit, timedelta) else time_limit
        valid = seconds is None or is_number(seconds)
        expect(valid, "Preemption(time_limit)", time_limit, "seconds, a timedelta or None", TypeError)
        expect(seconds is None or seconds > 0, "Preemption(time_limit)", time_limit, "more than 0 seconds")
        self._signals = _numbers(signals)
        self._clock = _Clock(seconds)
        self._shared = _SharedSignals()
        self._cleanup = ExitStack()  # undoes what a run changes

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a process that is spawned with it, has nothing to undo.
        return {**vars(self), "_cleanup": ExitStack()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the worker processes of loaders ignore the signals."""
        self._cleanup.close()
        if stage == "fit":
            self._shared = _SharedSignals()
            replaced = ReplacedMethod(trainer.strategy, "process_dataloader", self._process)
            self._cleanup.callback(replaced.put_back)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals; those that come before the training are obeyed after its first step."""
        self._listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, and obey them after each optimizer step."""
        self._listen(trainer)
        self._shared.connect()
        self._clock.start()
        loop: Any = trainer.fit_loop.epoch_loop
        replaced = [ReplacedMethod(loop, "on_advance_end", self._after_batch(trainer, loop))]
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6 waits for the device in every batch for this
            replaced.append(ReplacedMethod(loop, "_broadcast_sigterm_tensor", lambda method: None))
        for each in replaced:
            self._cleanup.callback(each.put_back)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for what the ranks still tell one another."""
        self._shared.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put everything back."""
        self._shared.close()
        self._cleanup.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put everything back."""
        self._cleanup.close()

    @staticmethod
    def resume_path(folder: str | os.PathLike[str]) -> str | None:
        """Return the newest complete checkpoint below a folder, whatever its name, for ``ckpt_path``.

        Args:
            folder: It need not exist. Links are followed, and those without their file passed over, as half files are.

        Returns:
            The path; ``None`` if there is no complete file that ends in ``.ckpt``, so that the run begins.
        """
        files = [path for path in Path(folder).rglob("*.ckpt") if path.is_file()]
        newest = sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        return next((str(path) for path in newest if _is_complete(path)), None)

    def _process(self, process: Callable[[object], object], dataloader: object) -> object:
        loader = process(dataloader)
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, _IgnoreSignals):
            before = loader.worker_init_fn
            loader.worker_init_fn = _IgnoreSignals(tuple(self._signals), before)
            self._cleanup.callback(_restore, ref(loader), before)
        return loader

    def _listen(self, trainer: Any) -> None:
        """Note signals from now on; Lightning, which has its own handlers by now, puts the program's back."""
        if threading.current_thread() is not threading.main_thread():
            return
        requeue = requeue_signal(trainer)
        program = handlers_before_run(trainer)
        for number in {*self._signals, *([] if requeue is None else [requeue])}:
            before = signal.getsignal(number)
            if getattr(before, "__self__", None) is self._shared:
                continue
            if number == requeue:
                self._shared.requeue = before if callable(before) else None
                signal.signal(number, self._shared.receive_requeue)
            else:
                self._shared.others[number] = program.get(number)
                signal.signal(number, self._shared.receive)
            self._cleanup.callback(_put_back, number, self._shared, before)

    def _after_batch(self, trainer: Any, loop: Any) -> Callable[..., None]:
        def on_advance_end(method: Callable[..., None], *args: Any) -> None:
            # First what is due after this batch, so that the checkpoint counts a validation as made.
            method(*args)
            # A checkpoint holds no gradients, so that a run is left between optimizer steps, not in mid-window.
            if not loop._should_accumulate():
                self._obey(trainer)

        return on_advance_end

    def _obey(self, trainer: Any) -> None:
        if self._clock.is_nearly_over():
            self._shared.stop = True
        stop, requeue = self._shared.by_all()
        if requeue and self._shared.requeue is not None:
            self._shared.requeue(requeue_signal(trainer), None)  # on all ranks: it saves
        if stop:
            self._end(trainer)

    def _end(self, trainer: Any) -> None:
        """Save, unless Lightning did for the job that it requeued, and end this process."""
        callback = trainer.checkpoint_callback
        path = Path(getattr(callback, "dirpath", None) or trainer.default_root_dir) / "preempted.ckpt"
        saves = not self._shared.was_requeued
        if saves:
            trainer.save_checkpoint(path)
        self._shared.close()
        trainer.strategy.barrier("Preemption")  # a job may end all ranks when the first one has ended
        # Until the process has ended, signals change nothing.
        keep_handlers(trainer, dict.fromkeys(self._signals, self._shared.receive))
        where = f"The state of step {trainer.global_step} is in {path}." if saves else ""
        rank_zero_info(
            f"Preemption: a signal or the time limit ends the run. {where}The exit status is {self.EXIT_STATUS}."
        )
        raise SystemExit(self.EXIT_STATUS)


def attach_preemption(trainer: Any) -> None:
    """Add a ``Preemption`` for SIGTERM behind a Trainer's other callbacks, if it has none and trains."""
    if is_fitting(trainer) and not any(isinstance(callback, Preemption) for callback in trainer.callbacks):
        trainer.callbacks.append(Preemption(signals=("SIGTERM",)))


class _SharedSignals:
    """The signals that any rank of a run received: the ranks exchange them once a step, on the host.

    ``Preemption`` makes it for a fit, connects it when training starts and closes it at its end. Each exchange starts
    a collective, and reads that of the step before, which had a step's time: a rank waits only for one more than a
    step behind. Every rank reads the same after the same step, so that all act together. One rank alone needs no
    collective, and acts after the signal's step.
    """

    def __init__(self) -> None:
        self.stop = self.was_requeued = False
        self.others: dict[int, Any] = {}  # handlers of the program, by signal
        self.requeue: Callable[..., Any] | None = None  # Lightning's handler
        self._requeue_received = False
        self._group: Any = None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def connect(self) -> None:
        """Make the process group of the exchange; a collective call."""
        self._group = host_group() if rank_and_size()[1] > 1 else None

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal that ends the run."""
        self.stop = True
        if callable(other := self.others.get(number)):
            other(number, frame)

    def receive_requeue(self, number: int, frame: Any) -> None:
        """Handle the signal on which Lightning requeues the job."""
        self._requeue_received = True

    def by_all(self) -> tuple[bool, bool]:
        """Return whether any rank is to stop, and whether the job is to be requeued, which is true once."""
        own = torch.tensor([self.stop, self._requeue_received], dtype=torch.int32)
        if self._group is not None:
            work = torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True)
            pending = self._pending
            self._pending = (work, own)
            if pending is None:  # of the first step there is none before
                return False, False
            pending[0].wait()
            own = pending[1]
        stop, requeue = map(bool, own.tolist())
        first = requeue and not self.was_requeued
        self.was_requeued |= requeue
        return stop, first

    def close(self) -> None:
        """Wait for the last collective, which a process must not leave behind, unless an error is under way."""
        # The others end as well, and start the collective that this one waits for; after an error they may not.
        if self._pending is not None and error_under_way() is None:
            self._pending[0].wait()
        self._pending = None


class _Clock:
    """Knows when the time of a run is nearly over: it measures the longest time from one step to the next."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._end = None if limit is None else time.monotonic() + limit
        self._last: float | None = None
        self._longest = 0.0

    def start(self) -> None:
        self._last = time.monotonic()

    def is_nearly_over(self) -> bool:
        """Whether too little is left for another step; called after each."""
        if self._end is None or self._limit is None:
            return False
        now = time.monotonic()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return self._end - now < 2 * self._longest + min(60.0, self._limit / 10)


class _IgnoreSignals:
    """A ``worker_init_fn`` that has a worker process ignore signals, which go to all processes of a job."""

    def __init__(self, numbers: tuple[int, ...], then: Callable[[int], None] | None) -> None:
        self._numbers = numbers
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)


def _restore(loader: ref[DataLoader[Any]], before: Callable[[int], None] | None) -> None:
    alive = loader()
    if alive is not None:
        alive.worker_init_fn = before


def _put_back(number: int, shared: _SharedSignals, before: Any) -> None:
    """Put a handler back, unless another one stands there by now."""
    if getattr(signal.getsignal(number), "__self__", None) is shared:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _numbers(names: Any) -> list[int]:
    """Return the numbers of signals; of the default, those that this system has."""
    expected = f"names of signals, as {list(_NAMES)}"
    expect(is_list(names), "Preemption(signals)", names, expected, TypeError)
    known = {name: getattr(signal, name, None) for name in names if isinstance(name, str)}
    unknown = [name for name in names if known.get(name) is None and names is not _NAMES]
    expect(not unknown and {"SIGKILL", "SIGSTOP"}.isdisjoint(known), "Preemption(signals)", names, expected)
    return [int(number) for number in known.values() if number is not None]


def _is_complete(path: Path) -> bool:
    """Whether a checkpoint has the table at its end that torch writes last."""
    try:
        with zipfile.ZipFile(path) as file:
            return bool(file.namelist())
    except (zipfile.BadZipFile, OSError):
        return False
