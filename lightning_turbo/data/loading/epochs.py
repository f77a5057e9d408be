"""Three kinds of epoch that a loader may have: over indices, over a stream, and by a state that its class keeps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import IterableDataset

from lightning_turbo._random import (
    generator_state,
    generators_at,
    generators_in,
    same_random_numbers,
    set_shared_state,
    shared_state,
    torch_state,
)
from lightning_turbo.data.loading import streams
from lightning_turbo.data.loading.epoch_state import EpochState, GeneratorStates, OrderStart, warn_of_last_pass
from lightning_turbo.data.loading.position import Position
from lightning_turbo.data.loading.resumable_sampler import ResumableSampler
from lightning_turbo.data.loading.torch_workers import samples_of_stream
from lightning_turbo.data.loading.worker_streams import RoundsPosition, WorkerPlaces
from lightning_turbo.data.sample_seeds import SeededDataset

__all__ = ["Begun", "Epochs", "IndexEpochs", "OwnStateEpochs", "StreamEpochs", "epochs_of", "length_of"]


class Begun(NamedTuple):
    """What ``Epochs.begin`` returns, of which the loader makes an iterator.

    Attributes:
        source: The iterator of the batches.
        position: How far the epoch is; the iterator counts there.
        snapshot: Called after each batch; it returns the state of the source then. ``None`` if nobody asks for it.
        put_back: Called with the position of an iterator that is left; it takes back what was drawn ahead for it.
    """

    source: Iterator[Any]
    position: Position
    snapshot: Callable[[], Any] | None = None
    put_back: Callable[[Position], None] | None = None


class Epochs(Protocol):
    """How the epochs of a loader begin, and what is saved of them.

    A loader makes one when it is made, of the kind that ``epochs_of`` chooses, and keeps it as long as it lives.
    Always: it knows of the latest epoch alone, so that the position that it is asked about is one of that epoch; a
    loader whose ``iter()`` raises an error has none. It does not refer to the loader, which ends with the last
    reference to it.
    """

    def begin(self, loader: Any, state: Any) -> Begun:
        """Begin an epoch.

        Args:
            loader: The loader.
            state: The state from which to go on: in its epoch, or where that is over in the one after it. ``None`` for
                a new epoch.
        """
        ...

    def describe(self, loader: Any, position: Position | None) -> Any:
        """Return the state of the loader.

        Args:
            loader: The loader.
            position: Where it is in the latest epoch; ``None`` if none has begun.
        """
        ...

    def reshard(self, loader: Any, state: Any) -> Any:
        """Return a state of a loader with other ranks, batches or processes as one of this loader.

        Raises:
            ValueError: If it is of the middle of an epoch of other data.
        """
        ...

    def may_begin_with(self, loader: Any, state: Any) -> bool:
        """Whether a state of a whole epoch is one of a loader of this kind."""
        ...


class OwnStateEpochs:
    """Epochs of a loader whose class keeps a state of its own, which is copied after each batch and given as it is.

    Always: the position keeps the states after the last three batches, as a Trainer may have fetched two ahead.
    """

    def begin(self, loader: Any, state: Any) -> Begun:
        """Begin an epoch, after the state was loaded."""
        if state is not None:
            loader._behind.load_state_dict(state)
        source = loader._make_source()
        state_dict = getattr(source, "state_dict", loader._behind.state_dict)
        position = Position()
        position.keep(copy.deepcopy(state_dict()))
        return Begun(source, position, lambda: copy.deepcopy(state_dict()))

    def describe(self, loader: Any, position: Position | None, unused: int = 0) -> Any:
        """Return the state after the batch that was returned last, or after the one that is ``unused`` before it."""
        if position is None:
            return loader._behind.state_dict()
        if unused > position.consumed:
            warn_of_last_pass(unused - position.consumed)
        number = max(0, position.consumed - unused)
        return next(state for after, state in reversed(position.states) if after <= number or after == position.begun)

    def reshard(self, loader: Any, state: Any) -> Any:
        """Return the state as it is: the class alone knows what it means."""
        return state

    def may_begin_with(self, loader: Any, state: Any) -> bool:
        """Whether the state is not one that counts batches."""
        return not EpochState.is_one(state)


_FRESH = EpochState()


class _CountedEpochs:
    """The common part of epochs over indices and over a stream: their batches are counted."""

    def _new_position(self, loader: Any, state: EpochState) -> Position:
        """Return a position behind the batches of a state that were used; at the beginning if the epoch is over."""
        consumed = 0 if state.over else state.consumed
        rng = state.rng_before_next if state.goes_on else None
        # Sample seeds set the generators that the dataset holds for each sample. Where processes load, or loading draws
        # nothing, nobody needs to know of them.
        is_seeded = isinstance(loader.dataset, SeededDataset)
        needs_none = loader.num_workers or is_seeded or loader._profile.draws == ""
        return Position(consumed, rng, [] if needs_none else generators_in(loader.dataset))

    def _set_dataset_generators(self, loader: Any, state: EpochState, position: Position) -> None:
        """Set the generators that the dataset holds as they were at the state."""
        # Where loading draws nothing, ``_new_position`` did not look for any, and the position would miss them.
        if loader._profile.draws != "":
            position.set_dataset_generators(state.held)

    def _count(self, loader: Any, position: Position) -> EpochState:
        # A sampler may draw random numbers to compute its length.
        with same_random_numbers():
            length = length_of(loader)
        return EpochState(
            consumed=position.consumed,
            length=length,
            ended=position.ended,
            over=position.ended or position.consumed == length,
            rng_before_latest=position.rng_before_latest,
            held=[generator_state(each) for each in position.dataset_generators],
        )


class IndexEpochs(_CountedEpochs):
    """Epochs over a dataset with indices: the sampler around that of the loader records their order, and repeats it.

    Args:
        skips: Whether each batch is of one entry of the sampler, so that the entries of used batches are left out.
            Otherwise the class has an ``__iter__`` of its own, and used batches are loaded and dropped.

    Attributes:
        sampler: That of the loader, which makes it when it is first asked for its indices, and again when its own
            sampler is exchanged.
    """

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self.sampler: ResumableSampler | None = None

    def begin(self, loader: Any, state: EpochState | None) -> Begun:
        """Begin an epoch, or go on in one: its order is drawn again, and the part that was used is left out."""
        state = state or _FRESH
        position = self._new_position(loader, state)
        sampler: ResumableSampler = loader._index_sampler
        used = position.consumed - state.batches_before if position.consumed else 0
        sampler.begin(state, used if self.skips else 0, position, None if loader._epoch is None else loader._epoch())
        source = loader._make_source() if state is _FRESH else self._open(loader, state, sampler)
        if used and not self.skips:
            # The numbers for these batches were drawn before the state was taken.
            with same_random_numbers():
                run_through(source, used)
        if state.held:
            self._set_dataset_generators(loader, state, position)
        return Begun(source, position, put_back=sampler.put_back)

    def _open(self, loader: Any, state: EpochState, sampler: ResumableSampler) -> Iterator[Any]:
        if state.goes_on:
            # torch draws a seed for its processes here. An epoch that goes on has drawn it already.
            with same_random_numbers():
                return loader._make_source()
        if state.first_rng is None or torch.equal(state.first_rng["torch"], torch_state()):
            return loader._make_source()
        # The state is of a loader that had not begun: torch draws its seed, and the sampler its order, as there.
        with generators_at(state.first_rng):
            source = loader._make_source()
            sampler.first_rng = shared_state()
            return source

    def describe(self, loader: Any, position: Position | None) -> EpochState:
        """Return the count of batches, how the order began, and how it is sharded."""
        sampler: ResumableSampler = loader._index_sampler
        if position is None:
            return dataclasses.replace(sampler.describe_new(), first_rng=shared_state())
        state = sampler.describe(self._count(loader, position))
        if not state.consumed and state.order is not None and state.order.at_first is None:
            return dataclasses.replace(state, first_rng=shared_state())
        return state

    def reshard(self, loader: Any, state: EpochState) -> EpochState:
        """Return a state of other ranks or batches as one of this loader: the same samples were used."""
        return loader._index_sampler.reshard(state)

    def may_begin_with(self, loader: Any, state: Any) -> bool:
        """Whether the state is of a loader with as many random generators."""
        if not EpochState.is_one(state):
            return False
        read = EpochState.from_dict(state)
        return read.stream is None and len(read.generators) in (0, len(loader._index_sampler.generators))


class StreamEpochs(_CountedEpochs):
    """Epochs over a stream, which goes on by a state of its own if it has an exact one, and else is run through.

    Args:
        by_torch: Whether torch's own iterator reads the stream. One of another class may have read further than the
            batch that it returned last, so that the stream is not asked for its state, nor for single samples.
    """

    def __init__(self, by_torch: bool) -> None:
        self._by_torch = by_torch
        # Of the latest epoch: the random states at its beginning, and the state that it goes on from.
        self._start: OrderStart | None = None
        self._from = EpochState()
        self._left_behind = streams.LeftBehind()

    def begin(self, loader: Any, state: EpochState | None) -> Begun:
        """Begin a stream, or go on in it."""
        latest = loader._position
        if latest is not None and loader._background is not None:
            self._left_behind.look(loader, loader._background, latest.consumed - latest.begun)
        state = state or EpochState()
        position = self._new_position(loader, state)
        self._from = state if state.is_within_epoch else EpochState()
        # torch draws a seed for its processes. An epoch that goes on has drawn it already, and those that stay have it.
        is_seeded = state.goes_on or (state.over and loader.persistent_workers)
        with same_random_numbers() if is_seeded else contextlib.nullcontext():
            source = self._open(loader, state, position)
        self._set_dataset_generators(loader, state, position)
        # Worker processes return their own states.
        if loader.num_workers or not self._asks(loader):
            return Begun(source, position)
        held = position.dataset_generators
        return Begun(source, position, streams.StreamSnapshots(loader.dataset, source, state.is_within_epoch, held))

    def _asks(self, loader: Any) -> bool:
        """Whether the stream is asked for its state, in the process that reads it."""
        return self._by_torch and streams.has_exact_state(loader.dataset)

    def _new_position(self, loader: Any, state: EpochState) -> Position:
        position = super()._new_position(loader, state)
        if loader.num_workers and self._asks(loader):
            return RoundsPosition(position.consumed, loader.num_workers)
        return position

    def _open(self, loader: Any, state: EpochState, position: Position) -> Iterator[Any]:
        if not state.is_within_epoch:
            return self._open_as(loader, state.order if state.goes_on else None, position)
        if state.ended and state.is_resharded:
            # Another batch size has come to the end of the epoch already.
            self._start = state.order
            return iter(())
        # ``done`` batches need not be loaded once more. The stream's own state is loaded before the stream is opened;
        # without one, samples are left out after that.
        place = self._restore(loader, state, position)
        source = self._open_as(loader, state.order, position)
        if place is None:
            done = streams.skip_samples(samples_of_stream(source), state.stream)
        else:
            done, states = place
            if not loader.num_workers:
                set_shared_state(states[0][1], position.dataset_generators)
        run_through(source, position.consumed - done)
        return source

    def _restore(self, loader: Any, state: EpochState, position: Position) -> tuple[int, list[Any]] | None:
        """Load the stream's own state, in this process or in those that are started next.

        Returns:
            The number of batches before the state, and the state of each process; ``None`` if there is no state.
        """
        stream = state.stream
        if stream is None or stream.num_workers != loader.num_workers or not self._asks(loader):
            return None
        places = [each for each in stream.places if each[0] <= position.consumed]
        if not places:
            return None
        done, states = places[-1]
        if isinstance(position, RoundsPosition):
            # Processes that live already would not be given the places.
            loader.close()
            position.start_from(done, [pickle.dumps(each) for each in states])
        else:
            position.states = [(done, states[0])]
            loader.dataset.load_state_dict(copy.deepcopy(states[0][0]))
        return done, states

    def _open_as(self, loader: Any, began: OrderStart | None, position: Position) -> Iterator[Any]:
        """Open the stream.

        Args:
            loader: The loader.
            began: How the epoch began, if it goes on: the stream draws from the generators as it did there.
            position: The position of the epoch.
        """
        held = position.dataset_generators
        if began is not None:
            set_shared_state(began.at_iter.shared, held)
        self._start = OrderStart(GeneratorStates(shared_state(held)))
        places = None
        if isinstance(position, RoundsPosition):
            given = position.states[-1][1] if position.states else ()
            places = WorkerPlaces(given, loader.batch_size, loader.worker_init_fn)
        source = loader._make_source(places)
        if began is not None and began.at_first is not None:
            position.rng_before_first = began.at_first.shared
            set_shared_state(began.at_first.shared, held)
        return source

    def describe(self, loader: Any, position: Position | None) -> EpochState:
        """Return the count of batches, what the stream began with, and its place."""
        if position is None:
            return EpochState()
        start = self._start
        if start is not None and position.rng_before_first is not None:
            start = dataclasses.replace(start, at_first=GeneratorStates(position.rng_before_first))
        place = streams.place_of(loader, self._from.stream, position.states)
        return dataclasses.replace(self._count(loader, position), order=start, stream=place)

    def reshard(self, loader: Any, state: EpochState) -> EpochState:
        """Return a state of other batches or processes as one of this loader."""
        return streams.reshard(loader, state, is_read_here=self._by_torch and not loader.num_workers)

    def may_begin_with(self, loader: Any, state: Any) -> bool:
        """Whether the state is of a stream, or of a loader that had not begun."""
        return EpochState.is_one(state) and EpochState.from_dict(state).shards is None


def run_through(source: Iterator[Any], count: int) -> None:
    """Load and drop batches that were used."""
    # One that raised an error counts as used, and may raise it again.
    for _ in range(count):
        with contextlib.suppress(Exception):
            next(source)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError, AttributeError):
        return None


def epochs_of(loader: Any, *, iterates_itself: bool) -> Epochs:
    """Return the kind of epochs of a loader.

    Args:
        loader: The loader; ``loader._behind`` has the methods of the class behind ``PrefetchLoader``.
        iterates_itself: Whether that class has an ``__iter__`` of its own.
    """
    if hasattr(loader._behind, "state_dict"):
        return OwnStateEpochs()
    if isinstance(loader.dataset, IterableDataset):
        return StreamEpochs(by_torch=not iterates_itself)
    return IndexEpochs(skips=not iterates_itself)
