"""Packing samples into files, and reading them back."""

from __future__ import annotations

__all__: list[str] = []
