"""``BatchAugmentation``: transforms of a whole batch on any device."""

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
    """Augments the images of a batch, and their masks with them, all at once on their device.

    Every random number is a function of ``(seed, epoch, index of the sample, position of the transform)``. So a sample
    gets the same parameters in any batch, with any batch size, number of worker processes and number of ranks, on any
    device, and in a resumed run. Nothing needs to be saved.

    A batch is a mapping, a tuple, a list or a dataclass. It is not modified: the result is a similar one with other
    images, masks and labels. Images are computed in float32 whatever their dtype, outside autocast and autograd. In a
    Trainer, the callback ``AugmentBatches`` calls this.

    Args:
        transforms: Transforms of ``lightning_turbo.augment``, applied in order.
        seed: An integer from 0 to ``2**32 - 1``.
        image: Name or position of the images in the batch, ``(n, channels, height, width)`` or ``(n, channels, depth,
            height, width)``, or a sequence of several. All images of one sample get the same transform.
        mask: The same for masks, ``(n, channels, *space)`` or ``(n, *space)``, where ``space`` is that of the images.
            They are sampled by nearest neighbor and may hold any numbers up to ``2**24``.
        label: Name or position of the label for ``MixUp`` and ``CutMix``.
        dtype: Floating-point dtype of the resulting images, for example ``torch.float16`` for O2 and O3; ``None`` keeps
            that of the first image.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``seed`` is out of range.

    Example:
        >>> from lightning_turbo.data.augment import RandomFlip
        >>> augment = BatchAugmentation([RandomFlip([-1], p=1.0)], seed=0)
        >>> augment((torch.arange(4.0).view(1, 1, 2, 2), "label"), index=[5])
        (tensor([[[[1., 0.],
                  [3., 2.]]]]), 'label')

    Source: the random number keys of JAX; SplitMix64 (Steele, Lea and Flood, 2014).
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
        """Set the epoch, which the random numbers depend on; under a Trainer the callback does this."""
        self.epoch = check_count("epoch", epoch, 0)

    @torch.no_grad()
    def __call__(self, batch: Any, index: Sequence[int] | None = None) -> Any:
        """Return the batch with its parts transformed.

        Args:
            batch: A batch from a loader of an ``IndexedDataset``, or any batch if ``index`` is given.
            index: The index of each sample in its dataset.

        Raises:
            KeyError: If the batch lacks a named part.
            TypeError: If a part is not a tensor, or an image is not floating-point while ``dtype`` is ``None``.
            ValueError: If there is no index, or shapes do not match.
        """
        # The indices of an ``IndexedDataset`` take precedence: they passed through samplers and workers with their
        # samples.
        if isinstance(batch, Indexed):
            index, batch = batch
        if index is None:
            raise ValueError(
                f"expected the batch of an IndexedDataset, or index=, got a {type(batch).__name__} and index=None. "
                "Load from DataLoader(IndexedDataset(dataset), ...)."
            )
        parts = self._read(batch, index)
        dtype = self.dtype or _part(batch, self.images[0]).dtype
        # Under the caller's autocast, blur and interpolation would run in half precision and differ between levels.
        with torch.autocast(parts.images[0].device.type, enabled=False):
            draws = draws_of(self.seed, self.epoch, index, len(self.transforms))
            for transform, own in zip(self.transforms, draws, strict=True):
                transform(parts, own)
        changed: dict[Any, Any] = {} if self.label is None else {self.label: parts.label}
        for name, image in zip(self.images, parts.images, strict=True):
            kept = torch.channels_last if _is_channels_last(_part(batch, name)) else torch.preserve_format
            changed[name] = image.to(dtype, memory_format=kept)
        # A mask that came without a channel axis is returned without one.
        for name, mask in zip(self.masks, parts.masks, strict=True):
            given = _part(batch, name)
            changed[name] = (mask if given.dim() == mask.dim() else mask[:, 0]).view(given.dtype)
        return _with_parts(batch, changed)

    def _read(self, batch: Any, index: Sequence[int]) -> Parts:
        """Return what transforms change, after checking the shapes."""
        images = [self._check_image(name, _part(batch, name)) for name in self.images]
        _check_shapes(self.images, images, index)
        masks = [_check_mask(name, _part(batch, name), images[0]) for name in self.masks]
        return Parts([each.float() for each in images], masks, None if self.label is None else _part(batch, self.label))

    def _check_image(self, name: Name, image: Any) -> Tensor:
        """Return an image after checking its shape and dtype."""
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
    """Raise an error if the images of a batch differ in number or space, or the number of indices differs."""
    first = images[0]
    count = len(images[0])
    for name, image in zip(names, images, strict=True):
        what = f"{count} samples of the space {tuple(first.shape[2:])}, like image {names[0]!r}"
        fits = len(image) == count and image.shape[2:] == first.shape[2:]
        expect(fits, f"image {name!r}: shape", tuple(image.shape), what)
    expect(len(index) == count, "index", index, f"{count} indices, one per sample")


def _check_mask(name: Name, mask: Any, image: Tensor) -> Tensor:
    """Return a mask with a channel axis, in a dtype that torch can index."""
    expect(isinstance(mask, Tensor), f"mask {name!r}", mask, "a tensor", TypeError)
    count = len(image)
    space = tuple(image.shape[2:])
    whole = mask[:, None] if mask.dim() == image.dim() - 1 else mask
    fits = whole.dim() == image.dim() and len(whole) == count and tuple(whole.shape[2:]) == space
    what = f"{(count, 'channels', *space)} or {(count, *space)}, because the image has {tuple(image.shape)}"
    expect(fits, f"mask {name!r}: shape", tuple(mask.shape), what)
    # Voxels of a mask are only moved, never computed with, so a signed dtype of the same size will do.
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
    """Return a batch like ``batch`` with some parts replaced."""
    # A tuple is rebuilt, a named one with ``_make``; anything else is copied shallowly and its parts are replaced.
    if isinstance(batch, tuple):
        items = list(batch)
        for name, part in parts.items():
            items[name] = part
        return getattr(type(batch), "_make", type(batch))(items)
    twin: Any = copy.copy(batch)
    for name, part in parts.items():
        if dataclasses.is_dataclass(batch):
            object.__setattr__(twin, name, part)  # works for a frozen one too
        else:
            twin[name] = part
    return twin
