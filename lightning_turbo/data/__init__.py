"""Fast loading for any torch loop: prefetching, copies to the device, packed data, and the settings of workers."""

from __future__ import annotations

from lightning_turbo.data.cache import cache_transforms
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.device import DevicePrefetcher, DeviceTransfer
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.normalize import Normalize
from lightning_turbo.data.pack_files import pack_folder
from lightning_turbo.data.packed import PackedDataset
from lightning_turbo.data.packing import pack
from lightning_turbo.data.patches import PatchDataset
from lightning_turbo.data.prefetcher import PrefetchIterator
from lightning_turbo.data.sample_seeds import seed_sample, seed_samples
from lightning_turbo.data.seeded_sampler import SeededSampler
from lightning_turbo.data.tune_workers import tune_workers

__all__ = [
    "DALILoader",
    "DevicePrefetcher",
    "DeviceTransfer",
    "Normalize",
    "PackedDataset",
    "PatchDataset",
    "PrefetchIterator",
    "PrefetchLoader",
    "SeededSampler",
    "cache_transforms",
    "pack",
    "pack_folder",
    "seed_sample",
    "seed_samples",
    "tune_workers",
]
