"""PatchDataset: what a patch holds, where it lies, and that sample seeds decide it."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from lightning_turbo.data import (
    PackedDataset,
    PatchDataset,
    PrefetchLoader,
    SeededSampler,
    pack,
    pack_folder,
    seed_samples,
)

SHAPES = [(9, 8, 10), (7, 12, 6), (6, 6, 6), (11, 7, 9)]
PATCH = (4, 5, 3)


def number_voxels(shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def scans(channels=2):
    """Volumes whose voxels are numbered, with label volumes of as many classes as there are scans but the last."""
    for n, shape in enumerate(SHAPES):
        label = np.zeros(shape, np.uint8)
        for each in range(1, n + 1):
            label[each, -1, 0] = each
        voxels = number_voxels(shape)
        yield {"image": np.stack([voxels, -voxels])[:channels], "label": label, "n": n}


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def folder(request, tmp_path):
    if request.param:
        pytest.importorskip("blosc2")
    pack(list(scans()), tmp_path / "out", foreground="label", compress=request.param and PATCH)
    return tmp_path / "out"


@pytest.fixture
def plain(tmp_path):
    pack(list(scans()), tmp_path / "plain", foreground="label")
    return tmp_path / "plain"


def first_voxel(sample):
    """Where a patch lies in its scan, from the number of its first voxel."""
    shape = SHAPES[int(sample["n"])]
    return np.unravel_index(int(sample["image"][0, 0, 0, 0]), shape)


def test_a_patch_is_a_part_of_its_scan(folder):
    data = PatchDataset(folder, PATCH, per_scan=20)
    assert len(data) == 80
    starts = set()
    for index in range(len(data)):
        sample = data[index]
        assert sample["n"] == index // 20
        whole = list(scans())[index // 20]
        start = first_voxel(sample)
        inside = tuple(slice(at, at + size) for at, size in zip(start, PATCH, strict=True))
        assert np.array_equal(sample["image"], whole["image"][(slice(None), *inside)])
        assert np.array_equal(sample["label"], whole["label"][None][(slice(None), *inside)])
        starts.add((index // 20, *map(int, start)))
    for axis in range(3):  # patches reach both ends
        assert {start[1 + axis] for start in starts if start[0] == 0} >= {0, SHAPES[0][axis] - PATCH[axis]}
    assert data[-1]["n"] == 3
    with pytest.raises(IndexError):
        data[80]


def test_the_batch_that_is_read_at_once_is_that_of_its_samples(plain):
    data = PatchDataset(plain, PATCH, per_scan=3)
    indices = [0, 11, 5, 3]
    torch.manual_seed(0)
    samples = data.__getitems__(indices)
    torch.manual_seed(0)
    expected = default_collate([data[index] for index in indices])
    for batch in (PatchDataset.collate(samples), default_collate(list(samples))):
        assert list(batch) == ["image", "label", "n"]
        assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert expected["image"].shape == (4, 2, *PATCH)
    assert expected["label"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("foreground", "shares"), [(0.4, {1: 0.2, 2: 0.2}), ({2: 0.5}, {2: 0.5}), (1, {1: 0.5, 2: 0.5})]
)
def test_shares_of_foreground(tmp_path, foreground, shares):
    """One voxel of each class in a scan so large that another patch has it in its center once in 10,000 times."""
    label = np.zeros((1, 30, 30, 30), np.int64)
    label[0, 10, 12, 14], label[0, 20, 8, 5] = 1, 2
    pack([{"label": label}], tmp_path / "out", foreground="label")
    number = 600
    data = PatchDataset(tmp_path / "out", (5, 5, 5), per_scan=number, foreground=foreground)
    torch.manual_seed(1)
    centers = torch.stack([data[n]["label"][0, 2, 2, 2] for n in range(number)])
    for each in (1, 2):
        share = shares.get(each, 0)
        assert abs((centers == each).sum() - share * number) <= 3.5 * math.sqrt(share * (1 - share) * number) + 1


def test_foreground_at_the_border_and_scans_without_it(plain):
    data = PatchDataset(plain, PATCH, per_scan=30, foreground={3: 1.0})
    samples = [data[index] for index in range(len(data))]
    assert all((sample["label"] == 3).any() for sample in samples[90:])
    assert len({first_voxel(sample) for sample in samples[90:]}) == 1
    assert len({first_voxel(sample) for sample in samples[:30]}) > 20  # it has no such class
    with pytest.raises(ValueError, match=r"foreground: expected classes in the scans: \[1, 2\], got \[3, 9\]"):
        PatchDataset(plain, PATCH, foreground={3: 0.1, 9: 0.5}, scans=[1, 2])
    with pytest.raises(ValueError, match=r"foreground: expected classes in the scans: \[\], got 'any'"):
        PatchDataset(plain, PATCH, foreground=0.5, scans=[0])


def test_many_places_of_foreground_are_kept_for_each_class(tmp_path):
    label = np.ones((30, 40, 40), np.int16)
    label[:, :, :3] = 7
    pack([{"label": label}], tmp_path / "out", foreground="label")
    assert PackedDataset(tmp_path / "out", keys=["label.classes"])[0].tolist() == [[1, 10_000], [7, 3600]]
    data = PatchDataset(tmp_path / "out", (1, 1, 1), per_scan=200, foreground={7: 1})
    assert {int(data[n]["label"]) for n in range(200)} == {7}


def test_scans_smaller_than_the_patch(plain):
    with pytest.raises(ValueError, match=r"patch for scan 1: expected a size of at most \(7, 12, 6\), or pad="):
        PatchDataset(plain, (8, 6, 5))
    data = PatchDataset(plain, (8, 6, 7), pad=-7, foreground=0.5)
    sample = data[2]  # of 6 x 6 x 6
    assert np.array_equal(sample["image"][0, 1:7, :, :6].numpy(), number_voxels((6, 6, 6)))
    assert (sample["image"][:, [0, 7]] == -7).all()
    assert (sample["image"][..., 6] == -7).all()
    assert (sample["label"][:, [0, 7]] == 0).all()
    assert len(PatchDataset(plain, (8, 6, 5), scans=[0, 3])) == 2


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda mask: map(bool, mask)])
def test_a_mask_of_scans_is_refused(plain, kind):
    with pytest.raises(TypeError, match=r"scans: expected integers, the rows of scans, such as np.flatnonzero\(mask\)"):
        PatchDataset(plain, PATCH, scans=kind([False, True, True, False]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, iter, dict.fromkeys])
def test_scans_are_rows_in_any_container(plain, kind):
    assert [sample["n"].item() for sample in PatchDataset(plain, PATCH, scans=kind([2, -1]))] == [2, 3]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("number", [-1024, 7])
def test_padding_asks_for_the_label_where_none_was_named(tmp_path, dtype, number):
    sample = {"image": np.zeros((6, 6, 6), np.int16), "label": np.ones((6, 6, 6), dtype), "n": 0}
    pack([sample], tmp_path / "out")
    with pytest.raises(ValueError, match=rf"pad: expected a number .* as {{'image': {number}, 'label': 0}}"):
        PatchDataset(tmp_path / "out", (8, 8, 8), pad=number)
    for pad, border in ((0, 0), ({"image": number, "label": 0}, number)):
        found = PatchDataset(tmp_path / "out", (8, 8, 8), pad=pad)[0]
        assert (found["image"][:, 0] == border).all()
        assert found["label"].unique().tolist() == [0, 1]
    alone = PatchDataset(tmp_path / "out", (8, 8, 8), pad=number, keys=["image"])[0]
    assert (alone[:, 0] == number).all()
    pack([sample], tmp_path / "named", foreground="label")
    found = PatchDataset(tmp_path / "named", (8, 8, 8), pad=number)[0]
    assert (found["image"][:, 0] == number).all()
    assert found["label"].unique().tolist() == [0, 1]


def test_files_are_named(tmp_path):
    shapes = {"a": (4, 4, 4), "b": (2, 3, 4, 4), "c": (4, 4)}

    def packed(*names):
        for folder in ("in", "out"):
            for path in (tmp_path / folder).glob("*"):
                path.unlink()
        (tmp_path / "in").mkdir(exist_ok=True)
        for name in names:
            np.save(tmp_path / "in" / f"{name}.npy", np.zeros(shapes[name]))
        pack_folder(tmp_path / "in", tmp_path / "out", overwrite=True)
        return tmp_path / "out"

    with pytest.raises(
        ValueError, match=r"volumes of 'b.npy': expected 1 channels .* the 3 axes of patch, got \(2, 3, 4, 4\)"
    ):
        PatchDataset(packed("a", "b"), (2, 2, 2))
    with pytest.raises(ValueError, match=r"volumes of 'c.npy': expected 3 axes, or channels and 3 axes, got \(4, 4\)"):
        PatchDataset(packed("a", "c"), (2, 2, 2))
    with pytest.raises(ValueError, match=r"patch for 'b.npy': expected a size of at most \(3, 4, 4\), or pad="):
        PatchDataset(packed("b"), (4, 4, 4))
    with pytest.raises(ValueError, match=r"foreground: expected 0, or a folder packed with pack_folder\(labels=\)"):
        PatchDataset(packed("a"), (2, 2, 2), foreground=0.5)
    pack([{"x": np.zeros((4, 4)), "y": np.zeros((4, 5))}], tmp_path / "pairs")
    with pytest.raises(ValueError, match=r"y of scan 0: expected the shape \(4, 4\) of x, got \(4, 5\)"):
        PatchDataset(tmp_path / "pairs", (2, 2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patch": 4}, TypeError, "patch: expected a size such as"),
        ({"patch": (0, 1, 1)}, TypeError, "patch: expected a size such as"),
        ({"patch": (1,) * 5}, ValueError, "patch: expected a field with the axes of the patch"),
        ({"per_scan": 0}, ValueError, "per_scan: expected an integer of 1 or more"),
        ({"foreground": 1.5}, ValueError, "foreground: expected a share from 0 to 1"),
        ({"foreground": {0: 0.5}}, ValueError, "foreground: expected a share from 0 to 1"),
        ({"foreground": {1: 0.6, 2: 0.6}}, ValueError, "foreground: expected a share from 0 to 1"),
        ({"pad": "min"}, TypeError, "pad: expected a finite number"),
        ({"pad": 0.5}, ValueError, "pad: expected a number that image of int32 can hold, got 0.5"),
        ({"pad": -1e12}, ValueError, "pad: expected a number that image of int32 can hold"),
        ({"pad": {"image": 0}}, KeyError, r"pad: expected a number for each of \['image', 'label'\]"),
        ({"pad": {"image": "0", "label": 1}}, TypeError, "pad: expected a finite number, a mapping"),
        ({"scans": [0.5]}, TypeError, "scans: expected integers, the rows of scans"),
        ({"scans": 3}, TypeError, "scans: expected integers, the rows of scans"),
        ({"scans": []}, ValueError, "scans: expected at least one row"),
        ({"scans": [0, 4]}, IndexError, r"scans: expected rows of the 4 scans of the folder, got \[4\]"),
        ({"keys": ["mask"]}, KeyError, "keys: expected some of"),
        ({"transform": 3}, TypeError, "transform=3"),
        ({"source": np.zeros(3)}, TypeError, "source: expected a folder written by"),
    ],
)
def test_what_is_refused(plain, options, error, message):
    with pytest.raises(error, match=message):
        PatchDataset(**{"source": plain, "patch": PATCH, **options})


def test_the_affine_is_that_of_the_patch(tmp_path):
    affine = np.array([[-2.0, 0, 0, 90], [0, 1.5, 0, -126], [0, 0.1, 3, -72], [0, 0, 0, 1]])
    pack([{"image": number_voxels((9, 8, 10)), "affine": affine, "id": "a"}] * 2, tmp_path / "out")
    data = PatchDataset(tmp_path / "out", PATCH)
    sample = data[1]
    start = np.unravel_index(int(sample["image"].flatten()[0]), (9, 8, 10))
    assert np.allclose(sample["affine"].numpy() @ [0, 0, 0, 1], affine @ [*start, 1])
    assert sample["id"] == "a"
    batch = next(iter(DataLoader(data, 2)))
    assert (batch["image"].shape, batch["affine"].shape, batch["id"]) == ((2, 1, *PATCH), (2, 4, 4), ["a", "a"])
    assert np.array_equal(PackedDataset(tmp_path / "out")[0]["affine"], affine)


def test_patches_of_images(tmp_path):
    pack([(np.full((3, 6 + n, 8), n, np.uint8), n) for n in range(3)], tmp_path / "out")
    image, label = next(iter(DataLoader(PatchDataset(tmp_path / "out", (5, 8), per_scan=2), 6)))
    assert image.shape == (6, 3, 5, 8)
    assert image[:, 0, 0, 0].tolist() == label.tolist() == [0, 0, 1, 1, 2, 2]


# Sample seeds.


def add_noise(sample):
    return {**sample, "noise": torch.rand(1)}


def loaded(data, epoch=1, batch_size=4, ranks=1, **options):
    """The samples of an epoch by their noise or first voxel, of all ranks."""
    found = {}
    for rank in range(ranks):
        sampler = SeededSampler(data, 5, num_replicas=ranks, rank=rank)
        kind = PrefetchLoader if options.get("num_workers") else DataLoader
        loader = seed_samples(kind(data, batch_size, sampler=sampler, **options), 5)
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            for row in range(len(batch["n"])):
                key = int(batch["n"][row]), *batch["image"][row, 0].flatten()[[0, -1]].tolist()
                found.setdefault(key, []).append(batch["noise"][row].item() if "noise" in batch else 0)
    return {key: sorted(noise) for key, noise in found.items()}


@pytest.mark.parametrize("transform", [None, add_noise])
def test_seeded_patches_are_the_same_everywhere(plain, transform):
    data = PatchDataset(plain, PATCH, per_scan=6, foreground=0.5, transform=transform)
    expected = loaded(data)
    assert loaded(data, epoch=0) != expected
    collate = {"collate_fn": PatchDataset.collate}
    for options in ({"batch_size": 3}, collate, {"num_workers": 2}, {"num_workers": 1, **collate, "batch_size": 6}):
        assert loaded(data, **options) == expected
    assert loaded(data, ranks=2, batch_size=2, **collate) == expected
    whole = Subset(data, range(24))
    assert loaded(whole) == expected
    stored = pickle.dumps(data)  # for worker processes that are not forked
    assert len(stored) < 2000
    assert loaded(pickle.loads(stored)) == expected


@pytest.mark.parametrize("alike", [False, True])
def test_random_transforms_of_packed_samples_belong_to_the_sample(plain, alike):
    data = PackedDataset(plain, keys=("n",) if alike else None, sample_transform=lambda sample: torch.rand(2))
    batches = [torch.cat(list(seed_samples(DataLoader(data, size), 5))) for size in (1, 3, 4)]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], batches[2])
    assert len(batches[0].unique()) == 8


def test_every_rank_has_as_many_patches(plain):
    data = PatchDataset(plain, PATCH, per_scan=5)
    ranks = [list(SeededSampler(data, 1, num_replicas=3, rank=rank)) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [7, 7, 7]
    assert sorted({index for rank in ranks for index in rank}) == list(range(20))
