"""Takes a dataset's transforms apart: times packing, and moves random transforms after the collate function."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_turbo import augment
from lightning_turbo._random import GeneratorWatch, generators_in
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.data import PackedDataset, PatchDataset, pack

__all__ = ["MovedAugmentation", "describe_packing", "describe_random_part"]

# Transforms of MONAI (without the d of dictionary transforms) and torchvision -> those of lightning_turbo.augment.
EQUALS = {
    "RandFlip": "RandomFlip", "RandomHorizontalFlip": "RandomFlip", "RandomVerticalFlip": "RandomFlip",
    "RandAffine": "RandomAffine", "RandRotate": "RandomAffine", "RandZoom": "RandomAffine",
    "RandomAffine": "RandomAffine", "RandomRotation": "RandomAffine",
    "Rand2DElastic": "RandomElastic", "Rand3DElastic": "RandomElastic",
    "RandAdjustContrast": "RandomGamma", "RandScaleIntensity": "RandomBrightness",
    "RandGaussianNoise": "RandomGaussianNoise", "RandGaussianSmooth": "RandomGaussianBlur",
    "RandSimulateLowResolution": "RandomLowResolution",
}  # fmt: skip
# Transforms that may follow the random part; of torchvision's, only spatial ones have a counterpart.
CONVERSIONS = ("ConvertImageDtype", "EnsureType", "Normalize", "ToDtype", "ToImage", "ToTensor")
SECONDS = 0.5  # for loading samples to estimate packing
MOST_SAMPLES = 32  # of those


def _pipeline_of(dataset: Any) -> Any:
    """Return what a dataset, or the one inside a ``Subset``, calls on its samples."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "transform", None)


def _kind(transform: Any) -> str:
    """Return the name of a transform of MONAI or torchvision, or an empty string for any other."""
    known = type(transform).__module__.partition(".")[0] in ("monai", "torchvision")
    return type(transform).__name__.removesuffix("d") if known else ""


def _random_part(pipeline: Any) -> list[Any]:
    """Return those of the last transforms that have a batched counterpart."""
    found = []
    for transform in reversed(getattr(pipeline, "transforms", ())):
        if _kind(transform) in EQUALS:
            found.insert(0, transform)
        elif _kind(transform) not in CONVERSIONS:
            break
    return found


def _batched(transform: Any) -> tuple[str, float]:
    """Return the batched counterpart and the probability, which they share; axes and ranges are its own."""
    return EQUALS[_kind(transform)], getattr(transform, "prob", getattr(transform, "p", 1.0))


def _names(found: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of ``BatchAugmentation``: the first key of MONAI's transforms is the image."""
    keys = list(dict.fromkeys(key for each in found for key in getattr(each, "keys", ())))
    return {"image": keys[0] if keys else 0, "mask": keys[1:] or None}


def describe_random_part(dataset: Any) -> str:
    """Return code for the random part of a dataset's transforms; empty if it has no batched counterpart."""
    found = _random_part(_pipeline_of(dataset))
    if not found:
        return ""
    steps = ", ".join(f"augment.{name}(p={p})" for name, p in map(_batched, found))
    names = ", ".join(f"{name}={value!r}" for name, value in _names(found).items())
    return (
        f"take {', '.join(type(each).__name__ for each in found)} out of the dataset's transforms, put "
        f"augment.IndexedDataset around the dataset, and add AugmentBatches(augment.BatchAugmentation([{steps}], "
        f"seed=0, {names})) to the callbacks, with your axes and ranges"
    )


class MovedAugmentation:
    """Augments training batches at once, in place of what the dataset's last transforms do per sample."""

    def __init__(self, trainer: Any, strategy: Any) -> None:
        self._trainer = trainer
        self._augmentation: augment.BatchAugmentation | None = None  # until the training loader is known
        ReplacedMethod(strategy, "process_dataloader", self._take)
        ReplacedMethod(strategy, "batch_to_device", self._augment)

    def _take(self, process: Callable[[Any], Any], loader: Any) -> Any:
        # The validation sanity check requests its loader before training does.
        if self._augmentation is None and not self._trainer.sanity_checking:
            pipeline = _pipeline_of(loader.dataset)
            found = _random_part(pipeline)
            steps = [getattr(augment, name)(p=p) for name, p in map(_batched, found)]
            self._augmentation = augment.BatchAugmentation(steps, seed=0, **_names(found))
            pipeline.transforms = [each for each in pipeline.transforms if each not in found]
        return process(loader)

    def _augment(self, move: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch, augmentation = move(batch, *args, **kwargs), self._augmentation
        if augmentation is None or not self._trainer.training:
            return batch
        return augmentation(batch, range(len(batch[augmentation.images[0]])))


def describe_packing(loader: Any) -> str:
    """Return how long packing takes and when it pays off, from some samples before random transforms; or why not."""
    dataset, whole = getattr(loader, "dataset", None), []
    if isinstance(dataset, (PackedDataset, PatchDataset)):
        return "the dataset is packed already"
    pipeline = _pipeline_of(dataset)
    if hasattr(pipeline, "transforms"):
        whole = pipeline.transforms
        first = next((at for at, each in enumerate(whole) if _kind(each).startswith("Rand")), len(whole))
        pipeline.transforms = whole[:first]
    try:
        return _time_packing(dataset, max(1, loader.num_workers))
    except Exception as error:  # datasets raise many kinds of errors
        return f"its samples cannot be packed: {error!r}"
    finally:
        if whole:
            pipeline.transforms = whole


def _time_packing(dataset: Any, workers: int) -> str:
    with GeneratorWatch(generators_in(dataset)) as watch:
        dataset[0]
    if watch.drew:
        return "its samples draw random numbers; pack what comes before these, with cache_transforms()"
    samples = []
    begun = time.perf_counter()
    while len(samples) < min(len(dataset), MOST_SAMPLES) and time.perf_counter() < begun + SECONDS:
        samples.append(dataset[len(samples)])
    loaded = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pack(samples, Path(folder, "packed"))
        written = time.perf_counter()
        list(map(PackedDataset(Path(folder, "packed")).__getitem__, range(len(samples))))
        read = time.perf_counter()
    return _in_words(len(dataset) / workers, len(samples), loaded - begun, written - loaded, read - written)


def _in_words(number: float, timed: int, load: float, write: float, read: float) -> str:
    """Describe the times of ``timed`` samples, for the ``number`` of samples that each process packs."""
    text = f"packing takes {number * (load + write) / timed:.2g} s ({timed} samples: {1e3 * load / timed:.2g} ms each "
    text += f"to load, {1e3 * read / timed:.2g} packed) and "
    if read >= load:
        return f"{text}saves nothing"
    # Packing costs load + write once per sample, and saves load - read in each epoch.
    epoch = int((load + write) / (load - read)) + 1
    return f"{text}pays from epoch {epoch} on, where steps wait for the loader: cache_transforms() or pack_folder()"
