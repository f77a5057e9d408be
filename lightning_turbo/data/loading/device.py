"""``DeviceTransfer``: copies of the next batches on a side stream. ``DevicePrefetcher``: the same in plain loops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_count, check_functions, expect
from lightning_turbo._pytree import movable_in, move_batch
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from lightning_turbo.errors import NoEffectWarning

__all__ = ["DevicePrefetcher", "DeviceTransfer"]

# Bytes. Below this the two events and the bookkeeping of a side stream cost as much as the copy they hide: a copy of
# 1 MiB takes about 40 us over PCIe 4.
MIN_BYTES = 1 << 20


class DeviceTransfer:
    """How the batches of a loader get to one device: the copy on a side stream, and a transform.

    An iterator of a ``PrefetchLoader(transfer=...)`` calls it: ``send`` for up to ``prefetch_batches`` batches beyond
    the one in use, and ``receive`` when the batch is returned. Batches are pinned by torch, where they are loaded. It
    has no life of its own: all transfers to one device share one side stream, whatever loaders are made in a run.
    Always: a copy waits for the steps that were begun before it, and a batch that is returned for its copy. It is for
    the stream that is current then; who uses it on another calls ``record_stream``, as for any tensor.

    Args:
        device: ``"cpu"``, or a CUDA device.
        prefetch_batches: How many batches to keep on the device beyond the one in use, 1 or more.
        min_bytes: Batches smaller than this are copied on the step's own stream, in bytes, 0 or more; one that holds
            objects with ``.to`` or sparse tensors never counts as smaller.
        transform: Called on each batch on the device when it is returned.
        ahead: ``False`` for no side stream: each batch is moved when it is returned.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or the device is not one that can be used.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        *,
        prefetch_batches: int = 2,
        min_bytes: int = MIN_BYTES,
        transform: Callable[[Any], Any] | None = None,
        ahead: bool = True,
    ) -> None:
        self.device = _check_device(device)
        self.ahead = ahead
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        check_functions(transform=transform)
        self.min_bytes = check_count("min_bytes", min_bytes, 0)
        self.transform = transform
        self._checked = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for any batch."""
        return self.device.type == "cpu" and self.transform is None

    def stream(self) -> Any:
        """Return the side stream beside the current one; ``None`` where nothing is copied ahead."""
        if not self.ahead or self.device.type != "cuda":
            return None
        return _side_stream(self.device, torch.cuda.current_stream(self.device))

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start the copy of a batch; return the batch on the device, and the event after its copy.

        What the loader made on the device is not copied, and its memory is not the side stream's.
        """
        stream, parts = self.stream(), movable_in(batch)
        self._tell_if_nothing_moves(batch, parts)
        if stream is None or _is_below(parts, self.min_bytes) or any(map(_is_on_cuda, parts)):
            return move_batch(batch, self.device), None
        # The memory of a batch goes back to the side stream when the caller lets go of it, be it steps later, and the
        # next copy may take it at once. So a copy waits for all steps that were begun before it, which are those that
        # read such a batch, and runs beside the one that follows. The allocator need not watch any step, so that a host
        # that is far ahead of the device holds no memory for it.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            return move_batch(batch, self.device), stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """Make the current stream wait for a batch, and transform it there.

        The transform runs when the batch is returned, so that random numbers that it draws come between those of the
        model's steps, as without prefetching.
        """
        batch, event = sent
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return batch if self.transform is None else self.transform(batch)

    def _tell_if_nothing_moves(self, batch: Any, parts: list[Any]) -> None:
        if not parts and not self._checked and self.device.type != "cpu":
            warnings.warn(
                f"Batches of {type(batch).__name__} hold no tensor and no object with .to, so nothing moves to "
                f"{self.device}. Let the dataset or collate_fn return tensors, or pass device_prefetch=False.",
                NoEffectWarning,
                stacklevel=2,
            )
        self._checked = True


def _is_below(parts: list[Any], size: int) -> bool:
    """Whether the parts of a batch are known to have fewer bytes; an object and a sparse tensor do not say theirs."""
    known = all(isinstance(part, torch.Tensor) and part.layout is torch.strided for part in parts)
    return known and sum(part.nbytes for part in parts) < size


def _is_on_cuda(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.is_cuda


@functools.cache
def _side_stream(device: torch.device, beside: Any) -> Any:
    """Return the stream for copies beside the steps of another, the same for all loaders."""
    return torch.cuda.Stream(device)


class DevicePrefetcher:
    """Iterate over batches with the next ones on the device already, in a plain loop.

    While a step works on one batch, the next ones are copied on a second CUDA stream from pinned memory. The stream of
    the step waits for the copy, and a copy for the steps begun before it, as it may take the memory of their batches.
    On a CPU device only the ``transform`` is applied. In a Trainer use ``Prefetch`` or ``strategy="turbo"``.

    Each ``iter()`` begins an epoch of ``loader``, which the caller keeps: samplers, states, and ``close()`` are the
    loader's. For a CUDA device, a ``DataLoader`` is iterated by a ``PrefetchLoader`` like it, which is the attribute
    ``loader`` then; other iterables load in a background thread of their own.

    Args:
        loader: Any iterable of batches that can be iterated again: ``DataLoader``, ``PrefetchLoader``, a list.
        device: ``"cpu"``, or a CUDA device.
        prefetch_batches: How many batches to keep on the device beyond the one in use, 1 or more. They take memory
            there.
        min_bytes: Batches smaller than this are copied on the step's own stream, in bytes, 0 or more.
        transform: Called on each batch on the device when it is returned; for example ``Normalize``.

    Raises:
        TypeError: If ``loader`` cannot be iterated, or an argument has a wrong type.
        ValueError: If an argument is out of range, or the device is not one that can be used.

    Example:
        >>> batches = [torch.ones(2), torch.zeros(2)]
        >>> [b.tolist() for b in DevicePrefetcher(batches, "cpu", transform=lambda b: b + 1)]
        [[2.0, 2.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        *,
        prefetch_batches: int = 2,
        min_bytes: int = MIN_BYTES,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        expect(iterable, "loader", loader, "an iterable of batches such as a DataLoader", TypeError)
        self.transfer = DeviceTransfer(
            device, prefetch_batches=prefetch_batches, min_bytes=min_bytes, transform=transform
        )
        self.loader: Any = loader
        if isinstance(loader, DataLoader) and not isinstance(loader, PrefetchLoader) and not self._is_on_cpu():
            self.loader = PrefetchLoader.of(loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self.transfer.idle:
            return batches
        if isinstance(batches, PrefetchIterator) and batches.transfer is None:
            batches.use(self.transfer)
            return batches
        # A loader with a transfer of its own copies ahead already.
        if self._is_on_cpu() or isinstance(batches, PrefetchIterator):
            return map(self._move, batches)
        return PrefetchIterator(batches, transfer=self.transfer)

    def _is_on_cpu(self) -> bool:
        return self.transfer.device.type == "cpu"

    def _move(self, batch: Any) -> Any:
        return self.transfer.receive(self.transfer.send(batch))

    def __len__(self) -> int:
        return len(self.loader)


def _check_device(device: Any) -> torch.device:
    what = "'cpu', 'cuda' or 'cuda:N'"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected {what}, got {device!r}.") from error
    expect(found.type in ("cpu", "cuda"), "device", device, what)
    if found.type == "cpu":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    expect((found.index or 0) < count, "device", device, f"'cpu' or one of the {count} CUDA devices that torch sees")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
