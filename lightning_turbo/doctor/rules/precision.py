"""Rules on number formats and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []

MULTIPLE = 8
"""Half-precision tensor cores want sizes that are multiples of this (NVIDIA, Deep Learning Performance Guide)."""


@rule(
    "float32",
    "apex-amp",
    "Use ApexAMP or Trainer(precision='bf16-mixed' or '16-mixed'), or at least "
    "torch.set_float32_matmul_precision('high').",
)
def _float32(facts: Facts) -> Iterator[Hit]:
    major, minor = facts.capability
    if major < 7 or "16" in facts.precision or "64" in facts.precision:
        return
    if major < 8 or facts.matmul_precision == "highest":
        what = f"float32 (precision={facts.precision!r}) on a GPU with tensor cores (capability {major}.{minor})"
        cost = "1.5 to 3 times the time for models made of large matrix products (estimated)"
        yield Hit(what, facts.sites.get("precision"), cost)


@rule("odd-sizes", "apex-amp", "Round layer widths and vocabulary sizes up to a multiple of 8, better 64.")
def _odd_sizes(facts: Facts) -> Iterator[Hit]:
    for layer in facts.layers if "16" in facts.precision and facts.capability >= (7, 0) else ():
        odd = [str(size) for size in layer.sizes if size >= 64 and size % MULTIPLE]
        if odd:
            what = f"{layer.name} has size {', '.join(odd)}, no multiple of {MULTIPLE}"
            yield Hit(what, layer.site, "padding or slower kernels (estimated)", "info", layer.name, cause="odd")


@rule(
    "clip-before-unscale",
    "apex-amp",
    "Call scaler.unscale_(optimizer) before clipping, or leave clipping to Trainer(gradient_clip_val=...).",
)
def _clip_before_unscale(facts: Facts) -> Iterator[Hit]:
    what = "{name} clips gradients that still carry the loss scale"
    return hits_of_calls(facts, "scaled clip", what, "wrong results", "error")


@rule("clips-nothing", "apex-amp", "Clip after the backward pass and before the optimizer's step.")
def _clips_nothing(facts: Facts) -> Iterator[Hit]:
    return hits_of_calls(facts, "empty clip", "{name} gets parameters without gradients", "wrong results", "error")


@rule(
    "falling-scale",
    "apex-amp",
    "Look for losses or activations beyond 65504; use bf16, or start from a lower scale.",
)
def _falling_scale(facts: Facts) -> Iterator[Hit]:
    falls, steps = sum(after < before for before, after in pairwise(facts.scales)), len(facts.scales)
    if falls >= 2 or (steps and facts.scales[-1] < 1):
        what = f"the loss scale fell {falls} times in {steps} steps, to {facts.scales[-1]:g}"
        yield Hit(what, facts.sites.get("precision"), f"{falls} skipped steps of {steps} (measured)")
