"""``Order``: records the states from which the order of an epoch follows, draws it again, and checks it."""

from __future__ import annotations

import array
import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from lightning_turbo._random import (
    attributes_of,
    generator_state,
    generators_in,
    is_a,
    same_random_numbers,
    set_generator_state,
    set_shared_state,
    shared_state,
)

__all__ = ["Digests", "Order", "generators_of", "samplers_in"]


class Order:
    """Stands around the sampler of a loader while torch's iterator reads it.

    An order follows from the states of the random generators when the sampler is asked for an iterator and when its
    first entry is drawn, from its epoch if it has one, or from what its ``state_dict`` says before it begins. These
    are its *start*, a dictionary that the epoch keeps and a state holds; the entries are not recorded. Two states and
    not one, because torch draws a seed for its workers between them. With worker processes torch begins twice, and the
    order follows from the second time: *begun* are the states of the first, with which the pass can be made again.

    A loader makes one for its sampler, and another when that is exchanged. Before torch makes its iterator, an epoch
    sets ``entries``, which returns what torch is to read; torch asks for it twice where there are worker processes.
    Always: it knows no epoch, and what it stands around is the loader's own sampler.

    Args:
        sampler: The sampler inside. That of a stream yields entries without an order.
        generators: The random generators that an order follows from.
    """

    def __init__(self, sampler: Any, generators: list[Any]) -> None:
        self.sampler = sampler
        self.generators = generators
        samplers = samplers_in(sampler)
        self._counted = [each for each in samplers if _has_epoch(each)]
        # The state of torchdata's samplers with an epoch says how far the pass before came, and nothing of the order.
        self._stateful = [each for each in samplers if _has_state(each) and not _has_epoch(each)]
        self.entries: Callable[[], Iterator[Any]] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler) if self.entries is None else self.entries()

    @property
    def count(self) -> int:
        """How many samplers have an epoch."""
        return len(self._counted)

    @property
    def epoch(self) -> int | None:
        """The epoch of the sampler that has one; of the innermost, if there are several."""
        return self._counted[-1].epoch if self._counted else None

    def begin(self, start: dict[str, Any]) -> Iterator[Any]:
        """Begin a new order, and record in ``start`` where it begins; the second state with its first entry."""
        states = self.states()
        start.setdefault("begun", {**states, "samplers": self.sampler_states()})
        start.update(
            epochs=[each.epoch for each in self._counted], samplers=self.sampler_states(), iter=states, first=None
        )
        return self._draw(iter(self.sampler), start)

    def begin_again(self, start: dict[str, Any]) -> Iterator[Any]:
        """Begin an order at ``start``, whatever the generators are at. They are left as the order moves them.

        Raises:
            ValueError: If it is the start of an order of other samplers.
        """
        self._check(start)
        for each, epoch in zip(self._counted, start["epochs"], strict=True):
            each.set_epoch(epoch)  # a Trainer may not have set it yet
        self.set_samplers(start["samplers"])
        self.set(start["iter"])
        return self._draw(iter(self.sampler), start)

    def draw_end(self, start: dict[str, Any]) -> None:
        """Draw an order once more that was used whole, because its sampler may draw a number at its end, as torch's do.

        The generators that it follows from, and samplers with a state, are then as after it. All else is as before.
        """
        epochs = [each.epoch for each in self._counted]
        with same_random_numbers():
            deque(self.begin_again(start), maxlen=0)
        for each, epoch in zip(self._counted, epochs, strict=True):
            each.set_epoch(epoch)

    def _draw(self, entries: Iterator[Any], start: dict[str, Any]) -> Iterator[Any]:
        if start["first"] is None:
            start["first"] = self.states()
        else:
            self.set(start["first"])
        yield from rest_of(entries)

    def _check(self, start: dict[str, Any]) -> None:
        parts = {
            "samplers that count epochs": (start["epochs"], self._counted),
            "samplers with a state": (start["samplers"], self._stateful),
            "random generators": (start["iter"]["own"], self.generators),
        }
        for what, (saved, here) in parts.items():
            if len(saved) != len(here):
                raise ValueError(
                    f"The state is of a loader with {len(saved)} {what}, and this one has {len(here)}. Load it into a "
                    "loader with the same samplers."
                )

    def states(self) -> dict[str, Any]:
        """Return the states of the global RNGs, and of the generators that an order follows from."""
        return {"shared": shared_state(), "own": self.own_states()}

    def own_states(self) -> list[Any]:
        """Return the states of the generators that an order follows from, without the global RNGs."""
        return [generator_state(each) for each in self.generators]

    def set(self, states: dict[str, Any]) -> None:
        """Set all generators to what ``states`` returned."""
        set_shared_state(states["shared"])
        self.set_own(states["own"])

    def sampler_states(self) -> list[Any]:
        """Return copies of the states of the samplers that have one."""
        return [copy.deepcopy(each.state_dict()) for each in self._stateful]

    def set_samplers(self, states: list[Any]) -> None:
        """Set these samplers to what ``sampler_states`` returned, if there are as many as then."""
        if len(states) == len(self._stateful):
            for each, state in zip(self._stateful, states, strict=True):
                each.load_state_dict(copy.deepcopy(state))

    def set_own(self, states: list[Any]) -> None:
        """Set them to what ``own_states`` returned, if there are as many as then."""
        if len(states) == len(self.generators):
            for generator, state in zip(self.generators, states, strict=True):
                set_generator_state(generator, state)


class Digests:
    """A running digest of the entries of an epoch, by which an order that is drawn again is compared with the first.

    An epoch has one. ``pass_on`` stands in the way of the entries to torch. Always: the digest at any of the last
    entries that were passed on is known, so that those which were drawn ahead do not count.

    Args:
        ahead: How many entries may be drawn ahead of what was used.
    """

    def __init__(self, ahead: int) -> None:
        self._latest: deque[int] = deque([0], maxlen=int(ahead) + 4)
        self._count = 0

    def pass_on(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Yield the entries, and follow them."""
        for entry in entries:
            self._latest.append(_digest(entry, self._latest[-1]))
            self._count += 1
            yield entry

    def after(self, count: int) -> int | None:
        """Return the digest of the first ``count`` entries; ``None`` if it is not known any more."""
        place = count - self._count - 1
        return self._latest[place] if -len(self._latest) <= place < 0 else None


def _digest(entry: Any, before: int) -> int:
    try:
        parts: Any = array.array("q", entry if isinstance(entry, (list, tuple)) else [entry])
    except (TypeError, OverflowError):
        parts = repr(entry).encode()
        if b" object at 0x" in parts:  # an address says nothing
            return before
    return zlib.crc32(parts, before)


def rest_of(entries: Iterator[Any]) -> Iterator[Any]:
    """Yield what is left of an iterator, without ``iter``, at which Lightning's wrapper would begin again."""
    end = object()
    while (entry := next(entries, end)) is not end:
        yield entry


def drawn(entries: Iterator[Any], count: int) -> Iterator[Any]:
    """Draw so many entries at once, and return an iterator over these and the others."""
    return itertools.chain(list(itertools.islice(entries, count)), entries)


def generators_of(generator: Any, sampler: Any) -> list[Any]:
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


def _has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))
