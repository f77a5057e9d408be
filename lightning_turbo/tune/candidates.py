"""What is tried, as a table: what each candidate needs, what it changes, and how it is applied and written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_turbo.errors import TurboError

__all__ = ["Candidate", "Facts", "combine", "list_candidates", "select"]

Result = Literal["same bits", "rounding", "other maths"]
LEAN = {"lean_step": True, "lean_logging": True}
SHORT_EPOCH = 200  # batches; the start of a worker process takes as long as some steps
SMALL_SHARE = 0.03  # of a step; what cannot save more than this is not tried
LIGHTNING_MS = 0.6  # what Lightning's own loop can cost in a step, with bar and logged values


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the first run found out about the script and the machine; times in milliseconds.

    Args:
        step_ms: A step as it is.
        one_batch_ms: A step that is given one batch again and again.
        loader_ms: A batch from the loader alone.
        device: ``"cpu"`` or ``"cuda"``.
        cores: Cores that a process may use.
        strategy: Name of the strategy's class.
        precision: The precision that the script sets, ``"32-true"`` by default.
        automatic: Whether Lightning steps the optimizers.
        can_fuse: Whether an optimizer can be fused.
        convolutions: Whether there are weights of four or five dimensions.
        norms: Whether there are norm layers, and convolutions with a bias.
        dataloader: Whether the training loader is a ``DataLoader`` of torch.
        num_workers: Its worker processes.
        prefetches: Whether it prepares batches in a thread already.
        batches: Batches of an epoch; ``None`` where it has no length.
        followed: Whether Lightning is one that the lean step follows.
        compiler: Whether torch finds a compiler.
        huge_pages: The kernel's rule for large pages.
    """

    step_ms: float
    one_batch_ms: float
    loader_ms: float
    device: str = "cpu"
    cores: int = 1
    strategy: str = "SingleDeviceStrategy"
    precision: str = "32-true"
    automatic: bool = True
    can_fuse: bool = False
    convolutions: bool = False
    norms: bool = False
    dataloader: bool = True
    num_workers: int = 0
    prefetches: bool = False
    batches: int | None = None
    followed: bool = True
    compiler: bool = True
    huge_pages: str | None = None

    @property
    def waiting(self) -> float:
        """The share of a step that waits for data."""
        return max(0.0, 1.0 - self.one_batch_ms / self.step_ms)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setting.

    Args:
        name: On the command line and in the reports.
        slot: Of the candidates of a slot at most one is chosen.
        result: What it may do to the result.
        why_not: Why it is not tried, or an empty text.
        strategy: Arguments of a ``TurboStrategy``.
        precision: The Trainer's ``precision``.
        opt_level: Level of an ``ApexAMP``, in bfloat16.
        callbacks: Names of callbacks with their arguments.
        environment: Variables of the process.
    """

    name: str
    slot: str
    result: Result
    why_not: Callable[[Facts], str]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    precision: str = ""
    opt_level: str = ""
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def _loading(facts: Facts) -> str:
    if facts.waiting < SMALL_SHARE:
        return f"a step waits for data {100 * facts.waiting:.0f} % of its time"
    return "" if facts.dataloader else "the training loader is not a DataLoader"


def _in_thread(facts: Facts) -> str:
    return _loading(facts) or ("the loader prepares batches in a thread already" if facts.prefetches else "")


def _computing(facts: Facts) -> str:
    share = facts.one_batch_ms / facts.step_ms
    return f"a step computes {100 * share:.0f} % of its time only" if share < SMALL_SHARE else ""


def _strategy(facts: Facts) -> str:
    return "" if facts.strategy == "SingleDeviceStrategy" else f"the script has strategy {facts.strategy}"


def _first(*reasons: str) -> str:
    return next(filter(None, reasons), "")


def _precision(facts: Facts) -> str:
    own = "" if facts.precision == "32-true" else f"the script sets precision {facts.precision!r}"
    return _first(_computing(facts), own)


def _lean(facts: Facts) -> str:
    slow = (
        "" if facts.one_batch_ms * SMALL_SHARE < LIGHTNING_MS else "a step is long beside what Lightning's loop costs"
    )
    other = "" if facts.followed else "it needs Lightning 2.6"
    return _first(_computing(facts), _strategy(facts), other, slow)


def _compile(facts: Facts) -> str:
    return _first(_computing(facts), _strategy(facts), "" if facts.compiler else "torch finds no C++ compiler")


def _fused(facts: Facts) -> str:
    return _first(_computing(facts), "" if facts.can_fuse else "no optimizer can be fused, or each is already")


def _format(facts: Facts) -> str:
    return _first(_computing(facts), "" if facts.convolutions else "there is no 2D or 3D convolution")


def _bias(facts: Facts) -> str:
    return _first(_computing(facts), "" if facts.norms else "there is no bias before a norm layer")


def _release(facts: Facts) -> str:
    return _first(_computing(facts), _strategy(facts), "" if facts.automatic else "the script steps its optimizers")


def _cuda(facts: Facts) -> str:
    return _first("" if facts.device == "cuda" else "it needs a CUDA device", _strategy(facts))


def _huge(facts: Facts) -> str:
    return _first(
        "" if facts.device == "cpu" else "it is for a CPU",
        {"always": "the kernel gives large pages to every program", None: "this kernel has no large pages"}.get(
            facts.huge_pages, ""
        ),
    )


def _long_epochs(facts: Facts, batches: float) -> str:
    long = facts.batches is None or facts.batches > batches
    return "epochs are so long that their first batches hardly count" if long else ""


def _next_epoch(facts: Facts) -> str:
    return _first(_long_epochs(facts, 1 / SMALL_SHARE), _in_thread(facts))


def _threads(facts: Facts) -> str:
    return _first(_computing(facts), "" if facts.device == "cpu" else "it is for a CPU")


def _workers(count: int, persistent: bool = False) -> Callable[[Facts], str]:
    def why_not(facts: Facts) -> str:
        as_many = "the loader has as many" if facts.num_workers == count else ""
        return _first(_loading(facts), as_many, _long_epochs(facts, SHORT_EPOCH) if persistent else "")

    return why_not


def _loader(
    name: str, why_not: Callable[[Facts], str], result: Result = "same bits", next_epoch: bool = False, **settings: Any
) -> Candidate:
    callbacks: dict[str, Mapping[str, Any]] = {"LoaderSettings": settings}
    if next_epoch:
        callbacks["PrefetchNextEpoch"] = {}
    return Candidate(name=name, slot="loading", result=result, why_not=why_not, callbacks=callbacks)


def _counts(cores: int, most: int = 8) -> list[int]:
    """Powers of two up to the number of cores."""
    return [count for count in (1, 2, 4, 8) if count <= min(cores, most)]


def list_candidates(cores: int) -> list[Candidate]:
    """Return the table, for a machine with so many cores.

    Args:
        cores: Cores that a process may use.
    """
    reduce_overhead = {"compile": {"what": "network", "mode": "reduce-overhead"}}
    c = Candidate
    return [
        _loader("prefetch", _in_thread, prefetch=True),
        _loader("prefetch-threads", _in_thread, prefetch=True, prefetch_threads=max(2, min(cores, 4))),
        *(_loader(f"workers-{count}", _workers(count), num_workers=count) for count in _counts(cores)),
        *(
            _loader(  # the samples of the second epoch come in another order
                f"workers-{count}-persistent", _workers(count, True), "other maths", num_workers=count,
                persistent_workers=True,
            )
            for count in _counts(cores)
        ),
        _loader("next-epoch", _next_epoch, prefetch=True, next_epoch=True),
        c(name="lean", slot="lean", result="same bits", why_not=_lean, strategy=LEAN),
        c(name="compile", slot="compile", result="rounding", why_not=_compile, strategy={"compile": "network"}),
        c(
            name="compile-reduce-overhead", slot="compile", result="rounding", strategy=reduce_overhead,
            why_not=lambda facts: _first(_cuda(facts), _compile(facts)),
        ),
        c(name="bf16-mixed", slot="precision", result="other maths", why_not=_precision, precision="bf16-mixed"),
        c(name="O1", slot="precision", result="other maths", why_not=_precision, opt_level="O1"),
        c(name="O2", slot="precision", result="other maths", why_not=_precision, opt_level="O2"),
        c(
            name="channels-last", slot="format", result="rounding", why_not=_format,
            callbacks={"MemoryFormat": {"memory_format": "channels_last"}},
        ),
        c(name="no-bias", slot="bias", result="rounding", why_not=_bias, callbacks={"DropBiasBeforeNorm": {}}),
        c(name="fused", slot="fused", result="rounding", why_not=_fused, callbacks={"FusedOptimizers": {}}),
        c(name="release-gradients", slot="release", result="same bits", why_not=_release, callbacks={"GradToNone": {}}),
        c(
            name="huge-pages", slot="pages", result="same bits", why_not=_huge,
            environment={"THP_MEM_ALLOC_ENABLE": "1"},
        ),
        *(
            c(
                name=f"threads-{count}", slot="threads", result="rounding", why_not=_threads,
                environment={"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)},
            )
            for count in _counts(max(1, cores // 2))[-1:]
            if cores > 1
        ),
        c(name="device-prefetch", slot="device", result="same bits", why_not=_cuda, strategy={"device_prefetch": True}),
        c(name="cudnn-benchmark", slot="cudnn", result="rounding", why_not=_cuda, strategy={"cudnn_benchmark": True}),
        c(name="tf32", slot="tf32", result="other maths", why_not=_cuda, strategy={"matmul_precision": "high"}),
    ]  # fmt: skip


def select(
    candidates: Iterable[Candidate], only: Sequence[str] = (), without: Sequence[str] = (), same_maths: bool = False
) -> list[Candidate]:
    """Return those candidates that the command line asks for.

    Args:
        candidates: The table.
        only: Patterns of names as in a shell; empty for all.
        without: Patterns of names that are left out.
        same_maths: Whether to leave out what may change a bit of the result.

    Raises:
        TurboError: If a pattern matches no name, or nothing is left.
    """
    table = list(candidates)
    names = ", ".join(each.name for each in table)
    for pattern in (*only, *without):
        if not any(fnmatchcase(each.name, pattern) for each in table):
            raise TurboError(f"{pattern!r} names no candidate; expected some of {names}.")
    chosen = [
        each
        for each in table
        if (not only or any(fnmatchcase(each.name, pattern) for pattern in only))
        and not any(fnmatchcase(each.name, pattern) for pattern in without)
        and not (same_maths and each.result != "same bits")
    ]
    if not chosen:
        raise TurboError(f"nothing is left to try; expected --only and --without to leave some of {names}.")
    return chosen


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Candidates put together: what a Trainer and its process are given."""

    strategy: dict[str, Any]
    precision: str
    opt_level: str
    callbacks: dict[str, dict[str, Any]]
    environment: dict[str, str]


# Of a TurboStrategy: what is not chosen stays as Lightning has it.
OFF: dict[str, Any] = {
    "device_prefetch": False,
    "cudnn_benchmark": None,
    "release_gradients": False,
    "lean_step": False,
    "lean_logging": False,
}


def combine(candidates: Iterable[Candidate]) -> Settings:
    """Return the settings of some candidates together.

    Args:
        candidates: At most one of each slot.
    """
    chosen = list(candidates)
    strategy = {name: value for each in chosen for name, value in each.strategy.items()}
    return Settings(
        strategy={**OFF, **strategy} if strategy else {},
        precision=next((each.precision for each in chosen if each.precision), ""),
        opt_level=next((each.opt_level for each in chosen if each.opt_level), ""),
        callbacks={name: dict(arguments) for each in chosen for name, arguments in each.callbacks.items()},
        environment={name: value for each in chosen for name, value in each.environment.items()},
    )
