"""Foreground intensities: samples of each scan, and statistics over all scans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightning_turbo.data.packed.rows import open_rows, read_row

__all__ = ["Intensities", "describe_intensities", "draw_intensities"]

DRAWS = 10_000  # per scan and channel, whatever the size of the foreground, as in nnU-Net
END = "intensities"

Intensities: TypeAlias = dict[str, list[dict[str, float]]]


def draw_intensities(name: str, fields: Mapping[str, Any], inside: np.ndarray) -> dict[str, np.ndarray]:
    """Return foreground intensities of each volume whose space is that of the label volume.

    Args:
        name: Name of the label volume, of shape ``(*space)`` or ``(1, *space)``.
        fields: The fields of a sample.
        inside: Positions of the foreground in the flattened label volume.
    """
    shape = fields[name].shape
    space = shape[1:] if len(shape) > 2 and shape[0] == 1 else shape
    chosen = np.random.default_rng(0).choice(inside, DRAWS) if len(inside) else inside
    drawn = {}
    for each, value in fields.items():
        numbers = isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and each != name
        if numbers and len(space) > 1 and value.shape[-len(space) :] == space and value.ndim <= len(space) + 1:
            channels = value.reshape(-1, int(np.prod(space)))
            drawn[f"{each}.{END}"] = channels[:, chosen].astype(np.float32)
    return drawn


def describe_intensities(folder: Path) -> Intensities:
    """Return statistics of each channel of the volumes in a folder, by volume name."""
    found: Intensities = {}
    for path in sorted(folder.glob(f"*.{END}.npy")):
        rows = open_rows(path)
        drawn = [read_row(rows, row) for row in range(len(rows))]
        alike = len({len(each) for each in drawn}) == 1
        channels = (
            [np.concatenate([each[channel] for each in drawn]) for channel in range(len(drawn[0]))] if alike else []
        )
        if channels and len(channels[0]):
            found[path.name.removesuffix(f".{END}.npy")] = [_describe(values) for values in channels]
    return found


def _describe(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(values, (0.5, 50, 99.5)).tolist()
    return {
        "mean": float(values.mean(dtype=np.float64)),
        "std": float(values.std(dtype=np.float64)),
        "min": float(values.min()),
        "percentile_00_5": low,
        "median": median,
        "percentile_99_5": high,
        "max": float(values.max()),
    }
