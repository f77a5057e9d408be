"""Remedies that are safe at run time and can be undone."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_turbo._lightning import Callback, LightningModule, Trainer
from lightning_turbo.doctor.advice import Finding
from lightning_turbo.doctor.facts import Facts

__all__ = ["Mends", "Undo"]

WORKERS = 4
"""At most this many workers are started unasked."""


class Mends:
    """Applies what is safe and undoes it when the run is over.

    Args:
        trainer: The Trainer of the run.
        anomaly_before: Whether anomaly mode was on before the Trainer began.
    """

    def __init__(self, trainer: Any, anomaly_before: bool = False) -> None:
        self.trainer = trainer
        self.anomaly_before = anomaly_before
        self._undo: list[Callable[[], None]] = []

    @property
    def applied(self) -> bool:
        """Whether anything was changed."""
        return bool(self._undo)

    def apply(self, findings: list[Finding], facts: Facts) -> list[Finding]:
        """Mend what can be mended, and return the findings with what was done."""
        remedies = {
            "anomaly-mode": self._anomaly,
            "benchmark-off": self._benchmark_on,
            "benchmark-thrashes": self._benchmark_off,
            "pin-memory": self._pin,
            "workers": self._workers,
        }
        result = []
        for finding in findings:
            done = remedies[finding.rule](facts) if finding.rule in remedies else ""
            result.append(dataclasses.replace(finding, mended=done))
        return result

    def undo(self) -> None:
        """Put everything back, in reverse order."""
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _anomaly(self, facts: Facts) -> str:
        if not torch.is_anomaly_enabled():
            return ""
        torch.autograd.set_detect_anomaly(False)
        self._undo.append(self._anomaly_as_before)
        return "anomaly detection is off for the rest of the run"

    def _anomaly_as_before(self) -> None:
        torch.autograd.set_detect_anomaly(self.anomaly_before)

    def _benchmark_on(self, facts: Facts) -> str:
        self._set(torch.backends.cudnn, "benchmark", True)
        return "cudnn.benchmark is on for the rest of the run"

    def _benchmark_off(self, facts: Facts) -> str:
        self._set(torch.backends.cudnn, "benchmark", False)
        return "cudnn.benchmark is off for the rest of the run"

    def _pin(self, facts: Facts) -> str:
        if self._last_epoch():
            return ""
        self._set(self.trainer.train_dataloader, "pin_memory", True)
        return "pin_memory=True from the next epoch on"

    def _workers(self, facts: Facts) -> str:
        loader: Any = self.trainer.train_dataloader
        if self._last_epoch() or multiprocessing.get_start_method() != "fork" or facts.cores < 2:
            return ""
        if loader.num_workers == 0:
            if isinstance(loader.dataset, IterableDataset):
                return ""  # each worker would yield all of it, unless it splits itself
            count = min(WORKERS, facts.cores - 1)
            self._set(loader, "num_workers", count)
            self._set(loader, "prefetch_factor", 2)
            return f"num_workers={count} from the next epoch on; random augmentations draw other numbers than without"
        if loader.prefetch_factor == 1:
            self._set(loader, "prefetch_factor", 2)
            return "prefetch_factor=2 from the next epoch on"
        return ""

    def _last_epoch(self) -> bool:
        """Whether no epoch follows in which a loader could be started anew."""
        last = self.trainer.max_epochs
        return last is not None and 0 <= last <= self.trainer.current_epoch + 1


class Undo(Callback):
    """Takes the doctor's place in the Trainer, does nothing in any step, and undoes the mends when ``fit`` ends.

    Args:
        mends: What was mended.
    """

    def __init__(self, mends: Mends) -> None:
        self.mends = mends

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo at the end."""
        self._undo(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo after an error."""
        self._undo(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo, should the run have ended in yet another way."""
        self._undo(trainer)

    def _undo(self, trainer: Any) -> None:
        self.mends.undo()
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
