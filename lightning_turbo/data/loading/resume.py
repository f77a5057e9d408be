"""Where a loader is in its epoch, counted in batches, and the order of its indices, which can be continued."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import (
    attributes_of,
    generator_state,
    generators_at,
    generators_in,
    is_a,
    same_random_numbers,
    same_states,
    set_generator_state,
    set_shared_state,
    shared_state,
    torch_state,
)
from lightning_turbo.data.orders.sharding import Dealing, draw_order, refuse
from lightning_turbo.errors import TurboWarning

__all__ = [
    "FRESH_STATE", "Counters", "Position", "ResumableOrder", "batches_before", "count_from", "describe",
    "generators_of", "length_of", "used_samples", "warn_of_gaps", "write_used_batches", "wrong_kind",
]  # fmt: skip

# The state of a loader that has returned nothing yet. What stands under each key:
#   consumed, ended, length: batches that were used, whether the end was reached, how many batches the loader had.
#   whole: whether the epoch is over, so that the next iter() begins the one after it.
#   order: how this epoch began, from which its order follows. "iter": the random generators at iter(). "first": those
#     before the first entry. Of both, "shared" are the global ones, and "own" those of the loader and its samplers.
#     "epochs": those of samplers that have one. Of a stream, "iter" and "first", before its first batch, are global.
#   own: the generators of the loader and its samplers, as the next epoch finds them. left: the same if nobody asks for
#     the end, at which some samplers draw once more, as a Trainer does not.
#   before: the global RNGs before the latest batch. next_rng: before the batch that comes next, if that was loaded
#     already when the state was taken; there only in states that write_used_batches has changed.
#   held: the generators that the dataset holds.
#   samples: what ResumableOrder.samples or, of a stream, streams.place_of returned.
FRESH_STATE: dict[str, Any] = {
    "consumed": 0, "whole": False, "ended": False, "length": None, "order": None, "own": [], "left": [],
    "before": None, "held": [],
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
        consumed: Batches of the epoch that were returned or raised.
        begun: How many of them were so before this iterator.
        ended: Whether the end was reached.
        states: What the source said of itself after the last two batches that were returned, with the numbers of
            batches; the last one may be of the end. For loaders and streams with such a state.
        samples: What the state that this iterator began with told of its samples, if it is one of other batches.
        rng_before_first: The global RNGs before the first batch of the epoch; ``None`` if nobody noted them.
        rng_before_latest: The same before the latest batch, where loading may draw from them.
        rng_for_next: How they are to be for the next batch, which a Trainer had loaded ahead when the state was taken.
        dataset_generators: Those that the dataset holds, if it is loaded in this process; noted with the global ones.
    """

    def __init__(self, consumed: int = 0, rng_for_next: Any = None, dataset_generators: Sequence[Any] = ()) -> None:
        self.consumed = self.begun = consumed
        self.ended = False
        self.states: list[tuple[int, Any]] = []
        self.samples: dict[str, Any] | None = None
        self.rng_before_first: Any = None
        self.rng_before_latest: Any = None
        self.rng_for_next, self.dataset_generators = rng_for_next, dataset_generators

    @property
    def is_untouched(self) -> bool:
        """Whether the iterator has returned nothing, so that a state that was loaded before it still holds."""
        return self.consumed == self.begun and not self.ended

    def keep(self, state: Any) -> None:
        """Keep what the source said of itself at this place."""
        earlier = [each for each in self.states if each[0] < self.consumed]  # the end is at the last batch's number
        self.states = [*earlier[-1:], (self.consumed, state)]

    def note(self) -> AbstractContextManager[None]:
        """Note the random generators before a batch is loaded, and return in what it is to be loaded."""
        noted, self.rng_for_next = self.rng_for_next, None
        self.rng_before_latest = noted or shared_state(self.dataset_generators)
        if self.rng_before_first is None:
            self.rng_before_first = self.rng_before_latest
        return generators_at(noted, self.dataset_generators) if noted else nullcontext()

    def go_on(self, states: Sequence[Any]) -> None:
        """Set the generators that the dataset holds to ``states``, those of a dataset like it."""
        if states and len(states) != len(self.dataset_generators):
            warnings.warn(
                f"The state is of a dataset that held {len(states)} random generators, and this one holds "
                f"{len(self.dataset_generators)}: they stay as they are, and samples may differ from those of a run "
                "that was not stopped. Make the generators in the dataset's __init__.",
                TurboWarning,
                stacklevel=2,
            )
            return
        for generator, state in zip(self.dataset_generators, states, strict=False):
            set_generator_state(generator, state)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or ``None`` if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError, AttributeError):
        return None


class _NextOrder(NamedTuple):
    """What the next ``iter()`` of a ``ResumableOrder`` gives: by default an epoch from its beginning."""

    skip: int = 0  # entries to leave out
    epoch_rng: dict[str, Any] | None = None  # how the epoch began that it is the rest of
    drawn: int = 1  # entries of that epoch that were drawn already
    samples: dict[str, Any] | None = None  # of that epoch, if it began with other ranks or batches
    before_seed: dict[str, Any] | None = None  # states of the generators, for which torch's seed was never drawn


class ResumableOrder:
    """A sampler around a sampler that records how its order began, and can begin there again and skip.

    A loader makes one and keeps it; torch calls ``iter`` for each epoch, twice where there are worker processes. An
    order follows from the states of the random generators when the sampler is asked for an iterator and when its first
    entry is drawn, and from its epoch if it has one. These are recorded; the entries are not kept. Samplers of torch
    draw all entries at the first one, so that nothing depends on how far ahead batches are loaded; others draw when an
    entry is asked for. The states of the generators that the loader and its samplers hold are recorded after each
    entry, and an epoch that is left early puts them back to where a plain loader would have left them.

    Attributes:
        sampler: The sampler inside.
        generators: Those that belong to the loader and its samplers.
        counters: Numbers that its samplers keep.
        epoch_rng: How the latest order began; ``None`` before that, and without ``first`` before its first entry.
        length: How many entries the latest order has; ``None`` where that is not known.
    """

    def __init__(self, sampler: Any, loader: Any) -> None:
        self.sampler = sampler
        self.generators = generators_of(loader.generator, sampler)
        self._counting = [each for each in _samplers_in(sampler) if _has_epoch(each)]
        self.counters = Counters(sampler)
        # Entries that torch's iterator draws before it returns a batch, and where it draws its seed for all epochs.
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        # Processes that stay are seeded at the first iter(): a run that goes on draws that seed again.
        self._is_seeded_once = loader.persistent_workers
        self.epoch_rng: dict[str, Any] | None = None
        self.length: int | None = None
        # A number of entries, and the states of ``generators`` after it, where they changed. -1: before torch drew its
        # seed from them; 0: after it, before the first entry.
        self._recorded_states: list[tuple[int, list[Any]]] = []
        self._draws = 0  # begun and ended: odd while an entry is drawn, by a background thread too
        self._next_order = _NextOrder()
        self._position = Position()

    def samples(self) -> dict[str, Any] | None:
        """Return what order the latest epoch deals out, and how, so that other ranks and batch sizes can go on with it.

        Returns:
            ``order``, what ``draw_order`` takes; ``ranks`` and ``batch_size``, by which batches are counted in samples;
            ``at``, where this way of dealing began: after so many samples of the order and batches of the epoch, or
            ``None`` for the whole epoch. ``None`` for a sampler of which no such order is known.
        """
        dealing = Dealing.of(self.sampler)
        if dealing is None or self.epoch_rng is None:
            return None
        here = {"ranks": dealing.ranks, "batch_size": dealing.batch_size}
        began = self._position.samples
        if began is not None:
            return {**here, "order": began["order"], "at": began["at"]}
        epochs = self.epoch_rng["epochs"]
        # The last is that of the sampler inside, if it has one. Seeds of samples follow from it.
        order = dealing.describe(epochs[-1] if epochs else 0, self._drawn_from(dealing))
        return {**here, "order": order, "at": None}

    def _drawn_from(self, dealing: Dealing) -> dict[str, Any] | None:
        """Return the state of the generator that the order was drawn from, before it was."""
        first, generator = (self.epoch_rng or {}).get("first"), getattr(dealing.sampler, "generator", None)
        if first is None:
            return None
        for own, state in zip(self.generators, first["own"], strict=True):
            if own is generator:
                return {"own": True, "state": state}
        return {"own": False, "state": first["shared"]["torch"]}

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of a loader with other ranks or batches as one of this loader: the same samples were used.

        Args:
            state: What ``PrefetchLoader.state_dict`` returned. One of the same ranks and batches is returned itself.

        Raises:
            ValueError: If it is of the middle of an epoch of another dataset, sampler or seed.
        """
        samples, dealing = state.get("samples"), Dealing.of(self.sampler)
        if samples is None or state.get("whole"):
            return state
        order = samples["order"]
        if dealing is None:
            refuse("sampler", order["sampler"], type(getattr(self.sampler, "sampler", self.sampler)).__name__)
        dealing.check(order)
        as_before = order["sampler"] == type(dealing.sampler).__name__ and samples["ranks"] == dealing.ranks
        if as_before and (samples["batch_size"] == dealing.batch_size or not state["consumed"]):
            return state
        used = used_samples(state)
        if not used:
            return dict(FRESH_STATE)
        number = dealing.count_batches() - dealing.count_batches(used)
        here = {"ranks": dealing.ranks, "batch_size": dealing.batch_size}
        own = state["own"] if len(state["own"]) == len(self.generators) else self._generator_states()
        return {
            **state, "consumed": number, "ended": False, "length": dealing.count_batches(), "own": own, "left": own,
            "before": None, "next_rng": None,
            "order": {**state["order"], "epochs": [order["epoch"]] * len(self._counting)},
            "samples": {**here, "order": order, "at": {"samples": used, "batches": number}},
        }  # fmt: skip

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
        self.epoch_rng, self.length, self._position, self._next_order = None, None, position, _NextOrder()
        samples, is_whole = state.get("samples"), state.get("whole")
        if samples is not None and samples["at"] is not None and not is_whole:
            # The rest of an epoch that began with other ranks or batches: its order is drawn by itself, and the
            # generators stand where the epoch after it finds them.
            position.samples = samples
            self._next_order = _NextOrder(skip, order, samples=samples)
            if own is not None:
                self._set_generators(own)
        elif order is not None and not is_whole:
            # The rest of an epoch of this loader: the sampler draws its order again, from the states at its beginning,
            # which are set when it is asked for. One that draws entry by entry goes on with the generators as they are
            # after the last entry that was drawn, be it for worker processes or for a batch that was not used.
            self._check_number("samplers that count epochs", order["epochs"], self._counting)
            self._check_number("random generators", order["iter"]["own"], self.generators)
            drawn = skip + self._ahead + (state.get("next_rng") is not None)
            self._next_order = _NextOrder(skip, order, max(1, drawn))
        else:
            # The epoch after one that is over: from the generators as that one left them. Worker processes that stay
            # had their seed before the state was taken, and draw one here once more.
            if own is not None:
                self._check_number("random generators", own, self.generators)
                self._set_generators(own)
            if self._is_seeded_once and is_whole:
                self._next_order = _NextOrder(before_seed=self._all_states())
        self._recorded_states = [(-1, self._generator_states())]

    def _count_epochs(self, state: dict[str, Any]) -> None:
        """Set the epoch of a sampler that counts its passes: states and passes that gave no batch are not its own."""
        if state.get("whole") and state["order"] is not None:
            self.sampler.continue_after(state["order"]["epochs"], over=True)
        elif self.epoch_rng is not None and self._position.is_untouched:
            epochs = self.epoch_rng["epochs"]
            if self.sampler.epoch == epochs[0] + 1:
                self.sampler.continue_after(epochs, over=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        order = self._next_order.epoch_rng
        self.counters.begin()
        if self._next_order.samples is not None:
            self.epoch_rng = order
            return self._draw_rest(self._next_order)
        if order is None:
            if self._next_order.before_seed is not None:
                self._set_states(self._next_order.before_seed)
            self.epoch_rng = {"iter": self._all_states(), "epochs": [sampler.epoch for sampler in self._counting]}
            return self._draw(iter(self.sampler), self.epoch_rng, self._next_order)
        self.epoch_rng = order
        for sampler, epoch in zip(self._counting, order["epochs"], strict=True):
            sampler.set_epoch(epoch)  # whoever counts epochs may not have told it yet
        with same_random_numbers():
            self._set_states(order["iter"])
            entries = iter(self.sampler)  # at which some samplers draw
        return self._draw(entries, order, self._next_order)

    def _draw(self, entries: Iterator[Any], began: dict[str, Any], next_order: _NextOrder) -> Iterator[Any]:
        # An epoch that is continued has the states before its first entry; one that begins takes note of them here.
        self._next_order, first = _NextOrder(), began.get("first")
        with nullcontext() if first is None else same_random_numbers():
            if first is not None:
                self._set_states(first)
            self.epoch_rng = {**began, "first": first or self._all_states()}
            self._recorded_states.append((0, self._generator_states()))
            if self.generators:
                entries = self._recording(entries)
            drawn: list[Any] = []
            if _is_drawn_at_once(self.sampler):
                drawn = list(entries)
                self.length = len(drawn)
            elif first is not None:
                drawn = list(itertools.islice(entries, next_order.drawn))
        # Of an order that was drawn whole, nothing is left in ``entries``.
        yield from drawn[next_order.skip :]
        yield from entries

    def _draw_rest(self, next_order: _NextOrder) -> Iterator[Any]:
        """Yield the rest of an order that began with other ranks or batches, of which the sampler inside is not asked.

        Its epoch counts as one that it was asked for.
        """
        self._next_order, samples, dealing = _NextOrder(), next_order.samples, Dealing.of(self.sampler)
        assert samples is not None
        assert dealing is not None
        order, at = samples["order"], samples["at"]
        entries = list(dealing.rest(draw_order(order), at["samples"], order["epoch"], at["batches"]))
        self.length = at["batches"] + len(entries)
        if hasattr(self.sampler, "continue_after"):
            self.sampler.continue_after([order["epoch"]], over=True)
        yield from entries[next_order.skip :]

    def _recording(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Yield entries, with the states of the own generators after each of them, and after the end."""
        for count in itertools.count(1):
            self._draws += 1
            try:
                entry = next(entries, _END)
            finally:
                states = self._generator_states()
                if not same_states(states, self._recorded_states[-1][1]):
                    self._recorded_states.append((count, states))
                self._draws += 1
            if entry is _END:
                return
            yield entry

    def states_here(self) -> list[Any]:
        """Return the states of the generators as a plain loader would leave them at this position.

        Before the first batch, as they were before torch drew a seed from them, which it does again. If somebody has
        set them since, as they are.
        """
        position = self._position
        if not position.consumed:
            return self._recorded_states[0][1]
        if position.ended or self._somebody_set_them():
            return self._generator_states()
        return self._states_after(position.consumed + self._ahead)

    def _states_after(self, entries: int) -> list[Any]:
        return next(states for at, states in reversed(self._recorded_states) if at <= entries)

    def states_at_end(self) -> list[Any]:
        """Return them as a plain loader would leave them if it was asked for the end of an epoch that is over."""
        # Where the order was drawn whole, the last recorded states are those after its end.
        is_known = self._position.consumed and self.length is not None
        if not is_known or self._position.ended or self._somebody_set_them():
            return self.states_here()
        return self._recorded_states[-1][1]

    def _somebody_set_them(self) -> bool:
        # States that are read while an entry is drawn are of no position, and differ from the last recorded ones.
        draws, now, last = self._draws, self._generator_states(), self._recorded_states[-1][1]
        is_drawing = draws % 2 == 1 or draws != self._draws
        return not is_drawing and not same_states(now, last)

    def put_back(self, position: Position) -> None:
        """Take back what was drawn ahead for an iterator that is left before its end, if it is the latest."""
        # Also before the first batch, as entries for worker processes are drawn at once.
        has_drawn = len(self._recorded_states) > 1
        if position is self._position and has_drawn and not (position.ended or self._somebody_set_them()):
            self._set_generators(self._states_after(position.consumed + self._ahead))

    def _generator_states(self) -> list[Any]:
        return [generator_state(generator) for generator in self.generators]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            set_generator_state(generator, state)

    def _all_states(self) -> dict[str, Any]:
        # Samplers of torch draw from torch alone, and to read NumPy's state takes as long as to load a small batch.
        shared = {"torch": torch_state()} if _is_torchs(self.sampler) else shared_state()
        return {"shared": shared, "own": self._generator_states()}

    def _set_states(self, states: dict[str, Any]) -> None:
        self._set_generators(states["own"])
        set_shared_state(states["shared"])

    @staticmethod
    def _check_number(what: str, states: list[Any], here: list[Any]) -> None:
        if len(states) != len(here):
            raise ValueError(
                f"The state is of a loader with {len(states)} {what}, and this one has {len(here)}. Load it into a "
                "loader with the same samplers, and with sample_seeds if it had them."
            )


class Counters:
    """The numbers that samplers of other packages keep; one that counts passes may give an order that no state tells.

    A sampler that has ``set_epoch`` is not looked at: its epoch is part of the state.
    """

    def __init__(self, sampler: Any) -> None:
        self._samplers = [each for each in _samplers_in(sampler) if type(each) not in _TORCHS and not _has_epoch(each)]
        self._made = self._began = self._numbers()

    def _numbers(self) -> dict[tuple[str, str], int]:
        """Return the integers among the attributes, by class and name."""
        return {
            (type(each).__name__, name): value
            for each in self._samplers
            for name, value in attributes_of(each).items()
            if type(value) is int
        }

    def begin(self) -> None:
        """Note the numbers at the beginning of a pass."""
        if self._samplers:
            self._began = self._numbers()

    def warn(self, over: bool) -> None:
        """Warn if the pass under way, or the one after it if it is over, begins with other numbers than the first."""
        now = self._numbers() if over else self._began
        for (kind, name), value in self._made.items():
            if now.get((kind, name), value) != value:
                warnings.warn(
                    f"{kind}.{name} was {value} at first and is {now[kind, name]} now. If the order follows from it, a "
                    f"run that goes on from this state has another order, because no state holds it. Give {kind} a "
                    "set_epoch(epoch) that sets its attribute epoch, or a random generator in an attribute.",
                    TurboWarning,
                    stacklevel=4,
                )


def _is_drawn_at_once(sampler: Any) -> bool:
    """Whether all entries of a sampler can be drawn at its first one, with nothing changed by that."""
    return _is_torchs(sampler) and len(sampler) <= LONGEST_ORDER


def _is_torchs(sampler: Any) -> bool:
    """Whether a sampler, with the one that its batches are made of, is of a class of torch's."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _TORCHS


def generators_of(generator: torch.Generator | None, sampler: Any) -> list[Any]:
    """Return the random generators that a loader and its samplers hold, those of the process not among them."""
    samplers = _samplers_in(sampler)
    held = [generator, *(value for each in samplers for value in attributes_of(each).values())]
    # The samplers themselves are looked at one by one, and generators of the data they are over are not theirs.
    parts = [each for each in held if not _is_data(each) and all(each is not known for known in samplers)]
    return generators_in(parts)


def _is_data(each: Any) -> bool:
    return is_a(each, Dataset) or (hasattr(type(each), "__getitem__") and not is_a(each, (dict, list, tuple)))


def _samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it and those in turn hold, Lightning's wrapper around one included."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        held = attributes_of(each)
        waiting += [value for value in held.values() if is_a(value, Sampler)]
        waiting += [held.get("sampler"), attributes_of(held.get("dataset")).get("_sampler")]
    return found


def _has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


# ---- States of loaders as a Trainer and its checkpoints see them.


def describe(position: Position, length: int | None) -> dict[str, Any]:
    """Return the count of batches for a state of a loader of this length."""
    whole = position.ended or position.consumed == length
    return {"consumed": position.consumed, "whole": whole, "ended": position.ended, "length": length}


def batches_before(state: dict[str, Any]) -> int:
    """Return how many batches of an epoch a state counts that its order does not begin with."""
    at = (state.get("samples") or {}).get("at")
    return 0 if at is None or state.get("whole") else at["batches"]


def used_samples(state: dict[str, Any]) -> int:
    """Return how many samples of the order were used by all ranks together, or of a stream by this one."""
    samples = state["samples"]
    at = samples["at"] or {"samples": 0, "batches": 0}
    used = at["samples"] + (state["consumed"] - at["batches"]) * samples["batch_size"] * (samples["ranks"] or 1)
    length = samples["order"]["length"]
    if length is None:
        return used
    return length if state["ended"] else min(used, length)


def count_from(state: dict[str, Any], number: int, ended: bool) -> dict[str, Any]:
    """Return a state that ``ResumableOrder.adapt`` made, with so many batches as used; if it ended, none is left."""
    samples = state["samples"]
    # Of a stream the samples are not counted; one that ended is not begun.
    at = samples["order"]["length"] if ended and samples["ranks"] else samples["at"]["samples"]
    changed = {**samples, "at": {"samples": at, "batches": number}}
    if "own" in samples:  # what a stream said of itself at this place
        changed["own"] = [(number, each) for _, each in samples["own"]]
    return {**state, "consumed": number, "ended": ended, "samples": changed}


def write_used_batches(states: Iterable[Any], over: bool, used: int | None = None) -> None:
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
        # A loader that had ended before gave none of the last batches, those that were not used.
        rest = min(state["consumed"], most - unused) if state.get("ended") else state["consumed"] - unused
        state["own"] = state.get("left", state.get("own", []))  # a Trainer does not ask for the end
        if unused:
            _put_back(state, unused)
        state["consumed"] = max(0, rest)
        state["whole"] = over and rest > 0  # at 0 it is the epoch after that was begun


def _put_back(state: dict[str, Any], unused: int) -> None:
    """Let a state begin where the unused batches were loaded; one is what Lightning had fetched ahead."""
    state["next_rng"] = state.get("before") if unused == 1 else None
    if unused > 1 and "own" in (state.get("samples") or {}):
        state["held"] = []  # a stream that is run through leaves its generators as they were there


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
    # The length of an order of samples is looked at when the state is loaded. Nothing but this is known of a stream.
    if before is not None and before != now and not (state.get("samples") or {}).get("ranks"):
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
