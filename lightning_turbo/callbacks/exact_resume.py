"""The callback that makes a resumed run equal to one that never stopped: when what is saved, corrected and restored.

Its parts are in ``callbacks/resume``.
"""

from __future__ import annotations

from typing import Any

from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_binding,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import callbacks_named, is_fitting, warn_of_open_window
from lightning_turbo.callbacks.resume import counters, loaders, schedulers
from lightning_turbo.callbacks.resume.random_states import random_states, set_random_states, tell_of_random_states
from lightning_turbo.callbacks.resume.restored import KEY, RankState, Restored, restored_from
from lightning_turbo.callbacks.resume.validation import Validations
from lightning_turbo.errors import TurboWarning

__all__ = ["ExactResume", "attach_exact_resume"]


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
    ``on_train_start``. It ends in ``teardown``, or with an error. Always: what it has replaced in Lightning's loops is
    put back by then, and what it has read of a checkpoint is used once.

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
        # What was read of a checkpoint, until the training starts.
        self._restored: Restored | None = None
        self._is_training = False
        # Whether a checkpoint was saved before the training began, as by a search for a learning rate or batch size.
        self._is_searching = False
        self._validations = Validations()
        # Methods of Lightning's loops, some until the training starts and some until the end.
        self._replaced: list[ReplacedMethod] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End a run."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the loops as they were."""
        self._put_back()

    def _end(self) -> None:
        self._restored = None
        self._is_training = False
        self._is_searching = False
        self._validations = Validations()
        self._put_back()

    def _put_back(self) -> None:
        while self._replaced:
            self._replaced.pop().put_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of every rank."""
        _warn_of_average(trainer)
        random = random_states(trainer.strategy.root_device)
        combined = trainer.fit_loop._combined_loader
        loaders.correct_own_states(trainer, checkpoint)
        own = RankState(
            random=random,
            ranks=rank_and_size()[1],
            batch_sizes=loaders.batch_sizes(combined),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            counted=counters.is_counted(trainer),
            monitored=schedulers.monitored(trainer),
            plateaus=schedulers.plateaus_wait(trainer),
            loaders=loaders.saved_states(checkpoint),
            exhausted=loaders.exhausted(combined),
            loader_generators=loaders.states_of_generators(combined),
            validation=self._validations.describe(trainer),
        )
        loaders.leave_states_to_lightning(trainer, checkpoint)
        self._is_searching = _is_starting(trainer) and not self._is_training
        checkpoint[KEY] = gather_for_checkpoint(own.to_dict(), "random states and loaders' states")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states, and correct the checkpoint's counters before Lightning reads them.

        A checkpoint that is restored during a run, as Lightning's tuner does, or after it, is left to Lightning.
        """
        if self._is_searching:
            # The search puts back what it saved at its beginning, also where this run goes on from a checkpoint.
            self._is_searching = False
            self._restored = None
            return
        has_counters = "epoch_loop.batch_progress" in checkpoint.get("loops", {}).get("fit_loop", {})
        if self._is_training or not _is_starting(trainer) or not has_counters:
            return
        warn_of_open_window(trainer, checkpoint, self)
        self._restored = restored_from(trainer, checkpoint)
        self._replaced += loaders.set_aside(trainer.fit_loop)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore counters, loaders and random generators."""
        self._is_training = True
        self._is_searching = False
        self._put_back()
        self._replaced += self._validations.begin(trainer)
        restored = self._restored
        self._restored = None
        if restored is None:
            return
        _warn_of_frozen(trainer)
        self._validations.restore(restored.validation)
        self._restore_counters(trainer, restored)
        said: list[str] = []
        # In every epoch but the first, Lightning calls iter() itself: the order is drawn from the restored generators.
        if restored.place.over and trainer.current_epoch > 0:
            loaders.go_on_with_whole_epoch(trainer.fit_loop, restored)
        else:
            said += loaders.go_on_in_epoch(trainer, restored)
        # After the loaders, whose iter() draws numbers that a run without a stop drew long before.
        if restored.random is not None:
            set_random_states(trainer.strategy.root_device, restored.random)
            said += tell_of_random_states(restored.ranks)
            if restored.place.begins:
                self._replaced.append(loaders.set_up_as_before(trainer, restored.random))
        if said:
            rank_zero_info(f"turbo: {' '.join(said)}")

    def _restore_counters(self, trainer: Trainer, restored: Restored) -> None:
        """Correct what Lightning has read, and what it does not save."""
        loop = trainer.fit_loop
        is_between = restored.place.is_between_epochs
        counters.correct_loops(loop, is_between_epochs=is_between, is_step_counted="step" not in restored.waits)
        if not (is_between or restored.validation.due):
            # Lightning would take the last batch of the checkpoint for one that a validation is due after, though that
            # was made, and would count the step and update schedulers once more.
            check = ReplacedMethod(loop.epoch_loop, "_should_check_val_fx", lambda *_: check.put_back())
            self._replaced.append(check)
        schedulers.restore_monitored(trainer, restored.monitored, restored.waits)
        loaders.correct_reloading(trainer, restored)
        counters.correct_saves(trainer)


def attach_exact_resume(trainer: Any) -> None:
    """Add an ``ExactResume`` before a Trainer's other callbacks, if it has none."""
    if not any(isinstance(callback, ExactResume) for callback in trainer.callbacks):
        trainer.callbacks = [ExactResume(), *trainer.callbacks]


def _is_starting(trainer: Any) -> bool:
    return is_fitting(trainer) and trainer.state.status.value == "running"


def _warn_of_average(trainer: Any) -> None:
    """Warn of a save within a validation for which ``WeightAveraging`` has exchanged the weights and their average."""
    averages = [each for each in trainer.callbacks if isinstance(each, callbacks_named("WeightAveraging"))]
    batches = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    is_within = batches.current.completed < batches.current.ready or not batches.is_last_batch
    if averages and trainer.validating and is_within:
        rank_zero_warn(
            f"This checkpoint is saved within a validation, for which {type(averages[0]).__name__} has put the average "
            "in the place of the weights: a run that resumes from it trains the average. Resume from a checkpoint that "
            "was saved in training or at the end of a validation.",
            category=TurboWarning,
        )


def _warn_of_frozen(trainer: Any) -> None:
    """Warn of what ``BaseFinetuning`` had unfrozen: Lightning gives it to the optimizer again, and leaves it frozen."""
    finetuning = [each for each in trainer.callbacks if isinstance(each, callbacks_named("BaseFinetuning"))]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if finetuning and not all(parameter.requires_grad for group in groups for parameter in group["params"]):
        name = type(finetuning[0]).__name__
        rank_zero_warn(
            f"{name}: the optimizer has frozen parameters. Those that the stopped run had unfrozen are not trained any "
            f"more, because Lightning freezes them again when a run resumes. Make them trainable in on_fit_start of a "
            f"subclass of {name}, after Lightning's own: super().on_fit_start(trainer, pl_module), then "
            "self.make_trainable(pl_module.backbone) if the optimizer has their group.",
            category=TurboWarning,
        )
