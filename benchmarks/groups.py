"""The suite ``groups``: the step of an optimizer with one parameter group per parameter, and with merged groups."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.optim import merge_param_groups

__all__ = ["SUITE"]

PARAMETERS = 465  # of shape 64 x 64
KINDS = 28  # different learning rates, as layer-wise decay gives them
WAYS: dict[str, dict[str, Any]] = {"": {}, ", fused": {"fused": True}}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def step(timer: CaseTimer, *, optimizer: str, merged: bool = False, **options: Any) -> dict[str, float]:
    """Run optimizer steps with constant gradients, without forward or backward pass.

    Args:
        timer: Timer of the case.
        optimizer: A key of ``OPTIMIZERS``.
        merged: Whether to merge groups with equal options.
        options: Arguments of the optimizer.

    Returns:
        The sum of the weights after two steps, which must be the same with and without ``merged``.
    """
    generator = torch.Generator().manual_seed(timer.seed)
    params = [torch.randn(64, 64, generator=generator).to(timer.device).requires_grad_() for _ in range(PARAMETERS)]
    for param in params:
        param.grad = torch.ones_like(param)
    groups: list[dict[str, Any]] = [
        {"params": [param], "lr": 1e-5 / (1 + number % KINDS)} for number, param in enumerate(params)
    ]
    made = OPTIMIZERS[optimizer](merge_param_groups(groups) if merged else groups, **options)
    made.step()
    made.step()
    total = sum(param.detach().double().sum() for param in params)
    while timer.step(samples=1):
        made.step()
    return {"sum": float(total)}


SUITE = Suite(
    name="groups",
    about=f"A step of an optimizer over {PARAMETERS} parameters of 64 x 64, in one group per parameter or in {KINDS} "
    "merged groups.",
    cases=[
        case
        for name in OPTIMIZERS
        for way, options in WAYS.items()
        for case in (
            Case(
                name=f"{name}{way}, {PARAMETERS} groups", run=step, config={"optimizer": name, **options},
                base=f"{name}{way}, {PARAMETERS} groups",
            ),
            Case(
                name=f"{name}{way}, merged", run=step, config={"optimizer": name, "merged": True, **options},
                base=f"{name}{way}, {PARAMETERS} groups", kind="ours",
            ),
        )
    ],
    aims=[Aim(f"{name}, fused, merged", f"{name}, fused, {PARAMETERS} groups", 0.6) for name in OPTIMIZERS],
    quick=("SGD, 465 groups", "SGD, merged"),
)  # fmt: skip
