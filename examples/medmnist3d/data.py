"""The volumes: MedMNIST files, MedMNIST by name, or cubes of the MNI152 template that needs no download."""

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


_mni = functools.cache(load_mni)  # several runs in one process read it once


def _thinned(cubes: Any, thin: int) -> VolumePatches:
    return VolumePatches(cubes.volume, cubes.corners[::thin], cubes.labels[::thin], cubes.size)


class _Binary:
    """Turns a batch of a MedMNIST file into ``(images (b, 1, x, y, z), labels (b,))``, labels 0 or 1."""

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
        positive: The label that counts as positive, against all others; ``None`` accepts labels 0 and 1 only.

    Raises:
        ValueError: If the file is no MedMNIST3D file, lacks an array, or has labels outside the task.
    """
    wanted = (f"{part}_images", f"{part}_labels")
    try:
        data = PackedDataset(path, keys=wanted, transform=_Binary(1 if positive is None else positive))
    except KeyError as error:
        raise ValueError(
            f"{str(path)!r} lacks arrays of the part {part!r}: {error.args[0]} Expected MedMNIST3D files, with "
            f"{wanted[0]!r} and {wanted[1]!r}. Rename the arrays, or choose another file."
        ) from error
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as an .npz file ({error}); expected a MedMNIST3D file. Choose another one."
        ) from error
    images, labels = data.arrays.values()
    if images.ndim != 4 or images.shape[-1] == 3 or labels.reshape(len(labels), -1).shape[1:] != (1,):
        raise ValueError(
            f"{str(path)!r}: {wanted[0]} is {images.shape} and {wanted[1]} is {labels.shape}; expected "
            "(n, x, y, z) and (n, 1) or (n,), as in the files whose names end in 3d. Choose one of these."
        )
    found = sorted({int(label) for label in labels.flat})
    if positive is None and not set(found) <= {0, 1}:
        raise ValueError(
            f"{str(path)!r}: {wanted[1]} holds the labels {found}; expected 0 and 1. Set data.positive to the one "
            "that counts as positive, and the others become the rest."
        )
    if positive is not None and part == "train" and positive not in found:
        raise ValueError(
            f"positive={positive!r}: {str(path)!r} has the labels {found} for training. Choose one of these."
        )
    return data


def samples(batch: tuple[Tensor, Tensor]) -> int:
    """Return the number of samples in a batch, its weight where gradients are accumulated exactly."""
    return len(batch[1])


def medmnist_file(name: str) -> Path:
    """Find a data set of the ``medmnist`` package in its cache, or let the package download it.

    Args:
        name: As on the package's list, for example ``"vesselmnist3d"``.

    Raises:
        ModuleNotFoundError: If the package is not installed.
        ValueError: If the package does not know the name, or cannot get the file.
    """
    try:
        import medmnist
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"--data {name} needs the package medmnist, which is not installed. Install it with: pip install medmnist; "
            "or give a file, --data path.npz, or leave --data out for the MNI152 template.",
            name="medmnist",
        ) from error
    known = sorted(key for key in medmnist.INFO if key.endswith("3d"))
    if name not in known:
        raise ValueError(
            f"--data {name!r} is neither 'mni152', nor an .npz file, nor a 3D set of medmnist; expected "
            f"{', '.join(known)}. Choose one of these."
        )
    path = Path(medmnist.info.DEFAULT_ROOT, f"{name}.npz")
    if not path.is_file():
        try:
            getattr(medmnist, medmnist.INFO[name]["python_class"])(split="train", download=True)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--data {name}: medmnist could not download it ({error}). Put the file at {str(path)!r} from a "
                "machine with internet, or give it as --data path.npz."
            ) from error
    return path


class Volumes(LightningDataModule):
    """Volumes of one channel with a label 0 or 1.

    Args:
        source: ``"mni152"``: cubes of nilearn's brain template, more white matter than grey or not, front of one
            hemisphere for training and back for validation; a path that ends in ``.npz``; or a name of the ``medmnist``
            package, such as ``"vesselmnist3d"``.
        batch_size: Samples in a training batch of one rank, at least 1.
        positive: The label that counts as positive, against all others; ``None`` accepts labels 0 and 1 only.
        packed: Whether files are read a whole batch at a time, instead of sample by sample.
        mean: Subtracted from uint8 images, in units of 255, on the device.
        std: What they are then divided by.
        thin: Of the template's cubes every so many-th is taken; 1 takes all. Files are read whole.
        seed: Seeds the order of the training samples, which depends on it and the epoch alone, so that a run that goes
            on from a checkpoint sees them in the same order.
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
            raise ValueError(f"batch_size={batch_size!r}; expected at least 1. Give a number of samples.")
        if thin < 1 or (thin > 1 and source != "mni152"):
            raise ValueError(f"thin={thin!r} with {source!r}; expected 1, and with 'mni152' more. Leave it out.")
        self.thin = thin
        self.source, self.batch_size, self.positive, self.packed = source, batch_size, positive, packed
        self.seed = seed
        self.normalize = Normalize(mean, std)
        self.parts: dict[str, PackedDataset | VolumePatches] = {}

    def prepare_data(self) -> None:
        """Download what is not there yet, in one process of each machine."""
        if self.source != "mni152":
            self._file()

    def setup(self, stage: str) -> None:
        """Open the parts that the stage reads."""
        names = ("test",) if stage == "test" else ("val",) if stage == "validate" else ("train", "val")
        if self.source == "mni152":
            if "test" in names:
                raise ValueError("--data mni152 has no part 'test'; it has train and val. Use validate.")
            if not self.parts:
                task = _mni()
                self.parts = {name: _thinned(getattr(task, name), self.thin) for name in ("train", "val")}
            return
        for name in names:
            self.parts.setdefault(name, read_part(self._file(), name, self.positive))

    def _file(self) -> Path:
        """The file, which is looked for here and not in the constructor, where jsonargparse would bury the message."""
        if not self.source.endswith(".npz"):
            return medmnist_file(self.source)
        if not Path(self.source).is_file():
            raise FileNotFoundError(f"--data {self.source!r} is not there. Give the path of a MedMNIST3D file.")
        return Path(self.source)

    @property
    def pos_weight(self) -> float:
        """Negative training samples for each positive one."""
        data = self.parts["train"]
        if isinstance(data, PackedDataset):
            labels = data.arrays["train_labels"].reshape(-1) == (1 if self.positive is None else self.positive)
        else:
            labels = data.labels.numpy()
        if not 0 < labels.sum() < len(labels):
            raise ValueError(f"{self.source!r}: all {len(labels)} training labels are alike; expected two classes.")
        return float(len(labels) / labels.sum() - 1)

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches in an order of chance, each rank its share."""
        ranks, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        return self._loader("train", DistributedSampler(self.parts["train"], ranks, rank, seed=self.seed))

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Test batches."""
        return self._loader("test")

    def _loader(self, part: str, sampler: DistributedSampler[Any] | None = None) -> DataLoader[Any]:
        data = self.parts[part]
        whole = PackedDataset.collate if self.packed and isinstance(data, PackedDataset) else None
        return DataLoader(
            data, self.batch_size, sampler=sampler, collate_fn=whole, pin_memory=torch.cuda.is_available()
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise uint8 images, on the device; those of the template are floats about 0 already."""
        return self.normalize(batch) if batch[0].dtype == torch.uint8 else batch


class FastVolumes(PrefetchDataModule, Volumes):
    """The same volumes, the next batches prepared in the background and copied ahead on CUDA."""
