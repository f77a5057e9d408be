"""Streams in this process: a state of their own, asked for as batches are loaded, and what a break loses of them."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from lightning_turbo._random import shared_state
from lightning_turbo.data.loading.torch_side import stream_has_ended
from lightning_turbo.errors import TurboWarning

__all__ = ["Counted", "StreamSnapshots", "has_exact_state", "warn_of_lost_samples"]

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


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face's shuffles in a buffer, whose samples its state leaves out."""
    inside = [getattr(stream, name) for name in ("_ex_iterable", "ex_iterable") if hasattr(stream, name)]
    inside += getattr(stream, "ex_iterables", [])
    return hasattr(stream, "buffer_size") or any(_has_buffer(each) for each in inside)


class Counted(Iterator[Any]):
    """Counts the batches that are loaded of a stream, in the progress of the epoch that makes it."""

    def __init__(self, batches: Iterator[Any], progress: Any) -> None:
        self._batches = batches
        self._progress = progress

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.has_found_end = True
            raise
        self._progress.loaded += 1
        return batch


def warn_of_lost_samples(loader: Any, progress: Any) -> bool:
    """Warn of samples of a stream that were loaded ahead in an epoch that was left early; return whether it did.

    A stream that begins from the start has lost nothing. One that goes on, such as a queue, a socket or a sensor, has
    lost them. A stream without a length whose end was not seen may be either.

    Args:
        loader: The loader, when its next epoch begins.
        progress: The progress of the epoch before.
    """
    batches = progress.loaded - (progress.consumed - progress.begun)
    if batches <= 0 or progress.has_found_end or loader.num_workers or hasattr(type(loader.dataset), "__len__"):
        return False
    warnings.warn(
        f"An epoch of the stream {type(loader.dataset).__name__} was left when up to "
        f"{batches * (loader.batch_size or 1)} samples had been loaded ahead. If it goes on in the next epoch, as a "
        "queue or a socket does, they are lost; if it begins from the start, nothing is. Take a DataLoader, or a "
        "Trainer with limit_train_batches, which load none beyond those that are used.",
        TurboWarning,
        stacklevel=5,
    )
    return True


class StreamSnapshots:
    """Asks a stream for its state after some of the batches, so that asking takes a small part of the time.

    An epoch makes one for a stream that has an exact state and is read in this process. Whoever loads calls it after
    each batch; it ends with the iterator. A state may hold a shuffle buffer of any size, so that to ask after each
    batch could take longer than to load one. Always: a state that is returned is that after the batch that was loaded
    last.

    Args:
        stream: The dataset.
        source: torch's iterator of its batches. Once that has found its end, with a batch that is not full or after
            the last one, the stream may be at the beginning of its next pass, and is not asked any more.
        held: The random generators that it holds.
        goes_on: Whether the stream goes on by a state that was loaded.
    """

    def __init__(self, stream: Any, source: Any, held: Sequence[Any], goes_on: bool) -> None:
        self._stream = stream
        self._source = source
        self._held = held
        self._goes_on = goes_on
        self._next = 0.0  # when to ask again, by time.perf_counter; infinity for never

    def __call__(self) -> Any:
        """Return a copy of the state, with the random states beside it; ``None`` if the stream is not asked now.

        Warns:
            TurboWarning: If the stream raises an error instead, or its state cannot be copied. Nobody may ever go on
                from it, and the batches do not need it.
        """
        if self._goes_on and getattr(self._stream, "_starting_state_dict", None):
            # Hugging Face's streams would begin later epochs at that state too.
            self._stream.load_state_dict({})
        began = time.perf_counter()
        if began < self._next or stream_has_ended(self._source):
            return None
        state = None
        try:
            state = {"stream": copy.deepcopy(self._stream.state_dict()), "random": shared_state(self._held)}
        except Exception as error:
            warnings.warn(
                f"state_dict() of the stream {type(self._stream).__name__}: expected a state that can be copied, got "
                f"the error {error!r}. A run that goes on within an epoch runs through the stream instead. Return "
                "plain Python objects and tensors, or leave state_dict out.",
                TurboWarning,
                stacklevel=3,
            )
        ended = time.perf_counter()
        self._next = inf if state is None else ended + LOADING_TO_ASKING * (ended - began)
        return state
