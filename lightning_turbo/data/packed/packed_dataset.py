"""``PackedDataset``: reads samples or whole batches from memory-mapped arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from lightning_turbo._checks import check_functions, expect
from lightning_turbo.data.packed.intensities import Intensities
from lightning_turbo.data.packed.packing import CONTENTS
from lightning_turbo.data.packed.rows import Rows, open_rows, read_row
from lightning_turbo.data.packed.structure import WholeBatch, build, from_json, names_in, split_batch
from lightning_turbo.data.sample_seeds import seed_sample

__all__ = ["PackedDataset", "open_fields"]

# Parts of messages.
PACK_FIRST = "Pack first: lightning-turbo pack FOLDER OUT, or pack(dataset, OUT)."
NOT_ALIKE = "the rows differ in shape, are compressed or are strings"


class PackedDataset(Dataset[Any]):
    """Read samples, or whole batches at once, from arrays of equal length.

    ``.npy`` files are memory-mapped: the system reads only the rows that are needed, and all processes of a machine
    share them. The arrays of an ``.npz`` file are loaded into memory.

    With ``collate_fn=PackedDataset.collate``, a loader copies each batch at once. Without it, the batches are equal but
    collated from single samples. The rows of a packed folder may differ in shape or be strings; such samples are read
    one at a time, with a dtype that can hold those of all rows.

    Args:
        source: A folder written by ``pack`` or ``pack_folder``, an ``.npz`` or ``.npy`` file, an array, or a mapping
            from names to ``.npy`` files and arrays.
        keys: Names of the arrays in a sample, in this order. Default: all arrays, or everything that was packed, except
            ``affine``, ``spacing`` and ``files``. For MedMNIST ``("train_images", "train_labels")``. A mapping makes
            samples dictionaries: ``{"image": "volumes", "label": "labels"}``.
        transform: Called on each batch: a tensor, or a tuple or dictionary of tensors (batch, ...). For a single sample
            the batch size is 1. It may return a tensor, or a sequence or mapping of tensors, with one row per sample.
            Requires rows of one shape.
        sample_transform: Called on each sample after ``transform``, for transforms such as MONAI's dictionary
            transforms. ``PackedDataset.collate`` then collates the samples like ``default_collate``. With sample seeds,
            its random numbers are tied to the sample.

    Attributes:
        classes: Class names of a packed folder in the order of their labels, otherwise empty.
        intensities: Foreground statistics of a folder that was packed with label volumes, for
            ``augment.NormalizeIntensity``: mean, std and percentiles per volume field and channel.

    Raises:
        FileNotFoundError: If a file or folder is missing.
        KeyError: If an array in ``keys`` is missing.
        TypeError: If torch has no dtype for an array, or an argument has the wrong type.
        MissingExtraError: If blosc2 is missing for a compressed folder.
        ValueError: If the arrays differ in length or have no rows, or ``transform`` is set and rows differ in shape.

    Example:
        >>> data = PackedDataset({"x": np.arange(6).reshape(3, 2), "y": np.array([0, 1, 0])})
        >>> data[1]
        (tensor([2, 3]), tensor(1))
        >>> PackedDataset.collate(data.__getitems__([2, 0]))[1]
        tensor([0, 0])
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | np.ndarray | Mapping[str, Any],
        *,
        keys: Sequence[str] | Mapping[str, str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        sample_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        check_functions(transform=transform, sample_transform=sample_transform)
        names = keys is None or (isinstance(keys, Iterable) and not isinstance(keys, str))
        expect(names, "keys", keys, "a sequence of names such as ('images', 'labels'), a mapping, or None", TypeError)
        self.transform = transform
        self.sample_transform = sample_transform
        self._source = source
        self._keys = keys
        contents, self._template, arrays = open_fields(source, keys)
        self._arrays: dict[str, np.ndarray | Rows] | None = arrays
        self.classes: list[str] = contents.get("classes", [])
        self.intensities: Intensities = contents.get("intensities", {})
        self._alike = not any(isinstance(array, Rows) for array in arrays.values())
        expect(self._alike or transform is None, "transform", transform, f"None; {NOT_ALIKE}; use sample_transform=")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``, read at once if all rows have one shape."""
        if not self._alike:
            return [self._finish(index, self._read(index)) for index in indices]
        batch = self.batch(indices)
        if self.sample_transform is not None:
            samples = split_batch(batch, len(indices))
            return [self._finish(index, sample) for index, sample in zip(indices, samples, strict=True)]
        return WholeBatch(split_batch(batch, len(indices)), batch)

    def _finish(self, index: int, sample: Any) -> Any:
        seed_sample(index)
        return sample if self.sample_transform is None else self.sample_transform(sample)

    def _read(self, index: int) -> Any:
        parts = {name: read_row(array, index) for name, array in self.arrays.items()}
        return build(self._template, {k: v if isinstance(v, str) else torch.from_numpy(v) for k, v in parts.items()})

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the batch at ``indices``: a tensor, or a tuple or dictionary with a tensor per array.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If ``indices`` is a mask.
            ValueError: If rows differ in shape, are compressed, or are strings.
        """
        rows = np.asarray(indices)
        expect(rows.dtype.kind != "b", "indices", indices, "integers such as np.flatnonzero(mask)", TypeError)
        if not self._alike:  # tested first: formatting the message takes longer than reading a batch
            raise ValueError(
                f"source: expected rows of one shape; {NOT_ALIKE}, read one by one: dataset[0], got "
                f"{str(self._source)!r}."
            )
        # Many scans are stored in a byte order that is not the machine's, which torch does not support.
        arrays: dict[str, Any] = self.arrays
        taken = {name: np.take(array, rows, axis=0) for name, array in arrays.items()}
        parts = {name: torch.from_numpy(_native(part)) for name, part in taken.items()}
        batch = build(self._template, parts)
        return batch if self.transform is None else self.transform(batch)

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        """Return the batch that ``__getitems__`` split into samples; collate any other samples as by default."""
        batch = WholeBatch.of(samples)
        return default_collate(samples) if batch is None else batch

    @property
    def arrays(self) -> dict[str, np.ndarray | Rows]:
        """The arrays by name; those with rows of several shapes are also indexed by row."""
        if self._arrays is None:
            _, _, self._arrays = open_fields(self._source, self._keys)
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": None}  # each process maps the files itself


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def open_fields(source: Any, keys: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return the description of a source, the structure of a sample, and the arrays that it refers to."""
    contents, found = _open_source(source)
    if keys is None and "arrays" in contents:
        template = from_json(contents["arrays"])
    else:
        # A single array is the sample itself; a packed sample with one part is not unpacked.
        chosen = list(found) if keys is None else keys
        template = dict(chosen) if isinstance(chosen, Mapping) else tuple(chosen)
        if isinstance(template, tuple) and len(template) == 1:
            template = template[0]
    names = names_in(template)
    if missing := [name for name in names if name not in found]:
        raise KeyError(f"keys: expected some of {list(found)}, got {missing}.")
    expect(names, "keys", keys, f"at least one of {list(found)}")
    arrays = {name: _open_array(name, found[name]) for name in names}
    lengths = {name: len(array) for name, array in arrays.items()}
    expect(len(set(lengths.values())) == 1, "source", lengths, "arrays of equal length; choose some with keys=")
    return contents, template, arrays


def _open_source(source: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the description of a packed folder, and the arrays or files of a source by name."""
    if isinstance(source, Mapping):
        return {}, source
    if isinstance(source, np.ndarray):
        return {}, {"array": source}
    paths = isinstance(source, (str, os.PathLike))
    expect(paths, "source", source, "a folder, an .npz or .npy file, an array, or a mapping of them", TypeError)
    path = Path(source)
    if path.is_file():
        arrays = path.suffix in (".npy", ".npz")
        expect(arrays, "source", str(path), f"a folder written by pack, or an .npz or .npy file; {PACK_FIRST}")
        return {}, np.load(path) if path.suffix == ".npz" else {path.stem: path}
    if not (path / CONTENTS).is_file():
        there = f"a folder without {CONTENTS}" if path.is_dir() else "which does not exist"
        raise FileNotFoundError(
            f"source: expected a packed folder, or an .npz or .npy file, got {str(path)!r}, {there}. {PACK_FIRST}"
        )
    return json.loads((path / CONTENTS).read_text()), {file.stem: file for file in path.glob("*.npy")}


def _open_array(name: str, value: Any) -> np.ndarray | Rows:
    """Map a file, or return an array, if its rows can become tensors."""
    if isinstance(value, (str, os.PathLike)):
        value = open_rows(Path(value))
    expect(isinstance(value, (np.ndarray, Rows)), name, value, "a numpy array or the path of a .npy file", TypeError)
    rows = not isinstance(value, np.ndarray) or value.ndim
    expect(rows, name, value, "an array with one row per sample; leave others out with keys=")
    try:
        torch.from_numpy(np.empty(0, dtype=(value.dtype or np.dtype("u1")).newbyteorder("=")))
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a dtype that torch has, got {value.dtype}. Leave it out with keys=."
        ) from error
    return value
