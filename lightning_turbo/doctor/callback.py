"""``Doctor``: the callback that watches a few steps of a run and reports what slows them down."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from types import FrameType
from typing import Any

from lightning_turbo._checks import check_switches, expect
from lightning_turbo._distributed import tell_first_rank
from lightning_turbo._lightning import Callback, LightningModule, Trainer, check_binding, rank_zero_warn
from lightning_turbo._trainer import is_fitting
from lightning_turbo.doctor.clock import Listener, Plan
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.doctor.facts import Rank, check_steps
from lightning_turbo.doctor.guard import Guard, say
from lightning_turbo.doctor.ranks import start_of_process
from lightning_turbo.doctor.report import Report, as_text
from lightning_turbo.doctor.rules import diagnose
from lightning_turbo.doctor.session import Session
from lightning_turbo.doctor.short_epochs import ShortEpochs
from lightning_turbo.errors import TurboWarning

__all__ = ["Doctor"]

PATIENCE = 30.0
"""Seconds that the first rank waits for the measurements of the others. They finish before it does."""
STOPPED = 130  # exit status after a signal, as shells report for Ctrl-C
NEAR = 300.0
"""A report waits for the end of the first epoch if it is at most this many seconds away."""
BORDERS = ("wait", "cut", "skip")
_made = itertools.count()  # doctors in this process; the first one also times what came before it
_reports = itertools.count()  # reports of a process with several ranks; all ranks count the same


class Doctor(Callback):
    """Report what slows down a training loop, with file and line, and what to do about it.

    The callback lets ``warmup`` steps pass, times ``timed`` steps, watches ``watched`` steps from inside, and times
    everything else in a fit until the first batch of the second epoch. Then it prints its findings and removes itself
    from the Trainer: the rest of the run costs nothing. Losses are bitwise the same as without it.

    It starts first thing in ``fit``. It ends with its report, with an error of its own, with an exception of the run,
    or when training ends. No error of its own is raised into the run, which continues without it, unless ``stop`` is to
    end the program anyway.

    Args:
        warmup: Steps before the measurement, at least 1.
        timed: Steps timed with clock readings only (CUDA events on a GPU), at least 1. Below 5 they do not justify a
            warning.
        watched: Steps watched from inside, which slows them down: at least 2, because growth shows between two steps,
            or 0 to time only.
        text: A file for the printed report; ``None`` writes none.
        json: A file for the report as JSON; ``None`` writes none.
        stop: Whether to end the program with status 0 once the report is complete. The model has then trained for a few
            steps only, so none of the program's handlers run (``finally:``, ``except:``, ``on_exception``,
            ``on_train_end``, ``atexit``), nor anything after ``fit``: nothing is overwritten, and files already written
            are kept. Ctrl-C and SIGTERM end the program in the same way, after ``on_exception`` of earlier callbacks,
            and so does an error of the Doctor's own, with status 1. With several ranks the run continues, because the
            other ranks would wait for this one. In a notebook this ends the kernel.
        border: How to treat the end of the first epoch, with its validation, checkpoints and hooks. ``"wait"`` reports
            after it if, judging by the timed steps, it is less than five minutes away, otherwise right after the
            watched steps. ``"cut"``, which requires ``stop``, ends the first epoch after these steps and its validation
            after a few batches; files that hooks and checkpoints write after the last step are restored. ``"skip"``
            reports right after the watched steps, as runs with several ranks always do.

    Attributes:
        report: The report; ``None`` until it exists.
        stopped: Whether it has ended the program.
        reports: Whether its rank writes the report; only the first one does.
        superseded: Whether it left because the Trainer has an earlier doctor.

    Raises:
        TypeError: If a count of steps is not an integer, ``text`` or ``json`` is not a path, or ``stop`` is not a
            bool.
        ValueError: If a count of steps is too small, ``border`` is invalid, or ``"cut"`` is used without ``stop``.

    Warns:
        TurboWarning: If the report cannot be written to ``text`` or ``json``.

    Note:
        All ranks of a run time their steps; the first one also watches, and reports which rank waits for which. A rank
        without a ``Doctor`` is mentioned in a note of the report.

        A compiled model, any model in a process that has compiled something before, and strategies that split tensors
        are timed but not watched, and the report says so. If another profile function is set (by a debugger, or by
        cProfile before Python 3.12), calls of Python functions are not watched.

    Example:
        >>> from lightning_turbo import Doctor
        >>> Doctor(warmup=2).report is None
        True
    """

    def __init__(
        self,
        *,
        warmup: int = 3,
        timed: int = 10,
        watched: int = 4,
        text: str | os.PathLike[str] | None = None,
        json: str | os.PathLike[str] | None = None,
        stop: bool = False,
        border: str = "wait",
    ) -> None:
        check_binding("Doctor")
        check_steps(warmup=warmup, timed=timed, watched=watched)
        for name, path in (("text", text), ("json", json)):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"Doctor({name}={path!r}): expected the path of the file to write, or None for none.")
        check_switches(stop=stop)
        expect(border in BORDERS, "border", border, f"one of {', '.join(map(repr, BORDERS))}")
        expect(border != "cut" or stop, "border", border, "'wait' or 'skip' without stop=True, which ends the program")
        self.plan = Plan(warmup, timed, watched)
        self.text = text
        self.json = json
        self.stop = stop
        self.border = border
        self.report: Report | None = None
        self.stopped = False
        self.superseded = False
        self.reports = True
        self._session: Session | None = None
        self._guard = Guard(self._give_up)
        self._begin = time.time() if next(_made) else start_of_process()
        self._short: ShortEpochs | None = None
        self._examined: Any = None  # the Trainer of a program that an error of the Doctor's own ends
        self._log: Any = None

    @property
    def log(self) -> Any:
        """The module's ``log``, which ``fit`` sets on each callback."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        # The first access of fit to a callback. Lightning calls no hook before the ranks have met and the data are set
        # up.
        self._log = log
        module = getattr(log, "__self__", None)
        if module is not None:
            self._guard.run(self._start, module.trainer, sys._getframe(1))

    def _start(self, trainer: Any, frame: FrameType) -> None:
        """Start in a fit, unless another doctor is at work."""
        self.superseded = next(each for each in trainer.callbacks if isinstance(each, Doctor)) is not self
        if self.superseded or self._session is not None or self.report is not None or not is_fitting(trainer):
            return
        self.reports = trainer.is_global_zero
        if self.stop and trainer.world_size == 1:
            # If it continued, possibly with shortened epochs, it would overwrite the results of a longer run.
            self._examined = trainer
            self._guard.outlook = "The program is ended, as it would be after the report."
        # Only the first rank watches.
        plan = self.plan if self.reports else Plan(self.plan.warmup, self.plan.timed, 0)
        self._session = Session(plan, trainer, self._guard, self._begin, frame)
        further: list[Listener] = [_Ending(self, self._session)]
        if self.border == "cut" and trainer.world_size == 1:
            self._short = ShortEpochs(trainer, self._session.plan.needed)
            further.insert(0, self._short)
        self._session.begin(further)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Determine how long the fit will be, or leave if another doctor is at work."""
        self._guard.run(self._start_training, trainer)

    def _start_training(self, trainer: Any) -> None:
        if self.superseded:
            self._leave(trainer)
        elif self._session is not None:
            self._session.look_at_length()
            if self._short is not None:
                self._short.cut(self._session.length)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Examine the batch."""
        if self._session is not None:
            self._guard.run(self._session.look_at, batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what was seen if the run ended early."""
        self._guard.run(self._complete, trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching, report, and let the exception pass. Ctrl-C and SIGTERM end the program like ``stop``."""
        session = self._session
        self._examined = None  # the program ends with its own error
        if session is None:
            return
        if self._is_enough(session):
            session.notes = (*session.notes, f"the end of the epoch ended in {type(exception).__name__}: {exception}")
        self._guard.run(self._finish, trainer, type(exception).__name__)
        if isinstance(exception, KeyboardInterrupt) or trainer.received_sigterm:
            self._end_program(trainer, STOPPED)
        elif self._is_enough(session):
            self._end_program(trainer, 0)

    def _complete(self, trainer: Any) -> None:
        """Report, and end the program if requested and all steps are over."""
        session = self._session
        self._finish(trainer)
        if session is not None and self._is_enough(session):
            self._end_program(trainer, 0)

    def _is_enough(self, session: Session) -> bool:
        return session.clock.step >= session.plan.needed

    def _end_program(self, trainer: Any, status: int) -> None:
        """End the program without its handlers if ``stop`` is set, so that it does not save its few steps."""
        if self.stop and trainer.world_size == 1:
            self.stopped = True
            end_program(status)

    def _give_up(self) -> None:
        """Leave after an error of the Doctor itself."""
        session, self._session = self._session, None
        if session is not None:
            session.stop()
            if self._short is not None:
                self._short.close()
            self._leave(session.trainer)
        if self._examined is not None:
            self._end_program(self._examined, 1)

    def _leave(self, trainer: Any) -> None:
        """Remove this callback from the Trainer; the list being iterated over stays unchanged."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        # Lightning sets these methods of its module on every callback.
        vars(self).pop("log_dict", None)
        self._log = None

    def _gather(self, trainer: Trainer, session: Session, patience: float) -> tuple[Rank, ...]:
        """Return the measurements of all ranks, on the first of several; nothing, and a note, if some are missing."""
        if trainer.world_size == 1:
            return ()
        ranks = tell_first_rank(session.rank(), f"doctor/{next(_reports)}", patience)
        missing = [str(rank) for rank, each in enumerate(ranks) if each is None]
        if missing:
            why = f"ranks {', '.join(missing)} reported nothing: who waits for whom is not known"
            session.notes = (*session.notes, why)
        return () if missing else tuple(ranks)

    def _finish(self, trainer: Trainer, interrupted: str = "") -> None:
        """Write the report, unless there is one, and leave."""
        # Taken first, because an error below ends in ``on_exception``, which must not start over.
        session, self._session = self._session, None
        if session is None:
            return
        # Restore the profiler's methods before evaluating anything, whatever happens to the report.
        session.stop()
        if self._short is not None:
            self._short.close()
        self._leave(trainer)
        if not session.clock.epochs:  # training has not started
            return
        ranks = self._gather(trainer, session, 0.0 if interrupted else PATIENCE)
        if not self.reports:
            return
        facts, segments = session.facts(ranks)
        self.report = Report(
            facts=facts,
            findings=tuple(diagnose(facts)),
            timeline=tuple(segments),
            short=session.shortfall(interrupted),
        )
        say(f"\n{as_text(self.report)}")
        try:
            self.report.save(text=self.text, json=self.json)
        except OSError as error:  # do not end a training run because of a report
            rank_zero_warn(f"Doctor could not write its report: {error}.", category=TurboWarning)


class _Ending(Listener):
    """Ends a Doctor's measurement of a fit once everything was seen.

    The ``Doctor`` adds it as the last listener of its clock, and the report ends it. Whether to wait for the end of the
    epoch is decided once, after the last planned step.
    """

    def __init__(self, doctor: Doctor, session: Session) -> None:
        self.doctor = doctor
        self.session = session
        self._waits: bool | None = None

    def begin_step(self, step: int) -> None:
        """Report between two steps, unless the end of the epoch is still to come."""
        session = self.session
        if step < session.plan.needed:
            return
        if self._waits is None:
            self._waits = not session.clock.has_border and self._is_near()
        if not self._waits:
            self.doctor._complete(session.trainer)

    def fetched(self, step: int) -> None:
        """Report with the first batch of the next epoch."""
        if step >= self.session.plan.needed and self.session.clock.has_border:
            self.doctor._complete(self.session.trainer)

    def end_training(self) -> None:
        """Report before the hooks at the end of training, which may save the result."""
        self.doctor._complete(self.session.trainer)

    def _is_near(self) -> bool:
        """Return whether the end of the first epoch is worth waiting for."""
        session = self.session
        border = self.doctor.border
        if border == "skip" or session.trainer.world_size > 1:
            return False
        if border == "cut":
            return True
        left = session.length.batches - session.clock.epochs[-1].steps
        if left * session.steps.mean() <= NEAR:
            return True
        away = "unknown" if left == math.inf else f"about {left * session.steps.mean() / 60:.0f} minutes away"
        note = f"the end of the epoch, {away}, was not waited for: lightning-turbo doctor SCRIPT cuts one short"
        session.notes = (*session.notes, note)
        return False
