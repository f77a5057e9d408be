"""Spatial transforms: linear interpolation for images and nearest neighbor for masks, at the same coordinates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_turbo._checks import check_choice, expect, is_list, is_number, is_whole
from lightning_turbo.data.augment import kernels
from lightning_turbo.data.augment.draws import Draws
from lightning_turbo.data.augment.kernels import on_rows
from lightning_turbo.data.augment.transform import Parts, Range, Transform, along_axes, check_range

__all__ = ["RandomAffine", "RandomCrop", "RandomElastic", "RandomFlip"]

PADDINGS = ("zeros", "border", "reflection")


class _Resampled(Transform):
    """Base class of transforms that compute the source position of each voxel of the result."""

    def __init__(self, p: float, padding_mode: str) -> None:
        super().__init__(p)
        check_choice(f"{type(self).__name__}: padding_mode", padding_mode, PADDINGS)
        self.padding_mode = padding_mode

    def resample(self, parts: Parts, rows: Tensor, source: Tensor | None, grid: Tensor | None = None) -> None:
        """Sample images and masks.

        Args:
            parts: The parts to sample.
            rows: Positions of the samples in the batch.
            source: Source position of each voxel of the result, in voxels from the center: ``(len(rows), axes,
                *space)``. May be ``None`` if there are no masks and ``grid`` is given.
            grid: The same in the format of ``grid_sample``, if known.
        """
        by_torch = kernels.samples_by_torch(parts.images[0])
        corners = None if source is None or (by_torch and not parts.masks) else _Corners(source, self.padding_mode)
        if by_torch:
            known = kernels.grid_of(source) if grid is None and source is not None else grid
            assert known is not None
            linear = functools.partial(kernels.sample_linear, grid=known, padding_mode=self.padding_mode)
        else:
            assert corners is not None
            linear = corners.linear
        parts.images = [on_rows(image, rows, linear) for image in parts.images]
        if corners is not None:
            parts.masks = [on_rows(mask, rows, corners.nearest) for mask in parts.masks]


class _Corners:
    """The voxels between which each voxel of the result lies, shared by images and masks.

    Outside the image it behaves like ``grid_sample``, which is used instead where ``kernels.samples_by_torch`` says so.
    """

    def __init__(self, source: Tensor, padding_mode: str) -> None:
        space = source.shape[2:]
        self.axes = len(space)
        self.strides = [math.prod(size + 2 for size in space[axis + 1 :]) for axis in range(self.axes)]
        self.volume = self.strides[0] * (space[0] + 2)  # with a border of one voxel
        self.first = torch.zeros(1, dtype=torch.int32, device=source.device)
        self.weights = []
        for axis, size in enumerate(space):
            at = source[:, axis]
            # Reflect about the outer edges of the border voxels, like grid_sample without align_corners.
            if padding_mode == "reflection":
                at = size / 2 - ((at + size / 2).remainder_(2 * size) - size).abs_()
            low, high = (0, size + 1) if padding_mode == "zeros" else (1, size)
            at = (at + (size + 1) / 2).clamp_(low, high)  # in the padded image
            # At the last voxel, the first corner is its left neighbor, so that the second one is still inside.
            first = at.floor().clamp_(max=high - 1)
            self.weights.append(at.sub_(first)[:, None])
            self.first = torch.add(first.to(torch.int32), self.first, alpha=size + 2)

    def _begin(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the padded images as one row of voxels, and the index in it of each first corner."""
        padded = F.pad(batch, [1] * (2 * self.axes))
        kind = torch.int32 if padded.numel() < 2**31 else torch.int64
        images = torch.arange(batch.shape[:2].numel(), dtype=kind, device=batch.device)
        images = images.view(*batch.shape[:2], *[1] * self.axes) * self.volume
        return padded.flatten(), self.first.to(kind)[:, None] + images

    def linear(self, batch: Tensor) -> Tensor:
        """Return images, interpolated linearly."""
        voxels, first = self._begin(batch)
        # Buffers are reused, because allocating pages takes as long as computing.
        rooms = [voxels.new_empty(first.shape) for _ in range(self.axes + 1)]
        return self._mix(voxels, first.flatten(), 0, 0, rooms)

    def _mix(self, voxels: Tensor, first: Tensor, axis: int, offset: int, rooms: Sequence[Tensor]) -> Tensor:
        """Interpolate along an axis and those after it, between the voxels at an offset from the first corners.

        A method and not a recursive function inside ``linear``, because such a function is a reference cycle, which
        would keep its tensors alive until the garbage collector runs.
        """
        room, *others = rooms
        if axis == self.axes:
            return torch.index_select(voxels[offset:], 0, first, out=room.view(-1)).view(room.shape)
        self._mix(voxels, first, axis + 1, offset, rooms)
        end = self._mix(voxels, first, axis + 1, offset + self.strides[axis], others)
        return room.lerp_(end, self.weights[axis])

    def nearest(self, batch: Tensor) -> Tensor:
        """Return masks, sampled by nearest neighbor."""
        voxels, first = self._begin(batch)
        for weight, stride in zip(self.weights, self.strides, strict=True):
            first.add_(weight > 0.5, alpha=stride)
        return voxels.index_select(0, first.flatten()).view(first.shape)


def _steps(space: Sequence[int], axis: int, device: torch.device) -> Tensor:
    """Return voxel positions along an axis, from the center, in a shape that broadcasts with ``(n, *space)``."""
    size = space[axis]
    return (torch.arange(size, device=device) - (size - 1) / 2).view(-1, *[1] * (len(space) - axis - 1))


class RandomAffine(_Resampled):
    """Rotate, scale, shear and translate images about their center in one interpolation.

    Args:
        degrees: Range of the angles in degrees; in 3D there are three, about each axis of space in turn.
        scale: Range of the zoom factor, above 0; above 1 enlarges the content.
        shear: Range of the angles in degrees by which each axis is sheared toward each other axis.
        translate: Range of the shift along each axis, as a fraction of its size.
        p: Probability that a sample is changed, from 0 to 1.
        padding_mode: Values outside the image: ``"zeros"``, ``"border"`` or ``"reflection"``.
        spacing: Voxel size along each axis of space, for example ``(3.0, 1.0, 1.0)`` in millimeters, so that angles are
            true if voxels are not cubes. ``None`` measures angles in voxels, which distorts shapes in that case.

    Raises:
        ValueError: If a range is not two finite numbers in order, ``scale`` or ``spacing`` is not above 0, or ``p`` is
            out of range; at the first batch, if the images have another number of axes than ``spacing``.

    Note:
        A single number ``x`` means the range from ``-x`` to ``x``, except for ``scale``.

    Source: the matrices of MONAI's ``RandAffine``; names and signs of torchvision's ``RandomAffine``.
    """

    def __init__(
        self,
        degrees: Range = 15.0,
        scale: Sequence[float] = (0.85, 1.15),
        shear: Range = 0.0,
        translate: Range = 0.0,
        *,
        p: float = 1.0,
        padding_mode: str = "zeros",
        spacing: Sequence[float] | None = None,
    ) -> None:
        super().__init__(p, padding_mode)
        known = spacing is None or (is_list(spacing) and all(is_number(size) and size > 0 for size in spacing))
        what = "the size of a voxel along each axis, numbers above 0, or None"
        expect(known and len(spacing or (1, 1)) in (2, 3), "RandomAffine: spacing", spacing, what)
        self.spacing = None if spacing is None else tuple(float(size) for size in spacing)
        self.degrees = check_range(self, "degrees", degrees)
        self.scale = check_range(self, "scale", scale, least=1e-3)
        self.shear = check_range(self, "shear", shear)
        self.translate = check_range(self, "translate", translate)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images and masks."""
        axes = len(parts.space)
        rows = draws.rows(self.p)
        fits = self.spacing is None or len(self.spacing) == axes
        expect(fits, "RandomAffine: spacing", self.spacing, f"{axes} numbers, for the space {tuple(parts.space)}")
        # Drawn for all samples in float64 on the CPU: a few dozen numbers that are the same on every device.
        matrix = self.matrix(
            torch.deg2rad(draws.uniform(*self.degrees, 1 if axes == 2 else 3)),
            draws.uniform(*self.scale),
            torch.deg2rad(draws.uniform(*self.shear, axes * (axes - 1))).tan(),
            shift := draws.uniform(*self.translate, axes) * torch.tensor(parts.space),
        )
        if self.spacing is not None:  # to lengths, transform, and back to voxels
            sizes = torch.tensor(self.spacing, dtype=shift.dtype)
            turned = matrix[:, :, :axes] * sizes / sizes[:, None]
            matrix = torch.cat([turned, -turned @ shift[:, :, None]], 2)
        if not len(rows):
            return
        image = parts.images[0]
        grid = None
        source = None
        if kernels.samples_by_torch(image):
            grid = kernels.affine_grid(matrix[rows].to(image.device, torch.float32, non_blocking=True), parts.space)
        if grid is None or parts.masks:
            source = self.source(matrix[rows], parts.space, image.device)
        self.resample(parts, rows, source, grid)

    @staticmethod
    def matrix(angles: Tensor, scale: Tensor, shear: Tensor, shift: Tensor) -> Tensor:
        """Return matrices from result to source, in voxels from the center: ``(n, axes, axes + 1)``.

        Args:
            angles: In radians, ``(n, 1)`` in 2D and ``(n, 3)`` in 3D.
            scale: ``(n,)``.
            shear: ``(n, axes * (axes - 1))``, the off-diagonal entries, row by row.
            shift: Translation of the content in voxels, ``(n, axes)``.
        """
        axes = shift.shape[1]
        matrix = torch.eye(axes, dtype=shift.dtype).repeat(len(shift), 1, 1)
        for angle, (one, other) in zip(angles.T, [(0, 1)] if axes == 2 else [(1, 2), (2, 0), (0, 1)], strict=True):
            turn = torch.eye(axes, dtype=shift.dtype).repeat(len(shift), 1, 1)
            turn[:, one, one] = turn[:, other, other] = angle.cos()
            turn[:, one, other] = -angle.sin()
            turn[:, other, one] = angle.sin()
            matrix = matrix @ turn
        lean = torch.eye(axes, dtype=shift.dtype).repeat(len(shift), 1, 1)
        lean[:, ~torch.eye(axes, dtype=torch.bool)] = shear
        # The matrix maps the result back to the image: it divides by the scale, and undoes the shift first.
        matrix = matrix @ lean / scale[:, None, None]
        return torch.cat([matrix, -matrix @ shift[:, :, None]], 2)

    @staticmethod
    def source(matrix: Tensor, space: Sequence[int], device: torch.device) -> Tensor:
        """Return the source position of each voxel of the result, float32 ``(n, axes, *space)``."""
        columns = matrix.to(device, torch.float32, non_blocking=True)[(..., *[None] * len(space))].unbind(2)
        source = columns[-1]
        for axis in range(len(space)):  # broadcast sums are several times as fast as a matrix product
            source = source + columns[axis] * _steps(space, axis, device)
        return source


class RandomElastic(_Resampled):
    """Displace each voxel by a smooth random field: a cubic B-spline over a coarse grid of control points.

    Args:
        displacement: Range of the largest displacement of a control point along an axis in voxels, 0 or more. One
            number per sample is drawn from it; no voxel moves further. Above half of the distance between control
            points, ``size / (control_points - 3)``, the image may fold.
        control_points: Number of control points along each axis, 4 or more.
        p: Probability that a sample is changed, from 0 to 1.
        padding_mode: Values outside the image: ``"zeros"``, ``"border"`` or ``"reflection"``.

    Raises:
        ValueError: If an argument is out of range.

    Source: TorchIO's ``RandomElasticDeformation``.
    """

    def __init__(
        self,
        displacement: Sequence[float] = (0.0, 6.0),
        control_points: int = 7,
        *,
        p: float = 0.5,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__(p, padding_mode)
        self.displacement = check_range(self, "displacement", displacement, least=0)
        expect(is_whole(control_points, 4), "RandomElastic: control_points", control_points, "an integer of 4 or more")
        self.control_points = control_points

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images and masks."""
        axes = len(parts.space)
        rows = draws.rows(self.p)
        points = draws.uniform(-1, 1, axes, *[self.control_points] * axes)
        points *= draws.uniform(*self.displacement).view(-1, *[1] * (axes + 1))
        if len(rows):
            points = points[rows].to(parts.images[0].device, torch.float32, non_blocking=True)
            self.resample(parts, rows, self.source(points, parts.space))

    @staticmethod
    def source(points: Tensor, space: Sequence[int]) -> Tensor:
        """Return source positions from displacements of control points, ``(n, axes, *points)``, all in voxels."""
        # ``along_axes`` visits the axes in order, and their sizes may differ.
        sizes = iter(space)
        source = along_axes(points, lambda count: _spline(next(sizes), count, points.device)[None])
        for axis in range(len(space)):
            source[:, axis] += _steps(space, axis, points.device)
        return source


def _spline(size: int, count: int, device: torch.device) -> Tensor:
    """Return the weights of ``count`` control points of a uniform cubic B-spline at ``size`` voxels."""
    at = (torch.arange(size, device=device) + 0.5) * ((count - 3) / size)
    far = (at[:, None] + 1 - torch.arange(count, device=device)).abs()
    near = 2 / 3 - far**2 + far**3 / 2
    return torch.where(far < 1, near, (2 - far).clamp(min=0) ** 3 / 6)


class RandomFlip(Transform):
    """Mirror images along axes of space, with an independent draw for each axis.

    Args:
        axes: Axes of space, not counting batch and channels; ``None`` for all. ``-1`` mirrors left and right.
        p: Probability that a sample is mirrored along an axis, from 0 to 1.

    Raises:
        ValueError: If ``axes`` is not a sequence of distinct integers, or ``p`` is out of range; at the first batch, if
            the image lacks an axis.
    """

    def __init__(self, axes: Sequence[int] | None = None, *, p: float = 0.5) -> None:
        super().__init__(p)
        what = "a sequence of distinct integers from -3 to 2, or None"
        valid = axes is None or (is_list(axes) and len(set(axes)) == len(axes) > 0)
        expect(valid and all(is_whole(axis, -3) and axis < 3 for axis in axes or ()), "RandomFlip: axes", axes, what)
        self.axes = None if axes is None else tuple(axes)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images and masks."""
        count = len(parts.space)
        flipped: list[list[int]] = [[] for _ in range(len(parts.images[0]))]
        for axis in range(count) if self.axes is None else self.axes:
            expect(-count <= axis < count, "RandomFlip: axes", self.axes, f"axes of the space {tuple(parts.space)}")
            for row in draws.rows(self.p).tolist():
                flipped[row].append(axis % count + 1)
        parts.images = [kernels.flip(image, flipped) for image in parts.images]
        parts.masks = [kernels.flip(mask, flipped) for mask in parts.masks]


class RandomCrop(Transform):
    """Cut a patch of a fixed size from each image, at a random position.

    Args:
        size: Size of the patch along each axis of space, in voxels.

    Raises:
        ValueError: If ``size`` is not a sequence of 2 or 3 positive integers; at the first batch, if the images are
            smaller or have another number of axes.
    """

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__(1.0)
        valid = is_list(size) and len(size) in (2, 3) and all(is_whole(length, 1) for length in size)
        expect(valid, "RandomCrop: size", size, "2 or 3 positive integers")
        self.size = tuple(size)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images and masks."""
        space = parts.space
        axes = len(self.size)
        fits = len(space) == axes and all(own <= whole for own, whole in zip(self.size, space, strict=True))
        expect(fits, "RandomCrop: size", self.size, f"at most the size of the images, {tuple(space)}")
        room = torch.tensor([whole - own + 1 for own, whole in zip(self.size, space, strict=True)])
        begin = (draws.uniform(0, 1, axes) * room).floor().long()
        parts.images = [kernels.crop(image, begin, self.size) for image in parts.images]
        parts.masks = [kernels.crop(mask, begin, self.size) for mask in parts.masks]
