"""Ends a run whose every step overflows, and says where the first non-finite value came from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_turbo._lightning import rank_zero_warn
from lightning_turbo._pytree import tensors_in
from lightning_turbo.amp.grad_scaler import ApexGradScaler, has_non_finite, params_of
from lightning_turbo.errors import TurboError, TurboWarning

__all__ = ["NonFiniteError", "NonFiniteGuard"]

LOOK_EVERY = 50  # steps
WATCH = 3  # steps before the limit, from which on outputs are looked at


class NonFiniteError(TurboError, RuntimeError):
    """Too many optimizer steps in a row were skipped."""


class NonFiniteGuard:
    """Counts steps in a row with non-finite gradients; near the limit it looks at the outputs of every module.

    The plugin makes one when training begins and asks it after each step. Where the host does not know by itself what
    was skipped, with fused optimizers and without a loss scale, it looks at every 50th step, and once something is
    wrong at each.

    Args:
        module: The LightningModule.
        limit: Steps in a row that are too many.
    """

    def __init__(self, module: Any, limit: int) -> None:
        self.module = module
        self.limit = limit
        self._steps = 0
        self._in_a_row = 0  # without a loss scale
        self._handles: list[Any] = []
        self._first: str | None = None

    def after_step(self, scaler: ApexGradScaler, optimizer: Optimizer) -> None:
        """Look at what a step left.

        Raises:
            NonFiniteError: If too many steps in a row were skipped; the message names the step and the first module
                whose output, or else the first parameter whose gradient, was not finite.

        Warns:
            TurboWarning: The same without a loss scale, where no step is skipped.
        """
        self._steps += 1
        if not self._is_due(scaler):
            return
        in_a_row = int(scaler.skips_in_a_row) if scaler.dynamic else self._count(optimizer)
        if in_a_row == 0:
            self.remove()
        elif in_a_row >= self.limit and (self._handles or self.limit < WATCH):
            self._tell(in_a_row, scaler.dynamic)
        elif not self._handles and (in_a_row >= self.limit - WATCH or not scaler.dynamic):
            self._watch()

    def _is_due(self, scaler: ApexGradScaler) -> bool:
        known = scaler.dynamic and isinstance(scaler.skips_in_a_row, int)
        return known or bool(self._handles) or self._steps % LOOK_EVERY == 0

    def _count(self, optimizer: Optimizer) -> int:
        grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
        self._in_a_row = (self._in_a_row + 1) * (bool(grads) and bool(has_non_finite(grads)))
        return self._in_a_row

    def _tell(self, in_a_row: int, skipped: bool) -> None:
        what = "were skipped for" if skipped else "were made with"
        text = (
            f"{in_a_row} optimizer steps in a row {what} inf or NaN in the gradients, the last at step "
            f"{self.module.trainer.global_step}. First non-finite values: {self._where()}. Look at the loss, the data "
            "and the learning rate"
        )
        if skipped:
            raise NonFiniteError(
                f"{text}; a lower loss scale did not help. Or raise the limit: set max_consecutive_skips = "
                f"{2 * self.limit} on the plugin."
            )
        if in_a_row == self.limit:
            rank_zero_warn(f"{text}.", category=TurboWarning)

    def _watch(self) -> None:
        """Look at the output of each module from now on."""
        for name, module in self.module.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(functools.partial(self._look, name)))

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first = None

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._first is None and any(map(_is_bad, tensors_in(output))):
            self._first = f"the output of module {name!r} ({type(module).__name__})"

    def _where(self) -> str:
        """Return what was not finite first: an output, else a parameter, else the gradients alone."""
        bad = (f"the parameter {name!r}" for name, param in self.module.named_parameters() if _is_bad(param))
        return self._first or next(bad, "no module's output: only the gradients overflow")


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
