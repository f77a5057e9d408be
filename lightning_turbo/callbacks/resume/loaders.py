"""The training loaders of a run: their states and random generators in a checkpoint, and how they go on by these.

Lightning keeps the loaders of a run in a ``CombinedLoader``. ``states`` are those of its loaders with a state, in their
order there. A loader of another class than ``PrefetchLoader`` may have none, and its random generators are saved beside
it; a ``PrefetchLoader`` counts its batches, unless its class keeps a state of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._lightning import set_sampler_epoch
from lightning_turbo._random import generator_state, generators_in, set_generator_state
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.callbacks.resume import counters
from lightning_turbo.callbacks.resume.random_states import set_random_states
from lightning_turbo.callbacks.resume.resharded import (
    batch_size_of,
    count_on,
    count_whole_epoch,
    has_state,
    warn_of_other_batches,
)
from lightning_turbo.callbacks.resume.restored import Restored
from lightning_turbo.data.loading.epoch_state import EpochState
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.resumable_sampler import ResumableSampler, generators_of

__all__ = [
    "batch_sizes", "correct_own_states", "correct_reloading", "exhausted", "go_on_in_epoch", "go_on_with_whole_epoch",
    "leave_states_to_lightning", "saved_states", "set_aside", "set_up_as_before", "states_of_generators",
]  # fmt: skip


def _stateful(combined: Any) -> list[Any]:
    """Return the loaders with a state."""
    return [] if combined is None else [each for each in combined.flattened if has_state(each)]


def _counts(loader: Any) -> bool:
    """Whether a loader counts its batches."""
    return isinstance(loader, PrefetchLoader) and loader.counts_batches


# What is saved


def batch_sizes(combined: Any) -> list[int]:
    """Return the batch sizes of the loaders with a state."""
    return list(map(batch_size_of, _stateful(combined)))


def saved_states(checkpoint: dict[str, Any]) -> list[Any]:
    """Return the states of this rank's loaders that Lightning has put into a checkpoint."""
    return _loop_state(checkpoint).get("combined_loader", [])


def _loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def correct_own_states(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Take batches that were fetched and not used out of the states of loaders whose class keeps its own."""
    loop = trainer.fit_loop
    states = saved_states(checkpoint)
    if not states or loop._data_fetcher is None or loop._data_fetcher.fetched == 0:
        return
    used = counters.place_of(trainer, checkpoint["loops"]["fit_loop"]).used
    unused = 0 if used is None else loop._data_fetcher.fetched - used
    for number, loader in enumerate(_stateful(loop._combined_loader)):
        if unused > 0 and isinstance(loader, PrefetchLoader) and not loader.counts_batches:
            states[number] = loader.state_before(unused)


def leave_states_to_lightning(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Leave only those states where Lightning looks for them that it can load without this package.

    It refuses to go on if a checkpoint has more of them than the run has loaders with a state.
    """
    loop_state = _loop_state(checkpoint)
    states = loop_state.pop("combined_loader", [])
    pairs = zip(_stateful(trainer.fit_loop._combined_loader), states, strict=True)
    kept = [state for loader, state in pairs if not (_counts(loader) and loader.was_plain)]
    if kept:
        loop_state["combined_loader"] = kept


def exhausted(combined: Any) -> list[bool]:
    """Return of each loader whether a pass over it has ended, where loaders begin again within an epoch."""
    return list(getattr(getattr(combined, "_iterator", None), "_consumed", ()))


def states_of_generators(combined: Any) -> list[list[Any]]:
    """Return the states of the generators of loaders that do not count their batches; the others save them."""
    loaders = [] if combined is None else combined.flattened
    return [[generator_state(each) for each in _generators_of(loader)] for loader in loaders]


def _generators_of(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader) or _counts(loader):
        return []
    own = generators_of(loader.generator, loader._index_sampler)
    return own if loader.num_workers else [*own, *generators_in(loader.dataset)]


# The set-up of the loaders in a run that goes on


class _Waiting:
    """Takes the place of a loader while Lightning calls ``iter`` on it before its state is loaded: it has no batches.

    Otherwise a batch of a stream would be fetched that nobody uses, and worker processes would start twice.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def set_aside(loop: Any) -> list[ReplacedMethod]:
    """Have Lightning begin no epoch where it sets the loaders up: it begins when their states are loaded.

    Returns:
        Methods of the fit loop, to be put back when the training starts.
    """

    def load_states(load: Callable[[], None]) -> None:
        load()
        # Lightning's ``setup_data`` calls this just before ``iter``.
        loop._combined_loader.flattened = [_Waiting(each) for each in loop._combined_loader.flattened]

    def set_up(setup_data: Callable[[], None]) -> None:
        try:
            setup_data()
        finally:
            combined = loop._combined_loader
            if combined is not None:
                combined.flattened = [
                    each.loader if isinstance(each, _Waiting) else each for each in combined.flattened
                ]

    return [
        ReplacedMethod(loop, "setup_data", set_up),
        ReplacedMethod(loop, "_load_combined_loader_states", load_states),
    ]


def set_up_as_before(trainer: Any, random: dict[str, Any]) -> ReplacedMethod:
    """Have the next set-up of the loaders leave the random generators as they were at its end.

    Lightning makes loaders again at the beginning of an epoch, and draws then. A checkpoint from
    ``on_train_epoch_start`` was saved after that.
    """

    def set_up_once(set_up: Callable[[], None]) -> None:
        set_up()
        set_random_states(trainer.strategy.root_device, random)
        replaced.put_back()

    replaced = ReplacedMethod(trainer.fit_loop, "setup_data", set_up_once)
    return replaced


def correct_reloading(trainer: Any, restored: Restored) -> None:
    """Tell Lightning in which epochs it made the loaders whose states are restored."""
    if every := trainer.reload_dataloaders_every_n_epochs:
        epoch = trainer.current_epoch - restored.place.over
        trainer.fit_loop._last_train_dl_reload_epoch = epoch // every * every
        # Not of the loaders that this run has made already, which its check before the training may have used.
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = restored.validation.reloaded


# How they go on


def go_on_with_whole_epoch(loop: Any, restored: Restored) -> None:
    """Load the states of loaders that begin a whole epoch with them; Lightning calls ``iter`` after this.

    So the order is drawn from the random generators that are restored then.
    """
    combined = loop._combined_loader
    if loop._should_reload_train_dl:
        _set_generators_of_new_loaders(combined, restored.loaders)
    else:
        # torchdata's own would yield nothing: its state is that of an epoch without a batch that is left.
        torchdata = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())
        for loader, state in zip(_stateful(combined), restored.loaders, strict=False):
            if not isinstance(loader, torchdata):
                loader.load_state_dict(state)
        _start_workers_that_stay(combined)
    _set_generators(combined, restored.generators)


def _set_generators_of_new_loaders(combined: Any, states: Sequence[Any]) -> None:
    """Set the random generators of loaders that are made again now: the new ones may have the same."""
    for loader, state in zip(_stateful(combined), states, strict=False):
        read = EpochState.from_dict(state) if EpochState.is_one(state) else None
        sampler = loader._index_sampler if isinstance(loader, PrefetchLoader) else None
        # Loaders of a checkpoint from ``on_train_epoch_start`` are the new ones, of which no batch was used.
        if read is None or read.is_within_epoch or not isinstance(sampler, ResumableSampler):
            continue
        if len(read.generators) == len(sampler.generators):
            # Its thread may draw from them.
            loader.close()
            for generator, own in zip(sampler.generators, read.generators, strict=True):
                set_generator_state(generator, own)


def _start_workers_that_stay(combined: Any) -> None:
    """Start the persistent workers of loaders of other classes, which the epochs of the checkpoint had already.

    torch draws a seed from the loader's generator when they start, and none in later epochs. Workers of a stream would
    read from it for nothing.
    """
    for loader in combined.flattened:
        if _counts(loader) or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            continue
        if loader.persistent_workers:
            iter(loader)


def _set_generators(combined: Any, states: Sequence[list[Any]]) -> None:
    """Set the generators of loaders that do not count their batches, if they hold as many as they did."""
    for loader, own in zip(combined.flattened, states, strict=False):
        generators = _generators_of(loader)
        if len(generators) == len(own):
            for generator, state in zip(generators, own, strict=True):
                set_generator_state(generator, state)


def go_on_in_epoch(trainer: Any, restored: Restored) -> list[str]:
    """Have loaders go on within their epoch, and return what to tell of other ranks and batch sizes."""
    loop = trainer.fit_loop
    combined = loop._combined_loader
    said: list[str] = []
    if restored.loaders:
        combined._load_state_dicts(restored.loaders)
        if not restored.place.begins:
            warn_of_other_batches(_stateful(combined), restored)
            count_whole_epoch(trainer, restored)
            said = count_on(trainer, restored)
    # Before iter(), with which worker processes get their first indices. Lightning's own iter() was made before the
    # states were loaded.
    for loader in combined.flattened:
        set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(loop._data_fetcher)
    if len(restored.exhausted) == len(exhausted(combined)) > 0:
        # Without a length, the epoch ends when each loader has ended once.
        combined._iterator._consumed = list(restored.exhausted)
    return said
