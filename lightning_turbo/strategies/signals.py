"""Ranks that tell one another of signals on the host, and act after the same batch."""

from __future__ import annotations

from typing import Any

from lightning_turbo._lightning import SignalConnector, SIGTERMException, TrainingEpochLoop

__all__ = ["InPlaceOf", "SignalConnectorOfRanks", "SignalEpochLoop"]


class InPlaceOf:
    """An object that stands in the place of one of Lightning's for a fit.

    Both have one ``__dict__``: what either counts, the other has counted, and a checkpoint holds no other names. So
    these classes have no attributes of their own.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__


class SignalConnectorOfRanks(InPlaceOf, SignalConnector):
    """Records signals until all ranks know of them.

    Lightning's handlers call collectives on the rank that was told, while the others may be in those of a step.
    """

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        """Note SIGTERM. Follows ``_SignalConnector._sigterm_notifier_fn``."""
        strategy: Any = self.trainer.strategy
        if strategy.signals is None:  # the run is over, and ends by itself
            self.received_sigterm = True
            return
        if not strategy.signals.sigterm and strategy.launcher is not None:
            strategy.launcher.kill(signum)
        strategy.signals.sigterm = True

    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        """Note Slurm's signal. Follows ``_SignalConnector._slurm_sigusr_handler_fn``."""
        strategy: Any = self.trainer.strategy
        if strategy.signals is not None:
            strategy.signals.requeue = int(signum)

    def save_and_requeue(self, signum: int) -> None:
        """Save a checkpoint and requeue the job, as Lightning does; call it on all ranks."""
        super()._slurm_sigusr_handler_fn(signum, None)  # pyright: ignore[reportArgumentType] - it takes no frame


class SignalEpochLoop(InPlaceOf, TrainingEpochLoop):
    """The loop over the batches of an epoch; on several ranks all act on signals after the same batch."""

    def _broadcast_sigterm_tensor(self) -> None:
        """Leave the broadcast out. Follows ``_TrainingEpochLoop._broadcast_sigterm_tensor``."""
        trainer: Any = self.trainer
        if trainer.strategy.signals is None:
            super()._broadcast_sigterm_tensor()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate where it is due, and act on signals. Follows ``_TrainingEpochLoop.on_advance_end``."""
        # First what is due after this batch, so that a checkpoint for Slurm counts the validation as made.
        super().on_advance_end(data_fetcher)
        trainer: Any = self.trainer
        # A checkpoint holds no gradients, so that a run is left between optimizer steps, not in mid-window.
        if trainer.strategy.signals is None or self._should_accumulate():
            return
        sigterm, requeue = trainer.strategy.signals.exchange()
        if requeue:
            trainer._signal_connector.save_and_requeue(requeue)
        if sigterm:
            trainer._signal_connector.received_sigterm = True
            if not self._is_training_done:
                raise SIGTERMException
