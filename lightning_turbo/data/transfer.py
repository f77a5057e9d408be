"""How batches get to a device: the move, a transform, and the side stream that both run on."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lightning_turbo._pytree import can_move, holders_in, move_batch, pin_batch, tensors_in
from lightning_turbo.data.background import BackgroundIterator, check_count
from lightning_turbo.data.randomness import moved, shared_state
from lightning_turbo.data.resume import Place
from lightning_turbo.errors import NoEffectWarning

__all__ = ["MIN_BYTES", "DeviceIterator", "DeviceTransfer", "Foreground"]

# Bytes. Below this the two events and the bookkeeping of a side stream cost as much as the copy they hide: a copy of
# 1 MiB takes about 40 us over PCIe 4.
MIN_BYTES = 1 << 20


class _Entry(NamedTuple):
    """A batch under way: what there is of it, the event after its copy, and where the loader stands after it."""

    batch: Any
    finished: bool
    event: Any
    state: Any


class DeviceTransfer:
    """How batches get to one device: the move, a transform, and the side stream that both run on.

    One object, and with it one stream, serves a whole run. See ``DevicePrefetcher`` for the arguments.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        *,
        prefetch_batches: int = 2,
        min_bytes: int = MIN_BYTES,
        transform: Callable[[Any], Any] | None = None,
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        self.device = _checked_device(device)
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
            raise TypeError(f"min_bytes={min_bytes!r} is no integer; pass a number of bytes, 0 or more.")
        if min_bytes < 0:
            raise ValueError(f"min_bytes={min_bytes!r} is negative; pass a number of bytes, 0 or more.")
        for name, value in (("transform", transform), ("transfer", transfer)):
            if value is not None and not callable(value):
                raise TypeError(f"{name}={value!r} cannot be called; pass a function of the batch, or None.")
        self.min_bytes = min_bytes
        self.transform = transform
        self.transfer = transfer
        self._draws: bool | None = None if transform or transfer else False
        self._looked = False
        self._stream: Any = None
        self._stays = False  # on the side stream, which has what a transform keeps on the device

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for any batch."""
        return self.device.type == "cpu" and self.transform is None and self.transfer is None

    @property
    def stages(self) -> list[Callable[[Any], Any]]:
        """What is done to each batch on the host, in the background."""
        return [pin_batch] if self.device.type == "cuda" else []

    def iterate(self, source: Any, position: Callable[[], Any] | None = None) -> Any:
        """Return an iterator over the batches of ``source`` on the device.

        Args:
            source: Batches on the host.
            position: Called after each batch is taken from ``source``; what it returns is ``place.state``
                once that batch is handed out. By default the state of ``source``.
        """
        if self.idle and isinstance(source, BackgroundIterator) and position is None:
            return source
        for stage in self.stages:
            source.add_stage(stage)
        return DeviceIterator(source, self, position)

    def stream(self) -> Any:
        """The side stream, made on first use; ``None`` where the device has no streams."""
        if self._stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def send(self, batch: Any, state: Any) -> _Entry:
        """Start what can be done for a batch ahead of its use.

        A transform that draws random numbers waits for the batch's turn, so that its draws come between those of the
        model's steps where they would come without prefetching.
        """
        if self._draws is not False and self.transfer is not None:
            return _Entry(batch, False, None, state)
        batch, event = self._on_side(batch, self._move if self._draws is not False else self._all)
        return _Entry(batch, self._draws is False, event, state)

    def receive(self, entry: _Entry) -> Any:
        """Finish a batch and make the current stream wait for it."""
        batch, event = entry.batch, entry.event
        if not entry.finished:
            rest = self._all if self.transfer is not None else self._transform
            if self._draws is None:
                before = self._random_state()
                batch, event = self._on_side(batch, rest, event)
                after = self._random_state()
                self._draws = bool(moved(before, after)) or not torch.equal(before["device"], after["device"])
            else:
                batch, event = self._on_side(batch, rest, event)
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for part in holders_in(batch):
                if not isinstance(part, torch.Tensor) or part.is_cuda:
                    part.record_stream(current)  # its memory goes back to the side stream only after this one
        return batch

    def _on_side(self, batch: Any, work: Callable[[Any], Any], before: Any = None) -> tuple[Any, Any]:
        """Do ``work`` on the side stream if the batch is worth it, else on the current one."""
        stream = self.stream()
        if stream is None:
            return work(batch), None
        tensors = list(tensors_in(batch))
        if before is None and not self._stays and sum(t.nbytes for t in tensors) < self.min_bytes:
            return work(batch), None
        current = torch.cuda.current_stream(self.device)
        comes = not self._stays and (self.transform is not None or self.transfer is not None)
        self._stays = self._stays or comes
        with torch.cuda.stream(stream):
            there = [t for t in tensors if t.is_cuda] if before is None else []
            if there or comes:
                stream.wait_stream(current)  # the loader made them there, or small batches came before
            for tensor in there:
                tensor.record_stream(stream)  # and their memory goes back to that stream only after this one
            batch = work(batch)
            return batch, stream.record_event()

    def _move(self, batch: Any) -> Any:
        if self.transfer is not None:
            return self.transfer(batch, self.device)
        if not self._looked:
            self._looked = True
            if self.device.type != "cpu" and not can_move(batch):
                warnings.warn(
                    f"Batches of {type(batch).__name__} hold no tensor and no object with .to, so none of them gets to "
                    f"{self.device}. Let the dataset or collate_fn return tensors, give transfer=, or leave the device "
                    "prefetching out (device_prefetch=False).",
                    NoEffectWarning,
                    stacklevel=2,
                )
        return move_batch(batch, self.device)

    def _transform(self, batch: Any) -> Any:
        return batch if self.transform is None else self.transform(batch)

    def _all(self, batch: Any) -> Any:
        return self._transform(self._move(batch))

    def _random_state(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {**shared_state(), "device": torch.cuda.get_rng_state(self.device) if cuda else torch.empty(0)}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None, "_stays": False}


class DeviceIterator(Iterator[Any]):
    """The batches of a ``BackgroundIterator``, the next of them on the device already."""

    def __init__(self, source: Any, transfer: DeviceTransfer, position: Callable[[], Any] | None) -> None:
        self.source = source
        self.transfer = transfer
        self.place = Place(source.place.consumed, source.place.state)
        self._position = position
        self._sent: deque[_Entry | BaseException | None] = deque()  # None: the end
        stream = transfer.stream()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(transfer.device))

    def __iter__(self) -> DeviceIterator:
        return self

    def __next__(self) -> Any:
        if self.place.ended:
            raise StopIteration
        if not self._sent:
            self._send()
        entry = self._sent.popleft()
        if entry is None:
            self.place.ended = True
            raise StopIteration
        if isinstance(entry, BaseException):
            self.place.reached = self.source.place.reached
            try:
                raise entry
            finally:
                del entry
        self.place.reached = entry.state  # also if the transform raises
        batch = self.transfer.receive(entry)
        self.place.hand_out(entry.state)
        if self.transfer.stream() is not None:
            while len(self._sent) < self.transfer.prefetch_batches and self.source.ready() and not self._over():
                self._send()
        return batch

    @property
    def ended(self) -> bool:
        """Whether the end of the source was handed out."""
        return self.place.ended

    def _over(self) -> bool:
        return bool(self._sent) and not isinstance(self._sent[-1], _Entry)

    def _send(self) -> None:
        """Take a batch from the source, waiting for it if need be; its end or an error is kept for its turn."""
        try:
            batch = next(self.source)
            state = self._position() if self._position is not None else self.source.place.state
            self._sent.append(self.transfer.send(batch, state))
        except StopIteration:
            self._sent.append(None)  # the exception knows its callers, who know this iterator
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._sent.append(error)

    def ready(self) -> bool:
        """Tell whether the next batch can be had without waiting for the loader."""
        return bool(self._sent) or self.source.ready()

    def park(self) -> bool:
        """End the thread behind and keep what is ready, see ``BackgroundIterator.park``."""
        return self.source.park()

    def start(self) -> bool:
        """Let the thread behind begin, see ``BackgroundIterator.start``."""
        return self.source.start()

    def finish(self) -> None:
        """Take the end for handed out."""
        self.place.ended = True
        self._sent.clear()
        self.source.finish()

    def close(self, because: str = "it was closed") -> None:
        """End the thread behind and let go of the batches on the device."""
        self._sent.clear()
        self.source.close(because)


class Foreground(Iterator[Any]):
    """An iterator that works in the asking thread, with the face of a ``BackgroundIterator``."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.place = Place()

    def __next__(self) -> Any:
        item = next(self.source)
        self.place.consumed += 1
        return item

    def add_stage(self, stage: Callable[[Any], Any]) -> None:
        """There is no background to run it in."""

    def ready(self) -> bool:
        """Nothing is ever ready ahead."""
        return False

    def park(self) -> bool:
        """There is no thread to end."""
        return True

    def close(self, because: str = "") -> None:
        """Let go of the source."""
        self.source = iter(())


def _checked_device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device that torch knows; pass 'cpu', 'cuda' or 'cuda:N'.") from error
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
