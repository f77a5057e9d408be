"""What to measure and how: the arguments of ``python -m benchmarks``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.suite import SUITES, BenchError, Suite

__all__ = ["QUICK_SECONDS", "BenchSettings"]

QUICK_SECONDS = 105.0  # of measuring with --quick; the pictures come after it


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        BenchError: With the choices.
    """
    if value not in choices:
        raise BenchError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}.")


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
    out: Path = Path("runs/benchmarks")
    only: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    rounds: int | None = None
    minutes: float | None = None
    processes: int = 1
    seed: int = 0
    suites: Mapping[str, str] = field(default_factory=lambda: SUITES)

    def __post_init__(self) -> None:
        one_of("suite", self.suite, (*self.suites, "all"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        for name in ("threads", "rounds", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                none = "" if name == "processes" else ", or None"
                raise BenchError(f"{name}={value!r}: expected a whole number from 1 on{none}. Raise it.")
        if not 0 <= self.seed < 2**32:  # as numpy takes them
            raise BenchError(f"seed={self.seed!r}: expected a whole number from 0 to 2**32 - 1.")
        if self.minutes is not None and not self.minutes > 0:
            raise BenchError(f"minutes={self.minutes!r}: expected a number above 0, or None. Raise it.")
        if self.out.exists() and not self.out.is_dir():
            raise BenchError(f"out={str(self.out)!r} is a file: expected a folder. Name another one.")
        import torch

        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise BenchError(
                "device='cuda', but torch sees no CUDA device: expected 'cpu' here. Leave the device out, or run on a "
                "machine with a GPU and a CUDA build of torch."
            )
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if available else "cpu")

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
