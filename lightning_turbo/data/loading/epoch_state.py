"""``EpochState``: what a loader saves of an epoch, so that another one goes on in it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_turbo.data.orders.sharding import SampleOrder, Shards
from lightning_turbo.errors import TurboWarning

__all__ = ["EpochState", "GeneratorStates", "OrderStart", "StreamPlace", "used_states", "warn_of_last_pass"]

VERSION = 2


@dataclasses.dataclass(frozen=True)
class GeneratorStates:
    """The states of random generators at one moment.

    Attributes:
        shared: Those of the global RNGs, as ``_random.shared_state`` returns them; those of torch alone where nobody
            draws from the others. Of a stream, those that its dataset holds are among them.
        own: Those of the loader's own generator and of those that its samplers hold.
    """

    shared: dict[str, Any]
    own: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class OrderStart:
    """How an epoch began, from which its order follows.

    Attributes:
        at_iter: The generators at ``iter()``, where some samplers draw.
        at_first: Those before the first entry, where others draw; ``None`` before that.
        epochs: The epochs of the samplers that have a number of one, from the outermost inwards.
    """

    at_iter: GeneratorStates
    at_first: GeneratorStates | None = None
    epochs: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StreamPlace:
    """Where a stream stands, counted in samples of this rank.

    Attributes:
        stream: The name of the dataset's class.
        batch_size: Samples of a batch.
        workers: How many processes read the stream, at least 1.
        from_sample: How many samples were used when batches of this size and these processes began.
        from_batch: How many batches those count as.
        is_resharded: Whether the epoch began with other batches or processes.
        places: After how many batches the stream said what of itself in each process that reads it, with the states of
            the global RNGs and of the generators that it holds beside it.
        told_by: How many worker processes said it; 0 for the process of the loader.
    """

    stream: str
    batch_size: int
    workers: int
    from_sample: int = 0
    from_batch: int = 0
    is_resharded: bool = False
    places: list[tuple[int, list[tuple[Any, Any]]]] = dataclasses.field(default_factory=list)
    told_by: int = 0


@dataclasses.dataclass(frozen=True)
class EpochState:
    """Where a loader is in its epoch, and what it needs to go on there, or with the epoch after it.

    A loader makes one for ``state_dict``, and keeps one that ``load_state_dict`` got until it has returned a batch.
    Nothing changes it. Always: ``order`` and ``shards`` or ``stream`` are of the same epoch as ``consumed``. A loader
    whose class keeps a state of its own gives that as it is, without this class around it.

    Attributes:
        consumed: Batches of the epoch that were used.
        length: Batches of the whole epoch; ``None`` if the loader could not tell.
        ended: Whether the loader was asked for a batch after its last one.
        over: Whether the epoch is over, so that the next ``iter()`` begins the one after it.
        end_follows: Whether the end is asked for after the last batch, at which some samplers draw once more: a loop
            does, a Trainer does not.
        order: How the epoch began; ``None`` before ``iter()``.
        generators: The states of the generators of the loader and its samplers, as the next ``iter()`` finds them.
        first_rng: In a state without a batch, the global RNGs, from which the order will be drawn; ``None`` if it is
            drawn, or somebody else restores them.
        rng_before_latest: The global RNGs before the latest batch was loaded, where loading may draw from them, and
            the generators of the dataset among them.
        rng_before_next: The same before the batch that comes next, if it was loaded when the state was taken.
        held: The states of the generators that the dataset holds.
        shards: How the samples are sharded; ``None`` where no order over all ranks is known.
        stream: The place in a stream; ``None`` over a dataset with indices.
    """

    consumed: int = 0
    length: int | None = None
    ended: bool = False
    over: bool = False
    end_follows: bool = False
    order: OrderStart | None = None
    generators: list[Any] = dataclasses.field(default_factory=list)
    first_rng: dict[str, Any] | None = None
    rng_before_latest: dict[str, Any] | None = None
    rng_before_next: dict[str, Any] | None = None
    held: list[Any] = dataclasses.field(default_factory=list)
    shards: Shards | None = None
    stream: StreamPlace | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the next ``iter()`` goes on in this epoch, of which an order is known."""
        return self.order is not None and not self.over

    @property
    def is_within_epoch(self) -> bool:
        """Whether samples of the epoch were used, by this way of batching or another, and it is not over."""
        place = self.shards or self.stream
        return not self.over and (self.consumed > 0 or (place is not None and place.is_resharded))

    @property
    def is_resharded(self) -> bool:
        """Whether the epoch that the next ``iter()`` goes on in began with other ranks, batches or processes."""
        place = self.shards or self.stream
        return place is not None and place.is_resharded and not self.over

    @property
    def batches_before(self) -> int:
        """How many of the batches that count as used the order of the next ``iter()`` does not begin with."""
        place = self.shards or self.stream
        return 0 if place is None or self.over else place.from_batch

    @property
    def batching(self) -> tuple[int, int, int, int]:
        """How the rest of the epoch is batched: ranks or processes, batch size, from which sample and batch on."""
        if self.shards is not None:
            return self.shards.ranks, self.shards.batch_size, self.shards.from_sample, self.shards.from_batch
        if self.stream is not None:
            return self.stream.workers, self.stream.batch_size, self.stream.from_sample, self.stream.from_batch
        return 0, 0, 0, 0

    @property
    def batch_samples(self) -> int:
        """How many samples a batch of this epoch takes, on all ranks together, or on this one of a stream."""
        if self.shards is not None:
            return self.shards.batch_size * self.shards.ranks
        return 1 if self.stream is None else self.stream.batch_size

    @property
    def used_samples(self) -> int:
        """How many samples of the order were used by all ranks together, or of a stream by this one."""
        place = self.shards or self.stream
        assert place is not None
        used = place.from_sample + (self.consumed - place.from_batch) * self.batch_samples
        if self.shards is None:
            return used
        length = self.shards.order.length
        return length if self.ended else min(used, length)

    def counted_from(self, number: int, *, ended: bool) -> EpochState:
        """Return this state of other ranks, batches or processes with so many batches as used.

        Args:
            number: As how many batches the samples count that were used.
            ended: Whether none are left.
        """
        changed: dict[str, Any] = {"from_batch": number}
        if self.shards is not None:
            if ended:
                changed["from_sample"] = self.shards.order.length
            return dataclasses.replace(
                self, consumed=number, ended=ended, shards=dataclasses.replace(self.shards, **changed)
            )
        assert self.stream is not None
        changed["places"] = [(count - self.consumed + number, place) for count, place in self.stream.places]
        return dataclasses.replace(
            self, consumed=number, ended=ended, stream=dataclasses.replace(self.stream, **changed)
        )

    def with_used(self, consumed: int, *, unused: int, over: bool) -> EpochState:
        """Return this state as a Trainer used the epoch, which does not ask for ends, and restores the global RNGs.

        Args:
            consumed: Batches that were used.
            unused: Batches after them that were returned, and are loaded once more.
            over: Whether the epoch is over.
        """
        changed = dataclasses.replace(self, consumed=consumed, over=over, end_follows=False, first_rng=None)
        if not unused:
            return changed
        # One batch that is not used is what Lightning had fetched ahead.
        changed = dataclasses.replace(changed, rng_before_next=self.rng_before_latest if unused == 1 else None)
        if unused > 1 and self.stream is not None:
            # A stream that is run through leaves the generators as they were there.
            changed = dataclasses.replace(changed, held=[])
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of tensors and plain Python objects, which loads with ``weights_only=True``."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, part in fields.items():
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                fields[name] = _shallow_dict(part)
        return {"version": VERSION, **fields}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> EpochState:
        """Return the state that ``to_dict`` made a dictionary of.

        Raises:
            ValueError: If it is one of another version.
        """
        fields = dict(state)
        if fields.pop("version", None) != VERSION:
            raise ValueError(
                f"expected a loader's state of version {VERSION}, got one of another snapshot of this package, with "
                f"the keys {sorted(state)}. Go on with the snapshot that wrote it, or from the weights alone."
            )
        if fields["order"] is not None:
            order = dict(fields["order"])
            order["at_iter"] = GeneratorStates(**order["at_iter"])
            if order["at_first"] is not None:
                order["at_first"] = GeneratorStates(**order["at_first"])
            fields["order"] = OrderStart(**order)
        if fields["shards"] is not None:
            fields["shards"] = Shards(**{**fields["shards"], "order": SampleOrder(**fields["shards"]["order"])})
        if fields["stream"] is not None:
            fields["stream"] = StreamPlace(**fields["stream"])
        return cls(**fields)

    @staticmethod
    def is_one(state: Any) -> bool:
        """Whether a loader's state counts batches, of whatever snapshot, and is not that of a class of its own."""
        return isinstance(state, Mapping) and "consumed" in state and "order" in state


def _shallow_dict(part: Any) -> dict[str, Any]:
    """Return the fields of a part of a state, and of its parts, without a copy of the states of generators."""
    fields = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    return {name: _shallow_dict(each) if dataclasses.is_dataclass(each) else each for name, each in fields.items()}


def used_states(states: Sequence[Any], *, over: bool, used: int | None = None) -> list[Any]:
    """Return the states of a run's loaders with what was used of the epoch that they were taken in.

    Loaders do not know it: batches may be returned and not used, and an epoch may end before a loader, or continue
    after it with others. To do it twice changes nothing more.

    Args:
        states: What ``state_dict`` of the loaders gave, of any kind; those that do not count batches stay as they are.
        over: Whether the last batch of the epoch was used.
        used: Batches that were used of those that all loaders together gave; ``None`` for all that were returned.
    """
    read = [EpochState.from_dict(state) if EpochState.is_one(state) else None for state in states]
    most = max((state.consumed for state in read if state is not None), default=0)
    unused = 0 if used is None else max(0, most - used)
    return [
        each if state is None else _used(state, most, unused, over) for each, state in zip(states, read, strict=True)
    ]


def warn_of_last_pass(left_out: int) -> None:
    """Warn of batches of a pass that is over, which no state of the pass after it can give again."""
    warnings.warn(
        f"A loader began again within the epoch, after batches that were fetched and not used: the last {left_out} of "
        "its pass before are left out. Save after a step and not within one, or give the loaders a length.",
        TurboWarning,
        stacklevel=3,
    )


def _used(state: EpochState, most: int, unused: int, over: bool) -> dict[str, Any]:
    # A loader that had ended before gave none of the last batches, those that were not used.
    rest = min(state.consumed, most - unused) if state.ended else state.consumed - unused
    if rest < 0 and not over:
        warn_of_last_pass(-rest)
    # Where nothing was used, the epoch after the one that is over was begun.
    return state.with_used(max(0, rest), unused=unused, over=over and rest > 0).to_dict()
