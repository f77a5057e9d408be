"""What the tests of packing have in common."""

import numpy as np
from torch.utils.data import Dataset

from lightning_turbo.data import PackedDataset, pack_folder

AFFINE = np.array([[-2.0, 0, 0, 90], [0, 1.5, 0, -126], [0, 0.1, 3, -72], [0, 0, 0, 1]])


def packed(folder, out, **options):
    """A folder, packed and opened."""
    pack_folder(folder, out, **options)
    return PackedDataset(out)


class Samples(Dataset):
    """Samples of a function of the index, which counts what was asked for."""

    def __init__(self, make, number=5):
        self.make, self.number, self.asked = make, number, []

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        if not 0 <= index < self.number:
            raise IndexError(index)
        self.asked.append(index)
        return self.make(index)


def scan(n):
    """A volume with channels, whose shape and dtype follow from its number."""
    generator = np.random.default_rng(n)
    return generator.integers(0, 99, (2, 3 + n, 4, 5 + n % 2)).astype(("i2", "u1")[n % 2])


def files_of(folder):
    """The bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
