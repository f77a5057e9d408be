"""PackedDataset and pack_folder, against plain NumPy."""

import pickle
import resource
import shutil
import struct
import zlib
from collections import namedtuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader

from lightning_turbo._pytree import move_batch
from lightning_turbo.data import PackedDataset, PrefetchLoader, pack_folder
from lightning_turbo.errors import MissingExtraError


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "train_images": rng.integers(0, 256, (20, 4, 5), dtype=np.uint8),
        "train_labels": rng.integers(0, 3, (20, 1), dtype=np.int64),
        "test_images": rng.integers(0, 256, (6, 4, 5), dtype=np.uint8),
    }


KEYS = ("train_images", "train_labels")


@pytest.fixture(params=["npz", "compressed npz", "npy", "arrays", "packed"])
def dataset(request, arrays, tmp_path):
    if request.param == "arrays":
        return PackedDataset(arrays, keys=KEYS)
    if request.param == "npy":
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
        return PackedDataset({name: tmp_path / f"{name}.npy" for name in arrays}, keys=KEYS)
    path = tmp_path / "all.npz"
    (np.savez_compressed if "compressed" in request.param else np.savez)(path, **arrays)
    if request.param == "packed":
        pack_folder(path, tmp_path / "packed")
        return PackedDataset(tmp_path / "packed", keys=KEYS)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_both_ways_of_collating_give_the_same_batches(dataset, workers):
    def batches(cls, **settings):
        torch.manual_seed(0)
        return [(a.tolist(), b.tolist()) for a, b in cls(dataset, 6, shuffle=True, num_workers=workers, **settings)]

    assert batches(PrefetchLoader, collate_fn=PackedDataset.collate) == batches(DataLoader)


def test_collate_of_other_samples_is_the_default():
    assert PackedDataset.collate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


def test_uncompressed_files_are_mapped_and_not_pickled(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    np.save(tmp_path / "b.npy", arrays["train_images"])
    for source in (tmp_path / "a.npz", tmp_path / "b.npy"):
        dataset = PackedDataset(source, keys=["train_images"] if source.suffix == ".npz" else None)
        assert all(isinstance(array, np.memmap) for array in dataset.arrays.values())
        stored = pickle.dumps(dataset)
        assert len(stored) < 1000
        assert torch.equal(pickle.loads(stored)[3], dataset[3])


def test_batches_are_copies(tmp_path, arrays):
    np.save(tmp_path / "b.npy", arrays["train_images"])
    dataset = PackedDataset(tmp_path / "b.npy")
    dataset.batch([0])[:] = 0
    dataset[0][:] = 0
    assert np.array_equal(np.load(tmp_path / "b.npy"), arrays["train_images"])
    assert np.array_equal(dataset[0].numpy(), arrays["train_images"][0])


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd"])  # the name decides where the numbers begin
@pytest.mark.parametrize("rows", [np.arange(20, dtype="<f8").reshape(5, 2, 2), np.arange(5), np.empty((5, 0, 3))])
def test_arrays_that_begin_at_any_byte(tmp_path, name, rows):
    np.savez(tmp_path / "x.npz", **{name: rows})
    dataset = PackedDataset(tmp_path / "x.npz")
    where = [3, 0, 3]
    assert torch.equal(dataset.batch(where), torch.from_numpy(rows[where]))
    assert dataset.batch(where).numpy().flags.aligned
    assert torch.equal(dataset[4], torch.from_numpy(rows[4:])[0])
    with pytest.raises(IndexError):
        dataset.batch([5])


@pytest.mark.parametrize("order", "<>")
def test_arrays_of_either_byte_order(tmp_path, order):
    rows = np.arange(20).reshape(5, 2, 2).astype(f"{order}i2")
    np.savez(tmp_path / "x.npz", x=rows)
    (tmp_path / "scans").mkdir()
    for n, row in enumerate(rows):
        np.save(tmp_path / "scans" / f"{n}.npy", row)
    pack_folder(tmp_path / "scans", tmp_path / "packed")
    for source in (rows, tmp_path / "x.npz", tmp_path / "packed"):
        dataset = PackedDataset(source)
        assert dataset.batch([3, 0]).dtype == torch.int16
        assert dataset.batch([3, 0]).tolist() == rows[[3, 0]].tolist()


def test_transform_sees_batches(arrays):
    shapes = []

    def transform(batch):
        shapes.append(tuple(batch[0].shape))
        return batch[0].float().unsqueeze(1), batch[1].squeeze(1)

    dataset = PackedDataset(arrays, keys=KEYS, transform=transform)
    assert dataset[2][0].shape == (1, 4, 5)
    for images, labels in DataLoader(dataset, 10):
        assert images.shape == (10, 1, 4, 5)
        assert labels.shape == (10,)
    assert shapes == [(1, 4, 5), (10, 4, 5), (10, 4, 5)]


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "transform",
    [list, lambda batch: {"image": batch[0], "meta": {"label": [batch[1]]}}, lambda batch: Pair(*batch)],
    ids=["list", "mapping", "named tuple"],
)
def test_samples_have_the_structure_of_what_transform_returns(arrays, transform):
    whole = PackedDataset(arrays, keys=KEYS)
    dataset = PackedDataset(arrays, keys=KEYS, transform=transform)
    assert repr(dataset[3]) == repr(transform(whole[3]))
    assert type(dataset[3]) is type(transform(whole[3]))
    expected = [repr(transform(tuple(batch))) for batch in DataLoader(whole, 6)]
    for collate in (None, PackedDataset.collate):
        assert [repr(batch) for batch in DataLoader(dataset, 6, collate_fn=collate)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_not_collated_can_be_moved(arrays, workers):
    dataset = PackedDataset(arrays, keys=KEYS)
    loader = DataLoader(dataset, 4, collate_fn=_as_they_are, num_workers=workers)
    for move in (move_data_to_device, move_batch):
        samples = move(next(iter(loader)), torch.device("cpu"))
        assert repr(list(samples)) == repr([dataset[n] for n in range(4)])
        assert torch.equal(PackedDataset.collate(samples)[0], dataset.batch([0, 1, 2, 3])[0])


def _as_they_are(samples):
    return samples


def test_bad_sources(tmp_path, arrays):
    with pytest.raises(KeyError, match=r"there is no \['x'\]; there are"):
        PackedDataset(arrays, keys=["x"])
    with pytest.raises(ValueError, match=r"'test_images': 6.*; all must have as many"):
        PackedDataset(arrays)
    with pytest.raises(TypeError, match=r"'text' holds .*, for which torch has no dtype"):
        PackedDataset({"text": np.array(["a", "b"])})
    with pytest.raises(TypeError, match="PackedDataset got 3; pass a folder"):
        PackedDataset(3)
    with pytest.raises(TypeError, match="PackedDataset got 3 as an array; pass a numpy array or the path"):
        PackedDataset({"x": 3})
    with pytest.raises(TypeError, match="transform=3 cannot be called; accepted is a function, or None"):
        PackedDataset(arrays, keys=["test_images"], transform=3)
    with pytest.raises(TypeError, match="keys='test_images': pass a sequence of names"):
        PackedDataset(arrays, keys="test_images")
    with pytest.raises(FileNotFoundError, match=r"holds no packed.json, so it is no packed folder"):
        PackedDataset(tmp_path)
    with pytest.raises(FileNotFoundError):
        PackedDataset(tmp_path / "nothing.npy")
    with pytest.raises(IndexError):
        PackedDataset(arrays, keys=KEYS)[20]


@pytest.fixture
def images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    root = tmp_path / "images"
    pixels = {}
    for name in ("cat/1.png", "cat/2.png", "ant/9.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels[name] = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        image.fromarray(pixels[name]).save(root / name)
    return root, pixels


def test_a_folder_of_images(images, tmp_path):
    root, pixels = images
    seen = []
    contents = pack_folder(root, tmp_path / "out", progress=lambda done, of: seen.append((done, of)))
    assert contents == {"arrays": ["images", "labels"], "classes": ["ant", "cat"], "samples": 3}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    dataset = PackedDataset(tmp_path / "out")
    assert dataset.classes == ["ant", "cat"]
    for row, name in enumerate(("ant/9.png", "cat/1.png", "cat/2.png")):
        image, label = dataset[row]
        assert np.array_equal(image.numpy(), pixels[name].transpose(2, 0, 1))
        assert label.item() == ("ant", "cat").index(name[:3])
    resized = pack_folder(root, tmp_path / "small", size=(3, 2))
    assert resized["samples"] == 3
    assert PackedDataset(tmp_path / "small")[0][0].shape == (3, 3, 2)


def test_linked_class_folders_are_packed(images, tmp_path):
    root, pixels = images
    (root / "ant").rename(tmp_path / "elsewhere")
    (root / "ant").symlink_to(tmp_path / "elsewhere")
    contents = pack_folder(root, tmp_path / "out")
    assert contents == {"arrays": ["images", "labels"], "classes": ["ant", "cat"], "samples": 3}
    assert np.array_equal(PackedDataset(tmp_path / "out")[0][0].numpy(), pixels["ant/9.png"].transpose(2, 0, 1))


def test_links_to_a_folder_above_are_left_out(images, tmp_path):
    root, _ = images
    expected = pack_folder(root, tmp_path / "plain")
    (root / "ant" / "up").symlink_to(root)
    (root / "cat" / "itself").symlink_to(root / "cat")
    assert pack_folder(root, tmp_path / "out") == expected


def test_a_folder_with_the_name_of_an_image_is_a_folder(images, tmp_path):
    root, _ = images
    (root / "ant").rename(root / "ant.png")
    assert pack_folder(root, tmp_path / "out")["classes"] == ["ant.png", "cat"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_an_npz_may_hold(save, tmp_path):
    rows, path, out = np.arange(6).reshape(3, 2), tmp_path / "rows.npz", tmp_path / "out"
    save(path, x=rows, n=10)
    assert pack_folder(path, out)["samples"] == 3
    for source in (path, out):
        with pytest.raises(ValueError, match=r"'n' is a single number and has no rows. Leave it out with keys"):
            PackedDataset(source)
        assert torch.equal(PackedDataset(source, keys=["x"]).batch([2])[0], torch.tensor([4, 5]))
    with pytest.raises(ValueError, match=r"is for images, and .* holds arrays"):
        pack_folder(path, out, size=(2, 2), overwrite=True)
    save(path, x=rows, **{"../x": rows})
    with pytest.raises(ValueError, match=r"holds an array '\.\./x'; accepted are names of files"):
        pack_folder(path, out, overwrite=True)
    assert not (tmp_path / "x.npy").exists()
    save(path, x=rows, words=np.array([None, "b", 3], dtype=object))
    with pytest.raises((TypeError, ValueError), match=r"'words' .*(for which torch has no dtype|cannot be read)"):
        PackedDataset(path)
    with pytest.raises(ValueError, match="'words' cannot be packed"):
        pack_folder(path, out, overwrite=True)
    assert len(PackedDataset(out, keys=["x"])) == 3


def test_a_mask_is_no_list_of_indices():
    with pytest.raises(TypeError, match=r"got a mask; accepted are indices. Pass np.flatnonzero"):
        PackedDataset(np.arange(3)).batch(np.array([True, False, True]))


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_refused(images, tmp_path, kind):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((6, 7), 1000, dtype=kind)).save(images[0] / "cat" / "0.tif")
    with pytest.raises(ValueError, match=r"cat/0.tif' cannot be packed: its pixels are of mode .*accepted are 8 bits"):
        pack_folder(images[0], tmp_path / "out")


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_colours_of_16_bits_are_refused(images, tmp_path, colour, channels):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 7, 6, 16, colour, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\3\xe8" * 7 * channels) * 6)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    (images[0] / "cat" / "0.png").write_bytes(file)
    with pytest.raises(ValueError, match=r"cat/0.png' cannot be packed: its pixels are of mode '.*;16B?', acc"):
        pack_folder(images[0], tmp_path / "out")


def test_images_of_several_pages_are_refused(images, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pages = [image.new("L", (7, 6), n) for n in range(5)]
    pages[0].save(images[0] / "cat" / "0.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match=r"cat/0.tif' cannot be packed: it has 5 pages, accepted is 1; save what is"):
        pack_folder(images[0], tmp_path / "out")


def test_grey_images_with_transparency_have_one_channel(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "grey").mkdir()
    image.new("LA", (3, 2), (7, 100)).save(tmp_path / "grey" / "1.png")
    pack_folder(tmp_path / "grey", tmp_path / "out")
    assert PackedDataset(tmp_path / "out")[0].tolist() == [[[7] * 3] * 2]


@pytest.mark.parametrize("name", ["2.png", "2.npy"])
@pytest.mark.parametrize("rest", [0, 0.9])
def test_the_file_that_cannot_be_read_is_named(tmp_path, name, rest):
    root = tmp_path / "files"
    root.mkdir()
    if name == "2.png":
        image = pytest.importorskip("PIL.Image")
        image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(root / "1.png")
    else:
        np.save(root / "1.npy", np.zeros((8, 8)))
    content = next(root.iterdir()).read_bytes()
    (root / name).write_bytes(content[: int(rest * len(content))])
    with pytest.raises(ValueError, match=rf"{name}' cannot be packed: .*\. Repair the file or take it away"):
        pack_folder(root, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_a_folder_of_volumes(tmp_path):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.full((2, 3, 4), n, dtype=np.float32))
    assert pack_folder(tmp_path, tmp_path / "out")["arrays"] == ["volumes"]
    assert [v[0, 0, 0].item() for v in PackedDataset(tmp_path / "out")] == [0, 1, 2]


def test_what_cannot_be_packed_leaves_nothing(tmp_path, images):
    root, _ = images
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"is not there. Pass a folder"):
        pack_folder(tmp_path / "none", out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds nothing to pack. Accepted are images \(.bmp"):
        pack_folder(tmp_path / "empty", out)
    np.save(tmp_path / "empty" / "a.npy", np.zeros((2, 2)))
    np.save(tmp_path / "empty" / "b.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"b.npy' is float64 \(2, 3\) and .*a.npy' is float64 \(2, 2\)"):
        pack_folder(tmp_path / "empty", out)
    with pytest.raises(ValueError, match="size=\\(2, 2\\) is for images"):
        pack_folder(tmp_path / "empty", out, size=(2, 2))
    np.save(root / "cat" / "v.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"holds both images and .npy files"):
        pack_folder(root, out)
    (root / "cat" / "v.npy").rename(tmp_path / "empty" / "sub.npy")
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))
    out.mkdir()
    with pytest.raises(FileExistsError, match=r"is there already. Pass another folder, or overwrite=True"):
        pack_folder(root, out)
    pack_folder(root, out, overwrite=True)
    assert len(PackedDataset(out)) == 3


@pytest.mark.parametrize("size", [224, (8,), (0, 8), (8, 8.0), "88"])
def test_what_is_no_size_is_refused(images, tmp_path, size):
    with pytest.raises(ValueError, match=r"accepted is \(height, width\) in pixels, each at least 1, or None"):
        pack_folder(images, tmp_path / "out", size=size)
    with pytest.raises(TypeError, match="progress=3 cannot be called; accepted is a function, or None"):
        pack_folder(images, tmp_path / "out", progress=3)


def test_nothing_but_a_packed_dataset_is_overwritten(tmp_path):
    scans = tmp_path / "project" / "scans"
    scans.mkdir(parents=True)
    np.save(scans / "1.npy", np.ones(2))
    (tmp_path / "thesis.txt").write_text("all of it")
    pack_folder(scans, scans / "packed")
    for out in (scans, scans.parent, tmp_path, scans / "packed", scans.parent / "scans" / ".." / "scans"):
        with pytest.raises(ValueError, match=r"lies in the other\. Pass a folder beside it"):
            pack_folder(scans, out, overwrite=True)
    shutil.rmtree(scans / "packed")
    other = tmp_path / "other"
    pack_folder(scans, other)
    (other / "notes").mkdir()
    for out in (other, tmp_path / "thesis.txt"):
        with pytest.raises(FileExistsError, match="holds more than a packed dataset, so that it is not replaced"):
            pack_folder(scans, out, overwrite=True)
    (other / "notes").rmdir()
    with pytest.raises(TypeError, match="overwrite='no' is no bool; accepted are True and False"):
        pack_folder(scans, other, overwrite="no")
    pack_folder(scans, other, overwrite=True)
    assert (scans / "1.npy").exists()
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_images_need_pillow(images, tmp_path, monkeypatch):
    import lightning_turbo._optional as optional

    monkeypatch.setattr(optional, "installed", lambda module: False)
    with pytest.raises(MissingExtraError, match="pack_folder with images needs the package pillow"):
        pack_folder(images[0], tmp_path / "out")


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    for n in range(4):
        np.save(tmp_path / f"{n}.npy", np.full((32, 32, 32), n, dtype=np.float32))
    sizes = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (300_000, hard)
    )  # the system's error is that of a disk with as many bytes
    try:
        with pytest.raises(OSError, match="File too large"):
            pack_folder(
                tmp_path,
                tmp_path / "packed",
                progress=lambda done, of: sizes.append((tmp_path / "packed.partial" / "volumes.npy").stat().st_size),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # It grows as it is written. Room that is only promised, as to mapped memory, ends the process where there is none.
    assert [round(size, -4) for size in sizes] == [130_000, 260_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.npy", "1.npy", "2.npy", "3.npy"]
