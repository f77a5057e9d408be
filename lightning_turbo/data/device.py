"""``DevicePrefetcher``: the next batches are copied to the device on a side stream."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_count, check_functions, expect
from lightning_turbo._pytree import can_move, holders_in, move_batch, pin_batch, tensors_in
from lightning_turbo.data.dali.loader import DALILoader
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.prefetcher import LoadProfile, PrefetchIterator
from lightning_turbo.data.resume import Position, describe, length_of, warn_of_gaps
from lightning_turbo.errors import NoEffectWarning

__all__ = ["DevicePrefetcher", "DeviceTransfer"]

# Bytes. Below this the two events and the bookkeeping of a side stream cost as much as the copy they hide: a copy of
# 1 MiB takes about 40 us over PCIe 4.
MIN_BYTES = 1 << 20


class DeviceTransfer:
    """How batches get to one device: the move on a side stream, and a transform.

    One object, and with it one stream, serves a whole run. See ``DevicePrefetcher`` for the arguments; without
    ``ahead`` there is no side stream, and each batch is moved when it is handed out.
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
        self._stream: Any = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for any batch."""
        return self.device.type == "cpu" and self.transform is None

    @property
    def stages(self) -> list[Callable[[Any], Any]]:
        """What is done to each batch on the host, in the background."""
        return [pin_batch] if self.device.type == "cuda" else []

    def stream(self) -> Any:
        """Return the side stream, made on first use; ``None`` where the device has no streams."""
        if self._stream is None and self.ahead and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def begin(self) -> None:
        """Begin an epoch: the side stream waits for what was done on the current one."""
        stream = self.stream()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start the copy of a batch; return the batch on the device, and the event after its copy."""
        stream, tensors = self.stream(), list(tensors_in(batch))
        if stream is None or sum(tensor.nbytes for tensor in tensors) < self.min_bytes:
            return self._move(batch), None
        there = [tensor for tensor in tensors if tensor.is_cuda]
        if there:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # the loader made them there
        with torch.cuda.stream(stream):
            for tensor in there:
                tensor.record_stream(stream)  # their memory goes back to the other stream only after this one
            return self._move(batch), stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """Make the current stream wait for a batch, and transform it there.

        The transform runs when the batch's turn comes, so that random numbers that it draws come between those of the
        model's steps, as without prefetching.
        """
        batch, event = sent
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for part in holders_in(batch):
                if not isinstance(part, torch.Tensor) or part.is_cuda:
                    part.record_stream(current)  # its memory goes back to the side stream only after this one
        return batch if self.transform is None else self.transform(batch)

    def _move(self, batch: Any) -> Any:
        if not self._checked and self.device.type != "cpu" and not can_move(batch):
            warnings.warn(
                f"Batches of {type(batch).__name__} hold no tensor and no object with .to, so nothing moves to "
                f"{self.device}. Let the dataset or collate_fn return tensors, or pass device_prefetch=False.",
                NoEffectWarning,
                stacklevel=2,
            )
        self._checked = True
        return move_batch(batch, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}


class DevicePrefetcher:
    """Iterate over a loader with the next batches on the device already.

    While a step works on one batch, the next ones are copied on a second CUDA stream from pinned memory. The stream of
    the step waits for the copy, and the memory of a batch is not used again before the step is through with it. On a
    CUDA device a ``DataLoader`` without a background thread gets one: ``loader`` is then the ``PrefetchLoader`` of it.
    On a CPU device only the ``transform`` is applied.

    Args:
        loader: Any iterable of batches that can be iterated again: ``DataLoader``, ``PrefetchLoader``, a list.
        device: ``"cpu"``, or a CUDA device.
        prefetch_batches: How many batches to keep on the device beyond the one in use, 1 or more. They take memory
            there.
        min_bytes: Batches smaller than this are copied on the step's own stream, in bytes, 0 or more.
        transform: Called on each batch on the device when its turn comes; for example ``Normalize``.

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
        plain = isinstance(loader, DataLoader) and not isinstance(loader, PrefetchLoader)
        if plain and self.transfer.device.type == "cuda":
            self.loader = PrefetchLoader.of(cast("DataLoader[Any]", loader), prefetch_batches=prefetch_batches)
        self._profile = LoadProfile()
        self._live: weakref.ref[Any] | None = None
        self._position: Position | None = None
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        self._end("it was followed by another iter()")
        skip, self._skip = self._skip, 0
        epoch: Any = iter(self.loader)
        mine, self._live, self._position = self.transfer, None, None
        if mine.idle and not isinstance(epoch, PrefetchIterator) and hasattr(self.loader, "state_dict"):
            return epoch  # the loader does everything
        theirs = getattr(epoch, "transfer", None)
        if not isinstance(epoch, PrefetchIterator) or (theirs not in (None, mine) and mine.transform is not None):
            epoch, theirs = self._begin(epoch, skip), None
            self._position = epoch.position
        if theirs is None and not mine.idle:
            epoch.use(mine)
        self._live = weakref.ref(epoch)
        return epoch

    def _begin(self, source: Any, skip: int) -> PrefetchIterator:
        """Begin a pass over a loader that is not ours: in the background where batches go to a CUDA device."""
        profile = self._profile
        if self.transfer.device.type == "cpu" or isinstance(source, PrefetchIterator):
            profile = LoadProfile()
            profile.uses_rng = True  # which keeps it in this thread
        for _ in range(skip):
            next(source, None)
        own = getattr(self.loader, "state_dict", None)
        return PrefetchIterator(
            source,
            position=Position(skip),
            profile=profile,
            prefetch_batches=self.transfer.prefetch_batches,
            snapshot=None if own is None else lambda: copy.deepcopy(own()),
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while this object is being built or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch handed out; a count where the loader has no state."""
        position = self._position
        own = getattr(self.loader, "state_dict", None)
        if own is not None:
            return own() if position is None or position.state is None or position.ended else position.state
        if position is None:
            return {"consumed": self._skip, "whole": False}
        return describe(position, length_of(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` continue where ``state_dict`` was taken.

        Args:
            state_dict: What ``state_dict`` returned for a loader of the same kind. A loader without state of its own
                is run through what was consumed.

        Warns:
            TurboWarning: As ``PrefetchLoader.load_state_dict``.
        """
        self._end("its DevicePrefetcher was set to another place")
        own = getattr(self.loader, "load_state_dict", None)
        if own is not None:
            own(state_dict)
        else:
            warn_of_gaps(self.loader, state_dict)
            self._skip = 0 if state_dict.get("whole") else int(state_dict["consumed"])

    def close(self) -> None:
        """End the current iterator, and close a loader of this library. May be called twice.

        The ``close`` of another loader may be for good, and is left to its owner.
        """
        self._end("its DevicePrefetcher was closed")
        if isinstance(self.loader, (PrefetchLoader, DevicePrefetcher, DALILoader)):
            self.loader.close()

    def _end(self, because: str) -> None:
        live = self._current()
        self._live = self._position = None
        if live is not None:
            live.close(because)

    def _current(self) -> Any:
        return self._live() if self._live is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_live": None, "_position": None, "_profile": LoadProfile()}


_OWN = frozenset({"_live", "_position", "_profile", "_skip", "loader", "transfer"})


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
