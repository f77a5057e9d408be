"""Where a loader stands in its epoch, counted in batches that were used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lightning_turbo.data.randomness import set_shared_state, shared_state

__all__ = ["IndexTape", "Place", "own_generators"]


class Place:
    """How far an iterator got. Its loader keeps it, so that it can be asked after the iterator was dropped.

    Attributes:
        consumed: Batches handed out.
        state: What the source said of itself after the last of them; ``None`` before the first.
        ended: Whether the end was reached.
    """

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed
        self.state: Any = None
        self.ended = False


class IndexTape:
    """A sampler around a sampler that notes how its order began, and can begin there again and skip.

    The order of a sampler follows from the states of the random generators at the moment when its first index is
    drawn, and from its epoch if it has one. That is what is noted; the indices themselves are not kept.

    Args:
        sampler: A sampler or batch sampler.
        generator: The loader's own random generator, if it has one.

    Attributes:
        began: The states at the first index of the latest epoch; ``None`` before one was drawn.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self.sampler = sampler
        self.began: dict[str, Any] | None = None
        self._skip: tuple[int, dict[str, Any]] | None = None
        self._indices: _Indices | None = None
        self._own = _generators(generator, sampler)
        owners: tuple[Any, Any] = (sampler, getattr(sampler, "sampler", None))
        self._counting = [owner for owner in owners if _has_epoch(owner)]

    def rewind(self, consumed: int, began: dict[str, Any]) -> None:
        """Make the next epoch the one that began at ``began``, without its first ``consumed`` indices."""
        self._skip = (consumed, began)

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore[reportArgumentType] - a TypeError where the sampler has no length

    def __iter__(self) -> Iterator[Any]:
        self._indices = _Indices(self._epoch())
        return self._indices

    def draw(self) -> None:
        """Draw the order of the latest epoch now, in this thread, instead of when its first index is asked for."""
        if self._indices is not None:
            self._indices.look()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_indices": None}  # a trainer may keep this object in its records of a loader

    def _epoch(self) -> Iterator[Any]:
        skip, self._skip = self._skip, None
        if skip is None:
            self.began = {
                "shared": shared_state(),
                "own": [g.get_state() for g in self._own],
                "epochs": [sampler.epoch for sampler in self._counting],
            }
            yield from self.sampler
            return
        consumed, self.began = skip
        here = shared_state()
        set_shared_state(self.began["shared"])
        for generator, state in zip(self._own, self.began["own"], strict=True):
            generator.set_state(state)
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


class _Indices(Iterator[Any]):
    """An iterator whose next item can be made ahead of its turn."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._ahead: list[Any] = []

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._source)

    def look(self) -> None:
        """Make the next item, if there is one."""
        if not self._ahead:
            self._ahead.extend(itertools.islice(self._source, 1))


def _has_epoch(sampler: Any) -> bool:
    """Whether a sampler's order follows from the number of an epoch, as ``DistributedSampler``'s does."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators that belong to a loader or its samplers, not to the process."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return _generators(getattr(loader, "generator", None), *samplers)


def _generators(generator: Any, *samplers: Any) -> list[torch.Generator]:
    owners = [*samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    found = [generator, *(getattr(owner, "generator", None) for owner in owners)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
