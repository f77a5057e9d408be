"""The measurements of the doctor as plain values; the only input of the rules."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_turbo._checks import expect, is_whole

__all__ = [
    "BOUNDS", "FEW", "NOTICEABLE", "WAITING", "Call", "Facts", "FitFacts", "HookTime", "LineTime", "Loader",
    "OptimizerFacts", "Part", "RunSettings", "SchedulerFacts", "Seen", "Site", "check_steps",
]  # fmt: skip

WAITING = 0.10
"""Waiting for data, or the loop's own work, bounds a step from this share on; a choice, not a measurement."""
NOTICEABLE = 5e-3
"""Seconds per step that justify a warning; a choice as well."""
SLOW_LINE = 5e-4
"""A line that takes fewer seconds per step is not named."""
FEW = 5
"""With fewer timed steps, no step time justifies a warning."""
BOUNDS = {
    "compute": ("forward", "backward", "optimizer"),
    "copy": ("copy",),
    "loop": ("hooks", "logging"),
}
"""What may bound a step that does not wait for data, and the phases that make it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An event at one line during the watched steps; counts and seconds are totals over these steps."""

    kind: str  # "sync", "moved", "log", ...
    name: str  # as the user would write it, for example ".item()"
    site: Site | None
    count: int
    steps: int  # number of watched steps in which it occurred
    seconds: float = 0.0  # on the host
    within: str = ""  # the library called by the user's line that does it, such as "torchmetrics"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A named part of the program: a layer, a parameter or an attribute."""

    name: str
    site: Site | None = None
    growing: bool = False  # whether an attribute holds more graph nodes after each step


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """A loader's settings; empty for several loaders or for one that exposes none."""

    type: str = ""
    standard: bool = False  # whether it is a torch.utils.data.DataLoader
    prefetches: bool = False  # whether a background thread loads ahead
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    sampler: str = ""
    sharded: bool | None = None  # whether each rank sees its own part of the data; None if unknown
    iterable_dataset: bool = False
    draws: str = ""  # whether loading in this process or the step draws random numbers, as a clause
    loading_draws: bool = False  # whether it is loading that draws, from generators that nobody seeds for each sample
    copied_generators: tuple[str, ...] = ()  # generators of the dataset with the same state in every worker
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """The settings of one optimizer."""

    name: str
    one_by_one: bool = False  # whether it has foreach=False and is not fused
    can_fuse: bool = False  # whether it could be fused but is not
    groups: int = 1  # number of parameter groups
    kinds: int = 1  # number of groups with distinct settings
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerFacts:
    """The settings of one learning rate scheduler."""

    name: str
    interval: str = "epoch"
    length: int = 0  # steps until ``aim``, 0 if there is none
    aim: str = ""  # "its end" or "its first cycle"
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The settings of the machine and the Trainer."""

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)  # of the CUDA device
    cores: int = 1
    threads: int = 1  # with which torch computes
    tf32: bool = False  # whether matrix products may use TF32
    precision: str = "32-true"
    strategy: str = ""  # the class of the Trainer's strategy
    world_size: int = 1
    local_ranks: int = 1  # number of ranks on this machine
    gives_sampler: bool = True  # whether the Trainer may give loaders its DistributedSampler
    automatic: bool = True  # whether Lightning runs the optimization
    epochs: float = math.inf  # largest number of epochs
    batches: float = math.inf  # per epoch, infinite if unknown
    ends_epoch: bool = True  # whether max_steps allows a full epoch
    accumulate: int = 1
    exact_windows: bool = False  # whether a callback divides a last, shorter window by its own length


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen in the watched steps."""

    watched: int = 0  # number of watched steps
    calls: tuple[Call, ...] = ()
    retained: tuple[Part, ...] = ()  # attributes that hold tensors with their graph after the step
    anomaly: bool = False  # whether autograd's anomaly detection is on
    anomaly_site: Site | None = None  # the line that switches it on
    biases: tuple[Part, ...] = ()  # layers whose bias a norm cancels


@dataclass(frozen=True, kw_only=True, slots=True)
class LineTime:
    """The time of the lines of one of the user's functions, by samples, in one part and phase of the fit."""

    sites: tuple[Site, ...]  # the lines, the most expensive first
    part: str = "steps"  # a key of ``timeline.PARTS``
    phase: str = "forward"  # a key of ``timeline.PHASES``
    hook: str = ""  # Lightning's action, where the phase is "hooks"
    call: str = ""  # the Python function that the first line calls
    seconds: float = 0.0  # a step for lines in steps, otherwise all that was seen
    own: float = 0.0  # of these, what is not torch's work
    torch: float = 0.0  # of these, torch's work outside of the network's modules
    waits: bool = False  # whether the thread hardly computes meanwhile
    where: str = ""  # "in worker processes" or "in a thread", if not in the training thread
    text: str = ""  # the first line

    @property
    def site(self) -> Site:
        """The most expensive line."""
        return self.sites[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class HookTime:
    """The time of one hook, in seconds."""

    name: str  # from Lightning's profiler, e.g. "[Callback]Average.on_train_batch_end"
    seconds: float  # a step for hooks in steps, otherwise all that was seen
    in_steps: bool = False  # whether it runs in steps, not at the border of epochs
    site: Site | None = None

    @property
    def shown(self) -> str:
        """The user's name for it: without the kind of its owner and the arguments in its key."""
        owner, _, name = self.name.partition("]")[2].rpartition(".")
        return f"{owner.partition('{')[0]}.{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitFacts:
    """Where the time of what was seen of the fit went: sums over Lightning's hooks."""

    parts: dict[str, float] = field(default_factory=dict)  # seconds of each part; of an epoch if one was seen whole
    is_epoch: bool = False  # whether these are the seconds of a whole epoch
    batches: int = 0  # steps in these seconds
    validations: int = 0
    validated: int = 0  # batches of validation
    saves: int = 0
    hooks: tuple[HookTime, ...] = ()  # slowest first

    def of(self, *names: str) -> float:
        """Return the seconds of some parts; without names, of all parts of training."""
        return sum(s for name, s in self.parts.items() if name in names or (not names and name != "set-up"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the rules may use; times in seconds, sizes in bytes."""

    run: RunSettings = RunSettings()
    seen: Seen = Seen()
    timed: int = 0  # number of timed steps
    steps: tuple[float, ...] = ()  # seconds of each timed step
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds of a timed step in each phase
    typical: dict[str, float] = field(default_factory=dict)  # median seconds of a timed step in each phase
    loader: Loader = Loader()
    validation_loader: Loader = Loader()
    fit: FitFacts = FitFacts()
    training_step: Site | None = None
    validation_step: Site | None = None
    batch: int = 0  # bytes of the tensors of a batch
    objects: int = 0  # number of tensors in a batch; each is passed from a worker separately
    wide: tuple[str, ...] = ()  # tensors of the batch in double precision
    convolutions: bool = False  # whether a 4D or 5D weight is not in channels-last format
    optimizers: tuple[OptimizerFacts, ...] = ()
    schedulers: tuple[SchedulerFacts, ...] = ()
    lines: tuple[LineTime, ...] = ()  # the most expensive first
    cores_used: float = 0.0  # CPU seconds of this process per second of the timed steps
    notes: tuple[str, ...] = ()  # what could not be watched, and why

    @property
    def cuda(self) -> bool:
        """Whether the run is on a CUDA device."""
        return self.run.device.startswith("cuda")

    @property
    def step(self) -> float:
        """Mean seconds of a whole timed step: the total that every report states."""
        return sum(self.phases.values())

    def typical_in(self, phases: Iterable[str]) -> float:
        """Return the median seconds of some phases, which ignores what other programs add to single steps."""
        return sum(self.typical.get(phase, self.phases.get(phase, 0.0)) for phase in phases)

    def seconds_in(self, phases: Iterable[str]) -> float:
        """Return the mean seconds per step of some phases."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    @property
    def waiting(self) -> float:
        """Share of the step, 0 to 1, spent waiting for data."""
        return self.seconds_in(["data"]) / (self.step or 1.0)

    def slow_lines(self) -> list[LineTime]:
        """Return the lines of a step whose own time is a tenth of it or more, except those of hooks."""
        least = max(SLOW_LINE, WAITING * self.step)
        steps = [each for each in self.lines if each.part == "steps" and each.phase != "hooks"]
        return [each for each in steps if each.own >= least] if self.step else []

    @property
    def own(self) -> float:
        """Seconds per step of slow lines where the network would compute."""
        return sum(each.own for each in self.slow_lines() if each.phase in BOUNDS["compute"])

    def line_in(self, seconds: float, part: str, hook: str = "") -> Site | None:
        """Return the line that takes at least half of these seconds in a part, or in a hook; ``None`` if none does."""
        lines = (each for each in self.lines if each.part == part and hook in ("", each.hook))
        first = max(lines, key=lambda each: each.seconds, default=None)
        return first.site if first is not None and 2 * first.seconds >= seconds > 0 else None

    def slow_hooks(self) -> list[HookTime]:
        """Return the hooks whose time is more than a twentieth of a step."""
        least = max(SLOW_LINE, WAITING / 2 * self.step)
        return [each for each in self.fit.hooks if each.in_steps and each.seconds > least]

    @property
    def pays_for_loop(self) -> bool:
        """Whether a leaner loop gains: logging and hooks, besides those that are named, take much of the step."""
        rest = self.seconds_in(BOUNDS["loop"]) - sum(hook.seconds for hook in self.slow_hooks())
        return rest > WAITING * self.step

    @property
    def bound(self) -> str:
        """What bounds the step: "data", "lines", "waits" or a key of ``BOUNDS``; empty if no step was timed."""
        if not self.step:
            return ""
        if self.waiting > WAITING:
            return "data"
        own = self.own
        seconds = {name: self.seconds_in(phases) for name, phases in BOUNDS.items()}
        seconds["compute"] -= own
        if own and own >= max(seconds.values()):
            waits = sum(each.own for each in self.slow_lines() if each.waits and each.phase in BOUNDS["compute"])
            return "waits" if 2 * waits > own else "lines"
        return "loop" if self.pays_for_loop else max(seconds, key=lambda name: seconds[name])


def check_steps(warmup: int = 3, timed: int = 10, watched: int = 4) -> None:
    """Raise the errors of ``Doctor`` for counts of steps that are not integers or too small."""
    for name, value, least in (("warmup", warmup, 1), ("timed", timed, 1), ("watched", watched, 2)):
        expect(is_whole(value, -sys.maxsize), name, value, "a number of steps", TypeError)
        fits = value >= least or (name, value) == ("watched", 0)
        expect(fits, name, value, f"{least} steps or more{', or 0' if name == 'watched' else ''}")
