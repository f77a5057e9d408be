"""Streams with a state in worker processes: each process saves the state of its stream, and resumes from it."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_turbo._random import generators_in, set_shared_state
from lightning_turbo.data.loading import streams
from lightning_turbo.data.loading.position import Position

__all__ = ["PlacedStream", "RoundsPosition", "WorkerPlaces"]


class PlacedStream(IterableDataset[Any]):
    """Takes the place of a stream on its way to the worker processes, so that ``WorkerPlaces`` knows of each epoch.

    A loader makes one when it starts processes, and each of them has a copy until it ends. There it is what torch calls
    ``iter`` on; everybody else finds the stream. Always: it has its ``places`` before it is opened.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        # Each process sets its own, because this object may be sent to the process in another way than the states back.
        self.places: WorkerPlaces | None = None

    def __repr__(self) -> str:
        return repr(self.stream)

    def __iter__(self) -> Iterator[Any]:
        assert self.places is not None
        return self.places.begin(self.stream)


class WorkerPlaces:
    """Returns the state of the stream in a worker process, and resumes its first epoch from such a state.

    A loader makes one when it starts processes, and each of them has a copy until it ends: torch calls ``start`` once,
    ``PlacedStream`` calls ``begin`` at each epoch, and ``HandOver`` calls ``state_after`` after each batch. Always: the
    state is that after the batch that it is sent with. It is returned after each batch whose number is a multiple of a
    power of two, which grows with the time that a state takes, so that all processes return states of equal numbers.

    Args:
        places: A place for each process to go on from, as ``state_after`` returned it; empty to begin.
        batch_size: Samples of a batch; ``None`` where each sample is one.
        init_fn: The ``worker_init_fn`` of the loader.
    """

    def __init__(self, places: Sequence[bytes], batch_size: int | None, init_fn: Callable[[int], None] | None) -> None:
        self._places = places  # until the first epoch begins
        self._goes_on = bool(places)
        self._batch_size = batch_size
        self._init_fn = init_fn
        self._worker = 0
        self._stream: Any = None
        self._held: list[Any] = []  # the random generators in the stream
        self._gives_state = True
        self._every = 1  # the power of two
        # Of this epoch: its batches, when it began by time.perf_counter, and the seconds of asking.
        self._number = 0
        self._began = 0.0
        self._asking = 0.0

    def start(self, worker_id: int) -> None:
        """Do what ``worker_init_fn`` does, in whose place torch calls it; whoever asks for the dataset gets the stream.

        Args:
            worker_id: The number of this process.
        """
        info: Any = get_worker_info()
        info.dataset.places = self
        # torch's class of it lets nobody set an attribute.
        object.__setattr__(info, "dataset", info.dataset.stream)
        self._worker = worker_id
        if self._init_fn is not None:
            self._init_fn(worker_id)

    def begin(self, stream: Any) -> Iterator[Any]:
        """Open the stream for an epoch; for the first one at the place that was given, if there is one."""
        self._number = 0
        self._began = time.perf_counter()
        self._asking = 0.0
        place = pickle.loads(self._places[self._worker]) if self._places else None
        self._places = ()
        if place is not None:
            stream.load_state_dict(place[0])
        elif self._goes_on:
            streams.take_back(stream)
        samples = iter(stream)
        self._stream = stream
        # Only now, because a stream may make them when it is loaded or opened.
        self._held = generators_in(stream)
        if place is not None:
            set_shared_state(place[1], self._held)
        return samples

    def state_after(self, samples: Any) -> tuple[int, int, bytes] | None:
        """Return the process, its number of batches and its place after them; ``None`` if no state is due.

        Args:
            samples: Those of the batch. If they are fewer than in others the stream has ended, and may be at the
                beginning of its next pass.
        """
        self._number += 1
        has_ended = self._batch_size is not None and len(samples) < self._batch_size
        if has_ended or not self._gives_state or self._number % self._every:
            return None
        began = time.perf_counter()
        place = streams.ask_for_state(self._stream, self._held, pickle.dumps)
        if place is None:
            self._gives_state = False
            return None
        seconds = time.perf_counter() - began
        self._every = self._interval(seconds, began - self._began - self._asking)
        self._asking += seconds
        return self._worker, self._number, place

    def _interval(self, asking: float, loading: float) -> int:
        """Return after how many batches to ask again, so that it takes a small part of the time.

        Args:
            asking: Seconds that the stream was asked just now.
            loading: Seconds that the batches of this epoch took to load.
        """
        wanted = math.ceil(streams.LOADING_TO_ASKING * asking * self._number / max(loading, 1e-6))
        return 1 << max(0, wanted - 1).bit_length()


class RoundsPosition(Position):
    """The position in a stream that worker processes read, each of which sends its place with some of its batches.

    ``StreamEpochs`` makes it in place of a ``Position``. torch takes batches from the processes round-robin, and starts
    with the first one. A run can therefore resume where all have returned equally many batches, which is after a round.
    Always: ``states`` are places of all processes after the same round. Where one of them ends before the
    others, or has lost count by an error, no round is whole any more, and the last whole one stays.

    Args:
        consumed: Batches of the epoch that were used before this iterator.
        workers: How many processes there are.
    """

    def __init__(self, consumed: int, workers: int) -> None:
        super().__init__(consumed)
        self._workers = workers
        self._first = 0  # how many batches of the epoch were used before the processes began to count
        self._round = 0  # the latest one in which a process sent its place
        self._round_places: list[bytes] = []  # the places that were sent in it

    def start_from(self, consumed: int, places: list[bytes]) -> None:
        """Count rounds from the place from which the processes go on.

        Args:
            consumed: How many batches of the epoch were used there.
            places: A place for each process.
        """
        self._first = consumed
        self.states = [(consumed, places)]

    def keep(self, state: tuple[int, int, bytes]) -> None:
        """Add the place of a process to this round, and keep the places once all processes have sent theirs."""
        worker, number, place = state
        rounds, index = divmod(self.consumed - self._first - 1, self._workers)
        if (worker, number) != (index, rounds + 1):
            return
        if number != self._round:
            self._round = number
            self._round_places = []
        self._round_places.append(place)
        if len(self._round_places) == self._workers:
            super().keep(self._round_places)
