"""The same augmentation with any number of worker processes and after a restart: MONAI transforms on small volumes.

Run it: ``python examples/sample_seeds_monai.py``. It loads two epochs of the same volumes with 0, 1 and 2 worker
processes, and a second epoch alone as a run does that was stopped and started again, each time without and with seeds
that belong to the samples, and says which of them gave the same volumes. It needs MONAI.
"""

import argparse

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandSpatialCropd

from lightning_turbo.data import SeededSampler, seed_samples

SEED = 42


def volumes(number):
    """Random volumes, and transforms that draw for each of them."""
    generator = np.random.default_rng(0)
    items = [{"image": generator.normal(size=(1, 12, 12, 12)).astype("float32")} for _ in range(number)]
    steps = [
        RandFlipd(keys="image", prob=0.5, spatial_axis=0),
        RandSpatialCropd(keys="image", roi_size=(8, 8, 8), random_size=False),
        RandGaussianNoised(keys="image", prob=0.5),
    ]
    return Dataset(items, Compose(steps))


def load(number, num_workers, seeded, epochs):
    """Load the epochs in a new loader, as a new process would, and return the last one."""
    torch.manual_seed(SEED)
    data = volumes(number)
    # The order too follows from the seed and the epoch; set_epoch tells the epoch to sampler and transforms alike.
    loader = DataLoader(data, batch_size=4, sampler=SeededSampler(data, SEED), num_workers=num_workers)
    loader = seed_samples(loader, SEED) if seeded else loader
    images = torch.empty(0)
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        images = torch.cat([batch["image"].as_tensor() for batch in loader])
    return images


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--volumes", type=int, default=24)
    options = parser.parse_args()
    if options.volumes < 1:
        parser.error(f"got --volumes {options.volumes}; expected an integer of 1 or more")
    cases = {
        "1 worker process": (1, (0, 1)),
        "2 worker processes": (2, (0, 1)),
        "stopped after the first epoch and started again": (0, (1,)),
    }
    for seeded in (False, True):
        print(f"epoch 1 {'with' if seeded else 'without'} seed_samples, beside no worker process:")
        first = load(options.volumes, 0, seeded, (0, 1))
        for name, (num_workers, epochs) in cases.items():
            same = torch.equal(first, load(options.volumes, num_workers, seeded, epochs))
            print(f"  {name}: {'the same volumes, bit for bit' if same else 'other volumes'}")


if __name__ == "__main__":
    main()
