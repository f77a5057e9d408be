"""3D volumes in ``.npy`` files, with labels from a list, as a ready pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_number, is_whole
from lightning_turbo.data.dali.recipe import FileRecipe, are_numbers, check_dtype

__all__ = ["VolumeFiles"]

Pairs = Sequence[tuple[str | os.PathLike[str], int]]


class VolumeFiles(FileRecipe):
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
        TypeError: If a switch is no bool.
        ValueError: If a line of the list, a volume's format or shape, or an argument is not as described.

    Note:
        The constructor reads the header of every file, to compare the shapes.
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
        if not is_number(intensity) or not 0 <= intensity < 1:
            raise ValueError(f"intensity={intensity!r}: give a number from 0 to below 1.")
        if normalize not in ("volume", None) and not (are_numbers(normalize, 2) and normalize[1] > 0):
            raise ValueError(f"normalize={normalize!r}: accepted are 'volume', (mean, std) with std above 0, and None.")
        if crop is not None and not (are_numbers(crop, 3) and all(is_whole(n, 1) for n in crop)):
            raise ValueError(f"crop={crop!r}: give depth, height and width, each at least 1.")
        self.train, self.crop, self.normalize = train, crop, normalize
        self.flips, self.turns, self.intensity = flips and train, turns and train, intensity if train else 0.0
        self.branches = self.turns
        self.dtype, self.channels_last = check_dtype(dtype, ("float32", "float16")), channels_last
        files, labels = _listed(source, root)
        self.channels, shape = _checked_shape(files, crop)
        if self.turns and shape[1] != shape[2]:
            raise ValueError(
                f"turns=True needs planes as high as wide, but they are {shape[1]} x {shape[2]}. "
                "Give a square crop or turns=False."
            )
        super().__init__(files, labels, shuffle=train if shuffle is None else shuffle, index=index)

    def draw(self, generator: np.random.Generator, batch: int) -> dict[str, np.ndarray]:
        """Draw place, turn, flips and intensity of each volume; only what training asks for."""
        drawn: dict[str, np.ndarray] = {}
        if self.train and self.crop is not None:
            for axis in ("z", "y", "x"):
                drawn[axis] = generator.random(batch, dtype=np.float32)
        if self.flips or self.turns:
            flips = generator.integers(0, 1 + self.flips, (3, batch), dtype=np.int32)
            turn = generator.integers(0, 1 + 3 * self.turns, batch, dtype=np.int32)
            # One, two and three quarter turns: transpose, flip rows and flip columns in these combinations.
            if self.turns:
                drawn["transposed"] = turn % 2 == 1
            drawn["depthwise"] = flips[0]
            drawn["vertical"] = flips[1] ^ ((turn == 1) | (turn == 2))
            drawn["horizontal"] = flips[2] ^ (turn >= 2)
        if self.intensity:
            drawn["gain"] = generator.uniform(1 - self.intensity, 1 + self.intensity, batch).astype(np.float32)
            drawn["offset"] = generator.uniform(-self.intensity, self.intensity, batch).astype(np.float32)
        return drawn

    def define(self, dali: Any, encoded: Any, device: str, **drawn: Any) -> Any:
        """Return reading, augmentation and normalisation as a DALI graph."""
        fn, types = dali.fn, dali.types
        volume = fn.decoders.numpy(encoded, dtype=types.FLOAT)
        if not self.channels:
            volume = fn.expand_dims(volume, axes=0)
        volume = fn.reshape(volume, layout="CDHW")
        if device == "gpu":
            volume = volume.gpu()
        if self.crop is not None:
            place = {f"crop_pos_{axis}": drawn.get(axis, 0.5) for axis in ("z", "y", "x")}
            depth, height, width = self.crop
            volume = fn.crop(volume, crop_d=depth, crop_h=height, crop_w=width, **place)
        if "transposed" in drawn:
            volume = _turned(dali, volume, drawn["transposed"])
        if "depthwise" in drawn:
            volume = fn.flip(volume, **{name: drawn[name] for name in ("depthwise", "vertical", "horizontal")})
        if self.normalize == "volume":
            volume = fn.normalize(volume, epsilon=1e-12)
        elif self.normalize is not None:
            volume = (volume - float(self.normalize[0])) / float(self.normalize[1])
        if "gain" in drawn:
            volume = volume * drawn["gain"] + drawn["offset"]
        if self.channels_last:
            volume = fn.transpose(volume, perm=[1, 2, 3, 0])
        return fn.cast(volume, dtype=types.FLOAT16) if self.dtype == "float16" else volume

    def finish(self, batch: Tensor) -> Tensor:
        """Return the batch in shape (batch, channels, depth, height, width)."""
        return batch.permute(0, 4, 1, 2, 3) if self.channels_last else batch


def _turned(dali: Any, volume: Any, transposed: Any) -> Any:
    """Exchange height and width of the volumes whose flag is set."""
    if transposed:
        volume = dali.fn.transpose(volume, perm=[0, 1, 3, 2], transpose_layout=False)
    return volume


def _listed(source: str | os.PathLike[str] | Pairs, root: str | os.PathLike[str] | None) -> tuple[list[str], list[int]]:
    """Paths and labels, from a text file or from pairs."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"source={str(source)!r} is no file. Give a text file with lines 'path label'.")
        folder = path.parent if root is None else Path(root)
        pairs: list[tuple[Any, Any]] = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            name, _, label = line.strip().rpartition(" ")
            if not name or not label.lstrip("-").isdigit():
                raise ValueError(f"{path}, line {number}: {line!r} is not 'path label' with an integer label.")
            pairs.append((name.strip(), int(label)))
    else:
        folder = Path() if root is None else Path(root)
        pairs = list(source)
    if not pairs:
        raise ValueError(f"source={source!r} lists no volume.")
    files = [os.path.join(folder, name) for name, _ in pairs]
    return files, [int(label) if isinstance(label, str) else label for _, label in pairs]


def _checked_shape(files: Sequence[str], crop: tuple[int, int, int] | None) -> tuple[int, tuple[int, ...]]:
    """Number of channels (0 if there is no such axis) and the shape of the outputs, equal for all files."""
    first: tuple[int, ...] | None = None
    for file in files:
        shape = _header(file)
        if first is None:
            first = shape
        space = shape[-3:]
        if crop is not None and any(have < want for have, want in zip(space, crop, strict=True)):
            raise ValueError(f"{file!r} has the shape {shape}, smaller than crop={tuple(crop)}.")
        if (shape[:-3] if crop is not None else shape) != (first[:-3] if crop is not None else first):
            raise ValueError(
                f"{file!r} has the shape {shape}, but {files[0]!r} has {first}. Volumes of one loader need one shape"
                + (" of channels." if crop is not None else "; give crop to cut them alike.")
            )
    if first is None:
        raise ValueError("no volumes were given.")
    return (first[0] if len(first) == 4 else 0), crop if crop is not None else first[-3:]


def _header(file: str) -> tuple[int, ...]:
    """The shape that a ``.npy`` file states, after a check that DALI can read it."""
    if not os.path.isfile(file):
        raise FileNotFoundError(f"the volume {file!r} does not exist.")
    try:
        with open(file, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            if version != (1, 0):
                raise ValueError(f"its format is version {version}, accepted is (1, 0), which np.save writes")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise ValueError(f"{file!r} is no .npy file that can be read: {error}.") from error
    if dtype.kind not in "iuf" or len(shape) not in (3, 4):
        raise ValueError(
            f"{file!r} holds {dtype} of shape {shape}: accepted are integers or floats of 3 dimensions "
            "(depth, height, width) or 4 (channels first)."
        )
    if fortran:
        raise ValueError(
            f"{file!r} is stored in Fortran order, which DALI cannot read on every machine. "
            "Save it again with np.save(file, np.ascontiguousarray(volume))."
        )
    return shape
