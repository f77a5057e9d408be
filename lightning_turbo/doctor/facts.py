"""What the doctor measured, as plain values: the only input of the rules."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_turbo._checks import expect, is_whole

__all__ = [
    "BOUNDS", "FEW", "NOTICEABLE", "SHORT", "WAITING", "Call", "Facts", "FitFacts", "HookTime", "Loader",
    "OptimizerFacts", "Part", "PartTime", "Rank", "RunSettings", "SchedulerFacts", "Seen", "Site", "check_steps",
]  # fmt: skip

WAITING = 0.10
"""Share of the step from which waiting for data bounds it; a choice, not a measurement."""
NOTICEABLE = 5e-3
"""Seconds of a step that are worth a warning; a choice as well."""
SHORT = 2.5e-3
"""Seconds of a step below which Lightning's own work is in every phase of it; a choice as well."""
FEW = 5
"""Timed steps below which no time of a step is a basis for a warning."""
BOUNDS = {
    "compute": ("forward", "backward", "optimizer"),
    "copy": ("copy",),
    "loop": ("hooks", "logging"),
}
"""What may bound a step that does not wait for data, and the phases that add up to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A line of the user's own code."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Something that the watched steps did at one line; counts and seconds are of all watched steps together."""

    kind: str  # "sync", "moved", "log", ...
    name: str  # as the user would write it, for example ".item()"
    site: Site | None
    count: int
    steps: int  # in how many of the watched steps
    seconds: float = 0.0  # of the host
    within: str = ""  # the library, such as "torchmetrics", that does it when the user's line calls it


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A named part of the program: a layer, a parameter or an attribute."""

    name: str
    site: Site | None = None
    growing: bool = False  # of an attribute that holds graphs: whether it holds more after each step


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """A loader's settings; of several loaders, or one that does not tell, nothing is known."""

    type: str = ""
    standard: bool = False  # whether it is a torch.utils.data.DataLoader
    prefetches: bool = False  # whether a background thread loads ahead
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    sampler: str = ""
    whole_read: Site | None = None  # a line of the dataset's file that reads a whole file
    sharded: bool | None = None  # whether each rank sees its own part of the data; None if that is not known
    iterable_dataset: bool = False
    draws: str = ""  # what loading in this process was seen to draw random numbers from, as a clause
    copied_generators: tuple[str, ...] = ()  # of the dataset, which give every worker the same numbers
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """One optimizer's settings."""

    name: str
    one_by_one: bool = False  # whether foreach=False, and not fused
    can_fuse: bool = False  # whether it could be fused, and is not
    groups: int = 1  # of parameters
    kinds: int = 1  # of groups, by their settings
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerFacts:
    """One learning-rate scheduler's settings."""

    name: str
    interval: str = "epoch"
    length: int = 0  # steps to ``aim``, 0 if it has none
    aim: str = ""  # "its end" or "its first cycle"
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What the machine and the Trainer are set to."""

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)  # of the CUDA device
    cores: int = 1
    tf32: bool = False  # whether matrix products may use TF32
    precision: str = "32-true"
    strategy: str = ""  # the class of the Trainer's strategy
    world_size: int = 1
    local_ranks: int = 1  # of them, those on this machine
    gives_sampler: bool = True  # whether the Trainer may give loaders its DistributedSampler
    automatic: bool = True  # whether Lightning runs the optimization
    epochs: float = math.inf  # that the run may last
    batches: float = math.inf  # of an epoch, infinite if unknown
    ends_epoch: bool = True  # whether its steps suffice for an epoch
    accumulate: int = 1
    exact_windows: bool = False  # whether a callback divides a last, shorter window by its own length


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the watched steps did."""

    watched: int = 0  # how many there were
    calls: tuple[Call, ...] = ()
    retained: tuple[Part, ...] = ()  # attributes that hold tensors with their graph after the step
    anomaly: bool = False  # whether autograd's anomaly detection is on
    anomaly_site: Site | None = None  # the line that switches it on
    biases: tuple[Part, ...] = ()  # layers whose bias a norm takes away
    graph_breaks: dict[str, int] = field(default_factory=dict)  # of torch.compile, by line and reason
    recompilations: dict[str, int] = field(default_factory=dict)  # after the warmup, by function and reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """How long one rank of several took: a comparison of ranks says where it waited for others."""

    steps: tuple[dict[str, float], ...] = ()  # seconds of each timed step in each phase; "loop" is what has no hook
    outside: dict[str, float] = field(default_factory=dict)  # seconds before and between the steps, in their order
    hook: str = ""  # the one that takes longest
    sites: dict[str, Site | None] = field(default_factory=dict)  # of the phases and the parts outside


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """What one part of a fit takes, in seconds."""

    name: str  # a key of ``clock.PARTS``
    once: float = 0.0  # in the whole fit
    each: float = 0.0  # in each epoch, beside that
    watched: float = 0.0  # as far as it was watched


@dataclass(frozen=True, kw_only=True, slots=True)
class HookTime:
    """What one hook takes in each epoch, in seconds."""

    name: str  # as Lightning's profiler has it, such as "[Callback]Average.on_train_batch_end"
    seconds: float
    in_steps: bool = False  # in each step, or at the borders of an epoch
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FitFacts:
    """Where the time of the whole fit goes, projected from what was watched."""

    parts: tuple[PartTime, ...] = ()  # empty if no epoch began
    epochs: float = math.inf  # that the fit may last
    batches: float = 0  # of an epoch
    validations: float = 0.0  # an epoch
    validated: float = 0.0  # batches of a validation
    watched_epochs: int = 0
    watched_steps: int = 0
    watched_validated: int = 0
    has_border: bool = False  # whether the first batch of a second epoch was watched
    saves: float = 0.0  # checkpoints an epoch
    hooks: tuple[HookTime, ...] = ()  # the slowest first

    def each(self, *names: str) -> float:
        """Return the seconds of some parts in each epoch; of all parts without names."""
        return sum(part.each for part in self.parts if part.name in names or not names)

    @property
    def whole(self) -> float:
        """Seconds of the whole fit; infinite if its epochs are not known."""
        once = sum(part.once for part in self.parts)
        return once + self.each() * self.epochs if self.parts else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the rules may look at; times in seconds, sizes in bytes."""

    run: RunSettings = RunSettings()
    seen: Seen = Seen()
    timed: int = 0  # steps
    steps: tuple[float, ...] = ()  # seconds of each timed step
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds of a timed step in each phase
    typical: dict[str, float] = field(default_factory=dict)  # median seconds of a timed step in each phase
    longest_hook: str = ""  # the action of the phases "hooks" and "logging" that takes most of the time
    loader: Loader = Loader()
    validation_loader: Loader = Loader()
    fit: FitFacts = FitFacts()
    training_step: Site | None = None
    validation_step: Site | None = None
    read: float = 0.0  # bytes that loading reads, a timed step; 0 where it is not counted
    batch: int = 0  # bytes of a batch's tensors
    objects: int = 0  # tensors of a batch, each of which crosses from a worker process by itself
    wide: tuple[str, ...] = ()  # tensors of the batch in double precision
    convolutions: bool = False  # whether a weight has four or five dimensions and is not in channels-last format
    optimizers: tuple[OptimizerFacts, ...] = ()
    schedulers: tuple[SchedulerFacts, ...] = ()
    ranks: tuple[Rank, ...] = ()  # of a run with several, all of them
    notes: tuple[str, ...] = ()  # what could not be watched, and why

    @property
    def cuda(self) -> bool:
        """Whether the run is on a CUDA device."""
        return self.run.device.startswith("cuda")

    @property
    def step(self) -> float:
        """Mean seconds of a whole timed step: the one total that every report gives."""
        return sum(self.phases.values())

    def typical_in(self, phases: Iterable[str]) -> float:
        """Return the seconds of most steps in some phases: what another program adds to one step is left out."""
        return sum(self.typical.get(phase, self.phases.get(phase, 0.0)) for phase in phases)

    def seconds_in(self, phases: Iterable[str]) -> float:
        """Return the seconds of the mean step in some phases."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    @property
    def waiting(self) -> float:
        """Share of the step, 0 to 1, that it waits for data."""
        return self.seconds_in(["data"]) / (self.step or 1.0)

    @property
    def waits(self) -> float:
        """Seconds of a watched step in which it waits without computing, beside those for its data."""
        return sum(each.seconds for each in self.seen.calls if each.kind == "wait") / max(self.seen.watched, 1)

    @property
    def pays_for_loop(self) -> bool:
        """Whether the step is so short that a leaner loop would shorten it."""
        return 0 < self.step < SHORT and self.seconds_in(BOUNDS["loop"]) > WAITING * self.step

    @property
    def bound(self) -> str:
        """What bounds the step: "data", "waits" or a key of ``BOUNDS``; empty if no step was timed."""
        if not self.step:
            return ""
        if self.waiting > WAITING:
            return "data"
        if self.waits > NOTICEABLE and self.waits > self.step / 2:
            return "waits"
        if self.pays_for_loop:
            return "loop"
        return max(BOUNDS, key=lambda name: self.seconds_in(BOUNDS[name]))


def check_steps(warmup: int = 3, timed: int = 10, watched: int = 4) -> None:
    """Raise what ``Doctor`` promises for counts of steps that are not integers, or too small."""
    for name, value, least in (("warmup", warmup, 1), ("timed", timed, 1), ("watched", watched, 2)):
        expect(is_whole(value, -sys.maxsize), name, value, "a number of steps", TypeError)
        fits = value >= least or (name, value) == ("watched", 0)
        expect(fits, name, value, f"{least} steps or more{', or 0' if name == 'watched' else ''}")
