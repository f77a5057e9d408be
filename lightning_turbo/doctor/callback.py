"""``Doctor``: the callback that watches a few steps of a run and says what slows them."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

from lightning_turbo._checks import check_switches
from lightning_turbo._distributed import tell_first_rank
from lightning_turbo._lightning import Callback, LightningModule, Trainer, check_binding, rank_zero_warn
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.doctor.facts import Rank, check_steps
from lightning_turbo.doctor.ranks import Laps, start_of_process
from lightning_turbo.doctor.report import Report, as_text
from lightning_turbo.doctor.rules import diagnose
from lightning_turbo.doctor.session import Session
from lightning_turbo.errors import TurboWarning

__all__ = ["Doctor"]

PATIENCE = 30.0
"""Seconds that the first rank waits for what the others measured. They end their part before it ends its own."""
STOPPED = 130  # the status after a signal, as shells have it for Ctrl-C
_made = itertools.count()  # doctors in this process: the first one knows all that came before it
_reports = itertools.count()  # of this process with several ranks: the ranks make the same ones


class Doctor(Callback):
    """Report what slows a training loop, by file and line, and what to do about it.

    It lets ``warmup`` steps pass, times ``timed`` steps, watches ``watched`` steps from inside, prints its findings,
    and takes itself out of the Trainer: what follows costs nothing. Losses are bit for bit the same as without it.

    Args:
        warmup: Steps before the first look, at least 1.
        timed: Steps timed with nothing but clock readings (CUDA events on a GPU), at least 1.
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

    Attributes:
        report: The report; ``None`` until it is made.
        stopped: Whether it ended the program.
        reports: Whether its rank makes the report: the first one does.
        superseded: Whether it left because the Trainer has an earlier doctor.

    Raises:
        TypeError: If a count of steps is not an integer, ``text`` or ``json`` is not a path, or ``stop`` is not a
            bool.
        ValueError: If a count of steps is too small.

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
    ) -> None:
        check_binding("Doctor")
        check_steps(warmup=warmup, timed=timed, watched=watched)
        for name, path in (("text", text), ("json", json)):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"Doctor({name}={path!r}): expected the path of the file to write, or None for none.")
        check_switches(stop=stop)
        self.steps = warmup, timed, watched
        self.text, self.json, self.stop = text, json, stop
        self.report: Report | None = None
        self.stopped = self.superseded = False
        self.reports = True
        self._session: Session | None = None
        self._begin = time.time() if next(_made) else start_of_process()
        self._laps = Laps(self._begin)

    def _note_begin(self, log: Any) -> None:
        """Begin to measure the start: fit gives callbacks the module's ``log`` before this rank meets the others."""
        # No hook is called that early. From here on the ranks wait for one another, and a late one could not be told.
        self._laps = Laps(self._begin)
        self._lap("before fit")

    log = property(None, _note_begin)

    def _lap(self, name: str) -> None:
        """End a lap of the time outside of the steps, until all are timed: then the ranks leave one by one."""
        if self._session is None or self._session.plan.watched < 0:
            self._laps.lap(name)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note when the data are set up."""
        self._lap("setting up the data")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when the model is set up."""
        self._lap("setting up the model")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when validation begins."""
        self._lap("")

    def on_validation_batch_end(self, *given: Any, **more: Any) -> None:
        """Note how long validation takes."""
        self._lap("validation")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin, if no other doctor is at work; ranks behind the first one do not watch."""
        self._lap("")
        self.superseded = next(each for each in trainer.callbacks if isinstance(each, Doctor)) is not self
        self.reports = trainer.is_global_zero
        if self.superseded:
            self._leave(trainer)
        else:
            others = [each for each in trainer.callbacks if each is not self]
            steps = self.steps if self.reports else (*self.steps[:2], 0)
            self._session = Session(steps, trainer, others, sys._getframe(1), lambda: self._complete(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at the batch."""
        if self._session is not None:
            self._lap("" if self._session.plan.done else "the first batch")
            self._session.look_at(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        if self._session is not None:
            self._session.plan.done += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what was seen if the run ended early."""
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching, report what was seen, and let the exception pass; Ctrl-C and SIGTERM end as ``stop`` does."""
        watching = self._session is not None
        self._finish(trainer, interrupted=type(exception).__name__)
        if watching and (isinstance(exception, KeyboardInterrupt) or trainer.received_sigterm):
            self._end_program(trainer, STOPPED)

    def _complete(self, trainer: Any) -> None:
        """Report, as all steps are over, and end the program if it was asked for."""
        self._finish(trainer)
        self._end_program(trainer, 0)

    def _end_program(self, trainer: Trainer, status: int) -> None:
        """End the program without its handlers if ``stop`` says so: it must not save what it has after some steps."""
        if self.stop and trainer.world_size == 1:
            self.stopped = True
            end_program(status)

    def _leave(self, trainer: Any) -> None:
        """Take this callback out of the Trainer; the list under iteration is left as it is."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        vars(self).pop("log_dict", None)  # Lightning gives every callback this method of its module

    def _gather(self, trainer: Trainer, session: Session, patience: float) -> tuple[Rank, ...]:
        """Return what all ranks of several measured, on the first; nothing if some are missing, which is noted."""
        if trainer.world_size == 1:
            return ()
        told = tell_first_rank(session.rank(self._laps.seconds), f"doctor/{next(_reports)}", patience)
        missing = [str(rank) for rank, each in enumerate(told) if each is None]
        if missing:
            why = f"ranks {', '.join(missing)} told nothing: who waits for whom is not known"
            session.noted["notes"] = (*session.noted["notes"], why)
        return () if missing else tuple(told)

    def _finish(self, trainer: Trainer, interrupted: str = "") -> None:
        """Make the report, if there is none yet, and leave."""
        # Taken first: an error in what follows ends in ``on_exception``, which must not begin it again.
        session, self._session = self._session, None
        if session is None:
            return
        # The Trainer's profiler is back before anything is summed up, whatever becomes of the report.
        session.stop()
        ranks = self._gather(trainer, session, 0.0 if interrupted else PATIENCE)
        if not self.reports:
            session.recorder.forget()
            self._leave(trainer)
            return
        facts, segments = session.facts(ranks)
        self.report = Report(
            facts=facts,
            findings=tuple(diagnose(facts)),
            timeline=tuple(segments),
            short=session.shortfall(interrupted),
        )
        session.recorder.forget()
        # The user's lines may hold letters that the terminal lacks; an object in its place may have no encoding.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(f"\n{as_text(self.report)}\n".encode(encoding, "backslashreplace").decode(encoding))
        try:
            self.report.save(text=self.text, json=self.json)
        except OSError as error:  # a report is not worth a training run
            rank_zero_warn(f"Doctor could not write its report: {error}.", category=TurboWarning)
        self._leave(trainer)
