"""``Epoch``: one pass over a loader, which owns the thread, the count of batches and the copies to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_turbo.data.position import Position
from lightning_turbo.data.prefetcher import BackgroundIterator, Record

__all__ = ["Epoch"]


class Epoch(BackgroundIterator):
    """One pass over a loader, whose batches ``position`` counts; ``settings`` are those of ``BackgroundIterator``.

    A batch goes from the source through the thread's queue and, where there is a ``transfer``, over to the device; it
    counts as used when it is handed out.
    """

    def __init__(self, source: Iterator[Any], position: Position, **settings: Any) -> None:
        super().__init__(source, **settings)
        self.position = position
        self.transfer: Any = None
        self._copied: deque[Record] = deque()  # on their way to the device

    def use(self, transfer: Any) -> None:
        """Copy the batches to a device as they are handed out. Before the first of them."""
        self.transfer = transfer
        for stage in transfer.stages:
            self.add_stage(stage)
        transfer.begin()

    def _next_record(self) -> Record:
        if self.transfer is None:
            return self._take()
        if not self._copied:
            self._send()
        return self._copied.popleft().then(self.transfer.receive)

    def hand_out(self, record: Record) -> Any:
        """Count a batch and return it, or raise the error or the end."""
        position = self.position
        position.ended = record.end
        if record.error is not None:
            position.reached = record.state
        elif not record.end:
            position.advance(record.state)
            while self._is_room():
                self._send()
        return super().hand_out(record)

    def _is_room(self) -> bool:
        """Whether one more batch can be sent to the device without waiting for it."""
        copied, transfer = self._copied, self.transfer
        if transfer is None or transfer.stream() is None or len(copied) >= transfer.prefetch_batches:
            return False
        return not (copied and copied[-1].last) and super().ready()

    def _send(self) -> None:
        """Take a batch, waiting for it if need be, and start its copy; an error or the end is kept for its turn."""
        self._copied.append(self._take().then(self.transfer.send, Exception))

    def ready(self) -> bool:
        """Tell whether the next batch can be had without waiting for the loader."""
        return bool(self._copied) or super().ready()

    def finish(self) -> None:
        """Take the end for handed out."""
        self.position.ended = self.ended = True
        self.close()

    def close(self, because: str = "it was closed") -> None:
        """End the thread and let go of what is ready, on the device too. May be called twice."""
        self._copied.clear()
        super().close(because)
