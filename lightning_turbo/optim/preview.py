"""A look at a learning rate cycle before any training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_turbo._checks import expect, is_whole
from lightning_turbo._files import whole_file
from lightning_turbo._optional import require
from lightning_turbo.optim.cyclic import cyclic_lr

__all__ = ["CyclePreview", "preview"]

INK = "#7d8590"  # read on light and on dark pages alike


class CyclePreview(NamedTuple):
    """The values of every step, for each parameter group."""

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
    expect(is_whole(steps, 1), "steps", steps, "a whole number of at least 1")
    if path is not None:
        require("matplotlib", "preview(path=...)")
    groups = max(_groups(base_lr), _groups(max_lr), 1)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=0.0, momentum=0.9)
    schedule = cyclic_lr(optimizer, base_lr, max_lr, **cycle)["scheduler"]
    curves: dict[str, list[list[float]]] = {name: [[] for _ in range(groups)] for name in ("lr", "momentum")}
    for _ in range(steps):
        _note(optimizer, curves)
        optimizer.step()
        schedule.step()
    seen = CyclePreview(curves["lr"], curves["momentum"] if cycle.get("momentum") else [])
    if path is not None:
        _draw(seen, Path(path))
    return seen


def _groups(rate: float | Sequence[float]) -> int:
    return len(rate) if isinstance(rate, Sequence) else 1


def _note(optimizer: torch.optim.Optimizer, curves: dict[str, list[list[float]]]) -> None:
    for name, groups in curves.items():
        for curve, group in zip(groups, optimizer.param_groups, strict=True):
            curve.append(float(group[name]))


def _draw(seen: CyclePreview, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    for index, curve in enumerate(seen.lr):
        (line,) = axes.plot(curve, label=f"learning rate, group {index}")
        for value, name in ((min(curve), "base"), (max(curve), "max")):
            axes.axhline(value, color=line.get_color(), linewidth=0.6, linestyle="--")
            axes.annotate(f"{name} {value:.3g}", (len(curve) - 1, value), ha="right", va="bottom", color=INK)
    axes.set(xlabel="optimizer step", ylabel="learning rate")
    panels = [axes]
    if seen.momentum:
        panels.append(right := axes.twinx())
        right.set_ylabel("momentum")
        for curve in seen.momentum:
            right.plot(curve, linestyle=":", color=INK)
    for panel in panels:
        panel.tick_params(colors=INK)
        panel.xaxis.label.set_color(INK)
        panel.yaxis.label.set_color(INK)
        panel.spines[:].set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=120)
