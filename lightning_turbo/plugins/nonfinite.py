"""Ends a run whose every step overflows, and says where the first non-finite value came from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_turbo._pytree import tensors_in
from lightning_turbo.errors import TurboError

__all__ = ["NonFiniteError", "NonFiniteWatch"]


class NonFiniteError(TurboError, RuntimeError):
    """Too many optimizer steps in a row were skipped."""


class NonFiniteWatch:
    """Counts skipped steps in a row; near the limit it looks at the outputs of every module.

    Args:
        module: The LightningModule.
        limit: Skipped steps in a row that end the run.
    """

    def __init__(self, module: Any, limit: int) -> None:
        self.module = module
        self.limit = limit
        self._handles: list[Any] = []
        self._first: str | None = None

    def after_step(self, skips_in_a_row: int) -> None:
        """Take note of the number of skips in a row.

        Raises:
            NonFiniteError: If the limit is reached; the message names the step and the first module whose
                output, or else the first parameter whose gradient, was not finite.
        """
        if skips_in_a_row >= self.limit:
            raise NonFiniteError(
                f"{skips_in_a_row} optimizer steps in a row were skipped for inf or NaN in the gradients, the last at "
                f"step {self.module.trainer.global_step}, and a lower loss scale did not help. First non-finite "
                f"values: {self._where()}. Look at the loss, the data and the learning rate, or raise the limit: "
                f"ApexAMP(..., max_consecutive_skips={2 * self.limit})."
            )
        if skips_in_a_row == 0:
            self.remove()
        elif skips_in_a_row >= self.limit - 3 and not self._handles:
            self._watch()

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
