"""What the adapters read from a Trainer and its parts where Lightning has no public name for it."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from lightning_turbo._checks import inherits
from lightning_turbo._lightning import (
    LightningDataModule,
    LightningModule,
    SLURMEnvironment,
    bound_name,
    rank_zero_warn,
)
from lightning_turbo.errors import LightningMismatchError, TurboWarning

__all__ = [
    "LEAN_VERSIONS",
    "batch_limit",
    "callbacks_named",
    "combined_loader",
    "gives_sampler",
    "handlers_before_run",
    "hooks_before_transfer",
    "is_fitting",
    "keep_handlers",
    "lightning_version",
    "loaded_checkpoint",
    "owner_of_training_data",
    "refuse_as_callback",
    "replace_strategy",
    "requeue_signal",
    "require_lean_loop",
    "strategy_that_saves",
    "supports_lean_loop",
    "takes_batch_index",
    "warn_of_open_window",
]


def is_fitting(trainer: Any) -> bool:
    """Return whether a Trainer is in ``fit``, not in validate, test or predict."""
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def gives_sampler(trainer: Any) -> bool:
    """Return whether a Trainer gives loaders a sampler that splits the samples among the ranks."""
    return trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler


def batch_limit(trainer: Any, loader: Any) -> float:
    """Return the largest number of batches that a Trainer takes from one of its loaders in an epoch.

    Infinity if unknown: before the loop has counted its loaders, and while the Trainer is not running.
    """
    # Otherwise its loops still hold the limits of the previous run.
    if trainer.state.status.value != "running":
        return math.inf
    loops = (
        [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
        if is_fitting(trainer)
        else [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    )
    for combined in (loop._combined_loader for loop in loops):
        if combined is not None and combined.limits is not None:
            for each, limit in zip(combined.flattened, combined.limits, strict=True):
                if each is loader:
                    return limit
    return math.inf


def combined_loader(trainer: Any) -> Any:
    """Return the CombinedLoader of a Trainer's training loaders."""
    return trainer.fit_loop._combined_loader


def owner_of_training_data(trainer: Any) -> Any:
    """Return the owner of ``train_dataloader``: the module or the datamodule, or the loader passed to ``fit``."""
    return trainer.fit_loop._data_source.instance


def loaded_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that a Trainer is about to restore, empty if there is none.

    Lightning hands a plugin only the state under its own class name; this gives access to the others.
    """
    return trainer._checkpoint_connector._loaded_checkpoint


def warn_of_open_window(trainer: Any, checkpoint: dict[str, Any], speaker: Any) -> None:
    """Warn if a checkpoint was saved inside an accumulation window, because no checkpoint holds gradients.

    Several callbacks and the precision plugin call it, each with a class attribute ``warns_of_open_window``; only the
    first of them warns.

    Args:
        trainer: The Trainer that resumes from the checkpoint.
        checkpoint: The loaded checkpoint.
        speaker: The caller.
    """
    others = [*trainer.callbacks, trainer.precision_plugin]  # in the order in which Lightning shows them a checkpoint
    if next(each for each in others if getattr(each, "warns_of_open_window", False)) is not speaker:
        return
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    # The window may have a new length, and Lightning does not save the old one. ExactResume does, per rank.
    (saved, *_) = checkpoint.get("lightning_turbo.exact_resume") or [{}]
    length = saved.get("accumulate_grad_batches", trainer.accumulate_grad_batches)
    done = loop.get("current", {}).get("processed", 0) % length
    # Lightning steps at the last batch of an epoch, whatever the length of the window.
    if done and not loop.get("is_last_batch"):
        rank_zero_warn(
            f"The checkpoint was saved after {done} of {length} batches of an accumulation window, without "
            "their gradients: the window restarts with the batches that remain. Save at the end of a window, e.g. "
            "with every_n_train_steps of ModelCheckpoint.",
            category=TurboWarning,
        )


def hooks_before_transfer(module: Any, datamodule: Any) -> list[str]:
    """Return the overridden hooks of a module and a datamodule that see a batch before its copy to the device."""
    owners = [(module, LightningModule), (datamodule, LightningDataModule)]
    return [
        f"{type(owner).__name__}.{name}"
        for owner, base in owners
        for name in ("on_before_batch_transfer", "transfer_batch_to_device")
        if owner is not None and not inherits(owner, base, (name,))
    ]


def callbacks_named(*names: str) -> tuple[type, ...]:
    """Return Lightning's callbacks with these names, skipping those that this version lacks."""
    callbacks = importlib.import_module(f"{bound_name()}.callbacks")
    return tuple(getattr(callbacks, name) for name in names if hasattr(callbacks, name))


def refuse_as_callback(instead: str) -> property:
    """Return a property ``state_key``, which a Trainer reads from each callback, that says where an object belongs."""

    def state_key(self: Any) -> str:
        raise TypeError(f"callbacks: expected callbacks, got {type(self).__name__}. Pass it as Trainer({instead}).")

    return property(state_key)


def requeue_signal(trainer: Any) -> int | None:
    """Return the signal on which Lightning requeues a Slurm job, or ``None`` if it does not requeue."""
    environment = trainer._accelerator_connector.cluster_environment
    requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return int(environment.requeue_signal) if requeues and environment.requeue_signal is not None else None


def handlers_before_run(trainer: Any) -> dict[int, Any]:
    """Return the signal handlers that the program had before the run, which Lightning restores after it."""
    return trainer._signal_connector._original_handlers


def keep_handlers(trainer: Any, handlers: dict[int, Any]) -> None:
    """Make Lightning install these signal handlers after the run instead of restoring the program's."""
    trainer._signal_connector._original_handlers.update(handlers)


def strategy_that_saves() -> str:
    """Return the class of the strategy of a Trainer under construction, if it writes checkpoints itself; else empty.

    Called by a method that the Trainer's connector calls. Nothing else tells a ``CheckpointIO`` its strategy, and these
    strategies never call it.
    """
    strategy = getattr(sys._getframe(2).f_locals.get("self"), "strategy", None)
    names = {each.__name__ for each in type(strategy).__mro__}
    is_own = names & {"DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"}
    return type(strategy).__name__ if is_own else ""


def replace_strategy(trainer: Any, strategy: Any) -> None:
    """Give a Trainer under construction another strategy, as ``Trainer(strategy=...)`` would have."""
    # The connector has already chosen; the Trainer asks it each time.
    trainer._accelerator_connector.strategy = strategy


def takes_batch_index(training_step: Any) -> bool:
    """Return whether Lightning passes the batch index to this ``training_step``."""
    signatures = importlib.import_module(f"{bound_name()}.utilities.signature_utils")
    return signatures.is_param_in_hook_signature(training_step, "batch_idx", min_args=2)


# The versions whose training loop was compared with the lean loop: tests/release/lean_sources.py.
LEAN_VERSIONS = ("2.6.0", "2.6.1", "2.6.4", "2.6.5", "2.6.6")


def supports_lean_loop() -> bool:
    """Return whether the training loop of this version of Lightning was compared with the lean loop."""
    return lightning_version() in LEAN_VERSIONS


def lightning_version() -> str:
    """Return the version of the bound copy of Lightning."""
    return importlib.import_module(bound_name()).__version__


def require_lean_loop(option: str) -> None:
    """Raise an error if an option needs the lean loop and this version of Lightning was not compared with it.

    Args:
        option: The option, in the user's words.

    Raises:
        LightningMismatchError: If this version of Lightning was not compared.
    """
    if not supports_lean_loop():
        *most, last = LEAN_VERSIONS
        raise LightningMismatchError(
            f"{option}: expected Lightning {', '.join(most)} or {last}, whose training loop it follows line by line, "
            f"got {lightning_version()}. Leave the option out."
        )
