"""``EpochState``: what a loader saves of an epoch, so that another one goes on in it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_turbo.data.orders.sharding import SampleOrder, Shards
from lightning_turbo.errors import TurboWarning

__all__ = ["EpochState", "GeneratorStates", "OrderStart", "StreamPlace", "used_states", "warn_of_last_pass"]

VERSION = 3


@dataclasses.dataclass(frozen=True)
class GeneratorStates:
    """The states of random generators at one moment.

    Attributes:
        shared: Those of the global RNGs, as ``_random.shared_state`` returns them; of torch alone if nobody draws from
            the others. Over a stream, those of the generators that the dataset holds are among them.
        own: Those of the generators that the loader and its samplers hold.
    """

    shared: dict[str, Any]
    own: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class OrderStart:
    """The states at the beginning of an epoch, from which its order follows.

    Attributes:
        at_iter: The generators at ``iter()``, where some samplers draw.
        at_first: The generators before the first entry, where others draw; ``None`` before that.
        epochs: The epochs of those samplers that have one (``set_epoch``), from the outermost inwards.
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
        from_batch: As how many batches those count.
        is_resharded: Whether the epoch began with other batches or processes.
        places: The latest states of the stream itself: after how many batches, and for each process that reads it the
            state, with the states of the global RNGs and of the generators that the stream holds.
        num_workers: ``num_workers`` of the loader whose states these are.
    """

    stream: str
    batch_size: int
    workers: int
    from_sample: int = 0
    from_batch: int = 0
    is_resharded: bool = False
    places: list[tuple[int, list[tuple[Any, Any]]]] = dataclasses.field(default_factory=list)
    num_workers: int = 0


@dataclasses.dataclass(frozen=True)
class EpochState:
    """Where a loader is in its epoch, and what it needs to go on there, or with the epoch after it.

    A loader makes one for ``state_dict``. One that it gets by ``load_state_dict`` it keeps until it has returned a
    batch. Nothing changes it. Always: ``order`` and ``shards`` or ``stream`` are of the same epoch as ``consumed``. A
    loader whose class keeps a state of its own gives that as it is, without this class around it.

    Attributes:
        consumed: Batches of the epoch that were used.
        length: Batches of the whole epoch; ``None`` if the loader has none.
        ended: Whether the loader was asked for a batch after its last one.
        over: Whether the epoch is over, so that the next ``iter()`` begins the one after it.
        end_follows: Whether whoever goes on has to ask for the end of the epoch that is over, because some samplers
            draw once more there: a loop over the loader asks for it, a Trainer does not.
        order: How the epoch began; ``None`` before ``iter()``.
        generators: The states of the generators that the loader and its samplers hold, as the next ``iter()`` finds
            them.
        first_rng: In a state without a batch, the global RNGs from which the order will be drawn; ``None`` if it is
            drawn, or somebody else restores them.
        rng_before_latest: The global RNGs, and the generators that the dataset holds, before the latest batch was
            loaded; ``None`` if loading does not draw from them.
        rng_before_next: The same before the next batch, if that was loaded already when the state was taken.
        held: The states of the generators that the dataset holds.
        shards: How the samples are sharded; ``None`` if no order over all ranks is known.
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
        """Whether the next ``iter()`` goes on in this epoch, in the order in which it began."""
        return self.order is not None and not self.over

    @property
    def is_within_epoch(self) -> bool:
        """Whether samples of the epoch were used, in batches of this size or another, and it is not over."""
        place = self.shards or self.stream
        return not self.over and (self.consumed > 0 or (place is not None and place.is_resharded))

    @property
    def is_resharded(self) -> bool:
        """Whether the epoch that the next ``iter()`` goes on in began with other ranks, batches or processes."""
        place = self.shards or self.stream
        return place is not None and place.is_resharded and not self.over

    @property
    def batches_before(self) -> int:
        """How many of the batches that count as used are not part of the order of the next ``iter()``."""
        place = self.shards or self.stream
        return 0 if place is None or self.over else place.from_batch

    @property
    def batching(self) -> tuple[int, int, int, int]:
        """How the rest of the epoch is batched: ranks or processes, batch size, the first sample and batch of it."""
        if self.shards is not None:
            return self.shards.ranks, self.shards.batch_size, self.shards.from_sample, self.shards.from_batch
        if self.stream is not None:
            return self.stream.workers, self.stream.batch_size, self.stream.from_sample, self.stream.from_batch
        return 0, 0, 0, 0

    @property
    def batch_samples(self) -> int:
        """How many samples a batch of this epoch takes: on all ranks together, or of a stream on this one."""
        if self.shards is not None:
            return self.shards.batch_size * self.shards.ranks
        return 1 if self.stream is None else self.stream.batch_size

    @property
    def used_samples(self) -> int:
        """How many samples were used: of an order by all ranks together, of a stream by this one."""
        place = self.shards or self.stream
        assert place is not None
        used = place.from_sample + (self.consumed - place.from_batch) * self.batch_samples
        if self.shards is None:
            return used
        length = self.shards.order.length
        return length if self.ended else min(used, length)

    def counted_from(self, number: int, *, ended: bool) -> EpochState:
        """Return this state, of an epoch that began with other ranks, batches or processes, with another count.

        Args:
            number: As how many batches the used samples count.
            ended: Whether no batches are left.
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
        """Return this state as one of a Trainer's epoch. A Trainer asks for no ends, and restores the global RNGs.

        Args:
            consumed: Batches that were used.
            unused: Batches after them that were returned and not used, and are loaded once more.
            over: Whether the epoch is over.
        """
        changed = dataclasses.replace(self, consumed=consumed, over=over, end_follows=False, first_rng=None)
        if not unused:
            return changed
        # One batch that is not used is what Lightning had fetched ahead.
        changed = dataclasses.replace(changed, rng_before_next=self.rng_before_latest if unused == 1 else None)
        if unused > 1 and self.stream is not None:
            # The stream is run through, which leaves the generators as they were there.
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
        """Return the state of which ``to_dict`` made a dictionary.

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
        """Whether a loader's state is one that counts batches, of any version, and not that of a class of its own."""
        return isinstance(state, Mapping) and "consumed" in state and "order" in state


def _shallow_dict(part: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and of those in it, as dictionaries; all else is not copied."""
    fields = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    return {name: _shallow_dict(each) if dataclasses.is_dataclass(each) else each for name, each in fields.items()}


def used_states(states: Sequence[Any], *, over: bool, used: int | None = None) -> list[Any]:
    """Return the states of a run's loaders with the batches that the run has used of its epoch.

    The loaders do not know these: batches may be returned and not used, and an epoch may end before a loader, or go on
    after it with others. A second call with the same arguments changes nothing.

    Args:
        states: What ``state_dict`` of the loaders gave, of any kind; those that do not count batches stay as they are.
        over: Whether the last batch of the epoch was used.
        used: How many batches of the run's epoch were used; ``None`` for all that the loaders returned.
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
    # A loader that had ended earlier gave none of the last batches, which are those that were not used.
    rest = min(state.consumed, most - unused) if state.ended else state.consumed - unused
    if rest < 0 and not over:
        warn_of_last_pass(-rest)
    # If nothing was used of this loader, it had begun the epoch after the one that is over.
    return state.with_used(max(0, rest), unused=unused, over=over and rest > 0).to_dict()
