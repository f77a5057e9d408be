"""``PackedDataset``: read whole batches from memory-mapped arrays."""

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
from lightning_turbo.data.pack import CONTENTS, pack_folder

__all__ = ["PackedDataset", "pack_folder"]


class PackedDataset(Dataset[Any]):
    """Read samples, or faster whole batches, from arrays of equal length.

    ``.npy`` files are memory-mapped: the system reads only the rows that are needed, and all worker processes share
    them. The arrays of an ``.npz`` file are loaded into memory.

    With ``collate_fn=PackedDataset.collate`` a loader copies each batch at once. Without it, the batches are the same
    but collated from single samples.

    Args:
        source: A folder written by ``pack_folder``, an ``.npz`` or ``.npy`` file, an array, or a mapping from names to
            ``.npy`` files and arrays.
        keys: Names of the arrays of a sample, in this order. Default: all arrays, except ``affine`` and ``spacing`` of
            a packed folder. For MedMNIST ``("train_images", "train_labels")``. A mapping makes samples dictionaries:
            ``{"image": "volumes", "label": "labels"}``.
        transform: Called on each batch: a tensor, a tuple or a dictionary of tensors (batch, ...). For a single sample
            the batch size is 1. It may return a tensor, or a sequence or mapping of tensors, with one row per sample.
        sample_transform: Called on each sample after ``transform``, for transforms such as MONAI's dictionary
            transforms. ``PackedDataset.collate`` then collates the samples as ``default_collate`` does.

    Attributes:
        arrays: The arrays by name.
        classes: Class names of a folder written by ``pack_folder``, in the order of their labels, else empty.

    Raises:
        FileNotFoundError: If a file or folder is missing.
        KeyError: If an array of ``keys`` is missing.
        TypeError: If torch has no dtype for an array, or an argument has a wrong type.
        ValueError: If the arrays differ in length, or one has no rows.

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
        self._source, self._keys = source, keys
        self.transform, self.sample_transform = transform, sample_transform
        self._open()

    def _open(self) -> None:
        contents, found = _open_source(self._source)
        self.classes: list[str] = contents.get("classes", [])
        keys = contents.get("arrays", list(found)) if self._keys is None else self._keys
        self._order: list[str] = list(keys.values() if isinstance(keys, Mapping) else keys)
        if missing := [key for key in self._order if key not in found]:
            raise KeyError(f"keys: expected some of {list(found)}, got {missing}.")
        self.arrays = {key: _open_array(key, found[key]) for key in self._order}
        lengths = {key: len(array) for key, array in self.arrays.items()}
        expect(len(set(lengths.values())) == 1, "source", lengths, "arrays of equal length; choose some with keys=")

    def __len__(self) -> int:
        return len(self.arrays[self._order[0]])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``, read at once."""
        batch = self.batch(indices)
        samples = _Samples(_split(batch))
        if self.sample_transform is not None:
            return [self.sample_transform(sample) for sample in samples]
        samples.batch = batch
        return samples

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the batch at ``indices``: a tensor, a tuple with one per array, or a dictionary.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If ``indices`` is a mask.
        """
        rows = np.asarray(indices)
        expect(rows.dtype.kind != "b", "indices", indices, "integers, as np.flatnonzero(mask) returns", TypeError)
        # Many scans are stored in another byte order than this machine's, which torch does not know.
        taken = [np.take(array, rows, axis=0) for array in map(self.arrays.__getitem__, self._order)]
        parts = [torch.from_numpy(part.astype(part.dtype.newbyteorder("="), copy=False)) for part in taken]
        if isinstance(self._keys, Mapping):
            batch: Any = dict(zip(self._keys, parts, strict=True))
        else:
            batch = parts[0] if len(parts) == 1 else tuple(parts)
        return batch if self.transform is None else self.transform(batch)

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        """Return the batch from which ``__getitems__`` made the samples; collate other samples as by default."""
        batch = getattr(samples, "batch", None)
        return default_collate(samples) if batch is None else batch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "arrays"}  # each process maps the files

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


class _Samples(list[Any]):
    """The samples of a batch together with the batch, which a list derived from it does not have."""

    batch: Any = None


def _split(batch: Any) -> Iterable[Any]:
    """Split a batch into samples of the same structure."""
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in _split(tuple(batch.values())))
    if isinstance(batch, (list, tuple)):
        return map(getattr(batch, "_make", type(batch)), zip(*map(_split, batch), strict=True))
    return batch


def _open_source(source: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the description of a packed folder, and the arrays or files of a source by name."""
    if isinstance(source, Mapping):
        return {}, source
    if isinstance(source, np.ndarray):
        return {}, {"array": source}
    paths = isinstance(source, (str, os.PathLike))
    expect(paths, "source", source, "a folder, an .npz or .npy file, an array, or a mapping of them", TypeError)
    path = Path(source)
    if path.suffix == ".npz":
        return {}, np.load(path)
    if not path.is_dir():
        return {}, {path.stem: path}
    if not (path / CONTENTS).is_file():
        raise FileNotFoundError(
            f"Expected a folder with {CONTENTS}, got {str(path)!r}. Create one with: lightning-turbo pack FOLDER OUT"
        )
    return json.loads((path / CONTENTS).read_text()), {file.stem: file for file in path.glob("*.npy")}


def _open_array(name: str, value: Any) -> np.ndarray:
    """Map a ``.npy`` file, or return an array, if its rows can become tensors."""
    if isinstance(value, (str, os.PathLike)):
        value = np.load(value, mmap_mode="c")  # nothing is written, but torch warns about read-only arrays
    expect(isinstance(value, np.ndarray), name, value, "a numpy array or the path of a .npy file", TypeError)
    expect(value.ndim, name, value, "an array with one row per sample; leave others out with keys=")
    try:
        torch.from_numpy(np.empty(0, dtype=value.dtype.newbyteorder("=")))
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a dtype that torch has, got {value.dtype}. Leave it out with keys=."
        ) from error
    return value
