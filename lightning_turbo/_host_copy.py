"""A copy of a checkpoint in the host's memory, which training cannot change."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

__all__ = ["HostCopier"]

Buffers = dict[tuple[int, bool], list[torch.Tensor]]  # by size in bytes, and whether they are pinned


class HostCopier:
    """Makes copies one after the other, in memory that each gives back for the next one."""

    def __init__(self) -> None:
        self._buffers: Buffers = {}

    @contextmanager
    def _lent(self, copies: list[torch.Tensor], events: list[Any], pickled: bytes) -> Iterator[Any]:
        try:
            for event in events:
                event.synchronize()
            yield _Unpickler(io.BytesIO(pickled), copies).load()
        finally:
            # What this copy did not need is let go, so that the memory is that of the last checkpoint alone.
            buffers: Buffers = {}
            for copy in copies:
                buffers.setdefault((copy.numel(), copy.is_pinned()), []).append(copy)
            self._buffers = buffers

    def copy(self, value: Any) -> AbstractContextManager[Any]:
        """Return a block that is given a copy of what pickle takes, and must not keep it.

        Tensors of CUDA devices are copied in the order of the current stream: no work that is given to it afterwards
        changes the copy, and the host waits for nothing. The block begins when they have arrived, in any thread.
        """
        # Nobody else gets this memory until the block ends.
        free = self._buffers
        self._buffers = {}
        stream = io.BytesIO()
        pickler = _Pickler(stream, free)
        pickler.dump(value)
        devices = {storage.device for storage in pickler.storages if storage.device.type == "cuda"}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return self._lent(pickler.copies, events, stream.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of tensors, as ``torch.save`` does: those that share it still do afterwards."""

    def __init__(self, file: Any, free: Buffers) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._free = free
        self.storages: list[UntypedStorage] = []  # kept, lest another one gets the address of one that is gone
        self.copies: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # by the address of the storage

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        if not isinstance(obj, (TypedStorage, UntypedStorage)):
            return None
        storage: Any = obj if isinstance(obj, UntypedStorage) else obj._untyped_storage
        number = self._numbers.setdefault(storage._cdata, len(self.copies))
        if number == len(self.copies):
            self.storages.append(storage)
            self.copies.append(self._copy(storage))
        return number, obj.dtype if isinstance(obj, TypedStorage) else None

    def _copy(self, storage: UntypedStorage) -> torch.Tensor:
        size = storage.nbytes()
        pinned = storage.device.type == "cuda"
        kept = self._free.get((size, pinned))
        buffer = kept.pop() if kept else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        # As bytes, because tensors of several dtypes and shapes may lie on one storage.
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return buffer.copy_(content, non_blocking=pinned)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, copies: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        storage = self._copies[number].untyped_storage()
        return storage if dtype is None else TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
