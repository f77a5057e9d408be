"""The way of a batch from a worker process: small tensors cross in one buffer, everything else as torch sends it."""

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

# Bytes. To copy a tensor up to this size costs less than a file descriptor and a segment of shared memory of its own.
SMALL = 64 << 10
# Bytes. A buffer up to this size goes through the pipe of the queue, as fresh pages of shared memory cost more.
PIPE = 1 << 20
# Bytes. A buffer is in memory twice while it is opened, so that it does not become larger. Further tensors cross as
# torch sends them.
LARGEST = 64 << 20
# Bytes. A batch with a longer structure, such as one of images that are objects of another library, crosses as a whole
# as torch sends it.
LONGEST_STRUCTURE = 1 << 20
# Bytes. Each tensor in a buffer begins at a multiple of this, as in memory that torch allocates.
ALIGNMENT = 64


class HandOver:
    """A ``collate_fn`` around another one, which packs the batch for its way out of a worker process.

    A loader makes one when it starts processes, and each of them has a copy until it ends. Always: the batch that is
    opened in the training process equals the one that was packed.

    Args:
        collate_fn: Makes the batch.
        get_state: Called in the worker process with the samples of each batch. Its result is sent with the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], get_state: Callable[[Any], Any] | None = None) -> None:
        self.collate_fn = collate_fn
        self.get_state = get_state

    def __call__(self, samples: Any) -> Any:
        """Return the batch, as a ``PackedBatch`` if that is faster or a state is sent with it."""
        batch = self.collate_fn(samples)
        if get_worker_info() is None:
            return batch
        return pack(batch, None if self.get_state is None else self.get_state(samples))


class PackedBatch:
    """A batch on its way: its structure as a pickle, its small tensors in a buffer, its other parts beside them.

    ``HandOver`` makes it in a worker process, and ``Background`` opens it once, when it has come out of torch's queue.
    Before that this package may pin it, or torch's own thread, which finds the method ``pin_memory``. Always: nothing
    changes it; a pinned one is another object.

    Args:
        structure: What ``_Packer`` wrote.
        parts: The tensors and arrays of the structure, by their number. A tuple says where in the buffer a tensor is;
            all others are wrapped in ``_Whole``.
        buffer: ``bytes``, a shared tensor, or a pinned tensor.
        stream_state: What ``HandOver.get_state`` returned.
        is_pinned: Whether the buffer and the other parts are in page-locked memory.
    """

    def __init__(
        self, structure: bytes, parts: Sequence[Any], buffer: Any, stream_state: Any = None, is_pinned: bool = False
    ) -> None:
        self.stream_state = stream_state
        self.is_pinned = is_pinned
        self._structure = structure
        self._parts = parts
        self._buffer = buffer

    def open(self) -> Any:
        """Return the batch. Each of its tensors owns its memory; those of a pinned buffer are views of it."""
        place = _view if self.is_pinned else _copy
        make = functools.partial(place, self._buffer if self.is_pinned else _address(self._buffer))
        parts = [part.value if type(part) is _Whole else make(*part) for part in self._parts]
        return _Opener(self._structure, parts).load()

    def pin_memory(self) -> PackedBatch:
        """Return the same batch in page-locked memory: the buffer as a whole, the other parts one by one."""
        # torch's thread may have pinned it before this package asks for it.
        if self.is_pinned:
            return self
        size = len(self._buffer)
        pinned = self._buffer
        if size:
            pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            ctypes.memmove(pinned.data_ptr(), _address(self._buffer), size)
        parts = [_Whole(pin_batch(part.value)) if type(part) is _Whole else part for part in self._parts]
        return PackedBatch(self._structure, parts, pinned, self.stream_state, is_pinned=True)


def pack(batch: Any, stream_state: Any = None) -> Any:
    """Return ``batch`` as a ``PackedBatch``, or ``batch`` itself if it has no small tensors and no state.

    Args:
        batch: The batch.
        stream_state: The state of a stream after the batch, which is sent with it.

    Raises:
        Exception: The error of pickling, if a part of the batch cannot be given to another process.
    """
    packer = _Packer()
    try:
        packer.dump(batch)
    except _TooLongError:
        packer = _Packer()
        packer.dump(_Whole(batch))
    size = packer.place()
    if not size and stream_state is None:
        return batch
    if size > PIPE:
        buffer: Any = torch.empty(size, dtype=torch.uint8, device="cpu").share_memory_()
        packer.fill(buffer.data_ptr())
    else:
        room = bytearray(size)
        packer.fill(ctypes.addressof(ctypes.c_char.from_buffer(room)) if size else 0)
        buffer = bytes(room)
    return PackedBatch(packer.structure, packer.parts, buffer, stream_state)


class _Whole:
    """A part that torch's queue sends as it is.

    ``_Packer`` wraps such parts, and ``PackedBatch`` opens them. Always: the part is pickled by the queue alone,
    because each pickle of a shared tensor that nobody reads leaks a file descriptor.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _Whole, (self.value,)


class _TooLongError(Exception):
    """A structure is so long that packing would cost more than it gains."""


class _Structure(io.BytesIO):
    """A file in memory for a structure, which refuses a long one."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LONGEST_STRUCTURE:
            raise _TooLongError
        return super().write(data)


def part_at(number: int) -> Any:
    """Stand in a structure for a part; ``_Opener`` puts the part there, and does not call this."""
    raise RuntimeError(f"part {number} of a packed batch is read by PackedBatch.open alone")


class _Packer(ForkingPickler):
    """Writes the structure of a batch, and takes its tensors and arrays out of it.

    ``pack`` makes one for each batch, and calls ``dump``, ``place`` and ``fill`` in this order. pickle keeps what it
    keeps of any batch: types, nesting, and that one object stands in two places. It does not call ``reducer_override``
    for strings, numbers and plain containers, which therefore cost next to nothing.
    """

    def __init__(self) -> None:
        self._file = _Structure()
        super().__init__(self._file, 5)
        # After ``place`` as ``PackedBatch`` takes them; before that the tensors and arrays themselves.
        self.parts: list[Any] = []
        # The tensors that have a place in the buffer, in the order of their places.
        self._small: list[Tensor] = []

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
        times = Counter(storages)
        end = 0
        for number, part in enumerate(self.parts):
            # Tensors that share their memory still do after torch has sent them.
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
    """Reads the structure of a batch, and puts its parts in their places. ``PackedBatch.open`` makes one."""

    def __init__(self, structure: bytes, parts: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._parts = parts

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Find what a pickle names."""
        if global_name == "part_at" and module_name == __name__:
            return self._parts.__getitem__
        return super().find_class(module_name, global_name)


def _storage_of(part: Any) -> Any:
    """Return a key that is the same for tensors that share their memory, and another one for each other part."""
    plain = isinstance(part, Tensor) and part.layout is torch.strided and part.device.type == "cpu"
    if not plain or part.is_nested or not part.numel():
        return id(part), "alone"
    try:
        return part.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Of a subclass of Tensor that keeps its data in other tensors.
        return id(part), "alone"


def _is_small(part: Any) -> bool:
    """Whether a part is a plain tensor up to the size that is packed, without gaps between its elements."""
    if type(part) is not Tensor or part.layout is not torch.strided or part.device.type != "cpu" or part.is_nested:
        return False
    other = part.requires_grad or part.is_quantized or part.is_conj() or part.is_neg()
    return not other and part.nbytes <= SMALL and _is_dense(part.shape, part.stride())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one span of memory without gaps or overlaps, in any order of the dimensions."""
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
    """Return a tensor with its own memory, a copy of a part of a buffer."""
    if stride is None:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    if size:
        ctypes.memmove(tensor.data_ptr(), address + begin, size)
    return tensor


def _view(buffer: Tensor, begin: int, size: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """Return a tensor that is a view of a part of a buffer."""
    if not size:
        return _copy(0, begin, size, dtype, shape, stride)
    flat = buffer[begin : begin + size].view(dtype)
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)
