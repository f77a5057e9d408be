"""Runs a script in fresh processes for the search, one for each of its settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_turbo.doctor.script import check_script
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterleavedRounds, Interrupt, Process, ProcessError, Progress, new_row
from lightning_turbo.tune.candidates import Candidate, combine
from lightning_turbo.tune.promise import Stretch

__all__ = ["ScriptRunner", "TuneSettings"]

WORKER = "lightning_turbo.tune.worker"
LOOK = 0.15  # largest share of the time in which the first process waits for the end of an epoch
WARMUP = 3  # steps before the first round, at least


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The settings of ``lightning-turbo tune``.

    Raises:
        TurboError: If a value is invalid, or the script does not exist.
    """

    program: str  # path of the script or name of the module
    arguments: tuple[str, ...] = ()
    module: bool = False
    minutes: float = 10.0
    out: Path = Path("runs/tune")
    only: tuple[str, ...] = ()  # patterns of candidates; empty for all

    def __post_init__(self) -> None:
        if not self.module:
            check_script(Path(self.program))
        if not 0 < self.minutes < math.inf:
            raise TurboError(f"minutes={self.minutes!r}: expected a number above 0.")

    @property
    def command(self) -> list[str]:
        """The command that starts the script without tune."""
        return ["python", *(["-m"] if self.module else []), self.program, *self.arguments]


class ScriptRunner:
    """Measures settings of a script, each in a process of its own, turn by turn.

    ``run_tune`` makes it. It leaves no process of the script alive.

    Args:
        settings: Settings, including the script.
        candidates: The table of candidates.
        interrupt: Holds the time budget.
        progress: Shows the progress.
        scratch: A folder for files that scripts write through Lightning; whoever creates the runner removes it.
    """

    def __init__(
        self,
        settings: TuneSettings,
        candidates: Mapping[str, Candidate],
        interrupt: Interrupt,
        progress: Progress,
        scratch: Path,
    ) -> None:
        self.settings = settings
        self.candidates = candidates
        self.interrupt = interrupt
        self.progress = progress
        self.scratch = scratch
        self.start = 5.0
        self.warmup = WARMUP
        self._numbers = itertools.count()

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        return self.interrupt.left

    def look(self) -> dict[str, Any]:
        """Return the row of a process that looks at the script as it is, to the end of an epoch if that is near."""
        self.progress.show("looking at the script")
        begun = time.monotonic()
        process = self._spawn((), look=LOOK * 60 * self.settings.minutes)
        event: dict[str, Any]
        try:
            event = process.listen(math.inf, self.interrupt.check)
        except ProcessError as error:
            event = {"event": "failed", "reason": str(error)}
        finally:
            process.close(grace=0.0)
        if event["event"] != "done":
            return {**new_row(), "status": event["event"], "reason": event["reason"]}
        trained = event["numbers"].pop("trained")
        self.start = time.monotonic() - begun - trained
        self.warmup = max(WARMUP, event["numbers"]["accumulate"] + 1)
        return {**new_row(), "status": "ok", "numbers": event["numbers"]}

    def measure(self, together: Sequence[tuple[str, ...]], stretch: Stretch) -> dict[tuple[str, ...], dict[str, Any]]:
        """Measure a fresh process of each; with only a part of the rounds if one of them failed."""
        by_name = {" + ".join(names) or "as it is": names for names in together}
        rows = {name: new_row() for name in by_name}
        rounds = InterleavedRounds(
            lambda name: self._spawn(by_name[name]), rows, interrupt=self.interrupt, progress=self.progress
        )
        begun = time.monotonic()
        rounds.run(list(by_name), [{"steps": steps, "lead": 0} for steps in stretch.rounds])
        trained = sum(part["seconds"] for row in rows.values() for part in row["rounds"])
        self.start = (time.monotonic() - begun - trained) / len(rows)
        return {names: rows[name] for name, names in by_name.items()}

    def _spawn(self, names: tuple[str, ...], look: float = 0.0) -> Process:
        """Start the process of some settings; with ``look``, one that looks at the script for so many seconds."""
        put_together = combine(self.candidates[name] for name in names)
        number = next(self._numbers)
        title = "look" if look else " + ".join(names) or "as it is"
        task = {
            "folder": str(self.scratch.absolute() / str(number)),
            "program": self.settings.program,
            "arguments": list(self.settings.arguments),
            "module": self.settings.module,
            "settings": dataclasses.asdict(put_together),
            "look": look,
            "warmup": self.warmup,
        }
        return Process(
            ["-m", WORKER],
            task,
            log=self.settings.out.absolute() / "logs" / f"{number:03d} {title}.log",
            folder=Path.cwd(),
            environment={**put_together.environment, "WANDB_MODE": "disabled"},
        )
