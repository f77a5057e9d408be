"""``BatchAugmentation``: transforms of a whole batch, on whatever device it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import check_count, expect, is_list, is_whole
from lightning_turbo.data.augment.draws import draws_of
from lightning_turbo.data.augment.indexed import Indexed
from lightning_turbo.data.augment.transform import Parts, Transform
from lightning_turbo.data.sample_seeds import check_seed

__all__ = ["BatchAugmentation"]

Name = str | int


class BatchAugmentation:
    """Augments the images of a batch, and masks with them, at once, on the device on which they are.

    Every random number is a function of ``(seed, epoch, index of the sample, position of the transform)``. So a sample
    gets the same parameters in any batch, of any size, with any number of worker processes and ranks, on any device,
    and in a run that was resumed; nothing has to be saved for it.

    A batch is a mapping, a tuple, a list or a dataclass. It is not changed: the result is one like it, with other
    images, masks and labels. Images are computed in float32 whatever dtype they come in, and outside of autocast and
    autograd. In a Trainer, the callback ``AugmentBatches`` calls it.

    Args:
        transforms: Transforms of ``lightning_turbo.augment``, applied in order.
        seed: An integer from 0 to ``2**32 - 1``.
        image: Name or position of the images in the batch, ``(n, channels, height, width)`` or ``(n, channels, depth,
            height, width)``, or a sequence of several names. Images of one sample are changed alike.
        mask: The same for masks, ``(n, channels, *space)`` or ``(n, *space)``, where ``space`` is that of the images.
            They are sampled by nearest neighbour, and hold any numbers up to ``2**24``.
        label: Name or position of the label for ``MixUp`` and ``CutMix``.
        dtype: Floating-point dtype of the images of the result, for example ``torch.float16`` for O2 and O3; ``None``
            keeps that of the first.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``seed`` is out of range.

    Example:
        >>> from lightning_turbo.data.augment import RandomFlip
        >>> augment = BatchAugmentation([RandomFlip([-1], p=1.0)], seed=0)
        >>> augment((torch.arange(4.0).view(1, 1, 2, 2), "label"), index=[5])
        (tensor([[[[1., 0.],
                  [3., 2.]]]]), 'label')

    Source: The keys of JAX's random numbers; SplitMix64 (Steele, Lea and Flood, 2014).
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        seed: int,
        *,
        image: Name | Sequence[Name] = 0,
        mask: Name | Sequence[Name] | None = None,
        label: Name | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        valid = is_list(transforms) and all(isinstance(each, Transform) for each in transforms)
        what = "a sequence of transforms of lightning_turbo.augment; PerSample wraps those of other packages"
        expect(valid, "transforms", transforms, what, TypeError)
        floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        expect(floating, "dtype", dtype, "a floating-point dtype, for example torch.float16, or None", TypeError)
        expect(label is None or isinstance(label, (str, int)), "label", label, "a name, a position or None", TypeError)
        self.transforms = list(transforms)
        self.seed = check_seed(seed)
        self.images = _check_names("image", image)
        self.masks = _check_names("mask", mask)
        expect(self.images, "image", image, "a name or a position, or a sequence of them", TypeError)
        self.label = label
        self.dtype = dtype
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from which random numbers follow; a Trainer's callback does it."""
        self.epoch = check_count("epoch", epoch, 0)

    @torch.no_grad()
    def __call__(self, batch: Any, index: Sequence[int] | None = None) -> Any:
        """Return the batch with its parts changed.

        Args:
            batch: What a loader of an ``IndexedDataset`` yields, or any batch where ``index`` is given.
            index: The index of each sample in its dataset.

        Raises:
            KeyError: If the batch has no part of a name.
            TypeError: If a part is not a tensor, or images are not of a floating-point dtype and ``dtype`` is ``None``.
            ValueError: If there is no index, or parts have shapes that do not fit.
        """
        # The indices of an ``IndexedDataset`` count: they went through workers and samplers with their samples.
        if isinstance(batch, Indexed):
            index, batch = batch
        if index is None:
            raise ValueError(
                f"expected the batch of an IndexedDataset, or index=, got a {type(batch).__name__} and index=None. "
                "Load from DataLoader(IndexedDataset(dataset), ...)."
            )
        parts = self._read(batch, index)
        dtype = self.dtype or _part(batch, self.images[0]).dtype
        # The caller's autocast would blur and interpolate in half precision, and a sample would differ by level.
        with torch.autocast(parts.images[0].device.type, enabled=False):
            draws = draws_of(self.seed, self.epoch, index, len(self.transforms))
            for transform, own in zip(self.transforms, draws, strict=True):
                transform(parts, own)
        changed: dict[Any, Any] = {} if self.label is None else {self.label: parts.label}
        for name, image in zip(self.images, parts.images, strict=True):
            kept = torch.channels_last if _is_channels_last(_part(batch, name)) else torch.preserve_format
            changed[name] = image.to(dtype, memory_format=kept)
        # A mask that came without an axis of channels goes back without it.
        for name, mask in zip(self.masks, parts.masks, strict=True):
            given = _part(batch, name)
            changed[name] = (mask if given.dim() == mask.dim() else mask[:, 0]).view(given.dtype)
        return _with_parts(batch, changed)

    def _read(self, batch: Any, index: Sequence[int]) -> Parts:
        """Return what transforms change, once its shapes are known to fit."""
        images = [self._check_image(name, _part(batch, name)) for name in self.images]
        _check_shapes(self.images, images, index)
        masks = [_check_mask(name, _part(batch, name), images[0]) for name in self.masks]
        return Parts([each.float() for each in images], masks, None if self.label is None else _part(batch, self.label))

    def _check_image(self, name: Name, image: Any) -> Tensor:
        """Return an image that has the shape and dtype of one."""
        expect(isinstance(image, Tensor), f"image {name!r}", image, "a tensor", TypeError)
        if not (image.is_floating_point() or (self.dtype is not None and not image.is_complex())):
            raise TypeError(
                f"image {name!r}: expected a floating-point dtype, got {image.dtype}. Pass dtype=torch.float32."
            )
        what = "(n, channels, height, width) or (n, channels, depth, height, width)"
        expect(image.dim() in (4, 5), f"image {name!r}: shape", tuple(image.shape), what)
        return image


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _is_channels_last(image: Tensor) -> bool:
    last = image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
    return last and not image.is_contiguous()


def _check_names(argument: str, names: Any) -> tuple[Name, ...]:
    found = () if names is None else (names,) if isinstance(names, (str, int)) else names
    valid = is_list(found) and all(isinstance(name, str) or is_whole(name, -1000) for name in found)
    expect(valid, argument, names, "a name or a position, or a sequence of them", TypeError)
    return tuple(found)


def _check_shapes(names: Sequence[Name], images: Sequence[Tensor], index: Sequence[int]) -> None:
    """Refuse images of one batch that differ in number or space, and another number of indices."""
    first = images[0]
    count = len(images[0])
    for name, image in zip(names, images, strict=True):
        what = f"{count} samples of the space {tuple(first.shape[2:])}, as image {names[0]!r} has"
        fits = len(image) == count and image.shape[2:] == first.shape[2:]
        expect(fits, f"image {name!r}: shape", tuple(image.shape), what)
    expect(len(index) == count, "index", index, f"{count} indices, one a sample")


def _check_mask(name: Name, mask: Any, image: Tensor) -> Tensor:
    """Return a mask with an axis of channels, in a dtype that torch can index."""
    expect(isinstance(mask, Tensor), f"mask {name!r}", mask, "a tensor", TypeError)
    count = len(image)
    space = tuple(image.shape[2:])
    whole = mask[:, None] if mask.dim() == image.dim() - 1 else mask
    fits = whole.dim() == image.dim() and len(whole) == count and tuple(whole.shape[2:]) == space
    what = f"{(count, 'channels', *space)} or {(count, *space)}, because the image has {tuple(image.shape)}"
    expect(fits, f"mask {name!r}: shape", tuple(mask.shape), what)
    # Voxels of a mask are moved, and not computed with, so that other bits of the same size do.
    return whole.view(SIGNED.get(whole.dtype, whole.dtype))


def _part(batch: Any, name: Any) -> Any:
    """Return a part of a batch by its name or position."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
    elif isinstance(batch, Mapping):
        names = list(batch)
    elif isinstance(batch, (tuple, list)):
        names = list(range(-len(batch), len(batch)))
    else:
        raise TypeError(f"batch: expected a mapping, tuple, list or dataclass, got {type(batch).__name__}.")
    if name not in names:
        raise KeyError(f"the batch has no {name!r}; expected one of {names}")
    return getattr(batch, name) if dataclasses.is_dataclass(batch) else batch[name]


def _with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    """Return a batch like ``batch`` with other parts."""
    # A tuple is made again, by ``_make`` where it is a named one; of anything else a shallow copy gets the other parts.
    if isinstance(batch, tuple):
        items = list(batch)
        for name, part in parts.items():
            items[name] = part
        return getattr(type(batch), "_make", type(batch))(items)
    twin: Any = copy.copy(batch)
    for name, part in parts.items():
        if dataclasses.is_dataclass(batch):
            object.__setattr__(twin, name, part)  # a frozen one too
        else:
            twin[name] = part
    return twin
