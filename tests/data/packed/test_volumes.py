"""Volumes of .npy and NIfTI files: what becomes of them, and what is refused."""

import numpy as np
import pytest
import torch

from lightning_turbo.data import PackedDataset, pack_folder
from lightning_turbo.data.packed import volumes
from lightning_turbo.errors import TurboWarning
from tests.data.packed.files import AFFINE, packed


@pytest.mark.parametrize(("suffix", "label_suffix"), [(".nii", ".nii.gz"), (".NII.GZ", ".npy")])
def test_pairs_of_volumes_keep_spacing_and_affine(nifti, tmp_path, suffix, label_suffix):
    generator = np.random.default_rng(0)
    scans, masks = [], []
    for n in range(3):
        scans.append(nifti(f"scans/case_{n}{suffix}", generator.integers(-99, 99, (5, 6, 4), dtype=np.int16)))
        masks.append(generator.integers(0, 3, (5, 6, 4)).astype(np.float32))
        if label_suffix == ".npy":
            (tmp_path / "masks").mkdir(exist_ok=True)
            np.save(tmp_path / "masks" / f"case_{n}.npy", masks[-1])
        else:
            nifti(f"masks/case_{n}{label_suffix}", masks[-1])
    contents = pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")
    assert list(contents.pop("intensities")) == ["volumes"]
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
    at = np.array([1, 3, 2, 1])  # the same voxel before and after lies at the same millimeters
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
        (np.full((2, 2, 2), 70000, np.int32), AFFINE, "1.nii.gz': expected 16-bit integers"),
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
    with pytest.raises(FileNotFoundError, match=r"labels: expected a file of '.*masks' .* got none for .* \['0'\]"):
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
    options = {"pairs": (("scans/{case}_0001.nii.gz", "scans/{case}_0000.nii.gz"), "masks/{case}.nii.gz")}
    pack_folder(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), **options)
    dataset = PackedDataset(tmp_path.with_name(f"{tmp_path.name}-out"))
    assert [volume.shape for volume, _ in dataset.__getitems__([0, 1])] == [(2, 4, 3, 2), (2, 2, 3, 5)]
    assert dataset[1][0].flatten(1).unique(dim=1).tolist() == [[2], [1]]
    scan("c_0000", 1), scan("c_0001", 1, (4, 3, 1))
    nifti("masks/c.nii.gz", np.ones((4, 3, 2), np.uint8))
    with pytest.raises(ValueError, match=r"c_0001.nii.gz'.*expected the shape \(4, 3, 1\)"):
        pack_folder(tmp_path, tmp_path.with_name(f"{tmp_path.name}-other"), **options)


@pytest.mark.parametrize("module", ["isal", "gzip"])
def test_gz_files_are_read_whole(nifti, tmp_path, monkeypatch, module):
    if module == "isal":
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr(volumes, "installed", lambda module: False)
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


# Axes of one entry, as other programs write them.

LAST = [(), (1,), (1, 1), (2,), (1, 2)]


@pytest.mark.parametrize("scan", LAST)
@pytest.mark.parametrize("mask", [(), (1,), (1, 1)])
def test_last_axes_of_one_entry_are_dropped(nifti, tmp_path, scan, mask):
    generator = np.random.default_rng(0)
    voxels = nifti("scans/a.nii.gz", generator.integers(0, 99, (4, 5, 6, *scan)).astype(np.int16))
    label = nifti("masks/a.nii.gz", generator.integers(0, 3, (4, 5, 6, *mask)).astype(np.uint8))
    volume, labels = packed(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")[0]
    expected = voxels.reshape(4, 5, 6, -1)
    expected = np.moveaxis(expected, 3, 0) if expected.shape[3] > 1 else expected[..., 0]
    assert np.array_equal(volume.numpy(), expected)
    assert np.array_equal(labels.numpy(), label.reshape(4, 5, 6))


def test_channels_of_files_with_a_last_axis(nifti, tmp_path):
    for n in range(2):
        nifti(f"in/a_{n}.nii", np.full((4, 5, 6, 1), n, np.int16))
    assert packed(tmp_path / "in", tmp_path / "out", pairs=(["{case}_0.nii", "{case}_1.nii"], None))[0].shape == (
        2,
        4,
        5,
        6,
    )


def test_an_npy_label_volume_with_a_channel_axis(tmp_path):
    for folder in ("scans", "masks"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "a.npy", np.ones((1, 4, 5, 6), np.int16))
    volume, label = packed(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")[0]
    assert (volume.shape, label.shape) == ((1, 4, 5, 6), (4, 5, 6))


# What a file may hold that is refused.


def save_colors(path):
    import nibabel

    pixels = np.zeros((2, 3, 4), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(nibabel.Nifti1Image(pixels, np.eye(4)), path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (np.zeros((2, 3, 4, 2, 2), np.int16), "axes of 'a.nii': expected three axes, plus one for channels"),
        (np.zeros((2, 3, 4, 0), np.int16), "voxels of 'a.nii': expected at least one"),
        (save_colors, r"values of 'a.nii': expected numbers, got \"\[\('R'"),
    ],
    ids=["six axes", "no voxels", "colors"],
)
def test_files_that_are_no_volumes(nifti, tmp_path, write, message):
    if isinstance(write, np.ndarray):
        nifti("in/a.nii", write)
    else:
        pytest.importorskip("nibabel")
        (tmp_path / "in").mkdir()
        write(tmp_path / "in" / "a.nii")
    with pytest.raises(ValueError, match=message):
        pack_folder(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (np.array([0, 0.9999, 2], np.float32), r"expected 16-bit integers, got '1 others, such as 0.9999'"),
        (np.array([0, 0.5, 1.5]), r"got '2 others, such as 0.5'"),
        (np.array([0, 40000, 1], np.uint16), r"got '1 others, such as 40000'"),
        (np.array([0, -40000, 1], np.int32), r"such as -40000'"),
    ],
)
def test_a_label_that_is_no_whole_number_is_named(tmp_path, label, message):
    for folder, values in (("scans", np.zeros(3)), ("masks", label)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "a.npy", values.reshape(1, 1, 3))
    with pytest.raises(ValueError, match=message):
        pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")


def test_a_label_file_with_a_slope_is_named(nifti, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nifti("scans/a.nii", np.zeros((2, 2, 2), np.int16))
    (tmp_path / "masks").mkdir()
    image = nibabel.Nifti1Image(np.array([0, 1, 2, 3] * 2, np.float32).reshape(2, 2, 2) * 0.7, AFFINE)
    image.set_data_dtype(np.uint8)  # stored with a slope
    nibabel.save(image, tmp_path / "masks" / "a.nii")
    with pytest.raises(ValueError, match=r"masks/a.nii': expected 16-bit integers, got '6 others, such as 0.7'"):
        pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks")


# Integers that float32 cannot hold.


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**62 + 2])
def test_an_integer_that_float64_cannot_hold_either_is_refused(tmp_path, value):
    nibabel = pytest.importorskip("nibabel")
    (tmp_path / "in").mkdir()
    image = nibabel.Nifti1Image(np.full((3, 3, 3), value), AFFINE, dtype=np.int64)
    nibabel.save(image, tmp_path / "in" / "a.nii")
    with pytest.raises(ValueError, match=rf"voxels: expected integers that float32 can hold.*got \[{value}"):
        pack_folder(tmp_path / "in", tmp_path / "out", spacing=(1, 1, 1))


@pytest.mark.parametrize("value", [2**24, 2**24 + 1, 2**24 + 2, -(2**24) - 1])
def test_an_integer_that_float32_cannot_hold_is_refused(nifti, tmp_path, value):
    """Resampling, and a slope or intercept, make float32 of integers."""
    nibabel = pytest.importorskip("nibabel")
    array = np.full((3, 3, 3), value, np.int32)
    nifti("plain/a.nii", array)
    assert packed(tmp_path / "plain", tmp_path / "whole")[0].unique().tolist() == [value]
    (tmp_path / "scaled").mkdir()
    image = nibabel.Nifti1Image(array - 7, AFFINE)
    image.header.set_slope_inter(1, 7)
    content = bytearray(image.to_bytes())
    content[112:120] = np.array([1, 7], np.float32).tobytes()
    (tmp_path / "scaled" / "a.nii").write_bytes(content)
    for name, options in (("plain", {"spacing": (1, 1, 1)}), ("scaled", {})):
        if value % 2:
            with pytest.raises(ValueError, match=rf"voxels: expected integers that float32 can hold.*got \[{value}"):
                pack_folder(tmp_path / name, tmp_path / f"{name}-out", **options)
        else:
            found = packed(tmp_path / name, tmp_path / f"{name}-out", **options)[0]
            assert np.allclose(found, value, atol=0 if name == "scaled" else 4)


# Where a file says twice where it lies.


@pytest.mark.parametrize("codes", [(1, 1), (1, 0), (0, 1)])
def test_an_sform_that_differs_from_the_qform_warns(nifti, tmp_path, recwarn, codes):
    nibabel = pytest.importorskip("nibabel")
    sform, qform = np.diag([1, 1, 2.0, 1]), np.diag([1, 1, 3.0, 1])
    (tmp_path / "in").mkdir()
    for name in "ab":
        image = nibabel.Nifti1Image(np.zeros((2, 3, 4), np.int16), None)
        image.set_sform(sform, codes[0])
        image.set_qform(sform if name == "a" else qform, codes[1])
        nibabel.save(image, tmp_path / "in" / f"{name}.nii.gz")
    (tmp_path / "in" / "c.nii").write_bytes(b"damaged")
    recwarn.clear()
    pack_folder(tmp_path / "in", tmp_path / "out", skip_broken=True)
    affine = PackedDataset(tmp_path / "out", keys=("affine",))[1]
    assert np.allclose(affine, sform if codes[0] else qform)
    said = [str(each.message) for each in recwarn if each.category is TurboWarning]
    assert len(said) == (codes == (1, 1))
    if said:
        assert said[0].startswith("sform and qform differ in 1 of 3 files, such as 'b.nii.gz'. The sform is used")
