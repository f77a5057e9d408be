"""Rules on number formats."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["bce_under_amp", "clip_before_unscale", "clips_nothing", "falling_scale", "float32", "odd_sizes", "tiny_amp"]

MULTIPLE = 8
"""Half-precision tensor cores want sizes that are multiples of this (NVIDIA, Deep Learning Performance Guide)."""

SMALL = 2**14
"""Elements an operation below which launching and casting cost more than computing; a choice, not a measurement."""

CASTS = 1 / 6
"""Share of casts among the operations above which they weigh."""


def _tensor_cores(facts: Facts) -> bool:
    return facts.capability is not None and facts.capability >= (7, 0)


def _half(facts: Facts) -> bool:
    return "16" in facts.precision or facts.autocast


@rule(
    name="float32",
    symptom="A GPU with tensor cores computes as slowly as one without.",
    threshold="a CUDA device of capability 7.0 or more in 32-bit precision, with matmul precision 'highest' from "
    "capability 8.0 on",
    remedy="Use ApexAMP or Trainer(precision='bf16-mixed' or '16-mixed'), or at least "
    "torch.set_float32_matmul_precision('high').",
    card="apex-amp",
)
def float32(facts: Facts) -> Iterator[Hit]:
    """Tensor cores that are not used."""
    if not _tensor_cores(facts) or _half(facts) or facts.capability is None or "64" in facts.precision:
        return
    if facts.capability < (8, 0) or facts.matmul_precision == "highest":
        yield Hit(
            what=f"float32 (precision={facts.precision!r}) on a GPU with tensor cores "
            f"(capability {facts.capability[0]}.{facts.capability[1]})",
            site=facts.sites.get("precision"),
            cost="1.5 to 3 times the time for models made of large matrix products (estimated)",
        )


@rule(
    name="odd-sizes",
    symptom="Mixed precision brings less than expected.",
    threshold="half precision on tensor cores, and a linear or convolution layer with a size of at least 64 that is "
    "no multiple of 8",
    remedy="Round layer widths and vocabulary sizes up to a multiple of 8, better 64.",
    card="apex-amp",
)
def odd_sizes(facts: Facts) -> Iterator[Hit]:
    """Layer sizes that miss what tensor cores want."""
    if not (_tensor_cores(facts) and _half(facts)):
        return
    for layer in facts.layers:
        odd = [size for size in layer.sizes if size >= 64 and size % MULTIPLE]
        if odd:
            yield Hit(
                level="info",
                what=f"{layer.name} has size {', '.join(map(str, odd))}, no multiple of {MULTIPLE}",
                site=layer.site,
                cost="padding or slower kernels for this layer (estimated)",
            )


@rule(
    name="bce-under-amp",
    symptom="Binary cross entropy under autocast fails or loses its small losses.",
    threshold="binary_cross_entropy (BCELoss) runs in a watched step under autocast",
    remedy="Use BCEWithLogitsLoss on the values before the sigmoid.",
    card="apex-amp",
)
def bce_under_amp(facts: Facts) -> Iterator[Hit]:
    """``BCELoss`` under autocast."""
    for call in facts.calls:
        if call.kind == "bce":
            yield Hit(
                what="binary_cross_entropy runs under autocast, which refuses it on CUDA",
                site=call.site,
                cost="accuracy, not time",
            )


@rule(
    name="clip-before-unscale",
    symptom="Training with a loss scale hardly learns: gradients are clipped to almost nothing.",
    threshold="gradients are clipped in a watched step after the loss was scaled and before unscale_",
    remedy="Call scaler.unscale_(optimizer) before clipping, or leave clipping to Trainer(gradient_clip_val=...).",
    card="apex-amp",
)
def clip_before_unscale(facts: Facts) -> Iterator[Hit]:
    """Clipping of gradients that still carry the loss scale."""
    for call in facts.calls:
        if call.kind == "scaled clip":
            yield Hit(
                level="error",
                what=f"{call.name} clips gradients that still carry the loss scale",
                site=call.site,
                cost="wrong results",
            )


@rule(
    name="clips-nothing",
    symptom="Clipping changes nothing, or the norm of the gradients is always 0.",
    threshold="clip_grad_norm_ is given, in a watched step, parameters none of which has a gradient",
    remedy="Clip after the backward pass and before the step; at O2, where the gradients are the masters', inside "
    "`with self.trainer.precision_plugin.float_weights():`.",
    card="apex-amp",
)
def clips_nothing(facts: Facts) -> Iterator[Hit]:
    """Clipping of parameters without gradients."""
    for call in facts.calls:
        if call.kind == "empty clip":
            yield Hit(
                level="error",
                what=f"{call.name} is given parameters without gradients",
                site=call.site,
                cost="wrong results",
            )


@rule(
    name="falling-scale",
    symptom="Mixed-precision training skips step after step.",
    threshold="the loss scale fell at least twice within the watched steps, or is below 1",
    remedy="Look for losses or activations beyond 65504; use bf16, or start from a lower scale.",
    card="apex-amp",
)
def falling_scale(facts: Facts) -> Iterator[Hit]:
    """A loss scale that keeps falling."""
    falls = sum(after < before for before, after in zip(facts.scales, facts.scales[1:], strict=False))
    if falls >= 2 or (facts.scales and facts.scales[-1] < 1):
        yield Hit(
            what=f"the loss scale fell {falls} times in {len(facts.scales)} steps, to {facts.scales[-1]:g}",
            site=facts.sites.get("precision"),
            cost=f"{falls} skipped steps of {len(facts.scales)} (measured)",
        )


@rule(
    name="tiny-amp",
    symptom="Mixed precision is slower than float32.",
    threshold="autocast, at least a sixth of the operations are casts, and operations write fewer than 16384 elements "
    "on average; always info",
    remedy="Use larger batches, or float32 (with TF32) for a model this small.",
    card="apex-amp",
)
def tiny_amp(facts: Facts) -> Iterator[Hit]:
    """Casts that cost more than they gain."""
    if facts.autocast and facts.operations and facts.casts / facts.operations >= CASTS:
        mean = facts.elements / facts.operations
        if mean < SMALL:
            yield Hit(
                level="info",
                what=f"{facts.casts} of {facts.operations} operations are casts, and an operation writes "
                f"{mean:.0f} elements on average",
                site=facts.sites.get("precision"),
                cost="the launch of each cast (estimated)",
            )
