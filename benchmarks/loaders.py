"""The suite ``loaders``: our loaders and DALI beside DataLoader, torchdata and timm; on photographs and volumes."""

from __future__ import annotations

import math
import resource
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from benchmarks.meter import Meter
from benchmarks.peers import timm_loader, torchdata_loader
from benchmarks.suite import Aim, SkippedError, Suite
from benchmarks.workloads import plain_loop, resnet50, sgd
from lightning_turbo import _optional
from lightning_turbo.data import DevicePrefetcher, PackedDataset, PrefetchLoader, seed_samples
from lightning_turbo.data.dali import DALILoader, ImageFolder

__all__ = ["SUITE"]

SUITE = Suite(
    "loaders",
    "A batch of 32 photographs, decoded, cropped at random, resized to 224 pixels, mirrored and normalised; or of "
    "32 volumes of 28 x 28 x 28.",
    steps=6,
    quick_steps=3,
    rounds=15,
    warmup=3,
    lead=4,  # more than a queue holds: what was prepared while the case was held does not count
    seconds=300,
    quick_seconds=6,
    unit="batch",
)
BATCH = 32
MEAN, STD = (np.array(v, dtype=np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
PILLOW, OURS = "DataLoader with Pillow, 0 workers", "DALILoader"
BARE = "bare DALI pipeline with its own reader"
ITERATOR = "DALI's own iterator"
NUMPY = "volumes: DataLoader with np.load, 0 workers"
SYNTHETIC = "ResNet-50 on synthetic images"


def _photos(meter: Meter, folder: Path) -> Path:
    """Real photographs: tiles of scikit-image's textures, 500 x 375 pixels, as JPEG, in three classes."""
    try:
        from PIL import Image
        from skimage import data
    except ModuleNotFoundError as error:
        raise SkippedError(f"{error.name} not installed") from None
    generator = np.random.default_rng(meter.seed)
    for name in ("brick", "grass", "gravel"):
        (folder / name).mkdir()
        whole = getattr(data, name)()
        for n in range(16 if meter.quick else 64):
            y, x = generator.integers(0, 512 - 375), generator.integers(0, 512 - 500)
            tint = generator.uniform(0.6, 1, 3)
            tile = whole[y : y + 375, x : x + 500, None] * tint
            Image.fromarray(tile.astype(np.uint8)).save(folder / name / f"{n:03d}.jpg", quality=90)
    return folder


def _volumes(meter: Meter, folder: Path) -> list[tuple[str, int]]:
    """Real volumes: cubes of 28 voxels of nilearn's brain template."""
    try:
        from nilearn import datasets
    except ModuleNotFoundError as error:
        raise SkippedError(f"{error.name} not installed") from None
    whole = np.ascontiguousarray(datasets.load_mni152_template(resolution=1).get_fdata(dtype=np.float32))
    generator = np.random.default_rng(meter.seed)
    pairs = []
    for n in range(128 if meter.quick else 512):
        z, y, x = generator.integers(40, 120, 3)
        np.save(folder / f"{n}.npy", whole[z : z + 28, y : y + 28, x : x + 28])
        pairs.append((str(folder / f"{n}.npy"), n % 2))
    return pairs


class _Pillow(Dataset[tuple[Any, int]]):
    """The transform of ``ImageFolder(train=True)``, written with Pillow and numpy; ``raw`` leaves the pixels uint8."""

    def __init__(self, root: Path, size: int, raw: bool = False) -> None:
        self.files = sorted(root.glob("*/*.jpg"))
        classes = sorted({file.parent.name for file in self.files})
        self.labels = [classes.index(file.parent.name) for file in self.files]
        self.size = size
        self.raw = raw

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        # By the index: PrefetchLoader loads nothing ahead where loading draws from a global RNG.
        draw = torch.rand(5, generator=torch.Generator().manual_seed(index)).tolist()
        with Image.open(self.files[index]) as image:
            image = image.convert("RGB")
        area = image.width * image.height * (0.08 + 0.92 * draw[0])
        ratio = math.exp((2 * draw[1] - 1) * math.log(4 / 3))
        width = min(math.sqrt(area * ratio), image.width)
        height = min(math.sqrt(area / ratio), image.height)
        left, top = draw[2] * (image.width - width), draw[3] * (image.height - height)
        box = (left, top, left + width, top + height)
        pixels = np.asarray(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        pixels = pixels[:, ::-1] if draw[4] < 0.5 else pixels
        if self.raw:
            return np.ascontiguousarray(pixels.transpose(2, 0, 1)), self.labels[index]
        values = (pixels.astype(np.float32) / 255 - MEAN) / STD
        return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1))), self.labels[index]


class _Numpy(Dataset[tuple[Tensor, int]]):
    """Volumes as they are usually read."""

    def __init__(self, pairs: list[tuple[str, int]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.pairs[index]
        volume = np.load(path)
        return torch.from_numpy((volume - volume.mean()) / (volume.std() + 1e-6))[None], label


def _forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _drain(meter: Meter, batches: Iterator[Any]) -> dict[str, float]:
    """Take batches until the meter says stop."""
    for batch in batches:
        if not meter.step(samples=len(batch[0])):
            break
    return {}


def _size(meter: Meter) -> int:
    return 128 if meter.quick else 224


def _endless(dataset: Any) -> RandomSampler:
    """Epoch after epoch as if it were one: torchdata starts new workers for each, and six batches are one here."""
    return RandomSampler(dataset, num_samples=10**9)


def _dataloader(dataset: Dataset[Any], workers: int) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, sampler=_endless(dataset), num_workers=workers)


def _need_dali() -> None:
    if not _optional.installed("nvidia.dali"):
        raise SkippedError("nvidia-dali not installed")


def _pillow_loader(root: Path, size: int, device: torch.device, workers: int, by: str) -> Iterable[Any]:
    """A loader of photographs by Pillow and numpy.

    Args:
        root: Of the photographs.
        size: Of the images, in pixels.
        device: Where timm puts its batches.
        workers: How many processes, or threads.
        by: ``"torch"``, ``"ours"``, ``"timm"``, ``"torchdata, process"`` or ``"torchdata, thread"``.
    """
    dataset = _Pillow(root, size, raw=by == "timm")
    if by == "timm":
        return timm_loader(dataset, _endless(dataset), BATCH, workers, device, MEAN.tolist(), STD.tolist())
    if by.startswith("torchdata"):
        return torchdata_loader(dataset, _endless(dataset), BATCH, workers, by.removeprefix("torchdata, "))
    if by == "ours":
        return PrefetchLoader.of(_dataloader(dataset, 0), prefetch_batches=2, threads=workers)
    return _dataloader(dataset, workers)


def pillow(meter: Meter, *, workers: int, by: str = "torch") -> dict[str, float]:
    """Photographs by Pillow and numpy."""
    with tempfile.TemporaryDirectory() as folder:
        root = _photos(meter, Path(folder))
        return _drain(meter, iter(_pillow_loader(root, _size(meter), meter.device, workers, by)))


def bare(meter: Meter, *, uint8: bool, iterator: bool = False) -> dict[str, float]:
    """Photographs by a DALI pipeline with DALI's own reader: without any loader, or under DALI's own iterator."""
    _need_dali()
    from nvidia import dali

    fn, types, size = dali.fn, dali.types, _size(meter)
    with tempfile.TemporaryDirectory() as folder:
        root = str(_photos(meter, Path(folder)))

        @dali.pipeline_def
        def graph() -> Any:
            encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, pad_last_batch=True, name="files")
            image = fn.decoders.image_random_crop(encoded, output_type=types.RGB, random_aspect_ratio=[3 / 4, 4 / 3])
            image = fn.resize(image, size=(size, size))
            mirrored = fn.random.coin_flip()
            if uint8:
                return fn.flip(image, horizontal=mirrored), labels
            mean, std = (list(map(float, 255 * v)) for v in (MEAN, STD))
            return fn.crop_mirror_normalize(image, mirror=mirrored, mean=mean, std=std, dtype=types.FLOAT), labels

        pipeline: Any = graph(
            batch_size=BATCH, num_threads=2, device_id=None, seed=meter.seed, prefetch_queue_depth=2,
            exec_dynamic=iterator or None,  # DALI's default where nothing holds on to a batch
        )  # fmt: skip
        pipeline.build()
        return _run_iterator(meter, pipeline) if iterator else _run_bare(meter, pipeline)


def _run_bare(meter: Meter, pipeline: Any) -> dict[str, float]:
    """Run a built pipeline as fast as it goes."""
    pipeline.schedule_run()
    while True:
        batch = [torch.from_dlpack(output.as_tensor()) for output in pipeline.share_outputs()]
        pipeline.release_outputs()
        pipeline.schedule_run()
        if not meter.step(samples=len(batch[0])):
            return {}


def _run_iterator(meter: Meter, pipeline: Any) -> dict[str, float]:
    """Take batches from DALI's iterator over a built pipeline."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    settings: dict[str, Any] = {"last_batch_policy": LastBatchPolicy.DROP, "auto_reset": True}
    batches = DALIGenericIterator([pipeline], ["image", "label"], reader_name="files", **settings)
    return _drain(meter, ((batch["image"], batch["label"]) for (batch,) in _forever(batches)))


def _recipe(meter: Meter, folder: str, uint8: bool) -> ImageFolder:
    """An ImageFolder over the photographs, which are made in ``folder``."""
    _need_dali()
    kind = "uint8" if uint8 else "float32"
    return ImageFolder(_photos(meter, Path(folder)), train=True, size=_size(meter), dtype=kind)


def _load(meter: Meter, pipeline: Any, **settings: Any) -> dict[str, float]:
    """Batches of a DALILoader."""
    loader = DALILoader(pipeline, BATCH, num_threads=2, drop_last=True, seed=meter.seed, **settings)
    result = _drain(meter, _forever(loader))
    loader.close()
    return result


def ours(meter: Meter, *, uint8: bool) -> dict[str, float]:
    """Photographs by a DALILoader over an ImageFolder."""
    with tempfile.TemporaryDirectory() as folder:
        return _load(meter, _recipe(meter, folder, uint8))


def numpy(meter: Meter, *, workers: int) -> dict[str, float]:
    """Volumes by ``np.load`` in a DataLoader."""
    with tempfile.TemporaryDirectory() as folder:
        return _drain(meter, iter(_dataloader(_Numpy(_volumes(meter, Path(folder))), workers)))


def packed(meter: Meter) -> dict[str, float]:
    """The same volumes from one memory-mapped file, a batch at a time."""

    def normalise(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        volumes, labels = batch
        volumes = volumes - volumes.mean((1, 2, 3), keepdim=True)
        deviation = volumes.square().mean((1, 2, 3), keepdim=True).sqrt()  # several times as fast as torch.std
        return (volumes / (deviation + 1e-6))[:, None], labels

    with tempfile.TemporaryDirectory() as folder:
        pairs = _volumes(meter, Path(folder))
        file = Path(folder, "volumes.npy")
        np.save(file, np.stack([np.load(path) for path, _ in pairs]))
        data = PackedDataset({"volumes": file, "labels": np.array([y for _, y in pairs])}, transform=normalise)
        loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, collate_fn=PackedDataset.collate)
        return _drain(meter, _forever(loader))


def volumes(meter: Meter) -> dict[str, float]:
    """Volumes by a DALILoader, without augmentation, as ``numpy`` reads them."""
    _need_dali()
    from nvidia.dali import fn, pipeline_def

    @pipeline_def
    def pipeline(files: list[str], labels: list[int], shard_id: int, num_shards: int) -> Any:
        shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
        encoded, label = fn.readers.file(files=files, labels=labels, random_shuffle=True, **shard)
        volume: Any = fn.decoders.numpy(encoded)
        return fn.normalize(fn.expand_dims(volume, axes=0), epsilon=1e-12), label

    with tempfile.TemporaryDirectory() as folder:
        files, labels = zip(*_volumes(meter, Path(folder)), strict=True)
        return _load(meter, pipeline, arguments={"files": list(files), "labels": list(labels)})


def resnet(meter: Meter, *, feed: str) -> dict[str, float]:
    """ResNet-50 in bfloat16, channels-last, trained on photographs from ``feed``."""
    net: Any = resnet50(2, 3).to(meter.device)
    net = net.to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as folder:
        root = _photos(meter, Path(folder))
        if feed == "synthetic":
            images = torch.randn(BATCH, 3, 224, 224, device=meter.device).to(memory_format=torch.channels_last)
            loader: Any = [(images, torch.arange(BATCH, device=meter.device) % 3)]
        elif feed == "dali":
            _need_dali()
            recipe = ImageFolder(root, train=True, channels_last=True)
            loader = DALILoader(recipe, BATCH, device=meter.device, drop_last=True, seed=meter.seed)
        elif feed == "memory":
            loader = DataLoader(_held(), BATCH, pin_memory=True)
        elif feed == "prefetched":
            loader = DevicePrefetcher(PrefetchLoader(_held(), BATCH), meter.device)
        else:
            loader = _pillow_loader(root, 224, meter.device, 2, feed)
        there: dict[str, Any] = {"device": meter.device, "non_blocking": True}
        batches: Any = (
            (images.to(memory_format=torch.channels_last, **there), labels.to(**there))
            for images, labels in _forever(loader)
        )
        result = plain_loop(
            meter, net, batches, sgd(list(net.parameters())),
            forward=lambda: torch.autocast(meter.device.type, torch.bfloat16),
        )  # fmt: skip
        if feed in ("dali", "prefetched"):
            loader.close()
        return result


def _held() -> Dataset[Any]:
    """Images in the host's memory, so that only collating and copying are left to do."""
    return TensorDataset(torch.randn(32 * BATCH, 3, 224, 224), torch.arange(32 * BATCH) % 3)


class _Indices(Dataset[int]):
    """Samples that cost nothing, so that the loader's own work is left."""

    def __len__(self) -> int:
        return 256 * BATCH

    def __getitem__(self, index: int) -> int:
        return index


def _worker_seconds() -> float:
    """The processor time of worker processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sample_seeds(meter: Meter) -> dict[str, float]:
    """The cost of seeds for a sample with one worker process, in turns with the same loader without them."""
    plain = DataLoader(_Indices(), BATCH, num_workers=1)
    spent, samples, measuring = [0.0, 0.0], 0, True
    while measuring:
        for which, loader in enumerate((plain, seed_samples(plain, meter.seed))):
            began = _worker_seconds()
            for _ in loader:
                pass
            spent[which] += _worker_seconds() - began
        samples += 256 * BATCH
        measuring = meter.step(samples=2 * 256 * BATCH)
    return {"microseconds_a_sample": 1e6 * (spent[1] - spent[0]) / samples}


SUITE.add(PILLOW, pillow, baseline=True, config={"workers": 0})
for _workers in (1, 2):
    SUITE.add(f"DataLoader with Pillow, {_workers} workers", pillow, config={"workers": _workers}, quick=False)
for _threads, _name in ((1, "0 workers"), (2, "2 threads")):
    _config = {"workers": _threads, "by": "ours"}
    SUITE.add(f"PrefetchLoader with Pillow, {_name}", pillow, config=_config, ours=True, quick=False)
for _name, _package, _by in (
    ("torchdata's nodes with Pillow, 2 processes", "torchdata", "torchdata, process"),
    ("torchdata's nodes with Pillow, 2 threads", "torchdata", "torchdata, thread"),
    ("timm's PrefetchLoader with Pillow, 2 workers", "timm", "timm"),
):
    SUITE.add(
        _name, pillow, config={"workers": 2, "by": _by}, against=("DataLoader with Pillow, 2 workers",),
        needs=(_package,), peer=True, quick=False,
    )  # fmt: skip
for _suffix, _uint8 in (("", False), (", uint8", True)):
    SUITE.add(BARE + _suffix, bare, config={"uint8": _uint8}, peer=True, quick=False)
    SUITE.add(ITERATOR + _suffix, bare, config={"uint8": _uint8, "iterator": True}, peer=True, quick=False)
    SUITE.add(
        OURS + _suffix, ours, config={"uint8": _uint8}, against=(BARE + _suffix, ITERATOR + _suffix), ours=True,
        quick=not _uint8,
    )  # fmt: skip
SUITE.add(NUMPY, numpy, config={"workers": 0}, base=NUMPY, quick=False)
SUITE.add("volumes: DataLoader with np.load, 2 workers", numpy, config={"workers": 2}, base=NUMPY, quick=False)
SUITE.add("volumes: PackedDataset", packed, base=NUMPY, ours=True, quick=False)
SUITE.add("volumes: DALILoader", volumes, base=NUMPY, ours=True, quick=False)
SUITE.add(SYNTHETIC, resnet, config={"feed": "synthetic"}, base=SYNTHETIC, devices=("cuda",))
SUITE.add("ResNet-50 on DALILoader", resnet, config={"feed": "dali"}, base=SYNTHETIC, devices=("cuda",), ours=True)
SUITE.add("ResNet-50 on a DataLoader", resnet, config={"feed": "torch"}, base=SYNTHETIC, devices=("cuda",))
SUITE.add(
    "ResNet-50 on timm's PrefetchLoader", resnet, config={"feed": "timm"}, base=SYNTHETIC, devices=("cuda",),
    needs=("timm",), peer=True,
)  # fmt: skip
MEMORY, PREFETCHED = (f"ResNet-50 on images in memory: {name}" for name in ("DataLoader", "DevicePrefetcher"))
SUITE.add(MEMORY, resnet, config={"feed": "memory"}, base=SYNTHETIC, devices=("cuda",))
SUITE.add(PREFETCHED, resnet, config={"feed": "prefetched"}, base=SYNTHETIC, devices=("cuda",), ours=True)
SEEDS = "sample seeds, 1 worker"
SUITE.add(SEEDS, sample_seeds, base=SEEDS, ours=True, quick=False)
SUITE.aims += [
    Aim(SEEDS, "", at_most=30, quantity="microseconds_a_sample", devices=("cpu",)),
    Aim(OURS + ", uint8", BARE + ", uint8", at_most=1.03, devices=("cpu",)),
    Aim(OURS + ", uint8", ITERATOR + ", uint8", at_most=1.03, devices=("cpu",)),
    Aim(OURS, PILLOW, at_most=1 / 2.4, devices=("cpu",)),
    Aim("PrefetchLoader with Pillow, 2 threads", "torchdata's nodes with Pillow, 2 threads", 1.02, devices=("cpu",)),
    Aim("volumes: PackedDataset", NUMPY, at_most=0.15, devices=("cpu",)),
    Aim("volumes: DALILoader", NUMPY, at_most=1 / 2, devices=("cpu",)),
    Aim("ResNet-50 on DALILoader", SYNTHETIC, at_most=1.05, devices=("cuda",)),
    Aim(PREFETCHED, SYNTHETIC, at_most=1 / 0.95, devices=("cuda",)),
    Aim(PREFETCHED, MEMORY, at_most=1.02, devices=("cuda",)),
]
