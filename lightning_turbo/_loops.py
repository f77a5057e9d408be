"""Where the loops of a Trainer stand, read from and written to the private places where Lightning keeps it."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_turbo._lightning import is_fitting

__all__ = [
    "batch_limits",
    "begin_epoch_again",
    "count_as_one_run",
    "end_epoch_of_checkpoint",
    "epoch_of_checkpoint",
    "take_loader_state",
]


def begin_epoch_again(trainer: Any) -> None:
    """Have a Trainer that goes on from a checkpoint call ``iter()`` on its training loaders once more, as it starts."""
    loop = trainer.fit_loop
    if getattr(loop, "is_resuming", loop.restarting):  # before Lightning 2.6 it does so itself, but in mid-epoch
        iter(loop._data_fetcher)


def count_as_one_run(trainer: Any) -> None:
    """Let a run that goes on from a checkpoint count its epochs and batches as one that never stopped.

    From a checkpoint that was written with an epoch's last batch, Lightning marks that epoch as complete and then runs
    the next one as if it were the rest of it: without ``on_train_epoch_start``, and without counting it. A checkpoint
    in the middle of that epoch says that no epoch is under way, and a run that goes on from it trains too many batches.
    One that was written in ``on_train_epoch_start`` holds the progress of the epoch before, and the new one is taken
    for done but for a batch. One from within a step has that batch counted, which is counted again; a second
    checkpoint then tells nothing of the place that it was written at.

    Args:
        trainer: A Trainer with its ``fit_loop`` reset, which has not run yet.
    """
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress
    if loop.restarted_mid_epoch and epochs.completed == epochs.ready:
        loop.reset_restart_stage()
        if trainer.num_training_batches == float("inf"):  # from which Lightning sees that all were done
            loop.epoch_loop._batches_that_stepped += not loop.epoch_loop._should_accumulate()
            loop.epoch_loop.restarting = False
    if loop.restarted_on_epoch_start:
        loop.epoch_loop.restarting = False
        loop.epoch_progress.current.ready = loop.epoch_progress.current.started + 1  # it is not counted again
    if loop.epoch_loop.restarting and batches.current.ready != batches.current.processed:
        batches.total.ready = batches.total.started = batches.total.processed
        if not loop.epoch_loop._should_accumulate():
            loop.epoch_loop._batches_that_stepped -= 1  # Lightning adds one for the step, as if it were finished


def end_epoch_of_checkpoint(trainer: Any) -> None:
    """Let no epoch be under way for a Trainer with a checkpoint of a whole one.

    Lightning does so by itself, unless the run is limited by ``max_steps`` alone.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    if epochs.ready == epochs.started == epochs.processed:
        loop._restarting = loop.epoch_loop.restarting = False


def take_loader_state(trainer: Any, loader: Any) -> dict[str, Any] | None:
    """Return what the checkpoint of a Trainer holds for the next of its training loaders, which then is not loaded."""
    states = trainer.fit_loop._combined_loader_states_to_load
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return states.pop(0) if states and stateful else None


def epoch_of_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return what a Trainer with the loops of a checkpoint knows of the epoch that this was written in.

    Returns:
        As ``judge_states`` takes it: ``over``, whether its last batch was used, ``anew``, whether
        ``reload_dataloaders_every_n_epochs`` then makes new loaders for the epoch after it, and ``used``, how many
        batches were used; ``None`` where steps take their batches themselves.
    """
    loop, every = trainer.fit_loop, trainer.reload_dataloaders_every_n_epochs
    progress, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
    batch = progress.current
    # Without a last batch, where data are fewer than limit_train_batches says or should_stop was set, an epoch is over
    # with its end. Where max_steps alone ends a run, Lightning goes on in it all the same.
    begins = epochs.ready > epochs.started
    ended = begins or (epochs.started == epochs.processed and not loop._iteration_based_training())
    within_step = batch.ready != batch.processed  # that step is made again
    step = getattr(trainer.lightning_module, "training_step", None)
    themselves = step is not None and "dataloader_iter" in inspect.signature(step).parameters
    return {
        "over": (progress.is_last_batch or (ended and batch.ready > 0)) and not within_step,
        "anew": bool(every) and epochs.ready % every == 0,
        "used": None if themselves else batch.completed if within_step else batch.processed,
    }


def batch_limits(trainer: Any, name: str) -> list[int | float] | None:
    """Return how many batches a Trainer will ask each of its loaders for; ``None`` before it knows.

    Args:
        trainer: A Trainer that is running.
        name: Of the method that gives the loaders, as ``"train_dataloader"``.
    """
    loops = {
        "train_dataloader": trainer.fit_loop,
        "val_dataloader": trainer.fit_loop.epoch_loop.val_loop if is_fitting(trainer) else trainer.validate_loop,
        "test_dataloader": trainer.test_loop,
        "predict_dataloader": trainer.predict_loop,
    }
    combined = loops[name]._combined_loader
    return None if combined is None else combined.limits
