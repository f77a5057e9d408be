"""Ends a run in which every step overflows."""

from __future__ import annotations

from lightning_turbo.amp.grad_scaler import ApexGradScaler
from lightning_turbo.errors import TurboError

__all__ = ["NonFiniteError", "SkipCheck"]

CHECK_EVERY = 50  # steps


class NonFiniteError(TurboError, RuntimeError):
    """Too many optimizer steps in a row were skipped."""


class SkipCheck:
    """Looks at every 50th step whether the last 50 were all skipped; ``ApexAMP`` owns one."""

    def __init__(self) -> None:
        self._steps = 0
        self._skipped = 0

    def after_step(self, scaler: ApexGradScaler, number: int) -> None:
        """Count a step; at every 50th, wait for the device and look.

        Raises:
            NonFiniteError: If no step of the last 50 was made.
        """
        self._steps += 1
        if not scaler.dynamic or self._steps % CHECK_EVERY:
            return
        before, self._skipped = self._skipped, int(scaler.skipped_steps)
        if self._skipped - before == CHECK_EVERY:
            raise NonFiniteError(
                f"The last {CHECK_EVERY} optimizer steps were skipped for inf or NaN in the gradients, the last at "
                f"global_step {number}; the loss scale fell to {scaler.get_scale():g}. Check the loss, the data and "
                "the learning rate; Trainer(detect_anomaly=True) names the operation."
            )
