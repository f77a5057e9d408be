"""Ranks that agree on signals, and then act after the same batch: ``sigterm_every`` of ``TurboDDPStrategy``.

Lightning's handlers call collectives on the rank that was told, while the others may be in those of a step: they hang.
The classes share their ``__dict__`` with the objects that they replace, as those of ``lean`` do.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from lightning_turbo._lightning import SignalConnector, SIGTERMException, TrainingEpochLoop

__all__ = ["AgreeingEpochLoop", "AgreeingSignalConnector"]


class AgreeingEpochLoop(TrainingEpochLoop):
    """The loop over the batches of an epoch, with an agreement every so many batches; every 1: Lightning's own."""

    # Slots keep these attributes out of the shared __dict__, which Lightning saves in checkpoints.
    __slots__ = ("_every",)

    def __init__(self, stock: Any, every: int) -> None:
        self.__dict__ = stock.__dict__
        self._every = every

    def _broadcast_sigterm_tensor(self) -> None:
        if self._every == 1:
            super()._broadcast_sigterm_tensor()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate where it is due; with ``sigterm_every`` above 1, all ranks act on signals after the same batch."""
        if self._every == 1 or self.trainer.world_size == 1:
            super().on_advance_end(data_fetcher)
            return
        # Lightning raises it on this rank alone, as the last thing in the method; the other ranks have to agree first.
        with contextlib.suppress(SIGTERMException):
            super().on_advance_end(data_fetcher)
        if self.batch_progress.total.ready % self._every == 0 or self._num_ready_batches_reached():
            self._agree_on_signals()

    def _agree_on_signals(self) -> None:
        signals: Any = self.trainer._signal_connector
        batches = self.batch_progress.total.ready
        # The maxima of batches and -batches show whether a rank ended its epoch before the others, and asks elsewhere.
        own = [signals.received_sigterm, signals.received_requeue, batches, -batches]
        told = torch.tensor(own, device=self.trainer.strategy.root_device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        received, requeue, *most = told.tolist()
        if most != [batches, -batches]:
            raise RuntimeError(
                f"expected all ranks at the same batch, got this one at batch {batches} of its run and another "
                "that ended its epoch before or after it. Give every rank a training loader with the same number "
                "of batches: set limit_train_batches to the shortest, or drop_last=True."
            )
        if requeue:
            signals.save_and_requeue(requeue)
        signals.received_sigterm = bool(received)
        if signals.received_sigterm and not self._is_training_done:
            raise SIGTERMException


class AgreeingSignalConnector(SignalConnector):
    """Records signals until the ranks agree on them.

    Attributes:
        received_requeue: Number of the signal by which Slurm asks to save and requeue the job; 0 if none came.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__
        self.received_requeue = 0

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self.received_sigterm = True

    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        self.received_requeue = int(signum)

    def save_and_requeue(self, signum: int) -> None:
        """Save a checkpoint and requeue the job, as Lightning does; call it on all ranks."""
        self.received_requeue = 0
        super()._slurm_sigusr_handler_fn(signum, None)  # pyright: ignore[reportArgumentType] - it takes no frame
