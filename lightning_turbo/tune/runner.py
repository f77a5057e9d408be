"""Runs a script in fresh processes, for the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_turbo.doctor.script import check_script
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import CAN_HOLD, Interrupt, Process, Progress, Turns, new_row
from lightning_turbo.tune.candidates import Candidate, combine
from lightning_turbo.tune.evidence import Case

__all__ = ["ScriptRunner", "TuneSettings"]

ROUNDS = 4  # of each process
ROUND_SECONDS = 0.2
MOST_STEPS = 500  # of a round


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What ``lightning-turbo tune`` is asked for.

    Raises:
        TurboError: If a value is impossible, or the script is not there.
    """

    program: str  # path of the script, or name of the module
    arguments: tuple[str, ...] = ()
    module: bool = False
    minutes: float = 10.0
    out: Path = Path("runs/tune")
    only: tuple[str, ...] = ()  # patterns of candidates; empty for all
    without: tuple[str, ...] = ()
    same_maths: bool = False  # only what keeps every bit is kept
    seed: int = 0
    batch_size: bool = False  # look for the best batch size instead
    resume: bool = False  # go on from the measurements in ``out``
    ranks: int = 1
    confirm: bool = False  # by a whole epoch with and one without
    device: str = "auto"  # leaves it to the script; "cpu" hides every GPU, "cuda" asks for one

    def __post_init__(self) -> None:
        if not self.module:
            check_script(Path(self.program))
        if not 0 < self.minutes < math.inf:
            raise TurboError(f"minutes={self.minutes!r}: expected a number above 0.")
        if not 1 <= self.ranks <= 64:
            raise TurboError(f"ranks={self.ranks!r}: expected a whole number from 1 to 64.")
        if self.ranks > 1 and not CAN_HOLD:
            raise TurboError(f"ranks={self.ranks}: expected 1 on a system without POSIX signals, which end ranks.")
        if not 0 <= self.seed < 2**32:  # as numpy takes them
            raise TurboError(f"seed={self.seed!r}: expected a whole number from 0 to 2**32 - 1.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise TurboError(f"device={self.device!r}: expected 'auto', 'cpu' or 'cuda'.")

    @property
    def command(self) -> list[str]:
        """The script as it is started without tune."""
        return ["python", *(["-m"] if self.module else []), self.program, *self.arguments]


class ScriptRunner:
    """Measures cases of a script: each in a fresh process, in turns.

    Args:
        settings: Names the script.
        candidates: The table.
        interrupt: Holds the budget.
        progress: Shows how far it is.
        scratch: A folder for what scripts write through Lightning; whoever makes the runner removes it.
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
        self.cost = 5.0
        self.order = {"steps": 3, "lead": 1}
        self.warmup = 3
        self._numbers = itertools.count()
        self._took: list[float] = []

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.interrupt.left

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Choose rounds of about a fifth of a second, whole windows of accumulated batches each."""
        windows = ROUND_SECONDS / max(step_seconds, 1e-9) / accumulate
        steps = accumulate * max(1, min(round(windows), MOST_STEPS // accumulate or 1))
        self.order = {"steps": steps, "lead": math.ceil(steps / 8)}
        self.warmup = max(accumulate + 1, 3, steps // 2)

    def measure(self, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
        """Measure one fresh process of each case."""
        by_name = {str(case): case for case in cases}
        rows = {name: new_row() for name in by_name}
        turns = Turns(lambda name: self.spawn(by_name[name]), rows, interrupt=self.interrupt, progress=self.progress)
        begun = time.monotonic()
        # Where they are measured one after the other, A B B A cancels a steady drift of the machine.
        direction = 1 if len(self._took) % 2 == 0 else -1
        turns.run(list(by_name)[::direction], self.order, rounds=ROUNDS, border=True)
        self._took.append((time.monotonic() - begun) / len(by_name))
        self.cost = statistics.fmean(self._took[1:][-4:] or self._took)  # a first process reads files that are cold
        return {case: rows[name] for name, case in by_name.items()}

    def spawn(self, case: Case) -> Process:
        """Start the process of a case."""
        put_together = combine(self.candidates[name] for name in case.names)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.settings.device == "cpu" else {}
        if self.settings.ranks > 1:
            hidden["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun does
        number = next(self._numbers)
        task = {
            "folder": str(self.scratch.absolute() / str(number)),
            "program": self.settings.program,
            "arguments": list(self.settings.arguments),
            "module": self.settings.module,
            "mode": case.mode,
            "ranks": self.settings.ranks,
            "batch_size": case.batch_size,
            "settings": dataclasses.asdict(put_together),
            "seed": self.settings.seed,
            "warmup": self.warmup,
        }
        return Process(
            ["-m", "lightning_turbo.tune.worker"],
            task,
            log=self.settings.out.absolute() / "logs" / f"{number:03d} {case}.log",
            folder=Path.cwd(),
            environment={**hidden, **put_together.environment, "WANDB_MODE": "disabled"},
        )
