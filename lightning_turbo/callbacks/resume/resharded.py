"""Training loaders that go on within an epoch with other ranks, batch sizes or processes: the run's count follows.

Each loader has loaded its state and counts the used samples in its own batches by now. The epoch of the run has as many
batches as it would have had with these from its beginning, and its last ones are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from lightning_turbo._distributed import rank_and_size
from lightning_turbo._lightning import rank_zero_warn
from lightning_turbo.callbacks.resume.counters import shift_batches, update_schedulers
from lightning_turbo.callbacks.resume.restored import Restored
from lightning_turbo.data.loading.epoch_state import EpochState
from lightning_turbo.data.loading.epochs import length_of
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.errors import TurboWarning

__all__ = ["batch_size_of", "count_on", "count_whole_epoch", "has_state", "warn_of_other_batches"]


def has_state(loader: Any) -> bool:
    """Whether Lightning saves a state of a loader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def batch_size_of(loader: Any) -> int:
    """Return the batch size of a loader; 1 if it has none."""
    return getattr(loader, "batch_size", None) or 1


class _Loaded(NamedTuple):
    """A loader that counts its batches, and the state that was loaded into it.

    Attributes:
        loader: The loader.
        limit: How many batches the Trainer takes of it in an epoch.
        old: The state as it was saved.
        new: What the loader made of it.
    """

    loader: Any
    limit: float
    old: EpochState
    new: EpochState

    @property
    def is_resharded(self) -> bool:
        """Whether the loader goes on with other ranks, batches or processes, and counts otherwise than the state."""
        if self.old.over or self.new.over:
            return False
        return self.old.batching != self.new.batching


def _loaded(combined: Any, states: Sequence[Any]) -> list[_Loaded]:
    """Return the loaders that count their batches, with the states that were loaded into them."""
    limits = zip(combined.flattened, combined.limits, strict=True)
    stateful = [(loader, limit) for loader, limit in limits if has_state(loader)]
    read = [(*each, _read(state)) for each, state in zip(stateful, states, strict=True)]
    return [
        _Loaded(loader, limit, old, loader.epoch_state())
        for loader, limit, old in read
        if isinstance(loader, PrefetchLoader) and old is not None
    ]


def _read(state: Any) -> EpochState | None:
    """Return the state of a loader that counts its batches; ``None`` for that of a class of its own."""
    return EpochState.from_dict(state) if EpochState.is_one(state) else None


def count_on(trainer: Any, restored: Restored) -> list[str]:
    """Count the used batches of the epoch in those of the loaders, and return what to tell of resharded ones."""
    loop = trainer.fit_loop
    combined = loop._combined_loader
    length = trainer.num_training_batches
    loaded = _loaded(combined, restored.loaders)
    resharded = [each for each in loaded if each.is_resharded]
    if not resharded:
        return []
    furthest = max(each.old.consumed for each in loaded)
    # Not known where a step takes its batches itself.
    used = restored.place.used or furthest
    # No more than all: a limit counts batches, and fewer of them may be more samples than before.
    done = min(length, _count_batches(loaded, combined._mode))
    # Loaders that are as far as the run count the same number of batches.
    for each in resharded:
        if each.old.consumed == furthest or done == length:
            each.loader.load_epoch_state(each.new.counted_from(done, ended=done == length))
    shift_batches(loop.epoch_loop, done - used)
    if done == length:
        update_schedulers(loop.epoch_loop)
    epoch = loop.epoch_progress.current.processed
    return [_tell_of_samples(epoch, used, done, length, each.old, each.new) for each in resharded]


def _count_batches(loaded: Sequence[_Loaded], mode: str) -> int:
    """Return after how many batches of its epoch a run goes on, by what is left of its loaders."""
    counts = [(each.limit, each.new.consumed) for each in loaded]
    if mode != "min_size" or inf in dict(counts):
        return max(counts)[1]
    return int(min(limit for limit, _ in counts) - min(limit - consumed for limit, consumed in counts))


def _tell_of_samples(epoch: int, used: int, done: int, length: float, old: EpochState, new: EpochState) -> str:
    place = new.shards or new.stream
    assert place is not None
    whole = "each stream" if new.shards is None else new.shards.order.length
    number = f"{length - done} of {length} " if length < inf else ""
    return (
        f"Epoch {epoch} goes on at sample {place.from_sample} of {whole}: {used} batches of {_samples_of_batch(old)} "
        f"samples were used, {number}batches of {_samples_of_batch(new)} are left."
    )


def _samples_of_batch(state: EpochState) -> str:
    if state.shards is not None:
        return f"{state.shards.ranks} x {state.shards.batch_size}"
    assert state.stream is not None
    return f"each rank x {state.stream.batch_size}"


def count_whole_epoch(trainer: Any, restored: Restored) -> None:
    """Count all batches of an epoch as used if its validation alone is left, and it had another number of batches."""
    loaded = _loaded(trainer.fit_loop._combined_loader, restored.loaders)
    if any(each.old.over and each.old.length != length_of(each.loader) for each in loaded):
        loop = trainer.fit_loop.epoch_loop
        shift_batches(loop, trainer.num_training_batches - loop.batch_progress.current.processed)


# Loaders of which no order over all ranks is known


def warn_of_other_batches(loaders: Sequence[Any], restored: Restored) -> None:
    """Warn of loaders that go on with other ranks or batch sizes, and of which no order over all ranks is known.

    Args:
        loaders: The loaders with a state.
        restored: What was restored; its ``loaders`` are the states of these.
    """
    ranks = rank_and_size()[1]
    sizes = restored.batch_sizes or list(map(batch_size_of, loaders))
    for loader, saved, batch_size in zip(loaders, restored.loaders, sizes, strict=True):
        now = batch_size_of(loader)
        state = _read(saved)
        # A PrefetchLoader tells of other batch sizes itself.
        was = batch_size if state is None else now
        if restored.ranks in (0, ranks) and was == now:
            continue
        counted = _count_samples(state, restored, was, now)
        if counted is None:
            continue
        used, skipped = counted
        before = restored.ranks * used
        left_out = ranks * skipped
        rank_zero_warn(
            f"A {type(loader).__name__} goes on with {ranks} ranks x {now} samples in place of "
            f"{restored.ranks} x {was} in the middle of an epoch, and no order of its samples over all ranks is known: "
            f"{before} were used, and {left_out} count as used now, so that about {abs(before - left_out)} are seen "
            f"{'twice' if left_out < before else 'never'} in this epoch. Add Prefetch to the Trainer, with "
            "shuffle=True or a SeededSampler, or go on from a checkpoint of the end of an epoch.",
            category=TurboWarning,
        )


def _count_samples(state: EpochState | None, restored: Restored, was: int, now: int) -> tuple[int, int] | None:
    """Return how many samples of a rank were used, and how many are left out; ``None`` if a loader goes on exactly.

    Args:
        state: The state of the loader, if it counts its batches.
        restored: What was restored.
        was: The batch size of the loader then.
        now: Its batch size of now.
    """
    if state is None:
        # Batches of a loader are counted, and it leaves as many of its own size out.
        used = restored.place.used
        return (used * was, used * now) if used else None
    is_known = state.shards is not None and state.shards.ranks == restored.ranks
    if state.over or is_known or not state.consumed:
        return None
    if state.shards is None and state.stream is None:
        return state.consumed * was, state.consumed * now
    return state.used_samples, state.used_samples
