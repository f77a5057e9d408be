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
    "KEY", "START", "Position", "ResumableSampler", "add_history", "begin_epoch", "correct_states", "generators_of",
    "has_epoch", "is_between_epochs", "length_of", "note_state", "state_to_begin_with", "warn_of_gaps", "wrong_kind",
]  # fmt: skip

# The state of a loader that has handed out nothing yet.
START: dict[str, Any] = {"consumed": 0, "order": None, "own": [], "whole": False}
# Under which key a state that another class made of itself holds what it leaves out.
KEY = "lightning_turbo"
# The states of a batch that was fetched ahead, of one whose step was not finished, and of the batch before them.
KEPT = 3


class Position:
    """How far an iterator is. Its loader keeps it, so that it can be asked after the iterator was dropped.

    Args:
        consumed: Batches handed out before.
        state: What the source says of itself now, if it does before its first batch.

    Attributes:
        consumed: Batches handed out.
        states: What the source said of itself after the last of them, the latest at the end.
        reached: The same after the last batch that was handed out or raised; ``None`` if nothing was taken beyond it.
        ended: Whether the end was reached.
    """

    def __init__(self, consumed: int = 0, state: Any = None) -> None:
        self.consumed = self._begun = consumed
        self.states: deque[Any] = deque([] if state is None else [state], maxlen=KEPT)
        self.reached = state
        self.ended = False

    @property
    def state(self) -> Any:
        """The latest of the states; ``None`` if there is none."""
        return self.states[-1] if self.states else None

    @property
    def untouched(self) -> bool:
        """Whether neither a batch nor the end was handed out."""
        return self.consumed == self._begun and not self.ended

    def advance(self, state: Any) -> None:
        """Count a batch, and take what the source said of itself after it."""
        self.consumed += 1
        self.reached = state
        self.states.append(state)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None


# ---- The order of a sampler, for loaders that keep no state of their own.


class ResumableSampler:
    """A sampler around a sampler that records how its order began, and can begin there again and skip.

    The order of a sampler follows from the states of the random generators at the moment when its first index is
    drawn, and from its epoch if it has one. That is what is recorded; the indices themselves are not kept. Its own
    generators are those of torch that the loader and its samplers hold; after each index, their states are recorded, so
    that an epoch that is broken off can put them back to where the last batch that was handed out left them.

    Args:
        sampler: A sampler or batch sampler.
        generator: The loader's own random generator, if it has one.

    Attributes:
        began: The states at the first index of the latest epoch; ``None`` before that was drawn.
        own: The generators that belong to the loader and its samplers.
        start: Their states before anything was drawn for the latest epoch.
        latest: Their states after the last index that was drawn.
        position: Where the latest iterator is.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self.sampler = sampler
        self.own = generators_of(generator, sampler)
        self._counting = [each for each in _samplers_in(sampler) if has_epoch(each)]
        self.began: dict[str, Any] | None = None
        self.start: list[Any] = []
        self.latest: list[Any] = []
        self.position = Position()
        self._skip: tuple[int, dict[str, Any]] | None = None
        self._late: list[Any] | None = None
        self._indices: _Indices | None = None

    def rewind(self, state: dict[str, Any], skip: int, seeded: bool) -> None:
        """Make the next epoch the one that a loader's ``state`` is of, or the one after it where it is whole.

        Args:
            state: What ``PrefetchLoader.state_dict`` returned.
            skip: Indices to leave out at the beginning of an epoch that is not whole.
            seeded: Whether worker processes stay for all epochs: their seed, which the loader's generator gives, was
                drawn before that state was taken.
        """
        if hasattr(self.sampler, "continue_after"):
            self._count_epochs(state)
        self.began = self._late = None
        self.position = Position()  # the iterator before, if it is let go of only now, puts nothing back
        if not state.get("whole") and state["order"] is not None:
            self._skip = (skip, state["order"])
        elif state.get("own"):  # versions before 0.9 do not have it
            self._set_own_states(state["own"])
            self._late = state["own"] if seeded else None
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
        self._indices = _Indices(self._epoch(), self._own_states)
        return self._indices

    def _own_states(self) -> list[Any]:
        with uncollected():
            return [generator.get_state() for generator in self.own]

    def _set_own_states(self, states: list[Any]) -> None:
        if len(states) != len(self.own) or not all(isinstance(state, torch.Tensor) for state in states):
            raise ValueError(
                f"The state holds {len(states)} random generators and the loader with its samplers {len(self.own)} of "
                "torch. Load it into a loader with the same samplers; generators of NumPy and Python in samplers, "
                "which earlier versions saved, are not restored any more."
            )
        with uncollected():
            for generator, state in zip(self.own, states, strict=True):
                generator.set_state(state)

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

    def _epoch(self) -> Iterator[Any]:
        skip, self._skip = self._skip, None
        late, self._late = self._late, None
        if late is not None:
            self._set_own_states(late)
        if skip is None:
            epochs = [sampler.epoch for sampler in self._counting]
            self.began = {"shared": shared_state(), "own": self._own_states(), "epochs": epochs}
            yield from self.sampler
            return
        consumed, self.began = skip
        here = shared_state()
        set_shared_state(self.began["shared"])
        self._set_own_states(self.began["own"])
        epochs = self.began["epochs"]
        if len(epochs) != len(self._counting):
            raise ValueError(
                f"The state holds {len(epochs)} epochs of samplers, and the loader has {len(self._counting)} samplers "
                "that count epochs. In the middle of an epoch, load it into a loader with the same samplers, and with "
                "sample_seeds if it had them; or begin with the next epoch."
            )
        for sampler, epoch in zip(self._counting, epochs, strict=True):
            sampler.set_epoch(epoch)  # whoever counts epochs may not have told it yet
        try:
            indices = iter(self.sampler)
            first = list(itertools.islice(indices, consumed, consumed + 1))  # at which the order is drawn
        finally:
            set_shared_state(here)
        yield from first
        yield from indices


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
    """Return the generators of torch that a loader and its samplers hold, that of the process not among them.

    Args:
        generator: The loader's own, if it has one.
        sampler: Its sampler or batch sampler.
    """
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


# ---- States of loaders as a Trainer and its checkpoints see them.


def correct_states(states: Iterable[Any], over: bool, replaced: bool = False, used: int | None = None) -> None:
    """Write into states of loaders what was used in the epoch that they were taken in, and whether it was over.

    Loaders know neither: batches may be handed out and not used, an epoch may end before a loader, or go on after it
    with others.

    Args:
        states: What ``state_dict`` of the loaders of a run gave, of any kind; those that count and those with a history
            (see ``add_history``) are changed. To do it twice changes nothing more.
        over: Whether the last batch of the epoch was used.
        replaced: Whether the epoch after it has new loaders, for which nothing was drawn.
        used: Batches that were used of those that all loaders together gave; ``None`` for all that were handed out.
    """
    pairs = [(state, state.get(KEY, state)) for state in states if isinstance(state, dict)]
    pairs = [(state, count) for state, count in pairs if {"consumed", "whole"} <= count.keys()]
    most = max((count["consumed"] for _, count in pairs), default=0)
    unused = 0 if used is None else max(0, most - used)
    for state, count in pairs:
        # One that had ended before the others gave nothing to what was not used.
        rest = min(count["consumed"], most - unused) if count.get("ended") else count["consumed"] - unused
        _correct_state(state, count, max(0, rest), over, replaced)


def _correct_state(state: dict[str, Any], count: dict[str, Any], consumed: int, over: bool, replaced: bool) -> None:
    whole = over and consumed > 0  # at 0 it is the epoch after that was begun
    count.update(consumed=consumed, whole=whole)
    before = None if whole else count.get("earlier", {}).get(consumed)
    if before is not None:
        state.clear()
        state.update({**before, KEY: {**count, "ended": False, "earlier": {}, **before[KEY]}})
    if whole and replaced:
        state.clear()
        state.update(START if count is state else {})


def is_between_epochs(state: Any) -> bool:
    """Whether the state of a loader is known to be of the end of an epoch, or of its beginning."""
    count = state.get(KEY, state) if isinstance(state, dict) else {}
    return bool(count.get("whole")) or count.get("consumed") == 0


def wrong_kind(loader: Any, state: dict[str, Any]) -> str:
    """Return what to tell somebody who loads a state that is not of this kind of loader."""
    return (
        f"A state with the keys {sorted(state)} does not belong to {type(loader).__name__}. Load the state that the "
        "same class of loader gave; a StatefulDataLoader's state belongs to PrefetchLoader.of(StatefulDataLoader(...))."
    )


def warn_of_gaps(loader: Any, state: dict[str, Any]) -> None:
    """Warn of a state whose count of batches does not tell which samples of the epoch were used.

    Args:
        loader: The loader that goes on from it.
        state: What ``state_dict`` of a loader gave that counts.
    """
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
            f"{state['consumed']} batches of this epoch were used, and that does not tell which: some are missed, or "
            f"come twice. {reason}",
            TurboWarning,
            stacklevel=3,
        )


# ---- States that a loader's class makes of itself, as torchdata's, with what it takes to go back by some batches.

# Batches of the epoch that were handed out; whether the epoch was over, as a Trainer knows; whether its end was handed
# out; states before, by their batches; whether only the last batch of the epoch before is left; what the class leaves
# out: the state of the loader's generator, from which it draws as it begins, and the epochs of samplers that count;
# the epochs of those after the epoch that is over, if they are known.
_HISTORY: dict[str, Any] = {
    "consumed": 0, "whole": False, "ended": False, "earlier": {}, "over": False, "generator": None, "epochs": [],
    "next": [],
}  # fmt: skip


def note_state(state_dict: Callable[[], Any], loader: Any) -> Any:
    """Return a copy of what a class says of itself, and what it leaves out of its loader."""
    state = copy.deepcopy(state_dict())
    drawn = None if loader.generator is None else loader.generator.get_state()
    return {**state, KEY: {"generator": drawn, "epochs": _epochs(loader)}} if isinstance(state, dict) else state


def add_history(state: Any, position: Position | None) -> Any:
    """Return a state with the ones before it, which ``correct_states`` may take in its place.

    Args:
        state: What the class said of itself; whatever is no ``dict`` is returned as it is.
        position: Where its iterator is, with what ``note_state`` returned after the latest batches.
    """
    known = state.get(KEY, {}) if isinstance(state, dict) else {}
    if position is None or not isinstance(position.state, dict) or "over" in known:
        return {**state, KEY: dict(known)} if known else state
    earlier = _by_batches(position)
    if not position.ended:
        del earlier[position.consumed]
    return _with_history(state, **known, consumed=position.consumed, ended=position.ended, earlier=earlier)


def state_to_begin_with(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that an epoch begins with after one with a history was loaded."""
    known = state.get(KEY, {})
    if known.get("whole") or known.get("ended"):
        return _state_after_epoch(state, known["earlier"], known["consumed"], known["ended"])
    return _with_history(state, **{**known, "earlier": {}})


def begin_epoch(loader: Any, behind: Any, loaded: dict[str, Any], position: Position | None) -> tuple[Any, Any]:
    """Begin an epoch of a class with a state of its own.

    Args:
        loader: The loader.
        behind: The class, as ``super()``.
        loaded: What ``state_to_begin_with`` returned for a state that was loaded, or ``START``.
        position: Where the iterator before is, if there is one.

    Returns:
        The iterator, and the state that its epoch begins with, if that is known.
    """
    if loaded is START:
        if position is None or position.untouched or not isinstance(position.state, dict):
            return behind.__iter__(), None
        start = _state_after_epoch(position.state, _by_batches(position), position.consumed, position.ended)
        start[KEY]["next"] = _epochs(loader)
        return behind.__iter__(), start
    return _begin_loaded(loader, behind, loaded)


def _begin_loaded(loader: Any, behind: Any, loaded: dict[str, Any]) -> tuple[Any, Any]:
    known, theirs = loaded[KEY], {name: value for name, value in loaded.items() if name != KEY}
    after = known["next"] or _epochs(loader)
    _set_epochs(loader, known["epochs"])  # whoever counts them may not have told it yet
    if theirs:
        behind.load_state_dict(theirs)
    source = behind.__iter__()
    _count_once(source, theirs)
    if known["generator"] is not None and loader.generator is not None:
        loader.generator.set_state(known["generator"])
    if known["over"]:
        next(source, None)
        if not loader.persistent_workers and hasattr(source, "_shutdown_workers"):
            source._shutdown_workers()
        _set_epochs(loader, after)
        source, loaded = behind.__iter__(), {**loaded, KEY: {**known, "next": after}}
    return source, loaded


def _by_batches(position: Position) -> dict[int, Any]:
    return dict(zip(itertools.count(position.consumed, -1), reversed(position.states)))


def _state_after_epoch(state: dict[str, Any], earlier: dict[int, Any], consumed: int, ended: bool) -> dict[str, Any]:
    """Return what an epoch begins with after one that was over.

    Only who has run to the end of an epoch begins the next as it would have. So that is the state from which a single
    ``next`` leads there: to the last batch, or to the end if that was handed out.
    """
    before = earlier.get(consumed - (not ended))
    if before is None or before[KEY].get("over"):  # that one is of the epoch before
        before = state
    return _with_history(before, over=True, **{name: before[KEY][name] for name in ("generator", "epochs")})


def _count_once(source: Any, state: dict[str, Any]) -> None:
    """Have an iterator of torchdata's count what it runs through as it goes on; it does so twice.

    From the state that it would give then, nothing could go on: it tells of twice as many batches.

    Args:
        source: The iterator.
        state: What it was made from.
    """
    snapshot = state.get("_snapshot")
    begun = state.get("_num_yielded") if snapshot is None else snapshot["_snapshot_step"]
    if begun is None or not hasattr(source, "_num_yielded"):
        return
    surplus = source._num_yielded - begun - state.get("_steps_since_snapshot", 0)
    source._num_yielded -= surplus
    if snapshot is not None and source._snapshot["_snapshot_step"] != begun:
        source._snapshot["_snapshot_step"] -= surplus


def _epochs(loader: Any) -> list[int]:
    return [sampler.epoch for sampler in _counting(loader)]


def _set_epochs(loader: Any, epochs: list[int]) -> None:
    for sampler, epoch in zip(_counting(loader), epochs, strict=False):
        sampler.set_epoch(epoch)


def _counting(loader: Any) -> list[Any]:
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [sampler for sampler in {id(each): each for each in samplers}.values() if has_epoch(sampler)]


def _with_history(state: dict[str, Any], **known: Any) -> dict[str, Any]:
    return {**state, KEY: {**_HISTORY, **known}}
