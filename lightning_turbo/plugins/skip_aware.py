"""Schedulers that wait when an optimizer step was skipped."""

from __future__ import annotations

import sys
from typing import Any

from lightning_turbo._lightning import LRSchedulerConfig

__all__ = ["SkipAwareConfig"]


class SkipAwareConfig(LRSchedulerConfig):
    """A scheduler's configuration whose frequency is out of reach after a skipped step.

    Lightning steps a scheduler when the batch's number is a multiple of its frequency. The flag is asked for only
    when Lightning is about to step, and only with a dynamic loss scale.
    """

    _plugin: Any  # ApexAMP

    @classmethod
    def around(cls, config: Any, plugin: Any) -> SkipAwareConfig:
        """Return a configuration that is like ``config`` but for skipped steps."""
        new = object.__new__(cls)
        new.__dict__.update(config.__dict__)
        new._plugin = plugin
        return new

    @property
    def frequency(self) -> int:
        """Optimizer steps between two steps of the scheduler."""
        return sys.maxsize if self._plugin.skipped_last_step else self.__dict__["frequency"]

    @frequency.setter
    def frequency(self, value: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["frequency"] = value
