"""pack: the samples of any dataset, whole or not at all, and what is left when it is interrupted."""

import contextlib
import errno
import functools
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_turbo.data import PackedDataset, pack
from lightning_turbo.data.packed import packing
from tests.data.packed.files import Samples, files_of, scan

SHAPES = {
    "tensor": lambda n: torch.full((3, 2), n),
    "tensors of different shapes": lambda n: torch.arange(n),
    "array and number": lambda n: (np.full((2, 2), n, np.float32), n),
    "numbers": lambda n: {"i": n, "f": n / 2, "b": n > 2},
    "nested": lambda n: (torch.ones(n + 1, 2), {"boxes": torch.ones(n, 4), "meta": [n, "x" * n]}),
    "strings": lambda n: {"image": torch.ones(2), "name": "é" * n},
    "tuple of one": lambda n: (torch.full((2,), n),),
    "list of one": lambda n: [n],
    "dictionary of one": lambda n: {"x": (n,)},
    "list": lambda n: [torch.ones(n + 1), {"a": [n, (n,)]}],
    "keys that are numbers": lambda n: {0: n, 1: {2: torch.ones(2)}, "a": {0.5: n, "b": 1, True: n}},
    "keys that look like kinds": lambda n: {"<list>": [n], "<dict>": {"<list>": n}},
    "empty parts": lambda n: {"x": n, "boxes": [], "meta": {}, "none": ()},
}


def kinds_in(sample):
    """The containers of a sample, with their kinds and keys."""
    if isinstance(sample, dict):
        return {key: kinds_in(part) for key, part in sample.items()}
    return type(sample)(map(kinds_in, sample)) if isinstance(sample, (list, tuple)) else None


def shaped(kind, n):
    """A sample of SHAPES, by a function that worker processes find by its name, however they start."""
    return SHAPES[kind](n)


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in SHAPES), ("nested", 2), ("list", 2)])
def test_samples_come_back_as_they_were(tmp_path, kind, num_workers):
    dataset = Samples(functools.partial(shaped, kind))
    assert pack(dataset, tmp_path / "out", num_workers=num_workers)["samples"] == 5
    packed = PackedDataset(tmp_path / "out")
    for n in range(5):
        assert repr(default_collate([packed[n]])) == repr(default_collate([dataset[n]]))
        assert kinds_in(packed[n]) == kinds_in(dataset[n])
    if "different" not in kind and kind not in ("nested", "list"):
        assert repr(list(DataLoader(packed, 3))) == repr(list(DataLoader(dataset, 3)))
        batches = list(DataLoader(packed, 3, collate_fn=PackedDataset.collate)) if kind != "strings" else []
        assert all(kinds_in(batch) == kinds_in(dataset[0]) for batch in batches)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_images_of_a_folder_of_torchvision_kind(tmp_path):
    image = pytest.importorskip("PIL.Image")
    dataset = Samples(lambda n: (image.new("RGB", (4 + n, 6), (n, 0, 0)), n % 2))
    dataset.classes = ["cat", "dog"]
    assert pack(dataset, tmp_path / "out")["classes"] == ["cat", "dog"]
    pixels, label = PackedDataset(tmp_path / "out")[3]
    assert (pixels.shape, pixels[0, 0].tolist(), label.item()) == ((6, 7, 3), [3, 0, 0], 1)


STOPS = {
    "interrupted": (KeyboardInterrupt(), KeyboardInterrupt),
    "broken dataset": (RuntimeError("no number"), RuntimeError),
}


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_stop_leaves_nothing_and_the_next_call_packs_again(tmp_path, how, at):
    error, kind = STOPS[how]

    def stop(n):
        if n == at:
            raise error
        return {"x": scan(n), "n": n}

    pack(Samples(lambda n: {"x": scan(n), "n": n}), tmp_path / "whole")
    with pytest.raises(kind):
        pack(Samples(stop), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    pack(Samples(lambda n: {"x": scan(n), "n": n}), tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


class Large(Samples):
    """Samples that fill a pipe, each with the number of the process that loads it."""

    def __getitem__(self, index):
        Path(self.make, str(os.getpid())).touch()
        return np.full((300, 1000), index)


def pack_large(folder):
    pack(Large(folder, 1000), folder / "out", num_workers=2)


def is_alive(pid):
    """Whether a process runs: one that has ended may stay as a zombie, if nobody asks for its status."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_worker_processes_end_with_a_process_that_is_killed(tmp_path):
    packing = multiprocessing.get_context("fork").Process(target=pack_large, args=(tmp_path,))
    packing.start()

    def pids():
        return {int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()}

    while len(pids()) < 2:
        time.sleep(0.01)
    os.kill(packing.pid, signal.SIGKILL)
    packing.join()
    assert packing.exitcode == -signal.SIGKILL
    workers = pids()
    while any(map(is_alive, workers)):
        time.sleep(0.01)
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob("out.partial-*"))) == 1
    pack(Samples(scan), tmp_path / "out")
    assert not list(tmp_path.glob("out.*"))  # what the killed process left is gone


def test_what_another_machine_is_writing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_turbo.data.packed.packing._MACHINE", "gpu")
    for name in ("gpu", "gpu-2"):
        (tmp_path / f"out.partial-{name}-{'0' * 32}").mkdir()
    pack([np.zeros(3)], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"out.partial-gpu-2-{'0' * 32}"]


def replace_over_and_over(folder):
    for number in range(1, 10_000):
        pack([np.full((50, number % 3 + 1), number), np.full(4, number)], folder / "out", overwrite=True)


@pytest.mark.parametrize("wait", [0.05, 0.11, 0.23])
def test_a_kill_leaves_nothing_half_written_under_the_name(tmp_path, wait):
    pack([np.zeros(3), np.zeros(4)], tmp_path / "out")
    packing = multiprocessing.get_context("fork").Process(target=replace_over_and_over, args=(tmp_path,))
    packing.start()
    time.sleep(wait)
    os.kill(packing.pid, signal.SIGKILL)
    packing.join()
    if (tmp_path / "out").exists():  # a kill between two renames leaves the old one under another name
        first, second = (PackedDataset(tmp_path / "out")[n] for n in range(2))
        assert set(first.flatten().tolist()) == set(second.tolist())
    pack([np.ones(2)], tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_broken_samples_are_left_out_with_a_list(tmp_path):
    def make(n):
        return scan(n) if n % 2 else np.zeros((1,) * n)[n]

    with pytest.raises(IndexError):
        pack(Samples(make), tmp_path / "out")
    contents = pack(Samples(make), tmp_path / "out", skip_broken=True)
    assert (contents["samples"], contents["skipped"]) == (2, 3)
    assert np.array_equal(PackedDataset(tmp_path / "out")[1], scan(3))
    lines = (tmp_path / "out.broken.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sample 0", "sample 2", "sample 4"]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda n: {"x": object()}, {}, TypeError, "x: expected a tensor, an array, a number or a string"),
        (lambda n: torch.ones(2, dtype=torch.bfloat16), {}, TypeError, "data: expected a dtype that NumPy has"),
        (
            lambda n: {1: n, "1": n},
            {},
            ValueError,
            r"expected one part per field name.* got \"two parts called \['1'\]",
        ),
        (lambda n: {"a.b": n, "a": {"b": n}}, {}, ValueError, r"two parts called \['a.b'\]"),
        (lambda n: {(1, 2): n}, {}, TypeError, r"sample: expected keys that are strings or numbers, got \[\(1, 2\)\]"),
        (lambda n: {}, {}, ValueError, "sample: expected at least one part, got {}"),
        (lambda n: [n] if n else (n,), {}, ValueError, r"sample 1: expected the structure \('0',\)"),
        (lambda n: {"a/b": 1}, {}, ValueError, "expected a field name that is a valid file name, got 'a/b'"),
        (lambda n: {"x": 1} if n < 2 else {"y": 1}, {}, ValueError, "sample 2: expected the structure .*'x'.*'y'"),
        (lambda n: np.zeros((1,) * 9), {}, ValueError, "shape: expected at most 8 axes"),
        (lambda n: {"x": n}, {"foreground": "label"}, KeyError, "expected one of .*'x'.*, got 'label'"),
        (lambda n: {"x": np.array([0.5])}, {"foreground": "x"}, ValueError, r"x: expected integers, got \[0.5\]"),
        (scan, {"compress": (0, 4)}, TypeError, "compress: expected True, False, or the lengths of a chunk"),
        (scan, {"num_workers": -1}, ValueError, "num_workers: expected an integer of 0 or more"),
    ],
)
def test_what_cannot_be_packed(tmp_path, make, options, error, message):
    with pytest.raises(error, match=message):
        pack(Samples(make), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_dataset_and_a_batch_transform_of_different_shapes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dataset: expected at least one sample, got 0"):
        pack([], tmp_path / "out")
    pack(Samples(scan), tmp_path / "out")
    with pytest.raises(ValueError, match=r"transform: expected None; the rows differ in shape.*sample_transform="):
        PackedDataset(tmp_path / "out", transform=list)
    packed = PackedDataset(tmp_path / "out", sample_transform=lambda sample: sample.float().mean())
    assert default_collate(packed.__getitems__([0, 1])).tolist() == [packed[0], packed[1]]


def slow_row(number):
    time.sleep(0.002)
    return np.full((20, 3 + number % 3), number, np.float32)


def test_threads_that_pack_one_folder_wait_for_one_another(tmp_path):
    """The lock file is one of the process, and does not keep its threads apart."""

    def packs(_):
        try:
            return pack(Samples(slow_row, 20), tmp_path / "out")["samples"]
        except FileExistsError:
            return "exists"

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(packs, range(2)), key=str) == [20, "exists"]
    packed = PackedDataset(tmp_path / "out")
    assert all(torch.equal(packed[number], torch.from_numpy(slow_row(number))) for number in range(20))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_locks_of_files_it_packs_as_well(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert pack(Samples(scan), tmp_path / "out")["samples"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_processes_that_no_lock_keeps_apart_do_not_mix(tmp_path, monkeypatch):
    """The first one to finish wins."""
    monkeypatch.setitem(sys.modules, "fcntl", None)

    def make(n):
        if n == 3 and not (tmp_path / "out").exists():
            monkeypatch.setattr(packing, "_turns", contextlib.nullcontext())  # as if this were another process
            pack(Samples(scan), tmp_path / "out")
        return scan(n) + 1

    with pytest.raises(FileExistsError, match="out: expected a new folder"):
        pack(Samples(make), tmp_path / "out")
    data = PackedDataset(tmp_path / "out")
    assert all(np.array_equal(data[n], scan(n)) for n in range(5))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_dataset_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    pack(Samples(scan), tmp_path / "out")
    replace = Path.replace

    def fail(self, target):
        if "partial" in self.name and not self.name.endswith("-old"):
            raise OSError(errno.EACCES, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Permission denied"):
        pack(Samples(lambda n: scan(n) + 1), tmp_path / "out", overwrite=True)
    assert np.array_equal(PackedDataset(tmp_path / "out")[2], scan(2))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("number", "refused"), [(errno.ENOLCK, False), (errno.EIO, True)])
def test_a_lock_that_fails_stops_a_call_unless_the_file_system_has_none(tmp_path, monkeypatch, number, refused):
    def fail(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.lockf", fail)
    with pytest.raises(OSError, match="error") if refused else contextlib.nullcontext():
        pack(Samples(scan), tmp_path / "out")
    assert (tmp_path / "out").exists() is not refused


# Integers beside floats.

HELD = {
    "small integers": ([np.arange(3), np.ones(2)], True),
    "up to 2**53": ([np.array([2**53, -(2**53)]), np.ones(2)], True),
    "even ones beyond": ([np.array([2**53 + 2, 2**60]), np.ones(2)], True),
    "odd ones beyond": ([np.ones(2), np.array([5, 2**53 + 1])], False),
    "negative": ([np.array(-(2**53) - 1), np.array(0.5)], False),
    "unsigned": ([np.array([2**64 - 1], np.uint64), np.array([-1])], False),
    "beside complex": ([np.array([2**53 + 1]), np.array([1j])], False),
    "of one dtype": ([np.array([2**63 - 1]), np.array([1, 2])], True),
    "of 32 bits": ([np.array([2**31 - 1], np.int32), np.ones(2, np.float32)], True),
}


@pytest.mark.parametrize("kind", HELD)
def test_integers_that_a_float_cannot_hold_are_refused(tmp_path, kind):
    samples, held = HELD[kind]
    if not held:
        with pytest.raises(
            ValueError, match=r"data of row \d: expected integers that \w+, the dtype of all rows .* got"
        ):
            pack(samples, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        return
    pack(samples, tmp_path / "out")
    data = PackedDataset(tmp_path / "out")
    for n, sample in enumerate(samples):
        assert data[n].flatten().tolist() == sample.flatten().tolist()
