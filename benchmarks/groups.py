"""The suite ``groups``: a step of an optimizer with a group for each parameter, and with merged ones."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.optim import merge_param_groups

__all__ = ["SUITE"]

PARAMETERS = 465  # of 64x64
KINDS = 28  # learning rates and weight decays, as a decay by layer makes them
WAYS: dict[str, dict[str, Any]] = {"": {}, ", fused": {"fused": True}}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def step(timer: CaseTimer, *, optimizer: str, merged: bool = False, **options: Any) -> dict[str, float]:
    """Make steps with constant gradients, and no forward or backward pass.

    Args:
        timer: Of the case.
        optimizer: A key of ``OPTIMIZERS``.
        merged: Whether groups with equal options become one.
        options: Of the optimizer.

    Returns:
        The sum of the weights after two steps, which has to be the same with merged groups.
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
    about=f"A step of an optimizer, {PARAMETERS} parameters of 64x64 in a group each, or in {KINDS} merged groups.",
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
