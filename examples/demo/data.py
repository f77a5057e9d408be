"""Datasets of the demo. They are part of installed packages, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

PATCH = 28  # voxels per side, as in MedMNIST3D
STRIDE = 7  # voxels between neighboring patches
CUT = 105  # coronal plane between validation (behind it) and training (in front of it), in voxels from the back
GAP = 4  # unused voxels on each side of the cut


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoData:
    """A classification task: two datasets of ``(image, label)`` and their properties."""

    train: Any  # images are float32 of (channels, *size), labels are integers
    val: Any
    dims: int  # spatial dimensions of an image, 2 or 3
    classes: int
    batch_size: int


def load_digits(seed: int) -> DemoData:
    """Load scikit-learn's handwritten digits: 1797 images of 8 x 8, 10 classes, one quarter for validation.

    Args:
        seed: Seed of the split, which is stratified by class.

    Returns:
        The task. Images are standardized with the mean and standard deviation of the training part.
    """
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32)
    parts = model_selection.train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=seed)
    train_x, val_x, train_y, val_y = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    mean, deviation = train_x.mean(), train_x.std()
    return DemoData(
        train=TensorDataset((train_x - mean) / deviation, train_y),
        val=TensorDataset((val_x - mean) / deviation, val_y),
        dims=2,
        classes=10,
        batch_size=32,
    )


class VolumePatches(Dataset[tuple[Tensor, Tensor]]):
    """Cubes of a volume ``(x, y, z)``, as views. ``corners``, of shape ``(patches, 3)``, are the lowest voxels."""

    def __init__(self, volume: Tensor, corners: npt.NDArray[np.int64], labels: Tensor, size: int = PATCH) -> None:
        self.volume = volume
        self.corners = corners
        self.labels = labels
        self.size = size

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y, z = self.corners[index]
        cube = self.volume[x : x + self.size, y : y + self.size, z : z + self.size]
        return cube.unsqueeze(0), self.labels[index]


def load_mni() -> DemoData:
    """Load cubes of nilearn's MNI152 brain template, labeled by whether they have more white matter than gray matter.

    The images are cubes of 28 voxels per side (1 mm each) of the T1-weighted template. The labels come from the
    template's maps of gray and white matter. Cubes of which less than half is brain are excluded. The template is
    symmetric, so one hemisphere is excluded. Training cubes lie in front of a coronal plane, validation
    cubes behind it; cubes that touch the plane or the gap around it are excluded.

    The volume is standardized with the mean and standard deviation of the training part's brain. The template is one
    averaged brain: the task shows a 3D pipeline and its speed, not that a network generalizes to people.
    """
    from nilearn import datasets

    volume = datasets.load_mni152_template(resolution=1).get_fdata(dtype=np.float32)
    gray = datasets.load_mni152_gm_template(resolution=1).get_fdata(dtype=np.float32)
    white = datasets.load_mni152_wm_template(resolution=1).get_fdata(dtype=np.float32)

    first = volume.shape[0] // 2 + 1  # first voxel after the plane of symmetry
    # Means over all cubes, whose corners are STRIDE voxels apart.
    gray_fraction, white_fraction = (_cube_means(part[first:]) for part in (gray, white))
    corners = STRIDE * np.stack(np.indices(gray_fraction.shape), axis=-1) + (first, 0, 0)
    brain = gray_fraction + white_fraction > 0.5
    corners, labels = corners[brain], (white_fraction > gray_fraction)[brain].astype(np.int64)

    front = corners[:, 1] >= CUT + GAP
    back = corners[:, 1] + PATCH <= CUT - GAP
    tissue = volume[first:, CUT + GAP :][(gray + white)[first:, CUT + GAP :] > 0.5]
    standard = torch.from_numpy((volume - tissue.mean()) / tissue.std())
    train, val = (VolumePatches(standard, corners[part], torch.from_numpy(labels[part])) for part in (front, back))
    return DemoData(train=train, val=val, dims=3, classes=2, batch_size=16)


def _cube_means(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return F.avg_pool3d(torch.from_numpy(values)[None], PATCH, STRIDE)[0].numpy()
