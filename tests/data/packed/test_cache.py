"""cache_transforms: filled once, found again by its key, and filled by many processes at once."""

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_turbo.data import PackedDataset, cache_transforms, stamp_files
from lightning_turbo.errors import TurboWarning


class Scale:
    def __init__(self, factor):
        self.factor = factor
        self.random = np.random.RandomState()  # MONAI's transforms have one, whether they draw or not

    def __call__(self, array):
        return array * self.factor


class Files(Dataset):
    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {"x": self.transform(np.load(self.paths[index]))}


class Names(Dataset):
    """Holds its folder, and the names in it when it was made, as many datasets do."""

    def __init__(self, root):
        self.root, self.names = root, sorted(os.listdir(root))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return {"x": np.load(os.path.join(self.root, self.names[index]))}


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(3):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((n + 1, 2), n, np.float32))
    return [str(tmp_path / "in" / f"{n}.npy") for n in range(3)]


def test_samples_are_loaded_once(paths, tmp_path):
    seen, options = [], {"key": "v1", "progress": lambda *now: seen.append(now)}
    first = cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", **options)
    packed = PackedDataset(first)
    assert [packed[n]["x"].unique().tolist() for n in range(3)] == [[0], [2], [4]]
    again = cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", **options)
    assert again == first
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


# The key.


@pytest.mark.parametrize(
    "key", [None, lambda data: None, 0.5j, {1}, lambda data: data, [object()], lambda data: (Scale,)]
)
def test_an_error_says_which_key_to_write(paths, tmp_path, key):
    with pytest.raises(
        TypeError, match=r"key: expected a description .* key='spacing 1.5, v1'.*key=lambda dataset: \('v1', stamp_f"
    ):
        cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", **({} if key is None else {"key": key}))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("key", ["", (), lambda data: []])
def test_an_empty_key_is_refused(paths, tmp_path, key):
    with pytest.raises((TypeError, ValueError), match=r"key: expected a description of how samples are made"):
        cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", key=key)


def test_a_dataset_without_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataset: expected at least one sample, got 0"):
        cache_transforms([], tmp_path, key="v1")


@pytest.mark.parametrize("key", ["v2", lambda data: ("v1", 2), lambda data: {"factor": [data.transform.factor, None]}])
def test_another_key_fills_another_folder(paths, tmp_path, key):
    first = cache_transforms(Files(paths, Scale(2)), tmp_path / "cache", key="v1")
    changed = Files(paths, Scale(3))
    assert cache_transforms(changed, tmp_path / "cache", key="v1") == first  # as the card says
    other = cache_transforms(changed, tmp_path / "cache", key=key)
    assert other != first
    assert np.array_equal(PackedDataset(other)[2]["x"], changed[2]["x"])
    assert cache_transforms(changed, tmp_path / "cache", key=key) == other


@pytest.mark.parametrize("options", [{"foreground": "x"}, {"compress": (2, 2)}])
def test_arguments_are_a_part_of_the_address(paths, tmp_path, options):
    if "compress" in options:
        pytest.importorskip("blosc2")
    data = Files(paths, Scale(2))
    first = cache_transforms(data, tmp_path / "cache", key="v1")
    assert cache_transforms(data, tmp_path / "cache", key="v1", **options) != first
    assert cache_transforms(Files(paths[:2], Scale(2)), tmp_path / "cache", key="v1") != first


def write_again(root):
    np.save(root / "1.npy", np.full((8, 8), 99))


def write_same_size(root):
    np.save(root / "1.npy", np.full((2, 2), 9, np.float32))
    os.utime(root / "1.npy", (1, 1))


def rename(root):
    (root / "2.npy").rename(root / "3.npy")


CHANGES = {
    "a file": write_again,
    "a file of the same size": write_same_size,
    "a name": rename,
    "a file more": lambda root: np.save(root / "9.npy", np.ones(3)),
    "a file less": lambda root: (root / "2.npy").unlink(),
    "a folder of slices": lambda root: ((root / "dicom").mkdir(), np.save(root / "dicom" / "0.npy", np.ones(3))),
}
KEYS = {
    "folder": lambda data: stamp_files(data.root),
    "files": lambda data: ("v1", stamp_files([os.path.join(data.root, name) for name in data.names])),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("change", CHANGES)
def test_stamps_follow_files(paths, tmp_path, change, key):
    root = tmp_path / "in"
    first = cache_transforms(Names(root), tmp_path / "cache", key=KEYS[key])
    (root / ".DS_Store").touch()  # says nothing of the data
    names = sorted(set(os.listdir(root)) - {".DS_Store"})

    def data():
        found = Names(root)
        found.names = [name for name in found.names if name != ".DS_Store"]
        return found

    assert data().names == names
    assert cache_transforms(data(), tmp_path / "cache", key=KEYS[key]) == first
    CHANGES[change](root)
    assert KEYS[key](data()) != KEYS[key](Names(tmp_path / "in")) or key == "folder"
    if change != "a folder of slices":
        other = cache_transforms(data(), tmp_path / "cache", key=KEYS[key])
        assert other != first
        packed = PackedDataset(other)
        assert all(np.array_equal(packed[n]["x"], data()[n]["x"]) for n in range(len(data())))


def test_stamps_of_files(paths, tmp_path):
    assert stamp_files(*paths) == stamp_files(paths) == stamp_files(map(Path, paths))
    assert stamp_files(paths[:2]) != stamp_files(paths)
    assert stamp_files(paths[::-1]) != stamp_files(paths)  # the samples stand in another order
    copy = shutil.copytree(tmp_path / "in", tmp_path / "moved")
    assert stamp_files(copy) == stamp_files(tmp_path / "in")
    with pytest.raises(FileNotFoundError, match=r"paths: expected files and folders that exist, got '.*4.npy'"):
        stamp_files(tmp_path / "in" / "4.npy")
    with pytest.raises(ValueError, match="paths: expected at least one file"):
        stamp_files([])


# Random numbers.


def seed_itself(array):
    state = torch.get_rng_state()
    torch.manual_seed(len(array))
    noise = torch.rand(array.shape).numpy()
    torch.set_rng_state(state)
    return array + noise


OWN = np.random.default_rng(0)
RANDOM = {
    "numpy": (lambda array: array + np.random.rand(), "numpy.random"),
    "torch": (lambda array: array + torch.rand(1).item(), "torch"),
    "python": (lambda array: array + random.random(), "random"),
    "of its own": (lambda array, own=OWN: array + own.random(), "a random generator that the dataset holds"),
    "seldom": (lambda array: array + (np.random.rand() < 0.9), "numpy.random"),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_samples_are_refused(paths, tmp_path, kind):
    transform, name = RANDOM[kind]
    np.random.seed(3)
    with pytest.raises(ValueError, match=rf"expected the same sample each time; move .* got .*{name}"):
        cache_transforms(Files(paths, transform), tmp_path / "cache", key="v1")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.rand, lambda number: random.random()], ids=["torch", "numpy", "python"]
)
def test_a_pipeline_that_draws_and_stays_the_same_is_packed_with_a_warning(paths, tmp_path, draw):
    def always(array):  # TorchIO draws a number for each transform, also where its chance is 1
        draw(1)
        return array * 2

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.warns(TurboWarning, match=r"draws from the global RNG of .* It was identical \d+ times and is packed"):
        cached = cache_transforms(Files(paths, always), tmp_path / "cache", key="v1")
    assert PackedDataset(cached)[2]["x"].unique().tolist() == [4]
    # A run that packs draws the same numbers afterwards as one that finds the cache.
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_noise_that_belongs_to_the_sample_is_packed(paths, tmp_path):
    data = Files(paths, seed_itself)
    cached = cache_transforms(data, tmp_path / "cache", key="v1")
    assert np.array_equal(PackedDataset(cached)[1]["x"], data[1]["x"])


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
    cached = cache_transforms(Slow(folder, dies), folder / "cache", key="slow")
    data = PackedDataset(cached)
    assert [int(data[n].sum()) for n in range(6)] == [0, 2, 6, 12, 20, 30]
    Path(folder, f"saw-{cached.name}-{os.getpid()}").touch()


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_start_at_once_fill_it_once(tmp_path, dies):
    """Also where the first one is killed while it packs: another one packs again."""
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
    assert [len(list(folder.glob(f"loaded-{n}-*"))) for n in (1, 2, 3, 5)] == ([2, 2, 2, 1] if dies else [1] * 4)


def ranks_over_and_over(folder, barrier):
    for repetition in range(60):
        barrier.wait()
        cached = cache_transforms([np.zeros(1), np.ones(2)], folder / str(repetition), key="pair")
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
