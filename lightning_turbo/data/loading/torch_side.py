"""What this package needs of torch's private parts: worker processes, fetchers, and the way of small tensors."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

__all__ = ["SmallTensors", "end_workers", "is_timeout", "length_of", "preload", "start_method", "stream_has_ended"]

# Bytes. To copy a tensor up to this size costs less than a file descriptor and a segment of shared memory of its own.
SMALL = 64 << 10


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any. May be called twice."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


def stream_has_ended(source: Any) -> bool:
    """Whether torch's iterator has met the end of a stream in this process, with its last batch or after it."""
    return bool(getattr(getattr(source, "_dataset_fetcher", None), "ended", False))


def is_timeout(error: BaseException) -> bool:
    """Whether an error is torch's of a batch that did not come in time."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out after")


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError, AttributeError):
        return None


def start_method(loader: Any = None) -> str:
    """Return how the worker processes of a loader start: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
    return context.get_start_method()


def preload(loader: Any) -> None:
    """Let the server of ``forkserver`` import torch once, and not each process for itself.

    It has no effect on a server that runs already, which keeps what it has.
    """
    if start_method(loader) == "forkserver":
        from multiprocessing import forkserver

        known = list(getattr(forkserver._forkserver, "_preload_modules", ()))
        if "torch" not in known:
            main = ["__main__"] if not known and "__main__" in sys.modules else []
            multiprocessing.set_forkserver_preload([*known, *main, "torch"])


class SmallTensors:
    """The ``worker_init_fn`` of a loader's processes: small tensors then cross to the training process as bytes.

    torch sends each tensor through a segment of shared memory of its own, which takes longer than the copy of a small
    one. In a process that has called this, a tensor up to 64 KiB is pickled with its data, wherever in a batch it is,
    and unpickled as a tensor, so that torch's own thread pins it. Larger ones, those with gaps, views, and other kinds
    of tensors go as torch sends them. Always: the batch that arrives equals the one that torch sends; a small tensor in
    shared memory, in which torch's default_collate makes its batches, arrives as a copy.

    Args:
        then: The loader's own ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin in a worker process."""
        ForkingPickler.register(Tensor, _reduce)
        if self._then is not None:
            self._then(worker)


def _reduce(tensor: Tensor) -> Any:
    if not _is_small(tensor):
        return reduce_tensor(tensor)
    plain = tensor.detach()
    if plain.dtype in _WITHOUT_NUMPY:
        return _viewed, (plain.view(_WITHOUT_NUMPY[plain.dtype]).numpy(), plain.dtype)
    return torch.from_numpy, (plain.numpy(),)


# What NumPy has no type for crosses as integers of the same size.
_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}


def _viewed(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).view(dtype)


_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.bfloat16,
}  # fmt: skip


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one that owns all of a small memory, by itself."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False  # some of these do not say their size
    if tensor.dtype not in _DTYPES or tensor.nbytes > SMALL or not tensor.numel():
        return False
    is_bare = tensor.device.type == "cpu" and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    return is_bare and tensor.is_contiguous() and _owns_its_memory(tensor)


def _owns_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor has all of a memory, and no other tensor of this process has a part of it."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) == 2  # with ``storage``
