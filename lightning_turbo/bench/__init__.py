"""Benchmarks: every claim of speed or memory, beside the peers, from one command."""

from __future__ import annotations

__all__: list[str] = []
