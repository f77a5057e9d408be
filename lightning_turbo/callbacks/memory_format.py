"""The callback that sets or measures the memory format of a network, before it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch

from lightning_turbo._checks import expect, is_whole
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_binding,
    is_overridden,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.memory_format import FORMATS, FormatTimes, measure_memory_format, set_memory_format

__all__ = ["MemoryFormat"]


class MemoryFormat(Callback):
    """Put a 2D or 3D network into channels last, or into whichever format is measured to be faster.

    Args:
        memory_format: ``"measure"`` times forward and backward on ``example_input_array`` of the module, on the
            Trainer's device and in its precision (by autocast where weights will be half), and takes the faster one;
            ``"channels_last"`` or ``"contiguous"`` sets it.
        rounds: How often the two formats take turns in the measurement, at least 1.

    Raises:
        ValueError: If an argument is out of range; in ``setup``, if the module has no ``example_input_array`` to
            measure with.

    Warns:
        NoEffectWarning: If the module has no weights of four or five dimensions, as where ``configure_model`` makes
            the layers, after ``setup``.

    Note:
        The measurement runs on a copy of the module and changes nothing in it; give ``example_input_array`` the
        batch size you train with. With several ranks, all take what rank 0 found. The choice is in the attribute
        ``chosen``, the times in ``times``.

    Example:
        >>> from lightning_turbo import MemoryFormat
        >>> callback = MemoryFormat("channels_last")
    """

    def __init__(
        self, memory_format: Literal["measure", "channels_last", "contiguous"] = "measure", rounds: int = 3
    ) -> None:
        check_binding("MemoryFormat")
        known = ("measure", *FORMATS)
        expect(memory_format in known, "MemoryFormat(memory_format)", memory_format, ", ".join(map(repr, known)))
        expect(is_whole(rounds, 1), "MemoryFormat(rounds)", rounds, "a whole number of at least 1")
        self.memory_format = memory_format
        self.rounds = rounds
        self.chosen: Any = None
        self.times: FormatTimes | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the format; for training, measure before."""
        if not any(parameter.ndim in (4, 5) for parameter in pl_module.parameters()):
            self._warn_of_no_effect(pl_module)
            return
        if self.memory_format != "measure":
            self.chosen = self.memory_format
        elif stage == "fit":
            self.chosen = trainer.strategy.broadcast(self._measure(trainer, pl_module))
            rank_zero_info(f"MemoryFormat: {self.chosen}, measured {self.times and self.times.seconds} s a step.")
        if self.chosen is not None:
            set_memory_format(pl_module, self.chosen)

    def _warn_of_no_effect(self, pl_module: LightningModule) -> None:
        name = type(pl_module).__name__
        if is_overridden("configure_model", pl_module):
            why = (
                f"{name} makes its layers in configure_model, after setup. Call "
                "lightning_turbo.nn.set_memory_format(self, 'channels_last') at the end of configure_model instead"
            )
        else:
            why = f"{name} has no 2D or 3D layers. Remove it"
        rank_zero_warn(f"MemoryFormat changes nothing: {why}.", category=NoEffectWarning)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> str:
        inputs: Any = pl_module.example_input_array
        if inputs is None:
            raise ValueError(
                f"MemoryFormat('measure'): {type(pl_module).__name__} has no example_input_array to measure with. Set "
                "it to a batch of inputs of forward, or choose 'channels_last' or 'contiguous'."
            )
        device = trainer.strategy.root_device
        inputs = inputs if isinstance(inputs, (tuple, list, dict)) else (inputs,)
        inputs = pl_module.transfer_batch_to_device(inputs, device, 0)
        context = _context_of(trainer.precision_plugin, device)
        self.times = measure_memory_format(pl_module, inputs, device=device, context=context, rounds=self.rounds)
        return self.times.best


def _context_of(precision: Any, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of a forward pass that computes as training will.

    Weights become half precision only when the strategy sets up, so autocast stands in for that.
    """
    if hasattr(precision, "place_on"):  # ApexAMP
        precision.place_on(device.type)
    half = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision.precision)
    return precision.forward_context if half is None else partial(torch.autocast, device.type, dtype=half)
