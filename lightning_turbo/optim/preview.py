"""A look at a learning rate cycle before any training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_turbo._checks import is_whole
from lightning_turbo._files import whole_file
from lightning_turbo._optional import require
from lightning_turbo.optim.cyclic import cyclic_lr

__all__ = ["CyclePreview", "preview"]


class CyclePreview(NamedTuple):
    """What a cycle would do: for each parameter group, the value of every step."""

    lr: list[list[float]]
    momentum: list[list[float]]


def preview(
    base_lr: float | Sequence[float],
    max_lr: float | Sequence[float],
    *,
    steps: int,
    path: str | Path | None = None,
    **cycle: Any,
) -> CyclePreview:
    """Return the curve of a cycle without training, and draw it.

    Args:
        base_lr: As in ``cyclic_lr``.
        max_lr: As in ``cyclic_lr``.
        steps: Number of optimizer steps to look at, at least 1.
        path: Where to write a PNG; ``None`` draws nothing. Needs matplotlib.
        **cycle: The other arguments of ``cyclic_lr``; cycles in epochs need ``steps_per_epoch``.

    Returns:
        The learning rate and, if it is cycled, the momentum of each group at every step.

    Raises:
        TypeError: As ``cyclic_lr``.
        ValueError: As ``cyclic_lr``, and if ``steps`` is below 1.
        MissingExtraError: If ``path`` is given and matplotlib is absent.

    Example:
        >>> preview(0.0, 1.0, steps=5, steps_up=2).lr
        [[0.0, 0.5, 1.0, 0.5, 0.0]]
    """
    if not is_whole(steps, 1):
        raise ValueError(f"steps={steps!r}; accepted is a whole number, at least 1. Give the steps to look at.")
    if path is not None:
        require("matplotlib", "preview(path=...)")
    groups = max([1, *(len(rate) for rate in (base_lr, max_lr) if isinstance(rate, Sequence))])
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=0.0, momentum=0.9)
    schedule = cyclic_lr(optimizer, base_lr, max_lr, **cycle)["scheduler"]
    rows = []
    for _ in range(steps):
        rows.append([(float(group["lr"]), float(group["momentum"])) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    lr = [[row[group][0] for row in rows] for group in range(groups)]
    momentum = [[row[group][1] for row in rows] for group in range(groups)] if schedule.cycle_momentum else []
    if path is not None:
        _draw(lr, momentum, Path(path))
    return CyclePreview(lr, momentum)


def _draw(lr: list[list[float]], momentum: list[list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(lr):
        axes.plot(curve, label=f"learning rate, group {index}")
    axes.set(xlabel="optimizer step", ylabel="learning rate")
    if momentum:
        right = axes.twinx()
        right.set_ylabel("momentum")
        for curve in momentum:
            right.plot(curve, linestyle=":", color="gray")
    axes.legend()
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=120)
