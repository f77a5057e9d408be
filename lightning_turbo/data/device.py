"""``DevicePrefetcher``: the next batches are copied to the device on a side stream."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_functions
from lightning_turbo._pytree import can_move, holders_in, move_batch, pin_batch, tensors_in
from lightning_turbo._random import changed_generators, shared_state
from lightning_turbo.data.epoch import Epoch
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.position import Position, length_of, warn_of_gaps
from lightning_turbo.data.prefetcher import LoadProfile, check_count
from lightning_turbo.errors import NoEffectWarning

__all__ = ["DevicePrefetcher", "DeviceTransfer"]

# Bytes. Below this the two events and the bookkeeping of a side stream cost as much as the copy they hide: a copy of
# 1 MiB takes about 40 us over PCIe 4.
MIN_BYTES = 1 << 20


class _Sent(NamedTuple):
    """A batch under way: what there is of it, whether it is finished, and the event after its copy."""

    batch: Any
    finished: bool
    event: Any


class DeviceTransfer:
    """How batches get to one device: the move, a transform, and the side stream that both run on.

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
        transfer: Callable[[Any, torch.device], Any] | None = None,
        ahead: bool = True,
    ) -> None:
        self.device = _check_device(device)
        self.ahead = ahead
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        check_functions(transform=transform, transfer=transfer)
        self.min_bytes = check_count("min_bytes", min_bytes, 0)
        self.transform = transform
        self.transfer = transfer
        self._draws: bool | None = None if transform or transfer else False  # None: not known yet
        self._checked = False
        self._stream: Any = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for any batch."""
        return self.device.type == "cpu" and self._moves_only

    @property
    def _moves_only(self) -> bool:
        return self.transform is None and self.transfer is None

    @property
    def stages(self) -> list[Callable[[Any], Any]]:
        """What is done to each batch on the host, in the background."""
        return [pin_batch] if self.device.type == "cuda" else []

    def stream(self) -> Any:
        """The side stream, made on first use; ``None`` where the device has no streams."""
        if self._stream is None and self.ahead and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def begin(self) -> None:
        """Begin an epoch: the side stream waits for what was done on the current one."""
        stream = self.stream()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def send(self, batch: Any) -> _Sent:
        """Start what can be done for a batch ahead of its use.

        A transform that draws random numbers waits for the batch's turn, so that its draws come between those of the
        model's steps where they would come without prefetching.
        """
        if self._draws is not False and self.transfer is not None:
            return _Sent(batch, False, None)
        batch, event = self._on_side(batch, self._move if self._draws is not False else self._all)
        return _Sent(batch, self._draws is False, event)

    def receive(self, sent: _Sent) -> Any:
        """Finish a batch and make the current stream wait for it."""
        batch, event = sent.batch, sent.event
        if not sent.finished:
            rest = self._all if self.transfer is not None else self._transform
            before = self._random_state() if self._draws is None else {}
            batch, event = self._on_side(batch, rest, event)
            if self._draws is None:
                after = self._random_state()
                self._draws = bool(changed_generators(before, after)) or not torch.equal(
                    before["device"], after["device"]
                )
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for part in holders_in(batch):
                if not isinstance(part, torch.Tensor) or part.is_cuda:
                    part.record_stream(current)  # its memory goes back to the side stream only after this one
        return batch

    def _on_side(self, batch: Any, work: Callable[[Any], Any], before: Any = None) -> tuple[Any, Any]:
        """Do ``work`` on the side stream if the batch is worth it, else on the current one.

        A transform or transfer may keep something on the device, and is called on the side stream for every batch.
        """
        stream, tensors = self.stream(), list(tensors_in(batch))
        if stream is None or (self._moves_only and sum(t.nbytes for t in tensors) < self.min_bytes):
            return work(batch), None
        there = [t for t in tensors if t.is_cuda] if before is None else []
        if there:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # the loader made them there
        with torch.cuda.stream(stream):
            for tensor in there:
                tensor.record_stream(stream)  # their memory goes back to the other stream only after this one
            return work(batch), stream.record_event()

    def _move(self, batch: Any) -> Any:
        if self.transfer is not None:
            return self.transfer(batch, self.device)
        if not self._checked and self.device.type != "cpu" and not can_move(batch):
            warnings.warn(
                f"Batches of {type(batch).__name__} hold no tensor and no object with .to, so none of them gets to "
                f"{self.device}. Let the dataset or collate_fn return tensors, pass transfer=, or leave the device "
                "prefetching out (device_prefetch=False).",
                NoEffectWarning,
                stacklevel=2,
            )
        self._checked = True
        return move_batch(batch, self.device)

    def _transform(self, batch: Any) -> Any:
        return batch if self.transform is None else self.transform(batch)

    def _all(self, batch: Any) -> Any:
        return self._transform(self._move(batch))

    def _random_state(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {**shared_state(), "device": torch.cuda.get_rng_state(self.device) if cuda else torch.empty(0)}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}


class DevicePrefetcher:
    """Iterate over a loader with the next batches on the device already.

    While a step works on one batch, the next ones are copied on a second CUDA stream from pinned memory. The stream
    of the step waits for the copy, and the memory of a batch is not used again before the step is through with it.
    On a CUDA device a ``DataLoader`` without a background thread gets one: ``loader`` is then the ``PrefetchLoader``
    of it. On a CPU device this object hands out the loader's batches and does nothing else.

    Args:
        loader: Any iterable of batches that can be iterated again: ``DataLoader``, ``PrefetchLoader``, a list.
        device: ``"cpu"``, or a CUDA device.
        prefetch_batches: How many batches to keep on the device beyond the one in use, 1 or more. They take memory
            there.
        min_bytes: Batches smaller than this are copied on the step's own stream, in bytes, 0 or more. Not with a
            ``transform`` or ``transfer``, which runs on the side stream for every batch.
        transform: Called on each batch on the device, on the side stream; for example ``Normalize``. On a CPU device
            it is called too.
        transfer: Called as ``transfer(batch, device)`` in place of the built-in move, on the side stream.

    Raises:
        TypeError: If ``loader`` cannot be iterated, or an argument has a wrong type.
        ValueError: If an argument is out of range, or the device is not one that can be used.

    Note:
        ``transform`` and ``transfer`` run in the thread that asks for batches. One that draws random numbers runs
        when its batch's turn comes, so that results are those of a loop without prefetching.

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
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(
                f"DevicePrefetcher expected an iterable of batches as loader, got {loader!r}, which has no __iter__. "
                "Pass a DataLoader or another iterable of batches."
            )
        self.transfer = DeviceTransfer(
            device, prefetch_batches=prefetch_batches, min_bytes=min_bytes, transform=transform, transfer=transfer
        )
        self.loader: Iterable[Any] = loader
        if isinstance(loader, DataLoader) and self.transfer.device.type == "cuda":
            own = isinstance(loader, PrefetchLoader)
            self.loader = loader if own else PrefetchLoader.of(loader, prefetch_batches=prefetch_batches)
        self._profile = LoadProfile()
        self._live: weakref.ref[Any] | None = None
        self._position: Position | None = None
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        live = self._current()
        if live is not None:
            live.park()
        skip, self._skip = self._skip, 0
        source: Any = iter(self.loader)
        mine, theirs = self.transfer, source.transfer if isinstance(source, Epoch) else None
        self._live = self._position = None
        if isinstance(source, Epoch) and (theirs is None or theirs is mine or mine._moves_only):
            # The loader counts its batches as they are handed out, and knows where it is.
            if theirs is None and not mine.idle:
                source.use(mine)
            self._live = weakref.ref(source)
            return source
        if mine.idle and hasattr(self.loader, "state_dict"):
            return source  # the loader does it all
        epoch = self._epoch_of(source, skip)
        self._position, self._live = epoch.position, weakref.ref(epoch)
        return epoch

    def _epoch_of(self, source: Any, skip: int) -> Epoch:
        """Return a pass over a loader that is not ours: in the background where batches go to a CUDA device."""
        profile = self._profile
        if self.transfer.device.type == "cpu" or isinstance(source, Epoch):
            profile = LoadProfile()
            profile.draws = True  # which keeps it in this thread
        state_dict = getattr(self.loader, "state_dict", None)
        epoch = Epoch(
            source, Position(skip), skip=skip, profile=profile, prefetch_batches=self.transfer.prefetch_batches,
            snapshot=None if state_dict is None else lambda: copy.deepcopy(state_dict()),
        )  # fmt: skip
        if not self.transfer.idle:
            epoch.use(self.transfer)
        return epoch

    def start_next_epoch(self) -> bool:
        """Begin to load the next epoch, see ``PrefetchLoader.start_next_epoch``; other loaders cannot.

        Returns:
            Whether it was begun.
        """
        start = getattr(self.loader, "start_next_epoch", None)
        if start is None:
            return False
        begun = start() if isinstance(self.loader, DevicePrefetcher) or self.transfer.idle else start(self.transfer)
        if begun:
            self._position = None  # from here on the loader knows where it is
        return begun

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType] - a TypeError where the loader has no length

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while this object is being built or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self if name in _OWN else self.loader
        object.__setattr__(self, name, value) if target is self else setattr(target, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset the number of the epoch, where they want to know it.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        owners = [self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        owners = [*owners, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)]
        for owner in {id(owner): owner for owner in owners}.values():
            tell = getattr(owner, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch handed out; a count where the loader has no state."""
        position = self._position
        own = getattr(self.loader, "state_dict", None)
        if own is not None:
            return own() if position is None or position.state is None or position.ended else position.state
        if position is None:
            return {"consumed": self._skip, "whole": False}
        length = length_of(self)
        return {"consumed": position.consumed, "whole": position.ended or position.consumed == length, "length": length}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` go on where ``state_dict`` was taken.

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

        The ``close`` of another loader may be for good, and is left to whoever made it.
        """
        self._end("its DevicePrefetcher was closed")
        close: Any = getattr(self.loader, "close", None)
        if close is not None and any(
            kind.__module__.startswith("lightning_turbo.") for kind in type(self.loader).mro()
        ):
            close()

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
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r} is not a device that torch knows; pass 'cpu', 'cuda' or 'cuda:N'."
        ) from error
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise ValueError(f"device={device!r} has no streams that are used here; pass 'cpu', 'cuda' or 'cuda:N'.")
    if found.index is None and torch.cuda.is_available():
        found = torch.device("cuda", torch.cuda.current_device())
    if not torch.cuda.is_available() or found.index >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Pass one that is there, or 'cpu'."
        )
    return found
