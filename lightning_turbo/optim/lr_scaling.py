"""Learning rates for large batches: by how much larger, and how to get there gently."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.optim.skipped_steps import overflow_flag, was_skipped

__all__ = ["LearningRateScaling", "lr_factor"]

Rule = Literal["linear", "sqrt"] | None


def lr_factor(rule: Rule, batch_size: int, base_batch_size: int) -> float:
    """Return by how much the learning rate grows with the batch.

    Args:
        rule: ``"linear"``: ``batch_size / base_batch_size`` (for SGD); ``"sqrt"``: its square root (for Adam and
            LAMB); ``None``: 1.
        batch_size: Samples per optimizer step, over all ranks, at least 1.
        base_batch_size: Samples per optimizer step for which the learning rate was chosen, at least 1.

    Raises:
        ValueError: If the rule is unknown or a size is below 1.

    Example:
        >>> lr_factor("linear", 1024, 256), lr_factor("sqrt", 1024, 256)
        (4.0, 2.0)

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017; Krizhevsky, One Weird Trick, 2014 (square root).
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        expect(is_whole(size, 1), name, size, "a whole number of samples of at least 1")
    ratio = batch_size / base_batch_size
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), None: 1.0}
    expect(rule in factors, "lr_rule", rule, "'linear', 'sqrt' or None")
    return factors[rule]


class LearningRateScaling:
    """Multiply an optimizer's learning rates by a factor, for the time of each ``optimizer.step()`` alone.

    Whatever sets the rates, a schedule of torch's, one of another package or the loop itself, computes from rates that
    were never changed; only the step sees the larger ones. So every schedule is scaled, and a ``state_dict`` holds the
    rates without the factor at any time. In the first ``warmup_steps`` steps the factor rises from 1 in a line. A step
    that a loss scaler skipped does not count.

    Args:
        optimizer: The optimizer whose steps are scaled.
        factor: Finite and above 0.
        warmup_steps: Optimizer steps until the whole factor is reached, at least 0.
        done: Steps already made, for a run that is resumed; at least 0.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer.
        ValueError: If a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
        >>> scaling = LearningRateScaling(optimizer, factor=4.0, warmup_steps=3)
        >>> [scaling.multiplier(step) for step in range(5)]
        [1.0, 2.0, 3.0, 4.0, 4.0]

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, gradual warm-up.
    """

    def __init__(self, optimizer: Optimizer, factor: float, warmup_steps: int = 0, done: int = 0) -> None:
        expect(isinstance(optimizer, Optimizer), "optimizer", optimizer, "a torch.optim.Optimizer", TypeError)
        expect(is_number(factor) and factor > 0, "factor", factor, "a finite number above 0")
        for name, value in (("warmup_steps", warmup_steps), ("done", done)):
            expect(is_whole(value, 0), name, value, "a whole number of at least 0")
        self.optimizer, self.factor, self.warmup_steps, self.done = optimizer, factor, warmup_steps, done
        self._rates: list[Any] | None = None  # of the groups, while they are scaled
        self._follow()

    def multiplier(self, step: int) -> float:
        """Return the factor of the learning rates in a step, counted from 0."""
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
        self._follow()  # the copy of an optimizer has no hooks

    def _follow(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._scale),
            self.optimizer.register_step_post_hook(self._count),
            self.optimizer.register_state_dict_post_hook(self._save_unscaled),
        ]

    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # a step that raised has left the rates scaled
        multiplier = self.multiplier(self.done)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * multiplier

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        # Past the warm-up nothing asks for the count, so that a flag on a device need not be waited for.
        if self.done >= self.warmup_steps or not was_skipped(overflow_flag(optimizer)):
            self.done += 1

    def _save_unscaled(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A checkpoint may be written within a step: from its closure, or by a signal.
        for group, rate in zip(state_dict["param_groups"], self._rates or (), strict=False):
            group["lr"] = rate

    def _restore(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates or (), strict=False):
            group["lr"] = rate
        self._rates = None
