"""The callback that makes a run that goes on from a checkpoint equal to one that never stopped."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch

from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo._lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    check_binding,
    is_fitting,
    rank_zero_info,
    set_sampler_epoch,
)
from lightning_turbo._random import set_shared_state, shared_state
from lightning_turbo.callbacks.prefetch_next_epoch import PrefetchNextEpoch
from lightning_turbo.data.device import DevicePrefetcher
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.position import correct_states, is_between_epochs

__all__ = ["ExactResume", "accumulate_as_scheduled", "attach_exact_resume"]

KEY = "lightning_turbo.exact_resume"


class _Held(NamedTuple):
    """What a checkpoint says of the place that it was written at.

    Attributes:
        over: Whether the last batch of the epoch was used.
        begins: Whether the epoch that is counted has not begun.
        used: How many batches of it were used; ``None`` where steps take their batches themselves.
        loaders: The states of the training loaders.
        random: The states of this rank's random generators; ``None`` if the checkpoint has none for it.
    """

    over: bool
    begins: bool
    used: int | None
    loaders: list[Any]
    random: dict[str, Any] | None


class ExactResume(Callback):
    """Let a run that goes on from a checkpoint equal one that never stopped.

    Every checkpoint holds the states of the random generators of torch (CPU, and the CUDA device of the rank), Python
    and NumPy of every rank, and the states of every rank's training loaders. ``Trainer.fit(ckpt_path=...)`` puts them
    back when training goes on. The order of a shuffled epoch, dropout and augmentation then continue bit for bit.
    ``PrefetchDataModule`` and the turbo strategies bring this callback along.

    What Lightning 2.6 does without it, and what this callback does:

    - It saves no random states (no issue known).
    - It drops the states of loaders that were set up before it restored its loops, as by reading
      ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` (issue 20550). Here the callback loads them.
    - It restores loaders of an epoch's last step at their end, so that a ``StatefulDataLoader`` skips the next epoch
      (issue 19764), and drops the states of loaders of a whole epoch. Here a loader begins the next epoch.
    - It saves the states of rank 0's loaders for all ranks. Here each rank gets its own.
    - It tells a ``DistributedSampler`` its epoch after worker processes have their first indices. Here ``iter()`` is
      called again afterwards.
    - It takes the epoch after a checkpoint of the last step for the rest of the one before, and does not count it;
      after one of ``on_train_epoch_start`` it leaves out all batches but one; with ``max_steps`` it trains a batch of
      an epoch that is over. Here such a checkpoint is read as one of a whole epoch.
    - It counts a step twice that a signal or an error broke off. Here it is counted once.
    - It forgets a ``GradientAccumulationScheduler`` in the rest of an epoch. The turbo strategies ask it when training
      starts; this callback cannot, because that one then refuses what was set before it.
    - It forgets when ``reload_dataloaders_every_n_epochs`` loaded last. Here the schedule goes on.

    Note:
        Exact on the same number of ranks, and with loaders that know their position: ``PrefetchLoader``, torchdata's
        ``StatefulDataLoader``, at the end of an epoch any loader. A hook ``on_train_start`` that draws random numbers
        changes those that follow. Saving is a collective call if there are several ranks.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo.callbacks import ExactResume
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ExactResume()])
    """

    def __init__(self) -> None:
        check_binding("ExactResume")
        self._held: _Held | None = None
        self._training = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run; what one before it left is of no use."""
        self._held, self._training = None, False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End a run."""
        self._held, self._training = None, False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what every rank needs to go on."""
        own: dict[str, Any] = {"random": _random_states(trainer)}
        own["loaders"] = [place[name] for place, name in _loader_states(trainer, checkpoint)]
        name = "random states and loaders' states"
        ranks = gather_for_checkpoint(own, name, trainer.fit_loop.total_batch_idx)
        checkpoint[KEY] = ranks

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the loaders' states, and let Lightning read a checkpoint of an epoch's end as one of a whole epoch.

        A checkpoint that is restored in the middle of a run, or after it, is left to Lightning: so does its tuner.
        """
        fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        starts = is_fitting(trainer) and trainer.state.status.value == "running" and not self._training
        if not starts or "epoch_loop.batch_progress" not in fit:
            return
        random = _take_states_of_rank(trainer, checkpoint)
        loaders = fit["state_dict"].pop("combined_loader", [])
        over, begins, used = _position(trainer, fit)
        if over or begins:
            _complete_epoch(fit)
        correct_states(loaders, over=over, used=used)
        self._held = _Held(over, begins, used, loaders, random)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let counters, loaders and random generators go on as the checkpoint says."""
        self._training = True
        held, self._held = self._held, None
        if held is None:
            return
        loop: Any = trainer.fit_loop
        _correct_counters(trainer, held)
        if held.over and trainer.current_epoch > 0:
            # Lightning calls iter() itself, as for every epoch but the first: the order is drawn from what is put back.
            if not loop._should_reload_train_dl:
                _restore_loaders_of_whole_epoch(loop, held.loaders)
            _set_random_states(trainer, held.random)
            return
        if held.loaders:
            loop._combined_loader._load_state_dicts(held.loaders)
        for loader in loop._combined_loader.flattened:
            set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        iter(loop._data_fetcher)
        _set_random_states(trainer, held.random)


def attach_exact_resume(trainer: Any) -> None:
    """Put an ``ExactResume`` in front of a Trainer's callbacks, if it has none."""
    if not any(isinstance(callback, ExactResume) for callback in trainer.callbacks):
        trainer.callbacks = [ExactResume(), *trainer.callbacks]


def accumulate_as_scheduled(trainer: Any) -> None:
    """Set what a ``GradientAccumulationScheduler`` says for the epoch that a Trainer begins to train.

    The callback sets it in ``on_train_epoch_start``, which Lightning does not call where a run goes on in mid-epoch. A
    strategy calls this in its ``on_train_start``, the last of these hooks.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


# Position and counters


def _position(trainer: Any, fit: dict[str, Any]) -> tuple[bool, bool, int | None]:
    """Return ``over``, ``begins`` and ``used``, see ``_Held``, of the loops in a checkpoint."""
    progress, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    batch = progress["current"]
    within_step = batch["ready"] != batch["processed"]  # that step is made again
    begins = epochs["ready"] > epochs["started"]
    # Without a last batch, where data are fewer than limit_train_batches says or should_stop was set, an epoch is over
    # with its end. Where max_steps ends a run, Lightning goes on in it all the same.
    ended = begins or (epochs["started"] == epochs["processed"] and trainer.max_steps == -1)
    over = not within_step and batch["ready"] > 0 and (progress["is_last_batch"] or ended)
    used = None if _takes_loader(trainer.lightning_module) else batch["completed" if within_step else "processed"]
    return over, begins, used


def _takes_loader(module: Any) -> bool:
    """Whether ``training_step`` takes its batches from the loader itself."""
    step = getattr(module, "training_step", None)
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters


def _complete_epoch(fit: dict[str, Any]) -> None:
    """Let the loops in a checkpoint be those after the last hook of the epoch that began last."""
    epochs = fit["epoch_progress"]
    if epochs["current"]["processed"] < epochs["current"]["started"]:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # Lightning adds one after the batch's last hook
    for counts, reached in ((epochs, "started"), (fit["epoch_loop.batch_progress"], "processed")):
        for part in (counts["total"], counts["current"]):
            part.update(dict.fromkeys(part, part[reached]))


def _correct_counters(trainer: Any, held: _Held) -> None:
    loop = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    if held.over or held.begins:
        # With max_steps Lightning takes every checkpoint for one in the middle of an epoch.
        loop._restarting = loop._resuming_from_checkpoint = False
        loop.epoch_loop.restarting = False
    elif batches.current.ready != batches.current.processed:  # in a step, which Lightning counts as made
        batches.total.ready = batches.total.started = batches.total.processed
        if not loop.epoch_loop._should_accumulate():
            loop.epoch_loop._batches_that_stepped -= 1
    if every := trainer.reload_dataloaders_every_n_epochs:
        loop._last_train_dl_reload_epoch = (trainer.current_epoch - held.over) // every * every


# Loaders


def _restore_loaders_of_whole_epoch(loop: Any, states: list[Any]) -> None:
    """Load the states of loaders that are to begin an epoch; one that would go on at its end begins anew."""
    stateful = [each for each in loop._combined_loader.flattened if hasattr(each, "load_state_dict")]
    for loader, state in zip(stateful, states, strict=False):
        if _begins_an_epoch(loader.loader if isinstance(loader, DevicePrefetcher) else loader, state):
            loader.load_state_dict(state)


def _begins_an_epoch(loader: Any, state: Any) -> bool:
    """Whether a loader begins the next epoch with a state of the end of one; torchdata's own would give nothing."""
    torchdata = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())
    if hasattr(loader, "set_epoch") or not isinstance(loader, torchdata):
        return True
    return isinstance(loader, PrefetchLoader) and is_between_epochs(state)


def _loader_states(trainer: Any, checkpoint: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where a checkpoint has states of training loaders: those of the epoch, and of one that was begun early."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    callbacks = checkpoint.get("callbacks", {})
    early = [each.state_key for each in trainer.callbacks if isinstance(each, PrefetchNextEpoch)]
    places = [(loop, "combined_loader"), *((callbacks, key) for key in early)]
    return [(place, name) for place, name in places if name in place]


def _take_states_of_rank(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Put this rank's loaders' states in the place of rank 0's, and return its random states."""
    ranks = checkpoint.get(KEY, [])
    rank, size = rank_and_size()
    if len(ranks) != size:
        if ranks:
            rank_zero_info(
                f"turbo: the checkpoint has the random states of {len(ranks)} ranks, and this run has {size}. They are "
                "not put back."
            )
        return None
    for (place, name), state in zip(_loader_states(trainer, checkpoint), ranks[rank]["loaders"], strict=False):
        place[name] = state
    return ranks[rank]["random"]


# Random generators


def _random_states(trainer: Any) -> dict[str, Any]:
    state, device = shared_state(), trainer.strategy.root_device
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_random_states(trainer: Any, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    set_shared_state(state)
    device = trainer.strategy.root_device
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
