"""Rules on the model, its validation, its compilation, and switches that are left on or off."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []

LIGHTNING = "what-lightning-does-already"


@rule(
    "bias-before-norm",
    "no-bias-before-norm",
    "Build the layers with bias=False, or call lightning_turbo.drop_bias_before_norm.",
)
def _bias_before_norm(facts: Facts) -> Iterator[Hit]:
    cost = "one addition, one sum in backward and one optimizer entry a layer for nothing (estimated)"
    for layer in facts.biases:
        what = f"{layer.name} has a bias, which the batch norm behind it cancels"
        yield Hit(what, layer.site, cost, "info", layer.name, cause="bias")


@rule("unused-parameters", LIGHTNING, "Use it, remove it, or freeze it with requires_grad_(False).")
def _unused_parameters(facts: Facts) -> Iterator[Hit]:
    cost = "under DDP a search through the graph each step; else its memory"
    level = "warning" if facts.world_size > 1 else "info"
    for each in facts.unused:
        yield Hit(f"{each.name} never got a gradient", each.site, cost, level, each.name, cause="unused")


@rule(
    "validation-graph",
    LIGHTNING,
    "Take out torch.enable_grad and set_grad_enabled(True), and leave inference_mode at its default. Where validation "
    "needs gradients, keep them and return loss.detach().",
)
def _validation_graph(facts: Facts) -> Iterator[Hit]:
    if facts.validation_graph:
        cost = "memory and time for graphs, unless gradients are needed"
        yield Hit("validation_step returns tensors with a graph", facts.sites.get("validation"), cost, "info")
    elif facts.validates and not facts.inference_mode:
        cost = "version counting and view tracking for each operation"
        yield Hit("validation runs with inference_mode=False", facts.sites.get("inference_mode"), cost, "info")


@rule(
    "graph-breaks",
    LIGHTNING,
    "TORCH_LOGS=graph_breaks shows the lines. Move what breaks the graph out of the compiled function.",
)
def _graph_breaks(facts: Facts) -> Iterator[Hit]:
    for reason, count in facts.graph_breaks.items():
        what = f"torch.compile broke the graph, {count} times: {reason}"
        yield Hit(what, facts.sites.get("compile"), "a return to Python at each break", "info")


@rule(
    "recompiles",
    LIGHTNING,
    "TORCH_LOGS=recompiles shows why. Pad inputs to a few shapes (drop_last=True for the last batch), or use "
    "torch.compile(dynamic=True).",
)
def _recompiles(facts: Facts) -> Iterator[Hit]:
    if facts.recompiled:
        what = f"torch.compile made {facts.recompiled} new graphs after the warmup"
        yield Hit(what, facts.sites.get("compile"), "seconds for each (estimated)")


@rule(
    "anomaly-mode",
    LIGHTNING,
    "Switch it off: Trainer(detect_anomaly=False), no torch.autograd.set_detect_anomaly(True). It is a tool for "
    "finding a NaN.",
)
def _anomaly_mode(facts: Facts) -> Iterator[Hit]:
    cost = "each operation records a stack trace and each gradient is checked for NaN, with a host sync"
    if facts.anomaly:
        yield Hit("autograd's anomaly detection is on", facts.sites.get("anomaly"), cost)
    yield from hits_of_calls(facts, "anomaly", "{name} is entered in the step", cost, "warning")


@rule("profiler", LIGHTNING, "Take the profiler out once you have seen its report.")
def _profiler(facts: Facts) -> Iterator[Hit]:
    name = facts.profiler or ("torch.profiler" if facts.autograd_profiler else None)
    cost = "a record for each operation or function call"
    if name is not None:
        level = "info" if name == "SimpleProfiler" else "warning"
        yield Hit(f"{name} is on", facts.sites.get("profiler"), cost, level)
    yield from hits_of_calls(facts, "profiler", "{name} is started in the step", cost, "warning")


@rule(
    "benchmark-off",
    LIGHTNING,
    "Trainer(benchmark=True) lets cuDNN measure its algorithms once and keep the fastest.",
)
def _benchmark_off(facts: Facts) -> Iterator[Hit]:
    constant = facts.shapes == 1 and facts.seen >= 4
    if facts.cuda and facts.convolutions and constant and not (facts.benchmark or facts.deterministic):
        what = f"cudnn.benchmark is off, and all {facts.seen} steps had the same input shapes"
        cost = "depends on the convolutions: nothing to tens of per cent of the step"
        yield Hit(what, facts.sites.get("benchmark"), cost, "info")


@rule("benchmark-thrashes", LIGHTNING, "Trainer(benchmark=False), or pad or bucket the inputs to a few shapes.")
def _benchmark_thrashes(facts: Facts) -> Iterator[Hit]:
    changing = facts.shapes > 2 and 2 * facts.shapes >= facts.seen
    if facts.cuda and facts.convolutions and facts.benchmark and changing:
        what = f"cudnn.benchmark is on, and {facts.seen} steps had {facts.shapes} different input shapes"
        yield Hit(what, facts.sites.get("benchmark"), "cuDNN measures each new shape once more")
