"""Resamples volumes to another spacing: cubic splines for images, nearest voxel for labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

__all__ = ["resample"]

MARGIN = 12  # voxels of padding by repetition, as in SciPy; beyond, weights are below 0.27 ** 12
SAME = 1e-3  # voxels; a smaller difference in position is ignored


def resample(volume: np.ndarray, steps: Sequence[float], *, nearest: bool) -> np.ndarray:
    """Return a volume resampled along its last axes, starting at its first voxel.

    The first voxel keeps its position. An axis of ``n`` voxels gets ``round((n - 1) / step + 1)`` voxels, as in MONAI's
    ``Spacing``. The last one may lie half a step beyond the border, where the last voxel is repeated.

    Args:
        volume: Of shape ``(..., *space)``.
        steps: Distance between the new voxels along each of the last axes, in voxels.
        nearest: Whether to use the nearest voxel and keep the dtype, as for labels. Otherwise cubic splines interpolate
            in float32 and reproduce the volume at its own voxels.
    """
    result = volume if nearest else volume.astype(np.float32)
    for axis, step in enumerate(steps, volume.ndim - len(steps)):
        length = volume.shape[axis]
        places = np.arange(int(np.round((length - 1) / step + 1))) * step
        if len(places) == length and abs(places[-1] - (length - 1)) < SAME:
            continue
        if nearest:
            result = np.take(result, np.rint(places).astype(int).clip(0, length - 1), axis)
        else:
            result = _weigh(result, _weights(length, len(places), step), axis)
    return result


def _weigh(volume: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    """Return weighted sums of a volume along an axis, one for each row of ``weights``."""
    if axis == volume.ndim - 1:
        return volume @ weights.T
    shape = volume.shape
    flat = volume.reshape(int(np.prod(shape[:axis])), shape[axis], -1)
    return np.matmul(weights, flat).reshape(*shape[:axis], len(weights), *shape[axis + 1 :])


@lru_cache(maxsize=64)
def _weights(length: int, number: int, step: float) -> np.ndarray:
    """Return the weight of each of ``length`` voxels at each of ``number`` positions, for a cubic B-spline."""
    padded = length + 2 * MARGIN
    repeated = np.zeros((padded, length))
    repeated[np.arange(padded), (np.arange(padded) - MARGIN).clip(0, length - 1)] = 1
    # The coefficients of the spline that passes through the voxels, mirrored at its ends.
    through = np.diag(np.full(padded, 4 / 6)) + np.diag(np.full(padded - 1, 1 / 6), 1)
    through += np.diag(np.full(padded - 1, 1 / 6), -1)
    through[0, 1] = through[-1, -2] = 2 / 6
    coefficients = np.linalg.solve(through, repeated)
    distances = np.abs((np.arange(number) * step).clip(0, length + MARGIN - 3)[:, None] + MARGIN - np.arange(padded))
    near = 2 / 3 - distances**2 + distances**3 / 2
    basis = np.where(distances < 1, near, (2 - distances).clip(0) ** 3 / 6)
    return (basis @ coefficients).astype(np.float32)
