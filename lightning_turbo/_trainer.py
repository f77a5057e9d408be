"""What the adapters read from a Trainer and its parts, where Lightning has no public name for it."""

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
    "is_asked_by_loop",
    "is_fitting",
    "keep_handlers",
    "lightning_version",
    "loaded_checkpoint",
    "owner_of_training_data",
    "refuse_as_callback",
    "replace_strategy",
    "requeue_signal",
    "require_lean_loop",
    "supports_lean_loop",
    "takes_batch_index",
    "warn_of_open_window",
]


def is_fitting(trainer: Any) -> bool:
    """Whether a Trainer is in ``fit``, not in validate, test or predict."""
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def gives_sampler(trainer: Any) -> bool:
    """Return whether a Trainer gives loaders a sampler that shares their samples among the ranks."""
    return trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler


def batch_limit(trainer: Any, loader: Any) -> float:
    """Return how many batches a Trainer takes from one of its loaders in an epoch at most.

    Infinity where it does not say: before its loop has counted its loaders, and while it does not run.
    """
    # What its loops still have then is from the run before.
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


def is_asked_by_loop() -> bool:
    """Whether it is a loop of a Trainer that asks for what is called now, and not a callback or a step that it runs.

    Loops take loaders through Lightning's ``CombinedLoader``, whose frames are then next to the caller's. The loops say
    nothing that could be asked for it: an epoch may have been left early, and a callback may look before its first
    batch.
    """
    frame = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").endswith(".utilities.combined_loader"):
            return True
        frame = frame.f_back
    return False


def combined_loader(trainer: Any) -> Any:
    """Return the CombinedLoader of a Trainer's training loaders."""
    return trainer.fit_loop._combined_loader


def owner_of_training_data(trainer: Any) -> Any:
    """Return what has ``train_dataloader``: the module or the datamodule, or the loader that ``fit`` got."""
    return trainer.fit_loop._data_source.instance


def loaded_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that a Trainer is about to restore, empty if there is none.

    Lightning gives a plugin only the state under its own class's name; others' states are read here.
    """
    return trainer._checkpoint_connector._loaded_checkpoint


def warn_of_open_window(trainer: Any, checkpoint: dict[str, Any], speaker: Any) -> None:
    """Warn if a checkpoint was saved in the middle of an accumulation window, whose gradients no checkpoint holds.

    Several callbacks and the precision plugin ask for it, each with a class attribute ``warns_of_open_window``; the
    first of them speaks.

    Args:
        trainer: The Trainer that continues from it.
        checkpoint: What it loaded.
        speaker: Who asks.
    """
    others = [*trainer.callbacks, trainer.precision_plugin]  # in the order in which Lightning shows them a checkpoint
    if next(each for each in others if getattr(each, "warns_of_open_window", False)) is not speaker:
        return
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    # The window may have another length now, and Lightning saves none: ExactResume does, for each rank.
    (saved, *_) = checkpoint.get("lightning_turbo.exact_resume") or [{}]
    length = saved.get("accumulate_grad_batches", trainer.accumulate_grad_batches)
    done = loop.get("current", {}).get("processed", 0) % length
    # Lightning steps at the last batch of an epoch, however long the window is.
    if done and not loop.get("is_last_batch"):
        rank_zero_warn(
            f"The checkpoint was saved after {done} of {length} batches of an accumulation window, and holds no "
            "gradients of them: the window begins again with the batches that are left. Save at the end of a window, "
            "as every_n_train_steps of ModelCheckpoint does.",
            category=TurboWarning,
        )


def hooks_before_transfer(module: Any, datamodule: Any) -> list[str]:
    """Return the hooks, overridden in a module or a datamodule, that see a batch before its copy to the device."""
    owners = [(module, LightningModule), (datamodule, LightningDataModule)]
    return [
        f"{type(owner).__name__}.{name}"
        for owner, base in owners
        for name in ("on_before_batch_transfer", "transfer_batch_to_device")
        if owner is not None and not inherits(owner, base, (name,))
    ]


def callbacks_named(*names: str) -> tuple[type, ...]:
    """Return Lightning's callbacks of these names, as far as this version has them."""
    callbacks = importlib.import_module(f"{bound_name()}.callbacks")
    return tuple(getattr(callbacks, name) for name in names if hasattr(callbacks, name))


def refuse_as_callback(instead: str) -> property:
    """Return a property ``state_key``, which a Trainer asks of each callback, that says where an object belongs."""

    def state_key(self: Any) -> str:
        raise TypeError(f"callbacks: expected callbacks, got {type(self).__name__}. Pass it as Trainer({instead}).")

    return property(state_key)


def requeue_signal(trainer: Any) -> int | None:
    """Return the number of the signal on which Lightning requeues a Slurm job; ``None`` if it requeues none."""
    environment = trainer._accelerator_connector.cluster_environment
    requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return int(environment.requeue_signal) if requeues and environment.requeue_signal is not None else None


def handlers_before_run(trainer: Any) -> dict[int, Any]:
    """Return the handlers of signals that the program had before the run, which Lightning puts back after it."""
    return trainer._signal_connector._original_handlers


def keep_handlers(trainer: Any, handlers: dict[int, Any]) -> None:
    """Have Lightning put these handlers of signals in place after the run, where it would put the program's back."""
    trainer._signal_connector._original_handlers.update(handlers)


def replace_strategy(trainer: Any, strategy: Any) -> None:
    """Give a Trainer in construction another strategy, as ``Trainer(strategy=...)`` would have."""
    # The connector has made its choice by now, and the Trainer asks it each time.
    trainer._accelerator_connector.strategy = strategy


def takes_batch_index(training_step: Any) -> bool:
    """Whether Lightning passes the index of the batch to this ``training_step``."""
    signatures = importlib.import_module(f"{bound_name()}.utilities.signature_utils")
    return signatures.is_param_in_hook_signature(training_step, "batch_idx", min_args=2)


# Those whose training loop, as the lean loop follows it, is the one that was read: tests/release/lean_sources.py.
LEAN_VERSIONS = ("2.6.0", "2.6.1", "2.6.4", "2.6.5", "2.6.6")


def supports_lean_loop() -> bool:
    """Whether Lightning is one whose training loop was compared with what the lean loop follows line by line."""
    return lightning_version() in LEAN_VERSIONS


def lightning_version() -> str:
    """Return the version of Lightning."""
    return importlib.import_module(bound_name()).__version__


def require_lean_loop(option: str) -> None:
    """Refuse an option that needs a training loop of Lightning that was compared.

    Args:
        option: As the user wrote it, for the message.

    Raises:
        LightningMismatchError: If Lightning is another one.
    """
    if not supports_lean_loop():
        *most, last = LEAN_VERSIONS
        raise LightningMismatchError(
            f"{option}: expected Lightning {', '.join(most)} or {last}, whose training loop it follows line by line, "
            f"got {lightning_version()}. Leave the option out."
        )
