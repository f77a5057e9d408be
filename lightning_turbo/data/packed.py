"""``PackedDataset``, arrays that are memory-mapped and read a whole batch at a time."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from lightning_turbo._checks import check_functions
from lightning_turbo.data.pack import CONTENTS, pack_folder

__all__ = ["PackedDataset", "pack_folder"]


class PackedDataset(Dataset[Any]):
    """A dataset over arrays of the same length, read row by row or, much faster, a whole batch at a time.

    ``.npy`` files and uncompressed members of ``.npz`` files are memory-mapped: the system reads what is needed and
    all worker processes share it. Compressed members (MedMNIST's files have them) are decompressed into memory once;
    ``pack_folder`` turns a large one into files that can be mapped.

    With ``collate_fn=PackedDataset.collate`` a loader takes each batch as one copy out of each array. Without it the
    batches are the same, made by way of single rows.

    Args:
        source: A folder that ``pack_folder`` wrote, an ``.npz`` or ``.npy`` file, an array, or a mapping from names to
            files and arrays.
        keys: Names of the arrays that make a sample, in this order; by default all, of a packed folder all but
            ``affine`` and ``spacing``. For MedMNIST ``("train_images", "train_labels")``. A mapping makes samples
            dictionaries: ``{"image": "volumes", "label": "labels"}``.
        transform: Called on each batch, a tensor, a tuple or a dictionary of tensors ``(batch, ...)``; on a single row
            it sees a batch of one. What it returns may be a list or a mapping too; its tensors hold a row for each
            sample.
        sample_transform: Called on each sample, after ``transform``, as MONAI's dictionary transforms are made. What
            it returns is collated by the loader; ``PackedDataset.collate`` then collates as by default.

    Raises:
        FileNotFoundError: If a file or folder is not there.
        KeyError: If an array of ``keys`` is not there.
        TypeError: If an array holds something that torch has no dtype for, or an argument has a wrong type.
        ValueError: If the arrays differ in length, there are none, or one cannot be read or has no rows.

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
        self._source = dict(source) if isinstance(source, Mapping) else source
        self._names, self._keys = _read_keys(keys)
        self.transform, self.sample_transform = transform, sample_transform
        self._open()

    def _open(self) -> None:
        found = _open_source(self._source)
        keys = self._read_contents().get("arrays", tuple(found)) if self._keys is None else self._keys
        if missing := [key for key in keys if key not in found]:
            raise KeyError(f"PackedDataset(keys={self._keys!r}): there is no {missing!r}; there are {list(found)!r}.")
        self.arrays = {key: _open_array(key, found[key]) for key in keys}
        lengths = {key: len(array) for key, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"PackedDataset got arrays of {lengths!r} rows; all must have as many. Pass keys=... to choose."
            )

    def _read_contents(self) -> dict[str, Any]:
        """Return what ``pack_folder`` wrote about the folder; of another source nothing."""
        if isinstance(self._source, (str, os.PathLike)) and Path(self._source, CONTENTS).is_file():
            return json.loads(Path(self._source, CONTENTS).read_text())
        return {}

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the labels, of a folder that ``pack_folder`` wrote; else empty."""
        return self._read_contents().get("classes", [])

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``, in this order, read at once."""
        batch = self.batch(indices)
        samples = _Samples(_split(batch))
        if self.sample_transform is not None:
            return [self.sample_transform(sample) for sample in samples]
        samples.whole = batch
        return samples

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the batch at ``indices``: a tensor, a tuple with one for each array, or a dictionary of them.

        Raises:
            IndexError: If an index is beyond the length.
            TypeError: If they are not integers, as a mask is not.
        """
        where = np.asarray(indices)
        if where.dtype.kind == "b":
            raise TypeError("PackedDataset got a mask; expected indices. Pass np.flatnonzero(mask).")
        rows = {key: torch.from_numpy(_take_rows(array, where)) for key, array in self.arrays.items()}
        batch = self._arrange([rows[key] for key in self._keys or rows])
        return batch if self.transform is None else self.transform(batch)

    def _arrange(self, parts: list[torch.Tensor]) -> Any:
        if self._names is not None:
            return dict(zip(self._names, parts, strict=True))
        return parts[0] if len(parts) == 1 else tuple(parts)

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        """Return the batch that the samples were read as; samples from elsewhere are collated as by default."""
        whole = getattr(samples, "whole", None)
        return default_collate(samples) if whole is None else whole

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "arrays"}  # the reader maps them itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


def _read_keys(keys: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the names of the entries of a dictionary, if there are any, and those of the arrays."""
    if keys is None:
        return None, None
    if isinstance(keys, Mapping):
        return tuple(keys), tuple(keys.values())
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys={keys!r}: pass a sequence of names, for example ('images', 'labels'), or None.")
    return None, tuple(keys)


class _Samples(list[Any]):
    """The samples of a batch, and the batch; a list that something else makes of them, as a move does, is without."""

    whole: Any = None


def _split(batch: Any) -> Iterable[Any]:
    """Return the rows of a batch, in the structure of the batch."""
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in _split(tuple(batch.values())))
    if isinstance(batch, (list, tuple)):
        return map(getattr(batch, "_make", type(batch)), zip(*map(_split, batch), strict=True))
    return batch


def _take_rows(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Copy rows out of an array, into the byte order of this machine: FreeSurfer's and many old scans have another."""
    native = array.dtype.newbyteorder("=")
    if array.flags.aligned or not array.flags.c_contiguous or not array.size:
        return np.take(array, where, axis=0).astype(native, copy=False)
    # Members of an .npz file begin at any byte, and numpy copies numbers that are not aligned one by one.
    rows = np.take(array.reshape(len(array), -1).view(np.uint8), where, axis=0)
    return rows.view(array.dtype).reshape(*where.shape, *array.shape[1:]).astype(native, copy=False)


def _open_array(name: str, opener: Callable[[], np.ndarray]) -> np.ndarray:
    """Open one array, and refuse what cannot become rows of a tensor."""
    try:
        array = opener()
        torch.from_numpy(np.empty(0, dtype=array.dtype.newbyteorder("=")))
    except ValueError as error:
        raise ValueError(
            f"PackedDataset: {name!r} cannot be read: {error}. Store numbers, or leave it out with keys=..."
        ) from error
    except TypeError as error:
        raise TypeError(
            f"PackedDataset: {name!r} holds a dtype that torch does not have: {error} "
            "Store numbers, or leave it out with keys=..."
        ) from error
    if array.ndim == 0:
        raise ValueError(f"PackedDataset: {name!r} is a single number and has no rows. Leave it out with keys=...")
    return array


def _open_source(source: Any) -> dict[str, Callable[[], np.ndarray]]:
    """Return what can be opened in a source, by name, not opened yet."""
    if isinstance(source, Mapping):
        return {str(name): _opener(value) for name, value in source.items()}
    if isinstance(source, np.ndarray):
        return {"array": _opener(source)}
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"PackedDataset got {source!r}; pass a folder, an .npz or .npy file, arrays, or a mapping.")
    return _open_path(Path(source))


def _open_path(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    if path.is_dir():
        if not (path / CONTENTS).is_file():
            raise FileNotFoundError(
                f"{str(path)!r} holds no {CONTENTS}, so it is not a packed folder. "
                "Make one with: lightning-turbo pack FOLDER OUT"
            )
        return {file.stem: _opener(file) for file in sorted(path.glob("*.npy"))}
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        return {member.filename[:-4]: lambda m=member: _member(path, m) for member in members}
    return {path.stem: _opener(path)}


def _opener(value: Any) -> Callable[[], np.ndarray]:
    if isinstance(value, np.ndarray):
        return lambda: value
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"PackedDataset got {value!r} as an array; pass a numpy array or the path of a .npy file.")
    # Copy on write, because torch warns of arrays that it may not write to. Nothing is written.
    return lambda: np.load(value, mmap_mode="c")


def _member(path: Path, member: zipfile.ZipInfo) -> np.ndarray:
    """Return one array of an ``.npz`` file, mapped if it is not compressed."""
    if member.compress_type != zipfile.ZIP_STORED:
        with np.load(path) as arrays:
            return arrays[member.filename[:-4]]
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))
        file.seek(name_length + extra_length, os.SEEK_CUR)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        return np.memmap(path, dtype, "c", file.tell(), shape, "F" if fortran else "C")
