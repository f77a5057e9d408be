"""What the doctor measured, as plain values: the only input of the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BatchTensor", "Call", "Facts", "Loader", "OptimizerFacts", "Part", "SchedulerFacts", "Site", "check_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A line of the user's own code."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Something that the watched steps did at one line; counts and seconds are of all watched steps together."""

    kind: str  # "sync", "copy", "moved", "round trip", "log", ...
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
    sizes: tuple[int, ...] = ()  # of a layer with a matrix product: what tensor cores see
    growing: bool = False  # of an attribute that holds graphs: whether it holds more after each step


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensor:
    """One tensor of a training batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    bytes_as_uint8: int | None = None  # if a sample of it holds nothing but 0..255 or 255ths


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """The training loader's settings; of several loaders, or one that does not tell, nothing is known."""

    type: str = ""
    standard: bool = False  # whether it is a torch.utils.data.DataLoader
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    sampler: str = ""
    sharded: bool | None = None  # whether each rank sees its own part of the data; None if it cannot be told
    iterable_dataset: bool = False
    dataset_set_epoch: bool = False  # whether the dataset has a set_epoch of its own
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """One optimizer's settings."""

    name: str
    foreach: bool | None = None
    fused: bool | None = None
    can_fuse: bool = False
    parameters: int = 0
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerFacts:
    """One learning-rate scheduler's settings."""

    name: str
    interval: str = "epoch"
    length: int | None = None  # OneCycleLR: steps to its end; CyclicLR: to its first turn; None for others
    turn: int | None = None  # CyclicLR: steps until the learning rate turns for the first time
    steps: int | None = None  # that it takes in the whole run at most; None if unknown
    cycles_beta: bool = False  # whether it moves Adam's first beta
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the rules may look at; times in seconds, sizes in bytes."""

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)  # of the CUDA device
    cores: int = 1
    world_size: int = 1
    automatic: bool = True  # whether Lightning runs the optimization

    timed: int = 0
    watched: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds of a timed step in each phase

    calls: tuple[Call, ...] = ()
    operations: int = 0  # of the watched steps' forward passes
    retained: tuple[Part, ...] = ()  # attributes that hold tensors with their graph after the step
    memory: tuple[int, ...] = ()  # CUDA memory in use after each step
    graph_breaks: dict[str, int] = field(default_factory=dict)  # of torch.compile, by reason
    recompiled: int = 0  # graphs that torch.compile made after the warmup

    anomaly: bool = False
    profiler: str | None = None
    autograd_profiler: bool = False
    deterministic: bool = False
    benchmark: bool = False
    convolutions: bool = False
    shapes: int = 1  # how many different input shapes the steps had
    seen: int = 0  # in how many steps the input shapes were looked at

    precision: str = "32-true"
    autocast: bool = False
    matmul_precision: str = "highest"
    layers: tuple[Part, ...] = ()
    scales: tuple[float, ...] = ()  # the loss scale at the start of each watched step, if there is one

    loader: Loader = Loader()
    batch: tuple[BatchTensor, ...] = ()
    epochs: int | None = None  # that the run may last; None if it has no such end
    batches: int | None = None  # of an epoch; None if unknown
    accumulate: int = 1
    exact_windows: bool = False  # whether something weighs a last, shorter window rightly

    optimizers: tuple[OptimizerFacts, ...] = ()
    schedulers: tuple[SchedulerFacts, ...] = ()
    unused: tuple[Part, ...] = ()  # parameters that want a gradient and never got one
    biases: tuple[Part, ...] = ()  # layers whose bias a batch norm takes away
    data_parallel: tuple[Part, ...] = ()
    validates: bool = False
    inference_mode: bool = True
    validation_graph: bool = False  # whether validation returned tensors with a graph

    sites: dict[str, Site] = field(default_factory=dict)  # where the user's code sets a setting, by its name
    notes: tuple[str, ...] = ()  # what could not be watched, and why

    @property
    def cuda(self) -> bool:
        """Whether the run is on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def step(self) -> float:
        """Mean seconds of a whole timed step: the one total that every report gives."""
        return sum(self.phases.values())

    @property
    def waiting(self) -> float:
        """Share of the step, 0 to 1, that it waits for data."""
        return self.phases.get("data", 0.0) / self.step if self.step else 0.0


def check_steps(warmup: int = 3, timed: int = 10, watched: int = 4) -> None:
    """Refuse counts of steps that are not integers, or too small."""
    for name, value, least in (("warmup", warmup, 1), ("timed", timed, 1), ("watched", watched, 2)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"Doctor({name}={value!r}): expected a number of steps, such as {name}={least}.")
        if value < least and (name, value) != ("watched", 0):
            raise ValueError(f"Doctor({name}={value!r}): expected {least} steps or more; use {name}={least}.")
