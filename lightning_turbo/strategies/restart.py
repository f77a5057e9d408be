"""A run that goes on from a checkpoint of an epoch's last step counts the next epoch, as one that never stopped."""

from __future__ import annotations

from typing import Any

__all__ = ["count_next_epoch"]


def count_next_epoch(module: Any) -> None:
    """Let the epoch that begins be counted as begun; to be called when training starts, with its state restored.

    From a checkpoint that was written with an epoch's last batch, Lightning marks that epoch as complete and then runs
    the next one as if it were the rest of it: without ``on_train_epoch_start``, and without counting it. A checkpoint
    in the middle of that epoch says that no epoch is under way, and a run that goes on from it trains too many batches.

    Args:
        module: The LightningModule of a Trainer whose ``fit_loop`` was reset and has not run yet.
    """
    loop = module.trainer.fit_loop
    epochs = loop.epoch_progress.total
    if loop.restarted_mid_epoch and epochs.completed == epochs.ready:
        loop.reset_restart_stage()
