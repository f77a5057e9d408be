"""Callback that makes a resumed run equal to a run that never stopped."""

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
    """Position of a run and its states, from a checkpoint.

    Attributes:
        over: Whether the last batch of the epoch was used.
        begins: Whether the current epoch has not begun.
        used: Number of batches used in the epoch; ``None`` if the steps take their batches themselves.
        loaders: States of the training loaders.
        random: RNG states of this rank; ``None`` if the checkpoint has none.
    """

    over: bool
    begins: bool
    used: int | None
    loaders: list[Any]
    random: dict[str, Any] | None


class ExactResume(Callback):
    """Make a resumed run equal to a run that never stopped.

    Every checkpoint holds the global RNG states of each rank (torch on the CPU and on the CUDA device of the rank,
    Python, NumPy) and the states of its training loaders. ``Trainer.fit(ckpt_path=...)`` restores them when training
    starts. The order of a shuffled epoch, dropout and augmentation then continue bit for bit.
    ``PrefetchDataModule`` and the turbo strategies add this callback.

    Behaviour of Lightning 2.6, and of this callback:

    - Lightning saves no RNG states. The callback saves and restores them.
    - Lightning drops the states of loaders that were set up before it restores its loops, for example by reading
      ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` (issue 20550). The callback loads them.
    - Lightning restores the loaders at the end of an epoch, so that a ``StatefulDataLoader`` skips the next epoch
      (issue 19764). The callback lets each loader begin the next epoch.
    - Lightning saves the loader states of rank 0 for all ranks. The callback restores each rank's own states.
    - Lightning sets the epoch of a ``DistributedSampler`` after the worker processes have their first indices. The
      callback calls ``iter()`` again afterwards.
    - After a checkpoint of the last step Lightning does not count the next epoch; after one of
      ``on_train_epoch_start`` it trains one batch only; with ``max_steps`` it trains one more batch of a finished
      epoch. The callback treats these checkpoints as those of a whole epoch.
    - Lightning counts a step twice that a signal or an error interrupted. The callback counts it once.
    - Lightning ignores a ``GradientAccumulationScheduler`` in the rest of an epoch. The turbo strategies apply it; this
      callback cannot, because the scheduler refuses a value that was set before.
    - Lightning restarts the schedule of ``reload_dataloaders_every_n_epochs``. The callback continues it.

    Note:
        The resumed run is exact with the same number of ranks and with loaders that save their position:
        ``PrefetchLoader``, torchdata's ``StatefulDataLoader``, and any loader at the end of an epoch. Random numbers
        drawn in a hook ``on_train_start`` change the numbers after them. With several ranks, saving is a collective
        call.

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
        """Drop the state of an earlier run."""
        self._held, self._training = None, False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the state of this run."""
        self._held, self._training = None, False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of every rank."""
        own: dict[str, Any] = {"random": _get_rng_states(trainer)}
        own["loaders"] = [owner[key] for owner, key in _find_loader_states(trainer, checkpoint)]
        checkpoint[KEY] = gather_for_checkpoint(own, "RNG and loader states", trainer.fit_loop.total_batch_idx)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the loader states out of the checkpoint, and complete the epoch in it if its last batch was used.

        A checkpoint that is loaded after training started, for example by Lightning's tuner, does not change.
        """
        fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        if self._training or not _is_starting(trainer) or "epoch_loop.batch_progress" not in fit:
            return
        random = _restore_states_of_rank(trainer, checkpoint)
        loaders = fit["state_dict"].pop("combined_loader", [])
        over, begins, used = _read_position(trainer, fit)
        if over or begins:
            _complete_epoch(fit)
        correct_states(loaders, over=over, used=used)
        self._held = _Held(over, begins, used, loaders, random)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the counters, the loaders and the global RNG."""
        self._training = True
        held, self._held = self._held, None
        if held is None:
            return
        _correct_counters(trainer, held)
        if held.over and trainer.current_epoch > 0:
            _restore_loaders_for_next_epoch(trainer.fit_loop, held.loaders)
        else:
            _restore_loaders_within_epoch(trainer.fit_loop, held.loaders)
        _set_rng_states(trainer, held.random)


def _is_starting(trainer: Any) -> bool:
    return is_fitting(trainer) and trainer.state.status.value == "running"


def attach_exact_resume(trainer: Any) -> None:
    """Insert an ``ExactResume`` before the callbacks of a Trainer that has none."""
    if not any(isinstance(callback, ExactResume) for callback in trainer.callbacks):
        trainer.callbacks = [ExactResume(), *trainer.callbacks]


def accumulate_as_scheduled(trainer: Any) -> None:
    """Apply the value of a ``GradientAccumulationScheduler`` for the current epoch.

    The scheduler sets it in ``on_train_epoch_start``, which Lightning does not call for a run resumed in mid-epoch. A
    strategy calls this function in its ``on_train_start``, after all callbacks.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


# Position and counters


def _read_position(trainer: Any, fit: dict[str, Any]) -> tuple[bool, bool, int | None]:
    """Return ``over``, ``begins`` and ``used`` of ``_Held`` from the loops in a checkpoint."""
    progress, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    batch = progress["current"]
    within_step = batch["ready"] != batch["processed"]  # the resumed run repeats this step
    begins = epochs["ready"] > epochs["started"]
    # An epoch without a last batch, because of fewer data than limit_train_batches or of should_stop, is over after its
    # last hook. After the end by max_steps, Lightning continues it.
    ended = begins or (epochs["started"] == epochs["processed"] and trainer.max_steps == -1)
    over = not within_step and batch["ready"] > 0 and (progress["is_last_batch"] or ended)
<<<<<<< HEAD
    used = None if _takes_loader(trainer.lightning_module) else batch["completed" if within_step else "processed"]
    return over, begins, used


def _takes_loader(module: Any) -> bool:
    """Whether ``training_step`` takes its batches from the loader itself."""
    step = getattr(module, "training_step", None)
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters
=======
    used = batch["completed" if within_step else "processed"]
    return over, begins, None if _takes_iterator(trainer.lightning_module) else used


def _takes_iterator(module: LightningModule) -> bool:
    """Return whether ``training_step`` takes its batches from the iterator itself."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters
>>>>>>> w-optim


def _complete_epoch(fit: dict[str, Any]) -> None:
    """Set the counters in a checkpoint to their values after the last hook of the current epoch."""
    epochs = fit["epoch_progress"]
    if epochs["current"]["processed"] < epochs["current"]["started"]:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # Lightning does so after the last hook of a batch
    for counts, reached in ((epochs, "started"), (fit["epoch_loop.batch_progress"], "processed")):
        for part in (counts["total"], counts["current"]):
            part.update(dict.fromkeys(part, part[reached]))


def _correct_counters(trainer: Any, held: _Held) -> None:
    loop = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    if held.over or held.begins:
        # With max_steps Lightning treats every checkpoint as one in mid-epoch.
        loop._restarting = loop._resuming_from_checkpoint = False
        loop.epoch_loop.restarting = False
    elif batches.current.ready != batches.current.processed:  # within a step, which Lightning already counts
        batches.total.ready = batches.total.started = batches.total.processed
        if not loop.epoch_loop._should_accumulate():
            loop.epoch_loop._batches_that_stepped -= 1
    if every := trainer.reload_dataloaders_every_n_epochs:
        loop._last_train_dl_reload_epoch = (trainer.current_epoch - held.over) // every * every


# Loaders


<<<<<<< HEAD
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
=======
def _restore_loaders_within_epoch(loop: Any, states: list[Any]) -> None:
    if states:
        loop._combined_loader._load_state_dicts(states)
    for loader in loop._combined_loader.flattened:
        set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(loop._data_fetcher)


def _restore_loaders_for_next_epoch(loop: Any, states: list[Any]) -> None:
    """Load the states of loaders that begin the next epoch. Lightning then calls ``iter()`` on them itself."""
    if loop._should_reload_train_dl:
        return
    stateful = (each for each in loop._combined_loader.flattened if hasattr(each, "load_state_dict"))
    for loader, state in zip(stateful, states, strict=False):
        if _begins_next_epoch(loader, state):
            loader.load_state_dict(state)


def _begins_next_epoch(loader: Any, state: Any) -> bool:
    """Return whether a loader with this state begins the next epoch; a ``StatefulDataLoader`` would be at its end."""
    inner = loader.loader if isinstance(loader, DevicePrefetcher) else loader
    if isinstance(inner, PrefetchLoader) and is_between_epochs(state):
        return True
    torchdata = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", ())
    return hasattr(inner, "set_epoch") or not isinstance(inner, torchdata)


def _find_loader_states(trainer: Any, checkpoint: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionaries and keys of the loader states: of this epoch, and of a prefetched next epoch."""
>>>>>>> w-optim
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    callbacks = checkpoint.get("callbacks", {})
    found = [(loop, "combined_loader")] if "combined_loader" in loop else []
    early = (each.state_key for each in trainer.callbacks if isinstance(each, PrefetchNextEpoch))
    return [*found, *((callbacks, key) for key in early if key in callbacks)]


def _restore_states_of_rank(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Replace the loader states of rank 0 by those of this rank, and return its RNG states."""
    ranks = checkpoint.get(KEY, [])
    rank, size = rank_and_size()
    if not ranks:
        return None
    if len(ranks) != size:
        rank_zero_info(
            f"ExactResume: the checkpoint has the RNG states of {len(ranks)} ranks, but this run has {size}: it does "
            "not restore them."
        )
        return None
    for (owner, key), state in zip(_find_loader_states(trainer, checkpoint), ranks[rank]["loaders"], strict=False):
        owner[key] = state
    return ranks[rank]["random"]


# Global RNG


def _get_rng_states(trainer: Any) -> dict[str, Any]:
    state, device = shared_state(), trainer.strategy.root_device
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_rng_states(trainer: Any, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    set_shared_state(state)
    device = trainer.strategy.root_device
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
