"""What the doctor measured, as plain values: the only input of the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "BatchTensor",
    "Call",
    "Facts",
    "Layer",
    "Loader",
    "OptimizerFacts",
    "Retained",
    "SchedulerFacts",
    "Site",
    "Unused",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A line of the user's own code."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Something that the watched steps did at one line."""

    kind: str
    """What it was: ``"sync"``, ``"layer sync"`` (within a layer of torch), ``"copy"``,
    ``"moved"``, ``"round trip"``, ``"log"``, ``"gc"``, ..."""
    name: str
    """As the user would write it, for example ``".item()"``."""
    site: Site | None
    count: int
    """How often, in all watched steps together."""
    steps: int
    """In how many of the watched steps."""
    seconds: float = 0.0
    """Host seconds spent in it, in all watched steps together."""
    confirmed: bool | None = None
    """On CUDA: whether torch's sync debug mode saw the device wait; elsewhere ``None``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained:
    """An attribute that holds tensors with their graph after the step is over."""

    name: str
    growing: bool
    """Whether more tensors, or longer graphs, are held after each step."""
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer with a matrix product: its name and the sizes that tensor cores see."""

    name: str
    sizes: tuple[int, ...]
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """A parameter that wants a gradient and never got one."""

    name: str
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensor:
    """One tensor of a training batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    bytes_as_uint8: int | None = None
    """Its size as uint8 if a sample of it holds nothing but 0..255 or 255ths, else ``None``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """The training loader's settings."""

    type: str
    standard: bool
    """Whether it is a ``torch.utils.data.DataLoader``."""
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    sampler: str = ""
    sharded: bool | None = None
    """Whether each rank sees its own part of the data; ``None`` if the loader does not tell."""
    iterable_dataset: bool = False
    dataset_set_epoch: bool = False
    """Whether the data set has a ``set_epoch`` of its own."""
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
    """One learning-rate scheduler's settings and how it moved."""

    name: str
    interval: str = "epoch"
    length: int | None = None
    """``OneCycleLR``: the steps until its end; ``CyclicLR``: until its first turn. ``None`` for others."""
    turn: int | None = None
    """``CyclicLR``: the steps until the learning rate turns for the first time."""
    steps: int | None = None
    """How many steps it takes in the whole run at most, ``None`` if unknown."""
    cycles_beta: bool = False
    """Whether it moves Adam's first beta."""
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the rules may look at; times in seconds, sizes in bytes."""

    device: str = "cpu"
    capability: tuple[int, int] | None = None
    cores: int = 1
    world_size: int = 1
    automatic: bool = True
    """Whether Lightning runs the optimization (``automatic_optimization``)."""

    timed: int = 0
    watched: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    """Median seconds of a step in each phase."""

    page_faults: int = 0
    """Median page faults of a timed step that no disk had a part in, in this process."""
    spare_huge_pages: bool = False
    """Whether the kernel gives large pages to who asks for them, and torch is not told to ask."""

    calls: tuple[Call, ...] = ()
    operations: int = 0
    """Tensor operations of the watched steps' forward passes."""
    casts: int = 0
    """How many of them cast between float types."""
    elements: int = 0
    """Elements that all of them wrote."""

    retained: tuple[Retained, ...] = ()
    memory: tuple[int, ...] = ()
    """CUDA memory in use after each step."""

    anomaly: bool = False
    profiler: str | None = None
    autograd_profiler: bool = False
    deterministic: bool = False
    benchmark: bool = False
    convolutions: bool = False
    shapes: int = 1
    """How many different input shapes the steps had."""
    seen: int = 0
    """In how many steps the input shapes were looked at."""

    precision: str = "32-true"
    autocast: bool = False
    matmul_precision: str = "highest"
    layers: tuple[Layer, ...] = ()
    scales: tuple[float, ...] = ()
    """The loss scale at the start of each watched step, if there is one."""
    scheduled_skips: int = 0
    """Optimizer steps that the loss scaler skipped while a per-step scheduler moved on."""

    loader: Loader | None = None
    batch: tuple[BatchTensor, ...] = ()
    epochs: int | None = None
    """Epochs that the run may last, ``None`` if it has no such end."""

    optimizers: tuple[OptimizerFacts, ...] = ()
    unused: tuple[Unused, ...] = ()
    accumulate: int = 1
    batches: int | None = None
    """Training batches of an epoch, ``None`` if unknown."""
    exact_windows: bool = False
    """Whether something weighs a last, shorter window rightly."""

    data_parallel: tuple[Unused, ...] = ()
    validates: bool = False
    inference_mode: bool = True
    validation_graph: bool = False
    """Whether validation returned tensors with a graph."""
    validation_gradients: bool = False
    """Whether validation asked for gradients."""
    schedulers: tuple[SchedulerFacts, ...] = ()

    sites: dict[str, Site] = field(default_factory=dict)
    """Where the user's code sets a setting, by its name."""
    notes: tuple[str, ...] = ()
    """What could not be watched, and why."""

    @property
    def cuda(self) -> bool:
        """Whether the run is on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def step(self) -> float:
        """Median seconds of a whole step."""
        return sum(self.phases.values())
