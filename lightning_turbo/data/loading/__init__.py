"""Loaders that prefetch, what carries their epochs across a stop, and the threads and processes behind them."""

from __future__ import annotations

__all__: list[str] = []
