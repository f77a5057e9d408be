"""Callback that sets the memory format of a network, or chooses it by a measurement."""

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
from lightning_turbo.nn.memory_format import (
    FORMATS,
    FormatTimes,
    has_format,
    measure_memory_format,
    set_memory_format,
)
from lightning_turbo.plugins.apex_amp import ApexAMP

__all__ = ["MemoryFormat"]


class MemoryFormat(Callback):
    """Convert a 2D or 3D network to channels last, or to the format that a measurement finds faster.

    Args:
        memory_format: ``"channels_last"`` or ``"contiguous"`` sets this format. ``"measure"`` measures forward and
            backward with ``example_input_array`` of the module and sets the faster format. The measurement uses the
            Trainer's device and precision, with autocast in place of half weights.
        rounds: Number of turns of each format in the measurement, at least 1.

    Raises:
        ValueError: If an argument is out of range; in ``setup``, if the module has no ``example_input_array`` for the
            measurement.

    Warns:
        NoEffectWarning: If the module has no weights of four or five dimensions in ``setup``, for example because
            ``configure_model`` makes the layers later.

    Note:
        The measurement runs on a copy of the module. Give ``example_input_array`` the batch size of the training. All
        ranks use the result of rank 0. The attribute ``chosen`` holds the format, ``times`` the measurement.

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
        """Measure before training if asked to, and set the format."""
        if not has_format(pl_module):
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
        rank_zero_warn(f"MemoryFormat has no effect: {why}.", category=NoEffectWarning)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> str:
        inputs: Any = pl_module.example_input_array
        if inputs is None:
            raise ValueError(
                f"MemoryFormat('measure'): expected a batch in example_input_array, got None in "
                f"{type(pl_module).__name__}. Set it, or choose 'channels_last' or 'contiguous'."
            )
        device = trainer.strategy.root_device
        inputs = inputs if isinstance(inputs, (tuple, list, dict)) else (inputs,)
        inputs = pl_module.transfer_batch_to_device(inputs, device, 0)
        context = _make_context(trainer.precision_plugin, device)
        self.times = measure_memory_format(pl_module, inputs, device=device, context=context, rounds=self.rounds)
        return self.times.best


def _make_context(precision: Any, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that returns the context of a forward pass in the precision of the training.

    The strategy converts weights to half precision after ``setup``: autocast replaces that here.
    """
    if isinstance(precision, ApexAMP):
        precision.place_on(device.type)
    half = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision.precision)
    return precision.forward_context if half is None else partial(torch.autocast, device.type, dtype=half)
