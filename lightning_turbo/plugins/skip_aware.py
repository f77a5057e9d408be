"""Schedulers that wait when an optimizer step was skipped."""

from __future__ import annotations

import sys
from typing import Any

from lightning_turbo._lightning import LRSchedulerConfig
from lightning_turbo.amp.grad_scaler import ApexGradScaler

__all__ = ["SkipAwareConfig", "wrap_scheduler"]


class SkipAwareConfig(LRSchedulerConfig):
    """A scheduler's configuration whose frequency is out of reach after a skipped step.

    ``ApexAMP`` puts it in place of Lightning's own when it connects, for as long as the Trainer has the scheduler.

    Lightning steps a scheduler when the batch's number is a multiple of its frequency, which it reads only then. No
    hook lies between that and the scheduler's step, so the frequency has to say it.
    """

    _scaler: ApexGradScaler

    @property
    def frequency(self) -> int:
        """Optimizer steps between two steps of the scheduler."""
        skipped = self._scaler.was_skipped(self.scheduler.optimizer)
        return sys.maxsize if skipped else self.__dict__["frequency"]

    @frequency.setter
    def frequency(self, value: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["frequency"] = value


def wrap_scheduler(config: Any, scaler: ApexGradScaler) -> Any:
    """Return a configuration that is like ``config``, but waits on steps that ``scaler`` skips."""
    if config.interval != "step" or not hasattr(config.scheduler, "optimizer"):
        return config
    new = object.__new__(SkipAwareConfig)
    new.__dict__.update(config.__dict__)
    new._scaler = scaler
    return new
