"""The parts of ``ExactResume``: what a checkpoint holds for it, and what is corrected and restored from that."""

from __future__ import annotations

__all__: list[str] = []
