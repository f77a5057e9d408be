"""Learning rates for large batches: how much larger, in which places, and how to get there gently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._checks import is_number, is_whole

__all__ = ["LearningRateWarmup", "every_schedule", "lr_factor", "scale_learning_rates"]

Rule = Literal["linear", "sqrt"] | None

# Where torch's optimizers and schedulers keep learning rates.
GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_LISTS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
SCHEDULER_NUMBERS = ("eta_min",)


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
        if not is_whole(size, 1):
            raise ValueError(f"{name}={size!r}; accepted is a whole number, at least 1. Give a number of samples.")
    if rule is None:
        return 1.0
    if rule == "linear":
        return batch_size / base_batch_size
    if rule == "sqrt":
        return math.sqrt(batch_size / base_batch_size)
    raise ValueError(f"lr_rule={rule!r}; accepted are 'linear', 'sqrt' and None. Choose one of them.")


@torch.no_grad()
def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers, and of the schedulers built on them, by one factor.

    Every rate that torch's own classes keep is scaled: base, highest and lowest rates, and those of schedulers inside
    ``SequentialLR`` and ``ChainedScheduler``. A schedule keeps its shape.

    Args:
        optimizers: Their parameter groups are changed.
        schedulers: torch's schedulers, or others that compute from ``base_lrs`` or from the groups' rates.
        factor: Dimensionless, finite and above 0.

    Raises:
        ValueError: If ``factor`` is not finite or not above 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scale_learning_rates([optimizer], [], 4.0)
        >>> optimizer.param_groups[0]["lr"]
        2.0
    """
    if not is_number(factor) or factor <= 0:
        raise ValueError(f"factor={factor!r}; accepted is a finite number above 0. Check the batch sizes.")
    done: set[Tensor] = set()

    def scaled(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value * factor
        # A rate in a tensor may be captured in a graph: it keeps its place, which groups and schedules may share.
        if value not in done:
            done.add(value)
            value.mul_(factor)
        return value

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in GROUP_KEYS:
                if group.get(key) is not None:
                    group[key] = scaled(group[key])
    for scheduler in every_schedule(schedulers):
        for name in SCHEDULER_LISTS:
            if isinstance(values := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [scaled(value) for value in values])
        for name in SCHEDULER_NUMBERS:
            if (value := getattr(scheduler, name, None)) is not None:
                setattr(scheduler, name, scaled(value))


def every_schedule(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield each schedule once, with those inside ``SequentialLR`` and ``ChainedScheduler``.

    Args:
        schedulers: torch's schedulers, or others.
    """
    done: set[int] = set()
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in done:
            done.add(id(scheduler))
            waiting.extend(getattr(scheduler, "_schedulers", ()))
            yield scheduler


class LearningRateWarmup:
    """Lower an optimizer's learning rate for its first steps, from ``1 / factor`` up to 1 of what it is set to.

    The rate is lowered for the time of ``optimizer.step()`` alone and put back after it, so schedulers that compute
    from the last rate are not disturbed, and a step that a loss scaler skipped does not count. A ``state_dict`` of the
    optimizer holds the full rate at any time.

    Args:
        optimizer: The optimizer to warm up.
        factor: By how much its learning rate was raised, finite and above 0; at least 1 for a warm-up.
        steps: Length of the warm-up in optimizer steps; 0 does nothing.
        done: Steps already made, for a run that goes on; at least 0.

    Raises:
        TypeError: If ``optimizer`` is no optimizer.
        ValueError: If a number is out of range.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
        >>> warmup = LearningRateWarmup(optimizer, factor=4.0, steps=3)
        >>> [round(warmup.share(step), 2) for step in range(4)]
        [0.25, 0.5, 0.75, 1.0]

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, gradual warm-up.
    """

    def __init__(self, optimizer: Optimizer, factor: float, steps: int, done: int = 0) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={optimizer!r}: accepted is a torch.optim.Optimizer. Pass the optimizer itself.")
        if not is_number(factor) or factor <= 0:
            raise ValueError(
                f"factor={factor!r}; accepted is a finite number above 0. Give what the rate was raised by."
            )
        for name, value in (("steps", steps), ("done", done)):
            if not is_whole(value, 0):
                raise ValueError(f"{name}={value!r}; accepted is a whole number, at least 0. Give optimizer steps.")
        self.optimizer, self.factor, self.steps, self.done = optimizer, factor, steps, done
        self._set: list[Any] | None = None
        self._follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._follow()  # the copy of an optimizer has no hooks

    def _follow(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._lower),
            self.optimizer.register_step_post_hook(self._put_back),
            self.optimizer.register_state_dict_post_hook(self._save_full),
        ]

    def share(self, step: int) -> float:
        """Return the share of the full learning rate in a step, counted from 0."""
        if step >= self.steps:
            return 1.0
        return 1 / self.factor + (1 - 1 / self.factor) * step / self.steps

    def remove(self) -> None:
        """Stop following the optimizer and put its learning rate back."""
        self._restore()
        for handle in self._handles:
            handle.remove()

    def _lower(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.done < self.steps:
            self._restore()  # the step before this one failed
            share = self.share(self.done)
            self._set = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * share

    def _put_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        # A fused optimizer under a loss scaler is called even when it must skip, and decides by this flag.
        found_inf = getattr(optimizer, "found_inf", None)
        if self.done >= self.steps or found_inf is None or not found_inf.item():
            self.done += 1

    def _save_full(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A checkpoint may be written within a step: from its closure, or by a signal.
        for group, rate in zip(state_dict["param_groups"], self._set or (), strict=False):
            group["lr"] = rate

    def _restore(self) -> None:
        if self._set is not None:
            for group, rate in zip(self.optimizer.param_groups, self._set, strict=True):
                group["lr"] = rate
            self._set = None
