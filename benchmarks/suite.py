"""Suites, which are tables of cases and aims, and the ``CaseTimer`` that each case receives.

A case is a function that takes a ``CaseTimer`` and its ``config`` as keyword arguments. It builds what it needs, runs
one step after another until ``timer.step()`` returns ``False``, cleans up, and returns numbers by name, such as its
loss. It raises ``SkippedError`` or ``MissingExtraError`` if it cannot run here; any other error is reported in its row,
and the other cases continue.

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

# Name of a suite -> its module and variable, in the order in which `all` runs them.
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
    "getitem": "benchmarks.getitem:SUITE",
    "augment": "benchmarks.augment:SUITE",
    "transforms": "benchmarks.augment:TRANSFORMS",
    "patches": "benchmarks.patches:SUITE",
    "prefetch": "benchmarks.prefetch:SUITE",
    "lengths": "benchmarks.lengths:SUITE",
    "grid": "benchmarks.prefetch:GRID",
    "gpu": "benchmarks.gpu:SUITE",
}
APART = ("versions", "grid", "gpu")  # not part of `all`


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
        run: The function, as described at the top of this module.
        config: Keyword arguments of ``run``, as values that JSON can represent.
        base: Name of the baseline, by whose time the report divides the time of this case; if empty, the first case of
            the suite.
        against: Names of further cases to divide by.
        needs: Distributions, by their names on PyPI, without which the case is skipped.
        kind: ``"torch"`` for PyTorch and Lightning, ``"ours"``, or ``"peer"``. It sets the color of the bar.
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
    """An upper limit on the ratio of two cases, or on a number of one case, that the report checks.

    Args:
        case: Name of the case that the aim is about.
        against: Name of the case to divide by; if empty, the limit applies to the ``quantity`` of ``case`` itself.
        at_most: Largest value that meets the aim. A ratio below 1 is faster or smaller.
        quantity: ``"seconds"`` per step, ``"peak_bytes"``, or the name of a number that the cases return.
        fact: Entry of the machine's description that must be true for the aim to apply; empty for every machine.
    """

    case: str
    against: str
    at_most: float
    quantity: str = "seconds"
    fact: str = ""


@dataclass(kw_only=True)
class Suite:
    """Cases that are measured together.

    Args:
        name: Name on the command line.
        about: One sentence that the report prints above the table.
        cases: The first one is the baseline of all cases without a ``base``.
        aims: Limits that the report checks.
        quick: Names of the cases that ``--quick`` runs. They should be few, because each process takes seconds to
            start.
        telling: Names of the cases to measure if ``--minutes`` is at most ``telling_minutes``; if empty, all cases.
        telling_minutes: Largest ``--minutes`` for which only the ``telling`` cases are measured.
        steps: Steps per round. A round should take a tenth of a second or more.
        rounds: Rounds per case.
        warmup: Steps before the first round, which are not measured.
        lead: Steps before each round, which are not measured, in which queues and caches settle after the process was
            held. On a GPU at least 1, because a process releases unused GPU memory while it waits.
        round_seconds: Duration of a round. The time of the lead decides how many steps fit. If 0, a round has ``steps``
            steps.
        seconds: Time after which no further sweep of rounds starts, unless ``--rounds`` sets their number.
        quantity: What the ratios and the picture show: ``"seconds"``, ``"peak_bytes"`` or a number that the cases
            return.
        unit: What the report calls a step.
        environment: Environment variables of all processes.
        forked: Whether to fork the processes from one that has imported torch and Lightning, which saves time in a
            suite of many cases.
        prepare: Called once in the runner, before the cases; returns facts for the report. It receives a timer for
            device and seed, on which it must not call ``step``.

    Raises:
        ValueError: If two cases have the same name, or a name refers to no case.
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
            raise ValueError(f"suite {self.name!r}: expected {len(self.cases)} different names, got {len(self.known)}")
        for one, other in [*self.pairs(), *((name, name) for name in (*self.quick, *self.telling))]:
            if missing := {one, other} - set(self.known):
                raise ValueError(f"suite {self.name!r}: {one!r} refers to {missing}. Use one of {list(self.known)}")

    def base(self, name: str) -> str:
        """Return the name of a case's baseline."""
        return self.known[name].base or self.cases[0].name

    def pairs(self) -> list[tuple[str, str]]:
        """Return each case paired with every case that it is divided by."""
        pairs = [(case.name, other) for case in self.cases for other in (self.base(case.name), *case.against)]
        return pairs + [(aim.case, aim.against or aim.case) for aim in self.aims]

    def groups(self) -> list[list[str]]:
        """Return the groups of cases that are compared with each other, so that their rounds must be interleaved."""
        group_of = {name: {name} for name in self.known}
        for one, other in self.pairs():
            merged = group_of[one] | group_of[other]
            group_of.update(dict.fromkeys(merged, merged))
        distinct = dict.fromkeys(frozenset(group_of[name]) for name in self.known)
        return [[name for name in self.known if name in group] for group in distinct]


def load_suite(name: str) -> Suite:
    """Import and return the suite with this name in ``SUITES``."""
    module, _, variable = SUITES[name].partition(":")
    return getattr(importlib.import_module(module), variable)
