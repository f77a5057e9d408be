"""Lightning's counters: where a checkpoint was saved, and how they are corrected so that a run goes on there.

Lightning counts epochs, batches and steps in its loops, and saves the counters as dictionaries. ``fit`` is the
dictionary of the fit loop in a checkpoint, which Lightning reads after this package.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

__all__ = [
    "Place", "begin_validation_again", "complete_epoch", "correct_loops", "correct_saves", "forget_step",
    "is_after_step", "is_counted", "is_within_validation", "place_of", "reopen_epoch", "shift_batches",
    "update_schedulers", "validation_follows",
]  # fmt: skip


class Place(NamedTuple):
    """Where in its epochs a checkpoint was saved.

    Attributes:
        over: Whether the last batch of the epoch was used, as in a checkpoint from ``on_train_epoch_end``.
        begins: Whether an epoch is counted but has not begun, as in a checkpoint from ``on_train_epoch_start``. Of a
            later epoch than the first, such a checkpoint is ``over`` too.
        used: Batches of the epoch that were used; ``None`` if a step may take several.
    """

    over: bool
    begins: bool
    used: int | None

    @property
    def is_between_epochs(self) -> bool:
        """Whether a run goes on with a whole epoch from here."""
        return self.over or self.begins


# What the counters of a checkpoint, or of a run that is saved, say


def place_of(trainer: Any, fit: dict[str, Any]) -> Place:
    """Return where a checkpoint was saved."""
    progress = fit["epoch_loop.batch_progress"]
    epochs = fit["epoch_progress"]["current"]
    batch = progress["current"]
    # A step that was under way is made again.
    in_step = batch["ready"] != batch["processed"]
    begins = epochs["ready"] > epochs["started"]
    over = not in_step and batch["ready"] > 0 and (begins or progress["is_last_batch"] or _has_ended(trainer, epochs))
    # A hook after the step, such as on_train_batch_end, finds the batch processed and not completed.
    used = batch["completed" if in_step else "processed"]
    return Place(over, begins, None if _takes_loader(trainer.lightning_module) else used)


def _has_ended(trainer: Any, epochs: dict[str, int]) -> bool:
    """Whether an epoch ended without a last batch, as with fewer data than limit_train_batches, or by should_stop."""
    # With max_steps Lightning stays in the epoch.
    return epochs["started"] == epochs["processed"] and trainer.max_steps == -1


def _takes_loader(module: Any) -> bool:
    """Whether ``training_step`` takes its batches from the loader itself."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def is_within_validation(fit: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved in a validation of which batches are left."""
    progress = fit["epoch_loop.val_loop.batch_progress"]
    current = progress["current"]
    is_finished = progress["is_last_batch"] and current["completed"] == current["ready"]
    return current["ready"] > 0 and not is_finished


def is_after_step(fit: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved after the step of a batch, and before the next one."""
    batch = fit["epoch_loop.batch_progress"]["current"]
    return batch["ready"] == batch["processed"] > 0


def is_counted(trainer: Any) -> bool:
    """Whether a run is behind the last hook and the validation of a batch, where Lightning counts the logged step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.ready == batches.completed and not trainer.validating


def validation_follows(trainer: Any) -> bool:
    """Whether a run has made the step of a batch, and a validation comes before the next one."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    # When a run is to stop, or after a time, a run that goes on from here does not validate.
    by_batches = not trainer.should_stop and getattr(trainer, "_val_check_time_interval", None) is None
    batch = loop.batch_progress.current
    is_after_step = trainer.training and batch.ready == batch.processed == batch.completed + 1
    return is_after_step and by_batches and fetcher is not None and loop._should_check_val_fx(fetcher)


# The counters in a checkpoint, before Lightning reads them


def begin_validation_again(fit: dict[str, Any]) -> None:
    """Set the counters to a validation that was left within its first batch: Lightning then makes it, whole.

    The batch before it counts as completed: what was left of it is logging.
    """
    for part in ("total", "current"):
        batch = fit["epoch_loop.batch_progress"][part]
        batch["completed"] = batch["processed"]
    progress = fit["epoch_loop.val_loop.batch_progress"]
    progress["is_last_batch"] = False
    before = max(0, progress["total"]["completed"] - progress["current"]["completed"])
    for part, completed in (("total", before), ("current", 0)):
        progress[part].update(ready=completed + 1, started=completed + 1, processed=completed, completed=completed)


def complete_epoch(fit: dict[str, Any], *, counted: bool) -> None:
    """Set the counters to the end of the epoch that began last.

    Args:
        fit: The dictionary of the fit loop.
        counted: What ``is_counted`` returned when the checkpoint was saved.
    """
    epochs = fit["epoch_progress"]
    if epochs["current"]["processed"] < epochs["current"]["started"] and not counted:
        # Lightning adds one after the last hook of the batch.
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    # Every count becomes the one that says how far it came: epochs that were started, batches that were processed.
    for counts, reached in ((epochs, "started"), (fit["epoch_loop.batch_progress"], "processed")):
        for part in (counts["total"], counts["current"]):
            part.update(dict.fromkeys(part, part[reached]))


def reopen_epoch(fit: dict[str, Any]) -> None:
    """Count an epoch as under way that ``max_steps`` ended before its last batch, and in which this run goes on."""
    epochs = fit["epoch_progress"]
    batches = fit["epoch_loop.batch_progress"]["current"]
    if batches["ready"] > 0 and epochs["current"]["processed"] == epochs["current"]["started"]:
        for part in (epochs["total"], epochs["current"]):
            part["completed"] = part["started"] - 1
            part["processed"] = part["completed"]


def forget_step(fit: dict[str, Any]) -> None:
    """Leave out a step that was under way, and is made again. Lightning counts it as made."""
    batches = fit["epoch_loop.batch_progress"]
    if batches["current"]["ready"] != batches["current"]["processed"]:
        batches["is_last_batch"] = False
        for part in (batches["total"], batches["current"]):
            part["started"] = part["processed"]
            part["ready"] = part["started"]


# The counters of the loops, once Lightning has read them


def correct_loops(loop: Any, *, is_between_epochs: bool, is_step_counted: bool) -> None:
    """Correct what the loops made of the counters.

    Args:
        loop: The fit loop.
        is_between_epochs: Whether the run goes on with a whole epoch.
        is_step_counted: Whether the latest step was counted as logged; it is counted behind its validation.
    """
    if is_between_epochs:
        # With max_steps Lightning takes every checkpoint for one within an epoch.
        loop._restarting = False
        loop._resuming_from_checkpoint = False
        loop.epoch_loop.restarting = False
    elif not is_step_counted and loop.epoch_loop.restarted_on_last:
        # The validation after the step was made, and Lightning takes the step for one that was counted.
        loop.epoch_loop._batches_that_stepped += not loop.epoch_loop._should_accumulate()


def correct_saves(trainer: Any) -> None:
    """Have no ``ModelCheckpoint`` save again at the step of the checkpoint; it forgets at which step it saved last.

    It would save after the first batch. If accumulation windows have several batches, that file would hold no gradients
    of the first one.
    """
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_train_steps", 0)
        if every > 0 and trainer.global_step % every == 0:
            callback._last_global_step_saved = trainer.global_step


def shift_batches(loop: Any, by: int) -> None:
    """Add to the number of batches of an epoch, in the epoch's loop.

    The number of steps stays: Lightning derives it from the number of batches and another one, which is corrected.
    """
    stepped = not loop._should_accumulate()
    current = loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + by)
    loop._batches_that_stepped += stepped - (not loop._should_accumulate())


def update_schedulers(loop: Any) -> None:
    """Update schedulers of epochs, as Lightning does after the last batch of one, where no batch is left."""
    with warnings.catch_warnings():
        # torch does not know that the optimizer made its steps before the stop.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
