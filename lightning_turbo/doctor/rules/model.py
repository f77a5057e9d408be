"""Rules on the model and its validation."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["bias_before_norm", "data_parallel", "validation_graph"]


@rule(
    name="bias-before-norm",
    symptom="Convolutions carry biases that the batch norm behind them takes away again.",
    threshold="the output of a layer with a bias is the input of a batch norm in training mode; always info, since it "
    "costs little",
    remedy="Build the layer with bias=False, or call lightning_turbo.drop_bias_before_norm.",
    card="no-bias-before-norm",
)
def bias_before_norm(facts: Facts) -> Iterator[Hit]:
    """A bias right before a batch norm."""
    for call in facts.calls:
        if call.kind == "bias":
            yield Hit(
                level="info",
                what=f"{call.name} has a bias, which the batch norm behind it cancels",
                site=call.site,
                cost="one addition, one sum in backward and one optimizer entry for nothing (estimated)",
            )


@rule(
    name="data-parallel",
    symptom="Several GPUs in one process are hardly faster than one.",
    threshold="a torch.nn.DataParallel in the module",
    remedy="Take it out and use Trainer(strategy='turbo_ddp' or 'ddp', devices=...).",
    card="turbo-strategy",
)
def data_parallel(facts: Facts) -> Iterator[Hit]:
    """``nn.DataParallel``."""
    for module in facts.data_parallel:
        yield Hit(
            what=f"{module.name} is an nn.DataParallel, which copies the model to every GPU in each step",
            site=module.site,
            cost="one broadcast of all weights a step, and Python threads that wait for one another",
        )


@rule(
    name="validation-graph",
    symptom="Validation needs as much memory as training.",
    threshold="the first batch of validation returns tensors with a graph, or Trainer(inference_mode=False), and no "
    "gradient is asked for in it; info for the latter alone",
    remedy="Take out torch.enable_grad and set_grad_enabled(True), and leave inference_mode at its default. Where "
    "validation needs gradients, as for forces, keep them and return loss.detach().",
    card="what-lightning-does-already",
)
def validation_graph(facts: Facts) -> Iterator[Hit]:
    """Validation that records graphs."""
    if facts.validation_gradients:
        return
    if facts.validation_graph:
        yield Hit(
            what="validation_step returns tensors with a graph",
            site=facts.sites.get("validation"),
            cost="memory and time for graphs that nobody uses",
        )
    elif facts.validates and not facts.inference_mode:
        yield Hit(
            level="info",
            what="validation runs with inference_mode=False",
            site=facts.sites.get("inference_mode"),
            cost="version counting and view tracking for each operation",
        )
