"""``Preemption``: saves a run when it is told to end, so that another run can resume from the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_choice, expect, is_list, is_number
from lightning_turbo._distributed import error_under_way, host_group, rank_and_size
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    TunerExitException,
    auto_add_worker_init_fn,
    check_binding,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import handlers_before_run, is_fitting, keep_handlers, requeue_signal
from lightning_turbo.errors import TurboWarning

__all__ = ["Preemption", "attach_preemption"]

_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2")
# Reasons to act beside the numbers of signals: the time limit, Slurm through Lightning, and what a source says.
_TIME, _REQUEUE, _SOURCE = 0, -1, -2
_MOST_NAMED = 16  # ranks in an error


class Preemption(Callback):
    """Save and end a run on a signal, or when its time is nearly over, so that another run can resume.

    The ranks share a signal to any of them, on the host, after each optimizer step. All of them save one checkpoint,
    ``preempted.ckpt``, after the same step, at most one step after the signal, and after the work due at that step
    (validation, other checkpoints, the hooks at the end of an epoch). Then each rank calls the handler that the program
    had installed for the signal, and exits with status 75, unless that handler ends the process. A run that ends by
    itself at that step is not stopped: it makes its last hooks, and the handler is called after them. With
    ``ExactResume``, as under the turbo strategies, a run that resumes from the file equals one that never stopped.
    ``"turbo_ddp"`` adds ``Preemption(signals=("SIGTERM",))`` if there is none.

    The file is written where ``ModelCheckpoint`` saves, or to the Trainer's ``default_root_dir``; the next preemption
    replaces it. Further signals while it is written have no effect. Worker processes of loaders ignore the signals.

    In the same exchange the ranks tell their batches. If some ranks are at the end of an epoch and others are not, or
    have no batch in it at all, an error names them: they would go out of phase without a word, and wait for one another
    in the end.

    In a Slurm job that Lightning requeues (``SLURMEnvironment(auto_requeue=True)``), the ranks share its signal in the
    same way and then leave it to Lightning, which saves ``hpc_ckpt_N.ckpt`` and requeues the job. Where the program has
    a handler of its own for that signal, as submitit's, Lightning does not requeue, and the signal is one like others.

    Args:
        signals: Names of the signals. The default skips those that the system lacks. The program's own handlers are
            called too, after the save and with ``None`` as the frame.
        time_limit: Seconds, or a ``timedelta``, from now until the process must have ended. The run ends when the
            remaining time falls below twice its longest step, validation and saving included, plus a tenth of the limit
            (at most one minute). ``None``: no limit.
        source: A function without arguments that says whether the run is told to end, for where no signal arrives, as
            in a thread or under Ray Train. It is called on every rank after each optimizer step, equally often on all
            of them, and acts like a signal when its result becomes true on any rank.
        ending: What happens after the save. ``"exit"``: exit with status 75. ``"return"``: ``fit`` returns, without
            further hooks but ``teardown``, and ``ended`` is true. A function: it is called with the Trainer on every
            rank in place of the save, and the training goes on; so a run can report its state and use the time that is
            left. It is called again for the next signal.

    Attributes:
        ended: Whether this callback has ended the latest ``fit``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a signal is unknown or cannot be handled, the time limit is not above 0, or ``ending`` is another
            string.
        RuntimeError: In a run, if ranks have different numbers of batches in an epoch.

    Warns:
        TurboWarning: If ``fit`` runs in another thread than the main one, where Python handles no signals, and there is
            no ``source``: it obeys the time limit alone.

    Note:
        A signal during validation waits for its end. No checkpoint holds gradients, so the run ends at the end of an
        accumulation window. torchrun kills processes that still run 30 seconds after its own signal. Without
        ``ExactResume``, Lightning counts an epoch too many with ``max_steps`` after a stop at the end of an epoch. The
        batches of a stream that ``training_step(dataloader_iter)`` fetches by itself are not compared among the ranks.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import Preemption
        >>> trainer = Trainer(accelerator="cpu", callbacks=[Preemption(time_limit=3600)], logger=False)
        >>> path = Preemption.resume_path("runs")  # trainer.fit(model, ckpt_path=path)
    """

    EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again

    def __init__(
        self,
        signals: Sequence[str] = _NAMES,
        time_limit: float | timedelta | None = None,
        *,
        source: Callable[[], object] | None = None,
        ending: Literal["exit", "return"] | Callable[[Any], object] = "exit",
    ) -> None:
        check_binding("Preemption")
        seconds = time_limit.total_seconds() if isinstance(time_limit, timedelta) else time_limit
        valid = seconds is None or is_number(seconds)
        expect(valid, "Preemption(time_limit)", time_limit, "seconds, a timedelta or None", TypeError)
        expect(seconds is None or seconds > 0, "Preemption(time_limit)", time_limit, "more than 0 seconds")
        expect(source is None or callable(source), "Preemption(source)", source, "a function or None", TypeError)
        if not callable(ending):
            check_choice("Preemption(ending)", ending, ("exit", "return"))
        self.ended = False
        self._signals = _numbers(signals)
        self._source = source
        self._source_said = False
        self._ending = ending
        self._clock = _Clock(seconds)
        self._shared = _SharedSignals(self._signals)
        self._cleanup = ExitStack()  # undoes what a run changes

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a spawned process, has nothing to undo.
        return {**vars(self), "_cleanup": ExitStack()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the worker processes of loaders ignore the signals."""
        self._cleanup.close()
        self._shared = _SharedSignals(self._signals)
        self._source_said = self.ended = False
        if stage == "fit":
            self._warn_in_a_thread()
            replaced = ReplacedMethod(
                trainer.strategy, "process_dataloader", partial(self._process, trainer.global_rank)
            )
            self._cleanup.callback(replaced.put_back)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for signals; one that arrives before training takes effect after its first step."""
        self._listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for signals and obey them after each optimizer step."""
        self._listen(trainer)
        self._shared.connect(trainer.fit_loop.epoch_loop.batch_progress)
        self._clock.start()
        loop: Any = trainer.fit_loop.epoch_loop
        replaced = [
            ReplacedMethod(loop, "on_advance_end", self._obey_after(trainer, _is_last_of_epoch, ends_batch=True)),
            ReplacedMethod(trainer.fit_loop, "on_advance_end", self._obey_after(trainer, _is_last_epoch)),
        ]
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6 synchronizes in every batch for it
            replaced.append(ReplacedMethod(loop, "_broadcast_sigterm_tensor", lambda method: None))
        for each in replaced:
            self._cleanup.callback(each.put_back)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make sure in each epoch that the other ranks have a batch too."""
        self._shared.check_begins()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the pending exchange among the ranks."""
        self._shared.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo all changes."""
        self._shared.close()
        self._cleanup.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo all changes, and leave signals to the program for which this run, which ended by itself, did not end."""
        self._cleanup.close()
        self._shared.call_program(self._shared.received)

    @staticmethod
    def resume_path(folder: str | os.PathLike[str]) -> str | None:
        """Return the newest complete checkpoint below a folder, whatever its name, to pass as ``ckpt_path``.

        Args:
            folder: May be missing. Links to files and folders are followed; broken links, incomplete files, and files
                of weights alone, from which no training resumes, are skipped.

        Returns:
            The path, or ``None`` if there is no such ``.ckpt`` file, so that the run starts from scratch.
        """
        newest = sorted(_checkpoints_below(folder), reverse=True)
        return next((str(path) for _, _, path in newest if _may_resume_from(path)), None)

    def _warn_in_a_thread(self) -> None:
        thread = threading.current_thread()
        if self._signals and self._source is None and thread is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in self._signals)
            rank_zero_warn(
                f"Preemption(signals): expected fit in the main thread, where Python handles signals, got the thread "
                f"{thread.name!r}: this run is not saved on {names}. Call fit in the main thread, or let the run end "
                "before its job: Preemption(signals=(), time_limit=SECONDS), or pass source=, a function that is asked "
                "after each step, such as the is_set of a threading.Event that the program's own handler sets.",
                category=TurboWarning,
            )

    def _process(self, rank: int, process: Callable[[object], object], dataloader: object) -> object:
        loader = process(dataloader)
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, _IgnoreSignals):
            # Lightning seeds the workers of a loader that has no such function, and would do so after this.
            auto_add_worker_init_fn(loader, rank)
            before = loader.worker_init_fn
            loader.worker_init_fn = _IgnoreSignals(tuple(self._signals), before)
            self._cleanup.callback(_restore, ref(loader), before)
        return loader

    def _listen(self, trainer: Any) -> None:
        """Install the handlers; Lightning has installed its own by now and restores the program's after the run."""
        if threading.current_thread() is not threading.main_thread():
            return
        program = handlers_before_run(trainer)
        requeue = requeue_signal(trainer)
        if requeue is not None and program.get(requeue) not in (None, signal.SIG_DFL):
            requeue = None  # Lightning leaves it to the program
        for number in {*self._signals, *([] if requeue is None else [requeue])}:
            before = signal.getsignal(number)
            if getattr(before, "__self__", None) is self._shared:
                continue
            if number == requeue:
                self._shared.requeue = before if callable(before) else None
                signal.signal(number, self._shared.receive_requeue)
            else:
                # Python's own of Ctrl-C is none of the program's.
                own = program.get(number)
                self._shared.program[number] = None if own is signal.default_int_handler else own
                signal.signal(number, self._shared.receive)
            self._cleanup.callback(_put_back, number, self._shared, before)

    def _obey_after(
        self, trainer: Any, is_last: Callable[[Any], bool], ends_batch: bool = False
    ) -> Callable[..., None]:
        """Return what replaces the method that ends a batch, or an epoch, and obeys signals unless it was the last."""

        def on_advance_end(method: Callable[..., None], *args: Any) -> None:
            # Before the validation and the hooks at the end of an epoch, in which ranks wait for one another.
            if not ends_batch:
                self._shared.end_epoch()
            elif trainer.fit_loop.epoch_loop._is_training_done:
                self._shared.check_ends()
            # First the work due here, so that the checkpoint counts a validation, or the hooks of an epoch, as done.
            method(*args)
            # A checkpoint holds no gradients, so a run ends between optimizer steps, not inside a window.
            if not (trainer.fit_loop._should_accumulate() or is_last(trainer)):
                self._obey(trainer)

        return on_advance_end

    def _obey(self, trainer: Any) -> None:
        if self._clock.is_nearly_over():
            self._shared.received.add(_TIME)
        if self._source is not None:
            before, self._source_said = self._source_said, bool(self._source())
            if self._source_said and not before:
                self._shared.received.add(_SOURCE)
        received = self._shared.by_all()
        if _REQUEUE in received:
            received.remove(_REQUEUE)
            self._shared.requeue_once(requeue_signal(trainer))
        if received:
            self._end(trainer, received)

    def _end(self, trainer: Any, received: set[int]) -> None:
        """Save, unless Lightning has saved for the requeued job, and end this run; or call the user's ending."""
        if callable(self._ending):
            self._shared.forget(received)
            self._clock.stop()
            self._ending(trainer)
            self._shared.call_program(received)
            return
        callback = trainer.checkpoint_callback
        path = Path(getattr(callback, "dirpath", None) or trainer.default_root_dir) / "preempted.ckpt"
        saves = not self._shared.was_requeued
        if saves:
            trainer.save_checkpoint(path)
            # A handler of the program may end the whole job, so a file that is written in a thread is completed first.
            trainer.strategy.checkpoint_io.teardown()
        self._shared.close()
        trainer.strategy.barrier("Preemption")  # a launcher may kill all ranks once the first one has ended
        self.ended = True
        exits = self._ending == "exit"
        where = f" The state of step {trainer.global_step} is in {path}." if saves else ""
        how = f"The exit status is {self.EXIT_STATUS}." if exits else "fit returns."
        rank_zero_info(f"Preemption: stopping after a signal or at the time limit.{where} {how}")
        if exits:
            self._ignore_signals(trainer)
        self._shared.received.clear()  # nothing is left for the end of the run
        self._shared.call_program(received)
        # Lightning's tuner returns from fit by this exception: no hook follows that would count the epoch as over.
        raise SystemExit(self.EXIT_STATUS) if exits else TunerExitException

    def _ignore_signals(self, trainer: Any) -> None:
        """Make signals have no effect until the process has ended, also once this callback and Lightning are gone."""
        keep_handlers(trainer, dict.fromkeys(self._signals, _ignore))
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                signal.signal(number, _ignore)


def attach_preemption(trainer: Any, signals: Sequence[str] = ("SIGTERM",)) -> None:
    """Append a ``Preemption`` to a Trainer's callbacks, if it has none and is fitting."""
    if is_fitting(trainer) and not any(isinstance(callback, Preemption) for callback in trainer.callbacks):
        trainer.callbacks.append(Preemption(signals))


class _SharedSignals:
    """The signals that any rank of a run received, and the batches of the ranks, exchanged once per step, on the host.

    ``Preemption`` creates it for a fit, connects it when training starts and closes it at the end. Each exchange starts
    a collective and reads that of the previous step, which had one step's time: a rank only waits for ranks more than
    one step behind. Every rank reads the same result after the same step, so they all act together. A single rank needs
    no collective and acts after the step in which the signal arrived.

    Before the first batch of an epoch and at its end there is one exchange more, for which the rank waits. Always: as
    long as all ranks end their epochs with the same step, they start the same exchanges. If one does not, its exchange
    of that step meets the additional one of those that do, so that both sides learn of it. A rank without a batch has
    an end that meets the first batch of the others, which would wait for its gradients in the step.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.received: set[int] = set()  # by this rank: numbers of signals, and ``_TIME``, ``_REQUEUE``, ``_SOURCE``
        self.program: dict[int, Any] = {}  # the program's handlers, by signal
        self.requeue: Callable[..., Any] | None = None  # Lightning's handler
        self.was_requeued = False
        self._kinds = (_TIME, _REQUEUE, _SOURCE, *signals)
        self._group: Any = None
        self._batches: Any = None
        self._has_begun = False  # whether this rank had a batch in this epoch, since the run began or went on
        self._pending: tuple[Any, torch.Tensor] | None = None

    def connect(self, batches: Any) -> None:
        """Create the process group of the exchange; a collective call.

        Args:
            batches: Lightning's progress of the batches of an epoch.
        """
        self._batches = batches
        self._group = host_group() if rank_and_size()[1] > 1 else None

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal that ends the run."""
        self.received.add(number)

    def receive_requeue(self, number: int, frame: Any) -> None:
        """Handle the signal on which Lightning requeues the job."""
        self.received.add(_REQUEUE)

    def by_all(self) -> set[int]:
        """Return what any rank has received."""
        if self._group is None:
            return set(self.received)
        pending, self._pending = self._pending, self._start(ends=False)
        return set() if pending is None else self._read(pending)  # there is none before the first step

    def check_begins(self) -> None:
        """Raise a ``RuntimeError`` before the first batch of an epoch unless the other ranks have one too."""
        if self._group is not None and not self._has_begun:
            self._read(self._start(ends=False))
        self._has_begun = True

    def end_epoch(self) -> None:
        """Take an epoch as over; if it had no batch, as ``check_ends``."""
        if not self._has_begun:
            self.check_ends()
        self._has_begun = False

    def check_ends(self) -> None:
        """Raise a ``RuntimeError`` unless the other ranks end their epoch with this step too."""
        if self._group is not None:
            self._read(self._start(ends=True))

    def _start(self, ends: bool) -> tuple[Any, torch.Tensor]:
        """Start an exchange: a flag for each kind of signal, and a number for each rank, odd if its epoch ends."""
        rank, size = rank_and_size()
        numbers = torch.zeros(len(self._kinds) + size, dtype=torch.int32)
        numbers[: len(self._kinds)] = torch.tensor([kind in self.received for kind in self._kinds])
        numbers[len(self._kinds) + rank] = 2 * self._batches.current.ready + ends
        maximum = torch.distributed.ReduceOp.MAX
        return torch.distributed.all_reduce(numbers, maximum, group=self._group, async_op=True), numbers

    def _read(self, exchange: tuple[Any, torch.Tensor]) -> set[int]:
        """Wait for an exchange, and return the signals that any rank had received when it was started."""
        work, numbers = exchange
        work.wait()
        flags, ranks = numbers.tolist()[: len(self._kinds)], numbers.tolist()[len(self._kinds) :]
        if len({number % 2 for number in ranks}) > 1:
            raise RuntimeError(_describe_ends(ranks))
        return {kind for kind, flag in zip(self._kinds, flags, strict=True) if flag}

    def forget(self, received: set[int]) -> None:
        """Take signals as obeyed; all ranks call it after the same step."""
        self.received -= received
        self.close()  # the exchange under way may hold them too

    def requeue_once(self, number: int | None) -> None:
        """Call Lightning's handler, on all ranks because it saves, unless it was called."""
        if not self.was_requeued and self.requeue is not None:
            self.was_requeued = True
            self.requeue(number, None)

    def call_program(self, received: set[int]) -> None:
        """Call the program's own handlers of these signals."""
        for number in sorted(received):
            if callable(handler := self.program.get(number)):
                handler(number, None)

    def close(self) -> None:
        """Wait for the last collective, which a process must not leave behind, unless an exception is being handled."""
        # The other ranks stop as well and start the collective that this one waits for; after an exception they may
        # not.
        if self._pending is not None and error_under_way() is None:
            self._pending[0].wait()
        self._pending = None


class _Clock:
    """Decides when a run's time is nearly over, from the longest time between two steps."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._end = None if limit is None else time.monotonic() + limit
        self._last = time.monotonic()
        self._longest = 0.0

    def start(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._end = None

    def is_nearly_over(self) -> bool:
        """Return whether the time is too short for another step; called after each step."""
        if self._end is None or self._limit is None:
            return False
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return self._end - now < 2 * self._longest + min(60.0, self._limit / 10)


class _IgnoreSignals:
    """A ``worker_init_fn`` that makes a worker process ignore signals, which reach all processes of a job."""

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


def _describe_ends(ranks: Sequence[int]) -> str:
    """Return the error for ranks of which some end an epoch and others do not, by the numbers of an exchange."""
    sides = {
        side: ", ".join(f"rank {rank} with {_name_batch(number // 2)}" for rank, number in numbered[:_MOST_NAMED])
        + (f" and {len(numbered) - _MOST_NAMED} more" if len(numbered) > _MOST_NAMED else "")
        for side in (0, 1)
        if (numbered := [(rank, number) for rank, number in enumerate(ranks) if number % 2 == side])
    }
    return (
        "Expected all ranks to have the same number of training batches in an epoch, got an end of the epoch on "
        f"{sides[1]}, and none on {sides[0]}. Gradients of different epochs would be averaged, and the ranks would "
        "wait for one another in the end. Give each rank as many batches: a dataset with a length and Lightning's own "
        "sampler or a SeededSampler, or Trainer(limit_train_batches=N) with the N of the shortest rank."
    )


def _name_batch(number: int) -> str:
    return f"batch {number}" if number else "no batch"


def _put_back(number: int, shared: _SharedSignals, before: Any) -> None:
    """Restore a handler, unless another one has been installed since."""
    if getattr(signal.getsignal(number), "__self__", None) is shared:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _numbers(names: Any) -> list[int]:
    """Return the signal numbers; of the default names, those that this system has."""
    expected = f"names of signals, such as {list(_NAMES)}"
    expect(is_list(names), "Preemption(signals)", names, expected, TypeError)
    known = {name: getattr(signal, name, None) for name in names if isinstance(name, str)}
    unknown = [name for name in names if known.get(name) is None and names is not _NAMES]
    expect(not unknown and {"SIGKILL", "SIGSTOP"}.isdisjoint(known), "Preemption(signals)", names, expected)
    return [int(number) for number in known.values() if number is not None]


def _ignore(number: int, frame: Any) -> None:
    """Handle a signal by doing nothing; unlike ``SIG_IGN``, programs that this one starts do not inherit it."""


def _checkpoints_below(folder: str | os.PathLike[str]) -> Iterator[tuple[int, str, Path]]:
    """Yield the time of modification, name and path of each ``.ckpt`` file, except those that vanish meanwhile."""
    looked_into: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(parent)) in looked_into:  # a link to a folder above, or to one seen already
            folders.clear()
            continue
        looked_into.add(place)
        for path in (Path(parent, name) for name in names if name.endswith(".ckpt")):
            with suppress(FileNotFoundError):
                yield path.stat().st_mtime_ns, path.name, path


def _may_resume_from(path: Path) -> bool:
    """Return whether a checkpoint has the table that torch writes last, at its end, and states of optimizers."""
    try:
        record = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
    except (RuntimeError, OSError):
        return False
    return b"optimizer_states" in record


def _is_last_of_epoch(trainer: Any) -> bool:
    """Return whether an epoch ends after this batch; a run that goes on from here would not call its last hooks."""
    return trainer.fit_loop.epoch_loop._is_training_done or _stops_early(trainer)


def _is_last_epoch(trainer: Any) -> bool:
    """Return whether a run ends with this epoch, as ``FitLoop.done`` does, which prints it too."""
    has_all_steps = trainer.global_step >= trainer.max_steps != -1
    has_all_epochs = trainer.fit_loop.epoch_progress.current.processed >= trainer.max_epochs != -1
    return has_all_steps or has_all_epochs or _stops_early(trainer)


def _stops_early(trainer: Any) -> bool:
    """Return whether ``should_stop``, which no checkpoint holds, ends the run now."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early
