"""How the validations of a run begin: one before or in which a checkpoint was saved is made as without a stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lightning_turbo._distributed import error_under_way
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.callbacks.resume.counters import validation_follows
from lightning_turbo.callbacks.resume.random_states import random_states, set_random_states
from lightning_turbo.callbacks.resume.restored import Validation
from lightning_turbo.data.loading.epoch_state import used_states
from lightning_turbo.data.loading.loader import PrefetchLoader

__all__ = ["Validations"]


class Validations:
    """The validations of a run, as far as its checkpoints need to know of them.

    ``ExactResume`` makes one for each run. From the start of the training to its end, or an error, this stands around
    the loop of the validation. Always: a checkpoint that is saved before the restored validation is made holds what
    that begins with.
    """

    def __init__(self) -> None:
        self._begun = Validation()  # as the latest validation of this run began
        self._pending: Validation | None = None  # as the first one of this run is to begin, until it is made
        self._is_under_way = False

    def begin(self, trainer: Any) -> list[ReplacedMethod]:
        """Stand around the loop of the validation; return its methods, to be put back at the end."""
        loop = trainer.fit_loop.epoch_loop.val_loop

        def reset(before: Callable[[], None]) -> None:
            self._reset(trainer, before)

        return [ReplacedMethod(loop, "reset", reset), ReplacedMethod(loop, "run", self._run)]

    def restore(self, validation: Validation) -> None:
        """Have the first validation of this run begin as a checkpoint says."""
        self._pending = validation

    def _run(self, run: Callable[[], Any]) -> Any:
        """Run a validation; until it has returned, a checkpoint is one of within it, also after an error."""
        self._is_under_way = True
        outputs = run()
        self._is_under_way = False
        self._pending = None
        return outputs

    def _reset(self, trainer: Any, reset: Callable[[], None]) -> None:
        """Reset the loop, at which its loaders begin: have them begin as is pending, and note how they begin."""
        device = trainer.strategy.root_device
        if self._pending is not None:
            if not _are_made_again(trainer, self._pending):
                _load_whole_epochs(_counting_loaders(trainer), self._pending.loaders)
            if self._pending.random is not None:
                set_random_states(device, self._pending.random)
        self._begun = dataclasses.replace(_next_one(trainer), random=random_states(device))
        reset()

    def describe(self, trainer: Any) -> Validation:
        """Return what a checkpoint tells of the validation with which a run goes on."""
        if self._is_under_way:
            has_failed = error_under_way() is not None
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            is_made = progress.is_last_batch and progress.current.completed == progress.current.ready > 0
            if has_failed or not is_made:
                return dataclasses.replace(self._begun, due=True)
        is_due = validation_follows(trainer)
        # Hooks at its end save after all of its batches: the one with which this run began is made then.
        if self._pending is not None and not self._is_under_way:
            return dataclasses.replace(self._pending, due=self._pending.due or is_due)
        return dataclasses.replace(_next_one(trainer), due=is_due)


def _next_one(trainer: Any) -> Validation:
    """Return how the next validation begins, by the loaders that the loop has."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    # Loaders begin their next epoch, whatever was used of the latest.
    states = used_states([loader.epoch_state().to_dict() for loader in _counting_loaders(trainer)], over=True)
    return Validation(loaders=states, reloaded=loop._last_val_dl_reload_epoch)


def _counting_loaders(trainer: Any) -> list[PrefetchLoader[Any]]:
    """Return the loaders of the validation that count their batches; others would run their own code for a state."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [each for each in loaders if isinstance(each, PrefetchLoader) and each.counts_batches]


def _are_made_again(trainer: Any, pending: Validation) -> bool:
    """Whether a run that was not stopped makes new loaders before this validation, as this run did."""
    every = trainer.reload_dataloaders_every_n_epochs
    return bool(every) and trainer.current_epoch - pending.reloaded >= every


def _load_whole_epochs(loaders: Sequence[PrefetchLoader[Any]], states: Sequence[dict[str, Any]]) -> None:
    """Have loaders begin their next epochs with these states, if they are of the same kinds of loader."""
    if len(loaders) == len(states):
        for loader, state in zip(loaders, states, strict=True):
            if loader.may_begin_with(state):
                loader.load_state_dict(state)
