"""The order of an epoch's samples over all ranks, and the rest of it for other ranks and batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import same_random_numbers, set_generator_state
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.sample_seeds import EpochBatchSampler, EpochSampler

__all__ = ["Dealing", "draw_order", "refuse"]

# What a Trainer takes for one another, as it goes from one rank to several and back.
_LIGHTNINGS = {"RandomSampler", "SequentialSampler", "DistributedSampler"}


class Dealing(NamedTuple):
    """How a loader deals the samples of one order out: in turn to the ranks, and there to batches.

    Attributes:
        sampler: What the order comes from: a ``SeededSampler``, or torch's ``DistributedSampler``, ``RandomSampler``
            without replacement, or ``SequentialSampler``.
        outer: What makes batches of the indices; ``sampler`` itself for a loader with ``batch_size=None``.
        batch_size: Samples of a batch.
        drop_last: Whether a batch that is not full is left out.
        ranks: Among how many the order is dealt out; one where each rank has its own.
        rank: The number of this one.
    """

    sampler: Any
    outer: Any
    batch_size: int
    drop_last: bool
    ranks: int
    rank: int

    @classmethod
    def of(cls, outer: Any) -> Dealing | None:
        """Return how a loader with this index sampler deals, or ``None`` if no order of samples is known of it."""
        sampler, batch_size, drop_last = outer, 1, False
        if type(outer) in (BatchSampler, EpochBatchSampler):
            sampler, batch_size, drop_last = outer.sampler, outer.batch_size, outer.drop_last
        elif type(outer) is EpochSampler and not outer.batched:
            sampler = outer.sampler
        if type(sampler) in (SeededSampler, DistributedSampler):
            len(sampler)  # at which a SeededSampler counts the ranks
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
        is_dealt = isinstance(self.sampler, DistributedSampler)
        return len(self.sampler.dataset if is_dealt else self.sampler.data_source)

    def describe(self, epoch: int, generator: Any) -> dict[str, Any]:
        """Return what ``draw_order`` makes the order of an epoch from.

        Args:
            epoch: The number of the epoch.
            generator: The state of the generator from which a ``RandomSampler`` draws, before it does; ``None`` where
                that is not known.
        """
        sampler = self.sampler
        is_dealt = isinstance(sampler, DistributedSampler)
        shuffle = sampler.shuffle if is_dealt else type(sampler) is RandomSampler
        order = {"sampler": type(sampler).__name__, "length": self.length, "shuffle": shuffle, "epoch": epoch}
        is_random = type(sampler) is RandomSampler
        return {**order, "seed": sampler.seed if is_dealt else None, "generator": generator if is_random else None}

    def check(self, order: dict[str, Any]) -> None:
        """Raise a ``ValueError`` that names both values if this loader is not one for an order."""
        here = self.describe(0, None)
        both = {order["sampler"], here["sampler"]}
        if len(both) > 1 and not both <= _LIGHTNINGS:
            refuse("sampler", order["sampler"], here["sampler"])
        if order["length"] != here["length"]:
            refuse("length of the dataset", order["length"], here["length"])
        if order["shuffle"] != here["shuffle"]:
            refuse("shuffle", order["shuffle"], here["shuffle"])
        if order["seed"] != here["seed"] and None not in (order["seed"], here["seed"]):
            refuse("seed of the sampler", order["seed"], here["seed"])

    def count_batches(self, start: int = 0) -> int:
        """Return how many batches this rank has of an order from its sample ``start`` on."""
        left = self.length - start
        drops = isinstance(self.sampler, DistributedSampler) and self.sampler.drop_last
        own = left // self.ranks if drops else -(-left // self.ranks)
        return own // self.batch_size if self.drop_last else -(-own // self.batch_size)

    def rest(self, order: list[int], start: int, epoch: int, number: int) -> Iterator[Any]:
        """Yield what this rank loads of an order from its sample ``start`` on, as the loader's own sampler would.

        As torch's ``DistributedSampler`` does, the first samples of the order are taken again where the ranks would not
        have the same number, or with ``drop_last`` the last ones are left out.

        Args:
            order: The order of all samples.
            start: How many of them are left out.
            epoch: Its epoch, which seeds of samples follow from.
            number: The number of the first batch in the epoch, which seeds of batches follow from.
        """
        left = order[start:]
        over = len(left) % self.ranks
        if over and self.sampler.drop_last:
            left = left[:-over]
        elif over:
            # Over and over, as a small order may have fewer samples than there are ranks.
            left += (order * self.ranks)[: self.ranks - over]
        own = left[self.rank :: self.ranks]
        if self.outer is self.sampler:
            return iter(own)
        outer = copy.copy(self.outer)
        outer.sampler = own
        if isinstance(outer, (EpochBatchSampler, EpochSampler)):
            outer.epoch, outer.first = epoch, number
        return iter(outer)


def draw_order(order: dict[str, Any]) -> list[int]:
    """Return the order of the samples of all ranks that ``Dealing.describe`` described."""
    # By torch's own samplers, whose order this is bit for bit.
    data: Any = range(order["length"])
    if not order["shuffle"]:
        return list(data)
    if order["sampler"] == "RandomSampler":
        generator = torch.Generator()
        if order["generator"]["own"]:
            set_generator_state(generator, order["generator"]["state"])
            return list(RandomSampler(data, generator=generator))
        with same_random_numbers():
            torch.set_rng_state(order["generator"]["state"])
            return list(RandomSampler(data))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=order["seed"])
    sampler.set_epoch(order["epoch"])
    return list(sampler)


def refuse(name: str, before: Any, now: Any) -> NoReturn:
    """Raise what is said where a state of the middle of an epoch is loaded into another kind of loader."""
    raise ValueError(
        f"The state is of the middle of an epoch. {name}: expected {before} as when it was taken, got {now}. Go on "
        "with the same, or from a checkpoint of the end of an epoch."
    )
