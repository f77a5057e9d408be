"""``Doctor``: the callback that watches a few steps of a run and says what slows them."""

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
"""Seconds that the first rank waits for what the others measured. They end their part before it ends its own."""
STOPPED = 130  # the status after a signal, as shells have it for Ctrl-C
NEAR = 300.0
"""Seconds until the end of the first epoch up to which a report waits for it."""
BORDERS = ("wait", "cut", "skip")
_made = itertools.count()  # doctors in this process: the first one knows all that came before it
_reports = itertools.count()  # of this process with several ranks: the ranks make the same ones


class Doctor(Callback):
    """Report what slows a training loop, by file and line, and what to do about it.

    It lets ``warmup`` steps pass, times ``timed`` steps, watches ``watched`` steps from inside, and times what else a
    fit does until the first batch of the second epoch. Then it prints its findings, and takes itself out of the
    Trainer: what follows costs nothing. Losses are bit for bit the same as without it.

    Who starts it: ``fit``, as the first thing that it does. What ends it: its report, an error of its own, an exception
    of the run, or the end of the training. What always holds: no error of its own ends the run.

    Args:
        warmup: Steps before the first look, at least 1.
        timed: Steps timed with nothing but clock readings (CUDA events on a GPU), at least 1. Below 5 they are no basis
            for a warning.
        watched: Steps watched from inside, which slows these steps down: at least 2, because growth shows between two
            steps, or 0 to time only.
        text: A file for the report as it is printed; ``None`` writes none.
        json: A file for the report as JSON; ``None`` writes none.
        stop: Whether to end the program, with status 0, once the report is complete. It is a program that was trained
            for some steps only: none of its handlers runs, neither ``finally:`` and ``except:`` nor ``on_exception``,
            ``on_train_end`` and ``atexit``, and nothing behind ``fit``, so that it overwrites nothing; what it has
            written itself is kept. Ctrl-C and SIGTERM end it in the same way, behind the ``on_exception`` of callbacks
            before this one. With several ranks the run goes on, because the other ranks would wait for this one. In a
            notebook this ends the kernel.
        border: What becomes of the end of the first epoch, with its validation, its checkpoints and its hooks.
            ``"wait"`` reports behind it if the timed steps say that it is less than five minutes away, else right
            after the watched steps. ``"cut"``, which needs ``stop``, ends the first epoch after these steps and its
            validation after a few batches; files that hooks and checkpoints write behind the last step are put back as
            they were. ``"skip"`` reports right after the watched steps, as runs of several ranks do anyway.

    Attributes:
        report: The report; ``None`` until it is made.
        stopped: Whether it ended the program.
        reports: Whether its rank makes the report: the first one does.
        superseded: Whether it left because the Trainer has an earlier doctor.

    Raises:
        TypeError: If a count of steps is not an integer, ``text`` or ``json`` is not a path, or ``stop`` is not a
            bool.
        ValueError: If a count of steps is too small, or ``border`` is none of its words, or ``"cut"`` without ``stop``.

    Warns:
        TurboWarning: If the report cannot be written to ``text`` or ``json``.

    Note:
        All ranks of a run time their steps, and the first one, which watches and reports, says who waits for whom. A
        rank without a ``Doctor`` is a note of the report.

        A compiled model, any model in a process that has compiled something before, and strategies that split single
        tensors, are timed but not watched from inside, and the report says so. Where another profile function is set
        (by a debugger; before Python 3.12 by cProfile), calls of Python functions are not watched.

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
        self._log: Any = None

    @property
    def log(self) -> Any:
        """The module's ``log``, which fit gives to each callback."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        # Lightning calls no hook before the ranks have met and the data are set up; this is the first thing that fit
        # does with a callback.
        self._log = log
        module = getattr(log, "__self__", None)
        if module is not None:
            self._guard.run(self._start, module.trainer, sys._getframe(1))

    def _start(self, trainer: Any, frame: FrameType) -> None:
        """Begin with a fit, if no other doctor is at work."""
        self.superseded = next(each for each in trainer.callbacks if isinstance(each, Doctor)) is not self
        if self.superseded or self._session is not None or self.report is not None or not is_fitting(trainer):
            return
        self.reports = trainer.is_global_zero
        # Ranks behind the first one do not watch.
        plan = self.plan if self.reports else Plan(self.plan.warmup, self.plan.timed, 0)
        self._session = Session(plan, trainer, self._guard, self._begin, frame)
        further: list[Listener] = [_Ending(self, self._session)]
        if self.border == "cut" and trainer.world_size == 1:
            self._short = ShortEpochs(trainer, self._session.plan.needed)
            further.insert(0, self._short)
        self._session.begin(further)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Look how long the fit will be, or leave to another doctor."""
        self._guard.run(self._start_training, trainer)

    def _start_training(self, trainer: Any) -> None:
        if self.superseded:
            self._leave(trainer)
        elif self._session is not None:
            self._session.look_at_length()
            if self._short is not None:
                self._short.cut(self._session.length)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at the batch."""
        if self._session is not None:
            self._guard.run(self._session.look_at, batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what was seen if the run ended early."""
        self._guard.run(self._complete, trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching, report what was seen, and let the exception pass; Ctrl-C and SIGTERM end as ``stop`` does."""
        session = self._session
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
        """Report, and end the program if it was asked for and all steps are over."""
        session = self._session
        self._finish(trainer)
        if session is not None and self._is_enough(session):
            self._end_program(trainer, 0)

    def _is_enough(self, session: Session) -> bool:
        return session.clock.step >= session.plan.needed

    def _end_program(self, trainer: Any, status: int) -> None:
        """End the program without its handlers if ``stop`` says so: it must not save what it has after some steps."""
        if self.stop and trainer.world_size == 1:
            self.stopped = True
            end_program(status)

    def _give_up(self) -> None:
        """Leave after an error of the Doctor's own."""
        session, self._session = self._session, None
        if session is not None:
            session.stop()
            if self._short is not None:
                self._short.close()
            self._leave(session.trainer)

    def _leave(self, trainer: Any) -> None:
        """Take this callback out of the Trainer; the list under iteration is left as it is."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        # Lightning gives every callback these methods of its module.
        vars(self).pop("log_dict", None)
        self._log = None

    def _gather(self, trainer: Trainer, session: Session, patience: float) -> tuple[Rank, ...]:
        """Return what all ranks of several measured, on the first; nothing, and a note, if some are missing."""
        if trainer.world_size == 1:
            return ()
        ranks = tell_first_rank(session.rank(), f"doctor/{next(_reports)}", patience)
        missing = [str(rank) for rank, each in enumerate(ranks) if each is None]
        if missing:
            why = f"ranks {', '.join(missing)} reported nothing: who waits for whom is not known"
            session.notes = (*session.notes, why)
        return () if missing else tuple(ranks)

    def _finish(self, trainer: Trainer, interrupted: str = "") -> None:
        """Make the report, if there is none yet, and leave."""
        # Taken first: an error in what follows ends in ``on_exception``, which must not begin it again.
        session, self._session = self._session, None
        if session is None:
            return
        # The methods of the Trainer's profiler are back before anything is summed up, whatever becomes of the report.
        session.stop()
        if self._short is not None:
            self._short.close()
        self._leave(trainer)
        if not session.clock.epochs:  # no training began
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
        except OSError as error:  # a report is not worth a training run
            rank_zero_warn(f"Doctor could not write its report: {error}.", category=TurboWarning)


class _Ending(Listener):
    """Ends a Doctor's look at the fit once all was seen.

    Who starts it: the ``Doctor``, as the last listener of its clock. What ends it: the report. What always holds:
    whether to wait for the border is decided once, as the last step of the plan is over.
    """

    def __init__(self, doctor: Doctor, session: Session) -> None:
        self.doctor = doctor
        self.session = session
        self._waits: bool | None = None

    def begin_step(self, step: int) -> None:
        """Report between two steps, unless the border of the epoch is still to come."""
        session = self.session
        if step < session.plan.needed:
            return
        if self._waits is None:
            self._waits = not session.clock.has_border and self._is_near()
        if not self._waits:
            self.doctor._complete(session.trainer)

    def fetched(self, step: int) -> None:
        """Report with the first batch behind the border."""
        if step >= self.session.plan.needed and self.session.clock.has_border:
            self.doctor._complete(self.session.trainer)

    def end_training(self) -> None:
        """Report before the hooks on the end of the training, which may save what it came to."""
        self.doctor._complete(self.session.trainer)

    def _is_near(self) -> bool:
        """Return whether the end of the first epoch is worth waiting for."""
        session, border = self.session, self.doctor.border
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
