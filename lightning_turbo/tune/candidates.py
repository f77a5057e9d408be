"""The table of candidates: what each one needs and changes, and how it is applied and written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_turbo.errors import TurboError

__all__ = [
    "SMALL_SHARE",
    "Baseline",
    "Candidate",
    "Settings",
    "combine",
    "list_candidates",
    "list_rank_candidates",
    "select",
    "usual_saving",
    "why_not",
]

Result = Literal["same bits", "rounding", "other maths"]
SMALL_SHARE = 0.03  # share of a step; candidates that cannot save more are not tried
LITTLE = f"less than {100 * SMALL_SHARE:g} % of its time"
LIGHTNING_MS = 0.6  # possible cost of Lightning's own loop per step, with logged values
SHORT_EPOCH = 200  # in batches; starting a worker process takes as long as some steps


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the first runs found out about the script and the machine; see ``describe.describe``."""

    step_ms: float
    one_batch_ms: float  # per step, with the same batch every time
    loader_ms: float  # per batch, for the loader alone
    device: str = "cpu"
    num_workers: int = 0
    accumulate: int = 1  # batches per optimizer step
    batches: int | None = None  # per epoch
    epochs: float | None = None  # in the fit
    validations: float = 0.0  # mean number per epoch
    border_ms: float = 0.0  # per epoch: its end, the start of loading, and the first batch
    validation_ms: float = 0.0  # per epoch, for complete validations
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds per step in forward, backward and optimizer
    lacks: Sequence[str] = ()  # keys of NEEDS that script or machine do not fulfil
    random_part: str = ""  # code to replace random transforms that have a batched counterpart
    packing: str = ""  # how long packing takes and when it pays off; trying it would take too long

    @property
    def loading(self) -> float:
        """The largest share of a step that loading ahead can save: the time of the loader alone.

        On a quiet machine, the difference of the other two times would show the same.
        """
        return min(1.0, self.loader_ms / self.step_ms)

    @property
    def epoch_ms(self) -> float | None:
        """The duration of an epoch; ``None`` if its length is unknown."""
        if self.batches is None:
            return None
        return (self.batches - bool(self.border_ms)) * self.step_ms + self.border_ms + self.validation_ms

    @property
    def waiting_ms(self) -> float:
        """How long a step waits for data, according to the three times."""
        return max(0.0, min(self.step_ms - self.one_batch_ms, self.loader_ms))

    @property
    def loads_ahead(self) -> bool:
        """Whether batches are already prepared in parallel to the step."""
        return self.num_workers > 0 or "no thread" in self.lacks

    def lack(self, need: str) -> bool:
        """Return whether a need of a candidate is unfulfilled."""
        if need == "loading":
            return self.loading < SMALL_SHARE
        if need == "computing":
            return self.one_batch_ms < SMALL_SHARE * self.step_ms
        if need == "short epochs":
            return self.batches is None or self.batches > SHORT_EPOCH
        if need == "no accumulation":
            return self.accumulate > 1
        if need == "short step":
            return self.one_batch_ms * SMALL_SHARE >= LIGHTNING_MS
        if need == "random part":
            return not self.random_part
        return need in self.lacks


# The needs of candidates, and the explanation if one is unfulfilled.
NEEDS = {
    "loading": f"loading a batch takes {LITTLE}",
    "computing": f"a step computes {LITTLE}",
    "dataloader": "the training loader is not a DataLoader",
    "random part": "no random transform of MONAI or torchvision at the end of the dataset's has a batched equal",
    "no thread": "the loader prepares batches in a thread already",
    "new workers": "no worker processes are started again in each epoch",
    "not pinned": "the loader pins its memory already",
    "short epochs": "epochs are long, so that their starts hardly count",
    "own strategy": "the script sets a strategy",
    "no accumulation": "gradients are accumulated, which a static graph does not allow",
    "own precision": "the script sets a precision",
    "float32 weights": "the network's weights are float64, whose digits half precision would lose",
    "short step": "a step is long beside Lightning's loop",
    "Lightning 2.6": "it needs Lightning 2.6",
    "compiler": "torch finds no C++ compiler",
    "optimizer": "no optimizer can be fused, or each is already",
    "convolutions": "there is no 2D or 3D convolution",
    "norms": "there is no convolution with a bias before a batch or instance norm",
    "automatic": "the script steps its optimizers",
    "cuda": "it needs a CUDA device",
    "cpu": "it is for a CPU",
    "huge pages": "the kernel gives large pages to every program, or to none",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a Trainer and its process."""

    strategy: Mapping[str, Any] = field(default_factory=dict)  # arguments of TurboStrategy or TurboDDPStrategy
    ranks: int = 1
    precision: str = ""  # the Trainer's
    opt_level: str = ""  # of ApexAMP
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> arguments
    environment: Mapping[str, str] = field(default_factory=dict)  # of the process
    loader: Mapping[str, Any] = field(default_factory=dict)  # arguments of each DataLoader
    augment_batches: bool = False  # whether to apply random transforms after collating


@dataclass(frozen=True, kw_only=True)
class Candidate(Settings):
    """Settings that are tried together."""

    name: str
    needs: tuple[str, ...]  # keys of NEEDS
    slot: str = ""  # shared by alternatives
    result: Result = "same bits"  # possible effect on the result

    @property
    def is_stock(self) -> bool:
        """Whether it uses nothing from this package."""
        return not (self.strategy or self.opt_level or self.callbacks or self.augment_batches)

    @property
    def kind(self) -> str:
        """Its slot or, without one, its name; at most one candidate of a kind is chosen."""
        return self.slot or self.name


def why_not(candidate: Candidate, baseline: Baseline) -> str:
    """Return why a candidate is not tried, or an empty string."""
    as_it_is = {"Prefetch": {"num_workers": baseline.num_workers}}
    if baseline.num_workers and candidate.callbacks == as_it_is and not candidate.environment:
        return "the loader has as many"
    lacking = next((NEEDS[need] for need in candidate.needs if baseline.lack(need)), "")
    if candidate.name == "pack":
        return lacking or baseline.packing or "packing was not timed"
    return lacking


# Typical savings, as shares of a phase of the step, by name prefix. They only determine the order of trials.
USUAL: Mapping[str, tuple[str, float]] = {
    "fused": ("optimizer", 0.5),
    "channels-last": ("network", 0.3),
    "no-bias": ("network", 0.1),
    "bf16-mixed": ("network", 0.5),
    "O1": ("network", 0.5),
    "O2": ("network", 0.5),
    "compile": ("network", 0.15),
    "threads": ("step", 0.1),
    "huge-pages": ("step", 0.1),
}
WITHOUT_INSTRUCTIONS = 0.1  # factor for half precision on a CPU without such instructions


def usual_saving(candidate: Candidate, baseline: Baseline, computes_in_half: bool) -> float:
    """Return the milliseconds that a candidate usually saves at most, per step, or per epoch divided by its steps."""
    starts = baseline.border_ms / (baseline.batches or 1)
    if candidate.loader or "persistent" in candidate.name:
        return starts + (baseline.loading * baseline.step_ms if candidate.callbacks else 0.0)
    if candidate.slot == "loading" or candidate.augment_batches:
        return baseline.loading * baseline.step_ms
    if candidate.name == "lean":
        return LIGHTNING_MS
    name = next((each for each in USUAL if candidate.name.startswith(each)), "")
    phase, share = USUAL.get(name, ("step", 0.02))
    if candidate.slot == "precision" and not computes_in_half:
        share *= WITHOUT_INSTRUCTIONS
    return share * _phase_ms(phase, baseline)


def _phase_ms(phase: str, baseline: Baseline) -> float:
    """Return the milliseconds of a phase of the step; without measured phases, the network takes nine tenths."""
    computing = (1.0 - baseline.loading) * baseline.step_ms
    if phase == "step":
        return computing
    if not baseline.phases:
        return (0.1 if phase == "optimizer" else 0.9) * computing
    names = ("optimizer",) if phase == "optimizer" else ("forward", "backward")
    return 1e3 * sum(baseline.phases.get(name, 0.0) for name in names)


LOADING = ("loading", "dataloader")
THREAD = (*LOADING, "no thread")
COMPILE = ("computing", "own strategy", "compiler")
CUDA = ("cuda", "own strategy")


def _loader(name: str, needs: tuple[str, ...], result: Result = "same bits", **settings: Any) -> Candidate:
    return Candidate(name=name, slot="loading", needs=needs, result=result, callbacks={"Prefetch": settings})


def _workers(count: int) -> list[Candidate]:
    # With persistent workers, the samples of the second epoch come in another order.
    short = (*LOADING, "short epochs")
    return [
        _loader(f"workers-{count}", LOADING, num_workers=count),
        _loader(f"workers-{count}-persistent", short, "other maths", num_workers=count, persistent_workers=True),
    ]


def list_rank_candidates(cores: int, ranks: int) -> list[Candidate]:
    """Return the table for several ranks, which share the cores, including settings of their communication."""
    ddp: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "host-signals": (("own strategy", "Lightning 2.6"), {"lean": False}),  # the strategy's own behavior
        "bucket-view": (("own strategy",), {"gradient_as_bucket_view": True}),
        "static-graph": (("own strategy", "no accumulation"), {"static_graph": True}),
    }
    table = [Candidate(name=name, needs=needs, strategy=changes) for name, (needs, changes) in ddp.items()]
    return [replace(each, ranks=ranks) for each in [*table, *list_candidates(max(1, cores // ranks))]]


def list_candidates(cores: int) -> list[Candidate]:
    """Return the table for a process with this number of cores."""
    counts = [count for count in (1, 2, 4, 8) if count <= cores]
    half = str(max(1, cores // 2))
    threads = {"OMP_NUM_THREADS": half, "MKL_NUM_THREADS": half}
    # Loading ahead takes a core away from the step, whose threads then wait for one another.
    shared: Any = {"slot": "loading", "needs": (*LOADING, "cpu", "computing"), "result": "rounding"}
    ahead = {"prefetch": {}, f"workers-{counts[-1]}": {"num_workers": counts[-1]}}
    c = Candidate
    channels_last = {"MemoryFormat": {"memory_format": "channels_last"}}
    graphs = {"compile": {"what": "network", "mode": "reduce-overhead"}}
    lean = ("computing", "own strategy", "Lightning 2.6", "short step")
    precision: dict[str, Any] = {
        "slot": "precision", "needs": ("computing", "own precision", "float32 weights"), "result": "other maths",
    }  # fmt: skip
    return [
        _loader("prefetch", THREAD),
        _loader("prefetch-threads", THREAD, threads=max(2, min(cores, 4))),
        *(candidate for count in counts for candidate in _workers(count)),
        *(
            c(name=f"{name}-omp-{half}", **shared, callbacks={"Prefetch": settings}, environment=threads)
            for name, settings in ahead.items()
        ),
        c(
            name="persistent-workers",
            slot="loading",
            needs=("dataloader", "new workers"),
            result="other maths",
            loader={"persistent_workers": True},
        ),
        c(name="pin-memory", needs=("cuda", "dataloader", "not pinned"), loader={"pin_memory": True}),
        c(name="pack", needs=LOADING),
        c(name="augment-batches", needs=(*LOADING, "random part"), result="other maths", augment_batches=True),
        c(name="lean", needs=lean, strategy={"lean": True}),
        c(name="no-bias", needs=("computing", "norms"), result="rounding", callbacks={"DropBiasBeforeNorm": {}}),
        c(name="channels-last", needs=("computing", "convolutions"), result="rounding", callbacks=channels_last),
        c(name="fused", needs=("computing", "optimizer"), result="rounding", callbacks={"FusedOptimizers": {}}),
        c(name="bf16-mixed", **precision, precision="bf16-mixed"),
        c(name="O1", **precision, opt_level="O1"),
        c(name="O2", **precision, opt_level="O2"),
        c(name="release-gradients", needs=("computing", "automatic"), callbacks={"GradToNone": {}}),
        c(name="huge-pages", needs=("cpu", "computing", "huge pages"), environment={"THP_MEM_ALLOC_ENABLE": "1"}),
        c(name=f"threads-{half}", needs=("cpu", "computing"), result="rounding", environment=threads),
        c(name="compile", needs=COMPILE, result="rounding", strategy={"compile": "network"}),
        c(name="compile-graphs", slot="compile", needs=("cuda", *COMPILE), result="rounding", strategy=graphs),
        c(name="device-prefetch", needs=CUDA, strategy={"device_prefetch": True}),
    ]


def select(
    candidates: Iterable[Candidate], only: Sequence[str] = (), without: Sequence[str] = (), same_maths: bool = False
) -> list[Candidate]:
    """Return the candidates that the command line selects.

    Args:
        candidates: The table.
        only: Name patterns, as in a shell; empty for all.
        without: Name patterns to exclude.
        same_maths: Whether to exclude candidates that may change the result.

    Raises:
        TurboError: If a pattern matches no name, or nothing is left.
    """
    table = list(candidates)
    names = ", ".join(each.name for each in table)
    for pattern in (*only, *without):
        if not _matching(table, [pattern]):
            raise TurboError(f"{pattern!r} names no candidate; expected some of {names}.")
    left_out = _matching(table, without)
    if same_maths:
        left_out += [each for each in table if each.result != "same bits"]
    chosen = [each for each in _matching(table, only or ["*"]) if each not in left_out]
    if not chosen:
        raise TurboError(f"nothing is left to try; expected --only and --without to leave some of {names}.")
    return chosen


def _matching(candidates: Iterable[Candidate], patterns: Sequence[str]) -> list[Candidate]:
    return [each for each in candidates if any(fnmatchcase(each.name, pattern) for pattern in patterns)]


# Options of TurboStrategy that are not chosen keep Lightning's behavior.
OFF: dict[str, Any] = {
    "device_prefetch": False,
    "release_gradients": False,
    "lean": False,
}


def combine(candidates: Iterable[Candidate]) -> Settings:
    """Return the combined settings of several candidates."""
    settings = Settings()
    for each in candidates:
        off = OFF | ({"gradient_as_bucket_view": False} if each.ranks > 1 else {})
        settings = Settings(
            ranks=each.ranks,
            strategy={**off, **settings.strategy, **each.strategy} if each.strategy else settings.strategy,
            precision=each.precision or settings.precision,
            opt_level=each.opt_level or settings.opt_level,
            callbacks={**settings.callbacks, **each.callbacks},
            environment={**settings.environment, **each.environment},
            loader={**settings.loader, **each.loader},
            augment_batches=settings.augment_batches or each.augment_batches,
        )
    return settings
