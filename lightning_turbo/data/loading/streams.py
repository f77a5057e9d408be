"""Where a stream stands, counted in samples, and how a loader with other batches or worker processes goes on there."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from lightning_turbo._random import shared_state
from lightning_turbo.data.loading.epoch_state import EpochState, StreamPlace
from lightning_turbo.data.loading.torch_workers import stream_has_ended
from lightning_turbo.data.orders.sharding import refuse
from lightning_turbo.errors import TurboWarning

__all__ = [
    "LeftBehind", "StreamSnapshots", "ask_for_state", "has_exact_state", "place_of", "reshard", "skip_samples",
    "take_back",
]  # fmt: skip

# The least ratio of the time that loading takes to the time that it takes to ask a stream for its state and to copy
# that. A run that goes on loads what was loaded since the latest state once more.
LOADING_TO_ASKING = 20


def has_exact_state(stream: Any) -> bool:
    """Whether a stream has an exact state of its own, and ``state_dict()`` is how to ask for it."""
    if not hasattr(stream, "state_dict") or not hasattr(stream, "load_state_dict") or _has_buffer(stream):
        return False
    try:
        inspect.signature(stream.state_dict).bind()
    except (TypeError, ValueError):
        # The methods of litData's and Mosaic's streams require arguments that their own loaders count. Methods that are
        # written in C may have no signature. Iterating over such a stream again is slower, but correct.
        return False
    return True


def ask_for_state(stream: Any, generators: Sequence[Any], copied: Callable[[Any], Any]) -> Any:
    """Return a copy of a stream's state, and of the random states beside it; ``None`` if there is none.

    Args:
        stream: The stream.
        generators: The random generators that it holds.
        copied: Makes the copy.

    Warns:
        TurboWarning: If the stream raises an error instead, or its state cannot be copied. Nobody may ever go on from
            it, and the batches do not need it.
    """
    try:
        return copied((stream.state_dict(), shared_state(generators)))
    except Exception as error:
        name = type(stream).__name__
        warnings.warn(
            f"state_dict() of the stream {name}: expected a state that can be copied, got the error {error!r}. A run "
            "that goes on within an epoch runs through the stream instead. Return plain Python objects and tensors, or "
            "leave state_dict out.",
            TurboWarning,
            stacklevel=3,
        )
        return None


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face's shuffles in a buffer, whose samples its state leaves out."""
    inside = [getattr(stream, name) for name in ("_ex_iterable", "ex_iterable") if hasattr(stream, name)]
    inside += getattr(stream, "ex_iterables", [])
    return hasattr(stream, "buffer_size") or any(_has_buffer(each) for each in inside)


def take_back(stream: Any) -> None:
    """Take back a state that was loaded, at which Hugging Face's streams would begin later epochs too."""
    if getattr(stream, "_starting_state_dict", None):
        stream.load_state_dict({})


class StreamSnapshots:
    """Asks a stream for its state after some of the batches, so that asking takes a small part of the time.

    A loader makes one for each epoch of a stream that has an exact state and is read in this process. The thread that
    loads calls it after each batch; it ends with the iterator. A state may hold a shuffle buffer of any size, so that
    to ask after each batch could take longer than to load one. Always: a state that is returned is that after the
    batch that was loaded last.

    Args:
        stream: The dataset.
        source: torch's iterator of its batches. Once that has found its end, with a batch that is not full or after
            the last one, the stream may be at the beginning of its next pass, and is not asked any more.
        goes_on: Whether the stream goes on by a state that was loaded.
        generators: The random generators that it holds.
    """

    def __init__(self, stream: Any, source: Any, goes_on: bool, generators: Sequence[Any]) -> None:
        self._stream = stream
        self._source = source
        self._goes_on = goes_on
        self._generators = generators
        self._next = 0.0  # when to ask again, by time.perf_counter; infinity for never

    def __call__(self) -> Any:
        """Return what ``ask_for_state`` does; ``None`` if the stream is not asked now."""
        if self._goes_on:
            take_back(self._stream)
        began = time.perf_counter()
        if began < self._next or stream_has_ended(self._source):
            return None
        state = ask_for_state(self._stream, self._generators, _copied)
        ended = time.perf_counter()
        self._next = inf if state is None else ended + LOADING_TO_ASKING * (ended - began)
        return state


def _copied(state: tuple[Any, Any]) -> tuple[Any, Any]:
    # The random states are a copy already.
    return copy.deepcopy(state[0]), state[1]


def place_of(loader: Any, before: StreamPlace | None, places: Sequence[tuple[int, Any]]) -> StreamPlace:
    """Return the place of a loader in its stream, for its state.

    Args:
        loader: The loader.
        before: The place from which its epoch goes on; ``None`` for an epoch from the start.
        places: States of the stream, pickled by worker processes, with the number of batches before each.
    """
    here = _describe(loader)
    if before is not None:
        here = dataclasses.replace(
            here, from_sample=before.from_sample, from_batch=before.from_batch, is_resharded=before.is_resharded
        )
    states = [(count, [pickle.loads(each) for each in one] if loader.num_workers else [one]) for count, one in places]
    return dataclasses.replace(here, places=states, num_workers=loader.num_workers)


def _describe(loader: Any) -> StreamPlace:
    # No order is sharded over the ranks: each has a stream. One worker process reads it as this one does: both are 1.
    return StreamPlace(type(loader.dataset).__name__, loader.batch_size or 1, max(1, loader.num_workers))


class LeftBehind:
    """Warns of samples of a live stream that were loaded ahead when an epoch was left early.

    A loader over a stream keeps one, and has it look at the latest epoch when the next one begins. A stream that begins
    from the start has lost nothing. One that goes on, such as a queue, a socket or a sensor, has lost them. A stream
    without a length whose end was not seen may be either. Always: a loader warns once at most.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def look(self, loader: Any, background: Any, returned: int) -> None:
        """Look at the latest epoch, and warn if it was left with samples that were loaded ahead.

        Args:
            loader: The loader.
            background: The ``Background`` that took the batches of that epoch.
            returned: How many of these the loader returned.
        """
        batches = background.taken - returned
        has_length = hasattr(type(loader.dataset), "__len__")
        if self._has_warned or batches <= 0 or background.has_found_end or background.has_workers or has_length:
            return
        self._has_warned = True
        warnings.warn(
            f"An epoch of the stream {type(loader.dataset).__name__} was left when up to "
            f"{batches * (loader.batch_size or 1)} samples had been loaded ahead. If it goes on in the next epoch, as "
            "a queue or a socket does, they are lost; if it begins from the start, nothing is. Take a DataLoader, or a "
            "Trainer with limit_train_batches, which load none beyond those that are used.",
            TurboWarning,
            stacklevel=5,
        )


def reshard(loader: Any, state: EpochState, *, is_read_here: bool) -> EpochState:
    """Return a state of a loader with other batches or worker processes as one of this loader.

    Args:
        loader: The loader.
        state: The state.
        is_read_here: Whether torch's own iterator reads the stream in this process, so that single samples can be left
            out of it. Worker processes and loaders with an ``__iter__`` of their own leave out whole batches alone.

    Warns:
        TurboWarning: If whole batches are not just what was used, with the numbers of samples.
    """
    if not state.is_within_epoch:
        return state
    before = state.stream
    here = _describe(loader)
    if before is None:
        name = "one with indices" if state.shards is None else state.shards.order.sampler
        refuse("sampler", name, f"the stream {type(loader.dataset).__name__}")
    used = state.used_samples
    size = here.batch_size
    is_as_before = (before.batch_size, before.workers) == (here.batch_size, here.workers)
    if is_as_before and (is_read_here or used == state.consumed * size):
        return state
    # Where a batch of this size would end in the middle of what is left out, it counts as one that is left.
    left_out = used
    if not is_read_here or before.workers > 1:
        left_out = used // size * size
        _warn_of_other_samples(before, here, used, left_out)
    places = [(used // size, each) for count, each in _places_in(loader, before) if count == state.consumed]
    here = dataclasses.replace(
        here, stream=before.stream, from_sample=left_out, from_batch=used // size, is_resharded=True, places=places
    )
    return dataclasses.replace(state, consumed=here.from_batch, length=None, rng_before_next=None, stream=here)


def _places_in(loader: Any, before: StreamPlace) -> list[tuple[int, Any]]:
    """Return the places of a stream with other batches or processes that this loader can use."""
    # States of worker processes belong to shards, whose batches are returned round-robin.
    return [] if loader.num_workers or before.num_workers else before.places


def _warn_of_other_samples(before: StreamPlace, here: StreamPlace, used: int, left_out: int) -> None:
    alone = before.workers == here.workers == 1
    if alone and left_out == used:
        return
    seen = f"{used - left_out} are seen twice" if alone else f"up to {used} may be seen twice, and as many never"
    warnings.warn(
        f"{used} samples of the stream were used, in batches of {before.batch_size} (processes: {before.workers}), and "
        f"{left_out} are left out now, in batches of {here.batch_size} (processes: {here.workers}): {seen}. Go "
        "on with the same batch_size and num_workers, or from a checkpoint of a whole epoch.",
        TurboWarning,
        stacklevel=4,
    )


def skip_samples(samples: Any, place: StreamPlace | None) -> int:
    """Leave out the samples of a stream that were used in other batches, and return as how many batches they count.

    Args:
        samples: The iterator of samples; ``None`` where it cannot be reached, as in worker processes.
        place: Where to go on.
    """
    if samples is None or place is None or not place.is_resharded:
        return 0
    next(itertools.islice(samples, place.from_sample, place.from_sample), None)
    return place.from_batch
