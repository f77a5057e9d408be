"""Callback that sets the memory format of a network."""

from __future__ import annotations

import torch

from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_binding,
    is_overridden,
    rank_zero_warn,
)
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.memory_format import MemoryFormatName, format_name, has_format, set_memory_format

__all__ = ["MemoryFormat"]


class MemoryFormat(Callback):
    """Convert the weights of a 2D or 3D network to the channels-last format.

    ``lightning-turbo tune train.py --only channels-last`` measures whether this is faster.

    Args:
        memory_format: ``"channels_last"`` or ``"contiguous"``, or torch's object, such as ``torch.channels_last``.

    Raises:
        ValueError: If it is neither.

    Warns:
        NoEffectWarning: If the module has no weights with four or five dimensions in ``setup``, for example because
            ``configure_model`` creates the layers later.

    Example:
        >>> from lightning_turbo import MemoryFormat
        >>> callback = MemoryFormat("channels_last")
    """

    def __init__(self, memory_format: MemoryFormatName | torch.memory_format = "channels_last") -> None:
        check_binding("MemoryFormat")
        self.memory_format: MemoryFormatName = format_name(memory_format)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the format."""
        if has_format(pl_module):
            set_memory_format(pl_module, self.memory_format)
        else:
            _warn_of_no_effect(pl_module)


def _warn_of_no_effect(pl_module: LightningModule) -> None:
    name = type(pl_module).__name__
    if is_overridden("configure_model", pl_module):
        why = (
            f"{name} creates its layers in configure_model, after setup. Call "
            "lightning_turbo.nn.set_memory_format(self, 'channels_last') at the end of configure_model instead"
        )
    else:
        why = f"{name} has no 2D or 3D layers. Remove it"
    rank_zero_warn(f"MemoryFormat has no effect: {why}.", category=NoEffectWarning)
