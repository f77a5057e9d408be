"""``VolumeFiles``, 3D volumes in ``.npy`` files with labels from a list, as a ready pipeline."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_number, is_whole
from lightning_turbo.data.dali.files import FilePipeline, are_numbers, check_dtype

__all__ = ["VolumeFiles"]

Pairs = Sequence[tuple[str | os.PathLike[str], int]]


class VolumeFiles(FilePipeline):
    """Volumes from ``.npy`` files, cropped, flipped, turned and normalised, for 3D medical work.

    Training, in this order: a random crop, a turn by a multiple of 90 degrees about the first axis, random flips
    of each axis, normalisation, and an intensity ``gain * value + offset`` drawn for each volume. Evaluation: the
    centre crop and the normalisation.

    Args:
        source: A text file with a line ``path label`` for each volume, or a sequence of such pairs. A path in a file
            is relative to ``root``. Each ``.npy`` file holds numbers of shape (depth, height, width) or
            (channels, depth, height, width).
        train: ``True`` for augmentation and shuffling; ``False`` for evaluation.
        root: Folder of relative paths; by default that of the text file, or the current one for pairs.
        crop: Depth, height and width to cut out, in voxels; by default everything. Without it all volumes must have
            one shape.
        flips: Whether training flips each of the three axes with probability one half.
        turns: Whether training turns the planes of height and width by 0, 90, 180 or 270 degrees; it needs planes
            that are square.
        intensity: Half range of ``gain`` around 1 and of ``offset`` around 0 in training, in units of the
            normalised values; 0 switches it off.
        normalize: ``"volume"`` subtracts each volume's mean and divides by its standard deviation; a pair
            ``(mean, std)`` does so with fixed numbers; ``None`` leaves the values.
        dtype: ``torch.float32`` or ``torch.float16``.
        channels_last: Whether batches are laid out in memory as ``torch.channels_last_3d``.
        shuffle: Whether each epoch has a new order; by default the value of ``train``.
        index: Whether the last output is the number of the volume in ``files``.

    Attributes:
        files: Paths of the volumes.
        labels: int64 of shape (files,).

    Raises:
        FileNotFoundError: If the list or a volume is missing.
        TypeError: If a switch is not a bool.
        ValueError: If a line of the list, a volume's format, size or shape, or an argument is not as described.

    Note:
        The constructor reads the header of every file, to compare shapes and to find files that are cut short.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Pairs,
        *,
        train: bool,
        root: str | os.PathLike[str] | None = None,
        crop: tuple[int, int, int] | None = None,
        flips: bool = True,
        turns: bool = True,
        intensity: float = 0.1,
        normalize: Literal["volume"] | tuple[float, float] | None = "volume",
        dtype: torch.dtype | str = torch.float32,
        channels_last: bool = False,
        shuffle: bool | None = None,
        index: bool = False,
    ) -> None:
        check_switches(train=train, flips=flips, turns=turns, channels_last=channels_last)
        _check_arguments(intensity, normalize, crop)
        self.train, self.crop, self.normalize = train, crop, normalize
        self.flips, self.turns, self.intensity = flips and train, turns and train, intensity if train else 0.0
        self.branches = self.turns
        self.dtype, self.channels_last = check_dtype(dtype, ("float32", "float16")), channels_last
        files, labels = _read_list(source, root)
        self.channels, shape = _check_shapes(files, crop)
        if self.turns and shape[1] != shape[2]:
            raise ValueError(
                f"turns=True needs planes as high as wide, but they are {shape[1]} x {shape[2]}. "
                "Pass turns=False or a square crop."
            )
        super().__init__(files, labels, shuffle=train if shuffle is None else shuffle, index=index)

    def define(self, dali: Any, encoded: Any, device: str) -> Any:
        """Return reading, augmentation and normalisation as a DALI graph."""
        volume = dali.fn.decoders.numpy(encoded, dtype=dali.types.FLOAT)
        if not self.channels:
            volume = dali.fn.expand_dims(volume, axes=0)
        volume = dali.fn.reshape(volume, layout="CDHW")
        volume = self._cut(dali.fn, volume.gpu() if device == "gpu" else volume)
        if self.flips or self.turns:
            volume = _turn(dali, volume, self.flips, self.turns)
        volume = self._scale(dali.fn, volume)
        if self.channels_last:
            volume = dali.fn.transpose(volume, perm=[1, 2, 3, 0])
        return dali.fn.cast(volume, dtype=dali.types.FLOAT16) if self.dtype == "float16" else volume

    def _cut(self, fn: Any, volume: Any) -> Any:
        """Cut out a window, at random in training, else in the middle."""
        if self.crop is None:
            return volume
        depth, height, width = self.crop
        corner = {f"crop_pos_{axis}": fn.random.uniform(range=[0, 1]) if self.train else 0.5 for axis in "zyx"}
        return fn.crop(volume, crop_d=depth, crop_h=height, crop_w=width, **corner)

    def _scale(self, fn: Any, volume: Any) -> Any:
        """Normalise, and draw gain and offset in training."""
        if self.normalize == "volume":
            volume = fn.normalize(volume, epsilon=1e-12)
        elif self.normalize is not None:
            volume = (volume - float(self.normalize[0])) / float(self.normalize[1])
        if not self.intensity:
            return volume
        gain = fn.random.uniform(range=[1 - self.intensity, 1 + self.intensity])
        return volume * gain + fn.random.uniform(range=[-self.intensity, self.intensity])

    def view(self, batch: Tensor) -> Tensor:
        """Return the batch in shape (batch, channels, depth, height, width)."""
        return batch.permute(0, 4, 1, 2, 3) if self.channels_last else batch

    def find_broken(self) -> str | None:
        """Return the first file that is not a whole ``.npy`` file."""
        for file in self.files:
            try:
                _read_shape(file)
            except (OSError, ValueError):
                return file
        return None


def _check_arguments(intensity: Any, normalize: Any, crop: Any) -> None:
    if not is_number(intensity) or not 0 <= intensity < 1:
        raise ValueError(f"intensity={intensity!r}: expected a number from 0 to below 1.")
    if normalize not in ("volume", None) and not (are_numbers(normalize, 2) and normalize[1] > 0):
        raise ValueError(f"normalize={normalize!r}: expected 'volume', (mean, std) with std above 0, or None.")
    if crop is not None and not (are_numbers(crop, 3) and all(is_whole(n, 1) for n in crop)):
        raise ValueError(f"crop={crop!r}: expected depth, height and width, each at least 1.")


def _turn(dali: Any, volume: Any, flips: bool, turns: bool) -> Any:
    """Flip each axis with probability one half, and turn the planes by one of the four right angles."""
    coin = dali.fn.random.coin_flip
    depthwise, vertical, horizontal = (coin() if flips else 0 for _ in range(3))
    if turns:
        # A quarter turn exchanges rows and columns and flips one of them; half a turn flips both.
        quarter, half = coin(), coin()
        vertical, horizontal = vertical ^ quarter ^ half, horizontal ^ half
        volume = _exchange(dali, volume, quarter != 0)
    return dali.fn.flip(volume, depthwise=depthwise, vertical=vertical, horizontal=horizontal)


def _exchange(dali: Any, volume: Any, chosen: Any) -> Any:
    """Exchange height and width of the volumes that are chosen."""
    if chosen:
        volume = dali.fn.transpose(volume, perm=[0, 1, 3, 2], transpose_layout=False)
    return volume


def _read_list(
    source: str | os.PathLike[str] | Pairs, root: str | os.PathLike[str] | None
) -> tuple[list[str], list[int]]:
    """Return paths and labels, from a text file or from pairs."""
    if isinstance(source, (str, os.PathLike)):
        folder, pairs = Path(source).parent, _read_lines(Path(source))
    else:
        folder, pairs = Path(), source
    if not pairs:
        raise ValueError(f"source={source!r} lists no volume.")
    names, given = zip(*pairs, strict=True)
    labels = np.array([float(label) for label in given])
    if not np.array_equal(labels, np.trunc(labels)):
        raise ValueError(f"source={source!r} holds labels that are not whole numbers. Pass integers.")
    return [os.path.join(root or folder, name) for name in names], labels.astype(np.int64).tolist()


def _read_lines(path: Path) -> list[tuple[str, int]]:
    if not path.is_file():
        raise FileNotFoundError(f"source={str(path)!r} is not a file. Pass a text file with lines 'path label'.")
    pairs = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = re.fullmatch(r"\s*(\S.*)\s+(-?\d+)\s*", line)
        if parts:
            pairs.append((parts[1].strip(), int(parts[2])))
        elif line.strip():
            raise ValueError(f"{path}, line {number}: {line!r} is not 'path label' with an integer label.")
    return pairs


def _check_shapes(files: Sequence[str], crop: tuple[int, int, int] | None) -> tuple[int, tuple[int, ...]]:
    """Return the number of channels (0 if there is no such axis) and the shape of the outputs, equal for all files."""
    first = _read_shape(files[0])
    for file in files:
        shape = _read_shape(file)
        if crop is not None and not all(np.greater_equal(shape[-3:], crop)):
            raise ValueError(f"{file!r} has the shape {shape}, smaller than crop={tuple(crop)}.")
        if (shape if crop is None else shape[:-3]) != (first if crop is None else first[:-3]):
            raise ValueError(
                f"{file!r} has the shape {shape}, but {files[0]!r} has {first}. Volumes of one loader need one shape "
                "and, with crop=, which cuts them alike, one number of channels."
            )
    return (first[0] if len(first) == 4 else 0), crop or first[-3:]


def _read_shape(file: str) -> tuple[int, ...]:
    """Return the shape that a ``.npy`` file states, after a check that DALI can read it."""
    if not os.path.isfile(file):
        raise FileNotFoundError(f"The volume {file!r} does not exist.")
    try:
        array = np.load(file, mmap_mode="r")  # refuses a file that is shorter than its header says
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"{file!r} is not a .npy file that can be read: {error}. Repair the file.") from error
    if array.dtype.kind not in "iuf" or array.ndim not in (3, 4):
        raise ValueError(
            f"{file!r} holds {array.dtype} of shape {array.shape}: expected integers or floats of 3 dimensions "
            "(depth, height, width) or 4 (channels first)."
        )
    with open(file, "rb") as stream:
        version = np.lib.format.read_magic(stream)
    if version != (1, 0) or not array.flags.c_contiguous:
        raise ValueError(
            f"{file!r} is stored in Fortran order or format {version}, which DALI cannot read on every machine. "
            "Save it again with np.save(file, np.ascontiguousarray(volume))."
        )
    return array.shape
