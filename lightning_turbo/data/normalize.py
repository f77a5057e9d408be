"""``Normalize``, which turns uint8 images into normalised floats on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect, is_number

__all__ = ["Normalize"]


class Normalize:
    """Normalise the uint8 images of a batch: ``(image / scale - mean) / std``, computed in float32.

    For ``DevicePrefetcher(transform=...)``: the loader hands over uint8, a quarter of the bytes of float32.

    Args:
        mean: Mean of each channel, or one for all, in units of ``image / scale``: for pixels from 0 to 1 by default,
            with ``scale=1`` for the pixels as they are (``0.485 * 255`` in apex's ImageNet example). Numbers or a
            tensor.
        std: Standard deviation of each channel, or one for all, above zero, in the same units.
        dtype: Floating-point dtype of the result, for example ``torch.float16`` for O2 and O3.
        memory_format: Memory format of the result, for example ``torch.channels_last``; ``None`` keeps the batch's.
        scale: What the highest value of the image stands for, above zero.
        keys: Which entries of a batch that is a mapping, list or tuple are images. By default every uint8 tensor of
            four or more dimensions ``(batch, channel, ...)``; a mask of that shape needs ``keys``.

    Raises:
        TypeError: If ``mean`` or ``std`` holds no numbers, ``dtype`` is no floating-point dtype, ``memory_format`` no
            memory format, or ``keys`` no sequence of names.
        ValueError: If ``mean`` and ``std`` differ in length or are empty, a number is not finite, ``std`` or ``scale``
            is not above zero, or one of the two is above 1 with ``scale=255``.

    Example:
        >>> image = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
        >>> Normalize(mean=0.5, std=0.25)((image, 3))[0].unique().tolist()
        [-2.0]
    """

    def __init__(
        self,
        mean: float | Sequence[float] | Tensor,
        std: float | Sequence[float] | Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format | None = None,
        scale: float = 255.0,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        means, stds = _check_constants(mean, std, scale)
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        expect(floating, "dtype", dtype, "a floating-point dtype, for example torch.float16", TypeError)
        formats = memory_format is None or isinstance(memory_format, torch.memory_format)
        expect(formats, "memory_format", memory_format, "a memory format as torch.channels_last, or None", TypeError)
        names = keys is None or (isinstance(keys, Iterable) and not isinstance(keys, str))
        expect(names, "keys", keys, "a sequence of names or positions as ('image',), or None", TypeError)
        self.factor = [1 / (scale * s) for s in stds]
        self.offset = [-m / s for m, s in zip(means, stds, strict=True)]
        self.dtype = dtype
        self.memory_format = memory_format
        self.keys = None if keys is None else tuple(keys)
        self._constants: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images normalised; everything else in it is the same object.

        Raises:
            KeyError: If the batch has no entry of a name in ``keys``.
            ValueError: If an image has another number of channels than ``mean``.
        """
        if isinstance(batch, Mapping):
            return dict(self._entries(batch, list(batch)))
        if isinstance(batch, (list, tuple)):
            parts = [part for _, part in self._entries(batch, list(range(len(batch))))]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return self._normalize(batch) if _is_image(batch) else batch

    def _entries(self, batch: Any, names: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each name in a batch with its entry, normalised if it is an image."""
        if missing := [key for key in self.keys or () if key not in names]:
            raise KeyError(f"Normalize(keys={self.keys!r}): the batch has no {missing!r}; it has {names!r}.")
        for name in names:
            part = batch[name]
            wanted = _is_image(part) if self.keys is None else name in self.keys
            yield name, self._normalize(part) if wanted else part

    def _normalize(self, image: Tensor) -> Tensor:
        channels = len(self.factor)
        if channels > 1 and image.shape[1] != channels:
            raise ValueError(
                f"Normalize has {channels} channels and the image {image.shape[1]} (shape {tuple(image.shape)}); "
                "pass one mean and one std for every channel, or one for all."
            )
        key = (image.device, image.dim())
        if key not in self._constants:
            shape = [1, channels] + [1] * (image.dim() - 2)
            factor, offset = (torch.tensor(v, device=image.device).view(shape) for v in (self.factor, self.offset))
            self._constants[key] = (factor, offset)
        factor, offset = self._constants[key]
        if self.memory_format is not None:
            image = image.contiguous(memory_format=self.memory_format)  # while it is small
        return torch.addcmul(offset, image.to(torch.float32), factor).to(self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_constants": {}}


def _is_image(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.uint8 and part.dim() >= 4


def _check_constants(mean: Any, std: Any, scale: Any) -> tuple[list[float], list[float]]:
    """Return ``mean`` and ``std`` as lists of numbers that fit one another and ``scale``."""
    try:
        means, stds = (torch.as_tensor(v, dtype=torch.float64).flatten().tolist() for v in (mean, std))
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"mean, std: expected a number for each channel, got {(mean, std)!r}.") from error
    same = bool(means) and len(means) == len(stds)
    expect(same, "mean, std", (mean, std), "one number of each for every channel, or one for all")
    finite = all(map(math.isfinite, (*means, *stds))) and is_number(scale)
    expect(finite, "mean, std, scale", (mean, std, scale), "finite numbers")
    expect(min(stds) > 0 and scale > 0, "std, scale", (std, scale), "numbers above zero")
    if scale == 255 and max(*map(abs, means), *stds) > 1:
        raise ValueError(
            f"mean, std: expected at most 1 with scale=255.0, which divides the image first, got {(mean, std)!r}. "
            "Divide both by 255, or pass scale=1.0."
        )
    return means, stds
