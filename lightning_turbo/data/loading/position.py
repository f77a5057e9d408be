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
    """How far an iterator is, and the random states that are saved with that.

    ``Epochs.begin`` makes one for each ``iter()`` of a loader, and a ``PrefetchIterator`` over another source makes its
    own. The iterator writes to it: the count with each batch, and the random states before a batch whose loading may
    draw from them. The loader keeps it until its next ``iter()`` or the next state that is loaded, also when the
    iterator was dropped. Always: ``consumed`` counts what the caller got, whatever was loaded ahead.

    Args:
        consumed: Batches of the epoch that were used before this iterator.
        rng_for_next: The global RNGs with which the next batch is loaded, if the state contains them: that of a run
            whose Trainer had already fetched the batch.
        dataset_generators: The random generators that the dataset holds, if it is loaded in this process.

    Attributes:
        consumed: Batches of the epoch that the caller got, as a batch or as an error.
        begun: How many of these came before this iterator.
        ended: Whether the caller has met the end.
        states: The last three states of the source that were kept, each with the number of batches before it. Loaders
            and streams with a state of their own have such; the last one may be that after the end.
        rng_before_first: The global RNGs, and the generators of the dataset, before the first batch of the epoch;
            ``None`` if they were not recorded.
        rng_before_latest: The same before the latest batch.
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
        """Keep the state of the source after the batch that counted last, or after the end."""
        # The end has the number of the last batch.
        earlier = [each for each in self.states if each[0] < self.consumed]
        self.states = [*earlier[-2:], (self.consumed, state)]

    def record(self) -> AbstractContextManager[None]:
        """Record the random states before a batch is loaded, and return the context in which to load it."""
        rng = self.rng_for_next
        self.rng_for_next = None
        self.rng_before_latest = rng or shared_state(self.dataset_generators)
        if self.rng_before_first is None:
            self.rng_before_first = self.rng_before_latest
        return generators_at(rng, self.dataset_generators) if rng else nullcontext()

    def set_dataset_generators(self, states: Sequence[Any]) -> None:
        """Set the generators that the dataset holds to the states of those of a dataset like it.

        Warns:
            TurboWarning: If it does not hold as many.
        """
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
