"""What to measure and how: the arguments of ``lightning-turbo bench``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_turbo.bench.case import SUITES, BenchError, Suite

__all__ = ["QUICK_SECONDS", "BenchSettings"]

QUICK_SECONDS = 105.0  # of measuring with --quick; the pictures come after it


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of one run of the benchmarks.

    Args:
        suite: A name of ``SUITES``, or ``"all"``.
        quick: Fewer and shorter rounds, and only the cases marked for it: under two minutes.
        out: Folder for the results; made if missing.
        only: Patterns as in a shell, upper and lower case alike; cases that match none are left out, but for the
            suite's baseline. Empty for all.
        device: ``"cpu"`` or ``"cuda"``; ``"auto"`` takes CUDA where it is available.
        threads: Threads of torch in each case; ``None`` leaves torch's own choice.
        rounds: Rounds a case, however long they take; ``None`` leaves the suite's own number and time.
        minutes: When the measuring ends, whatever else is asked for; above 0. Each case gets its share of what is left,
            the start of its process included, and at least three rounds if there is time for them. ``None`` sets no
            limit.
        processes: Fresh processes a case, one after the other, among which its rounds are divided: two processes that
            run the same code can differ by several per cent, which no number of rounds in one of them shows.
        seed: Seed of data and weights, the same for all cases.
        suites: Suites to choose from; for tests and for suites of one's own.

    Raises:
        BenchError: If a value is impossible, or CUDA is asked for where there is none.
    """

    suite: str = "all"
    quick: bool = False
    out: Path = Path("runs/bench")
    only: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    rounds: int | None = None
    minutes: float | None = None
    processes: int = 1
    seed: int = 0
    suites: Mapping[str, str] = field(default_factory=lambda: SUITES)

    def __post_init__(self) -> None:
        if self.suite != "all" and self.suite not in self.suites:
            raise BenchError(
                f"suite={self.suite!r}; accepted are {', '.join(map(repr, self.suites))} and 'all'. Choose one of them."
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise BenchError(f"device={self.device!r}; accepted are 'auto', 'cpu' and 'cuda'. Choose one of them.")
        for name, least in (("threads", 1), ("rounds", 1), ("processes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                none = "" if name == "processes" else ", or None"
                raise BenchError(f"{name}={value!r}; accepted are whole numbers from {least} on{none}. Raise it.")
        if not 0 <= self.seed < 2**32:  # as numpy takes them
            raise BenchError(f"seed={self.seed!r}; accepted are whole numbers from 0 to 2**32 - 1. Give one of them.")
        if self.minutes is not None and not self.minutes > 0:
            raise BenchError(f"minutes={self.minutes!r}; accepted are numbers above 0, or None. Raise it.")
        if self.out.exists() and not self.out.is_dir():
            raise BenchError(f"out={str(self.out)!r} is a file; accepted is a folder. Name another place.")
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise BenchError(
                "device='cuda', but torch sees no CUDA device; accepted here is 'cpu'. Leave the device out, or run "
                "on a machine with a GPU and a CUDA build of torch."
            )
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if torch.cuda.is_available() else "cpu")

    @property
    def seconds(self) -> float:
        """How long all the measuring may take; infinite without a limit."""
        limit = math.inf if self.minutes is None else 60 * self.minutes
        return min(limit, QUICK_SECONDS) if self.quick else limit

    def names(self) -> list[str]:
        """Return the names of the suites to run, in order."""
        return list(self.suites) if self.suite == "all" else [self.suite]

    def chosen(self, suite: Suite) -> list[str]:
        """Return the names of the cases of a suite to run, in order.

        Args:
            suite: Where to choose.
        """
        patterns = [pattern.lower() for pattern in self.only]
        able = {name: case for name, case in suite.cases.items() if self.device in case.devices}
        if not patterns:
            return [name for name, case in able.items() if case.quick or not self.quick]
        named = {name for name in able if any(fnmatchcase(name.lower(), pattern) for pattern in patterns)}
        named |= {able[name].base or str(suite.baseline) for name in named}
        return [name for name in able if name in named]
