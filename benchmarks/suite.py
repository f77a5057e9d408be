"""Suites, which are tables of cases and aims, and the ``CaseTimer`` that each case receives.

A case is a function that takes a ``CaseTimer`` and its ``config`` as keyword arguments. It builds what it needs, runs
one step after another until ``timer.step()`` returns ``False``, cleans up, and returns numbers by name, such as its
loss. It raises ``SkippedError`` or ``MissingExtraError`` if it cannot run here; any other error is reported in its row,
and the other cases go on.

The runner also imports the modules of the suites, to read the names of their cases. For this reason the functions, not
the modules, import optional packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_turbo import measure
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import SkippedError

__all__ = ["APART", "SUITES", "Aim", "BenchError", "Case", "CaseTimer", "SkippedError", "Suite", "load_suite"]

# Name of a suite -> module and variable that hold it, in the order in which `all` runs them.
SUITES: dict[str, str] = {
    "precision": "benchmarks.precision:SUITE",
    "overhead": "benchmarks.overhead:SUITE",
    "compiled": "benchmarks.overhead:COMPILED",
    "versions": "benchmarks.overhead:VERSIONS",
    "memory": "benchmarks.memory:SUITE",
    "saves": "benchmarks.saves:SUITE",
    "groups": "benchmarks.groups:SUITE",
    "loaders": "benchmarks.loaders:SUITE",
    "loading": "benchmarks.loading:SUITE",
    "starts": "benchmarks.loading:STARTS",
    "augment": "benchmarks.augment:SUITE",
    "transforms": "benchmarks.augment:TRANSFORMS",
    "patches": "benchmarks.patches:SUITE",
    "prefetch": "benchmarks.prefetch:SUITE",
    "lengths": "benchmarks.lengths:SUITE",
    "grid": "benchmarks.prefetch:GRID",
    "gpu": "benchmarks.gpu:SUITE",
}
APART = ("versions", "grid", "gpu")  # what `all` leaves out


class BenchError(TurboError, ValueError):
    """The benchmarks cannot do what was requested."""


class CaseTimer(measure.RoundTimer):
    """A ``RoundTimer`` that also holds the seed and the size of a case.

    Args:
        ask: As in ``lightning_turbo.measure.RoundTimer``.
        seed: Seed of data and weights, the same for all cases. The generators of torch, NumPy and Python are seeded
            with it before the case runs.
        quick: Whether to use a small model and little data.
        options: The other arguments of ``lightning_turbo.measure.RoundTimer``.
    """

    def __init__(self, ask: Any, *, seed: int = 0, quick: bool = False, **options: Any) -> None:
        super().__init__(ask, **options)
        self.seed = seed
        self.quick = quick


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured variant, in its own process.

    Args:
        name: Unique in its suite.
        run: The function, as described above.
        config: Keyword arguments for it, plain values only.
        base: The case that this one is divided by; empty for the suite's first case.
        against: Further cases that it is divided by.
        needs: Distributions, as pip names them, without which it is skipped.
        kind: ``"torch"`` for PyTorch and Lightning, ``"ours"``, or ``"peer"``; the color of its bar.
    """

    name: str
    run: Callable[..., Mapping[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    against: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    kind: str = "torch"


@dataclass(frozen=True)
class Aim:
    """A limit on the ratio of two cases, pair by pair, that the report checks.

    Args:
        case: The case of which something is claimed.
        against: What it is divided by; empty where ``quantity`` is a number of the case that is limited itself.
        at_most: Largest ratio that meets the aim; below 1 is faster or smaller.
        quantity: ``"seconds"`` a step, ``"peak_bytes"``, or a number that the cases return.
        fact: Entry of the machine's description that must be true for it to count, or empty.
    """

    case: str
    against: str
    at_most: float
    quantity: str = "seconds"
    fact: str = ""


@dataclass(kw_only=True)
class Suite:
    """Cases measured together.

    Args:
        name: On the command line.
        about: One sentence for the head of its table.
        cases: The first is the baseline of all that name no other ``base``.
        aims: What the report checks.
        quick: Names of the few cases that ``--quick`` runs: each start of a process takes seconds.
        telling: Names of the cases that are measured where ``--minutes`` is at most ``telling_minutes``; none: all.
        telling_minutes: Up to which time not all cases are measured.
        steps: Of a round, which should last a tenth of a second or more.
        rounds: Of each case.
        warmup: Steps before the first round, not measured.
        lead: Steps at the head of each round, not measured, in which queues and caches settle after the case was held.
            At least 1 on a GPU, whose memory a case gives back while it is held.
        round_seconds: Of a round, whose steps are then as many as fit by the time of its lead; 0 for ``steps``.
        seconds: After which no further sweep of rounds begins, unless the number of rounds is asked for.
        quantity: What ratios and the picture are about: ``"seconds"``, ``"peak_bytes"`` or a number of the cases.
        unit: What a step is, in the report.
        environment: Variables of all its processes.
        forked: Whether its processes are forked from one that has imported torch and Lightning, where it has many.
        prepare: Run once, in the runner, before the cases: facts for the report. It gets a timer for seed and device,
            and calls no ``step``.

    Raises:
        ValueError: If a name is taken twice, or refers to nothing.
    """

    name: str
    about: str
    cases: Sequence[Case]
    aims: Sequence[Aim] = ()
    quick: tuple[str, ...] = ()
    telling: tuple[str, ...] = ()
    telling_minutes: float = 10.0
    steps: int = 10
    rounds: int = 15
    warmup: int = 5
    lead: int = 1
    round_seconds: float = 0.0
    seconds: float = 240.0
    quantity: str = "seconds"
    unit: str = "step"
    environment: Mapping[str, str] = field(default_factory=dict)
    forked: bool = False
    prepare: Callable[[CaseTimer], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.known = {case.name: case for case in self.cases}
        if len(self.known) != len(self.cases):
            raise ValueError(f"suite {self.name!r}: expected a name of its own for each of its {len(self.cases)} cases")
        for one, other in [*self.pairs(), *((name, name) for name in (*self.quick, *self.telling))]:
            if missing := {one, other} - set(self.known):
                raise ValueError(f"suite {self.name!r}: {one!r} refers to {missing}; its cases are {list(self.known)}")

    def base(self, name: str) -> str:
        """Return the name of a case's baseline."""
        return self.known[name].base or self.cases[0].name

    def pairs(self) -> list[tuple[str, str]]:
        """Return every pair of a case and a baseline of it."""
        pairs = [(case.name, other) for case in self.cases for other in (self.base(case.name), *case.against)]
        return pairs + [(aim.case, aim.against or aim.case) for aim in self.aims]

    def groups(self) -> list[list[str]]:
        """Return the groups of cases that are compared with each other, whose rounds must be interleaved."""
        group_of = {name: {name} for name in self.known}
        for one, other in self.pairs():
            merged = group_of[one] | group_of[other]
            group_of.update(dict.fromkeys(merged, merged))
        distinct = dict.fromkeys(frozenset(group_of[name]) for name in self.known)
        return [[name for name in self.known if name in group] for group in distinct]


def load_suite(name: str) -> Suite:
    """Import the suite with a name in ``SUITES``."""
    module, _, variable = SUITES[name].partition(":")
    return getattr(importlib.import_module(module), variable)
