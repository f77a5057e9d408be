"""Three kinds of epoch, which a loader begins, describes and goes on in: of indices, of a stream, of an own state."""

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
    """An epoch under way.

    Attributes:
        source: The iterator of its batches.
        position: How far it is; what iterates it counts there.
        snapshot: Called after each batch, for what the source says of itself; ``None`` if it is not asked.
        put_back: Called with the position of an iterator that is left: takes back what was drawn ahead for it.
    """

    source: Iterator[Any]
    position: Position
    snapshot: Callable[[], Any] | None = None
    put_back: Callable[[Position], None] | None = None


class Epochs(Protocol):
    """How the epochs of a loader go. The loader makes one of a kind for good, and asks it at each ``iter()``.

    Always: it knows of the latest epoch alone, and what it returns of a position is of that one. It does not hold the
    loader, which is to end when nobody else does.
    """

    def begin(self, loader: Any, state: Any) -> Begun:
        """Begin the epoch that a state is of, or the one after it where it is over; a new one with ``None``."""
        ...

    def describe(self, loader: Any, position: Position | None) -> Any:
        """Return the state at a position of the latest epoch; ``None`` before the first."""
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
    """Epochs of a loader whose class keeps a state of its own, which is noted after each batch and given as it is."""

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
        """Return the state after the batch that was returned last, or after an earlier one."""
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
        """Whether the state is none that counts batches."""
        return not EpochState.is_one(state)


_FRESH = EpochState()


class _CountedEpochs:
    """What epochs of indices and of a stream have in common: their batches are counted."""

    def _new_position(self, loader: Any, state: EpochState) -> Position:
        """Return a position behind the batches of a state that were used; of none where it is over."""
        consumed = 0 if state.over else state.consumed
        rng = None if state.rng_before_next is None or not state.goes_on else state.rng_before_next
        # The generators that the dataset holds, if it is loaded in this process and may draw from them, and they are
        # not set for each sample.
        is_known = loader._profile.draws == "" or isinstance(loader.dataset, SeededDataset)
        return Position(consumed, rng, [] if loader.num_workers or is_known else generators_in(loader.dataset))

    def _go_on(self, loader: Any, state: EpochState, position: Position) -> None:
        # Where loading draws nothing, no generators were looked for, and ``go_on`` would miss them.
        if loader._profile.draws != "":
            position.go_on(state.held)

    def _count(self, loader: Any, position: Position) -> EpochState:
        with same_random_numbers():  # from which a sampler may draw to tell its length
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
    """Epochs over a dataset with indices: the order of these is recorded, and begun again.

    Args:
        skips: Whether batches follow from the indices one to one, so that those that were used are left out.
            Otherwise the class has an ``__iter__`` of its own, and they are run through.
    """

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self.sampler: ResumableSampler | None = None  # around that of the loader, which makes it

    def begin(self, loader: Any, state: EpochState | None) -> Begun:
        """Begin an epoch, or go on in one: its order is drawn again, and what was used of it is left out."""
        state = state or _FRESH
        position = self._new_position(loader, state)
        sampler: ResumableSampler = loader._index_sampler
        used = position.consumed - state.batches_before if position.consumed else 0
        sampler.begin(state, used if self.skips else 0, position, None if loader._epoch is None else loader._epoch())
        source = loader._make_source() if state is _FRESH else self._open(loader, state, sampler)
        if not self.skips:
            run_through(source, used)
        if state.held:
            self._go_on(loader, state, position)
        return Begun(source, position, put_back=sampler.put_back)

    def _open(self, loader: Any, state: EpochState, sampler: ResumableSampler) -> Iterator[Any]:
        if state.goes_on:
            # torch draws a seed for its processes here, which an epoch that goes on has drawn already.
            with same_random_numbers():
                return loader._make_source()
        if state.first_rng is None or torch.equal(state.first_rng["torch"], torch_state()):
            return loader._make_source()
        # Of a loader that had not begun: torch's seed and the order are drawn as they would have been there.
        with generators_at(state.first_rng):
            source = loader._make_source()
            sampler.first_rng = shared_state()
            return source

    def describe(self, loader: Any, position: Position | None) -> EpochState:
        """Return the count of batches, and how the order began."""
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
        """Whether it is of as many random generators."""
        if not EpochState.is_one(state):
            return False
        read = EpochState.from_dict(state)
        return read.stream is None and len(read.generators) in (0, len(loader._index_sampler.generators))


class StreamEpochs(_CountedEpochs):
    """Epochs over a stream, which goes on by a state of its own where it has an exact one, or else is run through.

    Args:
        in_workers: Whether worker processes can be asked for such a state: where torch's own iterator starts them.
    """

    def __init__(self, in_workers: bool) -> None:
        self._in_workers = in_workers
        self._start: OrderStart | None = None  # of the latest epoch, its batches left out
        self._from: EpochState = EpochState()  # what that began with
        self._left_behind = streams.LeftBehind()

    def begin(self, loader: Any, state: EpochState | None) -> Begun:
        """Begin a stream, or go on in it."""
        latest = loader._position
        if latest is not None and loader._background is not None:
            self._left_behind.look(loader, loader._background, latest.consumed - latest.begun)
        state = state or EpochState()
        position = self._new_position(loader, state)
        self._from = state if state.is_within_epoch else EpochState()
        # Processes that stay had their seed in the epoch before.
        is_seeded = state.goes_on or (state.over and loader.persistent_workers)
        with same_random_numbers() if is_seeded else contextlib.nullcontext():
            source = self._open(loader, state, position)
        self._go_on(loader, state, position)
        if loader.num_workers or not self._asks(loader):  # processes tell of themselves
            return Begun(source, position)
        held = position.dataset_generators
        return Begun(source, position, streams.StreamSnapshots(loader.dataset, source, state.is_within_epoch, held))

    def _asks(self, loader: Any) -> bool:
        """Whether the stream is asked for its place, in the process that reads it."""
        return (self._in_workers or not loader.num_workers) and streams.has_exact_state(loader.dataset)

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
        # Batches that need not be loaded once more: by the stream's own state, which is loaded before it is opened, or
        # else by the samples that are left out once it is.
        place = self._restore(loader, state, position)
        source = self._open_as(loader, state.order, position)
        if place is None:
            done = streams.skip_samples(samples_of_stream(source), state.stream)
        else:
            done, said = place
            if not loader.num_workers:
                set_shared_state(said[0][1], position.dataset_generators)
        run_through(source, position.consumed - done)
        return source

    def _restore(self, loader: Any, state: EpochState, position: Position) -> tuple[int, list[Any]] | None:
        """Have the stream go on by its own state, and return that with its count of batches; ``None`` without one."""
        stream = state.stream
        if stream is None or stream.told_by != loader.num_workers or not self._asks(loader):
            return None
        places = [each for each in stream.places if each[0] <= position.consumed]
        if not places:
            return None
        done, said = places[-1]
        if isinstance(position, RoundsPosition):
            loader.close()  # processes that live already would not be given the places
            position.start_from(done, [pickle.dumps(each) for each in said])
        else:
            position.states = [(done, said[0])]
            loader.dataset.load_state_dict(copy.deepcopy(said[0][0]))
        return done, said

    def _open_as(self, loader: Any, began: OrderStart | None, position: Position) -> Iterator[Any]:
        """Open the stream; one that goes on draws what it drew from the random generators at its beginning."""
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
        return streams.reshard(loader, state)

    def may_begin_with(self, loader: Any, state: Any) -> bool:
        """Whether it is of a stream."""
        return EpochState.is_one(state) and EpochState.from_dict(state).shards is None


def run_through(source: Iterator[Any], count: int) -> None:
    """Load batches that were used, and drop them; one that raised an error counted as used, and may raise it again."""
    for _ in range(count):
        with contextlib.suppress(Exception):
            next(source)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError, AttributeError):
        return None


def epochs_of(loader: Any, *, iterates_itself: bool) -> Epochs:
    """Return the kind of epochs of a loader.

    Args:
        loader: The loader; ``loader._behind`` has the methods of the class behind it.
        iterates_itself: Whether that class has an ``__iter__`` of its own.
    """
    if hasattr(loader._behind, "state_dict"):
        return OwnStateEpochs()
    if isinstance(loader.dataset, IterableDataset):
        return StreamEpochs(in_workers=not iterates_itself)
    return IndexEpochs(skips=not iterates_itself)
