"""Train on compressed volumes, for ``lightning-turbo tune``: ``python volumes.py FOLDER DEVICE``."""

from __future__ import annotations

import sys
from pathlib import Path

import nibabel
import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

if __name__ == "__main__":  # tune runs this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.demo.data import VolumePatches
from examples.demo.model import DemoNet


class CompressedVolumes(Dataset[tuple[Tensor, Tensor]]):
    """Volumes in files ``FOLDER/CLASS/*.nii.gz``. Each access reads, decompresses and clips a volume."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.nii.gz"), key=lambda path: path.name)
        self.classes = sorted({path.parent.name for path in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.files[index]
        volume = nibabel.load(path).get_fdata(dtype=np.float32)
        volume = np.clip(volume, *np.percentile(volume, (0.5, 99.5)).astype(np.float32))
        return torch.from_numpy(volume).unsqueeze(0), torch.tensor(self.classes.index(path.parent.name))


def write_volumes(patches: VolumePatches, folder: Path) -> CompressedVolumes:
    """Write each patch to its own file in the format of a scanner: 16 bits per voxel, compressed with gzip."""
    for index, (image, label) in enumerate(patches[number] for number in range(len(patches))):
        path = folder / ("white" if label else "gray") / f"{index:04d}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        volume = nibabel.Nifti1Image(image[0].numpy(), np.eye(4))
        volume.set_data_dtype(np.int16)
        volume.to_filename(path)
    return CompressedVolumes(folder)


def main(folder: str, device: str = "cpu") -> None:
    """Train on the volumes in a folder."""
    torch.set_num_threads(1)  # the other cores are for loading
    loader = DataLoader(CompressedVolumes(Path(folder)), 16, shuffle=True)
    trainer = Trainer(accelerator=device, devices=1, max_epochs=6, logger=False, enable_checkpointing=False)
    trainer.fit(DemoNet(dims=3, classes=2), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
