"""``VolumeFiles``: a ready pipeline for 3D volumes in ``.npy`` files."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from lightning_turbo._checks import check_switches, expect, is_size
from lightning_turbo.data.dali.files import FilePipeline, are_numbers, check_dtype

__all__ = ["VolumeFiles"]


class VolumeFiles(FilePipeline):
    """Crop, flip and normalise volumes from ``.npy`` files.

    Training applies a random crop and a random flip of each axis; evaluation crops the centre. Further augmentation
    belongs into a function decorated with DALI's ``pipeline_def``, or on the device.

    Args:
        source: Pairs of a path and an integer label. Each ``.npy`` file holds numbers of shape (depth, height, width)
            or (channels, depth, height, width).
        train: ``True`` for augmentation and shuffling; ``False`` for evaluation.
        crop: Depth, height and width of the crop in voxels. Default: no crop, which needs volumes of one shape.
        flips: Whether training flips each of the three axes with probability 0.5.
        normalize: ``"volume"`` subtracts the mean of each volume and divides by its standard deviation; a pair
            ``(mean, std)`` applies fixed numbers; ``None`` keeps the values.
        dtype: ``torch.float32`` or ``torch.float16``.
        shuffle: Whether to shuffle the volumes in each epoch. Default: the value of ``train``.
        index: Whether to append the position of each volume in ``files`` as the last output.

    Attributes:
        files: Paths of the volumes.
        labels: int64 of shape (files,).

    Raises:
        FileNotFoundError: If a volume is missing.
        TypeError: If a switch is not a bool, or a label not an integer.
        ValueError: If the format or shape of a volume or an argument is not as described.

    Note:
        The constructor reads the header of each file, to compare shapes and to find truncated files.
    """

    def __init__(
        self,
        source: Sequence[tuple[str | os.PathLike[str], int]],
        *,
        train: bool,
        crop: tuple[int, int, int] | None = None,
        flips: bool = True,
        normalize: Literal["volume"] | tuple[float, float] | None = "volume",
        dtype: torch.dtype | str = torch.float32,
        shuffle: bool | None = None,
        index: bool = False,
    ) -> None:
        check_switches(train=train, flips=flips)
        _check_arguments(crop, normalize)
        self.train, self.crop, self.normalize, self.flips = train, crop, normalize, flips and train
        self.dtype = check_dtype(dtype, ("float32", "float16"))
        expect(source, "source", source, "at least one pair of a path and an integer label")
        files, labels = [os.fspath(path) for path, _ in source], [operator.index(label) for _, label in source]
        self.channels = _check_shapes(files, crop)
        super().__init__(files, labels, shuffle=train if shuffle is None else shuffle, index=index)

    def define(self, dali: Any, encoded: Any, device: str) -> Any:
        """Define the DALI graph of reading, augmentation and normalisation."""
        fn = dali.fn
        volume = fn.decoders.numpy(encoded, dtype=dali.types.FLOAT)
        volume = volume if self.channels else fn.expand_dims(volume, axes=0)
        volume = fn.reshape(volume, layout="CDHW")
        volume = self._crop(fn, volume.gpu() if device == "gpu" else volume)
        volume = self._standardize(fn, self._flip(fn, volume))
        return fn.cast(volume, dtype=dali.types.FLOAT16) if self.dtype == "float16" else volume

    def _flip(self, fn: Any, volume: Any) -> Any:
        """Flip each axis with probability 0.5 in training."""
        if not self.flips:
            return volume
        axes = ("depthwise", "vertical", "horizontal")
        return fn.flip(volume, **{axis: fn.random.coin_flip() for axis in axes})

    def _standardize(self, fn: Any, volume: Any) -> Any:
        """Subtract a mean and divide by a standard deviation."""
        if self.normalize is None:
            return volume
        if self.normalize == "volume":
            return fn.normalize(volume, epsilon=1e-12)
        return (volume - float(self.normalize[0])) / float(self.normalize[1])

    def _crop(self, fn: Any, volume: Any) -> Any:
        """Crop at random in training, else the centre."""
        if self.crop is None:
            return volume
        depth, height, width = self.crop
        corner = {f"crop_pos_{axis}": fn.random.uniform(range=[0, 1]) if self.train else 0.5 for axis in "zyx"}
        return fn.crop(volume, crop_d=depth, crop_h=height, crop_w=width, **corner)


def _check_arguments(crop: Any, normalize: Any) -> None:
    what = "(depth, height, width), each at least 1, or None"
    expect(crop is None or is_size(crop, 3), "crop", crop, what)
    fixed = normalize in ("volume", None) or (are_numbers(normalize, 2) and normalize[1] > 0)
    expect(fixed, "normalize", normalize, "'volume', (mean, std) with std above 0, or None")


def _check_shapes(files: Sequence[str], crop: tuple[int, int, int] | None) -> tuple[int, ...]:
    """Refuse volumes that do not fit into one batch, and return their channels, if they have that axis."""
    shapes = {file: _read_shape(file) for file in files}
    first = shapes[files[0]]
    for file, shape in shapes.items():
        cropped = tuple(crop or shape[-3:])  # a crop makes all axes but the channels equal
        if np.less(shape[-3:], cropped).any():
            raise ValueError(f"crop: expected at most the shape {shape} of {file!r}, got {crop!r}.")
        if (*shape[:-3], *cropped) != (*first[:-3], *(crop or first[-3:])):
            raise ValueError(
                f"Expected volumes of one shape, got {first} of {files[0]!r} and {shape} of {file!r}. Pass crop= to "
                "crop them to one size; the number of channels has to be equal."
            )
    return first[:-3]


def _read_shape(file: str) -> tuple[int, ...]:
    """Return the shape of a ``.npy`` file from its header, and refuse what DALI cannot read."""
    try:
        array = np.load(file, mmap_mode="r")  # also refuses a truncated file
        with open(file, "rb") as stream:
            version = np.lib.format.read_magic(stream)
    except (EOFError, ValueError) as error:
        raise ValueError(f"Cannot read {file!r} as a .npy file: {error}. Repair the file.") from error
    usable = array.dtype.kind in "iuf" and array.ndim in (3, 4) and version == (1, 0) and array.flags.c_contiguous
    got = f"{array.dtype} of shape {array.shape}, {'C' if array.flags.c_contiguous else 'Fortran'} order, {version}"
    what = (
        "integers or floats of shape (depth, height, width) or (channels, depth, height, width) in C order and .npy "
        "format (1, 0), as np.save(file, np.ascontiguousarray(volume)) writes"
    )
    expect(usable, repr(file), got, what)
    return array.shape
