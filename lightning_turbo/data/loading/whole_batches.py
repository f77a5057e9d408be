"""``WholeBatches``: batches of arrays in memory, made by one index each, as torch makes them of single samples."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from lightning_turbo.data.packed.packed_dataset import PackedDataset

__all__ = ["WholeBatches", "as_it_is", "has_whole_batches", "is_quiet"]

# What default_collate makes of samples can be changed by who adds to its table of functions.
_COLLATED_BY = default_collate.__globals__.get("default_collate_fn_map", {})
_INTEGERS = {int, np.int64}
# torch has no index_select for tensors of one axis of these.
_NOT_SELECTED = {torch.uint16, torch.uint32, torch.uint64}
# The classes of what these datasets load.
_LOADED = (Tensor, np.ndarray, np.float64, np.int64, np.bool_, float, int)


class _OneByOneError(Exception):
    """A batch cannot be had by one index, so that its samples are loaded one by one, as torch does."""


class WholeBatches:
    """Takes the place of a dataset of arrays in torch's iterator: it is asked for a batch, and returns it collated.

    A loader makes one for each iterator, together with ``as_it_is`` for ``collate_fn``, and it lives as long as that
    iterator. Always: the batch is what ``default_collate`` makes of the samples at these indices, bit for bit. torch's
    samplers still decide which indices make a batch, and draw the random numbers for them. All attributes are the
    dataset's own, to read and to set, as a ``worker_init_fn`` does in a worker process.

    Args:
        dataset: That of a loader for which ``has_whole_batches`` holds.
    """

    def __init__(self, dataset: Any) -> None:
        # Other attributes that are set belong to the dataset.
        vars(self)["_dataset"] = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the batch of the samples at ``indices``."""
        if indices:  # of none, the error is that of a plain loader
            with contextlib.suppress(_OneByOneError):
                return _read(self._dataset, indices)
        load = getattr(self._dataset, "__getitems__", None)
        return default_collate(load(indices) if load else [self._dataset[index] for index in indices])

    def __getattr__(self, name: str) -> Any:
        # Not what Python and pickle ask of this object itself, which may be without attributes still.
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


def as_it_is(batch: Any) -> Any:
    """Return a batch that ``WholeBatches`` has collated already; the ``collate_fn`` beside it."""
    return batch


def has_whole_batches(loader: Any) -> bool:
    """Whether the batches of a loader can be had by one index each.

    That is so under default collation for a ``TensorDataset``, a ``PackedDataset`` without ``sample_transform``, a
    tensor, an array of NumPy, a ``StackDataset`` of these, and a ``Subset`` of any of them. A class that inherits from
    one of these may load something else, and is not one of them.
    """
    if loader.collate_fn is not default_collate or not loader._auto_collation or not _is_torchs_own():
        return False
    try:
        _read(loader.dataset, [])
    except _OneByOneError:
        return False
    return True


def is_quiet(loader: Any) -> bool:
    """Whether to load a batch runs no code of the user's, and draws no random numbers."""
    return has_whole_batches(loader) and not _transforms(loader.dataset)


def _transforms(dataset: Any) -> bool:
    """Whether a dataset of arrays has a transform; only a ``PackedDataset`` may, and not in a ``StackDataset``."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, PackedDataset) and dataset.transform is not None


def _is_torchs_own() -> bool:
    """Whether ``default_collate`` does to arrays what torch has it do."""
    # By the classes that samples of these datasets have; what others have added for their own classes does not matter.
    used = [made for kind, made in _COLLATED_BY.items() if any(issubclass(each, kind) for each in _LOADED)]
    return bool(used) and all(getattr(each, "__module__", "") == default_collate.__module__ for each in used)


def _read(dataset: Any, indices: Sequence[Any], beside: bool = False) -> Any:
    """Return a batch as ``default_collate`` gives it: tuples of samples become lists, dictionaries stay.

    Args:
        dataset: The dataset.
        indices: The indices of the samples; of none, nothing is loaded.
        beside: Whether other datasets load parts of the same samples, of which one may have to be loaded one by one.

    Raises:
        _OneByOneError: If the samples have to be loaded one by one, of this dataset or at these indices.
    """
    read = _READ.get(type(dataset))
    # A method that was set on this object alone.
    if read is None or "__getitems__" in getattr(dataset, "__dict__", {}):
        raise _OneByOneError
    return read(dataset, indices, beside)


def _read_subset(dataset: Subset[Any], indices: Sequence[Any], beside: bool) -> Any:
    places: Any = dataset.indices
    if set(map(type, indices)) <= _INTEGERS and isinstance(places, (np.ndarray, Tensor)):
        return _read(dataset.dataset, places[list(indices)].tolist(), beside)
    return _read(dataset.dataset, [places[index] for index in indices], beside)


def _read_stack(dataset: Any, indices: Sequence[Any], beside: bool) -> Any:
    parts = dataset.datasets
    if isinstance(parts, dict):
        return {name: _read(part, indices, True) for name, part in parts.items()}
    return [_read(part, indices, True) for part in parts]


def _read_tensors(dataset: TensorDataset, indices: Sequence[Any], beside: bool) -> list[Tensor]:
    rows = _rows(dataset.tensors, indices)
    return [tensor.index_select(0, rows) for tensor in dataset.tensors]


def _read_tensor(tensor: Tensor, indices: Sequence[Any], beside: bool) -> Tensor:
    return tensor.index_select(0, _rows([tensor], indices))


def _rows(tensors: Sequence[Tensor], indices: Sequence[Any]) -> Tensor:
    """Return ``indices`` as a tensor, with which ``index_select`` takes the rows of tensors."""
    for tensor in tensors:
        if not _is_plain(tensor) or (tensor.dim() == 1 and tensor.dtype in _NOT_SELECTED):
            raise _OneByOneError
    return torch.tensor(_check(indices, len(tensors[0])), dtype=torch.int64, device="cpu")


def _read_array(array: np.ndarray, indices: Sequence[Any], beside: bool) -> Tensor:
    # Of what torch does not take, the error is that of a plain loader.
    takes = array.dtype.kind in "biufc" and array.dtype.isnative and array.dtype.itemsize <= 16
    if not takes or array.ndim == 0 or (array.ndim == 1 and array.dtype == np.uint64):
        raise _OneByOneError
    return torch.from_numpy(np.take(array, np.asarray(_check(indices, len(array)), dtype=np.int64), axis=0))


def _read_packed(dataset: PackedDataset, indices: Sequence[Any], beside: bool) -> Any:
    own = dataset.sample_transform is not None or (beside and dataset.transform is not None)
    # Others than arrays hold rows that differ in shape.
    if own or not all(isinstance(each, np.ndarray) for each in dataset.arrays.values()):
        raise _OneByOneError
    count = len(_check(indices, len(dataset)))
    if not count:
        return None
    if dataset.transform is None:
        return _collated(dataset.batch(indices), count, copy=False)
    # Once, as a transform may draw random numbers; what it returns may be no tensors, or part of what it keeps.
    samples = dataset.__getitems__(indices)
    try:
        return _collated(PackedDataset.collate(samples), count, copy=True)
    except _OneByOneError:
        return default_collate(samples)


_READ: dict[type, Any] = {
    Subset: _read_subset, StackDataset: _read_stack, TensorDataset: _read_tensors, PackedDataset: _read_packed,
    Tensor: _read_tensor, np.ndarray: _read_array, np.memmap: _read_array,
}  # fmt: skip


def _is_plain(tensor: Any) -> bool:
    """Whether rows of a tensor that are collated one by one are what one index gives."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    other = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.dim() > 0 and not other


def _check(indices: Sequence[Any], length: int) -> Sequence[Any]:
    """Return ``indices`` if they are integers of rows."""
    if set(map(type, indices)) <= _INTEGERS and (not indices or (min(indices) >= 0 and max(indices) < length)):
        return indices
    raise _OneByOneError


def _collated(batch: Any, count: int, copy: bool) -> Any:
    """Return a batch of a ``PackedDataset`` as ``default_collate`` gives it of the samples."""
    if isinstance(batch, Mapping):
        return {name: _collated(part, count, copy) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_collated(part, count, copy) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else parts
    if type(batch) is Tensor and len(batch) == count and _is_plain(batch):
        return batch.clone(memory_format=torch.contiguous_format) if copy else batch
    raise _OneByOneError
