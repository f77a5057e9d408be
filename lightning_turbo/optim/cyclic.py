"""Cyclical learning rates, set up right: stepped every step, sized in steps or epochs, safe to save and load."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR

from lightning_turbo._checks import check_functions, is_number, is_whole
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["CyclicSchedule", "RunLength", "cyclic_lr"]

Mode = Literal["triangular", "triangular2", "exp_range"]
MODES = ("triangular", "triangular2", "exp_range")


class RunLength(Protocol):
    """What tells the length of a run; every Lightning Trainer does."""

    num_training_batches: int | float
    accumulate_grad_batches: int
    max_epochs: int | None
    max_steps: int


class CyclicSchedule(CyclicLR):
    """torch's ``CyclicLR`` that advances once per optimizer step made, with a cycle sized in steps or epochs.

    ``cyclic_lr`` builds it and documents the arguments. Unlike its parent, it leaves momentum alone unless asked,
    does not advance on a step that a loss scaler skipped, and checks a custom ``scale_fn`` when it is loaded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float],
        max_lr: float | Sequence[float],
        *,
        steps_up: int | None = None,
        steps_down: int | None = None,
        epochs_up: float | None = None,
        epochs_down: float | None = None,
        steps_per_epoch: int | None = None,
        trainer: RunLength | None = None,
        mode: Mode = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: Literal["cycle", "iterations"] = "cycle",
        momentum: tuple[float, float] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={optimizer!r}: accepted is a torch.optim.Optimizer.")
        groups = optimizer.param_groups
        low, high = _rates("base_lr", base_lr, len(groups)), _rates("max_lr", max_lr, len(groups))
        for index, (a, b) in enumerate(zip(low, high, strict=True)):
            if a > b:
                raise ValueError(
                    f"base_lr={a!r} is above max_lr={b!r} in parameter group {index}; accepted is "
                    "base_lr <= max_lr. Swap the two."
                )
        check_functions(scale_fn=scale_fn)
        if trainer is not None and not all(hasattr(trainer, each) for each in RunLength.__annotations__):
            raise TypeError(f"trainer={trainer!r}; accepted is a Trainer, or None. Pass self.trainer.")
        self._up, self._down, self._unit = _cycle(steps_up, steps_down, epochs_up, epochs_down)
        if steps_per_epoch is not None:
            _whole("steps_per_epoch", steps_per_epoch)
        elif self._unit == "epochs" and trainer is None:
            raise ValueError(
                f"epochs_up={epochs_up!r} needs the number of steps in an epoch, and neither trainer nor "
                "steps_per_epoch was given. Pass trainer=self.trainer in configure_optimizers, or steps_per_epoch=..."
            )
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}; accepted are {', '.join(map(repr, MODES))}, or a scale_fn.")
        if scale_mode not in ("cycle", "iterations"):
            raise ValueError(f"scale_mode={scale_mode!r}; accepted are 'cycle' and 'iterations'.")
        if not is_number(gamma) or not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma!r}; accepted is a number above 0 and at most 1, the decay of 'exp_range'.")
        self._still = _without_momentum(optimizer, momentum)
        cycled = momentum is not None and len(self._still) < len(groups)

        self._steps_per_epoch = steps_per_epoch
        self._trainer = trainer
        self._max_steps = -1 if trainer is None else trainer.max_steps  # a finder sets another one for its trials
        self._sized, self._compared, self._steps_made = False, False, 0
        self._found_inf: torch.Tensor | None = None
        super().__init__(
            optimizer,
            low,
            high,
            step_size_up=1,
            mode=mode,
            gamma=gamma,
            scale_fn=scale_fn,
            scale_mode=scale_mode,
            cycle_momentum=cycled,
            base_momentum=momentum[0] if momentum is not None else 0.8,
            max_momentum=momentum[1] if momentum is not None else 0.9,
        )
        self._put_back_momentum()
        self._follow(optimizer)
        if self._unit == "steps" or steps_per_epoch is not None:
            self._size(steps_per_epoch)

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step, unless the optimizer made none since the last call.

        Args:
            epoch: Deprecated by torch; leave it out.
        """
        if self.last_epoch < 0:  # torch's own first call, from the constructor
            super().step()
            return
        if not self._sized:
            self._size(None)
        if not self._compared and self._trainer is not None:
            self._warn_if_short(self._trainer)
            self._compared = True
        if self._steps_made == 0:
            return
        found_inf, self._found_inf = self._found_inf, None
        self._steps_made -= 1
        if found_inf is None or not found_inf.item():
            super().step(epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group; called by ``step``."""
        rates = super().get_lr()
        self._put_back_momentum()
        return rates

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None if self._sized else self._trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._follow(self.optimizer)  # whose copy has no hooks

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the marks by which a custom ``scale_fn`` is known again."""
        state, left_out = super().state_dict(), ("_trainer", "_max_steps", "_compared", "_found_inf", "_still")
        if self._found_inf is not None and self._found_inf.item():
            state["_steps_made"] = max(0, self._steps_made - 1)  # the last one was skipped
        state["_scale_fn_mark"] = self._mark()
        return {name: value for name, value in state.items() if name not in left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the dictionary stays as it is.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: If the saved schedule used another ``scale_fn`` than this one.
        """
        state = dict(state_dict)
        saved = state.pop("_scale_fn_mark", None)
        own = self._mark(None if saved is None else saved["points"])
        names = [mark and mark["name"] for mark in (saved, own)]
        if names[0] != names[1]:
            raise ValueError(
                f"The saved schedule used scale_fn={names[0]}, this one uses scale_fn={names[1]}. A function cannot be "
                "saved: build the schedule with the same scale_fn before loading."
            )
        super().load_state_dict(state)
        self._compared = False
        own = self._mark(None if saved is None else saved["points"])  # a callable object has its saved state by now
        if saved is not None and own is not None and own["values"] != saved["values"]:
            raise ValueError(
                f"scale_fn={own['name']} gives {own['values']} at {own['points']}, but the saved one gave "
                f"{saved['values']}. Build the schedule with the same scale_fn before loading."
            )

    def _mark(self, points: list[float] | None = None) -> dict[str, Any] | None:
        """Name the custom scale function and its values at points where it has been asked before."""
        function = self._scale_fn_custom
        if function is None:
            return None
        if points is None:
            cycle, now = self.scale_mode == "cycle", self.last_epoch
            points = sorted({int(cycle), math.floor(1 + now / self.total_size) if cycle else now})
        named = function if hasattr(function, "__qualname__") else type(function)
        name = f"{named.__module__}.{named.__qualname__}"
        return {"name": name, "points": points, "values": [float(function(x)) for x in points]}

    def _follow(self, optimizer: Optimizer) -> None:
        """Count the steps of an optimizer, each as one whatever an optimizer inside it does meanwhile."""
        before: dict[Optimizer, int] = {}

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._steps_made = before[optimizer] + 1
            # A fused optimizer under a loss scaler is called even when it must skip, and decides by this flag.
            self._found_inf = getattr(optimizer, "found_inf", None)

        # SAM's second_step, for one, has an optimizer of its own step the same groups, and makes no step itself.
        group = optimizer.param_groups[0]
        inner = [o for o in vars(optimizer).values() if isinstance(o, Optimizer) and o.param_groups[0] is group]
        for each in (optimizer, *inner):
            each.register_step_pre_hook(lambda each, *_: before.update({each: self._steps_made}))
            each.register_step_post_hook(end)

    def _put_back_momentum(self) -> None:
        for index, value in self._still.items():
            group = self.optimizer.param_groups[index]
            if "momentum" in group:
                group["momentum"] = value

    def _size(self, steps_per_epoch: int | None) -> None:
        """Turn the cycle into steps, once; a loaded schedule keeps the size that was saved."""
        one = 1 if self._unit == "steps" else steps_per_epoch or _steps_per_epoch(self._trainer)
        up, down = (max(1, round(one * length)) for length in (self._up, self._down))
        self.total_size, self.step_ratio, self._sized = float(up + down), up / (up + down), True

    def _warn_if_short(self, trainer: RunLength) -> None:
        epochs, limit, batches = trainer.max_epochs, self._max_steps, trainer.num_training_batches
        ends = [float(limit)] if limit is not None and limit >= 0 else []
        if epochs is not None and epochs >= 0 and math.isfinite(batches):
            ends.append(float(epochs * _steps_per_epoch(trainer)))
        up = self.total_size * self.step_ratio
        tried_out = getattr(trainer, "fast_dev_run", False)
        if ends and min(ends) < up and not tried_out and getattr(trainer, "is_global_zero", True):
            warnings.warn(
                f"This run makes {min(ends):.0f} steps, fewer than the {up:.0f} steps that the learning rate takes to "
                "rise: max_lr is never reached. Shorten steps_up or epochs_up, or train longer.",
                TurboWarning,
                stacklevel=3,
            )


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
    trainer: RunLength | None = None,
    mode: Mode = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[float], float] | None = None,
    scale_mode: Literal["cycle", "iterations"] = "cycle",
    momentum: tuple[float, float] | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Build a Lightning scheduler configuration that cycles the learning rate between two bounds, step by step.

    In step ``t`` of a rise of ``u`` steps the rate is ``base_lr + (max_lr - base_lr) * t / u * scale``; it falls the
    same way. The configuration has ``interval="step"``, where Lightning's own default would be one step per epoch.

    Args:
        optimizer: The optimizer whose learning rate is cycled; its present rate is overwritten.
        base_lr: Lower bound, above or equal to 0; one number, or one for each parameter group.
        max_lr: Upper bound, not below ``base_lr``; one number, or one for each parameter group.
        steps_up: Optimizer steps of the rise, at least 1. Give this or ``epochs_up``.
        steps_down: Optimizer steps of the fall; ``None`` is the same as the rise.
        epochs_up: Epochs of the rise, above 0, fractions allowed. Smith advises 2 to 10.
        epochs_down: Epochs of the fall; ``None`` is the same as the rise.
        steps_per_epoch: Optimizer steps of an epoch, for cycles in epochs outside a Trainer.
        trainer: The Trainer (``self.trainer``). A cycle in epochs is sized from it at the first step, when its
            loader is ready, and a run too short for the rise is warned of.
        mode: ``"triangular"`` keeps the height, ``"triangular2"`` halves it each cycle, ``"exp_range"`` multiplies
            it by ``gamma`` each step.
        gamma: Decay of ``"exp_range"``, above 0 and at most 1.
        scale_fn: Own scale of the height, a pure function of the number of the cycle (from 1) or of the step
            (from 0); takes the place of ``mode``.
        scale_mode: What ``scale_fn`` is given: ``"cycle"`` or ``"iterations"``.
        momentum: ``(lowest, highest)`` momentum, cycled against the learning rate; ``None`` leaves momentum alone.
            Groups without momentum, and Adam's betas, are left alone always.
        name: Name of the schedule in the logs.

    Returns:
        A dictionary for the key ``"lr_scheduler"`` of what ``configure_optimizers`` returns.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a bound, a size, a mode or the momentum is impossible.

    Warns:
        NoEffectWarning: If ``momentum`` is asked for and no parameter group has any.
        TurboWarning: At the first step, if the whole run is shorter than the rise.

    Note:
        The schedule counts the optimizer's own steps, so a step that a loss scaler skipped does not advance it; with
        a fused optimizer under a scaler this reads one flag from the device per step.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> config = cyclic_lr(torch.optim.SGD([weight], lr=0.1), 0.001, 0.01, steps_up=4)
        >>> config["interval"], config["scheduler"].get_last_lr()
        ('step', [0.001])

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r}; accepted is a name for the logs, or None. Give a text.")
    schedule = CyclicSchedule(
        optimizer,
        base_lr,
        max_lr,
        steps_up=steps_up,
        steps_down=steps_down,
        epochs_up=epochs_up,
        epochs_down=epochs_down,
        steps_per_epoch=steps_per_epoch,
        trainer=trainer,
        mode=mode,
        gamma=gamma,
        scale_fn=scale_fn,
        scale_mode=scale_mode,
        momentum=momentum,
    )
    config = {"scheduler": schedule, "interval": "step", "frequency": 1}
    return config if name is None else {**config, "name": name}


def _whole(name: str, value: int) -> int:
    if not is_whole(value, 1):
        raise ValueError(f"{name}={value!r}; accepted is a whole number, at least 1. Give a number of optimizer steps.")
    return value


def _rates(name: str, value: Any, groups: int) -> list[float]:
    """Return one learning rate for each parameter group."""
    values = [value] * groups if isinstance(value, numbers.Real) else value
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(is_number(v) and v >= 0 for v in values):
        raise ValueError(
            f"{name}={value!r}; accepted is a finite number that is not negative, or one for each parameter group."
        )
    if len(values) != groups:
        raise ValueError(
            f"{name}={value!r} has {len(values)} values, but the optimizer has {groups} parameter groups. "
            "Give one value for each group, or one number for all."
        )
    return [float(v) for v in values]


def _cycle(
    steps_up: int | None, steps_down: int | None, epochs_up: float | None, epochs_down: float | None
) -> tuple[float, float, Literal["steps", "epochs"]]:
    """Check the size of the cycle and return rise, fall and their unit."""
    if (steps_up is None) == (epochs_up is None):
        raise ValueError(
            f"steps_up={steps_up!r} and epochs_up={epochs_up!r}; accepted is exactly one of them. "
            "Give the rise in steps or in epochs."
        )
    if steps_up is not None:
        if epochs_down is not None:
            raise ValueError(f"steps_up={steps_up!r} with epochs_down={epochs_down!r}; use one unit: give steps_down.")
        steps_down = steps_up if steps_down is None else steps_down
        return _whole("steps_up", steps_up), _whole("steps_down", steps_down), "steps"
    if steps_down is not None:
        raise ValueError(f"epochs_up={epochs_up!r} with steps_down={steps_down!r}; use one unit: give epochs_down.")
    return _epochs("epochs_up", epochs_up), _epochs("epochs_down", epochs_down, default=epochs_up), "epochs"


def _epochs(name: str, value: float | None, default: float | None = None) -> float:
    value = default if value is None else value
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name}={value!r}; accepted is a number of epochs above 0. Fractions are allowed.")
    return float(value)


def _without_momentum(optimizer: Optimizer, momentum: Any) -> dict[int, float]:
    """Return the groups without momentum, by index, which stay so; refuse impossible bounds."""
    if momentum is None:
        return {}
    pair = isinstance(momentum, Sequence) and len(momentum) == 2 and all(is_number(v) and 0 <= v < 1 for v in momentum)
    if not pair or momentum[0] > momentum[1]:
        raise ValueError(
            f"momentum={momentum!r}; accepted is (lowest, highest) with 0 <= lowest <= highest < 1, "
            "for example (0.8, 0.9)."
        )
    still = {i: 0.0 for i, group in enumerate(optimizer.param_groups) if not group.get("momentum")}
    if len(still) == len(optimizer.param_groups):
        warnings.warn(
            f"momentum={momentum!r} is asked for, but {type(optimizer).__name__} has no momentum here, so it is not "
            "cycled. Leave momentum out, or give the optimizer momentum.",
            NoEffectWarning,
            stacklevel=4,
        )
    return still


def _steps_per_epoch(trainer: RunLength | None) -> int:
    batches = trainer.num_training_batches if trainer is not None else math.inf
    if trainer is None or not math.isfinite(batches) or batches < 1:
        raise ValueError(
            f"The Trainer counts {batches} training batches in an epoch, so epochs_up cannot be turned into steps. "
            "Give steps_up, steps_per_epoch, or Trainer(limit_train_batches=...) with a whole number."
        )
    return math.ceil(batches / trainer.accumulate_grad_batches)
