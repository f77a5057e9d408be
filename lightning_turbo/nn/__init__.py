"""Changes to a network that do not change its results."""

from __future__ import annotations

from lightning_turbo.nn.bias import BiasReport, drop_bias_before_norm
from lightning_turbo.nn.compile import CompileReport, compiled_in_place
from lightning_turbo.nn.memory_format import FormatTimes, measure_memory_format, set_memory_format

__all__ = [
    "BiasReport",
    "CompileReport",
    "FormatTimes",
    "compiled_in_place",
    "drop_bias_before_norm",
    "measure_memory_format",
    "set_memory_format",
]
