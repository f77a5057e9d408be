"""``Shares``: how the samples of one order are shared over ranks and batches, and the rest of it over others."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._distributed import rank_and_size
from lightning_turbo._random import same_random_numbers, set_generator_state
from lightning_turbo.data.loading.order import Order
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.orders.weighted_sampler import WeightedSampler

__all__ = ["Shares", "check_fits", "used_samples"]

# Lightning exchanges these for one another as a run goes from one rank to several and back. On several ranks it may
# shuffle though the loader does not.
_LIGHTNINGS = {"RandomSampler", "SequentialSampler", "DistributedSampler"}


class Shares:
    """How a loader shares an order of samples: interleaved over the ranks, and in batches on each of them.

    The loader makes one for each question, because a Trainer may begin the process group after the loader is made.
    Always: the numbers of ranks, and of this one, are those of the moment when it was made.

    Args:
        order: The ``Order`` of the loader.

    Attributes:
        is_known: Whether the order of all samples over all ranks can be drawn again. It is for a ``SeededSampler``, a
            ``WeightedSampler`` and, of torch's own, ``DistributedSampler``, ``SequentialSampler`` and ``RandomSampler``
            without replacement.
        ranks: Over how many ranks the order is shared; 1 if each rank has an order of its own.
        rank: The number of this rank.
        batch_size: Samples of a batch of one rank.
        length: Samples of the order.
    """

    def __init__(self, order: Order) -> None:
        outer: Any = order.sampler
        is_batched = type(outer) is BatchSampler
        inner: Any = outer.sampler if is_batched else outer
        self._order = order
        self._outer: Any = outer
        self._inner: Any = inner
        self.batch_size = outer.batch_size if is_batched else 1
        self._drop_last = outer.drop_last if is_batched else False
        is_ranked = type(inner) in (SeededSampler, WeightedSampler, DistributedSampler)
        takes_each_once = type(inner) is SequentialSampler
        if type(inner) is RandomSampler:
            takes_each_once = not inner.replacement and inner.num_samples == len(inner.data_source)
        self.is_known = is_ranked or takes_each_once
        self.is_of_batches = type(outer) is LengthBatchSampler
        # Each rank may have an order of its own.
        self.ranks, self.rank, self.length = 1, rank_and_size()[0], 0
        if is_ranked:
            len(inner)  # a SeededSampler counts the ranks when it is asked for its length
            ranked: Any = inner
            self.ranks, self.rank, self.length = ranked.num_replicas, ranked.rank, len(ranked.dataset)
        elif takes_each_once:
            self.length = len(inner.data_source)
        elif self.is_of_batches:
            self.rank, self.ranks = outer.ranks()

    @property
    def sampler(self) -> str:
        """The name of the class of the sampler that gives the order."""
        return type(self._inner).__name__

    def describe(self, start: dict[str, Any]) -> dict[str, Any] | None:
        """Return all that the order over all ranks follows from, as a state saves it.

        Args:
            start: Where the order began.

        Returns:
            A dictionary of plain Python objects and tensors; ``None`` if it cannot be drawn again on other ranks.
        """
        inner = self._inner
        if self.is_of_batches:
            return {"sampler": self.sampler, "seed": inner.sampler.seed, "digest": inner.digest}
        if not self.is_known:
            return None
        generator, is_own = self._drawn_from(start)
        # The last epoch is that of the innermost sampler that has one.
        return {
            "sampler": self.sampler,
            "length": self.length,
            "shuffle": self._shuffles(),
            "seed": getattr(inner, "seed", None),
            "digest": getattr(inner, "digest", ""),
            "epoch": start["epochs"][-1] if start["epochs"] else 0,
            "generator": generator,
            "is_own": is_own,
        }

    def _shuffles(self) -> bool:
        inner = self._inner
        return isinstance(inner, (RandomSampler, WeightedSampler)) or bool(getattr(inner, "shuffle", False))

    def _drawn_from(self, start: dict[str, Any]) -> tuple[Any, bool]:
        """Return the state from which a ``RandomSampler`` drew the order, and whether the generator is its own."""
        first = start["first"]
        if type(self._inner) is not RandomSampler or first is None:
            return None, False
        for generator, state in zip(self._order.generators, first["own"], strict=True):
            if generator is self._inner.generator:
                return state, True
        return first["shared"]["torch"], False

    def has_same(self, state: dict[str, Any]) -> bool:
        """Whether a state is of a loader that shares samples over ranks and batches in the same way."""
        described = state["order"]
        same = state["ranks"] == self.ranks and state["batch_size"] == self.batch_size
        return same and described["sampler"] == self.sampler

    def check(self, described: dict[str, Any]) -> None:
        """Raise a ``ValueError`` that names both values if this loader cannot give the rest of an order."""
        both = {described["sampler"], self.sampler}
        is_served = self.is_known or self.is_of_batches
        if not is_served or (len(both) > 1 and not both <= _LIGHTNINGS):
            _refuse("sampler", described["sampler"], self.sampler)
        digest = getattr(self._inner, "digest", "")
        if described["digest"] != digest:
            _refuse("The sampler's weights or lengths, as a digest", described["digest"], digest)
        if not self.is_of_batches:
            self._check_samples(described, is_lightnings=len(both) == 2 and "DistributedSampler" in both)

    def _check_samples(self, described: dict[str, Any], is_lightnings: bool) -> None:
        """Check an order of samples.

        Args:
            described: The order.
            is_lightnings: Whether Lightning has exchanged the sampler. On several ranks it takes a
                ``DistributedSampler``, which shuffles. The order that began goes on.
        """
        if described["length"] != self.length:
            _refuse("length of the dataset", described["length"], self.length)
        if described["shuffle"] != self._shuffles() and not is_lightnings:
            _refuse("shuffle", described["shuffle"], self._shuffles())
        seed = getattr(self._inner, "seed", None)
        if described["shuffle"] and described["seed"] != seed and None not in (described["seed"], seed):
            _refuse("seed of the sampler", described["seed"], seed)

    def reshard(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of other ranks or batches as one of this loader: the same samples were used.

        They count as so many batches that the rest are the last batches of an epoch of this loader.

        Raises:
            ValueError: If the order is one of batches.
        """
        if self.is_of_batches:
            _refuse(f"ranks of the {self.sampler}", state["ranks"], self.ranks)
        used = min(used_samples(state), self.length)
        number = self.count_batches() - self.count_batches(used)
        return {
            **state,
            "is_resharded": True,
            "consumed": number,
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "length": self.count_batches(),
            "from_sample": used,
            "from_batch": number,
            "digest": None,
        }

    def count_batches(self, used: int = 0) -> int:
        """Return how many batches this rank has of the samples of an order from number ``used`` on."""
        left = self.length - used
        drops = isinstance(self._inner, DistributedSampler) and self._inner.drop_last
        own = left // self.ranks if drops else -(-left // self.ranks)
        return own // self.batch_size if self._drop_last else -(-own // self.batch_size)

    def rest(self, described: dict[str, Any], used: int) -> list[Any]:
        """Return the entries of this rank in the rest of an order, as the sampler of the loader gives them.

        As torch's ``DistributedSampler`` does, the first samples of the order are taken again where the ranks would not
        have the same number, or with ``drop_last`` the last ones are left out.
        """
        whole = self._draw(described)
        left = whole[used:]
        over = len(left) % self.ranks
        if over and self._inner.drop_last:
            left = left[:-over]
        elif over:
            # Over and over, as a small order may have fewer samples than there are ranks.
            left += (whole * self.ranks)[: self.ranks - over]
        own = left[self.rank :: self.ranks]
        if self._outer is self._inner:
            return own
        outer = copy.copy(self._outer)
        outer.sampler = own
        return list(outer)

    def _draw(self, described: dict[str, Any]) -> list[int]:
        """Return the samples of all ranks, in the order of torch's own samplers bit for bit."""
        data: Any = range(described["length"])
        if isinstance(self._inner, WeightedSampler):
            return self._inner.draw(described["epoch"])
        if not described["shuffle"]:
            return list(data)
        if described["generator"] is None:
            sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=described["seed"])
            sampler.set_epoch(described["epoch"])
            return list(sampler)
        if described["is_own"]:
            generator = torch.Generator()
            set_generator_state(generator, described["generator"])
            return list(RandomSampler(data, generator=generator))
        with same_random_numbers():
            torch.set_rng_state(described["generator"])
            return list(RandomSampler(data))


def used_samples(state: dict[str, Any]) -> int:
    """Return how many samples of its order all ranks together have used, by the state of one of them."""
    later = state["consumed"] - state["from_batch"]
    return state["from_sample"] + later * state["batch_size"] * state["ranks"]


def check_fits(loader: Any) -> None:
    """Raise a ``ValueError`` if a loader's sampler has lengths or weights of another dataset."""
    for sampler in (loader.batch_sampler, loader.sampler):
        if isinstance(sampler, (LengthBatchSampler, WeightedSampler)):
            sampler.check_fits(loader.dataset)


def _refuse(name: str, before: Any, now: Any) -> NoReturn:
    """Raise the error of a state of the middle of an epoch that is loaded into a loader of another kind."""
    raise ValueError(
        f"The state is of the middle of an epoch. {name}: expected {before} as when it was taken, got {now}. Go on "
        "with the same, or from a checkpoint of the end of an epoch."
    )
