"""Which kernels compute what: torch's own where they are the fastest on the device at hand, this package's where not.

Measured by ``python -m benchmarks augment``, on one core of a CPU. Each function here says what it takes, and where.
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

# Voxels. A filter up to this width is one convolution in two dimensions; a wider one costs less as matrices.
WIDEST_FILTER = 13


def samples_by_torch(image: Tensor) -> bool:
    """Whether ``grid_sample`` samples images of this kind fastest.

    In two dimensions on a CPU, where it takes whole rows at once. In three it goes voxel by voxel there, and takes
    twice as long as arrays of corners. On CUDA it is one kernel.
    """
    return image.dim() == 4 or image.is_cuda


def grid_of(source: Tensor) -> Tensor:
    """Return what ``grid_sample`` takes: the last axis first, and an image from -1 to 1.

    Args:
        source: Where each voxel of the result comes from, in voxels from the centre, ``(n, axes, *space)``.
    """
    axes = [source[:, axis] * (2 / size) for axis, size in enumerate(source.shape[2:])]
    return torch.stack(axes[::-1], -1)


def affine_grid(matrix: Tensor, space: Sequence[int]) -> Tensor:
    """Return the same for a matrix in voxels from the centre, ``(n, axes, axes + 1)``: in one pass over the voxels."""
    axes = len(space)
    scale = 2 / torch.tensor(space, device=matrix.device, dtype=matrix.dtype)
    columns = (matrix * scale[:, None]).flip(1).unbind(2)
    grid = columns[-1].view(-1, *[1] * axes, axes)
    for axis, size in enumerate(space):
        steps = torch.arange(size, device=matrix.device, dtype=matrix.dtype) - (size - 1) / 2
        grid = grid + columns[axis].view(-1, *[1] * axes, axes) * steps.view(-1, *[1] * (axes - axis))
    return grid


def sample_linear(image: Tensor, grid: Tensor, padding_mode: str) -> Tensor:
    """Sample images by ``grid_sample``, linearly."""
    return F.grid_sample(image, grid, padding_mode=padding_mode, align_corners=False)


def low_resolution(image: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    """Return images as from fewer voxels: by nearest neighbour to the sizes in ``kept``, and linearly back.

    Args:
        image: ``(n, channels, *space)``.
        kept: The size of the small image of each sample.
    """
    mode = "bilinear" if image.dim() == 4 else "trilinear"

    def change(sample: Tensor, size: Sequence[int]) -> Tensor:
        small = F.interpolate(sample[None], list(size), mode="nearest")
        return F.interpolate(small, sample.shape[1:], mode=mode)[0]

    return torch.stack([change(sample, size) for sample, size in zip(image, kept, strict=True)])


def blur(image: Tensor, weights: Tensor) -> Tensor | None:
    """Blur images by one convolution; ``None`` where matrices take less time: in three dimensions, and if it is wide.

    Args:
        image: ``(n, channels, height, width)``.
        weights: Of the filter along an axis, an odd number for each sample: ``(n, width)``, which sum to 1. What falls
            outside of the image is left out, and the others count more.
    """
    if image.dim() != 4 or weights.shape[1] > WIDEST_FILTER:
        return None
    n, channels, *space = image.shape
    kernel = weights[:, :, None] * weights[:, None]
    kernel = kernel.repeat_interleave(channels, 0)[:, None]
    done = F.conv2d(image.reshape(1, n * channels, *space), kernel, groups=n * channels, padding=weights.shape[1] // 2)
    # What counts less at the borders: the sum of the weights that lie inside, along each axis.
    ends = [
        F.conv1d(weights.new_ones(1, n, size), weights[:, None], groups=n, padding=weights.shape[1] // 2)[0]
        for size in space
    ]
    return done.view(image.shape).div_((ends[0][:, :, None] * ends[1][:, None])[:, None])


def crop(batch: Tensor, begin: Tensor, size: Sequence[int]) -> Tensor:
    """Return a patch of each sample: slices that are copied one after another.

    Args:
        batch: ``(n, channels, *space)``.
        begin: Where each patch begins, ``(n, axes)`` on the CPU.
        size: Of the patches.
    """

    def cut(sample: Tensor, place: Sequence[int]) -> Tensor:
        return sample[(slice(None), *(slice(at, at + length) for at, length in zip(place, size, strict=True)))]

    return torch.stack([cut(sample, place) for sample, place in zip(batch, begin.tolist(), strict=True)])


def flip(batch: Tensor, flipped: Sequence[Sequence[int]]) -> Tensor:
    """Return the samples mirrored along axes of each, one after another; the batch itself if there are none."""
    if not any(flipped):
        return batch
    done = torch.empty_like(batch)
    for sample, room, axes in zip(batch, done, flipped, strict=True):
        room.copy_(sample.flip(list(axes)) if axes else sample)
    return done


def on_rows(batch: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``batch`` with ``change`` applied to its samples at ``rows``; it is not changed itself.

    The positions are known on the host, so that nothing is copied where none or all of the samples are meant.
    """
    if len(rows) == 0:
        return batch
    if len(rows) == len(batch):
        return change(batch)
    places = rows.to(batch.device, non_blocking=True)
    return batch.index_copy(0, places, change(batch.index_select(0, places)))
