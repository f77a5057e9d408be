"""The callback that makes a resumed run equal to one that never stopped."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._distributed import error_under_way, gather_for_checkpoint, rank_and_size
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_binding,
    rank_zero_info,
    rank_zero_warn,
    set_sampler_epoch,
)
from lightning_turbo._random import (
    generator_state,
    generators_in,
    same_random_numbers,
    set_generator_state,
    set_shared_state,
    shared_state,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import is_fitting, warn_of_open_window
from lightning_turbo.data.loading.epoch_state import EpochState, used_states
from lightning_turbo.data.loading.epochs import length_of
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.resumable_sampler import ResumableSampler, generators_of
from lightning_turbo.data.sample_seeds import seeds_of
from lightning_turbo.errors import TurboWarning

__all__ = ["ExactResume", "attach_exact_resume"]

KEY = "lightning_turbo.exact_resume"


@dataclasses.dataclass(frozen=True)
class _Restored:
    """What ``on_train_start`` needs of a checkpoint.

    Attributes:
        over: Whether the last batch of the epoch was used, as in a checkpoint from ``on_train_epoch_end``.
        begins: Whether an epoch is counted but has not begun, as in a checkpoint from ``on_train_epoch_start``. Of a
            later epoch than the first, such a checkpoint is ``over`` too.
        used: Batches of the epoch that were used; ``None`` if a step may take several.
        loaders: The states of the training loaders.
        generators: Those of the random generators that each training loader of another class, its samplers and,
            without worker processes, its dataset hold; empty if the checkpoint does not tell.
        exhausted: Of each loader, whether a pass over it has ended, where loaders begin again within an epoch; empty
            where they do not.
        ranks: How many ranks the run had, 0 if the checkpoint does not tell.
        batch_sizes: Those of its training loaders, empty if the checkpoint does not tell.
        random: The states of this rank's random generators, if the checkpoint has them.
        monitored: The values that schedulers wait for, if the checkpoint tells.
        waits: What is over, of ``"step"`` and ``"epoch"``, without what Lightning does after it: it updates schedulers
            that wait for a value, and counts the logged step.
        validation: What the next validation begins with.
    """

    over: bool
    begins: bool
    used: int | None
    loaders: list[Any]
    generators: list[list[Any]]
    exhausted: list[bool]
    ranks: int
    batch_sizes: list[int]
    random: dict[str, Any] | None
    monitored: dict[str, Any] | None
    waits: list[str]
    validation: _Validation


@dataclasses.dataclass(frozen=True)
class _Validation:
    """A validation that a checkpoint was saved before or in.

    Attributes:
        due: Whether it has not ended though its training batch has: it is made, whole, before the next batch.
        random: The states of the random generators at its beginning, if it had begun.
        loaders: The states of its loaders as it began or, if none is due, as the next one finds them.
        reloaded: The epoch in which Lightning made these loaders; ``-inf`` for those of its check before the training.
    """

    due: bool = False
    random: dict[str, Any] | None = None
    loaders: Sequence[Any] = ()
    reloaded: float = -inf


class ExactResume(Callback):
    """Make a resumed run equal to one that never stopped.

    Every checkpoint holds the states of every rank's training loaders and random generators: torch's (CPU and the
    rank's CUDA device), Python's and NumPy's. ``Trainer.fit(ckpt_path=...)`` restores them: samples, dropout and
    augmentation continue bit for bit. ``Prefetch``, ``PrefetchDataModule`` and the turbo strategies add it.

    Without this callback Lightning 2.6

    - saves no random states, and the loader states of rank 0 alone;
    - drops the states of loaders that were set up before its loops were restored, as by reading
      ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` (issue 20550);
    - restores loaders of an epoch's last step at their end, so that a ``StatefulDataLoader`` skips the next epoch
      (issue 19764), and runs that epoch as the rest of the last;
    - tells a ``DistributedSampler`` its epoch after worker processes have their first indices;
    - skips all batches but one of an epoch from its ``on_train_epoch_start``, and with ``max_steps`` adds a batch;
    - counts an epoch twice that ``max_steps`` ended and a run with more steps goes on with;
    - leaves out the update of ``ReduceLROnPlateau`` at the end of the epoch in which, or at whose end, it resumes;
    - counts a step twice that a signal or an error interrupted;
    - has ``ModelCheckpoint(every_n_train_steps=)`` save again after the first batch of an accumulation window;
    - forgets a ``GradientAccumulationScheduler`` in the rest of an epoch (only the turbo strategies correct this);
    - forgets when ``reload_dataloaders_every_n_epochs`` last reloaded.

    It begins in ``setup``, reads a checkpoint before Lightning does, and restores what is beside the counters in
    ``on_train_start``. From there to ``teardown``, or an error, it stands around the validation's loop. Always: a
    checkpoint that is saved before the restored validation is made holds what that begins with.

    Note:
        Exact with loaders that know their position: ``PrefetchLoader``, torchdata's ``StatefulDataLoader``; at the end
        of an epoch any loader whose order follows from random generators and ``set_epoch``. A ``PrefetchLoader`` goes
        on at its sample with other ranks and batch sizes too; the numbers of batches that are left follow, and are
        said. A hook ``on_train_start`` that draws random numbers changes those that follow. Saving is a collective
        call if there are several ranks.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo.callbacks import ExactResume
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ExactResume()])
    """

    warns_of_open_window = True

    def __init__(self) -> None:
        check_binding("ExactResume")
        self._restored: _Restored | None = None
        self._training = False
        # A checkpoint was saved before the training began, as a search for a learning rate or a batch size does.
        self._searches = False
        self._begun = _Validation()  # as the latest validation of this run began
        self._pending: _Validation | None = None  # as the first one of this run is to begin
        self._is_validating = False
        self._replaced: list[ReplacedMethod] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End a run."""
        self._end()

    def _end(self) -> None:
        self._restored = None
        self._training = self._searches = self._is_validating = False
        self._begun, self._pending = _Validation(), None
        self._put_back()

    def _put_back(self) -> None:
        while self._replaced:
            self._replaced.pop().put_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of every rank."""
        own: dict[str, Any] = {"random": _random_states(trainer.strategy.root_device), "ranks": rank_and_size()[1]}
        own["batch_sizes"] = list(map(_batch_size, _stateful(trainer.fit_loop._combined_loader)))
        own["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        own["counted"] = _is_counted(trainer)
        own["monitored"], own["plateaus"] = _monitored(trainer), _plateaus_wait(trainer)
        _correct_own_states(trainer, checkpoint)
        own["loaders"] = _loop_state(checkpoint).get("combined_loader", [])
        own["exhausted"] = _exhausted(trainer.fit_loop._combined_loader)
        own["loader_generators"] = _states_of_generators(trainer.fit_loop._combined_loader)
        _leave_states_to_lightning(trainer, checkpoint)
        own["validation"] = dataclasses.asdict(self._next_validation(trainer))
        self._searches = _is_starting(trainer) and not self._training
        checkpoint[KEY] = gather_for_checkpoint(own, "random states and loaders' states")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states, and correct the checkpoint's counters before Lightning reads them.

        A checkpoint that is restored during a run, as Lightning's tuner does, or after it, is left to Lightning.
        """
        fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        if self._searches:
            # The search puts back what it saved at its beginning, also where this run goes on from a checkpoint.
            self._searches, self._restored = False, None
            return
        if self._training or not _is_starting(trainer) or "epoch_loop.batch_progress" not in fit:
            return
        warn_of_open_window(trainer, checkpoint, self)
        self._restored = _restore_counters(trainer, checkpoint, fit)
        loop = trainer.fit_loop
        self._replaced += [
            ReplacedMethod(loop, "setup_data", functools.partial(_begin_no_epoch, loop)),
            ReplacedMethod(loop, "_load_combined_loader_states", functools.partial(_set_loaders_aside, loop)),
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore counters, loaders and random generators."""
        self._training, self._searches = True, False
        self._put_back()
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._replaced += [
            ReplacedMethod(validation, "reset", functools.partial(self._reset_validation, trainer)),
            ReplacedMethod(validation, "run", self._validate),
        ]
        restored, self._restored = self._restored, None
        if restored is None:
            return
        self._pending = restored.validation
        _correct_counters(trainer, restored)
        if not (restored.over or restored.begins or restored.validation.due):
            # Lightning would take the last batch of the checkpoint for one that a validation is due after, though that
            # was made, and would count the step and update schedulers once more.
            check = ReplacedMethod(trainer.fit_loop.epoch_loop, "_should_check_val_fx", lambda *_: check.put_back())
            self._replaced.append(check)
        _restore_monitored(trainer, restored)
        _correct_reloading(trainer, restored)
        _correct_saves(trainer)
        said: list[str] = []
        # In every epoch but the first, Lightning calls iter() itself: the order is drawn from the restored generators.
        if restored.over and trainer.current_epoch > 0:
            if trainer.fit_loop._should_reload_train_dl:
                _restore_generators(trainer.fit_loop, restored.loaders)
            else:
                _restore_loaders_of_whole_epoch(trainer.fit_loop, restored.loaders)
                _start_workers_that_stay(trainer.fit_loop._combined_loader)
            _set_generators(trainer.fit_loop._combined_loader, restored.generators)
        else:
            said += _restore_loaders_in_epoch(trainer, restored)
        # After the loaders, whose iter() draws numbers that a run without a stop drew long before.
        if restored.random is not None:
            _set_random_states(trainer.strategy.root_device, restored.random)
            said += _tell_of_random_states(restored.ranks)
            if restored.begins:
                self._replaced.append(_set_up_as_before(trainer, restored.random))
        if said:
            rank_zero_info(f"turbo: {' '.join(said)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the loops as they were."""
        self._put_back()

    def _validate(self, run: Callable[[], Any]) -> Any:
        """Run a validation; until it has returned, a checkpoint is one of within it, also after an error."""
        self._is_validating = True
        outputs = run()
        self._is_validating, self._pending = False, None
        return outputs

    def _reset_validation(self, trainer: Trainer, reset: Callable[[], None]) -> None:
        """Reset the validation's loop, at which its loaders begin: note from where, or have them begin there again."""
        device = trainer.strategy.root_device
        loaders = _counting_loaders(trainer.fit_loop.epoch_loop.val_loop)
        if self._pending is not None:
            if not _are_made_again(trainer, self._pending):
                _load_whole_epochs(loaders, self._pending.loaders)
            if self._pending.random is not None:
                _set_random_states(device, self._pending.random)
        self._begun = dataclasses.replace(_next_validation_of(trainer), random=_random_states(device))
        reset()

    def _next_validation(self, trainer: Trainer) -> _Validation:
        """Return what a checkpoint tells of the validation that a run goes on with."""
        if self._is_validating:
            has_failed = error_under_way() is not None
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            is_made = progress.is_last_batch and progress.current.completed == progress.current.ready > 0
            if has_failed or not is_made:
                return dataclasses.replace(self._begun, due=True)
        is_due = _validation_follows(trainer)
        # Hooks at its end save after all of its batches: the one that this run began with is made.
        if self._pending is not None and not self._is_validating:
            return dataclasses.replace(self._pending, due=self._pending.due or is_due)
        return dataclasses.replace(_next_validation_of(trainer), due=is_due)


def attach_exact_resume(trainer: Any) -> None:
    """Add an ``ExactResume`` before a Trainer's other callbacks, if it has none."""
    if not any(isinstance(callback, ExactResume) for callback in trainer.callbacks):
        trainer.callbacks = [ExactResume(), *trainer.callbacks]


def _is_starting(trainer: Any) -> bool:
    return is_fitting(trainer) and trainer.state.status.value == "running"


# Position and counters


def _restore_counters(trainer: Any, checkpoint: dict[str, Any], fit: dict[str, Any]) -> _Restored:
    """Correct the counters in a checkpoint, and return what is restored when the training starts."""
    (first, *_) = checkpoint.get(KEY) or [{}]
    own, random = _states_of_rank(checkpoint)
    # Lightning is to find none: it loads them where its loaders are set up after this, and drops them where they were
    # set up before. ``on_train_start`` loads them in both.
    loaders = fit["state_dict"].pop("combined_loader", [])
    loaders = own.get("loaders", loaders)
    over, begins, used = _read_position(trainer, fit)
    loaders = used_states(loaders, over=over, used=used)
    validation = _Validation(**own.get("validation", {"due": _is_within_validation(fit)}))
    counted = first.get("counted")  # None: the checkpoint does not tell
    waits = ["step"] if counted is False and _is_after_step(fit) and not validation.due else []
    if validation.due:
        _begin_validation_again(fit)
        over = False  # its loaders are at their end then, but the epoch is not over
    elif over and first.get("plateaus", False):
        waits.append("epoch")
    if over or begins:
        _complete_epoch(fit, bool(counted))
    else:
        _reopen_epoch(fit)
        _forget_step(fit)
    return _Restored(
        over=over,
        begins=begins,
        used=used,
        loaders=loaders,
        generators=own.get("loader_generators", []),
        exhausted=own.get("exhausted", []),
        ranks=first.get("ranks", len(checkpoint.get(KEY, []))),
        batch_sizes=first.get("batch_sizes", []),
        random=random,
        monitored=first.get("monitored"),
        waits=waits,
        validation=validation,
    )


def _read_position(trainer: Any, fit: dict[str, Any]) -> tuple[bool, bool, int | None]:
    """Return ``over`` and ``begins`` of ``_Restored``, and how many batches of the epoch were used, if known."""
    progress, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    batch = progress["current"]
    in_step = batch["ready"] != batch["processed"]  # that step is made again
    begins = epochs["ready"] > epochs["started"]
    over = not in_step and batch["ready"] > 0 and (begins or progress["is_last_batch"] or _has_ended(trainer, epochs))
    # A hook after the step, as on_train_batch_end, finds the batch processed and not completed.
    used = batch["completed" if in_step else "processed"]
    return over, begins, None if _takes_loader(trainer.lightning_module) else used


def _is_within_validation(fit: dict[str, Any]) -> bool:
    """Whether the counters of the fit loop are of a validation of which batches are left."""
    progress = fit["epoch_loop.val_loop.batch_progress"]
    current = progress["current"]
    is_finished = progress["is_last_batch"] and current["completed"] == current["ready"]
    return current["ready"] > 0 and not is_finished


def _is_after_step(fit: dict[str, Any]) -> bool:
    """Whether the counters of the fit loop are of a moment after the step of a batch, and before the next one."""
    batch = fit["epoch_loop.batch_progress"]["current"]
    return batch["ready"] == batch["processed"] > 0


def _validation_follows(trainer: Any) -> bool:
    """Whether the step of a batch was made, and a validation comes before the next one."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    # When a run is to stop, or after a time, a run that goes on from here does not validate.
    by_batches = not trainer.should_stop and getattr(trainer, "_val_check_time_interval", None) is None
    batch = loop.batch_progress.current
    is_after_step = trainer.training and batch.ready == batch.processed == batch.completed + 1
    return is_after_step and by_batches and fetcher is not None and loop._should_check_val_fx(fetcher)


def _begin_validation_again(fit: dict[str, Any]) -> None:
    """Set the counters in a checkpoint to a validation that broke off within its first batch: Lightning then makes it.

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


def _has_ended(trainer: Any, epochs: dict[str, int]) -> bool:
    """Whether an epoch ended without a last batch, as with fewer data than limit_train_batches, or by should_stop."""
    return epochs["started"] == epochs["processed"] and trainer.max_steps == -1  # with max_steps Lightning stays in it


def _takes_loader(module: Any) -> bool:
    """Whether ``training_step`` takes its batches from the loader itself."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def _is_counted(trainer: Any) -> bool:
    """Whether a batch is behind its last hook and its validation, where Lightning adds it to the logged step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.ready == batches.completed and not trainer.validating


def _complete_epoch(fit: dict[str, Any], counted: bool) -> None:
    """Set the counters in a checkpoint to the end of the epoch that began last."""
    epochs = fit["epoch_progress"]
    if epochs["current"]["processed"] < epochs["current"]["started"] and not counted:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # Lightning adds one after the batch's last hook
    # Every count becomes the one that says how far it came: epochs that were started, batches that were processed.
    for counts, reached in ((epochs, "started"), (fit["epoch_loop.batch_progress"], "processed")):
        for part in (counts["total"], counts["current"]):
            part.update(dict.fromkeys(part, part[reached]))


def _reopen_epoch(fit: dict[str, Any]) -> None:
    """Count an epoch as under way that ``max_steps`` ended before its last batch, where this run goes on in it."""
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]["current"]
    if batches["ready"] > 0 and epochs["current"]["processed"] == epochs["current"]["started"]:
        for part in (epochs["total"], epochs["current"]):
            part["processed"] = part["completed"] = part["started"] - 1


def _forget_step(fit: dict[str, Any]) -> None:
    """Leave a step out that was under way, and is made again. Lightning counts it as made."""
    batches = fit["epoch_loop.batch_progress"]
    if batches["current"]["ready"] != batches["current"]["processed"]:
        batches["is_last_batch"] = False
        for part in (batches["total"], batches["current"]):
            part["ready"] = part["started"] = part["processed"]


def _correct_counters(trainer: Any, restored: _Restored) -> None:
    loop = trainer.fit_loop
    if restored.over or restored.begins:
        # With max_steps Lightning takes every checkpoint for one within an epoch.
        loop._restarting = loop._resuming_from_checkpoint = False
        loop.epoch_loop.restarting = False
    elif "step" in restored.waits and loop.epoch_loop.restarted_on_last:
        # The step's validation was made, and Lightning takes it for one that was counted.
        loop.epoch_loop._batches_that_stepped += not loop.epoch_loop._should_accumulate()


def _correct_saves(trainer: Any) -> None:
    """Have no ``ModelCheckpoint`` save again at the step of the checkpoint; it forgets at which it saved last.

    It would after the first batch, and where windows have several, the file would hold no gradients of this one.
    """
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_train_steps", 0)
        if every > 0 and trainer.global_step % every == 0:
            callback._last_global_step_saved = trainer.global_step


def _correct_reloading(trainer: Any, restored: _Restored) -> None:
    if every := trainer.reload_dataloaders_every_n_epochs:
        epoch = trainer.current_epoch - restored.over  # of the data that is restored
        trainer.fit_loop._last_train_dl_reload_epoch = epoch // every * every
        # Not of the loaders that this run has made already, which its check before the training may have used.
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = restored.validation.reloaded


def _set_up_as_before(trainer: Any, random: dict[str, Any]) -> ReplacedMethod:
    """Have the next set-up of the training loaders leave the random generators as they were at its end.

    Lightning makes loaders again at the beginning of an epoch, and draws then. A checkpoint from
    ``on_train_epoch_start`` was saved after that.
    """

    def set_up_once(set_up: Callable[[], None]) -> None:
        set_up()
        _set_random_states(trainer.strategy.root_device, random)
        replaced.put_back()

    replaced = ReplacedMethod(trainer.fit_loop, "setup_data", set_up_once)
    return replaced


def _are_made_again(trainer: Any, pending: _Validation) -> bool:
    """Whether a run that was not stopped makes new validation loaders before this validation, as this one did."""
    every = trainer.reload_dataloaders_every_n_epochs
    return bool(every) and trainer.current_epoch - pending.reloaded >= every


# Schedulers that wait for a value, as ReduceLROnPlateau


def _monitored(trainer: Any) -> dict[str, Any]:
    """Return the values that schedulers wait for, as far as they are known; Lightning saves none."""
    names = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
    if not names:
        return {}
    if error_under_way() is not None and rank_and_size()[1] > 1:
        # Other ranks may not take part where a value is computed.
        values = trainer._logger_connector._callback_metrics
    else:
        values = dict(trainer.callback_metrics)
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        if loop._num_ready_batches_reached() and epochs.processed < epochs.started:
            # What its steps logged for the whole epoch, which Lightning adds after the hooks of its validation.
            values.update(loop._results.metrics(on_step=False)["callback"])
    return {name: values[name].detach().cpu() for name in names if name in values}


def _plateaus_wait(trainer: Any) -> bool:
    """Whether an epoch's last batch and its validation were made, but not Lightning's update after them."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if epochs.completed == epochs.started or not loop._num_ready_batches_reached():
        return False
    batches, validation = loop.batch_progress.current, loop.val_loop.batch_progress.current
    has_validated = batches.completed == batches.processed and validation.completed > 0
    return epochs.processed == epochs.started or has_validated or not loop._should_check_val_epoch()


def _restore_monitored(trainer: Any, restored: _Restored) -> None:
    """Put the values back, and make the update that was not made any more."""
    if restored.monitored is None:
        return
    # Of a run that was restarted, Lightning leaves the update at the end of its first epoch out, because it has no
    # values. It reads this for nothing else from here on.
    trainer.fit_loop._restarting = False
    trainer._logger_connector._callback_metrics.update(restored.monitored)
    names = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
    if not names <= restored.monitored.keys():
        return
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    for interval in restored.waits:
        behind = interval == "epoch"
        epochs.completed -= behind  # a scheduler's frequency is counted by the epoch that is over
        loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
        epochs.completed += behind


# Loaders


class _Waiting:
    """Stands for a loader while Lightning calls ``iter`` on it before its state is loaded: it has no batches yet.

    Otherwise a batch of a stream would be fetched that nobody uses, and worker processes started twice.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _set_loaders_aside(loop: Any, load_states: Callable[[], None]) -> None:
    """Let others stand for the loaders in the ``iter`` that follows in Lightning's ``setup_data``."""
    load_states()
    loop._combined_loader.flattened = [_Waiting(each) for each in loop._combined_loader.flattened]


def _begin_no_epoch(loop: Any, set_up: Callable[[], None]) -> None:
    """Set the loaders up, and begin no epoch: it begins when their states are loaded."""
    try:
        set_up()
    finally:
        combined = loop._combined_loader
        if combined is not None:
            combined.flattened = [each.loader if isinstance(each, _Waiting) else each for each in combined.flattened]


def _restore_loaders_in_epoch(trainer: Any, restored: _Restored) -> list[str]:
    """Have loaders go on within their epoch, and return what is to be said of other ranks and batch sizes."""
    loop, said = trainer.fit_loop, []
    if restored.loaders:
        loop._combined_loader._load_state_dicts(restored.loaders)
        if not restored.begins:
            _warn_of_other_batches(_stateful(loop._combined_loader), restored)
            _count_whole_epoch(trainer, restored)
            said = _count_on(trainer, restored)
    # Before iter(), with which worker processes get their first indices. Lightning's own iter() was made before the
    # states were loaded.
    for loader in loop._combined_loader.flattened:
        set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(loop._data_fetcher)
    if len(restored.exhausted) == len(_exhausted(loop._combined_loader)) > 0:
        # Without a length, the epoch ends when each loader has ended once.
        loop._combined_loader._iterator._consumed = list(restored.exhausted)
    return said


def _exhausted(combined: Any) -> list[bool]:
    return list(getattr(getattr(combined, "_iterator", None), "_consumed", ()))


def _read(state: Any) -> EpochState | None:
    """Return the state of a loader that counts its batches; ``None`` for that of a class of its own."""
    return EpochState.from_dict(state) if EpochState.is_one(state) else None


def _count_samples(state: EpochState | None, restored: _Restored, was: int, now: int) -> tuple[int, int] | None:
    """Return how many samples of a rank were used, and how many are left out; ``None`` where a loader goes on exactly.

    Args:
        state: The state of the loader, if it counts its batches.
        restored: What is known of the checkpoint.
        was: The batch size of the loader then.
        now: That of today.
    """
    if state is None:
        # Batches of a loader are counted, and it leaves as many of its own size out.
        return (restored.used * was, restored.used * now) if restored.used else None
    is_known = state.shards is not None and state.shards.ranks == restored.ranks
    if state.over or is_known or not state.consumed:
        return None
    if state.shards is None and state.stream is None:
        return state.consumed * was, state.consumed * now
    return state.used_samples, state.used_samples


def _stateful(combined: Any) -> list[Any]:
    """Return the training loaders whose states a checkpoint has, in their order there."""
    return [] if combined is None else [each for each in combined.flattened if hasattr(each, "load_state_dict")]


def _batch_size(loader: Any) -> int:
    return getattr(loader, "batch_size", None) or 1


def _warn_of_other_batches(loaders: list[Any], restored: _Restored) -> None:
    """Warn of loaders in an epoch of other ranks or batch sizes, of which no order over all ranks is known."""
    size = rank_and_size()[1]
    sizes = restored.batch_sizes or list(map(_batch_size, loaders))
    for loader, saved, batch_size in zip(loaders, restored.loaders, sizes, strict=True):
        now, state = _batch_size(loader), _read(saved)
        was = batch_size if state is None else now  # a PrefetchLoader tells of other batch sizes itself
        if restored.ranks in (0, size) and was == now:
            continue
        counted = _count_samples(state, restored, was, now)
        if counted is None:
            continue
        used, skipped = counted
        before, left_out = restored.ranks * used, size * skipped
        rank_zero_warn(
            f"A {type(loader).__name__} goes on with {size} ranks x {now} samples in place of {restored.ranks} x {was} "
            f"in the middle of an epoch, and no order of its samples over all ranks is known: {before} were used, and "
            f"{left_out} count as used now, so that about {abs(before - left_out)} are seen "
            f"{'twice' if left_out < before else 'never'} in this epoch. Add Prefetch to the Trainer, with "
            "shuffle=True or a SeededSampler, or go on from a checkpoint of the end of an epoch.",
            category=TurboWarning,
        )


class _Loaded(NamedTuple):
    """A loader that counts its batches, the state that was loaded into it, and what it made of that."""

    loader: Any
    limit: float  # batches that the Trainer takes of it in an epoch
    old: EpochState
    new: EpochState

    @property
    def is_resharded(self) -> bool:
        """Whether the loader goes on with other ranks, batches or processes, and counts otherwise than the state."""
        if self.old.over or self.new.over:
            return False
        return self.old.batching != self.new.batching


def _loaded(combined: Any, states: list[Any]) -> list[_Loaded]:
    limits = zip(combined.flattened, combined.limits, strict=True)
    stateful = [(each, limit) for each, limit in limits if hasattr(each, "load_state_dict")]
    read = [(loader, limit, _read(old)) for (loader, limit), old in zip(stateful, states, strict=True)]
    return [
        _Loaded(loader, limit, old, loader.epoch_state())
        for loader, limit, old in read
        if isinstance(loader, PrefetchLoader) and old is not None
    ]


def _count_on(trainer: Any, restored: _Restored) -> list[str]:
    """Count the batches of the epoch as those of other ranks or batch sizes, where loaders go on with such.

    The epoch has as many as it would have had with these from its beginning, and its last ones are left.
    """
    loop, length = trainer.fit_loop, trainer.num_training_batches
    loaded = _loaded(loop._combined_loader, restored.loaders)
    resharded = [each for each in loaded if each.is_resharded]
    if not resharded:
        return []
    furthest = max(each.old.consumed for each in loaded)
    used = restored.used or furthest  # not known where a step takes its batches itself
    # No more than all: a limit counts batches, and less of them may be more samples than before.
    done = min(length, _count_batches(loaded, loop._combined_loader._mode))
    # Loaders that are as far as the run count the same number of batches.
    for each in [each for each in resharded if each.old.consumed == furthest or done == length]:
        each.loader.load_epoch_state(each.new.counted_from(done, ended=done == length))
    _shift_batches(loop.epoch_loop, done - used)
    if done == length:
        _update_schedulers(loop.epoch_loop)
    epoch = loop.epoch_progress.current.processed
    return [_tell_of_samples(epoch, used, done, length, each.old, each.new) for each in resharded]


def _count_whole_epoch(trainer: Any, restored: _Restored) -> None:
    """Count all batches of an epoch as used where its validation alone is left, and it had other batches."""
    loop = trainer.fit_loop
    loaded = _loaded(loop._combined_loader, restored.loaders)
    if any(each.old.over and each.old.length != length_of(each.loader) for each in loaded):
        current = loop.epoch_loop.batch_progress.current
        _shift_batches(loop.epoch_loop, trainer.num_training_batches - current.processed)


def _count_batches(loaded: list[_Loaded], mode: str) -> int:
    """Return after how many batches of its epoch a run goes on, by what is left of its loaders."""
    counts = [(each.limit, each.new.consumed) for each in loaded]
    if mode != "min_size" or inf in dict(counts):
        return max(counts)[1]
    return int(min(limit for limit, _ in counts) - min(limit - consumed for limit, consumed in counts))


def _shift_batches(loop: Any, by: int) -> None:
    """Add to the number of batches of an epoch. The number of steps stays, which Lightning completes by the former."""
    stepped = not loop._should_accumulate()
    current = loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + by)
    loop._batches_that_stepped += stepped - (not loop._should_accumulate())


def _update_schedulers(loop: Any) -> None:
    """Update schedulers of epochs, as Lightning does after the last batch of one, where none is left."""
    with warnings.catch_warnings():
        # torch does not know that the optimizer made its steps before the stop.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _tell_of_samples(epoch: int, used: int, done: int, length: float, old: EpochState, new: EpochState) -> str:
    how, left = (_tell_of_batches(each) for each in (old, new))
    place = new.shards or new.stream
    assert place is not None
    whole = "each stream" if new.shards is None else new.shards.order.length
    number = f"{length - done} of {length} " if length < inf else ""
    return (
        f"Epoch {epoch} goes on at sample {place.from_sample} of {whole}: {used} batches of {how} samples were used, "
        f"{number}batches of {left} are left."
    )


def _tell_of_batches(state: EpochState) -> str:
    if state.shards is not None:
        return f"{state.shards.ranks} x {state.shards.batch_size}"
    assert state.stream is not None
    return f"each rank x {state.stream.batch_size}"


def _restore_loaders_of_whole_epoch(loop: Any, states: list[Any]) -> None:
    """Load the states of loaders that begin the next epoch with them; the others start afresh."""
    # torchdata's own would yield nothing: its state is that of an epoch without a batch that is left.
    torchdata = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())
    for loader, state in zip(_stateful(loop._combined_loader), states, strict=False):
        if not isinstance(loader, torchdata):
            loader.load_state_dict(state)


def _restore_generators(loop: Any, states: list[Any]) -> None:
    """Set the random generators of loaders that are made again now: the new ones may have the same."""
    for loader, state in zip(_stateful(loop._combined_loader), states, strict=False):
        read = _read(state)
        sampler = loader._index_sampler if isinstance(loader, PrefetchLoader) else None
        # Loaders of a checkpoint from ``on_train_epoch_start`` are the new ones, of which no batch was used.
        if read is None or read.is_within_epoch or not isinstance(sampler, ResumableSampler):
            continue
        if len(read.generators) == len(sampler.generators):
            loader.close()  # its thread may draw from them
            for generator, own in zip(sampler.generators, read.generators, strict=True):
                set_generator_state(generator, own)


def _start_workers_that_stay(combined: Any) -> None:
    """Start the persistent workers of loaders of other classes, which the epochs of the checkpoint had already.

    torch draws a seed from the loader's generator when they start, and none in later epochs. Workers of a stream would
    read from it for nothing.
    """
    for loader in combined.flattened:
        counts = isinstance(loader, PrefetchLoader) and loader.counts_batches
        if counts or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            continue
        if loader.persistent_workers:
            iter(loader)


def _states_of_generators(combined: Any) -> list[list[Any]]:
    """Return the states of the generators of loaders that do not count their batches; those that do save them."""
    loaders = [] if combined is None else combined.flattened
    return [[generator_state(each) for each in _generators_of(loader)] for loader in loaders]


def _set_generators(combined: Any, states: list[list[Any]]) -> None:
    """Set the generators of loaders that do not count their batches, where they hold as many as they did."""
    for loader, own in zip(combined.flattened, states, strict=False):
        generators = _generators_of(loader)
        if len(generators) == len(own):
            for generator, state in zip(generators, own, strict=True):
                set_generator_state(generator, state)


def _generators_of(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader) or (isinstance(loader, PrefetchLoader) and loader.counts_batches):
        return []
    own = generators_of(loader.generator, loader._index_sampler)
    return own if loader.num_workers else [*own, *generators_in(loader.dataset)]


def _counting_loaders(loop: Any) -> list[PrefetchLoader[Any]]:
    """Return the loaders of a loop that count their batches, so that no code of others is asked for a state."""
    combined = loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [each for each in loaders if isinstance(each, PrefetchLoader) and each.counts_batches]


def _next_validation_of(trainer: Any) -> _Validation:
    """Return what the next validation begins with, by the loaders that the loop has."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return _Validation(
        loaders=_states_of_whole_epochs(_counting_loaders(loop)), reloaded=loop._last_val_dl_reload_epoch
    )


def _states_of_whole_epochs(loaders: list[PrefetchLoader[Any]]) -> list[dict[str, Any]]:
    """Return the states with which loaders begin their next epochs, whatever was used of the latest."""
    return used_states([loader.epoch_state().to_dict() for loader in loaders], over=True)


def _load_whole_epochs(loaders: list[PrefetchLoader[Any]], states: Sequence[dict[str, Any]]) -> None:
    """Have loaders begin their next epochs with these states, as far as they are of the same kind of loader."""
    if len(loaders) == len(states):
        for loader, state in zip(loaders, states, strict=True):
            if loader.may_begin_with(state):
                loader.load_state_dict(state)


def _loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return where a checkpoint has the states of rank 0's training loaders."""
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def _leave_states_to_lightning(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Leave only those states where Lightning looks for them that it can load without this package.

    It refuses to go on where a checkpoint has more of them than the run has loaders with a state.
    """
    states, loaders = _loop_state(checkpoint), _stateful(trainer.fit_loop._combined_loader)
    kept = [
        state
        for loader, state in zip(loaders, states.pop("combined_loader", []), strict=True)
        if not (isinstance(loader, PrefetchLoader) and loader.counts_batches and loader.was_plain)
    ]
    if kept:
        states["combined_loader"] = kept


def _correct_own_states(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Take batches that were fetched and not used out of the states of loaders whose class keeps its own."""
    states, loop = _loop_state(checkpoint).get("combined_loader", []), trainer.fit_loop
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    if not states or loop._data_fetcher is None or loop._data_fetcher.fetched == 0:
        return
    _, _, used = _read_position(trainer, fit)
    unused = 0 if used is None else loop._data_fetcher.fetched - used
    for number, loader in enumerate(_stateful(loop._combined_loader)):
        if unused > 0 and isinstance(loader, PrefetchLoader) and not loader.counts_batches:
            states[number] = loader.state_before(unused)


def _states_of_rank(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return this rank's entry of a checkpoint, empty if there is none, and its random states, if there are any.

    A rank that the run did not have goes on with the loaders of rank 0, and with random states of its own.
    """
    ranks = checkpoint.get(KEY, [])
    rank, _ = rank_and_size()
    if not ranks:
        return {}, None
    if rank < len(ranks):
        return ranks[rank], ranks[rank]["random"]
    return ranks[0], _derive_random_states(ranks[0]["random"], rank)


# Random generators


def _random_states(device: torch.device) -> dict[str, Any]:
    state = shared_state()
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_random_states(device: torch.device, state: dict[str, Any]) -> None:
    set_shared_state(state)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "cuda" and "seed" in state:  # of a rank that the checkpoint does not know
        torch.cuda.manual_seed(state["seed"])


def _derive_random_states(first: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return states that follow from those of rank 0 and the number of a rank."""
    # From a saved state and not from a seed, because a checkpoint of another epoch has to give other numbers.
    digest = hashlib.blake2b(first["torch"].numpy().tobytes(), digest_size=4).digest()
    for_torch, for_python, for_numpy = seeds_of(int.from_bytes(digest, "little"), 0, rank, "rank")
    with same_random_numbers():
        torch.default_generator.manual_seed(for_torch)
        random.seed(for_python)
        np.random.seed(for_numpy)
        return {**shared_state(), "seed": for_torch}


def _tell_of_random_states(ranks: int) -> list[str]:
    size = rank_and_size()[1]
    if ranks > size:
        return [f"The random states of the last {ranks - size} of {ranks} ranks are dropped."]
    if ranks < size:
        return [f"The random states of the last {size - ranks} of {size} ranks follow from those of rank 0."]
    return []
