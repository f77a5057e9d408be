"""Where a loader stands in its epoch, counted in batches that were used."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lightning_turbo.data.randomness import generators_in, parts_of, set_shared_state, shared_state, uncollected
from lightning_turbo.errors import TurboWarning

__all__ = [
    "START", "TRACE", "IndexTape", "OwnGenerator", "Place", "foreign", "has_epoch", "is_between_epochs", "judge_states",
    "length_of", "warn_of_gaps",
]  # fmt: skip

# The state of a loader that has handed out nothing yet.
START: dict[str, Any] = {"consumed": 0, "order": None, "own": [], "whole": False}
# Where a state that another class made of itself holds how many batches it is of, see ``trace.py``.
TRACE = "lightning_turbo"
# The states of a batch that was fetched ahead, of one whose step was not finished, and of the place before them.
KEPT = 3


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None


def foreign(loader: Any, state: dict[str, Any]) -> str:
    """Return what to tell somebody who loads a state that is not of this kind of loader."""
    return (
        f"A state with the keys {sorted(state)} does not belong to {type(loader).__name__}. Load the state that the "
        "same class of loader gave; a StatefulDataLoader's state belongs to PrefetchLoader.of(StatefulDataLoader(...))."
    )


def judge_states(states: Iterable[Any], over: bool, anew: bool = False, used: int | None = None) -> None:
    """Write into states of loaders what was used in the epoch that they were taken in, and whether it was over.

    Loaders know neither: batches may be handed out and not used, an epoch may end before a loader, or go on after it
    with others.

    Args:
        states: What ``state_dict`` of the loaders of a run gave, of any kind; those that count and those that are
            ``traced`` are changed. To do it twice changes nothing more.
        over: Whether the last batch of the epoch was used.
        anew: Whether the epoch after it has loaders of its own, which nothing was drawn for.
        used: Batches that were used of those that all loaders together gave; ``None`` for all that were handed out.
    """
    pairs = [(state, state.get(TRACE, state)) for state in states if isinstance(state, dict)]
    pairs = [(state, count) for state, count in pairs if {"consumed", "whole"} <= count.keys()]
    most = max((count["consumed"] for _, count in pairs), default=0)
    unused = 0 if used is None else max(0, most - used)
    for state, count in pairs:
        # One that had ended before the others gave nothing to what was not used.
        rest = min(count["consumed"], most - unused) if count.get("ended") else count["consumed"] - unused
        count["consumed"] = max(0, rest)
        count["whole"] = over and count["consumed"] > 0  # at 0 it is the epoch after that was begun
        before = None if count["whole"] else count.get("earlier", {}).get(count["consumed"])
        if before is not None:
            state.clear()
            state.update({**before, TRACE: {**count, "ended": False, "earlier": {}, **before[TRACE]}})
        if count["whole"] and anew:
            state.clear()
            state.update(START if count is state else {})


def is_between_epochs(state: Any) -> bool:
    """Whether the state of a loader is known to be of the end of an epoch, or of its beginning."""
    count = state.get(TRACE, state) if isinstance(state, dict) else {}
    return bool(count.get("whole")) or count.get("consumed") == 0


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


class Place:
    """How far an iterator got. Its loader keeps it, so that it can be asked after the iterator was dropped.

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

    def hand_out(self, state: Any) -> None:
        """Count a batch, and take what the source said of itself after it."""
        self.consumed += 1
        self.reached = state
        self.states.append(state)


class IndexTape:
    """A sampler around a sampler that notes how its order began, and can begin there again and skip.

    The order of a sampler follows from the states of the random generators at the moment when its first index is
    drawn, and from its epoch if it has one. That is what is noted; the indices themselves are not kept.

    Where an epoch is broken off, the generators of the sampler are put back to where the last batch that was handed out
    or raised left them.

    Args:
        sampler: A sampler or batch sampler.
        generator: The loader's own random generator, if it has one.

    Attributes:
        began: The states at the first index of the latest epoch; ``None`` before that was drawn.
        own: The generators that belong to the loader and its samplers.
        start: Their states before anything was drawn for the latest epoch.
        place: Where the latest iterator stands.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self.sampler = sampler
        self.began: dict[str, Any] | None = None
        self._skip: tuple[int, dict[str, Any]] | None = None
        self._late: list[Any] | None = None
        self._indices: _Indices | None = None
        self.own = _generators(generator, sampler)
        self.start: list[Any] = []
        self._latest: list[Any] = []
        self._drawing = False  # whether an index was begun that is not noted yet, perhaps in another thread
        self.place = self._handed_out = Place()
        owners: tuple[Any, Any] = (sampler, getattr(sampler, "sampler", None))
        self._counting = [owner for owner in owners if has_epoch(owner)]

    def rewind(self, state: dict[str, Any], skip: int, seeded: bool) -> None:
        """Make the next epoch the one that a loader's ``state`` is of, or that after it where it is whole.

        Args:
            state: What ``PrefetchLoader.state_dict`` returned.
            skip: Indices to leave out at the beginning of an epoch that is not whole.
            seeded: Whether worker processes stay for all epochs: their seed, which the loader's generator gives, was
                drawn before that state was taken.
        """
        self.began = self._late = None
        self.follow(Place(), Place())  # the iterator before, if it is let go of only now, takes nothing back
        if not state.get("whole") and state["order"] is not None:
            self._skip = (skip, state["order"])
        elif state.get("own"):  # older versions do not have it
            self.set_own_states(state["own"])
            self._late = state["own"] if seeded else None
        self.start = self.own_states()

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore[reportArgumentType] - a TypeError where the sampler has no length

    def __iter__(self) -> Iterator[Any]:
        self._indices = _Indices(self._epoch(), self._begin)
        return self._indices

    def _begin(self) -> None:
        self._drawing = True

    def own_states(self) -> list[Any]:
        """Return the states of the generators that belong to the loader and its samplers, as they are now."""
        with uncollected():
            return [generator.get_state() for generator in self.own]

    def set_own_states(self, states: list[Any]) -> None:
        """Set these generators to what ``own_states`` returned, or a version that noted torch's generators alone.

        Raises:
            ValueError: If there are not as many as the states.
        """
        own = self.own
        if len(states) < len(own):
            own = [owned for owned in own if isinstance(owned.generator, torch.Generator)][: len(states)]
        if len(states) != len(own):
            raise ValueError(
                f"The state holds {len(states)} random generators and the loader with its samplers {len(own)}. "
                "Load it into a loader with the same samplers."
            )
        with uncollected():
            for generator, state in zip(own, states, strict=True):
                generator.set_state(state)

    def note(self) -> list[Any]:
        """Return ``own_states``, after an index was drawn."""
        self._latest = self.own_states()
        self._drawing = False
        return self._latest

    def follow(self, place: Place, handed_out: Place) -> None:
        """Take note where the latest iterator stands: that which draws, and what hands its batches out."""
        self.place, self._handed_out = place, handed_out

    def states_now(self) -> list[Any]:
        """Return ``own_states`` as they are without what was drawn ahead, unless somebody else has set them since."""
        latest, place = self._latest, self._handed_out
        now = self.own_states()
        if place.reached is None or place.ended:
            return now
        drawn = self._drawing or self._latest is not latest  # by a thread at this moment
        return place.reached if drawn or all(map(_equal, now, latest)) else now

    def put_back(self, place: Place) -> None:
        """Take back what was drawn ahead for an iterator that is left before its end, if it is the latest."""
        if place is self.place and not place.ended:
            self.set_own_states(self.states_now())

    def draw(self) -> None:
        """Draw the order of the latest epoch now, in this thread, instead of when its first index is asked for."""
        if self._indices is not None:
            self._indices.look()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_indices": None}  # a trainer may keep this object in its records of a loader

    def _epoch(self) -> Iterator[Any]:
        skip, self._skip = self._skip, None
        late, self._late = self._late, None
        if late is not None:
            self.set_own_states(late)
        if skip is None:
            self.began = {
                "shared": shared_state(),
                "own": self.own_states(),
                "epochs": [sampler.epoch for sampler in self._counting],
            }
            yield from self.sampler
            self.note()
            return
        consumed, self.began = skip
        here = shared_state()
        set_shared_state(self.began["shared"])
        self.set_own_states(self.began["own"])
        for sampler, epoch in zip(self._counting, self.began["epochs"], strict=True):
            sampler.set_epoch(epoch)  # whoever counts epochs may not have told it yet
        try:
            indices = _Indices(iter(self.sampler))
            for _ in range(consumed):
                next(indices, None)
            if not consumed:
                indices.look()  # at which the order is drawn
        finally:
            set_shared_state(here)
        yield from indices
        self.note()


class _Indices(Iterator[Any]):
    """An iterator whose next item can be made ahead of its turn."""

    def __init__(self, source: Iterator[Any], begin: Callable[[], None] = lambda: None) -> None:
        self._source = source
        self._begin = begin
        self._ahead: list[Any] = []

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        self._begin()
        return next(self._source)

    def look(self) -> None:
        """Make the next item, if there is one."""
        if not self._ahead:
            self._ahead.extend(itertools.islice(self._source, 1))


def has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


class OwnGenerator:
    """A random generator of torch, Python or NumPy, with the face of torch's.

    Args:
        generator: The generator.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def get_state(self) -> Any:
        """Return its state: a tensor or plain Python objects, so that it loads with ``weights_only=True``."""
        if isinstance(self.generator, torch.Generator):
            return self.generator.get_state()
        if isinstance(self.generator, random.Random):
            return self.generator.getstate()
        if hasattr(self.generator, "bit_generator"):
            return _plain(self.generator.bit_generator.state)
        return _plain(self.generator.get_state(legacy=False))

    def set_state(self, state: Any) -> None:
        """Set it to a state that ``get_state`` returned."""
        if isinstance(self.generator, random.Random):
            self.generator.setstate(state)
        elif hasattr(self.generator, "bit_generator"):
            self.generator.bit_generator.state = state
        else:
            self.generator.set_state(state)


def _generators(generator: Any, sampler: Any) -> list[OwnGenerator]:
    """Find the generators of a loader and in its sampler: not of the process, nor of what loads or trains."""
    shared: list[Any] = [torch.default_generator, random.random.__self__]
    if (numpy := sys.modules.get("numpy")) is not None:
        shared.append(numpy.random.mtrand._rand)
    return [
        OwnGenerator(found)
        for found in generators_in([generator, *parts_of(sampler)], _parts_of_an_order)
        if not isinstance(found, random.SystemRandom) and all(found is not one for one in shared)  # it has no state
    ]


def _parts_of_an_order(value: Any) -> Iterable[Any]:
    """Yield what an object holds that a sampler leads to; nothing if it is there to load or to train."""
    if isinstance(value, Sampler):
        return parts_of(value)
    if hasattr(value, "__getitem__") and not isinstance(value, (dict, list, tuple)):
        return [getattr(value, "_sampler", None)]  # a dataset, unless it is Lightning's face of a sampler
    trains = isinstance(value, (torch.nn.Module, DataLoader)) or any(
        kind.__module__.startswith(("lightning.pytorch.", "pytorch_lightning.")) for kind in type(value).__mro__
    )
    return () if trains else parts_of(value)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
