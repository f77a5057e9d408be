"""Small synthetic scans in the layout of BraTS, to try the example without a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["write_scans"]


def write_scans(folder: Path, number: int = 10, size: Sequence[int] = (48, 48, 40), seed: int = 0) -> None:
    """Write scans of two modalities, each with a ball, and their label volumes as ``.nii.gz`` files.

    Args:
        folder: Folder in which a folder for each case is created.
        number: Number of cases.
        size: Approximate size of a scan in voxels.
        seed: Seed of the noise, sizes and positions.
    """
    import nibabel

    generator = np.random.default_rng(seed)
    for n in range(number):
        shape = np.asarray(size) - generator.integers(0, 4, 3)
        center = shape * generator.uniform(0.35, 0.65, 3)
        grid = np.indices(tuple(shape.tolist())).T - center
        distance = np.sqrt(np.square(grid).sum(-1)).T
        radius = min(shape) * generator.uniform(0.15, 0.25)
        label = (distance < radius).astype(np.uint8) + (distance < radius / 2).astype(np.uint8)
        case = folder / f"Synthetic-{n:03}"
        case.mkdir(parents=True, exist_ok=True)
        for end, contrast in (("t1n", (0, 60, 180)), ("t2w", (0, 150, 90))):
            noise = generator.normal(300, 40, shape)
            scan = (noise + np.take(contrast, label)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(scan, np.diag([1.0, 1.0, 1.5, 1.0])), case / f"{case.name}-{end}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, np.diag([1.0, 1.0, 1.5, 1.0])), case / f"{case.name}-seg.nii.gz")
