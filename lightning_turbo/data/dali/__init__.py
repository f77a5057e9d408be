"""DALI pipelines as loaders for any training loop; DALI itself is imported when a pipeline is built."""

from __future__ import annotations

from lightning_turbo.data.dali.dynamic import DynamicPipeline
from lightning_turbo.data.dali.images import ImageFolder
from lightning_turbo.data.dali.loader import DALILoader

__all__ = ["DALILoader", "DynamicPipeline", "ImageFolder"]
