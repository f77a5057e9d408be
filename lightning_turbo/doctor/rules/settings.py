"""Rules on switches that are left on, or off."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["anomaly_mode", "benchmark_off", "benchmark_thrashes", "deterministic", "gradcheck", "profiler"]


@rule(
    name="anomaly-mode",
    symptom="Backward is slow, and so is every forward operation.",
    threshold="autograd's anomaly detection is on during the watched steps",
    remedy="Switch it off: Trainer(detect_anomaly=False), no torch.autograd.set_detect_anomaly(True). "
    "It is a tool for finding a NaN.",
    card="what-lightning-does-already",
)
def anomaly_mode(facts: Facts) -> Iterator[Hit]:
    """Anomaly detection left on."""
    cost = "each operation records a stack trace and each gradient is checked for NaN, with a host sync"
    if facts.anomaly:
        yield Hit(what="autograd's anomaly detection is on", site=facts.sites.get("anomaly"), cost=cost)
    for call in facts.calls:
        if call.kind == "anomaly":
            yield Hit(what=f"{call.name} is entered in the step", site=call.site, cost=cost)


@rule(
    name="gradcheck",
    symptom="A step takes seconds.",
    threshold="torch.autograd.gradcheck or gradgradcheck runs in a watched step",
    remedy="Move the check into a test.",
    card="what-lightning-does-already",
)
def gradcheck(facts: Facts) -> Iterator[Hit]:
    """Gradient checks within the step."""
    for call in facts.calls:
        if call.kind == "gradcheck":
            seconds = call.seconds / max(facts.watched, 1)
            yield Hit(
                what=f"{call.name} runs in the step",
                site=call.site,
                cost=f"{seconds * 1e3:.2f} ms a step (measured while watching)",
                seconds=seconds,
            )


@rule(
    name="profiler",
    symptom="The whole run is slower than it was before you measured it.",
    threshold="a profiler other than Lightning's PassThroughProfiler is on; info for the SimpleProfiler",
    remedy="Take the profiler out once you have seen its report.",
    card="what-lightning-does-already",
)
def profiler(facts: Facts) -> Iterator[Hit]:
    """Profilers left on."""
    name = facts.profiler or ("torch.profiler" if facts.autograd_profiler else None)
    if name is not None:
        yield Hit(
            level="info" if name == "SimpleProfiler" else "warning",
            what=f"{name} is on",
            site=facts.sites.get("profiler"),
            cost="a record for each operation or function call",
        )
    for call in facts.calls:
        if call.kind == "profiler":
            yield Hit(what=f"{call.name} is started in the step", site=call.site, cost="a record for each operation")


@rule(
    name="deterministic",
    symptom="Some operations are slower than elsewhere.",
    threshold="deterministic algorithms are on; always info, since it may be meant",
    remedy="If you do not need runs that repeat bit for bit, leave Trainer(deterministic=...) off.",
    card="worker-tuning",
)
def deterministic(facts: Facts) -> Iterator[Hit]:
    """Deterministic algorithms."""
    if facts.deterministic:
        yield Hit(
            level="info",
            what="deterministic algorithms are on",
            site=facts.sites.get("deterministic"),
            cost="depends on the operations; scatter, index_add and some convolutions lose most",
        )


@rule(
    name="benchmark-off",
    symptom="Convolutions are slower than they could be.",
    threshold="a CUDA run with convolutions, cudnn.benchmark off, deterministic off, and one input shape over at "
    "least four steps",
    remedy="Trainer(benchmark=True) lets cuDNN measure its algorithms once and keep the fastest.",
    card="what-lightning-does-already",
)
def benchmark_off(facts: Facts) -> Iterator[Hit]:
    """``cudnn.benchmark`` off although shapes are constant."""
    constant = facts.shapes == 1 and facts.seen >= 4
    if facts.cuda and facts.convolutions and constant and not (facts.benchmark or facts.deterministic):
        yield Hit(
            level="info",
            what=f"cudnn.benchmark is off, and all {facts.seen} steps had the same input shapes",
            site=facts.sites.get("benchmark"),
            cost="depends on the convolutions: nothing to tens of per cent of the step",
        )


@rule(
    name="benchmark-thrashes",
    symptom="Steps take many times longer whenever the input has a new shape.",
    threshold="a CUDA run with convolutions, cudnn.benchmark on, and more than two input shapes in half of the steps "
    "or more",
    remedy="Trainer(benchmark=False), or pad or bucket the inputs to a few shapes.",
    card="what-lightning-does-already",
)
def benchmark_thrashes(facts: Facts) -> Iterator[Hit]:
    """``cudnn.benchmark`` on although shapes keep changing."""
    changing = facts.shapes > 2 and 2 * facts.shapes >= facts.seen
    if facts.cuda and facts.convolutions and facts.benchmark and changing:
        yield Hit(
            what=f"cudnn.benchmark is on, and {facts.seen} steps had {facts.shapes} different input shapes",
            site=facts.sites.get("benchmark"),
            cost="every new shape is measured anew",
        )
