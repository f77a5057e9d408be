"""Endless training: where the script's training would end, it starts over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_turbo._replaced import ReplacedMethod

__all__ = ["Endless"]


class Endless:
    """Lets ``fit`` run as long as needed, although the script still reads its ``max_epochs`` and ``max_steps``.

    At the end of the last epoch, and when a callback such as ``EarlyStopping`` stops the training, the counts of
    epochs, steps and batches and the learning rate schedulers are reset to the start of the training; the weights are
    kept. So every number that a script reads also occurs in its normal run. Created when training starts, and never
    undone, because the process ends inside the training.

    Args:
        trainer: A Trainer whose training begins.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.fit_loop = trainer.fit_loop
        epoch_loop = self.fit_loop.epoch_loop
        loops = self.fit_loop, epoch_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization
        self._progress = [
            (value, copy.deepcopy(value.state_dict()))
            for loop in loops
            for value in vars(loop).values()
            if type(value).__name__.endswith("Progress")
        ]
        numbers = (
            (self.fit_loop, "_last_train_dl_reload_epoch"),
            (epoch_loop, "_batches_that_stepped"),
            (epoch_loop.val_loop, "_last_val_dl_reload_epoch"),
        )
        self._numbers = [(loop, name, getattr(loop, name)) for loop, name in numbers]
        self._schedules = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict()))
            for config in trainer.lr_scheduler_configs
            if hasattr(config.scheduler, "load_state_dict")
        ]
        self._options = [
            (group, {key: _copy(value) for key, value in group.items() if key != "params"})
            for optimizer in trainer.optimizers
            for group in getattr(optimizer, "param_groups", ())
        ]
        ReplacedMethod(self.fit_loop, "on_advance_end", self._end_epoch)

    def _end_epoch(self, end: Callable[[], None]) -> None:
        end()
        if self.fit_loop.done:
            self._begin_again()

    def _begin_again(self) -> None:
        self.trainer.should_stop = False
        for progress, state in self._progress:
            progress.load_state_dict(copy.deepcopy(state))
        for loop, name, value in self._numbers:
            setattr(loop, name, value)
        for schedule, state in self._schedules:
            schedule.load_state_dict(copy.deepcopy(state))
        for group, options in self._options:
            for key, value in options.items():
                if isinstance(value, Tensor):  # a captured graph may read it
                    group[key].copy_(value)
                else:
                    group[key] = value
        # Lightning creates the iterator of the first epoch before the training, not in the epoch.
        if self.trainer.current_epoch == 0:
            iter(self.fit_loop._data_fetcher)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
