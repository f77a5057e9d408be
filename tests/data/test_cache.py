"""cache_transforms: filled once, found again, filled again when something changed, by many processes at once."""

import functools
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_turbo.data import PackedDataset, cache_transforms

SHIFT = 1


def shifted(array):
    return array + SHIFT


class Scale:
    def __init__(self, factor):
        self.factor = factor
        self.random = np.random.RandomState()  # MONAI's transforms have one, whether they draw or not

    def __call__(self, array):
        return shifted(array * self.factor)


class Files(Dataset):
    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {"x": self.transform(np.load(self.paths[index]))}


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(3):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((n + 1, 2), n, np.float32))
    return [str(tmp_path / "in" / f"{n}.npy") for n in range(3)]


def test_samples_are_loaded_once(paths, tmp_path):
    seen = []
    first = cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert [sample["x"].unique().tolist() for sample in map(PackedDataset(first).__getitem__, range(3))] == [
        [1],
        [3],
        [5],
    ]
    again = cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert again == first
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


class Other(Scale):
    pass


class Padded(Scale):
    """What it adds stands in its class: a list, and a property that is computed once."""

    ADDED: ClassVar = [1, 2]

    @functools.cached_property
    def more(self):
        return 1

    def __call__(self, array):
        return super().__call__(array) + sum(self.ADDED) + self.more


def change_file(paths, monkeypatch):
    np.save(paths[1], np.ones((7, 2), np.float32))
    return Files(paths, Scale(2))


def change_constant(paths, monkeypatch):
    monkeypatch.setitem(globals(), "SHIFT", 5)
    return Files(paths, Scale(2))


def change_helper(paths, monkeypatch):
    monkeypatch.setitem(globals(), "shifted", lambda array: array - SHIFT)
    return Files(paths, Scale(2))


def change_code(paths, monkeypatch):
    monkeypatch.setattr(Scale, "__call__", lambda self, array: array * self.factor)
    return Files(paths, Scale(2))


def change_list_of_class(paths, monkeypatch):
    monkeypatch.setattr(Padded, "ADDED", [1, 3])
    return Files(paths, Padded(2))


def change_cached_property(paths, monkeypatch):
    more = functools.cached_property(lambda self: 2)
    more.__set_name__(Padded, "more")
    monkeypatch.setattr(Padded, "more", more)
    return Files(paths, Padded(2))


CHANGES = {
    "a file": change_file,
    "a file less": lambda paths, monkeypatch: Files(paths[:2], Scale(2)),
    "another order": lambda paths, monkeypatch: Files(paths[::-1], Scale(2)),
    "a parameter": lambda paths, monkeypatch: Files(paths, Scale(2.5)),
    "a class": lambda paths, monkeypatch: Files(paths, Other(2)),
    "a constant": change_constant,
    "a helper": change_helper,
    "code": change_code,
    "a function": lambda paths, monkeypatch: Files(paths, functools.partial(np.multiply, 2)),
    "a list of a class": change_list_of_class,
    "a cached property": change_cached_property,
}


FROM = {"a list of a class": Padded, "a cached property": Padded}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_fills_another_folder(paths, tmp_path, monkeypatch, what):
    first = cache_transforms(Files(paths, FROM.get(what, Scale)(2)), tmp_path / "cache")
    changed = CHANGES[what](paths, monkeypatch)
    other = cache_transforms(changed, tmp_path / "cache")
    assert other != first
    packed = PackedDataset(other)
    assert all(np.array_equal(packed[n]["x"], changed[n]["x"]) for n in range(len(changed)))


@pytest.mark.parametrize("options", [{"version": "2"}, {"foreground": "x"}])
def test_arguments_are_a_part_of_the_address(paths, tmp_path, options):
    data = Files(paths, Scale(2))
    assert cache_transforms(data, tmp_path / "cache") != cache_transforms(data, tmp_path / "cache", **options)


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        (lambda array: array + np.random.rand(), ValueError, "without random numbers; .* got '.*numpy.random"),
        (lambda array: array + torch.rand(1).item(), ValueError, "without random numbers; .* got '.*torch"),
        (functools.partial(map, threading.Lock()), TypeError, "expected parameters and files, .* got lock"),
    ],
)
def test_what_cannot_be_cached(paths, tmp_path, transform, error, message):
    with pytest.raises(error, match=message):
        cache_transforms(Files(paths, transform), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class Slow:
    def __init__(self, folder, dies):
        self.folder, self.dies = str(folder), dies

    def __len__(self):
        return 6

    def __getitem__(self, index):
        died = Path(self.folder, "died")
        Path(self.folder, f"loaded-{index}-{os.getpid()}").touch()
        time.sleep(0.02)
        if index == 4 and self.dies and not died.exists():
            died.touch()
            os._exit(9)
        return np.full((index + 1,), index)


def rank(folder, dies):
    cached = cache_transforms(Slow(folder, dies), folder / "cache")
    data = PackedDataset(cached)
    assert [int(data[n].sum()) for n in range(6)] == [0, 2, 6, 12, 20, 30]
    Path(folder, f"saw-{cached.name}-{os.getpid()}").touch()


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_start_at_once_fill_it_once(tmp_path, dies):
    """Also where the first one is killed while it packs: another one goes on."""
    # Not the working directory: a text in code that is the name of a file there is known by the file, here "died".
    folder = tmp_path / "ranks"
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(folder, dies)) for _ in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert sorted(each.exitcode for each in ranks) == ([0, 0, 9] if dies else [0, 0, 0])
    (name,) = {path.name.split("-")[1] for path in folder.glob("saw-*")}
    assert [path.name for path in (folder / "cache").iterdir()] == [name]
    assert [len(list(folder.glob(f"loaded-{n}-*"))) for n in (1, 2, 3, 5)] == [1] * 4


def ranks_over_and_over(folder, barrier):
    for turn in range(60):
        barrier.wait()
        cached = cache_transforms([np.zeros(1), np.ones(2)], folder / str(turn))
        barrier.wait()
        assert [path.name for path in cached.parent.iterdir()] == [cached.name]
        assert {path.suffix for path in cached.iterdir()} == {".npy", ".index", ".json"}
        assert [int(row.sum()) for row in PackedDataset(cached)] == [0, 2]


def test_ranks_meet_at_each_moment_of_the_work(tmp_path):
    """One packs, and another begins while it ends: it makes nothing in what the first one renames or removes."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4, timeout=60)
    ranks = [context.Process(target=ranks_over_and_over, args=(tmp_path, barrier)) for _ in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0] * 4
