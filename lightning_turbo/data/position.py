"""Where a loader is in its epoch, counted in batches that were used, and how to continue from there."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from lightning_turbo._random import set_shared_state, shared_state, uncollected
from lightning_turbo.errors import TurboWarning

__all__ = [
    "START", "Position", "ResumableSampler", "begin_epoch", "correct_states", "end_workers", "generators_of",
    "is_between_epochs", "length_of", "note_state", "warn_of_gaps", "wrong_kind",
]  # fmt: skip

# The state of a loader that has handed out nothing yet.
START: dict[str, Any] = {"consumed": 0, "whole": False, "ended": False, "order": None, "own": [], "base": None}
# The states of a batch that was fetched ahead, of one whose step was not finished, and of the batch before them.
KEPT = 3


class Position:
    """How far an iterator is. Its loader keeps it, so that it can be asked after the iterator was dropped.

    Attributes:
        consumed: Batches handed out, those of an iterator before this one included; ``begun`` those alone.
        states: Pairs of a count of batches and what the source said of itself after them, the latest at the end; for
            loaders with a state of their own.
        reached: What it said after the last batch that was handed out or raised; ``None`` before the first. For
            loaders whose batches are counted.
        ended: Whether the end was reached.
    """

    def __init__(self, consumed: int = 0, state: Any = None) -> None:
        self.consumed = self.begun = consumed
        self.states: deque[tuple[int, Any]] = deque([(consumed, state)], maxlen=KEPT)
        self.reached: Any = None
        self.ended = False

    @property
    def state(self) -> Any:
        """The latest of the states; ``None`` if there is none."""
        return self.states[-1][1]

    @property
    def untouched(self) -> bool:
        """Whether neither a batch nor the end was handed out."""
        return self.consumed == self.begun and not self.ended

    def advance(self, state: Any) -> None:
        """Count a batch, and keep what the source said of itself after it."""
        self.consumed += 1
        self.reached = state
        self.states.append((self.consumed, state))

    def describe(self, length: int | None) -> dict[str, Any]:
        """Return the count for a state of a loader of this length."""
        whole = self.ended or self.consumed == length
        return {"consumed": self.consumed, "whole": whole, "ended": self.ended, "length": length}


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


# ---- The order of a sampler.


class ResumableSampler:
    """A sampler around a sampler that records how its order began, and can begin there again and skip.

    An order follows from the states of the random generators when the sampler is asked for an iterator and when its
    first index is drawn, and from its epoch if it has one. That is recorded; the indices are not kept. Its own
    generators are those of torch that the loader and its samplers hold; their states are recorded after each index, so
    that an epoch that is broken off can put them back to where the last batch that was handed out left them.

    Attributes:
        began: How the latest order began; ``None`` before its first index was drawn.
        own: The generators that belong to the loader and its samplers.
        start: Their states before anything was drawn for the latest epoch.
        position: Where the latest iterator is.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self.sampler = sampler
        self.own = generators_of(generator, sampler)
        self._counting = [each for each in _samplers_in(sampler) if has_epoch(each)]
        self.began: dict[str, Any] | None = None
        self.start: list[Any] = []
        self.position = Position()
        self._replay: tuple[int, Any] = (0, None)
        self._after_seed: list[Any] | None = None
        self._indices: _Indices | None = None

    def rewind(self, state: dict[str, Any], skip: int, seed_was_drawn: bool) -> None:
        """Make the next epoch the one that a loader's ``state`` is of, or the one after it where it is whole.

        Args:
            state: What ``PrefetchLoader.state_dict`` returned.
            skip: Indices to leave out at the beginning of an epoch that is not whole.
            seed_was_drawn: Whether worker processes stay for all epochs: their seed, which the loader's generator
                gives, was drawn before that state was taken. It is set again after torch has drawn one here.
        """
        if hasattr(self.sampler, "continue_after"):
            self._count_epochs(state)
        self.began = self._after_seed = None
        self.position = Position()  # the iterator before, if it is let go of only now, puts nothing back
        if not state.get("whole") and state["order"] is not None:
            self._check_number("samplers that count epochs", state["order"]["epochs"], self._counting)
            self._check_number("random generators", state["order"]["iter"]["own"], self.own)
            self._replay = skip, state["order"]
        elif state.get("own"):
            self._check_number("random generators", state["own"], self.own)
            self._set_own_states(state["own"])
            self._after_seed = state["own"] if seed_was_drawn else None
        self.start = self._own_states()

    def _count_epochs(self, state: dict[str, Any]) -> None:
        """Set the epoch of a sampler that counts its passes: states and passes that gave no batch are not its own."""
        sampler: Any = self.sampler
        if state.get("whole") and state["order"] is not None:
            sampler.continue_after(state["order"]["epochs"], over=True)
        elif self.began is not None and self.position.untouched and sampler.epoch == self.began["epochs"][0] + 1:
            sampler.continue_after(self.began["epochs"], over=False)

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore[reportArgumentType] - a TypeError where the sampler has no length

    def __iter__(self) -> Iterator[Any]:
        # Some samplers draw here and some at their first index; torch draws a seed for its workers in between, and
        # calls this twice if there are any.
        skip, began = self._replay
        here = shared_state()
        if began is not None:
            for sampler, epoch in zip(self._counting, began["epochs"], strict=True):
                sampler.set_epoch(epoch)  # whoever counts epochs may not have told it yet
            self._set_states(began["iter"])
        elif self._after_seed is not None:
            self._set_own_states(self._after_seed)
        known = {"iter": self._states(), "epochs": [sampler.epoch for sampler in self._counting]}
        indices = iter(self.sampler)
        if began is not None:
            set_shared_state(here)
        after_seed = None if self._after_seed is None else self._own_states()
        drawn = self._draw(indices, known, after_seed) if began is None else self._draw_again(indices, skip, began)
        self._indices = _Indices(drawn, self._own_states)
        return self._indices

    def _draw(self, indices: Iterator[Any], known: dict[str, Any], after_seed: list[Any] | None) -> Iterator[Any]:
        if after_seed is not None:
            self._set_own_states(after_seed)
        self._after_seed, self.began = None, {**known, "first": self._states()}
        yield from indices

    def _draw_again(self, indices: Iterator[Any], skip: int, began: dict[str, Any]) -> Iterator[Any]:
        self._replay, self.began, here = (0, None), began, shared_state()
        self._set_states(began["first"])
        try:
            first = list(itertools.islice(indices, skip, skip + 1))  # at which the order is drawn
        finally:
            set_shared_state(here)
        yield from first
        yield from indices

    def _states(self) -> dict[str, Any]:
        return {"shared": shared_state(), "own": self._own_states()}

    def _set_states(self, states: dict[str, Any]) -> None:
        self._set_own_states(states["own"])
        set_shared_state(states["shared"])

    def _own_states(self) -> list[Any]:
        with uncollected():
            return [generator.get_state() for generator in self.own]

    def _set_own_states(self, states: list[Any]) -> None:
        with uncollected():
            for generator, state in zip(self.own, states, strict=True):
                generator.set_state(state)

    @staticmethod
    def _check_number(what: str, states: list[Any], here: list[Any]) -> None:
        if len(states) != len(here):
            raise ValueError(
                f"The state is of a loader with {len(states)} {what}, and this one has {len(here)}. Load it into a "
                "loader with the same samplers, and with sample_seeds if it had them."
            )

    def recorder(self) -> Callable[[], list[Any]]:
        """Return what tells the states of the own generators after the last index of this epoch that was drawn."""
        indices = self._indices
        return lambda: [] if indices is None else indices.after

    def states_now(self) -> list[Any]:
        """Return the states of the own generators without what was drawn ahead, unless somebody has set them since."""
        position, indices, now = self.position, self._indices, self._own_states()
        if position.reached is None or position.ended or indices is None:
            return now
        return position.reached if indices.drawing or _equal(now, indices.after) else now

    def put_back(self, position: Position) -> None:
        """Take back what was drawn ahead for an iterator that is left before its end, if it is the latest."""
        if position is self.position and not position.ended:
            self._set_own_states(self.states_now())

    def draw(self) -> None:
        """Draw the order of the latest epoch now, in this thread, instead of when its first index is asked for."""
        if self._indices is not None:
            self._indices.peek()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_indices": None}  # a trainer may keep this object in its records of a loader


class _Indices(Iterator[Any]):
    """An iterator of indices whose next one can be drawn ahead of its turn, with what ``states`` returns after each."""

    def __init__(self, source: Iterator[Any], states: Callable[[], list[Any]]) -> None:
        self._source = source
        self._states = states
        self._peeked: list[Any] = []
        self.after: list[Any] = []
        self.drawing = False

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        self.drawing = True
        try:
            return next(self._source)
        finally:
            self.after = self._states()
            self.drawing = False

    def peek(self) -> None:
        """Draw the next index, if there is one."""
        if not self._peeked:
            self._peeked.extend(itertools.islice(self, 1))


def generators_of(generator: torch.Generator | None, sampler: Any) -> list[torch.Generator]:
    """Return the generators of torch that a loader and its samplers hold, that of the process not among them."""
    samplers = _samplers_in(sampler)
    held = [generator, *(value for each in samplers for value in getattr(each, "__dict__", {}).values())]
    found = [value for value in held if isinstance(value, torch.Generator) and value is not torch.default_generator]
    return list({id(value): value for value in found}.values())


def _samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it and those in turn hold, Lightning's wrapper around one included."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        waiting += [value for value in getattr(each, "__dict__", {}).values() if isinstance(value, Sampler)]
        waiting += [getattr(each, "sampler", None), getattr(getattr(each, "dataset", None), "_sampler", None)]
    return found


def has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---- A class with a state of its own, as torchdata's over a stream: its states after the latest batches.


def note_state(state_dict: Callable[[], Any]) -> dict[str, Any]:
    """Return what a class says of itself now, as ``state``.

    With ``over`` set, one batch is to be taken from there, and the ``iter`` after it begins the epoch that is meant.
    """
    return {"state": copy.deepcopy(state_dict()), "over": False}


def _start_after(position: Position) -> dict[str, Any]:
    """Return where the epoch after this one begins.

    torchdata begins an epoch rightly only on an iterator that has run to where the epoch before it was left. So this is
    the state one batch before that place, or, where the end was handed out, the state at the last batch.
    """
    before = dict(position.states).get(position.consumed - (not position.ended))
    if before is None or before["over"]:  # that one is of the epoch before
        before = position.state
    return {**before, "over": True}


def begin_epoch(loader: Any, behind: Any, last: Position | None, loaded: dict[str, Any]) -> tuple[Any, Position]:
    """Begin the epoch that a state is of, the one after it if it is whole, or the one after the last of this loader."""
    if loaded["base"] is not None:
        return _restore_epoch(loader, behind, loaded)
    start = None
    if last is not None:
        start = last.states[0][1] if last.untouched else _start_after(last)
    source = behind.__iter__()
    if start is None and hasattr(source, "state_dict"):
        start = note_state(source.state_dict)
    return source, Position(0, start)


def _restore_epoch(loader: Any, behind: Any, loaded: dict[str, Any]) -> tuple[Any, Position]:
    position = Position(loaded["consumed"])
    position.ended = loaded["ended"]
    states = [(at, start) for at, start in loaded["base"] if at <= position.consumed]
    position.states = deque(states, maxlen=KEPT)
    if loaded["whole"]:
        start = _start_after(position)
        return _begin_at(loader, behind, start), Position(0, start)
    return _begin_at(loader, behind, position.state), Position(loaded["consumed"], position.state)


def _begin_at(loader: Any, behind: Any, start: dict[str, Any] | None) -> Any:
    if start is None:
        return behind.__iter__()
    behind.load_state_dict(start["state"])
    source = behind.__iter__()
    _count_once(source, start["state"])
    if start["over"]:
        next(source, None)
        if not loader.persistent_workers:
            end_workers(source)
        source = behind.__iter__()
    return source


def _count_once(source: Any, state: dict[str, Any]) -> None:
    """Have an iterator of torchdata's count what it runs through as it continues; it does so twice.

    From the state that it would give then, nothing could continue: it tells of twice as many batches.
    """
    snapshot = state.get("_snapshot")
    begun = state.get("_num_yielded") if snapshot is None else snapshot["_snapshot_step"]
    if begun is None or not hasattr(source, "_num_yielded"):
        return
    surplus = source._num_yielded - begun - state.get("_steps_since_snapshot", 0)
    source._num_yielded -= surplus
    if snapshot is not None and source._snapshot["_snapshot_step"] != begun:
        source._snapshot["_snapshot_step"] -= surplus


# ---- States of loaders as a Trainer and its checkpoints see them.


def correct_states(states: Iterable[Any], over: bool, used: int | None = None) -> None:
    """Write into states of loaders what was used in the epoch that they were taken in, and whether it was over.

    Loaders know neither: batches may be handed out and not used, an epoch may end before a loader, or continue after it
    with others.

    Args:
        states: What ``state_dict`` of the loaders of a run gave, of any kind; those that count are changed. To do it
            twice changes nothing more.
        over: Whether the last batch of the epoch was used.
        used: Batches that were used of those that all loaders together gave; ``None`` for all that were handed out.
    """
    counts = [state for state in states if isinstance(state, dict) and {"consumed", "whole"} <= state.keys()]
    most = max((state["consumed"] for state in counts), default=0)
    unused = 0 if used is None else max(0, most - used)
    for state in counts:
        # One that had ended before the others gave nothing to what was not used.
        rest = min(state["consumed"], most - unused) if state.get("ended") else state["consumed"] - unused
        state["consumed"] = max(0, rest)
        state["whole"] = over and rest > 0  # at 0 it is the epoch after that was begun


def is_between_epochs(state: Any) -> bool:
    """Whether the state of a loader is known to be of the end of an epoch, or of its beginning."""
    return isinstance(state, dict) and (bool(state.get("whole")) or state.get("consumed") == 0)


def wrong_kind(loader: Any, state: dict[str, Any]) -> str:
    """Return what to tell somebody who loads a state that is not of this kind of loader."""
    return (
        f"A state with the keys {sorted(state)} does not belong to {type(loader).__name__}. Load the state that the "
        "same class of loader gave over the same kind of dataset; a StatefulDataLoader's own state belongs to a "
        "StatefulDataLoader without prefetching."
    )


def warn_of_gaps(loader: Any, state: dict[str, Any]) -> None:
    """Warn of a state whose count of batches does not tell which samples of the epoch were used."""
    if not state["consumed"] or state.get("whole"):
        return
    before, now = state.get("length"), length_of(loader)
    why = []
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        why.append("in_order=False hands out batches as they are ready. Leave in_order=False out to go on exactly.")
    if before is not None and before != now:
        why.append(
            f"The loader had {before} batches then and has {'no length' if now is None else now} now. Go on with the "
            "same dataset, batch_size and number of ranks, or from a checkpoint of a whole epoch."
        )
    for reason in why:
        warnings.warn(
            f"The state says that {state['consumed']} batches of this epoch were used, but not which ones: samples may "
            f"be missing or repeated. {reason}",
            TurboWarning,
            stacklevel=3,
        )
