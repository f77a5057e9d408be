"""The same augmentation with any number of worker processes and after a restart: MONAI transforms on small volumes.

Run it with ``python examples/sample_seeds_monai.py``. It loads two epochs of the same volumes with 0, 1 and 2 worker
processes, and the second epoch alone, as a restarted run does. It repeats this with a seed for each sample, and prints
which of the runs gave the same volumes. It requires MONAI.
"""

import argparse

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandSpatialCropd

from lightning_turbo.data import SeededSampler, seed_samples

SEED = 42


def volumes(number):
    """Return random volumes with random transforms."""
    generator = np.random.default_rng(0)
    items = [{"image": generator.normal(size=(1, 12, 12, 12)).astype("float32")} for _ in range(number)]
    steps = [
        RandFlipd(keys="image", prob=0.5, spatial_axis=0),
        RandSpatialCropd(keys="image", roi_size=(8, 8, 8), random_size=False),
        RandGaussianNoised(keys="image", prob=0.5),
    ]
    return Dataset(items, Compose(steps))


def load(number, num_workers, seeded, epochs):
    """Load the epochs with a new loader, as a new process would, and return the volumes of the last one."""
    torch.manual_seed(SEED)
    data = volumes(number)
    # The order also depends on the seed and the epoch. set_epoch sets the epoch of the sampler and of the transforms.
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
        "restarted after the first epoch": (0, (1,)),
    }
    for seeded in (False, True):
        print(f"epoch 1 {'with' if seeded else 'without'} seed_samples, compared with no worker processes:")
        first = load(options.volumes, 0, seeded, (0, 1))
        for name, (num_workers, epochs) in cases.items():
            same = torch.equal(first, load(options.volumes, num_workers, seeded, epochs))
            print(f"  {name}: {'bitwise identical volumes' if same else 'other volumes'}")


if __name__ == "__main__":
    main()
