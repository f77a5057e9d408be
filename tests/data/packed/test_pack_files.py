"""pack_folder: what becomes of images, volumes and .npz files, and what is refused."""

import json
import resource
import shutil
import struct
import zlib

import numpy as np
import pytest

from lightning_turbo import _optional
from lightning_turbo.data import PackedDataset, pack_folder
from lightning_turbo.errors import MissingExtraError
from tests.data.packed.files import packed

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(1)
    root = tmp_path / "images"
    pixels = {}
    for name in ("cat/1.png", "cat/2.png", "ant/9.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels[name] = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels[name]).save(root / name)
    return root, pixels


# Images and classes.


def test_a_folder_of_images(images, tmp_path):
    root, pixels = images
    seen = []
    contents = pack_folder(root, tmp_path / "out", progress=lambda done, of: seen.append((done, of)))
    assert contents == {
        "arrays": ["images", "labels"], "classes": ["ant", "cat"], "foreground": None, "samples": 3, "skipped": 0,
        "intensities": {},
    }  # fmt: skip
    assert contents == json.loads((tmp_path / "out" / "packed.json").read_text())
    assert seen == [(1, 3), (2, 3), (3, 3)]
    dataset = PackedDataset(tmp_path / "out")
    assert dataset.classes == ["ant", "cat"]
    for row, name in enumerate(("ant/9.png", "cat/1.png", "cat/2.png")):
        image, label = dataset[row]
        assert np.array_equal(image.numpy(), pixels[name].transpose(2, 0, 1))
        assert label.item() == ("ant", "cat").index(name[:3])
    assert packed(root, tmp_path / "small", size=(3, 2))[0][0].shape == (3, 3, 2)


def test_links_are_followed_but_not_up_and_hidden_files_are_ignored(images, tmp_path):
    root, _ = images
    plain = pack_folder(root, tmp_path / "plain")
    (root / "ant").rename(tmp_path / "elsewhere.png")  # a folder with the name of an image is a folder
    (root / "ant").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "elsewhere.png" / "up").symlink_to(tmp_path)
    (root / "cat" / "itself").symlink_to(root / "cat")
    (root / "again").symlink_to(root)
    for name in (".ipynb_checkpoints/1-checkpoint.png", "cat/.ipynb_checkpoints/1-checkpoint.png", "cat/._1.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"no image")
    assert pack_folder(root, tmp_path / "out") == plain


def test_a_label_means_the_same_class_whatever_is_missing(images, tmp_path):
    root, _ = images
    classes = ["cat", "bee", "ant", "dog"]
    (root / "bee").mkdir()
    with pytest.raises(ValueError, match=r"Found no file \(.bmp.* of class '.*bee'.* or pass classes="):
        pack_folder(root, tmp_path / "out")
    dataset = packed(root, tmp_path / "out", classes=classes)
    assert dataset.classes == classes
    assert sorted(dataset.classes[dataset[n][1]] for n in range(3)) == ["ant", "cat", "cat"]
    with pytest.raises(ValueError, match=r"expected all subfolders of .* got \('cat',\) without \['ant'"):
        pack_folder(root, tmp_path / "other", classes=["cat"])


def palette(gray=False):
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[:, :4], pixels[:, 4:] = ((60, 60, 60), (200, 200, 200)) if gray else ((255, 0, 0), (0, 0, 255))
    return Image.fromarray(pixels)


KINDS = {
    "gray": Image.new("L", (8, 6), 77),
    "gray with transparency": Image.new("LA", (8, 6), (77, 9)),
    "bits": Image.new("1", (8, 6), 1),
    "palette": palette().quantize(4),
    "gray palette": palette(gray=True).quantize(4),
    "colors": palette(),
    "colors with transparency": palette().convert("RGBA"),
}
GRAY = ("gray", "gray with transparency", "bits")
MIXES = [GRAY, ("palette",), ("gray palette",), ("colors with transparency",), ("gray", "colors", "palette")]


@pytest.mark.parametrize("mode", [None, "RGB", "L"])
@pytest.mark.parametrize("kinds", MIXES)
def test_every_kind_of_image_keeps_its_colors(tmp_path, kinds, mode):
    (tmp_path / "in").mkdir()
    for n, kind in enumerate(kinds):
        KINDS[kind].save(tmp_path / "in" / f"{n}.png")
    dataset = packed(tmp_path / "in", tmp_path / "out", mode=mode)
    expected = mode or ("L" if all(kind in GRAY for kind in kinds) else "RGB")
    for n, kind in enumerate(kinds):
        pixels = np.asarray(KINDS[kind].convert(expected))
        assert np.array_equal(dataset[n].numpy(), pixels[None] if expected == "L" else pixels.transpose(2, 0, 1)), kind


@pytest.mark.parametrize(("suffix", "orientation"), [("jpg", 1), ("jpg", 6), ("jpg", 7), ("png", 6), ("tif", 6)])
def test_photographs_stand_upright(tmp_path, suffix, orientation):
    from PIL import ImageOps

    pixels = np.zeros((64, 64), np.uint8)
    pixels[:32], pixels[:16, :16] = 200, 100
    photo = Image.fromarray(pixels)
    exif = photo.getexif()
    exif[0x112] = orientation
    (tmp_path / "in").mkdir()
    photo.save(tmp_path / "in" / f"0.{suffix}", exif=exif)
    with Image.open(tmp_path / "in" / f"0.{suffix}") as stored:
        upright = np.asarray(ImageOps.exif_transpose(stored).convert("L"))
    assert orientation == 1 or not np.array_equal(upright, np.asarray(photo))
    assert np.array_equal(packed(tmp_path / "in", tmp_path / "out", mode="L")[0][0].numpy(), upright)


def png_of_16_bits(path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 7, 6, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\3\xe8" * 7 * 3) * 6)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def save_pages(path):
    pages = [Image.new("L", (7, 6), n) for n in range(5)]
    pages[0].save(path, save_all=True, append_images=pages[1:])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("0.tif", lambda path: Image.fromarray(np.full((6, 7), 9, np.uint16)).save(path), "pixels: expected 8 bits"),
        ("0.tif", lambda path: Image.fromarray(np.full((6, 7), 9, np.float32)).save(path), "pixels: expected 8 bits"),
        ("0.png", png_of_16_bits, "pixels: expected 8 bits .* got '.*;16B?'"),
        ("0.tif", save_pages, "pages: expected 1; save volumes as .npy files, got 5"),
        ("3.png", lambda path: path.write_bytes((path.parent / "1.png").read_bytes()[:100]), "truncated"),
    ],
)
def test_all_broken_files_are_named_or_left_out_with_a_list(images, tmp_path, name, write, message):
    root, _ = images
    write(root / "cat" / name)
    (root / "ant" / "0.png").write_bytes(b"no image")
    lines = rf"'.*ant/0.png': cannot identify.*\n'.*cat/{name}': .*{message}"
    with pytest.raises(
        ValueError, match=rf"2 of 5 samples cannot be packed:\n{lines}.*\nRepair or remove them, or skip"
    ):
        pack_folder(root, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    contents = pack_folder(root, tmp_path / "out", skip_broken=True)
    assert (contents["samples"], contents["skipped"]) == (3, 2)
    assert [label.item() for _, label in (PackedDataset(tmp_path / "out")[n] for n in range(3))] == [0, 1, 1]
    listed = (tmp_path / "out.broken.txt").read_text().splitlines()
    assert [name in line for name, line in zip(("ant/0.png", f"cat/{name}"), listed, strict=True)] == [True, True]


# What is refused.


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        *(("images", {"size": size}, ValueError, r"size: expected \(height, width\) in pixels, each at least 1")
          for size in (224, (0, 8), (8, 8, 8))),
        ("images", {"mode": "CMYK"}, ValueError, "mode: expected 'RGB', 'L' .*, got 'CMYK'"),
        ("images", {"labels": "masks"}, FileNotFoundError, "labels: expected a folder of label volumes"),
        ("images", {"pairs": [("cat/1.png", "cat/2.png")]}, ValueError, "pairs: expected volumes, .npy or NIfTI files"),
        ("images", {"pairs": ["a"]}, TypeError, "pairs: expected the path of a CSV file"),
        ("images", {"classes": "cat"}, TypeError, "classes: expected a sequence of names"),
        ("images", {"progress": 3}, TypeError, "progress=3: expected a function or None"),
        ("images", {"skip_broken": "no"}, TypeError, "skip_broken='no'"),
        ("volumes", {"size": (2, 2)}, ValueError, r"size: expected \(depth, height, width\) in voxels"),
        ("volumes", {"mode": "L"}, ValueError, "mode='L' does not apply to .npy files"),
        ("volumes", {"pairs": [("a.npy", None)], "classes": ["a"]}, ValueError, "classes=.* does not apply"),
        ("broken", {"skip_broken": True}, ValueError, "1 of 1 samples cannot be packed"),
        ("empty", {}, FileNotFoundError, "folder: expected a folder with files of type .bmp"),
        ("none", {}, FileNotFoundError, "folder: expected an existing folder, got '.*none'"),
        ("both", {}, ValueError, "folder: expected one kind of files, not images and .npy files"),
        ("beside", {}, ValueError, r"all files in class folders, but found \['1.png'\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_leaves_nothing(images, tmp_path, kind, options, error, message):
    root = images[0] if kind in ("images", "both", "beside") else tmp_path / kind
    if kind != "none":
        root.mkdir(exist_ok=True)
    if kind in ("volumes", "both"):
        np.save(root / "a.npy", np.zeros((2, 2, 2)))
    elif kind == "broken":
        (root / "a.npy").touch()
    elif kind == "beside":
        shutil.copy(root / "cat" / "1.png", root / "1.png")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        pack_folder(root, tmp_path / "out", **options)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_but_a_packed_dataset_is_overwritten(tmp_path):
    scans = tmp_path / "project" / "scans"
    scans.mkdir(parents=True)
    np.save(scans / "1.npy", np.ones(2))
    (tmp_path / "thesis.txt").write_text("all of it")
    for out in (scans, scans.parent, tmp_path, scans.parent / "scans" / ".." / "scans"):
        with pytest.raises(ValueError, match=r"out: expected a folder beside '.*scans'"):
            pack_folder(scans, out, overwrite=True)
    other = tmp_path / "other"
    pack_folder(scans, other)
    (other / "notes").mkdir()
    shutil.copytree(other, scans.parent / "more")
    shutil.copytree(scans, scans.parent / "copy")
    for out in (other, tmp_path / "thesis.txt", scans.parent / "more", scans.parent / "copy"):
        with pytest.raises(FileExistsError, match=r"or with overwrite=True .* one that contains only a packed dataset"):
            pack_folder(scans, out, overwrite=True)
    (other / "notes").rmdir()
    with pytest.raises(FileExistsError, match="expected a new folder, or with overwrite=True"):
        pack_folder(scans, other)
    pack_folder(scans, other, overwrite=True)
    assert (scans / "1.npy").exists()
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.png", r"pack_folder with images needs.* pillow,.*pip install .*\[pack\]"),
        ("a.nii.gz", r"nibabel.*\[pack\]"),
    ],
)
def test_the_absent_package_is_named(tmp_path, monkeypatch, name, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).touch()
    monkeypatch.setattr(_optional, "installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=message):
        pack_folder(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(("samples", "when"), [(100, r"after \d+ of 100"), (5, "after 5 of 5")])
def test_a_disk_that_is_full_when_small_samples_leave_the_memory(tmp_path, samples, when):
    (tmp_path / "in").mkdir()
    for n in range(samples):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((10, 10, 10), n, dtype=np.uint8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
    try:
        with pytest.raises(OSError, match=f"File too large {when} samples. Free some space and pack again"):
            pack_folder(tmp_path / "in", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(4):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((32, 32, 32), n, dtype=np.float32))
    sizes = []

    def measure(*_):
        (file,) = tmp_path.glob("out.partial-*/volumes.npy")
        sizes.append(file.stat().st_size)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # the system's error is that of a full disk
    try:
        with pytest.raises(OSError, match=r"File too large after 2 of 4 samples. Free some space and pack again"):
            pack_folder(tmp_path / "in", tmp_path / "out", progress=measure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # It grows as it is written. Room that is only promised, as to mapped memory, ends the process where there is none.
    assert [round(size, -4) for size in sizes] == [130_000, 260_000]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
