"""Rules on number formats and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []


@rule(
    "float32",
    "apex-amp",
    "Use ApexAMP or Trainer(precision='bf16-mixed' or '16-mixed'), or at least "
    "torch.set_float32_matmul_precision('high').",
)
def _float32(facts: Facts) -> Iterator[Hit]:
    major, minor = facts.capability
    fast = facts.tf32 and major >= 8
    if major >= 7 and facts.precision.startswith("32") and not fast:
        what = f"float32 (precision={facts.precision!r}) on a GPU with tensor cores (capability {major}.{minor})"
        cost = "1.5 to 3 times the time for models made of large matrix products (estimated)"
        yield Hit(what, None, cost)


@rule(
    "clip-before-unscale",
    "apex-amp",
    "Call scaler.unscale_(optimizer) before clipping, or leave clipping to Trainer(gradient_clip_val=...).",
)
def _clip_before_unscale(facts: Facts) -> Iterator[Hit]:
    what = "{name} clips gradients that still carry the loss scale"
    return hits_of_calls(facts, "clip", what, "wrong results", "error")
