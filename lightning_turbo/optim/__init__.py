"""Techniques around the optimizer step, for any torch loop."""

from __future__ import annotations

from lightning_turbo.optim.accumulation import AccumulationWindow, scale_gradients
from lightning_turbo.optim.cyclic import CyclicSchedule, cyclic_lr
from lightning_turbo.optim.layerwise import lamb, lars, split_parameters
from lightning_turbo.optim.lr_range import LRRange, propose_lr_range
from lightning_turbo.optim.lr_scaling import lr_factor
from lightning_turbo.optim.param_groups import merge_param_groups

__all__ = [
    "AccumulationWindow",
    "CyclicSchedule",
    "LRRange",
    "cyclic_lr",
    "lamb",
    "lars",
    "lr_factor",
    "merge_param_groups",
    "propose_lr_range",
    "scale_gradients",
    "split_parameters",
]
