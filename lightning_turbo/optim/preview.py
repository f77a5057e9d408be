"""Preview of a learning rate cycle without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_turbo._checks import check_count
from lightning_turbo._files import whole_file
from lightning_turbo._optional import require
from lightning_turbo.optim.cyclic import cyclic_lr

__all__ = ["CyclePreview", "preview"]

INK = "#7d8590"  # legible on light and on dark pages


class CyclePreview(NamedTuple):
    """Values of every step, one list for each parameter group."""

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
    """Compute the learning rate cycle of ``cyclic_lr`` without training, and draw it.

    Args:
        base_lr: As in ``cyclic_lr``.
        max_lr: As in ``cyclic_lr``.
        steps: Number of optimizer steps, at least 1.
        path: PNG file for a chart of the learning rates; ``None`` draws nothing. Needs matplotlib.
        **cycle: Other arguments of ``cyclic_lr``. A cycle in epochs needs ``steps_per_epoch``.

    Returns:
        The learning rate of each group at every step, and the momentum if ``momentum`` was passed.

    Raises:
        TypeError: As ``cyclic_lr``, and if ``steps`` is not an integer.
        ValueError: As ``cyclic_lr``, and if ``steps`` is below 1.
        MissingExtraError: If ``path`` is passed and matplotlib is absent.

    Example:
        >>> preview(0.0, 1.0, steps=5, steps_up=2).lr
        [[0.0, 0.5, 1.0, 0.5, 0.0]]
    """
    check_count("steps", steps)
    if path is not None:
        require("matplotlib", "preview(path=...)")
    groups = max(_count_groups(base_lr), _count_groups(max_lr), 1)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=0.0, momentum=0.9)
    schedule = cyclic_lr(optimizer, base_lr, max_lr, **cycle)["scheduler"]
    rates, momentum = [], []
    for _ in range(steps):
        rates.append(_read(optimizer, "lr"))
        momentum.append(_read(optimizer, "momentum"))
        optimizer.step()
        schedule.step()
    curves = _turn(rates)
    if path is not None:
        _draw(curves, Path(path))
    return CyclePreview(curves, _turn(momentum) if cycle.get("momentum") else [])


def _read(optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    return [float(group[name]) for group in optimizer.param_groups]


def _turn(rows: list[list[float]]) -> list[list[float]]:
    """Return one list for each parameter group, from one list for each step."""
    return [list(column) for column in zip(*rows, strict=True)]


def _count_groups(rate: float | Sequence[float]) -> int:
    return len(rate) if isinstance(rate, Sequence) else 1


def _draw(rates: list[list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    for index, curve in enumerate(rates):
        (line,) = axes.plot(curve, label=f"learning rate, group {index}")
        for value, name in ((min(curve), "base"), (max(curve), "max")):
            axes.axhline(value, color=line.get_color(), linewidth=0.6, linestyle="--")
            axes.annotate(f"{name} {value:.3g}", (len(curve) - 1, value), ha="right", va="bottom", color=INK)
    axes.set(xlabel="optimizer step", ylabel="learning rate")
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.spines[:].set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=120)
