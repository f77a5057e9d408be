"""Which files make a sample: the layouts that people have, and names that could mean two things."""

import json

import numpy as np
import pytest

from lightning_turbo.data import PackedDataset, PatchDataset, pack_folder


@pytest.fixture
def write(tmp_path):
    """Write small volumes, each of one number, and return the folder that they lie in."""

    def write(files, suffix=".npy"):
        for name, value in files.items():
            path = tmp_path / "in" / f"{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path.with_suffix(".npy"), np.full((2, 3, 4), value, np.int16))
        return tmp_path / "in"

    return write


def contents(folder):
    """The numbers of each sample's channels and label volume, by the name of its first file."""
    found = json.loads((folder / "packed.json").read_text())
    labeled = found["foreground"] is not None
    data = PackedDataset(folder, keys=("files", "volumes", *(["labels"] if labeled else [])))
    rows = {}
    for name, volume, *label in (data[n] for n in range(len(data))):
        channels = volume.reshape(-1, 24)[:, 0].tolist()
        rows[name.removesuffix(".npy")] = (channels, *(int(each.flatten()[0]) for each in label))
    return rows


BRATS = {
    f"BraTS-{n}/BraTS-{n}-{end}": 10 * n + value for n in (1, 2) for value, end in enumerate(("seg", "t1c", "t1n"))
}


@pytest.mark.parametrize("labels", [None, "-seg", "the folder"])
@pytest.mark.parametrize("modalities", [("-t1c", "-t1n"), ("-t1n", "-t1c"), ("-t1n",)])
def test_label_volumes_beside_channels_as_brats_has_them(write, tmp_path, labels, modalities):
    root = write(BRATS)
    found = pack_folder(
        root, tmp_path / "out", modalities=modalities, labels=root if labels == "the folder" else labels
    )
    assert (found["classes"], found["foreground"], found["samples"]) == ([], "labels", 2)
    first = modalities[0]
    expected = {
        f"BraTS-{n}/BraTS-{n}{first}": ([10 * n + ("-seg", "-t1c", "-t1n").index(end) for end in modalities], 10 * n)
        for n in (1, 2)
    }
    assert contents(tmp_path / "out") == expected


def test_brats_without_its_label_volumes(write, tmp_path):
    root = write(BRATS)
    pack_folder(root, tmp_path / "without", modalities=("-t1n", "-t1c"), labels=False)
    assert contents(tmp_path / "without") == {f"BraTS-{n}/BraTS-{n}-t1n": ([10 * n + 2, 10 * n + 1],) for n in (1, 2)}
    for n in (1, 2):
        (root / f"BraTS-{n}" / f"BraTS-{n}-seg.npy").unlink()  # as its validation set
    found = pack_folder(root, tmp_path / "out", modalities=("-t1n", "-t1c"))
    assert (found["classes"], found["arrays"]) == ([], "volumes")  # a folder is a case, and no class
    assert contents(tmp_path / "out") == contents(tmp_path / "without")


def test_brats_without_modalities_says_what_to_write(write, tmp_path):
    with pytest.raises(ValueError, match=r"labels: expected one volume for the label volume .*BraTS-1-seg.npy.* "
                       r"modalities=\('-t1c', '-t1n'\) \(--modalities=-t1c,-t1n\)"):  # fmt: skip
        pack_folder(write(BRATS), tmp_path / "out")


BESIDE = {
    "ACDC": ({"p1/p1_frame01": 1, "p1/p1_frame01_gt": 2, "p1/p1_frame12": 3, "p1/p1_frame12_gt": 4},
             {"p1/p1_frame01": ([1], 2), "p1/p1_frame12": ([3], 4)}),
    "KiTS": ({"case_1/imaging": 1, "case_1/segmentation": 2, "case_2/imaging": 3, "case_2/segmentation": 4},
             {"case_1/imaging": ([1], 2), "case_2/imaging": ([3], 4)}),
    "BIDS": ({"sub-1/anat/sub-1_T1w": 1, "sub-1/anat/sub-1_dseg": 2}, {"sub-1/anat/sub-1_T1w": ([1], 2)}),
    "one folder": ({"a": 1, "a_mask": 2, "b": 3, "b_mask": 4}, {"a": ([1], 2), "b": ([3], 4)}),
    "capitals": ({"a": 1, "a_Label": 2}, {"a": ([1], 2)}),
    "one within the other": ({"a": 1, "a_seg": 2, "a_b": 3, "a_b_seg": 4}, {"a": ([1], 2), "a_b": ([3], 4)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE)
def test_label_volumes_beside_volumes(write, tmp_path, kind):
    files, expected = BESIDE[kind]
    found = pack_folder(write(files), tmp_path / "out")
    assert (found["classes"], found["foreground"]) == ([], "labels")
    assert contents(tmp_path / "out") == expected


MIXED = {
    "LiTS": {"volume-0": 1, "segmentation-0": 2, "volume-1": 3, "segmentation-1": 4},
    "BTCV": {"img/img0001": 1, "label/label0001": 2},
    "two folders": {"scans/a": 1, "masks/a": 2},
    "TotalSegmentator": {"s1/ct": 1, "s1/segmentations/liver": 2, "s1/segmentations/spleen": 3},
    "ISLES": {"sub-1/sub-1_dwi": 1, "derivatives/sub-1/sub-1_msk": 2},
    "a number behind": {"case1": 1, "case1_label_2": 2},
    "of no other volume": {"x_label": 1, "y": 2},
}


@pytest.mark.parametrize("kind", MIXED)
def test_what_is_named_as_a_label_volume_is_no_scan_in_silence(write, tmp_path, kind):
    root = write(MIXED[kind])
    with pytest.raises(ValueError, match=r"labels: expected only volumes, got '.*', which is named like a label vol"):
        pack_folder(root, tmp_path / "out")
    pack_folder(root, tmp_path / "without", labels=False)
    found = contents(tmp_path / "without")
    assert {channels[0] for channels, *_ in found.values()} == ({1, 3} if kind == "LiTS" else {1 + (kind[:2] == "of")})


def test_classes_may_be_called_what_they_are(write, tmp_path):
    root = write({"mask/a": 1, "none/b": 2})
    with pytest.raises(ValueError, match="labels: expected only volumes"):
        pack_folder(root, tmp_path / "out")
    assert pack_folder(root, tmp_path / "out", classes=["mask", "none"])["classes"] == ["mask", "none"]


@pytest.mark.parametrize("labels", [None, False])
def test_a_folder_of_masks_holds_volumes(write, tmp_path, labels):
    root = write({"a_mask": 1, "b_mask": 2})
    assert pack_folder(root, tmp_path / "out", labels=labels)["foreground"] is None
    assert contents(tmp_path / "out") == {"a_mask": ([1],), "b_mask": ([2],)}


# nnU-Net and the Medical Segmentation Decathlon.

NNUNET = {"channel_names": {"0": "CT", "1": "PET"}, "labels": {"background": 0, "tumour": 1, "organ": 2}}
DECATHLON = {"modality": {"0": "CT"}, "labels": {"0": "background", "1": "tumour"}, "training": []}


@pytest.mark.parametrize("place", ["", "imagesTr"])
def test_the_layout_of_nnunet(write, tmp_path, place):
    files = {f"imagesTr/{case}_000{n}": 10 * c + n for c, case in enumerate("ab") for n in range(2)}
    root = write({**files, "labelsTr/a": 5, "labelsTr/b": 6, "imagesTs/c_0000": 9, "imagesTs/c_0001": 9})
    (root / "dataset.json").write_text(json.dumps(NNUNET))
    found = pack_folder(root / place, tmp_path / "out")
    assert found["classes"] == ["background", "tumour", "organ"]
    prefix = "" if place else "imagesTr/"
    assert contents(tmp_path / "out") == {f"{prefix}a_0000": ([0, 1], 5), f"{prefix}b_0000": ([10, 11], 6)}
    pack_folder(root / "imagesTs", tmp_path / "test")
    assert contents(tmp_path / "test") == {"c_0000": ([9, 9],)}


def test_the_layout_of_the_decathlon(write, tmp_path):
    root = write({"imagesTr/spleen_2": 1, "imagesTr/spleen_3": 2, "labelsTr/spleen_2": 3, "labelsTr/spleen_3": 4})
    (root / "dataset.json").write_text(json.dumps(DECATHLON))
    assert pack_folder(root, tmp_path / "out")["classes"] == ["background", "tumour"]
    assert contents(tmp_path / "out") == {"imagesTr/spleen_2": ([1], 3), "imagesTr/spleen_3": ([2], 4)}


@pytest.mark.parametrize(
    "labels", [{"background": 0, "whole": [1, 2], "core": 2}, {"background": 0, "far": 7}, [], None]
)
def test_names_of_labels_that_are_no_row_of_classes_are_left_out(write, tmp_path, labels):
    root = write({"imagesTr/a_0000": 1, "labelsTr/a": 1})
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "labels": labels}))
    assert pack_folder(root, tmp_path / "out")["classes"] == []


def test_a_damaged_description_is_named(write, tmp_path):
    root = write({"imagesTr/a_0000": 1, "labelsTr/a": 1})
    (root / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset.json': expected JSON as written by nnU-Net"):
        pack_folder(root, tmp_path / "out")


# Pairs of two folders.

PAIRS = {
    "its own name": ({"case": 1, "case_0000": 2}, {"case": 1, "case_0000": 2}),
    "without _0000": ({"a_0000": 1, "b_0000": 2}, {"a": 1, "b": 2}),
    "with an end": ({"a": 1, "sub/b": 2}, {"a_seg": 1, "sub/b-mask": 2}),
    "without _0000 and with an end": ({"a_0000": 1}, {"a_label": 1}),
    "its own name before another": ({"a": 1, "a_seg": 2}, {"a": 1, "a_seg": 2}),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_two_folders(write, tmp_path, kind):
    scans, masks = PAIRS[kind]
    root = write({**{f"scans/{k}": v for k, v in scans.items()}, **{f"masks/{k}": v for k, v in masks.items()}})
    pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")
    found = contents(tmp_path / "out")
    assert {name: (channels, label) for name, (channels, label) in found.items()} == {
        name: ([value], value) for name, value in scans.items()
    }


TWO = {
    "two ends": (
        {"a": 1},
        ["a_seg.npy", "a_mask.npy"],
        "labels: expected one label volume for '.*a.npy'; .* got .*a_mask.*a_seg",
    ),
    "two kinds": (
        {"a": 1},
        ["a.npy", "a.nii.gz"],
        "labels: expected one label volume for '.*a.npy'.* got .*a.nii.gz.*a.npy",
    ),
    "shared": (
        {"a": 1, "a_0000": 1},
        ["a.npy"],
        r"one volume for the label volume '.*a.npy', got \['a', 'a_0000'\]",
    ),
}


@pytest.mark.parametrize("kind", TWO)
def test_two_files_that_could_be_meant_are_both_named(write, tmp_path, kind):
    scans, masks, message = TWO[kind]
    root = write({f"scans/{name}": value for name, value in scans.items()})
    (root / "masks").mkdir()
    for name in masks:
        (root / "masks" / name).touch()
    with pytest.raises(ValueError, match=message):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")


def test_two_label_volumes_beside_a_volume_and_two_files_of_one_channel(write, tmp_path):
    root = write({"a": 1, "a_seg": 2, "a_gt": 3})
    with pytest.raises(
        ValueError, match=r"one label volume for '.*a.npy'; remove the other, or select a suffix.*a_gt.*a_seg"
    ):
        pack_folder(root, tmp_path / "out")
    pack_folder(root, tmp_path / "out", labels="_gt")
    assert contents(tmp_path / "out") == {"a": ([1], 3)}
    other = write({"more/b_0000": 1}) / "more"
    (other / "b_0000.nii.gz").touch()
    (other / "b_0000.npy").rename(other / "b_0000.nii")
    pytest.importorskip("nibabel")
    with pytest.raises(ValueError, match=r"one file for '_0000' of the volume 'b', got .*b_0000.nii.*b_0000.nii.gz"):
        pack_folder(other, tmp_path / "other", modalities=("_0000",))


@pytest.mark.parametrize("names", [("case_1", "case_2"), ("case_0000", "case_0001"), ("cases",), ("sub/case",)])
def test_a_longer_name_is_another_one_in_another_folder(write, tmp_path, names):
    root = write({**dict.fromkeys((f"scans/{name}" for name in names), 1), "masks/case": 2})
    with pytest.raises(FileNotFoundError, match="expected a label volume with the name of each volume"):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")


# What is missing.


@pytest.mark.parametrize("beside", [False, True])
def test_a_volume_without_label_volume_is_named_or_skipped(write, tmp_path, beside):
    masks = "scans" if beside else "masks"
    root = write({"scans/a": 1, f"{masks}/a_seg": 2, "scans/b": 3})
    labels = None if beside else root / "masks"
    with pytest.raises(FileNotFoundError, match=r"labels: expected a label volume .* got none for \['b'\]"):
        pack_folder(root / "scans", tmp_path / "out", labels=labels)
    assert pack_folder(root / "scans", tmp_path / "out", labels=labels, skip_broken=True)["skipped"] == 1
    assert contents(tmp_path / "out") == {"a": ([1], 2)}
    assert (
        "b.npy': files: expected the files of all channels and of the label volume"
        in (tmp_path / "out.broken.txt").read_text()
    )


def test_a_missing_channel_is_named_or_skipped(write, tmp_path):
    root = write({"a_0000": 1, "a_0001": 2, "b_0001": 3})
    options = {"modalities": ("_0000", "_0001")}
    with pytest.raises(FileNotFoundError, match=r"expected each of .* for the volume 'b', got \['_0001'\]"):
        pack_folder(root, tmp_path / "out", **options)
    pack_folder(root, tmp_path / "out", **options, skip_broken=True)
    assert contents(tmp_path / "out") == {"a_0000": ([1, 2],)}
    write({"c": 3, "a_b": 3})
    with pytest.raises(ValueError, match=r"expected names that end in one of .* got '.*c.npy'"):
        pack_folder(root, tmp_path / "other", **options, skip_broken=True)


@pytest.mark.parametrize("what", ["volume", "label volume"])
def test_a_link_to_nothing_is_named_or_skipped(write, tmp_path, what):
    root = write({"scans/a": 1, "masks/a": 2, "scans/b": 3, "masks/b": 4})
    path = root / ("scans" if what == "volume" else "masks") / "b.npy"
    path.unlink()
    path.symlink_to(root / "nowhere.npy")
    with pytest.raises(ValueError, match=r"1 of 2 samples cannot be packed:\n'.*b.npy': .*No such file"):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")
    pack_folder(root / "scans", tmp_path / "out", labels=root / "masks", skip_broken=True)
    assert contents(tmp_path / "out") == {"a": ([1], 2)}
    path.unlink()
    np.save(path, np.full((2, 3, 4), 5, np.int16))  # where the link leads to something, it is another folder
    pack_folder(root / "scans", tmp_path / "out", labels=root / "masks", overwrite=True)
    assert len(contents(tmp_path / "out")) == 2


# Classes.


def test_a_class_belongs_to_the_volume_whatever_number_of_channels_it_has(write, tmp_path):
    files = {f"{kind}/{case}_{end}": 0 for kind in ("ill", "well") for case in "ab" for end in (0, 1, 2)}
    pack_folder(write(files), tmp_path / "out", modalities=("_0", "_1", "_2"))
    data = PackedDataset(tmp_path / "out", keys=("files", "labels"))
    assert data.classes == ["ill", "well"]
    assert [(name, label.item()) for name, label in (data[n] for n in range(4))] == [
        ("ill/a_0.npy", 0), ("ill/b_0.npy", 0), ("well/a_0.npy", 1), ("well/b_0.npy", 1)
    ]  # fmt: skip


# Images.


@pytest.mark.parametrize("names", [("benign/b (1)", "benign/b (1)_mask"), ("a", "a-label", "b")])
def test_masks_among_images_are_an_error_unless_they_are_left_out(tmp_path, names):
    image = pytest.importorskip("PIL.Image")
    for n, name in enumerate(names):
        path = tmp_path / "in" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (4, 4), n).save(path)
    with pytest.raises(ValueError, match=r"labels: expected only images, got masks such as '.*\.png'"):
        pack_folder(tmp_path / "in", tmp_path / "out")
    assert pack_folder(tmp_path / "in", tmp_path / "out", labels=False)["samples"] == len(names) - 1


# What is refused.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"labels": "-lesion"},
            FileNotFoundError,
            "labels: expected a folder, or the suffix of label volumes",
        ),
        ({"labels": True}, TypeError, "labels: expected a folder, a suffix, None or False"),
        ({"spacing": (1, 1)}, ValueError, "spacing=.* does not apply to .npy files"),
    ],
)
def test_what_is_refused(write, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        pack_folder(write({"a": 1}), tmp_path / "out", **options)


def test_the_folder_itself_without_label_volumes_is_refused(write, tmp_path):
    root = write({"a": 1})
    with pytest.raises(FileNotFoundError, match=r"labels: expected names of label volumes that end in -seg"):
        pack_folder(root, tmp_path / "out", labels=root)


@pytest.mark.parametrize("place", ["scans", "masks"])
def test_a_folder_inside_of_what_is_read_is_refused(write, tmp_path, place):
    root = write({"scans/a": 1, "masks/a": 2})
    for out in (root / place / "packed", root / place / "sub" / "packed", root / place):
        with pytest.raises(ValueError, match=rf"out: expected a folder beside '.*{place}'"):
            pack_folder(root / "scans", out, labels=root / "masks")
    assert not (root / place / "packed").exists()


def test_patches_of_a_packed_layout(write, tmp_path):
    pack_folder(write(BRATS), tmp_path / "out", modalities=("-t1c", "-t1n"))
    data = PatchDataset(tmp_path / "out", (2, 2, 2), foreground=1.0, keys={"image": "volumes", "label": "labels"})
    assert data[1]["image"].shape == (2, 2, 2, 2)
    assert data[1]["label"].unique().tolist() == [20]
