"""``Doctor``: the callback that watches a few steps of a run and reports what slows them down."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from lightning_turbo._checks import check_switches, expect
from lightning_turbo._lightning import Callback, LightningModule, Trainer, check_binding, rank_zero_warn
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.doctor.facts import check_steps
from lightning_turbo.doctor.guard import Guard, say
from lightning_turbo.doctor.report import Report, as_text
from lightning_turbo.doctor.rules import diagnose
from lightning_turbo.doctor.session import Session
from lightning_turbo.doctor.timeline import Listener, Plan
from lightning_turbo.errors import TurboWarning

__all__ = ["Doctor"]

STOPPED = 130  # exit status after a signal, as shells report for Ctrl-C
SAMPLED = 1.0
"""Seconds of steps in which lines are sampled before a report, where short steps are over sooner."""


class Doctor(Callback):
    """Report what slows down a training loop, with file and line, and what to do about it.

    The callback lets ``warmup`` steps pass, times ``timed`` steps, watches ``watched`` steps from inside, and samples
    the stack of this process and of worker processes all the while. It sums up the whole fit until the first batch of
    the second epoch, if that comes within ``minutes``. Then it prints its findings and removes itself from the Trainer:
    the rest of the run costs nothing. Losses are bitwise the same as without it, no epoch is cut short, and no file is
    touched.

    It starts in ``setup``, and ends with its report, with an error of its own, with an exception of the run, or when
    training ends. No error of its own is raised into the run, which continues without it, unless ``stop`` is to end the
    program anyway.

    Args:
        warmup: Steps before the measurement, at least 1.
        timed: Steps timed with clock readings only (CUDA events on a GPU), at least 1. Below 5 they do not justify a
            warning.
        watched: Steps watched from inside, which slows them down: at least 2, because growth shows between two steps,
            or 0 to time only.
        minutes: Minutes of training, at least 0. The report waits for the end of the first epoch, or for a validation
            before it, if that comes within them by the time of the steps; otherwise it comes after the watched steps
            and a second of further ones. When they are over, it comes at once. With 0 it comes right after the watched
            steps, however long they take.
        json: A file for the report as JSON; ``None`` writes none.
        stop: Whether to end the program with status 0 once the report is complete. None of the program's handlers run
            (``finally:``, ``except:``, ``on_exception``, ``on_train_end``, ``atexit``), nor anything after ``fit``;
            files already written are kept. Ctrl-C and SIGTERM end the program in the same way, after ``on_exception``
            of earlier callbacks, and so does an error of the Doctor's own, with status 1. With several ranks, and once
            more than ``minutes`` were trained, the run continues. In a notebook this ends the kernel.

    Attributes:
        report: The report; ``None`` until it exists.
        stopped: Whether it has ended the program.
        reports: Whether its rank writes the report; only the first one does.
        superseded: Whether it left because the Trainer has an earlier doctor.

    Raises:
        TypeError: If a count of steps is not an integer, ``json`` is not a path, or ``stop`` is not a bool.
        ValueError: If a count of steps is too small, or ``minutes`` is negative.

    Warns:
        TurboWarning: If the report cannot be written to ``json``.

    Note:
        Only the first of several ranks watches and reports.

        A compiled model, any model in a process that has compiled something before, and strategies that split tensors
        are timed and sampled but not watched, and the report says so. If another profile function is set (by a
        debugger, or by cProfile before Python 3.12), calls of Python functions are not watched.

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
        minutes: float = 5.0,
        json: str | os.PathLike[str] | None = None,
        stop: bool = False,
    ) -> None:
        check_binding("Doctor")
        check_steps(warmup=warmup, timed=timed, watched=watched)
        is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
        expect(is_number and minutes >= 0, "minutes", minutes, "a number of minutes, 0 or more")
        if json is not None and not isinstance(json, (str, os.PathLike)):
            raise TypeError(f"Doctor(json={json!r}): expected the path of the file to write, or None for none.")
        check_switches(stop=stop)
        self.plan = Plan(warmup, timed, watched)
        self.minutes = minutes
        self.json = json
        self.stop = stop
        self.report: Report | None = None
        self.stopped = False
        self.superseded = False
        self.reports = True
        self._session: Session | None = None
        self._guard = Guard(self._give_up)
        self._examined: Any = None  # the Trainer of a program that an error of the Doctor's own ends

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start in a fit, unless another doctor is at work."""
        if stage == "fit":
            self._guard.run(self._start, trainer, sys._getframe(1))

    def _start(self, trainer: Any, frame: Any) -> None:
        self.superseded = next(each for each in trainer.callbacks if isinstance(each, Doctor)) is not self
        self.reports = trainer.is_global_zero
        if self.superseded or not self.reports:
            self._leave(trainer)
        elif self._session is None and self.report is None:
            if self.stop and trainer.world_size == 1:
                self._examined = trainer
                self._guard.outlook = "The program is ended, as it would be after the report."
            ending = _Ending(self)
            self._session = ending.session = Session(self.plan, trainer, self._guard, frame, ending)
            self._session.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Examine the batch."""
        if self._session is not None:
            self._guard.run(self._session.look_at, batch)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching, report, and let the exception pass. Ctrl-C and SIGTERM end the program like ``stop``."""
        if self._session is None:
            return
        self._examined = None  # the program ends with its own error
        self._guard.run(self._finish, type(exception).__name__)
        if isinstance(exception, KeyboardInterrupt) or trainer.received_sigterm:
            self._end_program(trainer, STOPPED)

    def complete(self, why: str = "", may_end: bool = True) -> None:
        """Report, and end the program if requested and all steps are over.

        Args:
            why: What ended the look at the run; empty if the run ended, or everything was seen.
            may_end: Whether the program may be ended; not if more than the minutes were trained.
        """
        session = self._session
        self._finish(why)
        if session is not None and may_end and session.timeline.step >= session.plan.needed:
            self._end_program(session.trainer, 0)

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
            session.close()
            self._leave(session.trainer)
        if self._examined is not None:
            self._end_program(self._examined, 1)

    def _leave(self, trainer: Any) -> None:
        """Remove this callback from the Trainer; the list being iterated over stays unchanged."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        # Lightning sets these methods of its module on every callback.
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def _finish(self, why: str = "") -> None:
        """Write the report, unless there is one, and leave."""
        # Taken first, because an error below ends in ``on_exception``, which must not start over.
        session, self._session = self._session, None
        if session is None:
            return
        # Restore the profiler's methods before evaluating anything, whatever happens to the report.
        session.stop()
        self._leave(session.trainer)
        try:
            if session.timeline.epochs:  # otherwise training has not started
                facts = session.facts()
                self.report = Report(facts=facts, findings=tuple(diagnose(facts)), short=session.shortfall(why))
        finally:
            session.close()
        if self.report is None:
            return
        say(f"\n{as_text(self.report)}")
        try:
            self.report.save(self.json)
        except OSError as error:  # do not end a training run because of a report
            rank_zero_warn(f"Doctor could not write its report: {error}.", category=TurboWarning)


class _Ending(Listener):
    """Decides when a Doctor has seen enough of a fit.

    The ``Doctor`` makes it with its session. What to wait for is decided once, after the last planned step.
    """

    session: Session

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self._begun = math.inf  # when training began
        self._goal: str | None = None

    def begin_step(self, step: int) -> None:
        """Report between two steps, where nothing more is waited for."""
        session = self.session
        self._begun = min(self._begun, time.perf_counter())
        if self._left() < 0 and step > session.plan.warmup:
            self._report_late()
        elif step >= session.plan.needed:
            self._goal = self._goal if self._goal is not None else self._choose()
            validated = self._goal == "validation" and any(each.validations for each in session.timeline.epochs)
            sampled = self._goal == "samples" and (step - session.plan.watched) * session.step_seconds() >= SAMPLED
            if not self._goal or validated or sampled:
                self.doctor.complete()

    def begin_hook(self, hook: str) -> None:
        """Report in a validation that goes on beyond the minutes."""
        if hook == "validation_step" and self._left() < 0 and self.session.timeline.step >= self.session.plan.needed:
            self._report_late()

    def fetched(self, step: int) -> None:
        """Report with the first batch of the next epoch."""
        if step >= self.session.plan.needed and self.session.timeline.has_border:
            self.doctor.complete(may_end=self._left() >= 0)

    def end_training(self) -> None:
        """Report before the hooks at the end of training, which may save the result."""
        self.doctor.complete(may_end=self._left() >= 0)

    def _left(self) -> float:
        """Return the seconds until the minutes are over; no time is over with 0 minutes."""
        minutes, begun = self.doctor.minutes, min(self._begun, time.perf_counter())
        return begun + 60.0 * minutes - time.perf_counter() if minutes else 0.0

    def _report_late(self) -> None:
        """Report because the minutes are over; what was trained in them is worth more than a quick end."""
        self.session.notes += (f"the {self.doctor.minutes:g} minutes were over before everything was seen",)
        self.doctor.complete("the limit of minutes", may_end=False)

    def _choose(self) -> str:
        """Return what the report waits for: "border", "validation", "samples" or nothing."""
        session = self.session
        trainer, timeline, left = session.trainer, session.timeline, self._left()
        if timeline.has_border:
            return ""
        done, step = timeline.epochs[-1].steps, session.step_seconds()
        between = trainer.val_check_batch if trainer.enable_validation else None
        away = {
            "border": (trainer.num_training_batches - done) * step,
            "validation": (between - done % between) * step if between and between < math.inf else math.inf,
        }
        goal = next((name for name, seconds in away.items() if seconds < left), "samples" if left else "")
        if goal != "border":
            when = "unknown" if away["border"] == math.inf else f"about {away['border'] / 60:.0f} minutes away"
            session.notes += (f"the end of the epoch, {when}, was not waited for: what lies there was not seen",)
        return goal
