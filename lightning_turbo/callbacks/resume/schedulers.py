"""Schedulers that wait for a logged value, such as ``ReduceLROnPlateau``: Lightning saves no such value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_turbo._distributed import error_under_way, rank_and_size

__all__ = ["monitored", "plateaus_wait", "restore_monitored"]


def monitored(trainer: Any) -> dict[str, Any]:
    """Return the values that schedulers wait for, as far as they are known."""
    names = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
    if not names:
        return {}
    if error_under_way() is not None and rank_and_size()[1] > 1:
        # Other ranks may not take part where a value is computed.
        values = trainer._logger_connector._callback_metrics
    else:
        values = dict(trainer.callback_metrics)
        loop = trainer.fit_loop.epoch_loop
        epochs = trainer.fit_loop.epoch_progress.current
        if loop._num_ready_batches_reached() and epochs.processed < epochs.started:
            # What its steps logged for the whole epoch, which Lightning adds after the hooks of its validation.
            values.update(loop._results.metrics(on_step=False)["callback"])
    return {name: values[name].detach().cpu() for name in names if name in values}


def plateaus_wait(trainer: Any) -> bool:
    """Whether an epoch's last batch and its validation were made, but not Lightning's update after them."""
    loop = trainer.fit_loop.epoch_loop
    epochs = trainer.fit_loop.epoch_progress.current
    if epochs.completed == epochs.started or not loop._num_ready_batches_reached():
        return False
    batches = loop.batch_progress.current
    has_validated = batches.completed == batches.processed and loop.val_loop.batch_progress.current.completed > 0
    return epochs.processed == epochs.started or has_validated or not loop._should_check_val_epoch()


def restore_monitored(trainer: Any, values: dict[str, Any] | None, waits: Sequence[str]) -> None:
    """Put the values back, and make the updates that the stopped run did not make any more.

    Args:
        trainer: The Trainer.
        values: What ``monitored`` returned; ``None`` if the checkpoint does not tell.
        waits: What is over without the update after it: ``"step"``, ``"epoch"``, both or none.
    """
    if values is None:
        return
    # In a run that was restarted Lightning leaves out the update at the end of its first epoch, because it has no
    # values. It reads this for nothing else from here on.
    trainer.fit_loop._restarting = False
    trainer._logger_connector._callback_metrics.update(values)
    names = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
    if not names <= values.keys():
        return
    loop = trainer.fit_loop.epoch_loop
    epochs = trainer.fit_loop.epoch_progress.current
    for interval in waits:
        # The frequency of a scheduler is counted by the epoch that is over.
        behind = interval == "epoch"
        epochs.completed -= behind
        loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
        epochs.completed += behind
