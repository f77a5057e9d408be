"""``Normalize``: converts uint8 images to normalized floats on the device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect, is_list, is_number
from lightning_turbo.errors import NoEffectWarning

__all__ = ["Normalize"]


class Normalize:
    """Normalize the uint8 images of a batch: ``(image / scale - mean) / std``, computed in float32.

    Intended for ``DevicePrefetcher(transform=...)``: the loader transfers uint8, a quarter of the bytes of float32.

    Args:
        mean: Mean of each channel, or one for all, in units of ``image / scale``: pixels from 0 to 1 by default, or raw
            pixels with ``scale=1`` (``0.485 * 255`` in apex's ImageNet example). Numbers or a tensor.
        std: Standard deviation of each channel, or one for all, in the same units, above zero.
        dtype: Floating-point dtype of the result, for example ``torch.float16`` for O2 and O3.
        memory_format: Memory format of the result, for example ``torch.channels_last``; ``None`` keeps the batch's.
        scale: Divisor of the image, above zero.
        keys: Which entries of a mapping, list or tuple are images. Default: every uint8 tensor with four or more
            dimensions ``(batch, channel, ...)``; if a mask has such a shape, pass ``keys``.

    Raises:
        TypeError: If ``mean`` or ``std`` contains no numbers, ``dtype`` is not a floating-point dtype,
            ``memory_format`` is not a memory format, or ``keys`` is not a sequence of names.
        ValueError: If ``mean`` and ``std`` differ in length or are empty, a number is not finite, ``std`` or ``scale``
            is not above zero, or ``mean`` or ``std`` is above 1 with ``scale=255``.

    Warns:
        NoEffectWarning: Once, if a batch holds no such image. Float images count as normalized already, unless ``keys``
            names them.

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
        expect(
            formats, "memory_format", memory_format, "a memory format such as torch.channels_last, or None", TypeError
        )
        names = keys is None or is_list(keys)
        expect(names, "keys", keys, "a sequence of names or positions such as ('image',), or None", TypeError)
        self.factor: list[float] = (1 / (scale * stds)).tolist()
        self.offset: list[float] = (-means / stds).tolist()
        self.dtype = dtype
        self.memory_format = memory_format
        self.keys = None if keys is None else tuple(keys)
        self._has_warned = False
        self._constants: dict[tuple[torch.device, int], list[Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images normalized; all other parts are the same objects.

        Raises:
            KeyError: If the batch lacks an entry in ``keys``.
            ValueError: If the number of channels of an image differs from ``mean``.
        """
        alone = not isinstance(batch, (Mapping, list, tuple))
        parts = {0: batch} if alone else dict(batch if isinstance(batch, Mapping) else enumerate(batch))
        images = self._find_images(parts)
        if not images:
            self._tell_once(parts)
        parts.update({key: self._normalize(parts[key]) for key in images})
        if alone:
            return parts[0]
        if isinstance(batch, Mapping):
            return parts
        return getattr(type(batch), "_make", type(batch))(parts.values())

    def _find_images(self, parts: Mapping[Any, Any]) -> Sequence[Any]:
        """Return the names of the images in a batch."""
        if self.keys is None:
            return [name for name, part in parts.items() if _is_image(part)]
        if missing := [key for key in self.keys if key not in parts]:
            raise KeyError(f"Normalize(keys={self.keys!r}): the batch has no {missing!r}; it has {list(parts)!r}.")
        return self.keys

    def _tell_once(self, parts: Mapping[Any, Any]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        found = {name: part.dtype for name, part in parts.items() if isinstance(part, Tensor)}
        warnings.warn(
            f"Normalize has no effect: expected a uint8 tensor of (batch, channel, ...) in the batch, got {found}. "
            "Pass keys= to normalize floats, with scale=1.0 if they are from 0 to 1; or remove Normalize.",
            NoEffectWarning,
            stacklevel=3,
        )

    def _normalize(self, image: Tensor) -> Tensor:
        channels = len(self.factor)
        if channels > 1 and image.shape[1] != channels:
            raise ValueError(
                f"Normalize: expected {channels} channels, got {image.shape[1]} (shape {tuple(image.shape)}). "
                "Pass one mean and one std for every channel, or one for all."
            )
        factor, offset = self._constants_for(image)
        if self.memory_format is not None:
            image = image.contiguous(memory_format=self.memory_format)  # before it grows to float32
        return torch.addcmul(offset, image.to(torch.float32), factor).to(self.dtype)

    def _constants_for(self, image: Tensor) -> list[Tensor]:
        """Return factor and offset on the device of an image, in a shape that broadcasts with it."""
        key = (image.device, image.dim())
        if key not in self._constants:
            shape = [1, len(self.factor)] + [1] * (image.dim() - 2)
            both = torch.tensor([self.factor, self.offset], device=image.device)
            self._constants[key] = [values.view(shape) for values in both]
        return self._constants[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_constants": {}}


def _is_image(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.uint8 and part.dim() >= 4


def _check_constants(mean: Any, std: Any, scale: Any) -> tuple[Tensor, Tensor]:
    """Return ``mean`` and ``std`` as float64 vectors, after checking them and ``scale``."""
    try:
        means, stds = (torch.as_tensor(values, dtype=torch.float64).flatten() for values in (mean, std))
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"mean, std: expected one number per channel, got {(mean, std)!r}.") from error
    same = 0 < len(means) == len(stds)
    expect(same, "mean, std", (mean, std), "one number of each for every channel, or one for all")
    finite = torch.stack([means, stds]).isfinite().all() and is_number(scale)
    expect(finite, "mean, std, scale", (mean, std, scale), "finite numbers")
    expect(min(stds.min(), scale) > 0, "std, scale", (std, scale), "numbers above zero")
    if scale == 255 and torch.stack([means.abs(), stds]).max() > 1:
        raise ValueError(
            f"mean, std: expected at most 1 with scale=255.0, which divides the image first, got {(mean, std)!r}. "
            "Divide both by 255, or pass scale=1.0."
        )
    return means, stds
