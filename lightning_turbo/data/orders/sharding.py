"""How an order of samples is sharded over ranks and batches, and how the rest of it is resharded over others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import same_random_numbers, set_generator_state
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.orders.weighted_sampler import WeightedSampler
from lightning_turbo.data.sample_seeds import EpochBatchSampler, EpochSampler, SeededDataset

__all__ = ["BatchSharding", "SampleOrder", "Sharding", "Shards", "check_fits", "refuse"]

# Lightning exchanges these for one another as a run goes from one rank to several and back. On several ranks it may
# shuffle though the loader does not.
_LIGHTNINGS = {"RandomSampler", "SequentialSampler", "DistributedSampler"}


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """All that an order of samples over all ranks follows from, so that it can be drawn again.

    A ``Sharding`` makes one for a state, and it is saved with that. Nothing changes it.

    Attributes:
        sampler: The name of the sampler's class.
        length: How many entries the order has: samples, or batches of a ``LengthBatchSampler``.
        shuffle: Whether they are in another order than that of the dataset.
        epoch: The number of the epoch, from which sample seeds follow too.
        seed: The sampler's seed, if it has one.
        generator: The state from which a generator drew the order; ``None`` if none did.
        has_own_generator: Whether the sampler holds that generator; otherwise it is the global RNG of torch.
        digest: A hash of all else that the order follows from, weights or lengths; empty if there is nothing else.
        step_ranks: For how many ranks an order of batches was drawn; 1 for an order of samples.
        cuts: How an order of batches was changed each time that it went on with other ranks: how many batches were
            used, and for how many ranks the rest was filled up.
    """

    sampler: str
    length: int
    shuffle: bool
    epoch: int = 0
    seed: int | None = None
    generator: Any = None
    has_own_generator: bool = False
    digest: str = ""
    step_ranks: int = 1
    cuts: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def draw(self) -> list[int]:
        """Return the samples of all ranks in this order, which is that of torch's own samplers bit for bit."""
        data: Any = range(self.length)
        if not self.shuffle:
            return list(data)
        if self.sampler == "RandomSampler":
            if self.has_own_generator:
                generator = torch.Generator()
                set_generator_state(generator, self.generator)
                return list(RandomSampler(data, generator=generator))
            with same_random_numbers():
                torch.set_rng_state(self.generator)
                return list(RandomSampler(data))
        assert self.seed is not None
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=self.seed)
        sampler.set_epoch(self.epoch)
        return list(sampler)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How an order of samples is sharded over ranks and batches, as a state saves it. Nothing changes it.

    Attributes:
        order: The order.
        ranks: The number of ranks.
        batch_size: Samples of a batch of one rank.
        from_sample: How many samples of the order were used when this sharding began, 0 for the whole epoch.
        from_batch: As how many batches of a rank those count.
        is_resharded: Whether the epoch began with another sharding.
    """

    order: SampleOrder
    ranks: int
    batch_size: int
    from_sample: int = 0
    from_batch: int = 0
    is_resharded: bool = False


class Sharding(NamedTuple):
    """How a loader shards an order of samples: interleaved over the ranks, and in batches on each rank.

    ``ResumableSampler`` makes one for each question, because a Trainer may begin the process group after the loader is
    made. Always: the numbers of ranks, and of this one, are those of the moment when it was made.

    Attributes:
        sampler: The sampler that gives the order: a ``SeededSampler`` or ``WeightedSampler``, or torch's
            ``DistributedSampler``, ``RandomSampler`` without replacement, or ``SequentialSampler``.
        outer: The sampler that makes batches of the indices; ``sampler`` itself for a loader with ``batch_size=None``.
        batch_size: Samples of a batch.
        drop_last: Whether a last batch that is not full is left out.
        ranks: Over how many ranks the order is sharded; 1 if each rank has an order of its own.
        rank: The number of this rank among them.
    """

    sampler: Any
    outer: Any
    batch_size: int
    drop_last: bool
    ranks: int
    rank: int

    @classmethod
    def of(cls, outer: Any) -> Sharding | None:
        """Return how a loader with this index sampler shards, or ``None`` if no order of samples is known of it."""
        sampler = outer
        batch_size = 1
        drop_last = False
        if type(outer) in (BatchSampler, EpochBatchSampler):
            sampler = outer.sampler
            batch_size = outer.batch_size
            drop_last = outer.drop_last
        elif type(outer) is EpochSampler:
            sampler = outer.sampler
        if type(sampler) is LengthBatchSampler:
            rank, ranks = sampler.ranks()
            return BatchSharding(sampler, outer, 1, False, ranks, rank)
        if type(sampler) in (SeededSampler, WeightedSampler, DistributedSampler):
            # A SeededSampler counts the ranks when it is asked for its length.
            len(sampler)
            return cls(sampler, outer, batch_size, drop_last, sampler.num_replicas, sampler.rank)
        takes_each_once = type(sampler) is SequentialSampler
        if type(sampler) is RandomSampler:
            takes_each_once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        if takes_each_once:
            return cls(sampler, outer, batch_size, drop_last, 1, 0)
        return None

    @property
    def length(self) -> int:
        """How many samples the dataset has."""
        is_sharded = isinstance(self.sampler, DistributedSampler)
        return len(self.sampler.dataset if is_sharded else self.sampler.data_source)

    @property
    def order(self) -> SampleOrder:
        """The order of epoch 0, without the state of a generator that it may be drawn from."""
        sampler = self.sampler
        if isinstance(sampler, WeightedSampler):
            return SampleOrder("WeightedSampler", self.length, True, seed=sampler.seed, digest=sampler.digest)
        if isinstance(sampler, DistributedSampler):
            return SampleOrder(type(sampler).__name__, self.length, sampler.shuffle, seed=sampler.seed)
        return SampleOrder(type(sampler).__name__, self.length, type(sampler) is RandomSampler)

    def order_of(self, epoch: int, generator: Any, has_own_generator: bool) -> SampleOrder:
        """Return the order of an epoch.

        Args:
            epoch: The number of the epoch.
            generator: The state of the generator from which a ``RandomSampler`` draws, before it does; ``None`` where
                that is not known.
            has_own_generator: Whether that is the sampler's own.
        """
        is_random = type(self.sampler) is RandomSampler
        return dataclasses.replace(
            self.order,
            epoch=epoch,
            generator=generator if is_random else None,
            has_own_generator=is_random and has_own_generator,
        )

    def is_that_of(self, shards: Shards) -> bool:
        """Whether this loader shards samples over ranks and batches in the same way."""
        as_before = shards.order.sampler == type(self.sampler).__name__ and shards.ranks == self.ranks
        return as_before and shards.batch_size == self.batch_size

    def check(self, order: SampleOrder) -> None:
        """Raise a ``ValueError`` that names both values if this loader cannot give the rest of an order."""
        here = self.order
        both = {order.sampler, here.sampler}
        if len(both) > 1 and not both <= _LIGHTNINGS:
            refuse("sampler", order.sampler, here.sampler)
        if order.digest != here.digest:
            refuse("The sampler's weights or lengths, as a digest", order.digest, here.digest)
        self._check_length(order)
        # On several ranks Lightning takes a DistributedSampler, which shuffles. The order that began goes on.
        is_lightnings = len(both) == 2 and "DistributedSampler" in both
        if order.shuffle != here.shuffle and not is_lightnings:
            refuse("shuffle", order.shuffle, here.shuffle)
        if order.shuffle and order.seed != here.seed and None not in (order.seed, here.seed):
            refuse("seed of the sampler", order.seed, here.seed)

    def _check_length(self, order: SampleOrder) -> None:
        if order.length != self.length:
            refuse("length of the dataset", order.length, self.length)

    def count_batches(self, start: int = 0) -> int:
        """Return how many batches this rank has of the samples of an order from number ``start`` on."""
        left = self.length - start
        drops = isinstance(self.sampler, DistributedSampler) and self.sampler.drop_last
        own = left // self.ranks if drops else -(-left // self.ranks)
        return own // self.batch_size if self.drop_last else -(-own // self.batch_size)

    def reshard(self, order: SampleOrder, used: int) -> Shards:
        """Return how this loader shards the rest of an order.

        Args:
            order: The order.
            used: How many of its samples were used. They count as so many batches that the rest are the last batches of
                an epoch of this loader.
        """
        number = self.count_batches() - self.count_batches(used)
        return Shards(order, self.ranks, self.batch_size, from_sample=used, from_batch=number, is_resharded=True)

    def rest(self, shards: Shards) -> Iterator[Any]:
        """Yield the entries of this rank in the rest of an order, as the sampler of the loader yields them.

        As torch's ``DistributedSampler`` does, the first samples of the order are taken again where the ranks would not
        have the same number, or with ``drop_last`` the last ones are left out.
        """
        order = self.draw(shards.order)
        left = order[shards.from_sample :]
        over = len(left) % self.ranks
        if over and self.sampler.drop_last:
            left = left[:-over]
        elif over:
            # Over and over, as a small order may have fewer samples than there are ranks.
            left += (order * self.ranks)[: self.ranks - over]
        return self._batched(left[self.rank :: self.ranks], shards)

    def draw(self, order: SampleOrder) -> list[Any]:
        """Return the entries of an order over all ranks."""
        return self.sampler.draw(order.epoch) if isinstance(self.sampler, WeightedSampler) else order.draw()

    def _batched(self, own: list[Any], shards: Shards) -> Iterator[Any]:
        """Yield the samples of this rank as the sampler of the loader does: in batches, with keys for sample seeds."""
        if self.outer is self.sampler:
            return iter(own)
        outer = copy.copy(self.outer)
        outer.sampler = own
        if isinstance(outer, (EpochBatchSampler, EpochSampler)):
            # Seeds of samples follow from the epoch, those of batches from their number in it.
            outer.begin_pass(shards.order.epoch)
            outer.first = shards.from_batch
        return iter(outer)


class BatchSharding(Sharding):
    """How a loader with a ``LengthBatchSampler`` shards an order of batches, which are interleaved over the ranks.

    If the epoch is resumed with another number of ranks, the rest of the order is padded for them, and differs from
    then on. ``SampleOrder.cuts`` records this.
    """

    @property
    def length(self) -> int:
        """How many batches all ranks have in an epoch."""
        return len(self.sampler) * self.ranks

    @property
    def order(self) -> SampleOrder:
        """The order of epoch 0 for as many ranks as there are."""
        sampler = self.sampler
        return SampleOrder(
            "LengthBatchSampler",
            self.length,
            sampler.shuffle,
            seed=sampler.sampler.seed,
            digest=sampler.digest,
            step_ranks=self.ranks,
        )

    def order_of(self, epoch: int, generator: Any, has_own_generator: bool) -> SampleOrder:
        """Return the order of an epoch, which is drawn from no generator of the process."""
        return dataclasses.replace(self.order, epoch=epoch)

    def _check_length(self, order: SampleOrder) -> None:
        """Check nothing: the number of batches depends on the ranks, and the digest is one of all lengths."""

    def reshard(self, order: SampleOrder, used: int) -> Shards:
        """Return how this loader shards the rest of an order, of which so many batches were used."""
        steps = -(-(order.length - used) // self.ranks)
        left = dataclasses.replace(order, length=steps * self.ranks, cuts=[*order.cuts, (used, self.ranks)])
        return Shards(left, self.ranks, 1, from_sample=0, from_batch=len(self.sampler) - steps, is_resharded=True)

    def rest(self, shards: Shards) -> Iterator[Any]:
        """Yield the batches of this rank."""
        left = self.draw(shards.order)[shards.from_sample :]
        return self._batched(left[self.rank :: self.ranks], shards)

    def draw(self, order: SampleOrder) -> list[Any]:
        """Return the batches of an order over all ranks, from its last cut on."""
        epoch = self.sampler.epoch
        batches = self.sampler.draw(order.epoch, order.step_ranks)
        self.sampler.set_epoch(epoch)
        for used, ranks in order.cuts:
            batches = self.sampler.fill(batches[used:], ranks)
        return batches


def check_fits(loader: Any) -> None:
    """Raise a ``ValueError`` if a loader's sampler has lengths or weights of another dataset."""
    for sampler in (loader.batch_sampler, loader.sampler):
        inside = sampler.sampler if isinstance(sampler, (EpochBatchSampler, EpochSampler)) else sampler
        if isinstance(inside, (LengthBatchSampler, WeightedSampler)):
            dataset = loader.dataset
            inside.check_fits(dataset._seeded_dataset if isinstance(dataset, SeededDataset) else dataset)


def refuse(name: str, before: Any, now: Any) -> NoReturn:
    """Raise the error of a state of the middle of an epoch that is loaded into a loader of another kind."""
    raise ValueError(
        f"The state is of the middle of an epoch. {name}: expected {before} as when it was taken, got {now}. Go on "
        "with the same, or from a checkpoint of the end of an epoch."
    )
