"""Settings that are refused, each with a text that says what was expected and what came."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import Prefetch, PrefetchDataModule
from lightning_turbo.data import (
    DevicePrefetcher,
    Normalize,
    PackedDataset,
    PrefetchIterator,
    PrefetchLoader,
    SeededSampler,
    seed_samples,
    tune_workers,
)
from tests.data.samples import Stream

ARRAYS = {"train": np.zeros((20, 4)), "test": np.zeros((6, 4))}
IMAGE = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
COUNT = "an integer of 1 or more, got"


class Module(PrefetchDataModule):
    def train_dataloader(self):
        return DataLoader(range(3))


def device(loader=(1,), device="cpu", **settings):
    return DevicePrefetcher(loader, device, **settings)


def tune(make_loader=lambda **settings: DataLoader(range(3), **settings), **settings):
    return tune_workers(make_loader, **settings)


REFUSED = [
    # PrefetchLoader.
    (lambda: PrefetchLoader([1], prefetch_batches=0), ValueError, "prefetch_batches: expected an integer"),
    (lambda: PrefetchLoader([1], threads=-1), ValueError, f"threads: expected {COUNT} -1"),
    (lambda: PrefetchLoader.of(DataLoader([1]), threads="2"), TypeError, f"{COUNT} '2'"),
    (lambda: PrefetchLoader.of([1]), TypeError, r"of expected a torch.utils.data.DataLoader, got \[1\]"),
    (lambda: PrefetchLoader(DataLoader([1])), TypeError, r"got the loader .*PrefetchLoader.of\(loader\)"),
    (lambda: PrefetchLoader(PrefetchLoader(Stream())), TypeError, "expected a dataset, got the loader"),
    # PrefetchDataModule.
    (lambda: Module(prefetch_batches=0), ValueError, f"prefetch_batches: expected {COUNT} 0"),
    (lambda: Module(threads=0), ValueError, f"threads: expected {COUNT} 0"),
    (lambda: Module(threads=True), TypeError, f"threads: expected {COUNT} True"),
    (lambda: Module(device_prefetch="cuda"), TypeError, "device_prefetch='cuda': expected True or False"),
    (lambda: Module(device_transform=1), TypeError, "device_transform=1: expected a function or None"),
    (lambda: Module(num_workers=2), TypeError, "no argument for num_workers=2; expected prefetch_batches, .*, by"),
    # Prefetch.
    (lambda: Prefetch(-1), ValueError, f"prefetch_batches: expected {COUNT} -1"),
    (lambda: Prefetch(threads="auto"), TypeError, f"threads: expected {COUNT} 'auto'"),
    (lambda: Prefetch(exact_resume=None), TypeError, "exact_resume=None: expected True or False"),
    (lambda: Prefetch(sample_seeds=-1), ValueError, "sample_seeds: expected .*, got -1"),
    # PrefetchIterator.
    (lambda: PrefetchIterator(iter([]), prefetch_batches=-1), ValueError, f"prefetch_batches: expected {COUNT} -1"),
    (lambda: PrefetchIterator(iter([]), prefetch_batches=1.5), TypeError, f"{COUNT} 1.5"),
    (lambda: PrefetchIterator(iter([]), prefetch_batches=True), TypeError, f"{COUNT} True"),
    (lambda: PrefetchIterator([1, 2]), TypeError, r"expected an iterator, got \[1, 2\], which has no __next__"),
    (lambda: PrefetchIterator(DataLoader([1])), TypeError, r"for a DataLoader take PrefetchLoader.of\(loader\)"),
    # DevicePrefetcher.
    (lambda: device(3), TypeError, "loader: expected an iterable of batches such as a DataLoader, got 3"),
    (lambda: device(device="tpu9"), ValueError, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'tpu9'"),
    (lambda: device(device=None), ValueError, "device: expected .*, got None"),
    (lambda: device(device="meta"), ValueError, "device: expected .*, got 'meta'"),
    (lambda: device(device="cuda:99"), ValueError, r"'cpu' or one of the \d+ CUDA devices .*, got 'cuda:99'"),
    (lambda: device(prefetch_batches=0), ValueError, f"prefetch_batches: expected {COUNT} 0"),
    (lambda: device(min_bytes="1M"), TypeError, "min_bytes: expected an integer of 0 or more, got '1M'"),
    (lambda: device(transform=3), TypeError, "transform=3: expected a function or None"),
    # Normalize.
    (lambda: Normalize((0.1, 0.2), 0.3), ValueError, r"mean, std: expected one number of each .*, got \(\(0.1, 0.2\),"),
    (lambda: Normalize(0.1, 0.0), ValueError, r"std, scale: expected numbers above zero, got \(0.0, 255.0\)"),
    (lambda: Normalize(120.0, 50.0), ValueError, "at most 1 .* Divide both by 255, or pass scale=1.0"),
    (lambda: Normalize(math.nan, 1.0), ValueError, r"mean, std, scale: expected finite numbers, got \(nan, 1.0, 255"),
    (lambda: Normalize(0.1, 1.0, scale=None), ValueError, "mean, std, scale: expected finite numbers"),
    (lambda: Normalize(None, 1.0), TypeError, r"mean, std: expected one number per channel, got \(None, 1.0\)"),
    (lambda: Normalize(0.1, 1.0, memory_format="nhwc"), TypeError, "expected a memory format such as .*, got 'nhwc'"),
    (lambda: Normalize(0.1, 1.0, keys="image"), TypeError, "keys: expected a sequence of names .*, got 'image'"),
    (lambda: Normalize(0.1, 1.0, dtype=torch.int8), TypeError, "expected a floating-point dtype.*, got torch.int8"),
    (lambda: Normalize([0.1, 0.1], [1.0, 1.0])(IMAGE), ValueError, "Normalize: expected 2 channels, got 3"),
    (lambda: Normalize(0.1, 1.0, keys=["x"])({"image": IMAGE}), KeyError, r"batch has no \['x'\]; it has \['image'\]"),
    # tune_workers.
    (lambda: tune(3), TypeError, "make_loader: expected a function that returns a DataLoader, got 3"),
    (lambda: tune(step=3), TypeError, "step=3: expected a function or None"),
    (lambda: tune(show=3), TypeError, "show=3: expected a function or None"),
    (lambda: tune(seconds=0), ValueError, "seconds: expected a finite number above zero, got 0"),
    (lambda: tune(seconds=math.inf), ValueError, "above zero, got inf"),
    (lambda: tune(max_workers=-1), ValueError, "max_workers: expected an integer of 0 or more, or None, got -1"),
    (lambda: tune(max_workers=0.5), ValueError, "or None, got 0.5"),
    (lambda: tune(tolerance=-0.1), ValueError, "tolerance: expected a finite number of 0 or more, as 0.05, got -0.1"),
    # PackedDataset.
    (lambda: PackedDataset(ARRAYS, keys=["x"]), KeyError, r"keys: expected some of \['train'.*\], got \['x'\]"),
    (lambda: PackedDataset(ARRAYS), ValueError, "source: expected arrays of equal length; .*'test': 6"),
    (lambda: PackedDataset(ARRAYS, keys="test"), TypeError, "keys: expected a sequence of names"),
    (lambda: PackedDataset(ARRAYS, transform=3), TypeError, "transform=3: expected a function or None"),
    (lambda: PackedDataset({"text": np.array(["a"])}), TypeError, "text: expected a dtype that torch has, got <U1"),
    (lambda: PackedDataset({"n": np.array(3)}), ValueError, "n: expected an array with one row per sample"),
    (lambda: PackedDataset(3), TypeError, "source: expected a folder, an .npz or .npy file"),
    (lambda: PackedDataset({"x": 3}), TypeError, "x: expected a numpy array or the path of a .npy file, got 3"),
    (lambda: PackedDataset("."), FileNotFoundError, "got '.', a folder without packed.json. Pack first"),
    (lambda: PackedDataset(np.arange(3))[3], IndexError, None),
    (
        lambda: PackedDataset(np.arange(2)).batch(np.array([True, False])),
        TypeError,
        "indices: expected integers such as np",
    ),
    # seed_samples.
    (lambda: seed_samples(range(3), 1), TypeError, "loader: expected a torch.utils.data.DataLoader"),
    (lambda: seed_samples(DataLoader(Stream()), 1), TypeError, "with __getitem__, got the IterableDataset Stream"),
    (lambda: PrefetchLoader(Stream(), sample_seeds=1), TypeError, "with __getitem__, got the IterableDataset Stream"),
    (lambda: list(seed_samples(DataLoader({"a": 1}, sampler=["a"]), 1)), TypeError, r"yields \['a'\]; expected int"),
    (
        lambda: list(seed_samples(DataLoader([1], sampler=[0.0], batch_size=None), 1)),
        TypeError,
        r"sampler yields 0.0; expected integers",
    ),
    (
        lambda: list(seed_samples(DataLoader([1], batch_sampler=[0]), 1)),
        TypeError,
        "sampler yields 0; expected integers",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


SEEDS = {
    "seed": [lambda seed: seed_samples(DataLoader(range(3)), seed), lambda seed: SeededSampler([1], seed)],
    "sample_seeds": [lambda seed: PrefetchLoader(range(3), sample_seeds=seed), lambda seed: Module(sample_seeds=seed)],
}


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize(
    ("seed", "error"), [(1.0, TypeError), ("1", TypeError), (True, TypeError), (-1, ValueError), (2**32, ValueError)]
)
def test_seeds_that_are_refused(name, seed, error):
    for make in SEEDS[name]:
        with pytest.raises(error, match=rf"{name}: expected an integer from 0 to 2\*\*32 - 1, got {seed!r}"):
            make(seed)
