"""A copy of a checkpoint in host memory, which training cannot change."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

__all__ = ["HostCopier"]

Buffers = dict[tuple[int, bool], list[torch.Tensor]]  # by size in bytes and whether they are pinned


class HostCopier:
    """Makes one copy at a time and reuses the memory of the last one."""

    def __init__(self) -> None:
        self._buffers: Buffers = {}

    @contextmanager
    def _lent(self, copies: list[torch.Tensor], events: list[Any], pickled: bytes) -> Iterator[Any]:
        try:
            for event in events:
                event.synchronize()
            yield _Unpickler(io.BytesIO(pickled), copies).load()
        finally:
            # Buffers that this copy did not use are freed, so that no more memory is held than the last checkpoint
            # needed.
            buffers: Buffers = {}
            for copy in copies:
                buffers.setdefault((copy.numel(), copy.is_pinned()), []).append(copy)
            self._buffers = buffers

    def copy(self, value: Any) -> AbstractContextManager[Any]:
        """Return a context manager that yields a copy of a picklable value; the copy must not outlive the block.

        CUDA tensors are copied in stream order: work queued later on the current stream does not change the copy, and
        the host does not wait. Entering the context waits for the copies, in any thread.
        """
        # No other copy gets these buffers until the block ends.
        free = self._buffers
        self._buffers = {}
        stream = io.BytesIO()
        pickler = _Pickler(stream, free)
        pickler.dump(value)
        devices = {storage.device for storage in pickler.storages if storage.device.type == "cuda"}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return self._lent(pickler.copies, events, stream.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles everything except tensor memory, like ``torch.save``: tensors that share a storage still share it."""

    def __init__(self, file: Any, free: Buffers) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._free = free
        self.storages: list[UntypedStorage] = []  # kept alive, so that no address is reused
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
        # Copied as bytes, because tensors of several dtypes and shapes may share one storage.
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return buffer.copy_(content, non_blocking=pinned)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, copies: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        storage = self._copies[number].untyped_storage()
        # As torch.load does: tensors of newer dtypes, such as float8, name no dtype here and expect bytes.
        return TypedStorage(wrap_storage=storage, dtype=dtype or torch.uint8, _internal=True)
