"""Patches per second from scans: a dataset that reads whole scans, and ``PatchDataset`` on the packed folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_turbo import PatchDataset
from lightning_turbo.data import pack_folder

PATCH = (64, 64, 64)
SCANS = 6


class WholeScans(Dataset[Tensor]):
    """A random patch of each scan. The whole file is read, as a dataset of files usually does."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.nii.gz"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        scan = nibabel.load(self.files[index]).get_fdata(dtype=np.float32)
        corner = [int(torch.randint(whole - part + 1, ())) for whole, part in zip(scan.shape, PATCH, strict=True)]
        x, y, z = (slice(start, start + part) for start, part in zip(corner, PATCH, strict=True))
        return torch.from_numpy(np.ascontiguousarray(scan[x, y, z]))[None]


def write_scans(folder: Path, count: int = SCANS) -> None:
    """Write scans of different sizes, cropped from nilearn's brain template, in the format of a scanner."""
    from nilearn import datasets

    whole = datasets.load_mni152_template(resolution=1).get_fdata(dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        scan = nibabel.Nifti1Image(whole[number:, 2 * number :, number : number + 170], np.eye(4))
        scan.set_data_dtype(np.int16)
        scan.to_filename(folder / f"{number}.nii.gz")


def measure(out: Path, seconds: float, step: Callable[[str], Any]) -> dict[str, Any]:
    """Return the patches per second of both datasets, measured alternately, and the seconds that packing took.

    Args:
        out: Folder for the scans and the packed file.
        seconds: About how long to measure.
        step: Called with the name of each step before it starts.
    """
    step("patches: writing scans")
    write_scans(out / "scans")
    step("patches: packing them once")
    began = time.perf_counter()
    pack_folder(out / "scans", out / "packed", overwrite=True)
    packing = time.perf_counter() - began
    step("patches: reading")
    datasets: dict[str, Dataset[Any]] = {
        "plain": WholeScans(out / "scans"),
        "ours": PatchDataset(out / "packed", PATCH, keys={"image": "volumes"}),
    }
    counts, spent = dict.fromkeys(datasets, 0), dict.fromkeys(datasets, 0.0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, data in datasets.items():
            for _ in range(1 if name == "plain" else 20):
                began = time.perf_counter()
                data[counts[name] % SCANS]
                spent[name] += time.perf_counter() - began
                counts[name] += 1
    rates = {name: counts[name] / spent[name] for name in datasets}
    return {"patches_per_second": rates, "packing_seconds": packing, "factor": rates["ours"] / rates["plain"]}
