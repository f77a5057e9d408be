"""Samples that were packed into files once, and what reads them again."""

from __future__ import annotations

__all__: list[str] = []
