"""Orders of samples: made from a seed and an epoch, and sharded over ranks and batches."""

from __future__ import annotations

__all__: list[str] = []
