"""Changes to a network that keep its results."""

from __future__ import annotations

from lightning_turbo.nn.bias import BiasReport, drop_bias_before_norm
from lightning_turbo.nn.compile import CompileReport, compiled_in_place
from lightning_turbo.nn.memory_format import set_memory_format

__all__ = [
    "BiasReport",
    "CompileReport",
    "compiled_in_place",
    "drop_bias_before_norm",
    "set_memory_format",
]
