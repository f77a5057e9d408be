"""``Position``: how far the iterator of a loader is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_turbo._random import generators_at, set_generator_state, shared_state
from lightning_turbo.errors import TurboWarning

__all__ = ["Position"]


class Position:
    """How far an iterator is, and the random states that a state of its loader needs.

    ``Epochs.begin`` makes one for each ``iter()`` of a loader, and a ``PrefetchIterator`` over another source its own
    one. The iterator writes to it: a count with each batch, the states where loading may draw. The loader keeps it, so
    that it can be asked after the iterator was dropped, until the next ``iter()`` or the next state that is loaded.
    Always: ``consumed`` counts what the caller got, whatever was loaded ahead.

    Args:
        consumed: Batches of the epoch that were used before this iterator.
        rng_for_next: The global RNGs for the next batch, which a Trainer had loaded ahead when the state was taken.
        dataset_generators: Those that the dataset holds, if it is loaded in this process.

    Attributes:
        consumed: Batches of the epoch that were returned or raised.
        begun: How many of them were so before this iterator.
        ended: Whether the end was reached.
        states: What the source said of itself after the last three batches that were returned, with the numbers of
            batches; the last one may be of the end. For loaders and streams with such a state.
        rng_before_first: The global RNGs before the first batch of the epoch; ``None`` if nobody noted them.
        rng_before_latest: The same before the latest batch, where loading may draw from them.
    """

    def __init__(self, consumed: int = 0, rng_for_next: Any = None, dataset_generators: Sequence[Any] = ()) -> None:
        self.consumed = consumed
        self.begun = consumed
        self.ended = False
        self.states: list[tuple[int, Any]] = []
        self.rng_before_first: Any = None
        self.rng_before_latest: Any = None
        self.rng_for_next = rng_for_next
        self.dataset_generators = dataset_generators

    @property
    def is_untouched(self) -> bool:
        """Whether the iterator has returned nothing, so that a state that was loaded before it still holds."""
        return self.consumed == self.begun and not self.ended

    def keep(self, state: Any) -> None:
        """Keep what the source said of itself at this place."""
        earlier = [each for each in self.states if each[0] < self.consumed]  # the end is at the last batch's number
        self.states = [*earlier[-2:], (self.consumed, state)]

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
