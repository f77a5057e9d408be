"""``ResumableSampler``: records the states from which the order of an epoch follows, and draws it again from them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

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
from lightning_turbo.data.loading.epoch_state import EpochState, GeneratorStates, OrderStart
from lightning_turbo.data.loading.position import Position
from lightning_turbo.data.orders.sharding import Sharding, Shards, refuse
from lightning_turbo.data.sample_seeds import CountedEpochs

__all__ = ["ResumableSampler", "generators_of", "samplers_in"]

# Samplers of torch: of the global RNGs they draw from torch's alone, and at their first entry or before it.
_TORCHS = (
    BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
)  # fmt: skip
_END = object()


class ResumableSampler:
    """Stands around a sampler: it records the states from which an order follows, and can draw that order again.

    A loader makes one when it first needs the indices, and another one when its own sampler is exchanged; its
    ``IndexEpochs`` keeps the latest. At each ``iter()`` of the loader, ``begin`` chooses one of four ways for the next
    order: a new one, the rest of one that began with these samplers, the rest of one that is resharded, or, where
    worker processes stay, a new one from the states before torch drew a seed. torch then calls ``iter``, twice where
    there are worker processes. Each way is a method below, which returns the iterator of the entries.

    An order follows from the states of the random generators when the sampler is asked for an iterator and when its
    first entry is drawn, and from its epoch if it has one. These are recorded; the entries are not. Of the generators
    that the loader and its samplers hold, the states after each entry are recorded too, as long as somebody may need
    them: an epoch that is left early puts back what was drawn ahead. Always: what is recorded is of the latest
    ``iter()``.

    Args:
        sampler: The sampler inside.
        loader: The loader whose indices it draws.

    Attributes:
        generators: The random generators that the loader and its samplers hold.
        start: How the latest order began; ``None`` before ``iter``, and without ``at_first`` before the first entry.
        first_rng: The global RNGs from which the next order draws its first entry, if a state has them; ``None`` to
            draw it from the current ones.
    """

    def __init__(self, sampler: Any, loader: Any) -> None:
        self.sampler = sampler
        self.generators = generators_of(loader.generator, sampler)
        samplers = samplers_in(sampler)
        self._with_epochs = [each for each in samplers if _has_epoch(each)]
        self._counted = next((each for each in samplers if isinstance(each, CountedEpochs)), None)
        # How many entries torch's iterator draws for worker processes before it returns a batch.
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        # Processes that stay are seeded at the first iter() alone. A run that goes on draws that seed once more.
        self._is_seeded_once = loader.persistent_workers
        self.start: OrderStart | None = None
        self.first_rng: dict[str, Any] | None = None
        self._shards: Shards | None = None  # of the latest order, if it was resharded
        # The states of ``generators`` before torch drew its seed from them, and those after so many entries, where they
        # changed.
        self._before: list[Any] = []
        self._recorded: deque[tuple[int, list[Any]]] = deque()
        # Counts the beginning and the end of each draw, so that it is odd while any thread draws an entry.
        self._draws = 0
        # The way of the next order, a function of this object: a method would make a cycle of references, which keeps
        # the dataset until the garbage collector runs.
        self._begin_next: Callable[[ResumableSampler], Iterator[Any]] = ResumableSampler._begin_new
        self._position = Position()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._begin_next(self)

    @property
    def draws_at_once(self) -> bool:
        """Whether nothing is drawn for an order after its first entry."""
        draws_on = any(type(each) is RandomSampler and each.replacement for each in samplers_in(self.sampler))
        return _is_torchs(self.sampler) and not draws_on

    # The choice of the next order

    def begin(self, state: EpochState, skip: int, position: Position, epoch: int | None) -> None:
        """Choose the next order: that of the epoch of a state, or if that is over the one after it.

        Args:
            state: A state of this loader, or one that ``reshard`` returned.
            skip: How many entries to leave out at the beginning of an epoch that goes on.
            position: The position of the iterator that is being made.
            epoch: The number of the epoch, if a Trainer sets it.
        """
        if self._counted is not None:
            self._number_epoch(self._counted, state, epoch)
        if state.end_follows:
            self._draw_to_the_end(state)
        self._position = position
        self.start = None
        self.first_rng = None
        self._shards = None
        if state.is_resharded:
            # Nothing is drawn for the rest of such an epoch, and the next one finds the generators like this.
            self._set_generators(state.generators)
            self._shards = state.shards
            self._begin_next = functools.partial(ResumableSampler._begin_rest, state=state, skip=skip)
        elif state.goes_on and (state.consumed or state.first_rng is None):
            self._check(state)
            self._begin_next = functools.partial(ResumableSampler._begin_again, state=state, skip=skip)
        else:
            if state.generators and not state.end_follows:
                self._set_generators(state.generators)
            if state.order is not None:
                self.first_rng = state.first_rng
            seeded = self._all_states() if self._is_seeded_once and state.over else None
            self._begin_next = functools.partial(ResumableSampler._begin_new, seeded=seeded)
        self._before = self._generator_states()
        self._recorded = deque()

    def _number_epoch(self, counted: CountedEpochs, state: EpochState, epoch: int | None) -> None:
        """Tell a sampler that counts its passes the number of the next one.

        The Trainer decides it if there is one, otherwise the state of this loader. A pass that gave no batch does not
        count.
        """
        counted.given = None
        if epoch is not None:
            counted.begin_pass(epoch)
            counted.given = epoch
        elif state.over and state.order is not None and state.order.epochs:
            counted.begin_pass(state.order.epochs[0] + 1)
        elif self.start is not None and self._position.is_untouched:
            # The latest pass gave no batch, and is repeated, unless somebody has set another epoch since.
            latest = self.start.epochs[0]
            if counted.epoch == latest + 1:
                counted.begin_pass(latest)

    def _check(self, state: EpochState) -> None:
        assert state.order is not None
        self._check_number("samplers that count epochs", state.order.epochs, self._with_epochs)
        self._check_number("random generators", state.order.at_iter.own, self.generators)

    @staticmethod
    def _check_number(what: str, states: list[Any], here: list[Any]) -> None:
        if len(states) != len(here):
            raise ValueError(
                f"The state is of a loader with {len(states)} {what}, and this one has {len(here)}. Load it into a "
                "loader with the same samplers, and with sample_seeds if it had them."
            )

    # The four ways

    def _begin_new(self, seeded: GeneratorStates | None = None) -> Iterator[Any]:
        """Begin a new order.

        Args:
            seeded: The states before torch drew its seed, where that has to be as if it had not been drawn: processes
                that stay were seeded in the run before. ``None`` for the states as they are.
        """
        if seeded is not None:
            self._set_states(seeded)
        self.start = OrderStart(self._all_states(), epochs=[sampler.epoch for sampler in self._with_epochs])
        return self._draw_new(iter(self.sampler), self.start)

    def _draw_new(self, entries: Iterator[Any], start: OrderStart) -> Iterator[Any]:
        self._begin_next = ResumableSampler._begin_new
        first_rng = self.first_rng
        self.first_rng = None
        # If nobody has drawn since, the order is drawn as by a plain loader, and the generators go on.
        has_moved = first_rng is not None and not torch.equal(first_rng["torch"], torch_state())
        with generators_at(first_rng) if first_rng is not None and has_moved else nullcontext():
            self.start = dataclasses.replace(start, at_first=self._all_states())
            self._recorded.append((0, self._generator_states()))
            entries = self._recording(entries) if self.generators else _rest_of(entries)
            first = next(entries, _END)
        if first is not _END:
            yield first
            yield from entries

    def _begin_again(self, state: EpochState, skip: int) -> Iterator[Any]:
        """Begin the rest of an order that began with these samplers, which draw it again.

        Args:
            state: The state that goes on.
            skip: How many entries to leave out.
        """
        start = state.order
        assert start is not None
        self.start = start
        for sampler, epoch in zip(self._with_epochs, start.epochs, strict=True):
            # A Trainer may not have set it yet.
            sampler.set_epoch(epoch)
        with same_random_numbers():
            self._set_states(start.at_iter)
            entries = iter(self.sampler)
        return self._draw_again(entries, start, skip, state.rng_before_next is not None)

    def _draw_again(self, entries: Iterator[Any], start: OrderStart, skip: int, is_loaded_again: bool) -> Iterator[Any]:
        self._begin_next = ResumableSampler._begin_new
        # How many entries the stopped run had drawn: those for worker processes and for a batch that was not used too.
        # A sampler that draws entry by entry goes on with the generators as they are after these.
        drawn = max(1, skip + self._ahead + is_loaded_again)
        # To load the first batch again draws the order too, and the global RNGs are set for both already.
        is_first = is_loaded_again and not skip
        with nullcontext() if start.at_first is None or is_first else same_random_numbers():
            if start.at_first is not None and not is_first:
                self._set_states(start.at_first)
            elif start.at_first is not None:
                self._set_generators(start.at_first.own)
            self.start = dataclasses.replace(start, at_first=start.at_first or self._all_states())
            self._recorded.append((0, self._generator_states()))
            entries = self._recording(entries) if self.generators else _rest_of(entries)
            deque(itertools.islice(entries, skip), maxlen=0)
            begun = list(itertools.islice(entries, drawn - skip))
        yield from begun
        yield from entries

    def _begin_rest(self, state: EpochState, skip: int) -> Iterator[Any]:
        """Begin the rest of an order that is resharded, for which the sampler inside is not asked.

        Args:
            state: The state that goes on.
            skip: How many entries to leave out.
        """
        self.start = state.order
        return self._draw_rest(state, skip)

    def _draw_rest(self, state: EpochState, skip: int) -> Iterator[Any]:
        self._begin_next = ResumableSampler._begin_new
        sharding = Sharding.of(self.sampler)
        assert state.shards is not None
        assert sharding is not None
        if self._counted is not None:
            # As if it had been asked for this epoch.
            self._counted.begin_pass(state.shards.order.epoch + 1)
        yield from itertools.islice(sharding.rest(state.shards), skip, None)

    # What was drawn

    def _recording(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Yield entries, and record the states of ``generators`` after each of them and after the end."""
        for count in itertools.count(1):
            self._draws += 1
            try:
                entry = next(entries, _END)
            finally:
                states = self._generator_states()
                if not same_states(states, self._recorded[-1][1]):
                    self._recorded.append((count, states))
                    self._forget_states()
                self._draws += 1
            if entry is _END:
                return
            yield entry

    def _forget_states(self) -> None:
        """Drop states before the position. Nobody needs them any more, as it only moves forward."""
        needed = self._position.consumed + self._ahead
        while len(self._recorded) > 1 and self._recorded[1][0] <= needed:
            self._recorded.popleft()

    def states_here(self) -> list[Any]:
        """Return the states of ``generators`` as a plain loader would leave them at this position.

        Before the first batch these are the states before torch drew its seed, because it will draw that again. If
        somebody has set the generators since, they are their states of now.
        """
        position = self._position
        if not position.consumed:
            return self._before
        if position.ended or not self._recorded or self._somebody_set_them():
            return self._generator_states()
        return self._states_after(position.consumed + self._ahead)

    def put_back(self, position: Position) -> None:
        """Take back what was drawn ahead for an iterator that is left before its end.

        Args:
            position: That of the iterator. Nothing is done if another one has begun since.
        """
        # Also before the first batch, as entries for worker processes are drawn at once.
        if position is self._position and self._recorded and not (position.ended or self._somebody_set_them()):
            self._set_generators(self._states_after(position.consumed + self._ahead))

    def _states_after(self, entries: int) -> list[Any]:
        # A thread may add to them.
        recorded = list(self._recorded)
        return next((states for at, states in reversed(recorded) if at <= entries), recorded[0][1])

    def _somebody_set_them(self) -> bool:
        # While an entry is drawn, the states differ from the last ones that were recorded, though nobody set them.
        draws = self._draws
        now = self._generator_states()
        last = self._recorded[-1][1]
        is_drawing = draws % 2 == 1 or draws != self._draws
        return not is_drawing and not same_states(now, last)

    def _draw_to_the_end(self, state: EpochState) -> None:
        """Draw an order again to its end, at which some samplers draw once more, for the states of the generators."""
        self._check(state)
        # Somebody may have set the epochs since, and they stay as they are.
        epochs = [sampler.epoch for sampler in self._with_epochs]
        deque(self._begin_again(state, 0), maxlen=0)
        for sampler, epoch in zip(self._with_epochs, epochs, strict=True):
            sampler.set_epoch(epoch)

    def _generator_states(self) -> list[Any]:
        return [generator_state(generator) for generator in self.generators]

    def _set_generators(self, states: list[Any]) -> None:
        # There are none in the state of a loader that has not begun, or of other samplers.
        if not states:
            return
        self._check_number("random generators", states, self.generators)
        for generator, state in zip(self.generators, states, strict=True):
            set_generator_state(generator, state)

    def _all_states(self) -> GeneratorStates:
        # Samplers of torch draw from torch alone, and to read NumPy's state takes as long as to load a small batch.
        shared = {"torch": torch_state()} if _is_torchs(self.sampler) else shared_state()
        return GeneratorStates(shared, self._generator_states())

    def _set_states(self, states: GeneratorStates) -> None:
        self._set_generators(states.own)
        set_shared_state(states.shared)

    # States

    def describe(self, state: EpochState) -> EpochState:
        """Return a state with all that is known of the latest order."""
        follows = state.over and not state.ended and bool(self.generators) and _is_torchs(self.sampler)
        return dataclasses.replace(
            state, order=self.start, generators=self.states_here(), shards=self._find_shards(), end_follows=follows
        )

    def describe_new(self) -> EpochState:
        """Return the state of a loader that has not begun."""
        return EpochState(generators=self._generator_states())

    def _find_shards(self) -> Shards | None:
        sharding = Sharding.of(self.sampler)
        start = self.start
        if sharding is None or start is None:
            return None
        if self._shards is not None:
            return dataclasses.replace(self._shards, ranks=sharding.ranks, batch_size=sharding.batch_size)
        # The last epoch is that of the innermost sampler that has one, and sample seeds follow from it.
        epoch = start.epochs[-1] if start.epochs else 0
        return Shards(sharding.order_of(epoch, *self._drawn_from(sharding)), sharding.ranks, sharding.batch_size)

    def _drawn_from(self, sharding: Sharding) -> tuple[Any, bool]:
        """Return the state from which a generator drew the latest order, and whether the sampler holds it."""
        first = None if self.start is None else self.start.at_first
        if first is None:
            return None, False
        generator = getattr(sharding.sampler, "generator", None)
        for own, state in zip(self.generators, first.own, strict=True):
            if own is generator:
                return state, True
        return first.shared["torch"], False

    def reshard(self, state: EpochState) -> EpochState:
        """Return a state of a loader with other ranks or batches as one of this loader: the same samples were used.

        Raises:
            ValueError: If it is of the middle of an epoch of another dataset, sampler or seed.
        """
        shards = state.shards
        sharding = Sharding.of(self.sampler)
        here = type(getattr(self.sampler, "sampler", self.sampler)).__name__
        if state.stream is not None and state.is_within_epoch:
            refuse("sampler", state.stream.stream, here)
        if shards is None or state.over:
            return state
        if sharding is None:
            refuse("sampler", shards.order.sampler, here)
        sharding.check(shards.order)
        if sharding.is_that_of(shards) or (
            not state.consumed and sharding.ranks == shards.ranks and not state.is_resharded
        ):
            return state
        is_begun = state.used_samples or state.is_resharded
        return self._reshard(state, sharding) if is_begun else EpochState()

    def _reshard(self, state: EpochState, sharding: Sharding) -> EpochState:
        assert state.order is not None
        assert state.shards is not None
        resharded = sharding.reshard(state.shards.order, state.used_samples)
        fits = len(state.generators) == len(self.generators)
        return dataclasses.replace(
            state,
            consumed=resharded.from_batch,
            ended=False,
            length=sharding.count_batches(),
            generators=state.generators if fits else self._generator_states(),
            rng_before_latest=None,
            rng_before_next=None,
            order=dataclasses.replace(state.order, epochs=[state.shards.order.epoch] * len(self._with_epochs)),
            shards=resharded,
        )


def _rest_of(entries: Iterator[Any]) -> Iterator[Any]:
    """Yield what is left of an iterator, without ``iter``, at which Lightning's wrapper would begin again."""
    while (entry := next(entries, _END)) is not _END:
        yield entry


def _is_torchs(sampler: Any) -> bool:
    """Whether a sampler, or the one inside that makes its batches, is of a class of torch's."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _TORCHS


def generators_of(generator: torch.Generator | None, sampler: Any) -> list[Any]:
    """Return the random generators that a loader and its samplers hold, without the global RNGs."""
    samplers = samplers_in(sampler)
    held = [generator]
    for each in samplers:
        # Lightning keeps the arguments of samplers in attributes of such names, and with them the dataset.
        held += [value for name, value in attributes_of(each).items() if not name.startswith("__")]
    # The samplers themselves are looked at one by one. Generators of their data are not theirs.
    parts = [each for each in held if not _is_data(each) and all(each is not known for known in samplers)]
    return generators_in(parts)


def _is_data(each: Any) -> bool:
    return is_a(each, Dataset) or (hasattr(type(each), "__getitem__") and not is_a(each, (dict, list, tuple)))


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and all samplers nested in it, including those in Lightning's wrapper."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        # By type alone: a proxy pretends the class of what it stands for, and may be asked before that is there.
        attributes = attributes_of(each)
        waiting += [value for value in attributes.values() if is_a(value, Sampler)]
        waiting += [attributes.get("sampler"), attributes_of(attributes.get("dataset")).get("_sampler")]
    return found


def _has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)
