"""What would stop a CUDA graph of the step, as facts of a run on any device.

A graph replays the kernels of one step with the shapes, the numbers and the addresses that they had. So the watched
steps are compared call by call, and what runs in Python beside the kernels is looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo.doctor import collect
from lightning_turbo.doctor.facts import Part, Site
from lightning_turbo.doctor.names import generic_name
from lightning_turbo.doctor.source import Sources

__all__ = ["GraphCheck"]

NUMBERS = (bool, int, float, complex, str, type(None))
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
GRAPH_SAFE = "SGD"
"""The one of torch's optimizers whose step needs no ``capturable``: it counts no steps."""
REGISTERS = ("register_hook", "register_post_accumulate_grad_hook")


class GraphCheck:
    """Compares the watched steps with one another: a session makes it, and calls it in each step until the report.

    Args:
        trainer: The Trainer.
        sources: Finds the user's lines.
    """

    def __init__(self, trainer: Any, sources: Sources) -> None:
        self.trainer, self.sources = trainer, sources
        self._found: dict[Part, None] = {}  # in the order of their discovery
        self._shapes: dict[str, dict[tuple[int, ...], None]] = {}
        self._before: list[Any] = []  # the calls of the last step
        self._calls: list[Any] = []  # those of this one
        self._differs = False  # whether this step has left the path or the shapes of the last one

    def look_at(self, batch: Any) -> None:
        """Note the shapes of a batch."""
        for name, tensor in collect.leaves(batch, "batch"):
            self._shapes.setdefault(name, {})[tuple(tensor.shape)] = None

    def begin_step(self) -> None:
        """Begin a step that is compared with the one before."""
        self._before, self._calls, self._differs = self._calls, [], False

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """Compare a call of ``training_step`` with the one at its place in the step before."""
        if name in REGISTERS:
            self._note("a hook on a tensor", self.sources.site(frame))
        shapes: list[Any] = []
        numbers: list[Any] = []
        _sign([*args, *kwargs.values()], shapes, numbers)
        place = len(self._calls)
        self._calls.append((name, shapes, numbers))
        if self._differs or not self._before:
            return
        # Behind a call too many or too few all others stand at other places, so that only the first difference is told.
        then = self._before[place] if place < len(self._before) else ("", [], [])
        if then[0] != name:
            self._differs = True
            self._note("another path than in the step before", self.sources.site(frame))
        elif then[1] != shapes:
            # Where the batch itself changes its shape, that is the cause, and is told once.
            self._differs = True
            if not self._changing_batch():
                self._note(f"{generic_name(name)} gets other shapes than before", self.sources.site(frame))
        elif then[2] != numbers:
            self._note(f"{generic_name(name)} gets another number than before", self.sources.site(frame))

    def find(self) -> tuple[Part, ...]:
        """Return all that was found, with the lines."""
        module = type(self.trainer.lightning_module)
        for name in self._changing_batch():
            shapes = ", ".join(map(str, self._shapes[name]))
            self._found[Part(name=f"{name} changes its shape: {shapes}")] = None
        for each in self.trainer.optimizers:
            site = self.sources.call(module, "configure_optimizers", type(each).__name__)
            if (why := _why_not_captured(each)) is not None:
                self._note(why, site)
        for each in self.trainer.lr_scheduler_configs:
            numbers = any(isinstance(group["lr"], float) for group in each.scheduler.optimizer.param_groups)
            if each.interval == "step" and numbers:
                name = type(each.scheduler).__name__
                site = self.sources.call(module, "configure_optimizers", name)
                self._note(f"{name} changes a learning rate that is a Python number", site)
        for hook in _hooks(self.trainer.lightning_module):
            self._note("a hook in Python", self.sources.function(hook))
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            self._found[Part(name="DDP's hooks reduce gradients: it has to be made and warmed up for a graph")] = None
        if _fetches_flag(getattr(self.trainer.precision_plugin, "scaler", None), self.trainer.optimizers):
            self._found[Part(name="the loss scaler fetches whether gradients are finite")] = None
        return tuple(self._found)

    def _changing_batch(self) -> list[str]:
        return [name for name, shapes in self._shapes.items() if len(shapes) > 1]

    def _note(self, name: str, site: Site | None) -> None:
        """Note what has a line of the user's; what torch does for itself is not theirs to change."""
        if site is not None:
            self._found[Part(name=name, site=site)] = None


def _sign(value: Any, shapes: list[Any], numbers: list[Any]) -> None:
    """Append the shapes of the tensors within a value, and its numbers."""
    if isinstance(value, torch.Tensor):
        shapes.append(None if value.is_nested else tuple(value.shape))
    elif isinstance(value, NUMBERS):
        numbers.append(value)
    elif isinstance(value, slice):
        numbers += [each for each in (value.start, value.stop, value.step) if isinstance(each, NUMBERS)]
    elif isinstance(value, (list, tuple)):
        for each in value:
            _sign(each, shapes, numbers)


def _why_not_captured(optimizer: Any) -> str | None:
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if any(group.get("capturable") is False for group in groups):
        return f"{name} without capturable=True"
    torchs = type(optimizer).__module__.startswith("torch.optim") and name != GRAPH_SAFE
    return f"{name}, which cannot be captured" if torchs and "capturable" not in groups[0] else None


def _fetches_flag(scaler: Any, optimizers: Iterable[Any]) -> bool:
    """Whether a loss scaler fetches its flag of an overflow: a static one has none, and fused steps read it there."""
    if scaler is None or not scaler.is_enabled() or not getattr(scaler, "dynamic", True):
        return False
    return not all(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Return the functions that run beside the module's own, on its layers and on their parameters."""
    owners = [(each, MODULE_HOOKS) for each in module.modules()]
    for owner, names in [*owners, *((each, TENSOR_HOOKS) for each in module.parameters())]:
        for name in names:
            yield from (getattr(owner, name, None) or {}).values()
