"""Callbacks that add the techniques to a Trainer."""

from __future__ import annotations

from lightning_turbo.callbacks.augment import AugmentBatches
from lightning_turbo.callbacks.drop_bias import DropBiasBeforeNorm
from lightning_turbo.callbacks.effective_batch_size import EffectiveBatchSize
from lightning_turbo.callbacks.exact_accumulation import ExactAccumulation
from lightning_turbo.callbacks.exact_resume import ExactResume
from lightning_turbo.callbacks.fused_optimizers import FusedOptimizers
from lightning_turbo.callbacks.grad_to_none import GradToNone
from lightning_turbo.callbacks.lr_range import lr_range
from lightning_turbo.callbacks.memory_format import MemoryFormat
from lightning_turbo.callbacks.preemption import Preemption
from lightning_turbo.callbacks.prefetch import Prefetch

__all__ = [
    "AugmentBatches",
    "DropBiasBeforeNorm",
    "EffectiveBatchSize",
    "ExactAccumulation",
    "ExactResume",
    "FusedOptimizers",
    "GradToNone",
    "MemoryFormat",
    "Preemption",
    "Prefetch",
    "lr_range",
]
