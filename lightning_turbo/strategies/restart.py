"""A run that goes on from a checkpoint counts its epochs, and orders them, as one that never stopped."""

from __future__ import annotations

import sys
from typing import Any

from lightning_turbo._lightning import (
    GradientAccumulationScheduler,
    is_fitting,
    set_sampler_epoch,
)
from lightning_turbo._loops import end_epoch_of_checkpoint, epoch_of_checkpoint, take_loader_state
from lightning_turbo.data.device import DevicePrefetcher
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.position import correct_states, is_between_epochs

__all__ = ["accumulate_as_scheduled", "set_up_again", "set_up_loader"]


def accumulate_as_scheduled(module: Any) -> None:
    """Accumulate in a training's first epoch what a ``GradientAccumulationScheduler`` says, in the rest of one too.

    The callback sets it in ``on_train_epoch_start``, which Lightning does not call where a run goes on in mid-epoch.

    Args:
        module: The LightningModule of a Trainer that begins to train, with the next epoch counted.
    """
    trainer = module.trainer
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def _stateful_dataloader() -> Any:
    """Return torchdata's class, or what nothing is an instance of if it is not in use."""
    return getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())


def set_up_loader(module: Any, loader: Any) -> Any:
    """Let a training loader begin with the epoch that the Trainer goes on with, before ``iter()`` is called on it.

    Lightning tells samplers their epoch after that call. Worker processes have their first indices by then, and those
    of a ``DistributedSampler`` are of epoch 0, whatever epoch a run goes on with. And from a checkpoint of an epoch's
    last step Lightning has loaders go on at their end: a ``StatefulDataLoader`` skips the next epoch. So it does, and
    counts an epoch twice, from one of a whole epoch if ``max_steps`` alone ends the run. Here that loader begins anew
    then, if there is no ``PrefetchLoader`` around it, and all others get their state, as they can tell that its epoch
    is over.

    Args:
        module: The LightningModule of a Trainer that sets up its loaders; for others than training loaders nothing is
            done.
        loader: The loader, with the sampler that Lightning placed.

    Returns:
        The loader.
    """
    trainer = module.trainer
    if is_fitting(trainer) and trainer.training:
        _begin_as_restored(trainer, loader, first=trainer.train_dataloader is None)
    return loader


def set_up_again(module: Any) -> None:
    """Let training loaders begin as a checkpoint says that were set up before Lightning restored its loops.

    Whoever reads ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` sets them up. Lightning does not do
    so again, and leaves their states where they are.

    Args:
        module: The LightningModule of a Trainer with its loops restored, and not running yet.
    """
    trainer = module.trainer
    loop = trainer.fit_loop
    combined = loop._combined_loader
    if not is_fitting(trainer) or combined is None or not loop.epoch_loop.batch_progress.total.ready:
        return
    for loader in combined.flattened:
        _begin_as_restored(trainer, loader, first=True)
    loop._last_train_dl_reload_epoch = trainer.current_epoch
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def _begin_as_restored(trainer: Any, loader: Any, first: bool) -> None:
    loop = trainer.fit_loop
    epoch = loop.epoch_progress.current.processed
    ended = epoch_of_checkpoint(trainer)
    correct_states(loop._combined_loader_states_to_load, **ended)
    if first and ended["over"]:
        end_epoch_of_checkpoint(trainer)
        loop.update_restart_stage()
        epoch += loop.restarted_mid_epoch and loop.epoch_loop.restarted_on_train_batch_end  # not counted as processed
        state = take_loader_state(trainer, loader)
        behind = loader.loader if isinstance(loader, DevicePrefetcher) else loader
        knows = hasattr(behind, "set_epoch") or (isinstance(behind, PrefetchLoader) and is_between_epochs(state))
        if state is not None and (knows or not isinstance(behind, _stateful_dataloader())):
            loader.load_state_dict(state)
    set_sampler_epoch(loader, epoch)
