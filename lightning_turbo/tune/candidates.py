"""The table of candidates: what each one needs and changes, and what the first look at a script says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_turbo.errors import TurboError

__all__ = [
    "SMALL_SHARE",
    "Candidate",
    "Look",
    "Settings",
    "combine",
    "list_candidates",
    "result_of",
    "saving",
    "select",
    "why_not",
]

Result = Literal["same bits", "same bits if loading draws nothing", "rounding", "other maths"]
SMALL_SHARE = 0.03  # share of a step; candidates for a part that takes less are not tried
LITTLE = f"less than {100 * SMALL_SHARE:g} % of a step"
SHORT_EPOCH = 200  # in batches; starting a worker process takes as long as some steps


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the first process saw of the script as it is, by the Doctor's facts; see ``probe.look_of``."""

    phases: Mapping[str, float]  # seconds of a step in each phase of ``doctor.timeline.PHASES``
    device: str = "cpu"
    lacks: Sequence[str] = ()  # keys of NEEDS that script or machine do not fulfil
    accumulate: int = 1  # batches per optimizer step
    workers: int = 0  # of the training loader
    draws: bool | None = False  # whether loading draws random numbers; ``None`` in worker processes, where nobody looks
    batches: int | None = None  # of an epoch; ``None`` if Lightning does not know, and none ended
    period: int | None = None  # batches until training and validation repeat themselves: one epoch, or several
    seconds: float = 0.0  # of a period
    is_seen: bool = False  # whether the seconds are those of a whole epoch, and not of its steps alone

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())

    @property
    def pace(self) -> float:
        """Seconds of a step with its share of the validation and of the border between epochs."""
        return max(self.step, self.seconds / self.period) if self.period else self.step

    def share(self, phases: Iterable[str]) -> float:
        """Return the share of a step that some phases take."""
        return sum(self.phases.get(phase, 0.0) for phase in phases) / self.step

    def lack(self, need: str) -> bool:
        """Return whether a need of a candidate is unfulfilled."""
        if need in PHASES:
            return self.share(PHASES[need]) < SMALL_SHARE
        if need == "short epochs":
            return self.batches is None or self.batches > SHORT_EPOCH
        return need in self.lacks


# What candidates shorten -> the phases of a step.
PHASES = {
    "loading": ("data",),
    "copying": ("data", "copy"),
    "loop": ("hooks", "logging"),
    "network": ("forward", "backward"),
    "updates": ("optimizer",),
    "computing": ("forward", "backward", "optimizer"),
}
# The needs of candidates, and the explanation if one is unfulfilled.
NEEDS = {
    "loading": f"waiting for data takes {LITTLE}",
    "copying": f"waiting for data and copying take {LITTLE}",
    "loop": f"hooks and logging take {LITTLE}",
    "network": f"forward and backward take {LITTLE}",
    "updates": f"the optimizer takes {LITTLE}",
    "computing": f"a step computes in {LITTLE}",
    "dataloader": "the training loader is not a DataLoader",
    "no thread": "the loader prepares batches in a thread already",
    "new workers": "no worker processes are started again in each epoch",
    "not pinned": "the loader pins its memory already",
    "short epochs": "epochs are long, so that their starts hardly count",
    "own strategy": "the script sets a strategy",
    "own precision": "the script sets a precision",
    "float32 weights": "the network's weights are float64, whose digits half precision would lose",
    "Lightning 2.6": "it needs Lightning 2.6",
    "compiler": "torch finds no C++ compiler",
    "optimizer": "no optimizer can be fused, or each is already",
    "convolutions": "there is no 2D or 3D convolution in another format",
    "cuda": "it needs a CUDA device",
    "cpu": "it is for a CPU",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a Trainer, its loaders and its process."""

    strategy: Mapping[str, Any] = field(default_factory=dict)  # arguments of TurboStrategy
    precision: str = ""  # the Trainer's
    opt_level: str = ""  # of ApexAMP
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> arguments
    environment: Mapping[str, str] = field(default_factory=dict)  # of the process
    loader: Mapping[str, Any] = field(default_factory=dict)  # arguments of each DataLoader


@dataclass(frozen=True, kw_only=True)
class Candidate(Settings):
    """Settings that are tried together."""

    name: str
    needs: tuple[str, ...]  # keys of NEEDS; the first says which part of a step it shortens
    slot: str = ""  # shared by alternatives
    result: Result = "same bits"  # possible effect on the result

    @property
    def kind(self) -> str:
        """Its slot or, without one, its name; at most one candidate of a kind is chosen."""
        return self.slot or self.name


def result_of(candidate: Candidate, look: Look | None) -> Result:
    """Return the possible effect of a candidate on the result of a script.

    Each worker process draws other random numbers.
    """
    if look is None or look.draws is False or "num_workers" not in candidate.loader:
        return candidate.result
    if look.draws:
        return "other maths"
    return candidate.result if candidate.result != "same bits" else "same bits if loading draws nothing"


def why_not(candidate: Candidate, look: Look) -> str:
    """Return why a candidate is not tried, or an empty string."""
    if candidate.loader == {"num_workers": look.workers} and not candidate.environment:
        return "the loader has as many"
    return next((NEEDS[need] for need in candidate.needs if look.lack(need)), "")


# The usual saving of a candidate, as a share of the part of a step that its first need names.
USUAL = {"loading": 1.0, "copying": 1.0, "loop": 0.5, "updates": 0.5, "network": 0.4, "computing": 0.1}
WITHOUT_INSTRUCTIONS = 0.1  # factor for half precision on a CPU without such instructions


def saving(candidate: Candidate, look: Look, computes_in_half: bool) -> float:
    """Return the share of a step that a candidate usually saves; it only determines the order of trials."""
    first = candidate.needs[0]
    if first not in PHASES:  # the start of workers, by what a period takes beside its steps
        return 1.0 - look.step / look.pace
    slow = candidate.slot == "precision" and not computes_in_half
    return USUAL[first] * look.share(PHASES[first]) * (WITHOUT_INSTRUCTIONS if slow else 1.0)


def list_candidates(cores: int) -> list[Candidate]:
    """Return the table for a process with this number of cores; of two alternatives the plainer one comes first."""
    counts = [count for count in (1, 2, 4, 8) if count <= cores]
    half = str(max(1, cores // 2))
    threads = {"OMP_NUM_THREADS": half, "MKL_NUM_THREADS": half}
    loading: Any = {"slot": "loading", "needs": ("loading", "dataloader")}
    thread = {**loading, "needs": (*loading["needs"], "no thread")}
    # Loading ahead takes a core away from the step, whose threads then wait for one another.
    shared = {**loading, "needs": (*loading["needs"], "cpu", "computing"), "result": "rounding"}
    # With persistent workers, the samples of the second epoch come in another order.
    short = {**loading, "needs": (*loading["needs"], "short epochs"), "result": "other maths"}
    precision: Any = {
        "slot": "precision",
        "needs": ("network", "own precision", "float32 weights"),
        "result": "other maths",
    }
    apex = {**precision, "needs": (*precision["needs"], "cuda")}
    c = Candidate
    return [
        *(c(name=f"workers-{count}", **loading, loader={"num_workers": count}) for count in counts),
        *(
            c(name=f"workers-{n}-persistent", **short, loader={"num_workers": n, "persistent_workers": True})
            for n in counts
        ),
        c(name="prefetch", **thread, callbacks={"Prefetch": {}}),
        c(name="prefetch-threads", **thread, callbacks={"Prefetch": {"threads": max(2, min(cores, 4))}}),
        c(name=f"workers-{counts[-1]}-omp-{half}", **shared, loader={"num_workers": counts[-1]}, environment=threads),
        c(name=f"prefetch-omp-{half}", **shared, callbacks={"Prefetch": {}}, environment=threads),
        c(
            name="persistent-workers",
            slot="loading",
            needs=("new workers", "dataloader", "short epochs"),
            result="other maths",
            loader={"persistent_workers": True},
        ),
        c(name="lean", needs=("loop", "own strategy", "Lightning 2.6"), strategy={"lean": True}),
        c(name="fused", needs=("updates", "optimizer"), result="rounding", callbacks={"FusedOptimizers": {}}),
        c(name="bf16-mixed", **precision, precision="bf16-mixed"),
        c(name="O1", **apex, opt_level="O1"),
        c(name="O2", **apex, opt_level="O2"),
        c(name=f"threads-{half}", needs=("computing", "cpu"), result="rounding", environment=threads),
        c(
            name="channels-last",
            needs=("network", "cuda", "convolutions"),
            result="rounding",
            callbacks={"MemoryFormat": {"memory_format": "channels_last"}},
        ),
        c(
            name="compile",
            needs=("network", "cuda", "own strategy", "compiler"),
            result="rounding",
            strategy={"compile": "network"},
        ),
        c(name="pin-memory", needs=("copying", "cuda", "dataloader", "not pinned"), loader={"pin_memory": True}),
        c(name="device-prefetch", needs=("copying", "cuda", "own strategy"), strategy={"device_prefetch": True}),
    ]


def select(candidates: Iterable[Candidate], only: Sequence[str] = ()) -> list[Candidate]:
    """Return the candidates that the command line selects.

    Args:
        candidates: The table.
        only: Name patterns, as in a shell; empty for all.

    Raises:
        TurboError: If a pattern matches no name.
    """
    table = list(candidates)
    for pattern in only:
        if not any(fnmatchcase(each.name, pattern) for each in table):
            names = ", ".join(each.name for each in table)
            raise TurboError(f"{pattern!r} names no candidate; expected some of {names}.")
    return [each for each in table if any(fnmatchcase(each.name, pattern) for pattern in only or ["*"])]


# Options of TurboStrategy that are not chosen keep Lightning's behavior.
OFF: dict[str, Any] = {"device_prefetch": False, "release_gradients": False, "lean": False}


def combine(candidates: Iterable[Candidate]) -> Settings:
    """Return the combined settings of several candidates."""
    settings = Settings()
    for each in candidates:
        settings = Settings(
            strategy={**OFF, **settings.strategy, **each.strategy} if each.strategy else settings.strategy,
            precision=each.precision or settings.precision,
            opt_level=each.opt_level or settings.opt_level,
            callbacks={**settings.callbacks, **each.callbacks},
            environment={**settings.environment, **each.environment},
            loader={**settings.loader, **each.loader},
        )
    return settings
