"""Cases and suites: what a benchmark is made of, and how a suite registers its cases.

A suite is a module of this package with a ``SUITE`` in it, listed in ``SUITES`` below:

```python
SUITE = Suite("prefetch", "Loading beside computing.", steps=40, quick_steps=20)


@SUITE.case("step alone", baseline=True)
def alone(meter: Meter) -> dict[str, float]:
    while meter.step():
        compute()
    return {}


def loader_case(meter: Meter, *, depth: int) -> dict[str, float]:
    loader = forever(PrefetchLoader(..., depth=depth))
    for batch in loader:
        compute(batch)
        if not meter.step(samples=len(batch)):
            break
    loader.close()
    return {"loss": ...}


for depth in (1, 2, 4):
    SUITE.add(f"PrefetchLoader, depth {depth}", loader_case, config={"depth": depth})
SUITE.aims += [Aim("PrefetchLoader, depth 2", "step alone", at_most=1.05)]
```

A case is a function that takes a ``Meter`` (and its ``config`` as keywords), builds what it needs, and does one step
of work after another, for ever, until ``meter.step()`` returns ``False``; then it cleans up and returns its quality
(``loss``, ``accuracy``) and other numbers. A case that cannot run here raises ``SkippedError`` with the reason, or the
``MissingExtraError`` of what it needs; any other error is reported in the case's row and stops nothing else.

Every case runs in a fresh interpreter of its own; those that are compared with one another, by ``base``, ``against``
or an aim, take turns. The meter drops the warm-up, synchronises the device, and holds the
case still, its threads and worker processes too, while others measure.

Suite modules are imported by the runner as well, only to read the names: import heavy or optional packages inside
the functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import SkippedError

if TYPE_CHECKING:
    from benchmarks.meter import Meter

__all__ = ["SUITES", "Aim", "BenchError", "Case", "CaseFunction", "SkippedError", "Suite", "load_suite"]

# Name of a suite -> the module that holds its SUITE, in the order in which `all` runs them.
SUITES: dict[str, str] = {
    "precision": "benchmarks.precision",
    "overhead": "benchmarks.overhead",
    "compiled": "benchmarks.compiled",
    "memory": "benchmarks.memory",
    "loaders": "benchmarks.loaders",
    "prefetch": "benchmarks.prefetch",
    "tricks": "benchmarks.tricks",
}

CaseFunction = Callable[..., Mapping[str, float]]


class BenchError(TurboError, ValueError):
    """The benchmarks were asked for something that they cannot do."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is measured.

    Args:
        name: Shown in the report; unique in its suite.
        run: The function described at the top of this module.
        config: Keyword arguments for ``run``, plain values only; stored with the results.
        base: Name of the case that this one is divided by; empty for the suite's baseline.
        against: Names of further cases that it is divided by.
        needs: Distributions (as pip names them) without which the case is skipped, with that reason.
        devices: Kinds of device on which the case makes sense; on others it is left out.
        quick: Whether ``--quick`` runs the case.
        peer: Whether the case shows another library than PyTorch, Lightning and this one.
        ours: Whether the case shows a part of this library; it gets a colour of its own in the picture.
        environment: Environment variables for the process of this case, stored with the results.
    """

    name: str
    run: CaseFunction
    config: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    against: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = True
    peer: bool = False
    ours: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Aim:
    """A limit on the ratio of two cases, pair by pair, that the report checks.

    Args:
        case: The case of which something is claimed.
        against: The case that it is divided by; empty where ``quantity`` is a ratio that the case itself returns.
        at_most: Largest ratio that meets the aim, dimensionless; a ratio below 1 is faster (or smaller).
        quantity: ``"seconds"`` a step, ``"peak_bytes"``, or a number that the cases return.
        devices: Kinds of device for which the aim is stated.
        condition: In words, where the aim is meant to be read; empty if everywhere.
        fact: Entry of the machine's description that must be true for the aim to count, such as
            ``"bfloat16_instructions"``; empty if nothing is needed.
    """

    case: str
    against: str
    at_most: float
    quantity: str = "seconds"
    devices: tuple[str, ...] = ("cpu", "cuda")
    condition: str = ""
    fact: str = ""


class Suite:
    """A group of cases that are measured together, interleaved, and compared with one baseline.

    Args:
        name: Its name on the command line.
        about: One sentence for the head of its table.
        steps: Steps in a round; a round should last a tenth of a second or more.
        quick_steps: Steps in a round with ``--quick``.
        rounds: Rounds a case.
        warmup: Steps before the first round, not measured.
        lead: Steps at the head of each round, not measured: queues and caches settle after the case was held. At least
            1 where the GPU's memory is used, which a case gives back while it is held.
        seconds: Time for the rounds of the whole suite, unless their number is given; when it is over, the sweep in
            progress is the last.
        quick_seconds: The same with ``--quick``.
        quantity: What ratios and the picture are about: ``"seconds"``, ``"peak_bytes"`` or a number of the cases.
        unit: What a step is, in the report.
        environment: Environment variables for the processes of the cases.
        prepare: Run once, alone, in a process of its own before any case is started; the numbers that it returns are
            every case's ``meter.prepared``. It gets a meter, whose ``step`` it does not call.
    """

    def __init__(
        self,
        name: str,
        about: str,
        *,
        steps: int = 10,
        quick_steps: int = 5,
        rounds: int = 15,
        warmup: int = 5,
        lead: int = 1,
        seconds: float = 240.0,
        quick_seconds: float = 15.0,
        quantity: str = "seconds",
        unit: str = "step",
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[Meter], Mapping[str, float]] | None = None,
    ) -> None:
        self.name = name
        self.about = about
        self.steps = steps
        self.quick_steps = quick_steps
        self.rounds = rounds
        self.warmup = warmup
        self.lead = lead
        self.seconds = seconds
        self.quick_seconds = quick_seconds
        self.quantity = quantity
        self.unit = unit
        self.environment = dict(environment or {})
        self.prepare = prepare
        self.cases: dict[str, Case] = {}
        self.baseline: str | None = None
        self.aims: list[Aim] = []

    def add(self, name: str, run: CaseFunction, *, baseline: bool = False, **options: Any) -> Case:
        """Register a case.

        Args:
            name: Unique in the suite.
            run: What to run.
            baseline: Whether the other cases are divided by this one; one case of a suite is the baseline.
            options: The other fields of ``Case``.

        Returns:
            The case.

        Raises:
            ValueError: If the name is taken, or a second baseline is given.
        """
        if name in self.cases:
            raise ValueError(f"suite {self.name!r} has a case {name!r} already; give each case a name of its own.")
        if baseline and self.baseline is not None:
            raise ValueError(
                f"suite {self.name!r}: {name!r} cannot be the baseline, because {self.baseline!r} is; keep one of them."
            )
        case = Case(name=name, run=run, **options)
        self.cases[name] = case
        if baseline:
            self.baseline = name
        return case

    def case(self, name: str, **options: Any) -> Callable[[CaseFunction], CaseFunction]:
        """Register the decorated function as a case; the options are those of ``add``."""

        def register(run: CaseFunction) -> CaseFunction:
            self.add(name, run, **options)
            return run

        return register

    def check(self) -> None:
        """Check that every name that cases and aims refer to is registered.

        Raises:
            ValueError: If the baseline is missing, or a case or an aim names an unknown case.
        """
        if self.baseline is None:
            raise ValueError(f"suite {self.name!r} has no baseline; give one of its cases baseline=True.")
        pairs = [(case.name, other) for case in self.cases.values() for other in (case.base, *case.against) if other]
        pairs += [(aim.case, name) for aim in self.aims for name in (aim.case, aim.against) if name]
        for owner, name in pairs:
            if name not in self.cases:
                raise ValueError(
                    f"suite {self.name!r}: {owner!r} refers to {name!r}; its cases are {', '.join(self.cases)}."
                )


def load_suite(name: str, suites: Mapping[str, str] | None = None) -> Suite:
    """Import the suite of that name.

    Args:
        name: A key of ``suites``.
        suites: Name -> module; ``SUITES`` by default.

    Raises:
        BenchError: If there is no such suite.
    """
    known = SUITES if suites is None else suites
    if name not in known:
        raise BenchError(f"unknown suite {name!r}; the suites are {', '.join(known)}, and 'all' for every one.")
    suite: Suite = importlib.import_module(known[name]).SUITE
    suite.check()
    return suite
