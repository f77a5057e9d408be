"""Learning rates for large batches: the factor, and its warm-up."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_turbo._checks import check_choice, check_count, expect, is_number
from lightning_turbo._skipped_steps import skip_flag, was_skipped

__all__ = ["LearningRateScaling", "lr_factor"]

Rule = Literal["linear", "sqrt"] | None


def lr_factor(rule: Rule, batch_size: int, base_batch_size: int) -> float:
    """Return the factor of the learning rate for a larger batch.

    Args:
        rule: ``"linear"``: ``batch_size / base_batch_size`` (for SGD); ``"sqrt"``: its square root (for Adam and
            LAMB); ``None``: 1.
        batch_size: Samples per optimizer step, over all ranks, at least 1.
        base_batch_size: Samples per optimizer step for which the learning rate was tuned, at least 1.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If the rule is unknown or a size is below 1.

    Example:
        >>> lr_factor("linear", 1024, 256), lr_factor("sqrt", 1024, 256)
        (4.0, 2.0)

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017; Krizhevsky, One Weird Trick, 2014 (square root).
    """
    ratio = check_count("batch_size", batch_size) / check_count("base_batch_size", base_batch_size)
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), None: 1.0}
    check_choice("lr_rule", rule, list(factors))
    return factors[rule]


class LearningRateScaling:
    """Multiply an optimizer's learning rates by a factor during each ``optimizer.step()``.

    The rates change back after the step, so that every schedule, of torch or of another package, reads and writes rates
    without the factor. A ``state_dict`` always holds the rates without the factor. In the first ``warmup_steps`` steps
    the factor rises linearly from 1. A step that a loss scaler skipped does not count.

    Args:
        optimizer: The optimizer.
        factor: Factor of the learning rates, finite and above 0.
        warmup_steps: Optimizer steps until the whole factor is reached, at least 0.
        done: Optimizer steps before this object was made, for a resumed run; at least 0.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer, or a number of steps not an integer.
        ValueError: If a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
        >>> scaling = LearningRateScaling(optimizer, factor=4.0, warmup_steps=3)
        >>> [scaling.multiplier(step) for step in range(5)]
        [1.0, 2.0, 3.0, 4.0, 4.0]

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.
    """

    def __init__(self, optimizer: Optimizer, factor: float, warmup_steps: int = 0, done: int = 0) -> None:
        expect(isinstance(optimizer, Optimizer), "optimizer", optimizer, "a torch.optim.Optimizer", TypeError)
        expect(is_number(factor) and factor > 0, "factor", factor, "a finite number above 0")
        check_count("warmup_steps", warmup_steps, 0)
        check_count("done", done, 0)
        self.optimizer, self.factor, self.warmup_steps, self.done = optimizer, factor, warmup_steps, done
        self._rates: list[Any] | None = None  # without the factor, during a step
        self._register_hooks()

    def multiplier(self, step: int) -> float:
        """Return the factor of the learning rates in a step, where 0 is the first."""
        if step >= self.warmup_steps:
            return self.factor
        return 1.0 + (self.factor - 1.0) * step / self.warmup_steps

    def remove(self) -> None:
        """Stop scaling the optimizer's steps."""
        self._restore()
        for handle in self._handles:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register_hooks()  # the copy of an optimizer has no hooks

    def _register_hooks(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._scale),
            self.optimizer.register_step_post_hook(self._count),
            self.optimizer.register_state_dict_post_hook(self._save_unscaled),
        ]

    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # a step that raised an exception has left the rates scaled
        multiplier = self.multiplier(self.done)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * multiplier

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        # After the warm-up the count has no effect: do not wait for the device to read the flag.
        if self.done >= self.warmup_steps or not was_skipped(skip_flag(optimizer)):
            self.done += 1

    def _save_unscaled(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A closure or a signal handler may write a checkpoint during a step.
        for group, rate in zip(state_dict["param_groups"], self._rates or (), strict=False):
            group["lr"] = rate

    def _restore(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates or (), strict=False):
            group["lr"] = rate
        self._rates = None
