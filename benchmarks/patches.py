"""The suite ``patches``: random patches of compressed scans with PatchDataset and MONAI."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.loaders import forever
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data import PatchDataset, pack_folder

__all__ = ["SUITE"]

SCANS, SHAPE, PATCH, PER_SCAN = 4, (320, 305, 240), (96, 96, 96), 4
KEYS = {"image": "volumes", "label": "labels"}

Files = list[dict[str, str]]


def write_scans(timer: CaseTimer, folder: Path) -> Files:
    """Write smooth int16 volumes with noise, of slightly different sizes, each with a label volume of a ball."""
    import nibabel

    for name in ("scans", "masks"):
        (folder / name).mkdir()
    for n in range(SCANS):
        generator = np.random.default_rng([timer.seed, n])
        lengths = np.array(SHAPE) // (6 if timer.quick else 1) - generator.integers(0, 8, 3)
        grid = np.meshgrid(*map(np.arange, lengths), indexing="ij", sparse=True)
        waves = sum(np.sin(axis / generator.uniform(9, 30)) for axis in grid)
        distance = sum((axis - length / 2) ** 2 for axis, length in zip(grid, lengths, strict=True))
        noise = generator.standard_normal(lengths, dtype=np.float32)
        scan = (200 * waves + 20 * noise).astype(np.int16)
        for name, array in (("scans", scan), ("masks", (distance < (min(lengths) / 8) ** 2).astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / name / f"{n}.nii.gz")
    return [
        {"image": str(folder / "scans" / f"{n}.nii.gz"), "label": str(folder / "masks" / f"{n}.nii.gz")}
        for n in range(SCANS)
    ]


def _patch(timer: CaseTimer) -> tuple[int, ...]:
    return (32, 32, 32) if timer.quick else PATCH


def _packed(timer: CaseTimer, folder: Path, files: Files, compress: bool = False) -> tuple[Any, Any]:
    out, patch = folder / "packed", _patch(timer)
    if not out.exists():
        pack_folder(folder / "scans", out, labels=folder / "masks", compress=patch if compress else False)
    return PatchDataset(out, patch, per_scan=PER_SCAN, foreground=0.5, keys=KEYS), PatchDataset.collate


def _monai_steps(timer: CaseTimer, places: str = "", typed: bool = False) -> Any:
    """Build the transforms of MONAI.

    Args:
        timer: Timer of the case.
        places: Where the crop finds foreground: in the mask, each time, if empty; in stored ``"indices"`` of all
            voxels, or of up to 10,000 of each of the ``"classes"``, as MONAI's documentation says for crops.
        typed: Whether to keep the dtypes of the files, as ``PatchDataset`` does, instead of float32.
    """
    from monai import transforms

    both, label, size = ("image", "label"), "label", _patch(timer)
    steps: list[Any] = [transforms.LoadImaged(both, ensure_channel_first=True)]
    if typed:
        steps.append(transforms.EnsureTyped(both, dtype=(torch.int16, torch.uint8)))
    crop: dict[str, Any] = {"spatial_size": size, "num_samples": PER_SCAN}
    if places == "classes":
        steps.append(transforms.ClassesToIndicesd(label, num_classes=2, max_samples_per_class=10_000))
        crop |= {"ratios": [1, 1], "num_classes": 2, "indices_key": "label_cls_indices"}
        steps.append(transforms.RandCropByLabelClassesd(both, label, **crop))
    else:
        if places == "indices":
            steps.append(transforms.FgBgToIndicesd(label))
            crop |= {"fg_indices_key": "label_fg_indices", "bg_indices_key": "label_bg_indices"}
        steps.append(transforms.RandCropByPosNegLabeld(both, label, pos=1, neg=1, **crop))
    return transforms.Compose([*steps, transforms.SelectItemsd(both)])


def _persistent(timer: CaseTimer, folder: Path, files: Files, **steps: Any) -> tuple[Any, Any]:
    from monai import data

    dataset = data.PersistentDataset(files, _monai_steps(timer, **steps), folder / "persistent")
    for index in range(len(files)):  # the first access writes the cache
        dataset[index]
    return dataset, data.list_data_collate


def _cached(
    timer: CaseTimer, folder: Path, files: Files, copy: bool = False, metadata: bool = True, **steps: Any
) -> tuple[Any, Any]:
    from monai import data

    data.set_track_meta(metadata)
    dataset = data.CacheDataset(files, _monai_steps(timer, **steps), progress=False, copy_cache=copy)
    return dataset, data.list_data_collate


MAKERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "packed": _packed,
    "compressed": partial(_packed, compress=True),
    "persistent": partial(_persistent, places="classes", typed=True),
    "cached": partial(_cached, copy=True),
    "indices": partial(_cached, places="indices"),
    "classes": partial(_cached, places="classes"),
    "bare": partial(_cached, places="classes", typed=True, metadata=False),
}


def loaded(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Load batches of four patches with one worker process; with MONAI, of one scan, as its crop returns them."""
    with tempfile.TemporaryDirectory() as name:
        data, collate = MAKERS[by](timer, Path(name), write_scans(timer, Path(name)))
        size = PER_SCAN if isinstance(data, PatchDataset) else 1
        sampler = RandomSampler(data, num_samples=10**9)  # one long epoch
        loader = DataLoader(data, size, sampler=sampler, num_workers=1, collate_fn=collate)
        for batch in loader:
            if not timer.step(samples=len(batch["image"])):
                return {}
    return {}


def read(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Read single patches of image and label in this process."""
    times = []
    with tempfile.TemporaryDirectory() as name:
        data, _ = MAKERS[by](timer, Path(name), write_scans(timer, Path(name)))
        for index in forever(range(len(data))):
            start = time.perf_counter()
            data[index]
            times.append(time.perf_counter() - start)
            if not timer.step(samples=1):
                return {"milliseconds_a_patch": 1e3 * statistics.median(times)}
    return {}


class _Memory(Dataset[tuple[int, int]]):
    """Reads the patches of a dataset, and returns the id of the process and the memory that it holds."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return 20 * len(self.data)

    def __getitem__(self, index: int) -> tuple[int, int]:
        sample = self.data[index % len(self.data)]
        (sample[0] if isinstance(sample, list) else sample)["image"].sum()
        return os.getpid(), _held()


def _held() -> int:
    """Return the proportional set size of this process in bytes, which divides shared pages among their processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


def _hold(make: Callable[[], Any], barrier: Any, results: Any) -> None:
    """Be one rank: read all patches, and report the memory of this process and its workers."""
    loader = DataLoader(_Memory(make()), None, num_workers=2, persistent_workers=True)
    dict(iter(loader))
    barrier.wait()  # until the other rank has mapped or loaded all data too
    held = dict(iter(loader))
    results.put(_held() + sum(held.values()))
    results.join()  # keep the memory until the other rank has reported too


def memory(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Return the memory of two ranks with two workers each. Each rank has its own dataset, as with DDP."""
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        files = write_scans(timer, Path(name))

        def make() -> Any:
            return MAKERS[by](timer, Path(name), files)[0]

        if by == "packed":
            make()
        results, barrier = context.JoinableQueue(), context.Barrier(2)
        ranks = [context.Process(target=_hold, args=(make, barrier, results)) for _ in range(2)]
        for rank in ranks:
            rank.start()
        held = sum(results.get() for _ in ranks)
        for _ in ranks:
            results.task_done()
        for rank in ranks:
            rank.join()
    while timer.step():
        pass
    return {"held_bytes": held}


OURS, CACHE = "PatchDataset", "MONAI's CacheDataset"
STORED = f"{CACHE}, FgBgToIndicesd", f"{CACHE}, ClassesToIndicesd"
BARE = f"{STORED[1]}, dtypes of the files, no metadata"
PERSISTENT = "MONAI's PersistentDataset, ClassesToIndicesd, dtypes of the files"
READ, MEMORY = ", a patch", ", memory of two ranks"


def _cases() -> Iterator[Case]:
    for name, by, needs in (
        (CACHE, "cached", ("monai",)),
        (STORED[0], "indices", ("monai",)),
        (STORED[1], "classes", ("monai",)),
        (BARE, "bare", ("monai",)),
        (PERSISTENT, "persistent", ("monai",)),
        (OURS, "packed", ()),
        (f"{OURS}, compressed", "compressed", ("blosc2",)),
    ):
        kind, needs, config = "ours" if OURS in name else "peer", ("nibabel", *needs), {"by": by}
        against = (*STORED, BARE) if name == OURS else ()
        yield Case(name=name, run=loaded, config=config, against=against, needs=needs, kind=kind)
        if kind == "ours":
            yield Case(name=name + READ, run=read, config=config, base=name + READ, needs=needs, kind=kind)
        if by in ("cached", "classes", "bare", "packed"):
            base = CACHE + MEMORY
            yield Case(name=name + MEMORY, run=memory, config=config, base=base, needs=needs, kind=kind)


SUITE = Suite(
    name="patches",
    about=f"Four random patches of {PATCH[0]} x {PATCH[1]} x {PATCH[2]} voxels with masks, half of them centered on "
    f"foreground, from {SCANS} scans of about {SHAPE[0]} x {SHAPE[1]} x {SHAPE[2]} in .nii.gz files, with one worker "
    "process; one patch, without worker processes; and the memory of two ranks with two workers each.",
    cases=list(_cases()),
    aims=[
        Aim(OURS + READ, "", at_most=1.0, quantity="milliseconds_a_patch"),
        *(Aim(OURS, peer, at_most=1.0) for peer in (CACHE, *STORED, BARE, PERSISTENT)),
        *(Aim(OURS + MEMORY, peer + MEMORY, 1.0, "held_bytes") for peer in (CACHE, STORED[1], BARE)),
    ],
    quick=(CACHE, OURS),
    steps=8,
    warmup=4,
    lead=4,  # more than the queue holds
    seconds=90,
    unit="batch",
)
