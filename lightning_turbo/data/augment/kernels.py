"""Selects the fastest kernel for each operation and device: torch's own, or one of this package.

Measured with ``python -m benchmarks augment`` on one CPU core. Each function documents its costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "affine_grid",
    "blur",
    "crop",
    "flip",
    "grid_of",
    "low_resolution",
    "on_rows",
    "sample_linear",
    "samples_by_torch",
]

# Widest filter, in voxels, that runs as one 2D convolution; a wider one is faster as matrix products.
WIDEST_FILTER = 13


def samples_by_torch(image: Tensor) -> bool:
    """Return whether ``grid_sample`` is the fastest way to sample these images.

    It is in 2D on a CPU, where it vectorizes over rows. In 3D on a CPU it works voxel by voxel and takes twice as long
    as gathering corners. On CUDA it is one kernel.
    """
    return image.dim() == 4 or image.is_cuda


def grid_of(source: Tensor) -> Tensor:
    """Return the grid for ``grid_sample``: the last axis first, and the image from -1 to 1.

    Args:
        source: Source position of each voxel of the result, in voxels from the center, ``(n, axes, *space)``.
    """
    axes = [source[:, axis] * (2 / size) for axis, size in enumerate(source.shape[2:])]
    return torch.stack(axes[::-1], -1)


def affine_grid(matrix: Tensor, space: Sequence[int]) -> Tensor:
    """Return the same for an affine matrix in voxels from the center, ``(n, axes, axes + 1)``, in one pass."""
    axes = len(space)
    scale = 2 / torch.tensor(space, device=matrix.device, dtype=matrix.dtype)
    columns = (matrix * scale[:, None]).flip(1).unbind(2)
    grid = columns[-1].view(-1, *[1] * axes, axes)
    for axis, size in enumerate(space):
        steps = torch.arange(size, device=matrix.device, dtype=matrix.dtype) - (size - 1) / 2
        grid = grid + columns[axis].view(-1, *[1] * axes, axes) * steps.view(-1, *[1] * (axes - axis))
    return grid


def sample_linear(image: Tensor, grid: Tensor, padding_mode: str) -> Tensor:
    """Sample images linearly with ``grid_sample``."""
    return F.grid_sample(image, grid, padding_mode=padding_mode, align_corners=False)


def low_resolution(image: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    """Return images as if they had fewer voxels: nearest neighbor to the sizes in ``kept``, then linear upsampling.

    Args:
        image: ``(n, channels, *space)``.
        kept: Size of the small image of each sample.
    """
    mode = "bilinear" if image.dim() == 4 else "trilinear"

    def change(sample: Tensor, size: Sequence[int]) -> Tensor:
        small = F.interpolate(sample[None], list(size), mode="nearest")
        return F.interpolate(small, sample.shape[1:], mode=mode)[0]

    return torch.stack([change(sample, size) for sample, size in zip(image, kept, strict=True)])


def blur(image: Tensor, weights: Tensor) -> Tensor | None:
    """Blur 2D images with one convolution; ``None`` if matrix products are faster: in 3D, or for a wide filter.

    Args:
        image: ``(n, channels, height, width)``.
        weights: Filter along an axis, ``(n, width)`` with an odd width; each filter sums to 1. Weights outside the
            image are dropped and the others renormalized.
    """
    if image.dim() != 4 or weights.shape[1] > WIDEST_FILTER:
        return None
    n, channels, *space = image.shape
    kernel = weights[:, :, None] * weights[:, None]
    kernel = kernel.repeat_interleave(channels, 0)[:, None]
    done = F.conv2d(image.reshape(1, n * channels, *space), kernel, groups=n * channels, padding=weights.shape[1] // 2)
    # The renormalization at the borders: the sum of the weights inside the image, along each axis.
    ends = [
        F.conv1d(weights.new_ones(1, n, size), weights[:, None], groups=n, padding=weights.shape[1] // 2)[0]
        for size in space
    ]
    return done.view(image.shape).div_((ends[0][:, :, None] * ends[1][:, None])[:, None])


def crop(batch: Tensor, begin: Tensor, size: Sequence[int]) -> Tensor:
    """Cut a patch from each sample by slicing and copying one at a time.

    Args:
        batch: ``(n, channels, *space)``.
        begin: Start of each patch, ``(n, axes)`` on the CPU.
        size: Size of the patches.
    """

    def cut(sample: Tensor, place: Sequence[int]) -> Tensor:
        # An index of several slices takes four times as long.
        for axis, (at, length) in enumerate(zip(place, size, strict=True), 1):
            sample = sample.narrow(axis, at, length)
        return sample

    return torch.stack([cut(sample, place) for sample, place in zip(batch, begin.tolist(), strict=True)])


def flip(batch: Tensor, flipped: Sequence[Sequence[int]]) -> Tensor:
    """Mirror each sample along its own axes; return the batch itself if there are none."""
    if not any(flipped):
        return batch
    done = torch.empty_like(batch)
    for sample, room, axes in zip(batch, done, flipped, strict=True):
        room.copy_(sample.flip(list(axes)) if axes else sample)
    return done


def on_rows(batch: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``batch`` with ``change`` applied to the samples at ``rows``. ``batch`` is not modified.

    The positions are known on the host, so nothing is copied if no or all samples change.
    """
    if len(rows) == 0:
        return batch
    if len(rows) == len(batch):
        return change(batch)
    places = rows.to(batch.device, non_blocking=True)
    return batch.index_copy(0, places, change(batch.index_select(0, places)))
