"""Lightning's DataModules: prefetching in the background, and NVIDIA DALI."""

from __future__ import annotations

from lightning_turbo.datamodules.dali import DALIDataModule
from lightning_turbo.datamodules.prefetch import PrefetchDataModule

__all__ = ["DALIDataModule", "PrefetchDataModule"]
