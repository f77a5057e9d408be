"""The data: MedMNIST files, MedMNIST datasets by name, or cubes of the MNI152 template, which needs no download."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from examples.demo.data import VolumePatches, load_mni
from lightning_turbo import Normalize, PackedDataset, PrefetchDataModule
from lightning_turbo.errors import MissingExtraError

__all__ = ["FastVolumes", "Volumes", "medmnist_file", "read_part", "samples"]


_mni = functools.cache(load_mni)  # read once for all runs in this process


def _thinned(cubes: Any, thin: int) -> VolumePatches:
    return VolumePatches(cubes.volume, cubes.corners[::thin], cubes.labels[::thin], cubes.size)


class _Binary:
    """Converts a batch of a MedMNIST file to ``(images (b, 1, x, y, z), labels (b,))`` with labels 0 and 1."""

    def __init__(self, positive: int) -> None:
        self.positive = positive

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return images.unsqueeze(1), (labels.reshape(-1) == self.positive).long()


def read_part(path: Path, part: str, positive: int | None = None) -> PackedDataset:
    """Open one part of a MedMNIST file.

    Args:
        path: The ``.npz`` file.
        part: ``"train"``, ``"val"`` or ``"test"``.
        positive: Label of the positive class; all others are negative. ``None`` requires the labels 0 and 1.

    Raises:
        ValueError: If the file is not a MedMNIST3D file, lacks an array, or has other labels.
    """
    wanted = (f"{part}_images", f"{part}_labels")
    try:
        data = PackedDataset(path, keys=wanted, transform=_Binary(1 if positive is None else positive))
    except KeyError as error:
        raise ValueError(
            f"{str(path)!r}: expected the arrays {wanted[0]!r} and {wanted[1]!r} of MedMNIST3D. {error.args[0]} "
            "Rename the arrays, or choose another file."
        ) from error
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ValueError(
            f"expected a MedMNIST3D .npz file, got {str(path)!r}, which cannot be read ({error}). Choose another file."
        ) from error
    images, labels = data.arrays.values()
    if images.ndim != 4 or images.shape[-1] == 3 or labels.reshape(len(labels), -1).shape[1:] != (1,):
        raise ValueError(
            f"{str(path)!r}: expected {wanted[0]} of shape (n, x, y, z) and {wanted[1]} of shape (n, 1) or (n,), got "
            f"{images.shape} and {labels.shape}. Choose a dataset whose name ends in 3d."
        )
    found = sorted({int(label) for label in labels.flat})
    if positive is None and not set(found) <= {0, 1}:
        raise ValueError(
            f"{str(path)!r}: expected {wanted[1]} with the labels 0 and 1, got {found}. Set data.positive to the label "
            "of the positive class; all others are then negative."
        )
    if positive is not None and part == "train" and positive not in found:
        raise ValueError(
            f"positive={positive!r}: expected a training label of {str(path)!r}, one of {found}. Choose one of these."
        )
    return data


def samples(batch: tuple[Tensor, Tensor]) -> int:
    """Return the number of samples in a batch, which is its weight for ``ExactAccumulation``."""
    return len(batch[1])


def medmnist_file(name: str) -> Path:
    """Return the file of a dataset of the package ``medmnist``, which downloads it unless it is cached.

    Args:
        name: A 3D dataset of the package, for example ``"vesselmnist3d"``.

    Raises:
        ModuleNotFoundError: If the package is not installed.
        ValueError: If the package does not have the dataset, or cannot download it.
    """
    try:
        import medmnist
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"--data {name} needs the package medmnist, which is not installed. Install it with "
            "`pip install medmnist`, or pass a file, --data path.npz, or omit --data to use the MNI152 template.",
            name="medmnist",
        ) from error
    known = sorted(key for key in medmnist.INFO if key.endswith("3d"))
    if name not in known:
        raise ValueError(
            f"--data: expected 'mni152', an .npz file, or a 3D dataset of medmnist, got {name!r}. The datasets are "
            f"{', '.join(known)}."
        )
    path = Path(medmnist.info.DEFAULT_ROOT, f"{name}.npz")
    if not path.is_file():
        try:
            getattr(medmnist, medmnist.INFO[name]["python_class"])(split="train", download=True)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--data {name}: medmnist could not download it ({error}). Download it on another machine and put it "
                f"at {str(path)!r}, or pass it as --data path.npz."
            ) from error
    return path


class Volumes(LightningDataModule):
    """Volumes of one channel with the labels 0 and 1.

    Args:
        source: ``"mni152"``, a path that ends in ``.npz``, or a dataset of the package ``medmnist``, for example
            ``"vesselmnist3d"``. ``"mni152"`` is cubes of nilearn's brain template, labeled by whether they have more
            white matter than gray matter: the front of one hemisphere for training, its back for validation.
        batch_size: Samples per batch and rank, at least 1.
        positive: Label of the positive class; all others are negative. ``None`` requires the labels 0 and 1.
        packed: Whether files are read one batch at a time instead of one sample at a time.
        mean: Mean of uint8 images scaled to [0, 1]. They are normalized on the device.
        std: Standard deviation of uint8 images scaled to [0, 1].
        thin: Step between the cubes of the template that are used; 1 uses all of them. Only for ``"mni152"``.
        seed: Seed of the order of the training samples, which depends only on the seed and the epoch. A run that is
            resumed from a checkpoint sees them in the same order.
    """

    def __init__(
        self,
        source: str = "mni152",
        batch_size: int = 32,
        positive: int | None = None,
        packed: bool = True,
        mean: float = 0.5,
        std: float = 0.5,
        thin: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size!r}.")
        if thin < 1 or (thin > 1 and source != "mni152"):
            raise ValueError(f"thin: expected 1, or more with 'mni152', got {thin!r} with {source!r}. Omit it.")
        self.thin = thin
        self.source, self.batch_size, self.positive, self.packed = source, batch_size, positive, packed
        self.seed = seed
        self.normalize = Normalize(mean, std)
        self.parts: dict[str, PackedDataset | VolumePatches] = {}

    def prepare_data(self) -> None:
        """Download missing data, in one process per machine."""
        if self.source != "mni152":
            self._file()

    def setup(self, stage: str) -> None:
        """Open the parts that the stage needs."""
        names = ("test",) if stage == "test" else ("val",) if stage == "validate" else ("train", "val")
        if self.source == "mni152":
            if "test" in names:
                raise ValueError("--data mni152 has no test set, only train and val. Use validate.")
            if not self.parts:
                task = _mni()
                self.parts = {name: _thinned(getattr(task, name), self.thin) for name in ("train", "val")}
            return
        for name in names:
            self.parts.setdefault(name, read_part(self._file(), name, self.positive))

    def _file(self) -> Path:
        """Return the file. Not called in the constructor, where jsonargparse would hide the error message."""
        if not self.source.endswith(".npz"):
            return medmnist_file(self.source)
        if not Path(self.source).is_file():
            raise FileNotFoundError(f"--data: expected a MedMNIST3D file, got {self.source!r}, which does not exist.")
        return Path(self.source)

    @property
    def pos_weight(self) -> float:
        """Ratio of negative to positive training samples."""
        data = self.parts["train"]
        if isinstance(data, PackedDataset):
            labels = data.arrays["train_labels"].reshape(-1) == (1 if self.positive is None else self.positive)
        else:
            labels = data.labels.numpy()
        if not 0 < labels.sum() < len(labels):
            raise ValueError(
                f"{self.source!r}: expected training labels of two classes, got {len(labels)} equal labels."
            )
        return float(len(labels) / labels.sum() - 1)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of training batches, which are shuffled and sharded over the ranks."""
        ranks, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        return self._loader("train", DistributedSampler(self.parts["train"], ranks, rank, seed=self.seed))

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the loader of validation batches."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of test batches."""
        return self._loader("test")

    def _loader(self, part: str, sampler: DistributedSampler[Any] | None = None) -> DataLoader[Any]:
        data = self.parts[part]
        whole = PackedDataset.collate if self.packed and isinstance(data, PackedDataset) else None
        return DataLoader(
            data, self.batch_size, sampler=sampler, collate_fn=whole, pin_memory=torch.cuda.is_available()
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalize uint8 images on the device; cubes of the template are already standardized."""
        return self.normalize(batch) if batch[0].dtype == torch.uint8 else batch


class FastVolumes(PrefetchDataModule, Volumes):
    """The same volumes. The next batches are loaded in the background and, on CUDA, copied ahead."""
