"""Ends a run in which every step overflows, and reports where the first non-finite value occurred."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_turbo._lightning import rank_zero_warn
from lightning_turbo._pytree import tensors_in
from lightning_turbo.amp.grad_scaler import ApexGradScaler
from lightning_turbo.amp.gradients import has_non_finite, numbers_of, params_of
from lightning_turbo.amp.run_hooks import add_run_hooks, remove_run_hooks
from lightning_turbo.errors import TurboError, TurboWarning

__all__ = ["NonFiniteError", "NonFiniteGuard"]

LOOK_EVERY = 50  # steps between checks while all is well
LIMIT = 25  # consecutive checked overflows that end a run; each has halved the scale


class NonFiniteError(TurboError, RuntimeError):
    """Too many optimizer steps in a row were skipped."""


class NonFiniteGuard:
    """Checks whether gradients are finite. After an overflow it counts, and checks the outputs of every module.

    The plugin owns one, calls it before and after each step, and ends it with ``remove``. No step waits for it while
    all is well: at every 50th step the device sends a flag, which is read at the 50th step after that, or a later one
    if the device is so far behind. If the flag reports an overflow, every step is checked until one is finite or 25
    consecutive ones are not.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sent: _Flag | None = None
        self._found: Tensor | None = None  # from before the current step, if no scaler checks
        self._in_a_row = 0
        self._handles: list[tuple[nn.Module, RemovableHandle]] = []
        self._first: str | None = None

    def before_step(self, scaler: ApexGradScaler, optimizer: Optimizer) -> None:
        """Check gradients that no scaler checks, before clipping and the step, which may change or release them."""
        is_looked_at = self._handles or (self._steps + 1) % LOOK_EVERY == 0
        self._found = _found_inf(optimizer) if is_looked_at and not scaler.dynamic else None

    def after_step(self, scaler: ApexGradScaler, optimizer: Optimizer, module: Any) -> None:
        """Check the state after a step.

        Raises:
            NonFiniteError: If too many consecutive steps were skipped. The message names the step and the first module
                whose output, or otherwise the first parameter whose gradient, was not finite.

        Warns:
            TurboWarning: The same without a dynamic loss scale, where steps are not skipped.
        """
        if self._handles:
            self._in_a_row += 1
            if not self._found_in_step(scaler, optimizer):
                self.remove()
            elif self._in_a_row == LIMIT:
                self._tell(scaler.dynamic, module)
            return
        self._steps += 1
        # Read the flag sent at the previous check, and send the next one.
        if self._steps % LOOK_EVERY == 0 and (self._sent is None or self._sent.has_arrived()):
            if self._sent is not None and self._sent.is_set():
                self._watch(module)
            self._sent = _Flag(self._found_in_step(scaler, optimizer))

    def _found_in_step(self, scaler: ApexGradScaler, optimizer: Optimizer) -> Tensor:
        """Return on the device whether the last step had non-finite gradients."""
        found = self._found if self._found is not None else scaler.state_of(optimizer).overflow
        return torch.as_tensor(0.0 if found is None else found)

    def _tell(self, skipped: bool, module: Any) -> None:
        what = "were skipped for" if skipped else "were made with"
        text = (
            f"At least {LIMIT} consecutive optimizer steps {what} inf or NaN in the gradients, the last at step "
            f"{module.trainer.global_step}. First non-finite values: {self._where(module)}. Check the loss, the data "
            "and the learning rate"
        )
        if skipped:
            raise NonFiniteError(f"{text}; a lower loss scale did not help.")
        rank_zero_warn(f"{text}.", category=TurboWarning)

    def _watch(self, module: nn.Module) -> None:
        """Check the output of each module from now on."""
        for name, part in module.named_modules():
            handle = part.register_forward_hook(functools.partial(self._look, name))
            add_run_hooks(part, handle)
            self._handles.append((part, handle))

    def remove(self) -> None:
        """Stop checking."""
        for part, handle in self._handles:
            remove_run_hooks(part, [handle])
        self._handles.clear()
        self._first = self._sent = self._found = None
        self._in_a_row = 0

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._first is None and any(map(_is_bad, tensors_in(output))):
            self._first = f"the output of module {name!r} ({type(module).__name__})"

    def _where(self, module: nn.Module) -> str:
        """Return what was first non-finite: an output, otherwise a parameter, otherwise only the gradients."""
        bad = (f"the parameter {name!r}" for name, param in module.named_parameters() if _is_bad(param))
        return self._first or next(bad, "no module's output: only the gradients overflow")


class _Flag:
    """A value on its way from the device to the host, which does not wait for it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=value.is_cuda)  # from CUDA into pinned memory
        self._event = torch.cuda.Event() if value.is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(value.device))

    def has_arrived(self) -> bool:
        """Return whether the device has sent the value; before that, the memory holds anything."""
        return self._event is None or self._event.query()

    def is_set(self) -> bool:
        """Return whether the value is not zero."""
        return bool(self._value.item())


def _found_inf(optimizer: Optimizer) -> Tensor:
    """Return on the device whether an optimizer's gradients are non-finite."""
    grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
    return has_non_finite(grads) if grads else torch.zeros(())


def _is_bad(tensor: Tensor) -> bool:
    # torch has no isfinite for other layouts, such as compressed rows.
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return False
    numbers = numbers_of(tensor)
    return numbers.is_floating_point() and not bool(torch.isfinite(numbers).all())
