"""Cyclical learning rates: sized in steps or epochs, advanced once per optimizer step, saved in checkpoints."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_turbo._checks import check_choice, check_count, check_functions, expect, is_number, is_whole
from lightning_turbo._skipped_steps import skip_flag, was_skipped

__all__ = ["CyclicSchedule", "cyclic_lr"]

Mode = Literal["triangular", "triangular2", "exp_range"]
# Attributes in a checkpoint; the others are built again from the arguments.
SAVED = ("last_epoch", "base_lrs", "max_lrs", "total_size", "step_ratio", "_step_count", "_last_lr", "_begun")


class CyclicSchedule(LRScheduler):
    """Cycle the learning rate of each parameter group between two bounds.

    ``cyclic_lr`` builds this schedule and checks its arguments. The formula is that of
    ``torch.optim.lr_scheduler.CyclicLR``. There are three differences: the cycle starts at ``base_lr`` for any earlier
    rate of the optimizer, momentum is constant by default, and the cycle advances only after a step of the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lrs: list[float],
        max_lrs: list[float],
        *,
        lengths: tuple[float, float],  # of the rise and the fall
        unit: int | None,  # optimizer steps in a length of 1; None: ask the trainer at the first step
        scale: Callable[[int, int], float],  # (cycle, step) -> scale of the height
        scale_name: str | None,
        momentum: tuple[float, float] | None,
        trainer: Any,
    ) -> None:
        self.max_lrs = max_lrs
        self._lengths, self._unit, self._trainer = lengths, unit, trainer
        self._scale, self._scale_name, self._momentum = scale, scale_name, momentum
        self._begun = False
        self._stepped, self._flag = False, None
        self._set_size(unit or 1)
        # torch starts from a group's `initial_lr`, which an earlier schedule or a loaded state may have set.
        groups = optimizer.param_groups
        earlier = [group.get("initial_lr", rate) for group, rate in zip(groups, base_lrs, strict=True)]
        _set_initial_rates(groups, base_lrs)
        super().__init__(optimizer)
        _set_initial_rates(groups, earlier)
        self._register_hooks()

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step, unless the optimizer made no step since the last call.

        Args:
            epoch: Deprecated by torch; leave it out.
        """
        if self.last_epoch >= 0:  # torch's constructors make the first call, at -1
            self._begin()
            if not self._stepped or was_skipped(self._flag):
                self._stepped = False
                return
        super().step(epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group and set their momentum; ``step`` calls it."""
        self._stepped = False
        added = len(self.optimizer.param_groups) - len(self.base_lrs)
        self.base_lrs, self.max_lrs = (list(x) + list(x[-1:]) * added for x in (self.base_lrs, self.max_lrs))
        share, scale = self._share_and_scale()
        if self._momentum is not None:
            low, high = self._momentum
            for group in filter(_has_momentum, self.optimizer.param_groups):
                group["momentum"] = high - (high - low) * share * scale
        return [low + (high - low) * share * scale for low, high in zip(self.base_lrs, self.max_lrs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the bounds and the size of the cycle as plain data."""
        # A checkpoint may be written between the optimizer's step and the schedule's.
        stepped = self._stepped and not was_skipped(self._flag)
        saved = {name: vars(self)[name] for name in SAVED}
        return {**saved, "_stepped": stepped, "_flag": None, "scale_fn": self._scale_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. The dictionary is not changed.

        Args:
            state_dict: Result of ``state_dict``.

        Raises:
            ValueError: If the saved schedule used a ``scale_fn`` of another name.
        """
        state = dict(state_dict)
        name = state.pop("scale_fn")
        expect(name == self._scale_name, "scale_fn", self._scale_name, f"{name}, which the saved schedule used")
        super().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None if self._begun else self._trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register_hooks()  # the copy of an optimizer has no hooks

    def _share_and_scale(self) -> tuple[float, float]:
        """Return the position between the bounds, from 0 to 1, and the scale of the height."""
        cycles = self.last_epoch / self.total_size
        cycle = math.floor(1 + cycles)
        position = 1.0 + cycles - cycle
        rising = position <= self.step_ratio
        share = position / self.step_ratio if rising else (position - 1) / (self.step_ratio - 1)
        return share, self._scale(cycle, self.last_epoch)

    def _register_hooks(self) -> None:
        """Observe the steps of the optimizer and of the one that it wraps: SAM's second_step calls only the latter."""
        group = self.optimizer.param_groups[0]
        inner = [o for o in vars(self.optimizer).values() if isinstance(o, Optimizer) and o.param_groups[0] is group]
        for each in (self.optimizer, *inner):
            each.register_step_post_hook(self._record_step)

    def _record_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped, self._flag = True, skip_flag(optimizer)

    def _begin(self) -> None:
        """Set the size of the cycle at the first step, when the Trainer knows the length of an epoch."""
        if not self._begun:  # also true for a loaded schedule, which keeps the saved size
            self._set_size(self._unit or _count_steps(self._trainer))
            self._begun = True

    def _set_size(self, unit: float) -> None:
        up, down = (max(1, round(unit * length)) for length in self._lengths)
        self.total_size, self.step_ratio = float(up + down), up / (up + down)


def _set_initial_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        group["initial_lr"] = rate


def _has_momentum(group: dict[str, Any]) -> bool:
    return bool(group.get("momentum"))


def cyclic_lr(
    optimizer: Optimizer,
    base_lr: float | Sequence[float],
    max_lr: float | Sequence[float],
    *,
    steps_up: int | None = None,
    steps_down: int | None = None,
    epochs_up: float | None = None,
    epochs_down: float | None = None,
    steps_per_epoch: int | None = None,
    trainer: Any = None,
    mode: Mode = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[float], float] | None = None,
    scale_mode: Literal["cycle", "iterations"] = "cycle",
    momentum: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Build a Lightning scheduler configuration that cycles the learning rate between two bounds, step by step.

    In step ``t`` of a rise of ``u`` steps the rate is ``base_lr + (max_lr - base_lr) * t / u * scale``. The fall
    mirrors the rise. The configuration sets ``interval="step"``, because Lightning's default is one step per epoch.

    Args:
        optimizer: The optimizer. Its current learning rate is overwritten.
        base_lr: Lower bound, at least 0; one number, or one for each parameter group.
        max_lr: Upper bound, at least ``base_lr``; one number, or one for each parameter group.
        steps_up: Optimizer steps of the rise, at least 1. Give this or ``epochs_up``.
        steps_down: Optimizer steps of the fall. Default: ``steps_up``.
        epochs_up: Epochs of the rise, above 0; may be a fraction. Smith advises 2 to 10.
        epochs_down: Epochs of the fall. Default: ``epochs_up``.
        steps_per_epoch: Optimizer steps of an epoch, for a cycle in epochs without a Trainer.
        trainer: The Trainer (``self.trainer``), for a cycle in epochs. The cycle is sized at the first step, when the
            loader is ready.
        mode: ``"triangular"``: constant height; ``"triangular2"``: half the height after each cycle;
            ``"exp_range"``: the height times ``gamma`` after each step.
        gamma: Decay of ``"exp_range"``, above 0 and at most 1.
        scale_fn: Pure function that gives the scale of the height and replaces ``mode``.
        scale_mode: Argument of ``scale_fn``: ``"cycle"`` (number of the cycle, from 1) or ``"iterations"`` (number of
            the step, from 0).
        momentum: ``(lowest, highest)`` momentum. Momentum falls while the learning rate rises. ``None`` does not
            change it. Groups without momentum, and the betas of Adam, never change.

    Returns:
        The dictionary for the key ``"lr_scheduler"`` in the result of ``configure_optimizers``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, the length of the cycle is missing or given twice, or ``momentum`` is
            given and no parameter group has momentum; at the first step, if the Trainer does not know the length of an
            epoch.

    Note:
        A parameter group that is added later takes the bounds of the last one. Checkpoints hold the name of
        ``scale_fn``, not the function; loading into a schedule with another one raises a ``ValueError``.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> schedule = cyclic_lr(optimizer, 0.0, 1.0, steps_up=2)["scheduler"]
        >>> rates = []
        >>> for _ in range(5):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.0, 0.5, 1.0, 0.5, 0.0]

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017.
    """
    expect(isinstance(optimizer, Optimizer), "optimizer", optimizer, "a torch.optim.Optimizer", TypeError)
    known = trainer is None or hasattr(trainer, "num_training_batches")
    expect(known, "trainer", trainer, "a Trainer (self.trainer) or None", TypeError)
    check_functions(scale_fn=scale_fn)
    groups = len(optimizer.param_groups)
    low, high = _rates("base_lr", base_lr, groups), _rates("max_lr", max_lr, groups)
    expect(all(a <= b for a, b in zip(low, high, strict=True)), "base_lr", base_lr, f"no more than max_lr={max_lr!r}")
    schedule = CyclicSchedule(
        optimizer,
        low,
        high,
        lengths=_lengths((steps_up, steps_down), (epochs_up, epochs_down)),
        unit=_unit(steps_up, steps_per_epoch, trainer),
        scale=_scale(mode, gamma, scale_fn, scale_mode),
        scale_name=getattr(scale_fn, "__qualname__", scale_fn and type(scale_fn).__qualname__),
        momentum=_momentum(optimizer, momentum),
        trainer=trainer,
    )
    return {"scheduler": schedule, "interval": "step", "frequency": 1}


def _rates(name: str, value: Any, groups: int) -> list[float]:
    """Return one learning rate for each parameter group."""
    values = [value] * groups if isinstance(value, numbers.Real) else value
    valid = isinstance(values, (list, tuple)) and all(is_number(v) and v >= 0 for v in values)
    expect(valid, name, value, "a finite number of at least 0, or one for each parameter group")
    expect(len(values) == groups, name, value, f"one number, or one for each of the {groups} parameter groups")
    return [float(v) for v in values]


def _lengths(steps: tuple[Any, Any], epochs: tuple[Any, Any]) -> tuple[float, float]:
    """Check the lengths of the rise and the fall, in steps or in epochs, and return them."""
    passed = steps[0], epochs[0]
    expect(passed.count(None) == 1, "steps_up and epochs_up", passed, "exactly one of the two")
    in_steps = epochs[0] is None
    (up, down), other = (steps, epochs[1]) if in_steps else (epochs, steps[1])
    expect(other is None, "length of the fall", other, "the unit of the rise")
    down = up if down is None else down
    for name, value in (("up", up), ("down", down)):
        name = f"{'steps' if in_steps else 'epochs'}_{name}"
        expect(is_number(value) and value > 0, name, value, "a number above 0")
        expect(is_whole(value, 1) or not in_steps, name, value, "a whole number")
    return float(up), float(down)


def _unit(steps_up: Any, steps_per_epoch: Any, trainer: Any) -> int | None:
    """Return the optimizer steps in one unit of the cycle's lengths, or None if the Trainer has to be asked later."""
    check_count("steps_per_epoch", 1 if steps_per_epoch is None else steps_per_epoch)
    if steps_up is not None:
        return 1
    known = steps_per_epoch is not None or trainer is not None
    expect(known, "trainer", trainer, "self.trainer, or steps_per_epoch=..., with epochs_up")
    return steps_per_epoch


def _scale(mode: Any, gamma: Any, scale_fn: Callable[[float], float] | None, scale_mode: Any) -> Callable[..., float]:
    """Return the scale of the height as a function of (cycle, step) that can be pickled."""
    check_choice("scale_mode", scale_mode, ("cycle", "iterations"))
    expect(is_number(gamma) and 0 < gamma <= 1, "gamma", gamma, "a number above 0 and at most 1")
    decays = {"triangular": (1.0, 1.0), "triangular2": (0.5, 1.0), "exp_range": (1.0, gamma)}
    check_choice("mode", mode, list(decays))
    return partial(_decay, *decays[mode]) if scale_fn is None else partial(_custom, scale_fn, scale_mode)


def _decay(per_cycle: float, per_step: float, cycle: int, step: int) -> float:
    return per_cycle ** (cycle - 1) * per_step**step


def _custom(scale_fn: Callable[[float], float], scale_mode: str, cycle: int, step: int) -> float:
    return scale_fn(cycle if scale_mode == "cycle" else step)


def _momentum(optimizer: Optimizer, momentum: Any) -> tuple[float, float] | None:
    """Check the bounds of the momentum."""
    if momentum is None:
        return None
    numbers_only = isinstance(momentum, (list, tuple)) and len(momentum) == 2 and all(map(is_number, momentum))
    valid = numbers_only and 0 < momentum[0] <= momentum[1] < 1
    expect(valid, "momentum", momentum, "(lowest, highest) with 0 < lowest <= highest < 1, for example (0.8, 0.9)")
    used = any(map(_has_momentum, optimizer.param_groups))
    expect(used, "momentum", momentum, f"None, because no parameter group of {type(optimizer).__name__} has momentum")
    return momentum[0], momentum[1]


def _count_steps(trainer: Any) -> float:
    """Return the optimizer steps of an epoch."""
    steps = math.inf if trainer is None else trainer.num_training_batches / trainer.accumulate_grad_batches
    if not 0 < steps < math.inf:
        raise ValueError(
            f"Trainer: expected a finite number of training steps in an epoch to size the cycle, got {steps}. Pass "
            "steps_up, steps_per_epoch, or Trainer(limit_train_batches=...) with a whole number."
        )
    return math.ceil(steps)
