"""Fast loading for any torch loop: prefetching, copies to the device, packed data, and tuning of workers."""

from __future__ import annotations

from lightning_turbo.data.dali import DALILoader, DynamicPipeline
from lightning_turbo.data.loading.device import DevicePrefetcher, DeviceTransfer
from lightning_turbo.data.loading.loader import PrefetchLoader, seed_samples
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from lightning_turbo.data.loading.tune_workers import tune_workers
from lightning_turbo.data.normalize import Normalize
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.orders.weighted_sampler import WeightedSampler, balanced_weights, mixture_weights
from lightning_turbo.data.packed.cache import cache_transforms, stamp_files
from lightning_turbo.data.packed.pack_files import pack_folder
from lightning_turbo.data.packed.packed_dataset import PackedDataset
from lightning_turbo.data.packed.packing import pack
from lightning_turbo.data.packed.patches import PatchDataset
from lightning_turbo.data.sample_seeds import seed_sample

__all__ = [
    "DALILoader",
    "DevicePrefetcher",
    "DeviceTransfer",
    "DynamicPipeline",
    "LengthBatchSampler",
    "Normalize",
    "PackedDataset",
    "PatchDataset",
    "PrefetchIterator",
    "PrefetchLoader",
    "SeededSampler",
    "WeightedSampler",
    "balanced_weights",
    "cache_transforms",
    "mixture_weights",
    "pack",
    "pack_folder",
    "seed_sample",
    "seed_samples",
    "stamp_files",
    "tune_workers",
]
