"""Where a loader is in its epoch, counted in batches, and the order of its indices, which can be continued."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import set_shared_state, shared_state, uncollected
from lightning_turbo.errors import TurboWarning

__all__ = [
    "START", "Position", "ResumableOrder", "correct_states", "describe", "end_workers", "generators_of", "length_of",
    "warn_of_gaps", "wrong_kind",
]  # fmt: skip

# The state of a loader that has returned nothing yet.
START: dict[str, Any] = {
    "consumed": 0, "whole": False, "ended": False, "length": None, "order": None, "own": [], "left": [],
    "before": None,
}  # fmt: skip
# Entries. A longer order is drawn as it is needed: each entry of one that is drawn at once takes about 50 bytes.
LONGEST_ORDER = 10_000_000
# Samplers that draw their whole order before its first entry, or from generators that nobody else uses.
_TORCHS = (
    BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
)  # fmt: skip
_END = object()


class Position:
    """How far an iterator is. Its loader keeps it, so that it can be asked after the iterator was dropped.

    Attributes:
        consumed: Batches that were returned or raised, those of an iterator before this one included; ``begun`` those
            alone.
        ended: Whether the end was reached.
        state: What the source said of itself after the last batch that was returned, for loaders with such a state.
        first_rng: The global RNGs before the first batch of the epoch; ``None`` if nobody noted them.
        last_rng: The same before the latest batch, where loading may draw from them.
        next_rng: How they are to be for the next batch, which a Trainer had loaded ahead when the state was taken.
    """

    def __init__(self, consumed: int = 0, first_rng: Any = None, next_rng: Any = None) -> None:
        self.consumed = self.begun = consumed
        self.ended = False
        self.state: Any = None
        self.first_rng, self.last_rng, self.next_rng = first_rng, None, next_rng

    def note(self, rng: dict[str, Any]) -> None:
        """Note the global RNGs before a batch is loaded."""
        self.last_rng = rng
        if self.first_rng is None:
            self.first_rng = rng


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError, AttributeError):
        return None


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


class ResumableOrder:
    """A sampler around a sampler that records how its order began, and can begin there again and skip.

    A loader makes one and keeps it; torch calls ``iter`` for each epoch, twice where there are worker processes. An
    order follows from the states of the random generators when the sampler is asked for an iterator and when its first
    entry is drawn, and from its epoch if it has one. These are recorded; the entries are not kept. Samplers of torch
    draw all entries at the first one, so that nothing depends on how far ahead batches are loaded; others draw when an
    entry is asked for. The generators that the loader and its samplers hold are its own: their states are recorded
    after each entry, and an epoch that is left early puts them back to where a plain loader would have left them.

    Attributes:
        sampler: The sampler inside.
        own: The generators of torch that belong to the loader and its samplers.
        epoch_rng: How the latest order began; ``None`` before its first entry was drawn.
        length: How many entries the latest order has; ``None`` where that is not known.
    """

    def __init__(self, sampler: Any, loader: Any) -> None:
        self.sampler = sampler
        self.own = generators_of(loader.generator, sampler)
        self._counting = [each for each in _samplers_in(sampler) if _has_epoch(each)]
        # Entries that torch's iterator draws before it returns a batch, and where it draws its seed for all epochs.
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        self._is_seeded_once = loader.persistent_workers
        self.epoch_rng: dict[str, Any] | None = None
        self.length: int | None = None
        self._initial: list[Any] = []
        self._states: list[tuple[int, list[Any]]] = []  # of ``own`` after so many entries, where they changed
        self._is_drawing = False
        self._resume: tuple[int, dict[str, Any] | None, list[Any] | None] = (0, None, None)
        self._position = Position()

    def begin(self, state: dict[str, Any], skip: int, position: Position) -> None:
        """Make the next epoch the one that a loader's ``state`` is of, or the one after it where it is whole.

        Args:
            state: What ``PrefetchLoader.state_dict`` returned.
            skip: Entries to leave out at the beginning of an epoch that is not whole.
            position: Where the iterator of that epoch is.
        """
        order, own = state["order"], state.get("own") or None
        if hasattr(self.sampler, "continue_after"):
            self._count_epochs(state)
        self.epoch_rng, self.length, self._states, self._position = None, None, [], position
        self._resume = (0, None, None)
        if order is not None and not state.get("whole"):
            self._check_number("samplers that count epochs", order["epochs"], self._counting)
            self._check_number("random generators", order["iter"]["own"], self.own)
            self._resume = (skip, order, None)
        elif own is not None:
            self._check_number("random generators", own, self.own)
            self._set_own(own)
            # Worker processes that stay had their seed before the state was taken, and draw one here once more.
            self._resume = (0, None, own if self._is_seeded_once else None)
        self._initial = self._own_states()

    def _count_epochs(self, state: dict[str, Any]) -> None:
        """Set the epoch of a sampler that counts its passes: states and passes that gave no batch are not its own."""
        latest = self._position
        if state.get("whole") and state["order"] is not None:
            self.sampler.continue_after(state["order"]["epochs"], over=True)
        elif self.epoch_rng is not None and not (latest.consumed > latest.begun or latest.ended):
            epochs = self.epoch_rng["epochs"]
            if self.sampler.epoch == epochs[0] + 1:
                self.sampler.continue_after(epochs, over=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, order, own = self._resume
        here = shared_state()
        if order is not None:
            for sampler, epoch in zip(self._counting, order["epochs"], strict=True):
                sampler.set_epoch(epoch)  # whoever counts epochs may not have told it yet
            self._set_states(order["iter"])
        began = order or {"iter": self._all_states(), "epochs": [sampler.epoch for sampler in self._counting]}
        entries = iter(self.sampler)  # at which some samplers draw
        if order is not None:
            set_shared_state(here)
        return self._draw(entries, began, skip, own)

    def _draw(self, entries: Iterator[Any], began: dict[str, Any], skip: int, own: Any) -> Iterator[Any]:
        resumed, here = "first" in began, shared_state()
        self._resume = (0, None, None)
        if resumed:
            self._set_states(began["first"])
        elif own is not None:
            self._set_own(own)
        self.epoch_rng = began if resumed else {**began, "first": self._all_states()}
        self._states = [(0, self._own_states())]
        if self.own:
            entries = self._recorded(entries)
        whole = _is_drawn_at_once(self.sampler)
        drawn = list(itertools.islice(entries, None if whole else (skip + 1) * resumed))
        if whole:
            self.length = len(drawn)
        if resumed:
            set_shared_state(here)
        yield from drawn[skip:]
        yield from entries

    def _recorded(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Yield entries, with the states of the own generators after each of them, and after the end."""
        for count in itertools.count(1):
            self._is_drawing = True
            try:
                entry = next(entries, _END)
            finally:
                states = self._own_states()
                if not _equal(states, self._states[-1][1]):
                    self._states.append((count, states))
                self._is_drawing = False
            if entry is _END:
                return
            yield entry

    def own_states(self, at_end: bool = False) -> list[Any]:
        """Return the states of the own generators as a plain loader would leave them at this position, or at its end.

        Before the first batch, as they were before torch drew a seed from them, which it does again. If somebody has
        set them since, as they are.
        """
        position, now = self._position, self._own_states()
        if not position.consumed:
            return self._initial
        drawn_ahead = self._is_drawing or (bool(self._states) and _equal(now, self._states[-1][1]))
        if position.ended or not drawn_ahead:
            return now
        if at_end and self.length is not None:
            return self._states[-1][1]
        return next(states for at, states in reversed(self._states) if at <= position.consumed + self._ahead)

    def put_back(self, position: Position) -> None:
        """Take back what was drawn ahead for an iterator that is left before its end, if it is the latest."""
        if position is self._position and position.consumed and not position.ended:
            self._set_own(self.own_states())

    def _own_states(self) -> list[Any]:
        with uncollected():
            return [generator.get_state() for generator in self.own]

    def _set_own(self, states: list[Any]) -> None:
        with uncollected():
            for generator, state in zip(self.own, states, strict=True):
                generator.set_state(state)

    def _all_states(self) -> dict[str, Any]:
        return {"shared": shared_state(), "own": self._own_states()}

    def _set_states(self, states: dict[str, Any]) -> None:
        self._set_own(states["own"])
        set_shared_state(states["shared"])

    @staticmethod
    def _check_number(what: str, states: list[Any], here: list[Any]) -> None:
        if len(states) != len(here):
            raise ValueError(
                f"The state is of a loader with {len(states)} {what}, and this one has {len(here)}. Load it into a "
                "loader with the same samplers, and with sample_seeds if it had them."
            )


def _is_drawn_at_once(sampler: Any) -> bool:
    """Whether all entries of a sampler can be drawn at its first one, with nothing changed by that."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _TORCHS and len(sampler) <= LONGEST_ORDER


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


def _has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---- States of loaders as a Trainer and its checkpoints see them.


def describe(position: Position, length: int | None) -> dict[str, Any]:
    """Return the count of batches for a state of a loader of this length."""
    whole = position.ended or position.consumed == length
    return {"consumed": position.consumed, "whole": whole, "ended": position.ended, "length": length}


def correct_states(states: Iterable[Any], over: bool, used: int | None = None) -> None:
    """Write into states of loaders what was used in the epoch that they were taken in, and whether it was over.

    Loaders know neither: batches may be returned and not used, an epoch may end before a loader, or continue after it
    with others.

    Args:
        states: What ``state_dict`` of the loaders of a run gave, of any kind; those that count are changed. To do it
            twice changes nothing more.
        over: Whether the last batch of the epoch was used.
        used: Batches that were used of those that all loaders together gave; ``None`` for all that were returned.
    """
    counts = [state for state in states if isinstance(state, dict) and {"consumed", "whole"} <= state.keys()]
    most = max((state["consumed"] for state in counts), default=0)
    unused = 0 if used is None else max(0, most - used)
    for state in counts:
        # One that had ended before the others gave nothing to what was not used.
        rest = min(state["consumed"], most - unused) if state.get("ended") else state["consumed"] - unused
        state["own"] = state.get("left", state.get("own", []))  # a Trainer does not ask for the end
        if unused:  # the one batch that Lightning had fetched ahead is loaded as it was then
            state["next_rng"] = state.get("before") if unused == 1 else None
        state["consumed"] = max(0, rest)
        state["whole"] = over and rest > 0  # at 0 it is the epoch after that was begun


def wrong_kind(loader: Any, state: dict[str, Any]) -> str:
    """Return what to tell somebody who loads a state that is not of this kind of loader."""
    return (
        f"A state with the keys {sorted(state)} does not belong to {type(loader).__name__}. Load the state that the "
        "same class of loader gave over the same kind of dataset."
    )


def warn_of_gaps(loader: Any, state: dict[str, Any]) -> None:
    """Warn of a state whose count of batches does not tell which samples of the epoch were used."""
    if not state["consumed"] or state.get("whole"):
        return
    before, now = state.get("length"), length_of(loader)
    why = []
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        why.append("in_order=False returns batches as they are ready. Leave in_order=False out to go on exactly.")
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
