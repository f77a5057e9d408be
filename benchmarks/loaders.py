"""The suite ``loaders``: images and volumes from loaders of this package, DALI, torch, torchdata, timm and MONAI."""

from __future__ import annotations

import importlib
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.peers import monai_loader, timm_loader, torchdata_loader
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data import PackedDataset, PrefetchLoader, seed_samples
from lightning_turbo.data.dali import DALILoader, DynamicPipeline, ImageFolder

__all__ = ["BATCH", "SUITE", "Pillow", "forever", "make_loader", "make_photos"]

BATCH = 32
MEAN, STD = (np.array(v, dtype=np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def make_photos(timer: CaseTimer, folder: Path) -> Path:
    """Write JPEG files of 500 x 375 pixels in three classes, cut from photographs of textures of scikit-image."""
    from PIL import Image
    from skimage import data

    generator = np.random.default_rng(timer.seed)
    for name in ("brick", "grass", "gravel"):
        (folder / name).mkdir()
        whole = getattr(data, name)()
        for n in range(16 if timer.quick else 64):
            y, x = generator.integers(0, 512 - 375), generator.integers(0, 512 - 500)
            tint = generator.uniform(0.6, 1, 3)
            tile = whole[y : y + 375, x : x + 500, None] * tint
            Image.fromarray(tile.astype(np.uint8)).save(folder / name / f"{n:03d}.jpg", quality=90)
    return folder


def _volumes(timer: CaseTimer, folder: Path) -> tuple[list[str], list[int]]:
    """Write cubes of 28 x 28 x 28 voxels, cut from nilearn's brain template; return their files and labels."""
    from nilearn import datasets

    whole = np.ascontiguousarray(datasets.load_mni152_template(resolution=1).get_fdata(dtype=np.float32))
    generator = np.random.default_rng(timer.seed)
    files = [str(folder / f"{n}.npy") for n in range(128 if timer.quick else 512)]
    for file in files:
        z, y, x = generator.integers(40, 120, 3)
        np.save(file, whole[z : z + 28, y : y + 28, x : x + 28])
    return files, [n % 2 for n in range(len(files))]


class Pillow(Dataset[tuple[Any, int]]):
    """The transform of ``ImageFolder(train=True)``, written with Pillow and NumPy; ``raw`` returns uint8 pixels."""

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

        # Seeded by the index, because PrefetchLoader loads nothing ahead if loading draws from a global RNG.
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
    """Volumes read with ``np.load`` and normalized."""

    def __init__(self, files: list[str], labels: list[int]) -> None:
        self.files = files
        self.labels = labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        volume = np.load(self.files[index])
        return torch.from_numpy((volume - volume.mean()) / (volume.std() + 1e-6))[None], self.labels[index]


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of the loader, epoch after epoch."""
    while True:
        yield from loader


def _drain(timer: CaseTimer, batches: Iterable[Any]) -> dict[str, float]:
    """Take batches until ``timer.step`` returns ``False``."""
    for batch in batches:
        if not timer.step(samples=len(batch[0])):
            break
    return {}


def _size(timer: CaseTimer) -> int:
    return 128 if timer.quick else 224


def make_loader(dataset: Dataset[Any], workers: int, by: str, device: torch.device) -> Iterable[Any]:
    """Build a loader of torch, of this package (``"ours"``), or of another library, with one long epoch.

    With real epochs, of only six batches here, torchdata would start new workers for each.
    """
    sampler: Any = RandomSampler(dataset, num_samples=10**9)  # pyright: ignore[reportArgumentType]
    if by == "timm":
        return timm_loader(dataset, sampler, BATCH, workers, device, MEAN.tolist(), STD.tolist())
    if by.startswith("torchdata"):
        return torchdata_loader(dataset, sampler, BATCH, workers, by.removeprefix("torchdata, "))
    if by == "monai":
        return monai_loader(dataset, sampler, BATCH, workers)
    if by == "ours":
        return PrefetchLoader.of(DataLoader(dataset, BATCH, sampler=sampler), prefetch_batches=2, threads=workers)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)


def photos(timer: CaseTimer, *, workers: int, by: str = "torch") -> dict[str, float]:
    """Load photographs with Pillow and NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = Pillow(make_photos(timer, Path(folder)), _size(timer), raw=by == "timm")
        return _drain(timer, make_loader(dataset, workers, by, timer.device))


def volumes(timer: CaseTimer, *, workers: int, by: str = "torch") -> dict[str, float]:
    """Load volumes with ``np.load``."""
    with tempfile.TemporaryDirectory() as folder:
        return _drain(timer, make_loader(_Numpy(*_volumes(timer, Path(folder))), workers, by, timer.device))


def packed(timer: CaseTimer) -> dict[str, float]:
    """Load the same volumes from one memory-mapped file, a batch at a time."""

    def normalize(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cubes, labels = batch
        cubes = cubes - cubes.mean((1, 2, 3), keepdim=True)
        deviation = cubes.square().mean((1, 2, 3), keepdim=True).sqrt()  # several times as fast as torch.std
        return (cubes / (deviation + 1e-6))[:, None], labels

    with tempfile.TemporaryDirectory() as folder:
        files, labels = _volumes(timer, Path(folder))
        whole = Path(folder, "volumes.npy")
        np.save(whole, np.stack([np.load(file) for file in files]))
        data = PackedDataset({"volumes": whole, "labels": np.array(labels)}, transform=normalize)
        loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, collate_fn=PackedDataset.collate)
        return _drain(timer, forever(loader))


def bare(timer: CaseTimer, *, uint8: bool, iterator: bool = False) -> dict[str, float]:
    """Load photographs with a DALI pipeline and DALI's reader, without a loader or with DALI's iterator."""
    from nvidia.dali import pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    dali: Any = importlib.import_module("nvidia.dali")
    fn, types, size = dali.fn, dali.types, _size(timer)
    with tempfile.TemporaryDirectory() as folder:
        root = str(make_photos(timer, Path(folder)))

        @pipeline_def
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
            batch_size=BATCH, num_threads=2, device_id=None, seed=timer.seed, prefetch_queue_depth=2,
            exec_dynamic=iterator or None,  # the iterator keeps batches; otherwise DALI's default
        )  # fmt: skip
        pipeline.build()
        if iterator:
            settings: dict[str, Any] = {"last_batch_policy": LastBatchPolicy.DROP, "auto_reset": True}
            batches = DALIGenericIterator([pipeline], ["image", "label"], reader_name="files", **settings)
            return _drain(timer, ((batch["image"], batch["label"]) for (batch,) in forever(batches)))
        pipeline.schedule_run()
        while True:
            batch = [torch.from_dlpack(output.as_tensor()) for output in pipeline.share_outputs()]
            pipeline.release_outputs()
            pipeline.schedule_run()
            if not timer.step(samples=len(batch[0])):
                return {}


def _load(timer: CaseTimer, pipeline: Any, **settings: Any) -> dict[str, float]:
    """Take batches from a ``DALILoader``."""
    loader = DALILoader(pipeline, BATCH, num_threads=2, drop_last=True, seed=timer.seed, **settings)
    result = _drain(timer, forever(loader))
    loader.close()
    return result


def dali_photos(timer: CaseTimer, *, uint8: bool) -> dict[str, float]:
    """Load photographs with ``DALILoader`` and ``ImageFolder``."""
    with tempfile.TemporaryDirectory() as folder:
        kind = "uint8" if uint8 else "float32"
        return _load(timer, ImageFolder(make_photos(timer, Path(folder)), train=True, size=_size(timer), dtype=kind))


def dynamic_photos(timer: CaseTimer) -> dict[str, float]:
    """Load photographs with ``DALILoader`` and dynamic mode, with the operations of ``ImageFolder``."""
    ndd: Any = importlib.import_module("nvidia.dali.experimental.dynamic")
    size = _size(timer)

    def read(root: str, shard_id: int, num_shards: int, order_seed: int) -> Any:
        shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
        return ndd.readers.File(
            file_root=root, random_shuffle=True, seed=order_seed, enable_checkpointing=True, **shard
        )

    def process(encoded: Any, label: Any, rng: Any) -> Any:
        image = ndd.decoders.image_random_crop(encoded, random_aspect_ratio=[3 / 4, 4 / 3], rng=rng, device="cpu")
        image = ndd.resize(image, size=(size, size))
        mirror = ndd.random.coin_flip(rng=rng, batch_size=image.batch_size)
        mean, std = (list(map(float, 255 * v)) for v in (MEAN, STD))
        return ndd.crop_mirror_normalize(image, mirror=mirror, mean=mean, std=std, dtype=ndd.float32), label

    with tempfile.TemporaryDirectory() as folder:
        root = str(make_photos(timer, Path(folder)))
        return _load(timer, DynamicPipeline(read, process), arguments={"root": root})


def dali_volumes(timer: CaseTimer) -> dict[str, float]:
    """Load volumes with ``DALILoader``, with the same result as ``volumes``."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def
    def pipeline(files: list[str], labels: list[int], shard_id: int, num_shards: int) -> Any:
        shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
        encoded, label = fn.readers.file(files=files, labels=labels, random_shuffle=True, **shard)
        volume: Any = fn.decoders.numpy(encoded)
        return fn.normalize(fn.expand_dims(volume, axes=0), epsilon=1e-12), label

    with tempfile.TemporaryDirectory() as folder:
        files, labels = _volumes(timer, Path(folder))
        return _load(timer, pipeline, arguments={"files": files, "labels": labels})


class _Indices(Dataset[int]):
    """Samples that take no time to load, so that only the work of the loader is measured."""

    def __len__(self) -> int:
        return 256 * BATCH

    def __getitem__(self, index: int) -> int:
        return index


def _worker_seconds() -> float:
    """Return the processor time of worker processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sample_seeds(timer: CaseTimer) -> dict[str, float]:
    """Return the processor time that sample seeds add with one worker process, measured in alternating epochs."""
    plain = DataLoader(_Indices(), BATCH, num_workers=1)
    spent, samples, running = [0.0, 0.0], 0, True
    while running:
        for which, loader in enumerate((plain, seed_samples(plain, timer.seed))):
            started = _worker_seconds()
            for _ in loader:
                pass
            spent[which] += _worker_seconds() - started
        samples += 256 * BATCH
        running = timer.step(samples=2 * 256 * BATCH)
    return {"microseconds_a_sample": 1e6 * (spent[1] - spent[0]) / samples}


class _Cached(Dataset[Tensor]):
    """Samples that are slow to load in the first epoch and then stay in memory."""

    def __init__(self, batches: int, shape: tuple[int, ...]) -> None:
        self.samples: list[Tensor | None] = [None] * (batches * BATCH)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        sample = self.samples[index]
        if sample is None:
            time.sleep(1e-4)
            sample = self.samples[index] = torch.full(self.shape, float(index))
        return sample


def cached(timer: CaseTimer) -> dict[str, float]:
    """Return the processor time of a PrefetchLoader over samples in memory, divided by that of a DataLoader.

    The samples are images of 3 x 64 x 64, or 16 numbers. Such batches take hardly any time beyond that of the loader.
    """
    torch.set_num_threads(1)
    sizes = {"processor_time_images": (50, (3, 64, 64)), "processor_time_tiny": (200, (16,))}
    pairs = {
        name: (DataLoader(_Cached(*size), BATCH), PrefetchLoader(_Cached(*size), batch_size=BATCH))
        for name, size in sizes.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in pairs}
    for loaders in pairs.values():
        for loader in loaders:
            _processor_seconds(loader)
    running = True
    while running:
        for name, (plain, ours) in pairs.items():
            before, middle, after = (_processor_seconds(loader) for loader in (plain, ours, plain))
            ratios[name].append(2 * middle / (before + after))
        running = timer.step(samples=3 * 250 * BATCH)
    return {name: statistics.median(values) for name, values in ratios.items()}


def _processor_seconds(loader: DataLoader[Any]) -> float:
    """Return the processor time of an epoch, in seconds."""
    started = time.process_time()
    for _ in loader:
        pass
    return time.process_time() - started


PILLOW, OURS = "DataLoader with Pillow, 0 workers", "DALILoader"
BARE, ITERATOR = "bare DALI pipeline with its own reader", "DALI's own iterator"
NUMPY = "volumes: DataLoader with np.load, 0 workers"
SEEDS = "sample seeds, 1 worker"
CACHED = "PrefetchLoader, samples in memory"


def _cases() -> Iterator[Case]:
    workers = ("DataLoader with Pillow, 2 workers",)
    for name, count, by, needs, against in (
        (PILLOW, 0, "torch", (), ()),
        ("DataLoader with Pillow, 1 workers", 1, "torch", (), ()),
        ("DataLoader with Pillow, 2 workers", 2, "torch", (), ()),
        ("PrefetchLoader with Pillow, 0 workers", 1, "ours", (), ()),
        ("PrefetchLoader with Pillow, 2 threads", 2, "ours", (), ()),
        ("torchdata's nodes with Pillow, 2 processes", 2, "torchdata, process", ("torchdata",), workers),
        ("torchdata's nodes with Pillow, 2 threads", 2, "torchdata, thread", ("torchdata",), workers),
        ("timm's PrefetchLoader with Pillow, 2 workers", 2, "timm", ("timm",), workers),
        ("MONAI's ThreadDataLoader with Pillow, 0 workers", 0, "monai", ("monai",), ()),
        ("MONAI's ThreadDataLoader with Pillow, 2 threads", 2, "monai", ("monai",), workers),
    ):
        kind = "peer" if needs else "ours" if by == "ours" else "torch"
        config = {"workers": count, "by": by}
        yield Case(name=name, run=photos, config=config, against=against, needs=needs, kind=kind)
    for suffix, uint8 in (("", False), (", uint8", True)):
        pair, config = (BARE + suffix, ITERATOR + suffix), {"uint8": uint8}
        yield Case(name=pair[0], run=bare, config=config, kind="peer")
        yield Case(name=pair[1], run=bare, config={**config, "iterator": True}, kind="peer")
        yield Case(name=OURS + suffix, run=dali_photos, config=config, against=pair, kind="ours")
    yield Case(name=OURS + ", dynamic mode", run=dynamic_photos, against=(OURS, *workers), kind="ours")
    for name, run, config, needs, kind in (
        (NUMPY, volumes, {"workers": 0}, (), "torch"),
        ("volumes: DataLoader with np.load, 2 workers", volumes, {"workers": 2}, (), "torch"),
        ("volumes: MONAI's ThreadDataLoader, 0 workers", volumes, {"workers": 0, "by": "monai"}, ("monai",), "peer"),
        ("volumes: PackedDataset", packed, {}, (), "ours"),
        ("volumes: DALILoader", dali_volumes, {}, (), "ours"),
    ):
        yield Case(name=name, run=run, config=config, base=NUMPY, needs=needs, kind=kind)
    yield Case(name=SEEDS, run=sample_seeds, base=SEEDS, kind="ours")
    yield Case(name=CACHED, run=cached, base=CACHED, kind="ours")


SUITE = Suite(
    name="loaders",
    about="A batch of 32 photographs, decoded, randomly cropped, resized to 224 x 224 pixels, mirrored and normalized; "
    "or a batch of 32 volumes of 28 x 28 x 28.",
    cases=list(_cases()),
    aims=[
        Aim(SEEDS, "", at_most=30, quantity="microseconds_a_sample"),
        Aim(CACHED, "", at_most=1.1, quantity="processor_time_images"),
        Aim(OURS + ", uint8", BARE + ", uint8", at_most=1.03),
        Aim(OURS + ", uint8", ITERATOR + ", uint8", at_most=1.03),
        Aim(OURS, PILLOW, at_most=1 / 2.4),
        Aim("PrefetchLoader with Pillow, 2 threads", "torchdata's nodes with Pillow, 2 threads", 1.02),
        Aim("volumes: PackedDataset", NUMPY, at_most=0.15),
        Aim("volumes: DALILoader", NUMPY, at_most=1 / 2),
    ],
    quick=(PILLOW, OURS),
    steps=6,
    warmup=3,
    lead=4,  # more than the queues hold, so that no batch that was loaded ahead while the process was held is measured
    seconds=300,
    unit="batch",
)
