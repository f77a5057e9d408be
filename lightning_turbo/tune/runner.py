"""Runs a script in fresh processes for the search."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_turbo.doctor.script import check_script
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import CAN_HOLD, InterleavedRounds, Interrupt, Process, Progress, new_row
from lightning_turbo.tune.candidates import Candidate, combine
from lightning_turbo.tune.evidence import DEFAULT, Configuration
from lightning_turbo.tune.fork_server import CAN_FORK, ForkServer

__all__ = ["ScriptRunner", "TuneSettings"]

WORKER = "lightning_turbo.tune.worker"
ROUNDS = 4  # per process
ROUND_SECONDS = 0.2
MOST_STEPS = 500  # per round


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
    without: tuple[str, ...] = ()
    same_maths: bool = False  # keep only settings that leave results bitwise equal
    seed: int = 0
    batch_size: bool = False  # look for the best batch size instead
    resume: bool = False  # continue from the measurements in ``out``
    ranks: int = 1
    confirm: bool = False  # by a whole epoch with and one without
    device: str = "auto"  # "auto" lets the script choose; "cpu" hides every GPU, "cuda" requires one

    def __post_init__(self) -> None:
        if not self.module:
            check_script(Path(self.program))
        if not 0 < self.minutes < math.inf:
            raise TurboError(f"minutes={self.minutes!r}: expected a number above 0.")
        if not 1 <= self.ranks <= 64:
            raise TurboError(f"ranks={self.ranks!r}: expected an integer from 1 to 64.")
        if self.ranks > 1 and not CAN_HOLD:
            raise TurboError(f"ranks={self.ranks}: expected 1 on a system without POSIX signals, which end ranks.")
        if not 0 <= self.seed < 2**32:  # as numpy takes them
            raise TurboError(f"seed={self.seed!r}: expected an integer from 0 to 2**32 - 1.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise TurboError(f"device={self.device!r}: expected 'auto', 'cpu' or 'cuda'.")

    @property
    def command(self) -> list[str]:
        """The command that starts the script without tune."""
        return ["python", *(["-m"] if self.module else []), self.program, *self.arguments]


class ScriptRunner:
    """Measures configurations of a script, each in its own process, round by round.

    The first process is a fresh one. Later ones are forks of a process that has imported torch and Lightning, if
    possible.

    ``run_tune`` uses it as a ``with`` block, once more for whole epochs; its end also ends the servers that start the
    forks. ``measure`` leaves no process of the script alive; the caller of ``spawn`` closes what it returns.

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
        self.cost = 5.0
        self.order = {"steps": 3, "lead": 1}
        self.warmup = 3
        self._has_borders = True  # whether processes reach the end of an epoch
        self._numbers = itertools.count()
        self._took: list[float] = []
        self._lightning = ""  # the copy of Lightning to import before forking; empty: do not fork
        self._servers: dict[str, ForkServer] = {}  # by the environment of its forks

    def __enter__(self) -> ScriptRunner:
        return self

    def __exit__(self, *error: object) -> None:
        """End the servers that start processes."""
        while self._servers:
            self._servers.popitem()[1].close()

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        return self.interrupt.left

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Choose rounds of about a fifth of a second that consist of whole windows of accumulated batches."""
        windows = ROUND_SECONDS / max(step_seconds, 1e-9) / accumulate
        steps = accumulate * max(1, min(round(windows), MOST_STEPS // accumulate or 1))
        self.order = {"steps": steps, "lead": math.ceil(steps / 8)}
        self.warmup = max(accumulate + 1, 3, steps // 2)

    def measure(self, configurations: Sequence[Configuration]) -> dict[Configuration, dict[str, Any]]:
        """Measure a fresh process of each configuration."""
        by_name = {str(configuration): configuration for configuration in configurations}
        rows = {name: new_row() for name in by_name}
        interleaved = InterleavedRounds(
            lambda name: self.spawn(by_name[name]), rows, interrupt=self.interrupt, progress=self.progress
        )
        begun = time.monotonic()
        # Measured one after the other, the order A B B A cancels a steady drift of the machine.
        direction = 1 if len(self._took) % 2 == 0 else -1
        interleaved.run(list(by_name)[::direction], self.order, rounds=ROUNDS, border=self._has_borders)
        self._took.append((time.monotonic() - begun) / len(by_name))
        self.cost = statistics.fmean(self._took[1:][-4:] or self._took)  # the first process reads uncached files
        self._look_for_copy(rows.values())
        as_it_is = rows.get(str(DEFAULT), {})
        if as_it_is.get("status") == "ok" and not as_it_is["numbers"]["facts"]["batches"]:
            self._has_borders = False  # no border is near, so the next processes do not wait for one
        return {configuration: rows[name] for name, configuration in by_name.items()}

    def _look_for_copy(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Start later processes as forks, if a measured one reports that it ran on a CPU only.

        A device that was accessed before a fork is unusable after it. Ranks start one another.
        """
        for numbers in [row["numbers"] for row in rows if row["status"] == "ok"]:
            if CAN_FORK and self.settings.ranks == 1 and numbers["facts"]["device"] == "cpu":
                self._lightning = numbers["lightning"]

    def _copy(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **options: Any) -> Any:
        """Start a process like ``subprocess.Popen``, but as a fork of one with the same environment."""
        key = json.dumps(env, sort_keys=True)
        if key not in self._servers:
            log = self.settings.out.absolute() / "logs" / f"imports {len(self._servers)}.log"
            modules = [WORKER, self._lightning]
            self._servers[key] = ForkServer(modules, log=log, folder=cwd, environment=env)
        return self._servers[key].popen(command, **options)

    def spawn(self, configuration: Configuration) -> Process:
        """Start the process of a configuration."""
        put_together = combine(self.candidates[name] for name in configuration.names)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.settings.device == "cpu" else {}
        if self.settings.ranks > 1:
            hidden["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # like torchrun
        number = next(self._numbers)
        task = {
            "folder": str(self.scratch.absolute() / str(number)),
            "program": self.settings.program,
            "arguments": list(self.settings.arguments),
            "module": self.settings.module,
            "mode": configuration.mode,
            "ranks": self.settings.ranks,
            "batch_size": configuration.batch_size,
            "settings": dataclasses.asdict(put_together),
            "seed": self.settings.seed,
            "warmup": self.warmup,
        }
        return Process(
            ["-m", WORKER],
            task,
            log=self.settings.out.absolute() / "logs" / f"{number:03d} {configuration}.log",
            folder=Path.cwd(),
            environment={**hidden, **put_together.environment, "WANDB_MODE": "disabled"},
            popen=self._copy if self._lightning else subprocess.Popen,
        )
