"""The callback that makes a resumed run equal to one that never stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import is_whole
from lightning_turbo._distributed import data_rank_and_size, error_under_way, gather_for_checkpoint, rank_and_size
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_binding,
    rank_zero_info,
    rank_zero_warn,
    set_sampler_epoch,
)
from lightning_turbo._plain import plain
from lightning_turbo._random import (
    generator_state,
    generators_in,
    same_random_numbers,
    set_generator_state,
    set_shared_state,
    shared_state,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import callbacks_named, is_fitting, warn_of_open_window
from lightning_turbo.data.loading.epoch import Epoch
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.order import generators_of
from lightning_turbo.data.loading.state import is_counted
from lightning_turbo.data.sample_seeds import seeds_of
from lightning_turbo.errors import TurboWarning

__all__ = ["ExactResume", "attach_exact_resume"]

KEY = "lightning_turbo.exact_resume"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in its epochs a checkpoint was saved, as the counters say.

    Attributes:
        over: Whether the last batch of the epoch was used, as in a checkpoint from ``on_train_epoch_end``. Of a later
            epoch than the first, one from ``on_train_epoch_start`` is over too.
        begins: Whether an epoch is counted and has not begun, as in a checkpoint from ``on_train_epoch_start``.
        in_step: Whether a step was under way, which is made again.
        used: Batches of the epoch that were used.
    """

    over: bool
    begins: bool
    in_step: bool
    used: int

    @property
    def is_after_step(self) -> bool:
        """Whether the step of a batch was made last."""
        return not self.in_step and not self.begins and self.used > 0


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
    - forgets ``callback_metrics``, which ``ModelCheckpoint`` and ``EarlyStopping`` ask for between validations;
    - has ``ModelCheckpoint(every_n_train_steps=)`` save again after the first batch of an accumulation window;
    - forgets a ``GradientAccumulationScheduler`` in the rest of an epoch (only the turbo strategies correct this);
    - forgets when ``reload_dataloaders_every_n_epochs`` last reloaded.

    A run goes on at one of three places: with a whole epoch, with a validation, which is made as a whole, or after the
    step of a batch. The counters of a checkpoint are written for its place before Lightning reads them. The states of
    loaders and the random states are set where Lightning begins the epoch, just before its ``iter()``, and the random
    states once more in ``on_train_start``.

    It begins in ``setup``, reads a checkpoint before Lightning does, and ends in ``teardown``, or with an error.
    Always: what it has replaced in Lightning's loops is put back by then, and what it has read of a checkpoint is used
    once.

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
        self._restored: _Restored | None = None  # from the reading of a checkpoint to the start of the training
        self._is_training = False
        # The epoch with which this run goes on, as a whole: Lightning has called iter() for it before its
        # on_train_epoch_start. For later ones it calls it after that, whatever it has called before.
        self._first_epoch: int | None = None
        self._begun: dict[str, Any] | None = None  # with what that iter() was called
        # Whether a checkpoint was saved before the training began, as by a search for a learning rate or batch size.
        self._is_searching = False
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
        self._first_epoch = self._begun = None
        self._is_searching = False
        self._put_back()

    def _put_back(self) -> None:
        while self._replaced:
            self._replaced.pop().put_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of every rank."""
        _warn_of_average(trainer)
        self._is_searching = _is_starting(trainer) and not self._is_training
        fit = checkpoint["loops"]["fit_loop"]
        has_begun = trainer.current_epoch == self._first_epoch
        own = _state_of_rank(trainer, _place_of(trainer, fit), fit, has_begun)
        own["begun"] = self._begun if has_begun and not _is_taken(trainer.fit_loop) else None
        if self._restored is not None and self._restored.validation["due"]:
            own["validation"] = self._restored.validation
        _leave_to_lightning(trainer, fit)
        checkpoint[KEY] = gather_for_checkpoint(plain(own), "random states and loaders' states")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states, and write the checkpoint's counters before Lightning reads them.

        A checkpoint that is restored during a run, as Lightning's tuner does, or after it, is left to Lightning.
        """
        if self._is_searching:
            # The search puts back what it saved at its beginning, also where this run goes on from a checkpoint.
            self._is_searching = False
            self._restored = None
            self._put_back()
            return
        has_counters = "epoch_loop.batch_progress" in checkpoint.get("loops", {}).get("fit_loop", {})
        if self._is_training or not _is_starting(trainer) or not has_counters:
            return
        warn_of_open_window(trainer, checkpoint, self)
        restored = self._restored = _read(trainer, checkpoint)
        loop = trainer.fit_loop
        self._replaced += [
            ReplacedMethod(loop, "_load_combined_loader_states", lambda _: restored.begin_epoch(trainer)),
            ReplacedMethod(loop, "setup_data", lambda set_up: restored.set_up(trainer, set_up)),
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore counters and random generators."""
        self._is_training = True
        self._is_searching = False
        self._put_back()
        restored, self._restored = self._restored, None
        if restored is not None:
            _warn_of_frozen(trainer)
            self._replaced += restored.begin_training(trainer)
            if restored.is_whole and getattr(trainer.fit_loop, "is_resuming", False):
                self._first_epoch = trainer.current_epoch
                self._begun = restored.begun


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


# What a checkpoint says


def _place_of(trainer: Any, fit: dict[str, Any]) -> Place:
    """Return where a checkpoint was saved, by the counters of its fit loop."""
    progress, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    batch = progress["current"]
    in_step = batch["ready"] != batch["processed"]
    begins = epochs["ready"] > epochs["started"]
    # An epoch may end without a last batch, as with fewer data than limit_train_batches, or by should_stop. With
    # max_steps Lightning stays in the epoch.
    has_ended = epochs["started"] == epochs["processed"] and trainer.max_steps == -1
    over = not in_step and batch["ready"] > 0 and (begins or progress["is_last_batch"] or has_ended)
    # A hook after the step, such as on_train_batch_end, finds the batch processed and not completed.
    return Place(over, begins, in_step, batch["completed" if in_step else "processed"])


def _is_within_validation(fit: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved in a validation of which batches are left."""
    return fit["epoch_loop.val_loop.batch_progress"]["current"]["ready"] > 0 and not _has_validated(fit)


def _has_validated(fit: dict[str, Any]) -> bool:
    """Whether all batches of the latest validation were made."""
    progress = fit["epoch_loop.val_loop.batch_progress"]
    return progress["is_last_batch"] and progress["current"]["completed"] == progress["current"]["ready"] > 0


def _validation_follows(trainer: Any) -> bool:
    """Whether a run has made the step of a batch, and a validation comes before the next one."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    # When a run is to stop, or after a time, a run that goes on from here does not validate.
    by_batches = not trainer.should_stop and getattr(trainer, "_val_check_time_interval", None) is None
    batch = loop.batch_progress.current
    is_after_step = trainer.training and batch.ready == batch.processed == batch.completed + 1
    return is_after_step and by_batches and fetcher is not None and loop._should_check_val_fx(fetcher)


# What is saved


def _state_of_rank(trainer: Any, place: Place, fit: dict[str, Any], has_begun: bool) -> dict[str, Any]:
    """Return what a checkpoint holds of this rank, beside what Lightning saves of rank 0 alone.

    Args:
        trainer: The Trainer.
        place: Where the checkpoint is saved.
        fit: The state of the fit loop in the checkpoint.
        has_begun: Whether the passes of the epoch have begun before its ``on_train_epoch_start``.
    """
    loop = trainer.fit_loop
    batch = loop.epoch_loop.batch_progress.current
    validation = _describe_validation(trainer, fit)
    unused = 0 if _takes_loader(trainer) else _count_unused(loop, place.used)
    loaders = _loaders(loop)
    return {
        "random": _random_states(trainer) | validation.pop("random"),
        "ranks": rank_and_size()[1],
        "data_ranks": data_rank_and_size()[1],
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        # Whether it is behind the last hook and the validation of a batch, where Lightning counts the logged step.
        "counted": batch.ready == batch.completed and not trainer.validating,
        "metrics": _metrics(trainer),
        "plateaus": _plateaus_wait(trainer, validation["due"]),
        "has_begun": has_begun,
        "loaders": _states_of_loaders(loop, unused, has_begun),
        "batch_sizes": [_batch_size_of(each) for each in loaders],
        "generators": [list(map(generator_state, _generators_of(each))) for each in loaders],
        "exhausted": list(getattr(getattr(loop._combined_loader, "_iterator", None), "_consumed", ())),
        "validation": validation,
    }


def _batch_size_of(loader: Any) -> int:
    size = getattr(loader, "batch_size", None)
    return size if is_whole(size, 1) else 1


def _loaders(loop: Any) -> list[Any]:
    combined = loop._combined_loader
    return [] if combined is None else combined.flattened


def _count_unused(loop: Any, used: int) -> int:
    """Return how many batches were fetched and not used."""
    fetcher = loop._data_fetcher
    if fetcher is None or fetcher.fetched is None:
        return 0
    # A fetcher counts the batches of its own time. In the epoch in which a run goes on, that begins after those which
    # the stopped run had used, until the epoch loop takes it and adds these.
    return max(0, fetcher.fetched - used * _is_taken(loop))


def _is_taken(loop: Any) -> bool:
    """Whether the epoch loop has taken batches of the fetcher, or is about to: it then calls this hook of the loop."""
    return loop._data_fetcher is not None and loop._data_fetcher._start_profiler == loop.epoch_loop._on_before_fetch


def _states_of_loaders(loop: Any, unused: int, has_begun: bool) -> list[Any]:
    """Return the states of the loaders as far as the Trainer's own passes are; ``None`` for one without a state.

    Args:
        loop: The fit loop.
        unused: How many batches were fetched and not used.
        has_begun: Whether passes of which nothing was used are those of the coming epoch; else they begin again.
    """
    loaders = _loaders(loop)
    passes = _passes_of(loop)
    most = max((each.progress.consumed for each in passes if each is not None), default=0)
    states = []
    for loader, epoch in zip(loaders, passes, strict=False):
        if epoch is None:
            states.append(loader.state_dict() if _has_state(loader) else None)
            continue
        # A loader that had ended earlier gave none of the last batches, which are those that were not used.
        progress = epoch.progress
        state = epoch.state_dict(max(0, progress.consumed - (most - unused)) if progress.ended else unused)
        if _counts(loader):
            if progress.is_untouched and loader.loaded is not None and not has_begun:
                state = loader.loaded
            state = {**state, "before_order": None}  # the global RNGs, from which orders are drawn, are restored
        states.append(state)
    return states


def _passes_of(loop: Any) -> list[Epoch | None]:
    """Return the Trainer's own pass over each loader; ``None`` for one of another kind, and before there are any."""
    iterators = list(getattr(getattr(loop._combined_loader, "_iterator", None), "iterators", ()))
    passes: list[Epoch | None] = [each if isinstance(each, Epoch) else None for each in iterators]
    return [*passes, *[None] * (len(_loaders(loop)) - len(passes))]


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _counts(loader: Any) -> bool:
    """Whether a loader counts its batches, and saves what it draws from."""
    return isinstance(loader, PrefetchLoader) and not loader.keeps_state


def _generators_of(loader: Any) -> list[Any]:
    """Return the random generators of a loader that does not save them itself."""
    if not isinstance(loader, DataLoader) or _counts(loader):
        return []
    own = generators_of(loader.generator, loader.batch_sampler if loader._auto_collation else loader.sampler)
    return own if loader.num_workers else [*own, *generators_in(loader.dataset)]


def _leave_to_lightning(trainer: Any, fit: dict[str, Any]) -> None:
    """Leave only those states where Lightning looks for them that it can load without this package.

    It refuses to go on if a checkpoint has more of them than the run has loaders with a state.
    """
    states = fit["state_dict"].pop("combined_loader", [])
    stateful = [each for each in _loaders(trainer.fit_loop) if _has_state(each)]
    kept = [state for each, state in zip(stateful, states, strict=True) if not (_counts(each) and each.was_plain)]
    if kept:
        fit["state_dict"]["combined_loader"] = kept


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the values that callbacks and schedulers may ask for before they are logged again."""
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
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _plateaus_wait(trainer: Any, due: bool) -> bool:
    """Whether an epoch's last batch and its validation were made, but not Lightning's update of plateaus after them."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    return epochs.completed != epochs.started and loop.epoch_loop._num_ready_batches_reached() and not due


def _describe_validation(trainer: Any, fit: dict[str, Any]) -> dict[str, Any]:
    """Return whether a validation is made when the run goes on, and what the next one begins with.

    Within a validation that is what it began with: it is made again, as a whole.
    """
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    within = trainer.validating and (not _has_validated(fit) or error_under_way() is not None)
    loaders = [each if _counts(each) else None for each in _loaders(val_loop)]
    # One after another they begin, in Lightning's usual mode: the latest pass of those that have not is an earlier one.
    latest = getattr(getattr(val_loop._combined_loader, "_iterator", None), "_iterator_idx", inf)
    states = [
        None if each is None else each.state_of_next(again=within and number <= latest)
        for number, each in enumerate(loaders)
    ]
    first = loaders[0] if loaders else None
    random = first.random_at_start() if within and first is not None else {}
    return {
        "due": within or _validation_follows(trainer),
        "loaders": states,
        "reloaded": val_loop._last_val_dl_reload_epoch,
        "random": random,
    }


# What is restored


class _Restored:
    """What a run needs of the checkpoint that it goes on from, on this rank.

    ``on_load_checkpoint`` makes it, and ``on_train_start`` uses it up.

    Args:
        own: What ``_state_of_rank`` returned for this rank.
        place: Where the checkpoint was saved.
        epochs: How many epochs were processed, with the one that is over.
    """

    def __init__(self, own: dict[str, Any], place: Place, epochs: int) -> None:
        self.own = own
        self.validation: dict[str, Any] = own["validation"]
        self._epochs = epochs
        self._place = place
        self.is_whole = place.over and not self.validation["due"]
        # With what iter() is called. Where the stopped run had called it and used nothing, that is what it was called
        # with there: a PrefetchLoader goes on with its pass, and others begin theirs again.
        self.begun: dict[str, Any] = own["begun"] or {name: own[name] for name in ("random", "generators")}
        self._random = own["random"]
        self._has_begun = False

    def begin_epoch(self, trainer: Any) -> None:
        """Set the states with which an epoch begins; Lightning calls ``iter()`` after this."""
        self._has_begun = True
        loop = trainer.fit_loop
        saved = [each for each in self.own["loaders"] if each is not None]
        stateful = [each for each in _loaders(loop) if _has_state(each)]
        if saved and len(saved) != len(stateful) and not self._place.over:
            raise RuntimeError(
                f"The checkpoint has {len(saved)} states of training loaders, and this run has {len(stateful)} loaders "
                "with a state. Go on with the same loaders, or from a checkpoint of the end of an epoch."
            )
        for loader, state in zip(stateful, saved, strict=False):
            self._load(loader, state)
        _set_generators(loop, self.begun["generators"])
        for loader in _loaders(loop):
            # Before iter(), with which worker processes get their first indices.
            set_sampler_epoch(loader, self._epochs)
        _set_random_states(trainer, self.begun["random"])

    def _load(self, loader: Any, state: Any) -> None:
        if is_counted(state) != _counts(loader):
            if self._place.over:
                return
            raise RuntimeError(
                f"The checkpoint is of the middle of an epoch of another kind of loader than {type(loader).__name__}. "
                "Go on with the same loaders, or from a checkpoint of the end of an epoch."
            )
        if is_counted(state):
            over = self._place.over and (state["consumed"] > 0 or not self.own["has_begun"])
            # The first batch of the pass after one that is over is not one that was fetched ahead of it.
            before_batch = None if over else state["before_batch"]
            loader.load_state_dict({**state, "over": over, "before_batch": before_batch})
        elif not (self._place.over and isinstance(loader, _torchdata())):
            # torchdata's own would yield nothing: its state is that of an epoch without a batch that is left.
            loader.load_state_dict(state)

    def set_up(self, trainer: Any, set_up: Callable[[], None]) -> None:
        """Have Lightning set up its loaders, and note the random states with which the training begins."""
        set_up()
        if self._has_begun and self.is_whole and not self.own["begun"]:
            self._random = _random_states(trainer)

    def begin_training(self, trainer: Any) -> list[ReplacedMethod]:
        """Restore what Lightning has not, and return what is replaced in its loops."""
        loop = trainer.fit_loop
        if not self._has_begun and loop._combined_loader is not None:  # they were set up before the checkpoint was read
            self.begin_epoch(trainer)
            self.set_up(trainer, lambda: iter(loop._data_fetcher))
        if not self._place.over:
            self._restore_exhausted(loop._combined_loader)
        self._set_up_validation(trainer)
        replaced = self._restore_counters(trainer)
        said: list[str] = []
        if not (self._place.over or self._place.begins):
            said += _count_on(trainer, self.own, self._place.used)
            _warn_of_other_batches(trainer, self.own, self._place.used)
        self._load_validation(_loaders(loop.epoch_loop.val_loop))
        if not self.is_whole:  # iter() may have drawn from them
            _set_generators(loop, self.own["generators"])
        _set_random_states(trainer, self._random)
        said += _tell_of_ranks(self.own["ranks"])
        if said:
            rank_zero_info(f"turbo: {' '.join(said)}")
        return replaced

    def _restore_exhausted(self, combined: Any) -> None:
        """Restore which loaders have ended: without a length, the epoch ends when each has ended once."""
        exhausted = getattr(getattr(combined, "_iterator", None), "_consumed", ())
        if len(exhausted) == len(self.own["exhausted"]):
            combined._iterator._consumed = list(self.own["exhausted"])

    def _set_up_validation(self, trainer: Any) -> None:
        """Have Lightning set up the loaders of the validation, if the stopped run had some.

        It does so by itself only where one is due in this epoch, and their states are to be loaded now.
        """
        loop = trainer.fit_loop.epoch_loop.val_loop
        if self.validation["loaders"] and loop._combined_loader is None:
            trainer.validating = True
            loop.setup_data()
            trainer.training = True

    def _load_validation(self, loaders: list[Any]) -> None:
        known: list[int] = []
        for loader, state in zip(loaders, self.validation["loaders"], strict=False):
            if state is not None and _counts(loader) and loader.may_begin_with(state):
                own = list(map(id, loader.make_order().generators))
                # What loaders share goes on from where the first of them has left it.
                generators = state["generators"] if set(own).isdisjoint(known) else []
                loader.load_state_dict({**state, "generators": generators})
                known += own

    def _restore_counters(self, trainer: Any) -> list[ReplacedMethod]:
        loop = trainer.fit_loop
        # Else the plateaus of the epoch in which a run goes on would not be updated.
        loop._restarting = False
        if self.is_whole or self._place.begins:
            # With max_steps Lightning takes every checkpoint for one within an epoch.
            loop.epoch_loop.restarting = False
        if self._place.over and self.validation["due"] and trainer.num_training_batches < inf:
            # The epoch is over with other batch sizes too.
            _set_all(loop.epoch_loop.batch_progress.current, trainer.num_training_batches)
        self._update_waiting(trainer)
        if every := trainer.reload_dataloaders_every_n_epochs:
            self._restore_reloading(trainer, every)
        _restore_last_saves(trainer)
        if self.is_whole or self._place.begins or self.validation["due"]:
            return []
        # Lightning would take the last batch of the checkpoint for one that a validation is due after, though that was
        # made, and would begin the loaders of the validation for it.
        check = ReplacedMethod(loop.epoch_loop, "_should_check_val_fx", lambda *_: bool(check.put_back()))
        return [check]

    def _restore_reloading(self, trainer: Any, every: int) -> None:
        """Have Lightning make loaders again in the same epochs as a run that was not stopped."""
        loop = trainer.fit_loop
        loop.epoch_loop.val_loop._last_val_dl_reload_epoch = self.validation["reloaded"]
        epoch = trainer.current_epoch
        if self.is_whole and not self._place.begins and epoch % every == 0:
            # It makes them now, and calls iter() on the new ones, which may have the generators of these.
            epoch -= 1
            self._random = self.own["random"]
            loop._resuming_from_checkpoint = False
            for loader in filter(_counts, _loaders(loop)):
                if loader.loaded is not None:
                    loader.make_order().set_own(loader.loaded["generators"])
            _set_generators(loop, self.own["generators"])
        loop._last_train_dl_reload_epoch = epoch // every * every

    def _update_waiting(self, trainer: Any) -> None:
        """Do what Lightning does after a step, and after an epoch, where the stopped run did not any more."""
        loop, own = trainer.fit_loop.epoch_loop, self.own
        trainer._logger_connector._callback_metrics.update(own["metrics"])
        if self.validation["due"]:
            return
        names = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
        updates = names <= own["metrics"].keys()
        if self._place.is_after_step and not own["counted"]:
            loop._batches_that_stepped += not loop._should_accumulate() or self.is_whole
            if updates:
                loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if self.is_whole and own["plateaus"] and updates:
            # The frequency of a scheduler is counted by the epoch that is over.
            epochs = trainer.fit_loop.epoch_progress.current
            epochs.completed -= 1
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            epochs.completed += 1


def _set_generators(loop: Any, saved: list[Any]) -> None:
    """Set the generators of loaders that do not save them, if they hold as many as they did."""
    for loader, states in zip(_loaders(loop), saved, strict=False):
        generators = _generators_of(loader)
        if len(generators) == len(states):
            for generator, state in zip(generators, states, strict=True):
                set_generator_state(generator, state)


def _read(trainer: Any, checkpoint: dict[str, Any]) -> _Restored:
    """Write a checkpoint's counters for the place where the run goes on, and return what is restored after that."""
    fit = checkpoint["loops"]["fit_loop"]
    place = _place_of(trainer, fit)
    ranks = checkpoint.get(KEY) or [_state_without_callback(fit)]
    own = _own_state(ranks)
    # Lightning is to find none: it would load those of rank 0 on all ranks.
    fit["state_dict"].pop("combined_loader", None)
    due = own["validation"]["due"]
    if place.begins or (place.over and not due):
        _complete_epoch(fit)
    else:
        _go_on_in_epoch(fit)
    if due:
        _make_validation(fit)
    return _Restored(own, place, fit["epoch_progress"]["current"]["processed"])


def _state_without_callback(fit: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a checkpoint that was saved without this callback."""
    states = fit["state_dict"].get("combined_loader", [])
    return {
        "random": None, "ranks": 0, "data_ranks": 0, "counted": True, "has_begun": False, "begun": None, "metrics": {},
        "plateaus": False, "loaders": states, "batch_sizes": [], "generators": [], "exhausted": [],
        "validation": {"due": _is_within_validation(fit), "loaders": [], "reloaded": -inf},
    }  # fmt: skip


def _own_state(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of this rank; a new one takes that of rank 0, with random states of its own."""
    rank, _ = rank_and_size()
    if rank < len(ranks):
        return ranks[rank]
    first = ranks[0]
    random_states = None if first["random"] is None else _derive_random_states(first["random"], rank)
    begun = first["begun"] and {**first["begun"], "random": random_states}
    return {**first, "random": random_states, "begun": begun}


# Lightning's counters, in a checkpoint


def _complete_epoch(fit: dict[str, Any]) -> None:
    """Write the counters of a whole epoch that comes next: what has begun is over."""
    for counts, reached in ((fit["epoch_progress"], "started"), (fit["epoch_loop.batch_progress"], "processed")):
        for part in (counts["total"], counts["current"]):
            part.update(dict.fromkeys(part, part[reached]))


def _go_on_in_epoch(fit: dict[str, Any]) -> None:
    """Write the counters of an epoch that is under way, after the step of a batch; one that was begun is made again."""
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    if batches["current"]["ready"] != batches["current"]["processed"]:
        batches["is_last_batch"] = False
    for part in (batches["total"], batches["current"]):
        part.update(dict.fromkeys(part, part["processed"]))
    for part in (epochs["total"], epochs["current"]):
        begun = part["started"]
        part.update(ready=begun, started=begun, processed=begun - 1, completed=begun - 1)


def _make_validation(fit: dict[str, Any]) -> None:
    """Write the counters of a validation that was left within its first batch: Lightning then makes it, whole.

    By ``total`` Lightning recognizes it, and counts that batch as begun twice. Nothing acts on this number later.
    """
    progress = fit["epoch_loop.val_loop.batch_progress"]
    progress["is_last_batch"] = False
    before = max(0, progress["total"]["completed"] - progress["current"]["completed"])
    for part, completed in (("total", before), ("current", 0)):
        progress[part].update(ready=completed + 1, started=completed + 1, processed=completed, completed=completed)


def _restore_last_saves(trainer: Any) -> None:
    """Have each ``ModelCheckpoint`` that has just saved know so.

    It forgets at which step it saved last, and would save after the first batch. If accumulation windows have several
    batches, that file would hold no gradients of the first one.
    """
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_train_steps", 0)
        if every > 0 and trainer.global_step % every == 0:
            callback._last_global_step_saved = trainer.global_step


# Other ranks and batch sizes


def _count_on(trainer: Any, own: dict[str, Any], used: int) -> list[str]:
    """Count the used batches of an epoch in those of loaders with other ranks or batches, and return what to tell.

    The epoch has as many batches as it would have had with these from its beginning, and its last ones are left.
    """
    loop = trainer.fit_loop
    pairs = _loaded_within(loop, own)
    resharded = [(each, old, each.loaded) for each, old in pairs if _batching(old) != _batching(each.loaded)]
    if not resharded:
        return []
    length = trainer.num_training_batches
    combined = loop._combined_loader
    limits = {id(each): limit for each, limit in zip(combined.flattened, combined.limits, strict=True)}
    counts = [(limits[id(each)], each.loaded["consumed"]) for each, _ in pairs]
    # No more than all: a limit counts batches, and fewer of them may be more samples than before.
    done = min(length, _count_batches(counts, combined._mode))
    most = max(state["consumed"] for _, state in pairs)
    for each, old, _ in resharded:
        if old["consumed"] == most or done == length:
            each.count_from(done, ended=done == length)
    _count_as(loop.epoch_loop, done - used)
    if done == length:
        _step_schedulers(loop.epoch_loop)
    epoch = loop.epoch_progress.current.processed
    return [_tell_of_samples(epoch, used, done, length, old, new) for _, old, new in resharded]


def _loaded_within(loop: Any, own: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the loaders that go on within an epoch, each with its state in the checkpoint."""
    saved = [each for each in own["loaders"] if each is not None]
    stateful = [each for each in _loaders(loop) if _has_state(each)]
    pairs = [(each, state) for each, state in zip(stateful, saved, strict=False) if _counts(each)]
    return [(each, state) for each, state in pairs if each.loaded is not None]  # others have begun, as a stream does


def _count_as(epoch_loop: Any, more: int) -> None:
    """Count so many more batches as used."""
    stepped = not epoch_loop._should_accumulate()
    current = epoch_loop.batch_progress.current
    _set_all(current, current.completed + more)
    # Lightning derives the number of steps from the number of batches and this one.
    epoch_loop._batches_that_stepped += stepped - (not epoch_loop._should_accumulate())


def _step_schedulers(epoch_loop: Any) -> None:
    """Step the schedulers of an epoch of which no batch is left, as Lightning does with the last one."""
    with warnings.catch_warnings():
        # torch does not know that the optimizer made its steps before the stop.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _set_all(progress: Any, number: int) -> None:
    """Set all counters of batches to a number."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, number)


def _batching(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return how the rest of an epoch is batched."""
    return state["ranks"], state["batch_size"], state["from_sample"], state["from_batch"]


def _count_batches(counts: Sequence[tuple[float, int]], mode: str) -> int:
    """Return after how many batches of its epoch a run goes on, by its loaders' limits and what they have used."""
    if mode != "min_size" or inf in dict(counts):
        return max(counts)[1]
    return int(min(limit for limit, _ in counts) - min(limit - consumed for limit, consumed in counts))


def _tell_of_samples(epoch: int, used: int, done: int, length: float, old: dict[str, Any], new: dict[str, Any]) -> str:
    number = f"{length - done} of {length} " if length < inf else ""
    before, now = (f"{each['ranks']} x {each['batch_size']}" for each in (old, new))
    return (
        f"Epoch {epoch} goes on at sample {new['from_sample']} of {new['order']['length']}: {used} batches of {before} "
        f"samples were used, {number}batches of {now} are left."
    )


def _warn_of_other_batches(trainer: Any, own: dict[str, Any], used: int) -> None:
    """Warn of loaders that go on with other ranks or batch sizes, and of which no order over all ranks is known."""
    old, ranks = own["data_ranks"], data_rank_and_size()[1]
    loop = trainer.fit_loop
    for loader, state, was in zip(_loaders(loop), own["loaders"], own["batch_sizes"], strict=False):
        now = getattr(loader, "batch_size", None) or 1
        if old in (0, ranks) and (was == now or is_counted(state)):
            continue  # a PrefetchLoader tells of other batch sizes itself
        if state is None or not used or (is_counted(state) and state["order"] is not None):
            continue
        before, left_out = old * used * was, ranks * used * now
        rank_zero_warn(
            f"A {type(loader).__name__} goes on with {ranks} ranks x {now} samples in place of {old} x {was} "
            f"in the middle of an epoch, and no order of its samples over all ranks is known: {before} were used, and "
            f"{left_out} count as used now, so that about {abs(before - left_out)} are seen "
            f"{'twice' if left_out < before else 'never'} in this epoch. Add Prefetch to the Trainer, with "
            "shuffle=True or a SeededSampler, or go on from a checkpoint of the end of an epoch.",
            category=TurboWarning,
        )


# Random states


def _random_states(trainer: Any) -> dict[str, Any]:
    """Return the states of the global RNGs, and of the generator of a CUDA device."""
    device = trainer.strategy.root_device
    state = shared_state()
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_random_states(trainer: Any, state: dict[str, Any] | None) -> None:
    """Set the generators to what ``_random_states`` or ``_derive_random_states`` returned."""
    device = trainer.strategy.root_device
    if state is None:
        return
    set_shared_state(state)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "cuda" and "seed" in state:
        torch.cuda.manual_seed(state["seed"])


def _derive_random_states(first: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return states for a rank that the run did not have, which follow from those of rank 0 and its own number."""
    # From a saved state and not from a seed, because a checkpoint of another epoch has to give other numbers.
    digest = hashlib.blake2b(first["torch"].numpy().tobytes(), digest_size=4).digest()
    for_torch, for_python, for_numpy = seeds_of(int.from_bytes(digest, "little"), 0, rank, "rank")
    with same_random_numbers():
        torch.default_generator.manual_seed(for_torch)
        random.seed(for_python)
        np.random.seed(for_numpy)
        return {**shared_state(), "seed": for_torch}


def _tell_of_ranks(ranks: int) -> list[str]:
    """Return what to tell of the random states of a run that had so many ranks; nothing if there are as many now."""
    size = rank_and_size()[1]
    if ranks > size:
        return [f"The random states of the last {ranks - size} of {ranks} ranks are dropped."]
    if 0 < ranks < size:
        return [f"The random states of the last {size - ranks} of {size} ranks follow from those of rank 0."]
    return []


def _takes_loader(trainer: Any) -> bool:
    """Whether ``training_step`` takes its batches from the loader itself."""
    return "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters


def _torchdata() -> Any:
    return getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())
