"""Patches of compressed scans a second: PatchDataset beside MONAI's and TorchIO's ways to the same patches.

Run it: ``python examples/patches.py``. It writes some synthetic scans as .nii.gz files, prepares each way once, and
loads patches with each in turn, after one pass that warms it up; the median of the rounds counts. It needs nibabel;
MONAI and TorchIO are measured where they are installed. ``--memory`` also starts two ranks with two workers each, and
says how much memory they hold together: proportional set size, in which pages that several processes share count once.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.data import PatchDataset, pack_folder

KEYS = {"image": "volumes", "label": "labels"}


def write_scans(folder, number, shape):
    """Smooth volumes with noise, as int16, of slightly different sizes, and a label volume with one ball in each."""
    for name in ("scans", "masks"):
        (folder / name).mkdir()
    for n in range(number):
        generator = np.random.default_rng(n)
        lengths = np.array(shape) - generator.integers(0, 8, 3)
        grid = np.meshgrid(*map(np.arange, lengths), indexing="ij", sparse=True)
        waves = sum(np.sin(axis / generator.uniform(9, 30)) for axis in grid)
        distance = sum((axis - length / 2) ** 2 for axis, length in zip(grid, lengths, strict=True))
        mask = (distance < (min(lengths) / 8) ** 2).astype(np.uint8)
        scan = (200 * waves + generator.normal(scale=20, size=lengths)).astype(np.int16)
        for name, array in (("scans", scan), ("masks", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / name / f"{n}.nii.gz")
    return [{"image": str(folder / "scans" / f"{n}.nii.gz"), "label": str(folder / "masks" / f"{n}.nii.gz")}
            for n in range(number)]  # fmt: skip


def packed(folder, files, patch, per_scan, *, compress=False):
    out = folder / f"packed-{bool(compress)}"
    if not out.exists():
        start = time.perf_counter()
        pack_folder(folder / "scans", out, labels=folder / "masks", compress=compress)
        size = sum(path.stat().st_size for path in out.iterdir()) / 2**20
        kind = "compressed" if compress else "plain"
        print(f"{len(files)} scans packed in {time.perf_counter() - start:.1f} s: {size:.0f} MiB, {kind}")
    return PatchDataset(out, patch, per_scan=per_scan, foreground=0.5, keys=KEYS), PatchDataset.collate


def _monai_steps(patch, per_scan):
    from monai.transforms import Compose, LoadImaged, RandCropByPosNegLabeld

    crop = RandCropByPosNegLabeld(["image", "label"], "label", patch, pos=1, neg=1, num_samples=per_scan)
    return Compose([LoadImaged(["image", "label"], ensure_channel_first=True), crop])


def persistent(folder, files, patch, per_scan):
    from monai.data import PersistentDataset, list_data_collate

    return PersistentDataset(files, _monai_steps(patch, per_scan), folder / "persistent"), list_data_collate


def cached(folder, files, patch, per_scan):
    from monai.data import CacheDataset, list_data_collate

    return CacheDataset(files, _monai_steps(patch, per_scan), progress=False), list_data_collate


def queue(folder, files, patch, per_scan, workers):
    import torchio

    subjects = torchio.SubjectsDataset([
        torchio.Subject(image=torchio.ScalarImage(each["image"]), label=torchio.LabelMap(each["label"]))
        for each in files
    ])  # fmt: skip
    sampler = torchio.LabelSampler(patch, "label")
    return torchio.Queue(subjects, max_length=per_scan * 4, samples_per_volume=per_scan, sampler=sampler,
                         num_workers=workers, start_background=False)  # fmt: skip


def time_of_a_patch(data):
    """The median time in seconds to read one patch in this process."""
    times = []
    for index in [n % len(data) for n in range(200)]:
        start = time.perf_counter()
        data[index]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def patches_a_second(loader, count):
    """Load an epoch, and return how many patches came each second."""
    start, number = time.perf_counter(), 0
    for batch in loader:
        number += count(batch)
    return number / (time.perf_counter() - start)


class Reader(Dataset):
    """Returns the memory of the process that loads it, beside a patch, so that workers can be asked."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        (sample[0] if isinstance(sample, list) else sample)["image"].sum()
        return os.getpid(), proportional_memory()


def proportional_memory():
    """The proportional set size of this process in bytes."""
    line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def hold(data, found):
    loader = DataLoader(Reader(data), None, num_workers=2, persistent_workers=True)
    held = {pid: size for _ in range(2) for pid, size in loader}
    found.put((proportional_memory(), sorted(held.values())))
    found.join()


def memory_of_ranks(make):
    """The memory that two ranks with two workers each hold together; each rank prepares its own data, as in DDP."""
    context = torch.multiprocessing.get_context("fork")
    found = context.JoinableQueue()
    ranks = [context.Process(target=lambda: hold(make(), found)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    sizes = [found.get() for _ in ranks]
    for _ in ranks:
        found.task_done()
    for rank in ranks:
        rank.join()
    return sum(own + sum(workers) for own, workers in sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scans", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=3, default=(320, 305, 240))
    parser.add_argument("--patch", type=int, nargs=3, default=(96, 96, 96))
    parser.add_argument("--per-scan", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    patch, per_scan = tuple(options.patch), options.per_scan
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_scans(folder, options.scans, options.shape)
        makers = {
            "PatchDataset": lambda: packed(folder, files, patch, per_scan),
            "MONAI PersistentDataset": lambda: persistent(folder, files, patch, per_scan),
            "MONAI CacheDataset": lambda: cached(folder, files, patch, per_scan),
        }
        if importlib.util.find_spec("blosc2"):
            makers["PatchDataset, compressed"] = lambda: packed(folder, files, patch, per_scan, compress=patch)
        if not importlib.util.find_spec("monai"):
            makers = {key: make for key, make in makers.items() if "MONAI" not in key}
        loaders = {}
        for key, make in makers.items():
            data, collate = make()
            whole = "MONAI" in key  # its crop returns all patches of a scan at once
            size = 1 if whole else per_scan
            loaders[key] = DataLoader(data, size, shuffle=True, num_workers=options.workers, collate_fn=collate,
                                      persistent_workers=options.workers > 0)  # fmt: skip
            if "PatchDataset" in key:
                print(f"{key}: {time_of_a_patch(data) * 1e3:.2f} ms for a patch of image and label")
        if importlib.util.find_spec("torchio"):
            loaders["TorchIO Queue"] = DataLoader(queue(folder, files, patch, per_scan, options.workers), per_scan)
        rates = {key: [] for key in loaders}
        for turn in range(options.rounds + 1):
            for key, loader in loaders.items():
                count = (lambda batch: batch["image"]["data"].shape[0]) if "TorchIO" in key else (
                    lambda batch: batch["image"].shape[0])  # fmt: skip
                rate = patches_a_second(loader, count)
                if turn:
                    rates[key].append(rate)
        for key, found in rates.items():
            print(f"{key}: {statistics.median(found):.1f} patches a second, {options.workers} workers")
        if options.memory:
            del loaders
            for key in [key for key in makers if "compressed" not in key and "Persistent" not in key]:
                held = memory_of_ranks(lambda key=key: makers[key]()[0])
                print(f"{key}: {held / 2**20:.0f} MiB in two ranks with two workers each")


if __name__ == "__main__":
    main()
