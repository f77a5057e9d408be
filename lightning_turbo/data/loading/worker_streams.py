"""A stream that keeps a state of its own, in worker processes: each tells its place, and goes on from there."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_turbo._random import generators_in, set_shared_state, shared_state
from lightning_turbo.data.loading import streams
from lightning_turbo.data.loading.position import Position

__all__ = ["PlacedStream", "RoundsPosition", "WorkerPlaces"]


class PlacedStream(IterableDataset[Any]):
    """Stands for a stream where torch opens it in a worker process, so that ``WorkerPlaces`` knows of each epoch."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        # Each process sets its own one: this object may reach it by another way than what is told goes back.
        self.places: WorkerPlaces | None = None

    def __repr__(self) -> str:
        return repr(self.stream)

    def __iter__(self) -> Iterator[Any]:
        assert self.places is not None
        return self.places.begin(self.stream)


class WorkerPlaces:
    """Tells in a worker process where its stream stands, and has the first epoch go on from such a place.

    A loader makes one when processes start, and each of them has a copy. Always: what is told is the state after the
    batch that it travels with. The numbers of batches after which a process tells are multiples of a power of two, so
    that they meet those of the other processes, whatever each takes for a state.

    Args:
        states: A place for each process to go on from, as they were told; none to begin.
        batch_size: Samples of a batch; ``None`` where each sample is one.
        init_fn: The ``worker_init_fn`` of the loader.
    """

    def __init__(self, states: Sequence[bytes], batch_size: int | None, init_fn: Callable[[int], None] | None) -> None:
        self._states, self._batch_size, self._init_fn = states, batch_size, init_fn
        self._goes_on = bool(states)
        self._stream: Any = None
        self._held: list[Any] = []  # the random generators in the stream
        self._worker = 0
        self._number = 0  # of batches in this epoch
        self._every = 1
        self._began = self._asking = 0.0  # by time.perf_counter, and seconds of this epoch

    def start(self, worker_id: int) -> None:
        """Take the place of ``worker_init_fn``: the dataset of the process is the stream for whoever looks it up."""
        info: Any = get_worker_info()
        info.dataset.places = self
        # torch lets nobody set it, by the means of its class.
        object.__setattr__(info, "dataset", info.dataset.stream)
        self._worker = worker_id
        if self._init_fn is not None:
            self._init_fn(worker_id)

    def begin(self, stream: Any) -> Iterator[Any]:
        """Open the stream for an epoch, the first one at the place that was given."""
        self._number, self._began, self._asking = 0, time.perf_counter(), 0.0
        given, self._states = self._states, ()
        place = pickle.loads(given[self._worker]) if given else None
        if place is not None:
            stream.load_state_dict(place[0])
        elif self._goes_on:
            streams.take_back(stream)
        samples = iter(stream)
        # What a stream makes when it is loaded or opened is among them.
        self._stream, self._held = stream, generators_in(stream)
        if place is not None:
            set_shared_state(place[1], self._held)
        return samples

    def tell(self, samples: Any) -> tuple[int, int, bytes] | None:
        """Return the process, its number of batches and its place after them; ``None`` if it is not asked now.

        Args:
            samples: Those of the batch. Where there are fewer than in others the stream has ended, and may be at the
                beginning of its next pass.
        """
        self._number += 1
        if self._number % self._every or (self._batch_size is not None and len(samples) < self._batch_size):
            return None
        began = time.perf_counter()
        place = pickle.dumps((self._stream.state_dict(), shared_state(self._held)))
        seconds = time.perf_counter() - began
        self._every = self._interval(seconds, began - self._began - self._asking)
        self._asking += seconds
        return self._worker, self._number, place

    def _interval(self, asking: float, loading: float) -> int:
        """Return after how many batches to ask again, so that it takes a small part of the time, by their seconds."""
        wanted = math.ceil(streams.LOADING_TO_ASKING * asking * self._number / max(loading, 1e-6))
        return 1 << max(0, wanted - 1).bit_length()


class RoundsPosition(Position):
    """The position in a stream that worker processes read, which each tell their place with some of their batches.

    torch takes a batch of each process in turn, and begins with the first one after a start. So a run can go on where
    each has given as many batches as the others: after a round. Always: ``states`` are places that all processes told
    after the same round. Where one of them ends before the others, or has lost count by an error, no round is whole any
    more, and the last one stays.

    Args:
        consumed: Batches of the epoch that were used before this iterator.
        workers: How many processes there are.
    """

    def __init__(self, consumed: int, workers: int) -> None:
        super().__init__(consumed)
        self._workers = workers
        self._first = 0  # how many batches were used when the processes began
        self._told: list[bytes] = []  # in the latest round
        self._round = 0

    def start_from(self, consumed: int, places: list[bytes]) -> None:
        """Count from a place that the processes go on from."""
        self._first = consumed
        self.states = [(consumed, places)]

    def keep(self, state: tuple[int, int, bytes]) -> None:
        """Keep what a process told, once all of them did so in this round."""
        worker, number, place = state
        before, turn = divmod(self.consumed - self._first - 1, self._workers)
        if (worker, number) != (turn, before + 1):
            return
        if number != self._round:
            self._round, self._told = number, []
        self._told.append(place)
        if len(self._told) == self._workers:
            super().keep(self._told)
