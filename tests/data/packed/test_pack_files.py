"""pack_folder: what becomes of images, volumes and .npz files, and what is refused."""

import json
import resource
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch

from lightning_turbo import _optional
from lightning_turbo.data import PackedDataset, pack_folder
from lightning_turbo.data.packed import pack_files
from lightning_turbo.errors import MissingExtraError

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


def packed(folder, out, **options):
    pack_folder(folder, out, **options)
    return PackedDataset(out)


# Images and classes.


def test_a_folder_of_images(images, tmp_path):
    root, pixels = images
    seen = []
    contents = pack_folder(root, tmp_path / "out", progress=lambda done, of: seen.append((done, of)))
    assert contents == {
        "arrays": ["images", "labels"], "classes": ["ant", "cat"], "foreground": None, "samples": 3, "skipped": 0
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
    with pytest.raises(ValueError, match=r"Found no file \(.bmp.* of the class '.*bee'.* or pass classes="):
        pack_folder(root, tmp_path / "out")
    dataset = packed(root, tmp_path / "out", classes=classes)
    assert dataset.classes == classes
    assert sorted(dataset.classes[dataset[n][1]] for n in range(3)) == ["ant", "cat", "cat"]
    with pytest.raises(ValueError, match=r"expected all subfolders of .* got \('cat',\) without \['ant'"):
        pack_folder(root, tmp_path / "other", classes=["cat"])


def palette(grey=False):
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[:, :4], pixels[:, 4:] = ((60, 60, 60), (200, 200, 200)) if grey else ((255, 0, 0), (0, 0, 255))
    return Image.fromarray(pixels)


KINDS = {
    "grey": Image.new("L", (8, 6), 77),
    "grey with transparency": Image.new("LA", (8, 6), (77, 9)),
    "bits": Image.new("1", (8, 6), 1),
    "palette": palette().quantize(4),
    "grey palette": palette(grey=True).quantize(4),
    "colours": palette(),
    "colours with transparency": palette().convert("RGBA"),
}
GREY = ("grey", "grey with transparency", "bits")
MIXES = [GREY, ("palette",), ("grey palette",), ("colours with transparency",), ("grey", "colours", "palette")]


@pytest.mark.parametrize("mode", [None, "RGB", "L"])
@pytest.mark.parametrize("kinds", MIXES)
def test_every_kind_of_image_keeps_its_colours(tmp_path, kinds, mode):
    (tmp_path / "in").mkdir()
    for n, kind in enumerate(kinds):
        KINDS[kind].save(tmp_path / "in" / f"{n}.png")
    dataset = packed(tmp_path / "in", tmp_path / "out", mode=mode)
    expected = mode or ("L" if all(kind in GREY for kind in kinds) else "RGB")
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
        ValueError, match=rf"2 of 5 samples cannot be packed:\n{lines}.*\nRepair or remove them, or .* stay"
    ):
        pack_folder(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    seen = []
    contents = pack_folder(root, tmp_path / "out", skip_broken=True, progress=lambda *now: seen.append(now))
    assert seen == []  # the good ones were packed by the first call
    assert (contents["samples"], contents["skipped"]) == (3, 2)
    assert [label.item() for _, label in (PackedDataset(tmp_path / "out")[n] for n in range(3))] == [0, 1, 1]
    listed = (tmp_path / "out.broken.txt").read_text().splitlines()
    assert [name in line for name, line in zip(("ant/0.png", f"cat/{name}"), listed, strict=True)] == [True, True]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("what", ["nothing", "readable again", "repaired", "another one broken"])
def test_the_call_after_an_error_goes_on_or_begins_again(tmp_path, monkeypatch, what, skip):
    (tmp_path / "in").mkdir()
    for n in range(4):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((2, 2), n))
    load, broken = np.load, {"1.npy"}

    def fail(path, *args, **options):
        if getattr(path, "name", "") in broken:
            raise OSError(5, "Input/output error")
        return load(path, *args, **options)

    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(
        ValueError, match=r"1 of 4 samples cannot be packed:\n.*1.npy': .*\n.*The others stay in '.*partial'"
    ):
        pack_folder(tmp_path / "in", tmp_path / "out")
    seen = []
    options = {"skip_broken": skip, "progress": lambda done, total: seen.append(done)}
    if what == "readable again":
        broken.clear()
    elif what == "repaired":
        broken.clear()
        np.save(tmp_path / "in" / "1.npy", np.full((3, 3), 1))
    elif what == "another one broken":
        broken.add("2.npy")
        np.save(tmp_path / "in" / "2.npy", np.full((3, 3), 1))
    still = {"nothing": 1, "another one broken": 2}.get(what, 0)
    if still and not skip:
        with pytest.raises(ValueError, match=f"{still} of 4 samples cannot be packed"):
            pack_folder(tmp_path / "in", tmp_path / "out", **options)
    else:
        assert pack_folder(tmp_path / "in", tmp_path / "out", **options)["samples"] == 4 - still
        data = PackedDataset(tmp_path / "out")
        expected = {0: [0, 1, 2, 3], 1: [0, 2, 3], 2: [0, 3]}[still]
        assert [int(data[n].flatten()[0]) for n in range(4 - still)] == expected
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["in", "out", "out.broken.txt"][: 2 + bool(still)]
    assert seen == ([] if what == "nothing" else [1, 2, 3, 4])


# Volumes.

AFFINE = np.array([[-2.0, 0, 0, 90], [0, 1.5, 0, -126], [0, 0.1, 3, -72], [0, 0, 0, 1]])


@pytest.fixture
def nifti(tmp_path):
    nibabel = pytest.importorskip("nibabel")

    def save(name, array, affine=AFFINE, **header):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = nibabel.Nifti1Image(array, affine)
        for key, value in header.items():
            getattr(image.header, key)(*value)
        nibabel.save(image, path)
        return array

    return save


@pytest.mark.parametrize(("suffix", "label_suffix"), [(".nii", ".nii.gz"), (".NII.GZ", ".npy")])
def test_pairs_of_volumes_keep_spacing_and_affine(nifti, tmp_path, suffix, label_suffix):
    generator = np.random.default_rng(0)
    scans, masks = [], []
    for n in range(3):
        scans.append(nifti(f"scans/case_{n}_0000{suffix}", generator.integers(-99, 99, (5, 6, 4), dtype=np.int16)))
        masks.append(generator.integers(0, 3, (5, 6, 4)).astype(np.float32))
        if label_suffix == ".npy":
            (tmp_path / "masks").mkdir(exist_ok=True)
            np.save(tmp_path / "masks" / f"case_{n}.npy", masks[-1])
        else:
            nifti(f"masks/case_{n}{label_suffix}", masks[-1])
    contents = pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")
    assert contents == {
        "arrays": ["volumes", "labels"], "classes": [], "foreground": "labels", "samples": 3, "skipped": 0
    }  # fmt: skip
    volumes, labels = PackedDataset(tmp_path / "out").batch([0, 1, 2])
    assert np.array_equal(volumes.numpy(), np.stack(scans))
    assert np.array_equal(labels.numpy(), np.stack(masks))
    assert (volumes.dtype, labels.dtype) == (torch.int16, torch.int16)
    affine, spacing = PackedDataset(tmp_path / "out", keys=("affine", "spacing"))[1]
    assert np.allclose(affine, AFFINE)  # NIfTI keeps it in float32
    assert np.allclose(spacing, [2, np.hypot(1.5, 0.1), 3])


def test_volumes_are_cut_and_padded_about_their_centre(nifti, tmp_path):
    whole = np.arange(1, 5 * 6 * 4 + 1, dtype=np.float32).reshape(5, 6, 4)
    nifti("scans/a.nii", whole)
    nifti("masks/a.nii", (whole > 50).astype(np.uint8))
    nifti("scans/b.nii", whole[:4, :5, :2])
    nifti("masks/b.nii", np.ones((4, 5, 2), np.uint8))
    pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks", size=(3, 8, 4))
    volume, label, affine = PackedDataset(tmp_path / "out", keys=("volumes", "labels", "affine"))[0]
    assert np.array_equal(volume[:, 1:7].numpy(), whole[1:4])
    assert (volume[:, [0, 7]] == 1).all()
    assert (label[:, [0, 7]] == 0).all()
    assert np.array_equal(label[:, 1:7].numpy(), whole[1:4] > 50)
    at = np.array([1, 3, 2, 1])  # the same voxel before and after lies at the same millimetres
    assert np.allclose(affine.numpy() @ at, AFFINE @ np.add(at, [1, -1, 0, 0]))


def test_what_nifti_files_hold(nifti, tmp_path):
    scaled = nifti("scaled/a.nii", np.full((2, 3, 4), 7.5, np.float32), set_data_dtype=(np.int16,))
    nifti("channels/a.nii", np.arange(48, dtype=np.uint8).reshape(2, 3, 4, 2))
    volume = packed(tmp_path / "scaled", tmp_path / "a")[0]
    assert volume.dtype == torch.float32
    assert np.allclose(volume, scaled, atol=1e-3)
    channels = packed(tmp_path / "channels", tmp_path / "b")[0]
    assert channels.shape == (2, 2, 3, 4)  # channels first
    assert channels[1, 0, 0, 1] == 3
    cut = packed(tmp_path / "channels", tmp_path / "cut", size=(3, 2, 4))[0]
    assert cut.shape == (2, 3, 2, 4)
    assert torch.equal(cut[:, 1:], channels[:, :, :2])
    assert packed(tmp_path / "channels", tmp_path / "slice", size=(1, 3, 4))[0].shape == (2, 1, 3, 4)
    nifti("classes/ill/a.nii.gz", np.zeros((2, 2, 2), np.uint8))
    assert packed(tmp_path / "classes", tmp_path / "c").classes == ["ill"]


@pytest.mark.parametrize(
    ("mask", "affine", "message"),
    [
        (np.zeros((2, 2, 3), np.uint8), AFFINE, r"1.nii.gz': expected the shape \(2, 2, 2\), got \(2, 2, 3\)"),
        (np.zeros((2, 2, 2), np.uint8), np.eye(4), "1.nii.gz': expected the affine of its volume"),
        (np.full((2, 2, 2), 70000, np.int32), AFFINE, "1.nii.gz': expected whole numbers of 16 bits"),
        (None, AFFINE, "cannot be packed"),
    ],
)
def test_a_label_volume_has_to_lie_on_its_volume(nifti, tmp_path, mask, affine, message):
    for n in range(2):
        nifti(f"scans/{n}.nii.gz", np.zeros((2, 2, 2), np.uint8))
        nifti(f"masks/{n}.nii.gz", np.zeros((2, 2, 2), np.uint8))
    if mask is None:
        (tmp_path / "scans" / "1.nii.gz").write_bytes((tmp_path / "scans" / "0.nii.gz").read_bytes()[:60])
    else:
        nifti("masks/1.nii.gz", mask, affine)
    with pytest.raises(ValueError, match=message):
        pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")
    options = {"labels": tmp_path / "masks", "skip_broken": True}
    assert pack_folder(tmp_path / "scans", tmp_path / "out", **options)["samples"] == 1
    (tmp_path / "masks" / "0.nii.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels: expected a label volume .* got none for \['0'\]"):
        pack_folder(tmp_path / "scans", tmp_path / "other", labels=tmp_path / "masks")


@pytest.mark.parametrize("labels", [True, False])
def test_scans_are_packed_as_they_are(nifti, tmp_path, labels):
    generator = np.random.default_rng(0)
    scans = [
        nifti("scans/a.nii.gz", generator.integers(-99, 99, (5, 6, 4), dtype=np.int16)),
        nifti("scans/b.nii", generator.normal(size=(3, 7, 2)).astype(np.float32)),
        nifti("scans/c.nii.gz", generator.integers(0, 9, (2, 2, 9), dtype=np.uint8), np.eye(4)),
    ]
    masks = [np.zeros(scan.shape, np.uint8) for scan in scans]
    masks[1][1, 2, 1] = 3
    for name, mask, affine in zip("abc", masks, (AFFINE, AFFINE, np.eye(4)), strict=True):
        nifti(f"masks/{name}.nii.gz", mask, affine)
    pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks" if labels else None)
    keys = {
        "image": "volumes",
        **({"label": "labels"} if labels else {}),
        "at": "affine",
        "mm": "spacing",
        "of": "files",
    }
    dataset = PackedDataset(tmp_path / "out", keys=keys)
    for n, scan in enumerate(scans):
        sample = dataset[n]
        assert sample["image"].dtype == torch.float32  # which holds all three dtypes
        assert np.array_equal(sample["image"].numpy(), scan)
        assert not labels or np.array_equal(sample["label"].numpy(), masks[n])
        assert np.allclose(sample["at"], np.eye(4) if n == 2 else AFFINE)
        assert np.allclose(sample["mm"], 1 if n == 2 else [2, np.hypot(1.5, 0.1), 3])
        assert sample["of"] == ("a.nii.gz", "b.nii", "c.nii.gz")[n]
    assert [sample["image"].shape for sample in dataset.__getitems__([2, 0])] == [(2, 2, 9), (5, 6, 4)]
    with pytest.raises(ValueError, match=r"expected rows of one shape; the rows differ in shape"):
        dataset.batch([0, 1])
    stored = np.load(tmp_path / "out" / "volumes.npy").nbytes
    assert stored == scans[0].nbytes + scans[1].nbytes + scans[2].nbytes  # integers stay integers


def test_files_become_the_channels_of_one_volume(nifti, tmp_path):
    def scan(name, value, shape=(4, 3, 2)):
        return nifti(f"scans/{name}.nii.gz", np.full(shape, value, np.uint8))

    for case, shape in (("a", (4, 3, 2)), ("b", (2, 3, 5))):
        scan(f"{case}_0000", 1, shape), scan(f"{case}_0001", 2, shape)
        nifti(f"masks/{case}.nii.gz", np.ones(shape, np.uint8))
    options = {"labels": tmp_path / "masks", "modalities": ("_0001", "_0000")}
    pack_folder(tmp_path / "scans", tmp_path / "out", **options)
    dataset = PackedDataset(tmp_path / "out")
    assert [volume.shape for volume, _ in dataset.__getitems__([0, 1])] == [(2, 4, 3, 2), (2, 2, 3, 5)]
    assert dataset[1][0].flatten(1).unique(dim=1).tolist() == [[2], [1]]
    scan("c_0000", 1)
    with pytest.raises(FileNotFoundError, match=r"expected each of .* for the volume 'c', got \['_0000'\]"):
        pack_folder(tmp_path / "scans", tmp_path / "other", **options)
    scan("c_0001", 1, (4, 3, 1))
    nifti("masks/c.nii.gz", np.ones((4, 3, 2), np.uint8))
    with pytest.raises(ValueError, match=r"c_0001.nii.gz'.*|expected the shape \(4, 3, 2\)"):
        pack_folder(tmp_path / "scans", tmp_path / "other", **options)
    scan("d", 1)
    with pytest.raises(ValueError, match=r"expected names that end in one of .* got '.*d.nii.gz'"):
        pack_folder(tmp_path / "scans", tmp_path / "other", **options)


@pytest.mark.parametrize("module", ["isal", "gzip"])
def test_gz_files_are_read_whole(nifti, tmp_path, monkeypatch, module):
    if module == "isal":
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr(pack_files, "installed", lambda module: False)
    scan = nifti("scans/a.nii.gz", np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    assert np.array_equal(packed(tmp_path / "scans", tmp_path / "out")[0].numpy(), scan)
    content = bytearray((tmp_path / "scans" / "a.nii.gz").read_bytes())
    content[-8] ^= 1  # its checksum
    (tmp_path / "scans" / "a.nii.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.nii.gz'"):
        pack_folder(tmp_path / "scans", tmp_path / "other")


def test_voxels_that_are_not_finite_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.array([[1, np.nan, np.inf]], dtype=np.float32))
    with pytest.raises(
        ValueError, match=r"a.npy': values of 'a.npy': expected finite numbers.*got '2 that are NaN or infinite'"
    ):
        pack_folder(tmp_path / "in", tmp_path / "out")


# What is refused.


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        *(("images", {"size": size}, ValueError, r"size: expected \(height, width\) in pixels, each at least 1")
          for size in (224, (0, 8), (8, 8, 8))),
        ("images", {"mode": "CMYK"}, ValueError, "mode: expected 'RGB', 'L' .*, got 'CMYK'"),
        ("images", {"labels": "masks"}, ValueError, "labels='masks' does not go with images"),
        ("images", {"classes": "cat"}, TypeError, "classes: expected a sequence of names"),
        ("images", {"progress": 3}, TypeError, "progress=3: expected a function or None"),
        ("images", {"skip_broken": "no"}, TypeError, "skip_broken='no'"),
        ("volumes", {"size": (2, 2)}, ValueError, r"size: expected \(depth, height, width\) in voxels"),
        ("volumes", {"mode": "L"}, ValueError, "mode='L' does not go with .npy files"),
        ("volumes", {"labels": "in", "classes": ["a"]}, ValueError, "classes=.* does not go with .* label volumes"),
        ("broken", {"skip_broken": True}, ValueError, "1 of 1 samples cannot be packed"),
        ("empty", {}, FileNotFoundError, "folder: expected a folder with files that end in .bmp"),
        ("none", {}, FileNotFoundError, "folder: expected an existing folder, got '.*none'"),
        ("both", {}, ValueError, "folder: expected one kind of files, not images and .npy files"),
        ("beside", {}, ValueError, r"all files in the folders of the classes, but found \['1.png'\]"),
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
        with pytest.raises(FileExistsError, match=r"or with overwrite=True .* one that holds only a packed dataset"):
            pack_folder(scans, out, overwrite=True)
    (other / "notes").rmdir()
    with pytest.raises(FileExistsError, match="expected a folder that does not exist, or with overwrite=True"):
        pack_folder(scans, other)
    pack_folder(scans, other, overwrite=True)
    assert (scans / "1.npy").exists()
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.png", r"pack_folder with images needs.* pillow,.*lightning-turbo\[pack\]"),
        ("a.nii.gz", r"nibabel.*turbo\[pack\]"),
    ],
)
def test_the_absent_package_is_named(tmp_path, monkeypatch, name, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).touch()
    monkeypatch.setattr(_optional, "installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=message):
        pack_folder(tmp_path / "in", tmp_path / "out")


def test_a_full_disk_is_an_error_and_the_next_call_goes_on(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(4):
        np.save(tmp_path / "in" / f"{n}.npy", np.full((32, 32, 32), n, dtype=np.float32))
    file, sizes = tmp_path / "out.partial" / "volumes.npy", []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # the system's error is that of a full disk
    try:
        with pytest.raises(OSError, match=r"File too large after 2 of 4 samples. They stay in '.*out.partial'"):
            pack_folder(tmp_path / "in", tmp_path / "out", progress=lambda *_: sizes.append(file.stat().st_size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # It grows as it is written. Room that is only promised, as to mapped memory, ends the process where there is none.
    assert [round(size, -4) for size in sizes] == [130_000, 260_000]
    seen = []
    pack_folder(tmp_path / "in", tmp_path / "out", progress=lambda done, of: seen.append(done))
    assert seen == [3, 4]
    assert PackedDataset(tmp_path / "out").batch([0, 1, 2, 3]).mean((1, 2, 3)).tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
