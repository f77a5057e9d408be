"""PackedDataset against plain NumPy."""

import json
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_turbo._pytree import move_batch
from lightning_turbo.data import PackedDataset, PatchDataset, PrefetchLoader, pack, pack_folder


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "train_images": rng.integers(0, 256, (20, 4, 5), dtype=np.uint8),
        "train_labels": rng.integers(0, 3, (20, 1), dtype=np.int64),
        "test_images": rng.integers(0, 256, (6, 4, 5), dtype=np.uint8),
    }


KEYS = ("train_images", "train_labels")


@pytest.fixture(params=["npz", "npy", "arrays"])
def dataset(request, arrays, tmp_path):
    if request.param == "arrays":
        return PackedDataset(arrays, keys=KEYS)
    if request.param == "npy":
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
        return PackedDataset({name: tmp_path / f"{name}.npy" for name in arrays}, keys=KEYS)
    path = tmp_path / "all.npz"
    np.savez_compressed(path, **arrays)
    return PackedDataset(path, keys=KEYS)


def test_rows_and_batches_equal_the_arrays(dataset, arrays):
    assert len(dataset) == 20
    for index in (0, 7, -1):
        image, label = dataset[index]
        assert np.array_equal(image.numpy(), arrays["train_images"][index])
        assert np.array_equal(label.numpy(), arrays["train_labels"][index])
    where = [3, 3, 19, 0]
    images, labels = dataset.batch(where)
    assert np.array_equal(images.numpy(), arrays["train_images"][where])
    assert labels.tolist() == arrays["train_labels"][where].tolist()


def test_a_batch_makes_no_text_of_its_source(arrays):
    class Silent(dict):
        def __repr__(self):
            raise AssertionError("the text of the source takes longer than a batch")

    dataset = PackedDataset(Silent(arrays), keys=KEYS)
    assert len(dataset.__getitems__([0, 2])) == 2
    dataset.batch([1])


@pytest.mark.parametrize("workers", [0, 1])
def test_both_ways_of_collating_give_the_same_batches(dataset, workers):
    def batches(cls, **settings):
        torch.manual_seed(0)
        return [(a.tolist(), b.tolist()) for a, b in cls(dataset, 6, shuffle=True, num_workers=workers, **settings)]

    assert batches(PrefetchLoader, collate_fn=PackedDataset.collate) == batches(DataLoader)


def test_files_are_mapped_and_not_pickled_and_batches_are_copies(tmp_path, arrays):
    path = tmp_path / "b.npy"
    np.save(path, arrays["train_images"])
    dataset = PackedDataset(path)
    assert isinstance(dataset.arrays["b"], np.memmap)
    stored = pickle.dumps(dataset)
    assert len(stored) < 1000
    assert torch.equal(pickle.loads(stored)[3], dataset[3])
    dataset.batch([0])[:] = 0
    dataset[0][:] = 0
    assert np.array_equal(np.load(path), arrays["train_images"])
    assert np.array_equal(dataset[0].numpy(), arrays["train_images"][0])


@pytest.mark.parametrize("order", "<>")
def test_arrays_of_either_byte_order(tmp_path, order):
    rows = np.arange(20).reshape(5, 2, 2).astype(f"{order}i2")
    np.savez(tmp_path / "x.npz", x=rows)
    np.save(tmp_path / "x.npy", rows)
    (tmp_path / "scans").mkdir()
    for n, row in enumerate(rows):
        np.save(tmp_path / "scans" / f"{n}.npy", row)
    pack_folder(tmp_path / "scans", tmp_path / "packed")
    for source in (rows, tmp_path / "x.npz", tmp_path / "x.npy", tmp_path / "packed"):
        dataset = PackedDataset(source)
        assert dataset.batch([3, 0]).dtype == torch.int16
        assert dataset.batch([3, 0]).tolist() == rows[[3, 0]].tolist()


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "transform",
    [list, lambda batch: {"image": batch[0], "meta": {"label": [batch[1]]}}, lambda batch: Pair(*batch)],
    ids=["list", "mapping", "named tuple"],
)
def test_samples_have_the_structure_of_what_transform_returns(arrays, transform):
    whole, rows = PackedDataset(arrays, keys=KEYS), []

    def counting(batch):
        rows.append(len(batch[0]))
        return transform(batch)

    dataset = PackedDataset(arrays, keys=KEYS, transform=counting)
    assert repr(dataset[3]) == repr(transform(whole[3]))
    assert type(dataset[3]) is type(transform(whole[3]))
    expected = [repr(transform(tuple(batch))) for batch in DataLoader(whole, 6)]
    for collate in (None, PackedDataset.collate):
        assert [repr(batch) for batch in DataLoader(dataset, 6, collate_fn=collate)] == expected
    assert rows == [1, 1, *[6, 6, 6, 2] * 2]  # it sees batches


def test_samples_that_are_not_collated_can_be_moved(arrays):
    dataset = PackedDataset(arrays, keys=KEYS)
    loader = DataLoader(dataset, 4, collate_fn=_as_they_are, num_workers=1)
    for move in (move_data_to_device, move_batch):
        samples = move(next(iter(loader)), torch.device("cpu"))
        assert repr(list(samples)) == repr([dataset[n] for n in range(4)])
        assert torch.equal(PackedDataset.collate(samples)[0], dataset.batch([0, 1, 2, 3])[0])


def _as_they_are(samples):
    return samples


def halve(batch):
    return {"x": batch["x"].float() / 2, "y": batch["y"]}


def transpose(sample):
    assert sample["x"].shape == (4, 5)
    return {**sample, "x": sample["x"].T, "n": len(sample)}


@pytest.mark.parametrize(("collate", "workers"), [(None, 0), (PackedDataset.collate, 1)])
def test_sample_transform_sees_samples_after_transform_saw_the_batch(arrays, collate, workers):
    dataset = PackedDataset(
        arrays, keys={"x": "train_images", "y": "train_labels"}, transform=halve, sample_transform=transpose
    )
    assert list(dataset[2]) == ["x", "y", "n"]
    assert dataset[2]["x"].shape == (5, 4)
    batches = list(DataLoader(dataset, 6, num_workers=workers, collate_fn=collate))
    assert [batch["x"].shape for batch in batches] == [(6, 5, 4)] * 3 + [(2, 5, 4)]
    got = torch.cat([batch["x"] for batch in batches]).numpy()
    assert np.array_equal(got, arrays["train_images"].swapaxes(1, 2) / np.float32(2))
    assert batches[0]["n"].tolist() == [2] * 6


def test_a_folder_without_the_newer_entries_is_read(tmp_path):
    np.save(tmp_path / "volumes.npy", np.arange(12).reshape(3, 2, 2))
    np.save(tmp_path / "affine.npy", np.stack([np.eye(4)] * 3))
    contents = {"arrays": "volumes", "classes": ["a"], "samples": 3, "skipped": 0}
    (tmp_path / "packed.json").write_text(json.dumps(contents))
    data = PackedDataset(tmp_path)
    assert (data.classes, data[2].tolist()) == (["a"], [[8, 9], [10, 11]])
    assert len(PatchDataset(tmp_path, (1, 2), per_scan=2)) == 6


# Samples that were changed after they were read.


def change_entry(sample):
    sample["x"] = sample["x"] + 100
    return sample


def change_nested(sample):
    sample["pair"][1]["y"] = sample["pair"][1]["y"] * 0
    return sample


def replace_in_place(sample):
    sample["x"].add_(100)
    return sample


CHANGES = {
    "another sample": lambda sample: {**sample, "x": sample["x"] + 100},
    "an entry": change_entry,
    "an entry below": change_nested,
    "an entry more": lambda sample: {**sample, "more": 1},
    "a tensor in place": replace_in_place,
    "nothing": lambda sample: sample,
}


class Changed(Dataset):
    """Changes the samples of another dataset in the list that it returned."""

    def __init__(self, data, change, places):
        self.data, self.change, self.places = data, change, places

    def __len__(self):
        return len(self.data)

    def __getitems__(self, indices):
        samples = self.data.__getitems__(indices)
        for place in self.places:
            samples[place] = self.change(samples[place])
        return samples


@pytest.mark.parametrize("places", [(0, 1, 2), (1,)], ids=["all", "one"])
@pytest.mark.parametrize(("change", "workers"), [*((change, 0) for change in CHANGES), ("an entry", 1)])
def test_collate_sees_what_was_changed(tmp_path, change, workers, places):
    if change == "an entry more" and len(places) == 1:
        places = (0, 1, 2)  # default_collate takes samples of one structure
    rows = [{"x": torch.full((2,), n), "pair": (n, {"y": n / 2})} for n in range(3)]
    pack(rows, tmp_path / "out")
    data = Changed(PackedDataset(tmp_path / "out"), CHANGES[change], places)

    def loaded(collate):
        (batch,) = DataLoader(data, 3, collate_fn=collate, num_workers=workers)
        return {"x": batch["x"].tolist(), "y": batch["pair"][1]["y"].tolist(), "keys": sorted(batch)}

    assert loaded(PackedDataset.collate) == loaded(default_collate)


@pytest.mark.parametrize("edit", [list.reverse, list.pop, lambda samples: samples.append(samples[0])])
def test_collate_sees_a_list_that_was_edited(arrays, edit):
    samples = PackedDataset(arrays, keys=KEYS).__getitems__([4, 5, 6])
    edit(samples)
    images, _ = PackedDataset.collate(samples)
    assert torch.equal(images, torch.stack([image for image, _ in samples]))


# Where nothing was packed.


def test_a_folder_that_is_not_packed_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for name, error, message in (
        ("nope", FileNotFoundError, r"got '.*nope', which does not exist. Pack first: lightning-turbo pack FOLDER OUT"),
        ("nope.npy", FileNotFoundError, r"got '.*nope.npy', which does not exist. Pack first"),
        ("empty", FileNotFoundError, r"got '.*empty', a folder without packed.json. Pack first"),
        ("notes.txt", ValueError, r"expected a folder written by pack, or an .npz or .npy file"),
    ):
        for kind in (PackedDataset, lambda source: PatchDataset(source, (2, 2, 2))):
            with pytest.raises(error, match=message):
                kind(tmp_path / name)
