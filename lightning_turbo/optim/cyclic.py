"""Cyclical learning rates: torch's ``CyclicLR``, sized in steps or epochs and advanced once per optimizer step."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR

from lightning_turbo._checks import check_choice, check_count, check_functions, expect, is_number

__all__ = ["CyclicSchedule", "cyclic_lr"]

Mode = Literal["triangular", "triangular2", "exp_range"]


class CyclicSchedule(CyclicLR):
    """torch's ``CyclicLR`` with two additions, built by ``cyclic_lr``.

    The cycle starts at ``base_lr`` whatever scheduler the optimizer had before, and its length may be determined at the
    first step, when a Trainer knows the length of an epoch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: Any,
        max_lr: Any,
        *,
        lengths: tuple[float, float],  # of rise and fall
        unit: int | None,  # optimizer steps per unit of length; None: ask the trainer at the first step
        trainer: Any,
        **cycle: Any,
    ) -> None:
        self._lengths = lengths
        self._is_sized = unit is not None
        # A weak reference, because the Trainer refers to this scheduler: in a cycle, only the garbage collector frees
        # weights.
        self._trainer = None if trainer is None else weakref.ref(trainer)
        # torch starts from a group's initial_lr, and a SequentialLR restores that of its first scheduler.
        earlier = [group.pop("initial_lr", None) for group in optimizer.param_groups]
        super().__init__(optimizer, base_lr, max_lr, *self._count_steps(unit or 1), **cycle)
        for group, rate in zip(optimizer.param_groups, earlier, strict=True):
            group["initial_lr"] = group["initial_lr"] if rate is None else rate

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step.

        Args:
            epoch: Deprecated by torch; leave it out.
        """
        # torch's constructor calls this at -1, when the Trainer does not know the length of an epoch yet.
        if self.last_epoch >= 0 and not self._is_sized:
            up, down = self._count_steps(_steps_per_epoch(self._trainer and self._trainer()))
            self.total_size = float(up + down)
            self.step_ratio = up / (up + down)
            self._is_sized = True
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, limits and size of the cycle, without the Trainer."""
        return {name: value for name, value in super().state_dict().items() if name not in ("_trainer", "_lengths")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. Unlike torch's method, this does not modify the dictionary.

        Args:
            state_dict: A result of ``state_dict``.
        """
        # torch's method removes an entry from its argument, but a checkpoint may be loaded twice.
        super().load_state_dict(dict(state_dict))

    def _count_steps(self, unit: float) -> tuple[int, int]:
        up, down = (max(1, round(unit * length)) for length in self._lengths)
        return up, down


def cyclic_lr(
    optimizer: Optimizer,
    base_lr: float | Sequence[float],
    max_lr: float | Sequence[float],
    *,
    step_size_up: int | None = None,
    step_size_down: int | None = None,
    epochs_up: float | None = None,
    epochs_down: float | None = None,
    steps_per_epoch: int | None = None,
    trainer: Any = None,
    mode: Mode = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[float], float] | None = None,
    scale_mode: Literal["cycle", "iterations"] = "cycle",
    cycle_momentum: bool = False,
    base_momentum: float = 0.8,
    max_momentum: float = 0.9,
) -> dict[str, Any]:
    """Build a Lightning scheduler configuration that cycles the learning rate between two limits, step by step.

    In step ``t`` of a rise of ``u`` steps, the learning rate is ``base_lr + (max_lr - base_lr) * t / u * scale``. The
    fall mirrors the rise. The configuration sets ``interval="step"``, because Lightning's default is one step per
    epoch.

    Args:
        optimizer: The optimizer. Its current learning rate is overwritten.
        base_lr: Lower limit, at least 0; one number, or one per parameter group.
        max_lr: Upper limit, at least ``base_lr``; one number, or one per parameter group.
        step_size_up: Optimizer steps of the rise, at least 1. Pass this or ``epochs_up``.
        step_size_down: Optimizer steps of the fall. Default: ``step_size_up``.
        epochs_up: Epochs of the rise, above 0; may be a fraction. Smith advises 2 to 10.
        epochs_down: Epochs of the fall. Default: ``epochs_up``.
        steps_per_epoch: Optimizer steps per epoch, for a cycle in epochs without a Trainer.
        trainer: The Trainer (``self.trainer``), for a cycle in epochs. The cycle is sized at the first step, when the
            loader exists.
        mode: ``"triangular"``: constant height; ``"triangular2"``: half the height after each cycle;
            ``"exp_range"``: the height times ``gamma`` after each step.
        gamma: Decay of ``"exp_range"``, above 0 and at most 1.
        scale_fn: Pure function that returns the scale of the height; replaces ``mode``.
        scale_mode: Argument of ``scale_fn``: ``"cycle"`` (index of the cycle, from 1) or ``"iterations"`` (index of the
            step, from 0).
        cycle_momentum: Whether momentum, or Adam's first beta, falls while the learning rate rises.
        base_momentum: Lowest momentum.
        max_momentum: Highest momentum.

    Returns:
        The dictionary for the key ``"lr_scheduler"`` in the result of ``configure_optimizers``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, the length of the cycle is missing or given twice, or the optimizer has
            no momentum to cycle; at the first step, if the Trainer does not know the length of an epoch.

    Note:
        The names are those of ``torch.optim.lr_scheduler.CyclicLR``, whose ``cycle_momentum`` is on by default. As
        there, checkpoints do not contain ``scale_fn`` if it is a function, and adding a parameter group later is an
        error: build the scheduler after adding the group.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> schedule = cyclic_lr(optimizer, 0.0, 1.0, step_size_up=2)["scheduler"]
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
    check_functions(scale_fn=scale_fn)
    check_choice("mode", mode, ("triangular", "triangular2", "exp_range"))
    check_choice("scale_mode", scale_mode, ("cycle", "iterations"))
    expect(is_number(gamma) and 0 < gamma <= 1, "gamma", gamma, "a number above 0 and at most 1")
    valid = is_number(base_momentum) and is_number(max_momentum) and 0 <= base_momentum <= max_momentum < 1
    momenta = base_momentum, max_momentum
    expect(valid, "base_momentum and max_momentum", momenta, "numbers with 0 <= base_momentum <= max_momentum < 1")
    groups = len(optimizer.param_groups)
    low, high = _rates("base_lr", base_lr, groups), _rates("max_lr", max_lr, groups)
    expect(all(a <= b for a, b in zip(low, high, strict=True)), "base_lr", base_lr, f"no more than max_lr={max_lr!r}")
    lengths = _lengths(step_size_up, step_size_down, epochs_up, epochs_down)
    # Steps are their own unit; the Trainer knows the length of an epoch only once it has a loader.
    unit: int | None = None
    if epochs_up is None:
        unit = 1
    elif steps_per_epoch is not None:
        unit = check_count("steps_per_epoch", steps_per_epoch)
    else:
        known = hasattr(trainer, "num_training_batches")
        expect(known, "trainer", trainer, "self.trainer, or steps_per_epoch=..., with epochs_up")
    schedule = CyclicSchedule(
        optimizer,
        low,
        high,
        lengths=lengths,
        unit=unit,
        trainer=trainer if unit is None else None,
        mode=mode,
        gamma=gamma,
        scale_fn=scale_fn,
        scale_mode=scale_mode,
        cycle_momentum=cycle_momentum,
        base_momentum=base_momentum,
        max_momentum=max_momentum,
    )
    return {"scheduler": schedule, "interval": "step", "frequency": 1}


def _rates(name: str, value: Any, groups: int) -> list[float]:
    """Return one learning rate per parameter group."""
    values = [value] * groups if isinstance(value, numbers.Real) else value
    valid = isinstance(values, (list, tuple)) and all(is_number(v) and v >= 0 for v in values)
    expect(valid, name, value, "a finite number of at least 0, or one per parameter group")
    expect(len(values) == groups, name, value, f"one number, or one for each of the {groups} parameter groups")
    return [float(v) for v in values]


def _lengths(step_size_up: Any, step_size_down: Any, epochs_up: Any, epochs_down: Any) -> tuple[float, float]:
    """Return the lengths of rise and fall, in steps or epochs, after checking them."""
    given = step_size_up, epochs_up
    expect(given.count(None) == 1, "step_size_up and epochs_up", given, "exactly one of the two")
    if epochs_up is None:
        expect(epochs_down is None, "epochs_down", epochs_down, "step_size_down, because the rise is in steps")
        down = step_size_up if step_size_down is None else step_size_down
        return check_count("step_size_up", step_size_up), check_count("step_size_down", down)
    expect(step_size_down is None, "step_size_down", step_size_down, "epochs_down, because the rise is in epochs")
    down = epochs_up if epochs_down is None else epochs_down
    expect(is_number(epochs_up) and epochs_up > 0, "epochs_up", epochs_up, "a number above 0")
    expect(is_number(down) and down > 0, "epochs_down", down, "a number above 0")
    return float(epochs_up), float(down)


def _steps_per_epoch(trainer: Any) -> int:
    """Return the number of optimizer steps per epoch."""
    steps = math.inf if trainer is None else trainer.num_training_batches / trainer.accumulate_grad_batches
    if not 0 < steps < math.inf:
        raise ValueError(
            f"Trainer: expected a finite number of training steps per epoch to size the cycle, got {steps}. Pass "
            "step_size_up, steps_per_epoch, or Trainer(limit_train_batches=...) with an integer."
        )
    # The last window of an epoch also steps, however few batches it has.
    return math.ceil(steps)
