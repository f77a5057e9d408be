"""``Doctor``: the callback that watches a few steps of a run and says what slows them."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import Callback, LightningModule, Trainer, check_binding, rank_zero_warn
from lightning_turbo.doctor.facts import check_steps
from lightning_turbo.doctor.report import Report, as_text
from lightning_turbo.doctor.rules import diagnose
from lightning_turbo.doctor.session import Session
from lightning_turbo.errors import TurboWarning

__all__ = ["Doctor"]


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
        stop: Whether to end the program with ``sys.exit(0)`` once the report is complete, before the run's end. With
            several ranks the run goes on, because the other ranks would wait for this one.

    Attributes:
        report: The report; ``None`` until it is made.
        stopped: Whether it ended the program.
        superseded: Whether it left because the Trainer has an earlier doctor.

    Raises:
        TypeError: If a count of steps is not an integer, ``text`` or ``json`` is not a path, or ``stop`` is not a
            bool.
        ValueError: If a count of steps is too small.

    Warns:
        TurboWarning: If the report cannot be written to ``text`` or ``json``.

    Note:
        Only the rank with number zero watches. A compiled model, any model in a process that has compiled something
        before, and strategies that split single tensors, are timed but not watched from inside, and the report says so.
        Where another profile function is set (by a debugger; before Python 3.12 by cProfile), calls of Python functions
        are not watched.

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
        self._session: Session | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin, on the first rank, if no other doctor is at work."""
        self.superseded = next(each for each in trainer.callbacks if isinstance(each, Doctor)) is not self
        if self.superseded or not trainer.is_global_zero:
            self._leave(trainer)
        else:
            others = [each for each in trainer.callbacks if each is not self]
            self._session = Session(self.steps, trainer, others, sys._getframe(1), lambda: self._complete(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at the batch."""
        if self._session is not None:
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
        """Stop watching, report what was seen, and let the exception pass."""
        self._finish(trainer, interrupted=type(exception).__name__)

    def _complete(self, trainer: Any) -> None:
        """Report, as all steps are over, and end the program if it was asked for."""
        self._finish(trainer)
        if self.stop and trainer.world_size == 1:
            self.stopped = True
            sys.exit(0)  # The Trainer tears down, and nothing of the script behind fit runs.

    def _leave(self, trainer: Any) -> None:
        """Take this callback out of the Trainer; the list under iteration is left as it is."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        for name in ("log", "log_dict"):  # Lightning gives every callback these methods of its module
            vars(self).pop(name, None)

    def _finish(self, trainer: Trainer, interrupted: str = "") -> None:
        """Make the report, if there is none yet, and leave."""
        session, self._session = self._session, None
        if session is None:
            return
        session.stop()
        facts, segments = session.facts()
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
