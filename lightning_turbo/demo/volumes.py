"""A training script on compressed volumes, which the second part of the demo tunes: ``volumes.py FOLDER DEVICE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nibabel.nifti1 import Nifti1Image, load
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_turbo._lightning import Trainer
from lightning_turbo.demo.data import VolumePatches
from lightning_turbo.demo.model import DemoNet

__all__ = ["CompressedVolumes", "write_volumes"]


class CompressedVolumes(Dataset[tuple[Tensor, Tensor]]):
    """Volumes in files ``FOLDER/CLASS/*.nii.gz``, each read, unpacked and clipped when it is asked for.

    Args:
        folder: With one folder for each class.
    """

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.nii.gz"), key=lambda path: path.name)
        self.classes = sorted({path.parent.name for path in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.files[index]
        volume = load(path).get_fdata(dtype=np.float32)
        volume = np.clip(volume, *np.percentile(volume, (0.5, 99.5)).astype(np.float32))
        return torch.from_numpy(volume).unsqueeze(0), torch.tensor(self.classes.index(path.parent.name))


def write_volumes(patches: VolumePatches, folder: Path) -> CompressedVolumes:
    """Write each patch into a file of its own, as scanners' volumes are stored: 16 bits a voxel, gzip."""
    for index, (image, label) in enumerate(patches[number] for number in range(len(patches))):
        path = folder / ("white" if label else "grey") / f"{index:04d}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        volume = Nifti1Image(image[0].numpy(), np.eye(4))
        volume.set_data_dtype(np.int16)
        volume.to_filename(path)
    return CompressedVolumes(folder)


def main() -> None:
    """Train on the volumes of a folder, on a kind of device."""
    torch.set_num_threads(1)  # the other cores are for loading
    loader = DataLoader(CompressedVolumes(Path(sys.argv[1])), 16, shuffle=True)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator=sys.argv[2], devices=1, max_epochs=6, **quiet)
    trainer.fit(DemoNet(dims=3, classes=2), loader)


if __name__ == "__main__":
    main()
