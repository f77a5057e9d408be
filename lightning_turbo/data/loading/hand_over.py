"""What crosses from a worker process: the small tensors of a batch in one buffer, everything else as torch sends it."""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # teaches ForkingPickler torch's storages
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_turbo._pytree import pin_batch

__all__ = ["HandOver", "PackedBatch", "pack", "part_at"]

# Bytes. A tensor up to this size costs more as a file descriptor and a segment of shared memory of its own than a copy.
SMALL = 64 << 10
# Bytes. A buffer up to this size goes through the pipe of the queue: fresh pages of shared memory cost more.
PIPE = 1 << 20
# Bytes. What is packed is in memory twice while it is opened. Tensors for which there is no room cross as torch does.
LARGEST = 64 << 20
# Bytes. A longer structure, as one of images in objects of their own, crosses with all its tensors as torch does.
LONGEST_STRUCTURE = 1 << 20
# Bytes. What each tensor in a buffer begins at, as in memory that torch allocates.
ALIGNMENT = 64


class HandOver:
    """A ``collate_fn`` around another one: what that returns in a worker process is packed for its way to the trainer.

    Args:
        collate_fn: Makes the batch.
        tell: Called in the worker process after each batch, with its samples; what it returns travels with the batch,
            see ``PackedBatch.told``.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], tell: Callable[[Any], Any] | None = None) -> None:
        self.collate_fn, self.tell = collate_fn, tell

    def __call__(self, samples: Any) -> Any:
        """Return the batch, or a ``PackedBatch`` where that gains or tells something."""
        batch = self.collate_fn(samples)
        if get_worker_info() is None:
            return batch
        return pack(batch, None if self.tell is None else self.tell(samples))


class PackedBatch:
    """A batch on its way: its structure as a pickle, its small tensors in a buffer, its other parts beside it.

    ``HandOver`` makes it in a worker process. Whoever takes it from the queue opens it once; it may be pinned before,
    by this package or by torch's own thread, which finds the method ``pin_memory``.

    Args:
        structure: What ``_Packer`` wrote.
        parts: The tensors and arrays of the structure, by their number: a tuple says where in the buffer a tensor is,
            all others are wrapped in ``_Whole``.
        buffer: ``bytes``, a shared tensor or a pinned one.
        told: What the worker process told with the batch.
        is_pinned: Whether the memory is page-locked.
    """

    def __init__(
        self, structure: bytes, parts: Sequence[Any], buffer: Any, told: Any = None, is_pinned: bool = False
    ) -> None:
        self.told, self.is_pinned = told, is_pinned
        self._structure, self._parts, self._buffer = structure, parts, buffer

    def open(self) -> Any:
        """Return the batch. Each of its tensors owns its memory; those of a pinned buffer are views of it."""
        place = _view if self.is_pinned else _copy
        make = functools.partial(place, self._buffer if self.is_pinned else _address(self._buffer))
        parts = [part.value if type(part) is _Whole else make(*part) for part in self._parts]
        return _Opener(self._structure, parts).load()

    def pin_memory(self) -> PackedBatch:
        """Return the same batch in page-locked memory: the buffer as a whole, the other parts one by one."""
        if self.is_pinned:  # by torch's thread, before this package's comes
            return self
        size, pinned = len(self._buffer), self._buffer
        if size:
            pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            ctypes.memmove(pinned.data_ptr(), _address(self._buffer), size)
        parts = [_Whole(pin_batch(part.value)) if type(part) is _Whole else part for part in self._parts]
        return PackedBatch(self._structure, parts, pinned, self.told, is_pinned=True)


def pack(batch: Any, told: Any = None) -> Any:
    """Return ``batch`` as a ``PackedBatch``; itself where nothing is gained by that and nothing is told.

    Raises:
        Exception: What pickling raises, where a part of the batch cannot be given to another process.
    """
    packer = _Packer()
    try:
        packer.dump(batch)
    except _TooLongError:
        packer = _Packer()
        packer.dump(_Whole(batch))
    size = packer.place()
    if not size and told is None:
        return batch
    if size > PIPE:
        buffer: Any = torch.empty(size, dtype=torch.uint8, device="cpu").share_memory_()
        packer.fill(buffer.data_ptr())
    else:
        room = bytearray(size)
        packer.fill(ctypes.addressof(ctypes.c_char.from_buffer(room)) if size else 0)
        buffer = bytes(room)
    return PackedBatch(packer.structure, packer.parts, buffer, told)


class _Whole:
    """A part that the queue sends as it is. It is pickled there alone: a second time would leak a file descriptor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _Whole, (self.value,)


class _TooLongError(Exception):
    """A structure is longer than it is worth to look through."""


class _Structure(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LONGEST_STRUCTURE:
            raise _TooLongError
        return super().write(data)


def part_at(number: int) -> Any:
    """Stand in a structure for a part, which the opener of the batch puts there instead of calling this."""
    raise RuntimeError(f"part {number} of a packed batch is read by PackedBatch.open alone")


class _Packer(ForkingPickler):
    """Writes the structure of a batch and takes its tensors and arrays out of it.

    pickle keeps what it keeps of any batch: types, nesting, and that one object stands in two places. It does not call
    ``reducer_override`` for strings, numbers and plain containers, which therefore cost next to nothing.
    """

    def __init__(self) -> None:
        self._file = _Structure()
        super().__init__(self._file, 5)
        self.parts: list[Any] = []  # as ``PackedBatch`` takes them, once ``place`` was called
        self._small: list[Tensor] = []  # those that have a place, in their order

    def reducer_override(self, obj: Any) -> Any:
        """Take a part out of the structure."""
        if not isinstance(obj, (Tensor, np.ndarray, _Whole)):
            return NotImplemented
        self.parts.append(obj.value if isinstance(obj, _Whole) else obj)
        return part_at, (len(self.parts) - 1,)

    @property
    def structure(self) -> bytes:
        """What was written."""
        return self._file.getvalue()

    def place(self) -> int:
        """Give the small tensors their places in the buffer, and return its size in bytes; 0 where none gains by it."""
        storages = [_storage_of(part) for part in self.parts]
        times, end = Counter(storages), 0
        for number, part in enumerate(self.parts):
            # Those that share their memory still do where torch sends them.
            shares = times[storages[number]] > 1
            if shares or not _is_small(part) or end + part.nbytes > LARGEST:
                self.parts[number] = _Whole(part)
                continue
            stride = part.stride()
            by_rows = stride == _by_rows(part.shape)
            self.parts[number] = end, part.nbytes, part.dtype, tuple(part.shape), None if by_rows else stride
            self._small.append(part)
            end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return end

    def fill(self, address: int) -> None:
        """Copy the small tensors to their places in a buffer that begins at ``address``."""
        places = [part for part in self.parts if type(part) is tuple]
        for (begin, size, *_), tensor in zip(places, self._small, strict=True):
            if size:
                ctypes.memmove(address + begin, tensor.data_ptr(), size)


class _Opener(pickle.Unpickler):
    """Reads the structure of a batch, with its parts in their places."""

    def __init__(self, structure: bytes, parts: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._parts = parts

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Find what a pickle names."""
        if global_name == "part_at" and module_name == __name__:
            return self._parts.__getitem__
        return super().find_class(module_name, global_name)


def _storage_of(part: Any) -> Any:
    """Return what two tensors have in common that share memory; something of its own for all others."""
    plain = isinstance(part, Tensor) and part.layout is torch.strided and part.device.type == "cpu"
    if not plain or part.is_nested or not part.numel():
        return id(part), "alone"
    try:
        return part.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass whose memory is that of other tensors
        return id(part), "alone"


def _is_small(part: Any) -> bool:
    """Whether a part is a plain tensor up to the size that is packed, without gaps between its elements."""
    if type(part) is not Tensor or part.layout is not torch.strided or part.device.type != "cpu" or part.is_nested:
        return False
    other = part.requires_grad or part.is_quantized or part.is_conj() or part.is_neg()
    return not other and part.nbytes <= SMALL and _is_dense(part.shape, part.stride())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill one span of memory, each place once, whatever the order of the dimensions."""
    step = 1
    for own, count in sorted((own, count) for own, count in zip(stride, shape, strict=True) if count != 1):
        if own != step:
            return 0 in shape
        step *= count
    return True


def _by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    behind = [max(count, 1) for count in reversed(shape[1:])]
    return tuple(reversed([*itertools.accumulate(behind, lambda one, other: one * other, initial=1)][: len(shape)]))


def _address(buffer: Any) -> int:
    if isinstance(buffer, Tensor):
        return buffer.data_ptr()
    return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0


def _copy(address: int, begin: int, size: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """Return a tensor of its own memory with what is in a buffer."""
    if stride is None:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    if size:
        ctypes.memmove(tensor.data_ptr(), address + begin, size)
    return tensor


def _view(buffer: Tensor, begin: int, size: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """Return a tensor that is a part of a buffer."""
    if not size:
        return _copy(0, begin, size, dtype, shape, stride)
    flat = buffer[begin : begin + size].view(dtype)
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)
