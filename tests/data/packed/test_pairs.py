"""Which files make a sample: pairs that are named, those that a dataset.json names, and what is refused."""

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
TWO_CHANNELS = ("{case}/{case}-t1n.npy", "{case}/{case}-t1c.npy")


@pytest.mark.parametrize("channels", [TWO_CHANNELS, TWO_CHANNELS[::-1], TWO_CHANNELS[:1]])
def test_patterns_of_channels_as_brats_has_them(write, tmp_path, channels):
    found = pack_folder(write(BRATS), tmp_path / "out", pairs=(channels, "{case}/{case}-seg.npy"))
    assert (found["classes"], found["foreground"], found["samples"]) == ([], "labels", 2)
    first = channels[0][13:-4]
    expected = {
        f"BraTS-{n}/BraTS-{n}{first}": ([10 * n + (1 if "t1c" in each else 2) for each in channels], 10 * n)
        for n in (1, 2)
    }
    assert contents(tmp_path / "out") == expected


def test_channels_without_label_volumes(write, tmp_path, capsys):
    pack_folder(write(BRATS), tmp_path / "out", pairs=(TWO_CHANNELS, None))
    assert contents(tmp_path / "out") == {f"BraTS-{n}/BraTS-{n}-t1n": ([10 * n + 2, 10 * n + 1],) for n in (1, 2)}
    assert capsys.readouterr().out.splitlines() == [
        "2 volumes without label volumes:",
        *(f"  BraTS-{n}/BraTS-{n}-t1n.npy + BraTS-{n}/BraTS-{n}-t1c.npy" for n in (1, 2)),
    ]


PATTERNS = {
    "ACDC, of one frame": ("{case}/{case}_frame01.npy", "{case}/{case}_frame01_gt.npy",
             {"p1/p1_frame01": 1, "p1/p1_frame01_gt": 2, "p1/p1_4d": 9, "p2/p2_frame01": 3, "p2/p2_frame01_gt": 4},
             {"p1/p1_frame01": ([1], 2), "p2/p2_frame01": ([3], 4)}),
    "KiTS": ("{case}/imaging.npy", "{case}/segmentation.npy",
             {"case_1/imaging": 1, "case_1/segmentation": 2, "case_2/imaging": 3, "case_2/segmentation": 4},
             {"case_1/imaging": ([1], 2), "case_2/imaging": ([3], 4)}),
    "BIDS": ("{case}/anat/{case}_T1w.npy", "derivatives/{case}_dseg.npy",
             {"sub-1/anat/sub-1_T1w": 1, "derivatives/sub-1_dseg": 2}, {"sub-1/anat/sub-1_T1w": ([1], 2)}),
    "LiTS": ("volume-{case}.npy", "segmentation-{case}.npy",
             {"volume-0": 1, "segmentation-0": 2, "volume-10": 3, "segmentation-10": 4},
             {"volume-0": ([1], 2), "volume-10": ([3], 4)}),
    "BTCV": ("img/img{case}.npy", "label/label{case}.npy", {"img/img0001": 1, "label/label0001": 2},
             {"img/img0001": ([1], 2)}),
    "one folder": ("{case}.npy", "{case}_mask.npy", {"a": 1, "a_mask": 2, "b": 3, "b_mask": 4},
                   {"a": ([1], 2), "b": ([3], 4)}),
    "one within the other": ("{case}.npy", "{case}_seg.npy", {"a": 1, "a_seg": 2, "a_b": 3, "a_b_seg": 4},
                             {"a": ([1], 2), "a_b": ([3], 4)}),
    "characters of patterns": ("[{case}]*.npy", "({case})+.npy", {"[a]*": 1, "(a)+": 2}, {"[a]*": ([1], 2)}),
    "hidden files": ("{case}.npy", "m/{case}.npy", {"a": 1, "m/a": 2, "._a": 5, "m/._a": 5}, {"a": ([1], 2)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PATTERNS)
def test_patterns(write, tmp_path, kind):
    image, label, files, expected = PATTERNS[kind]
    pack_folder(write(files), tmp_path / "out", pairs=(image, label))
    assert contents(tmp_path / "out") == expected


def test_patterns_beside_the_folder(write, tmp_path):
    root = write({"scans/a": 1, "masks/a": 2})
    masks = root / "masks" / "{case}.npy"
    for number, label in enumerate(("../masks/{case}.npy", masks, str(masks))):
        pack_folder(root / "scans", tmp_path / str(number), pairs=("{case}.npy", label))
        assert contents(tmp_path / str(number)) == {"a": ([1], 2)}


def test_rows_of_a_list_and_of_a_table(write, tmp_path):
    """As ACDC is distributed, whose frames have numbers of their own, beside a series without label volume."""
    names = [("p1/p1_frame01", 1), ("p1/p1_frame12", 2), ("p2/p2_frame04", 3)]
    root = write({**dict(names), **{f"{name}_gt": 10 * n for name, n in names}, "p1/p1_4d": 9})
    rows = [(str(label).replace("_gt", ""), label) for label in sorted(root.rglob("*_gt.npy"))]
    pack_folder(root, tmp_path / "list", pairs=rows)
    assert contents(tmp_path / "list") == {name: ([n], 10 * n) for name, n in names}
    lines = [f"{label},{image}" for image, label in rows]
    (tmp_path / "pairs.csv").write_text("\n".join(["\ufefflabel,scan", *lines, ""]), encoding="utf-8")
    pack_folder(root, tmp_path / "table", pairs=tmp_path / "pairs.csv")
    assert contents(tmp_path / "table") == contents(tmp_path / "list")
    pack_folder(root, tmp_path / "channels", pairs=[(["p1/p1_frame01.npy", "p2/p2_frame04.npy"], "p1/p1_frame12.npy")])
    assert contents(tmp_path / "channels") == {"p1/p1_frame01": ([1, 3], 2)}
    pack_folder(root, tmp_path / "none", pairs=[("p1/p1_4d.npy", None)])
    assert contents(tmp_path / "none") == {"p1/p1_4d": ([9],)}


@pytest.mark.parametrize("number", [2, 10, 23])
def test_pairs_are_printed_before_they_are_packed(write, tmp_path, capsys, number):
    root = write({f"{folder}/{n:02}": n for folder in ("scans", "masks") for n in range(number)})
    (root / "scans" / "00.npy").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="samples cannot be packed"):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{number} volumes with their label volumes:"
    assert lines[0] == f"  00.npy -> {root}/masks/00.npy"
    assert lines[-1] == f"  {number - 1:02}.npy -> {root}/masks/{number - 1:02}.npy"
    assert len(lines) == min(number, 11)
    assert number < 11 or lines[5] == "  ... 13 more ..."


REFUSED = {
    "no label volume": ({"s/a": 1, "s/b": 1, "m/a": 1}, ("s/{case}.npy", "m/{case}.npy"), FileNotFoundError,
                        r"pairs: expected a file of 'm/{case}.npy' for each case, got none for 1 of 2: \['b'\]"),
    "no volume": ({"s/a": 1, "m/b": 1, "m/a": 1}, ("s/{case}.npy", "m/{case}.npy"), FileNotFoundError,
                  r"expected a file of 's/{case}.npy' for each case, got none for 1 of 2: \['b'\]"),
    "no channel": ({"a_0": 1, "a_1": 1, "b_1": 1}, (["{case}_0.npy", "{case}_1.npy"], None), FileNotFoundError,
                   r"expected a file of '{case}_0.npy' for each case, got none for 1 of 2: \['b'\]"),
    "nothing": ({"a": 1}, ("x/{case}.npy", None), FileNotFoundError, "expected patterns that some files fit"),
    "the same": ({"a": 1}, ("{case}.npy", "{case}.npy"), FileNotFoundError, "expected a file of '{case}.npy'|fit"),
    "a pattern without case": ({"a": 1}, ("{case}.npy", "a.npy"), ValueError, "pairs: expected patterns with {case}"),
    "one pattern": ({"a": 1}, ["{case}.npy"], ValueError, r"pairs: expected two patterns, \(images, labels\)"),
    "three patterns": ({"a": 1}, ["{case}.npy"] * 3, ValueError, r"expected two patterns, \(images, labels\)"),
    "twice": ({"a": 1, "b": 1, "c": 1}, [("a.npy", "c.npy"), ("b.npy", "c.npy")], ValueError,
              r"pairs: expected each file once, got \['.*c.npy'\]"),
    "itself": ({"a": 1}, [("a.npy", "a.npy")], ValueError, "expected each file once"),
    "a missing file": ({"a": 1}, [("a.npy", "x.npy")], FileNotFoundError, "expected files that exist, got '.*x.npy'"),
    "some without": ({"a": 1, "b": 1, "c": 1}, [("a.npy", "c.npy"), ("b.npy", None)], ValueError,
                     "expected a label volume for each volume or none, got '1 of 2'"),
    "other channels": ({"a": 1, "b": 1, "c": 1}, [(["a.npy", "c.npy"], None), ("b.npy", None)], ValueError,
                       "expected the same number of channels in each row"),
    "no rows": ({"a": 1}, [], TypeError, "pairs: expected the path of a CSV file, rows of"),
    "a row of three": ({"a": 1}, [("a.npy", "a.npy", "a.npy")], TypeError, "expected the path of a CSV file, rows of"),
    "a list of names": ({"a": 1}, ["a.npy"], TypeError, "pairs: expected the path of a CSV file, rows of"),
    "a dictionary": ({"a": 1}, {"a": "b"}, TypeError, "pairs: expected the path of a CSV file, rows of"),
    "no table": ({"a": 1}, "pairs.csv", FileNotFoundError, "pairs: expected an existing CSV file, or two patterns"),
    "a pattern alone": ({"a": 1}, "{case}.npy", FileNotFoundError, "or two patterns with {case}, .images, labels."),
    "an empty name": ({"a": 1}, [("a.npy", "")], TypeError, "expected paths in each row .image, label., or None for"),
    "no image": ({"a": 1}, [(None, "a.npy")], TypeError, "expected paths in each row"),
    "two labels": ({"a": 1, "b": 2}, [("a.npy", ["b.npy"])], TypeError, "expected paths in each row"),
    "a label of other files": ({"a": 1}, [("a.npy", "b.txt")], ValueError, "expected volumes, .npy or NIfTI files"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_partner_or_two_is_refused(write, tmp_path, kind):
    files, pairs, error, message = REFUSED[kind]
    root = write(files)
    (root / "b.txt").touch()
    with pytest.raises(error, match=message):
        pack_folder(root, tmp_path / "out", pairs=pairs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,mask\na.npy,b.npy\n",
            "a CSV file whose first line names the columns: one for each channel, and 'label'",
        ),
        ("a.npy,b.npy\n", "a CSV file whose first line names the columns"),
        ("label\nb.npy\n", "a CSV file whose first line names the columns"),
        ("", "a CSV file whose first line names the columns"),
        ("image,label\n", "expected at least one row"),
        ("image,label\nä.npy,b.npy\n".encode("latin-1"), r"expected a CSV file in UTF-8, got '.*pairs.csv' "),
        ("image,label\na.npy,b.npy\na.npy,\n", r"line 3 of '.*pairs.csv': expected a file for each of \['image', 'lab"),
        ("image,label\na.npy\n", "line 2 of '.*pairs.csv': expected a file for each of"),
        ("image,label\na.npy,b.npy,c.npy\n", "line 2 of '.*pairs.csv': expected a file for each of"),
    ],
)
def test_what_is_no_table(write, tmp_path, text, message):
    root = write({"a": 1, "b": 2, "c": 3})
    (tmp_path / "pairs.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        pack_folder(root, tmp_path / "out", pairs=tmp_path / "pairs.csv")


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
    with pytest.raises(
        ValueError, match=r"labels: expected files without label volumes, got '.*', which is named like"
    ):
        pack_folder(root, tmp_path / "out")
    rows = [(path, None) for path in sorted(root.rglob("*.npy"))]
    assert pack_folder(root, tmp_path / "all", pairs=rows)["samples"] == len(MIXED[kind])


CASES = {
    "FreeSurfer": {"s1/T1": 1, "s1/aseg": 2, "s2/T1": 3, "s2/aseg": 4},
    "names of cases": {"b1/b1-t1": 1, "b1/b1-t2": 2, "b2/b2-t1": 3, "b2/b2-t2": 4},
    "one file each": {"case1/case1": 1, "case2/case2": 2},
    "deeper": {"s1/mri/T1": 1, "s1/mri/orig": 2, "s2/mri/T1": 3, "s2/mri/orig": 4},
}


@pytest.mark.parametrize("labels", [None, False])
@pytest.mark.parametrize("kind", CASES)
def test_folders_of_cases_are_no_classes_in_silence(write, tmp_path, kind, labels):
    root = write(CASES[kind])
    folders = sorted({name.partition("/")[0] for name in CASES[kind]})
    with pytest.raises(ValueError, match=rf"classes: expected folders that are classes, got \['{folders[0]}', '"):
        pack_folder(root, tmp_path / "out", labels=labels)
    assert pack_folder(root, tmp_path / "out", labels=labels, classes=folders)["classes"] == folders


def test_labels_false_packs_each_file_whatever_it_is_called(write, tmp_path):
    pack_folder(write({"volume-0": 1, "segmentation-0": 2}), tmp_path / "out", labels=False)
    assert contents(tmp_path / "out") == {"segmentation-0": ([2],), "volume-0": ([1],)}


def test_classes_may_be_called_what_they_are(write, tmp_path):
    root = write({"mask/a": 1, "none/b": 2})
    with pytest.raises(ValueError, match="labels: expected files without"):
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
    listed = [{"image": f"./imagesTr/spleen_{n}.npy", "label": f"./labelsTr/spleen_{n}.npy"} for n in (3, 2)]
    (root / "dataset.json").write_text(json.dumps({**DECATHLON, "training": listed}))
    assert pack_folder(root, tmp_path / "out")["classes"] == ["background", "tumour"]
    assert contents(tmp_path / "out") == {"imagesTr/spleen_3": ([2], 4), "imagesTr/spleen_2": ([1], 3)}
    pack_folder(root, tmp_path / "without", labels=False)
    assert contents(tmp_path / "without") == {"imagesTr/spleen_3": ([2],), "imagesTr/spleen_2": ([1],)}
    (root / "labelsTr" / "spleen_2.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected files that exist, got '.*labelsTr/spleen_2.npy'"):
        pack_folder(root, tmp_path / "other")


def test_the_first_version_of_nnunet_lists_files_without_the_end_of_their_channel(write, tmp_path):
    root = write({"imagesTr/a_0000": 1, "labelsTr/a": 2})
    listed = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    (root / "dataset.json").write_text(json.dumps({**DECATHLON, "training": listed}))
    pack_folder(root, tmp_path / "out")
    assert contents(tmp_path / "out") == {"imagesTr/a_0000": ([1], 2)}


def test_an_nnunet_folder_without_a_partner_is_refused(write, tmp_path):
    root = write({"imagesTr/a_0000": 1, "imagesTr/b_0000": 1, "labelsTr/a": 2})
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "file_ending": ".npy"}))
    with pytest.raises(FileNotFoundError, match=r"a file of 'labelsTr/{case}.npy' for each case, got none .* \['b'\]"):
        pack_folder(root, tmp_path / "out")
    (root / "dataset.json").write_text(json.dumps({"channel_names": {}}))
    with pytest.raises(ValueError, match=r"channel_names of dataset.json: expected names of channels"):
        pack_folder(root, tmp_path / "out")
    (root / "dataset.json").unlink()
    with pytest.raises(ValueError, match="labels: expected files without label volumes"):
        pack_folder(root, tmp_path / "out")


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


@pytest.mark.parametrize("labels", [None, False])
def test_nnunets_folder_is_known_inside_of_it(write, tmp_path, monkeypatch, labels):
    root = write({"imagesTr/a_0000": 1, "imagesTr/a_0001": 2, "labelsTr/a": 3})
    (root / "dataset.json").write_text(json.dumps(NNUNET))
    monkeypatch.chdir(root / "imagesTr")
    pack_folder(".", tmp_path / "out", labels=labels)
    assert contents(tmp_path / "out") == {"a_0000": ([1, 2], 3) if labels is None else ([1, 2],)}


@pytest.mark.parametrize("name", ["a_0002", "b"])
def test_a_file_that_is_no_channel_of_nnunets_is_named(write, tmp_path, name):
    root = write({"imagesTr/a_0000": 1, "imagesTr/a_0001": 2, "labelsTr/a": 3, f"imagesTr/{name}": 4})
    (root / "dataset.json").write_text(json.dumps(NNUNET))
    message = rf"expected files named {{case}}_0000.npy to {{case}}_0001.npy, .*, got \['{name}.npy'\]"
    with pytest.raises(ValueError, match=message):
        pack_folder(root, tmp_path / "out")


def test_nnunets_images_are_no_volumes(tmp_path):
    (tmp_path / "in" / "imagesTr").mkdir(parents=True)
    (tmp_path / "in" / "imagesTr" / "a_0000.png").touch()
    (tmp_path / "in" / "dataset.json").write_text(json.dumps(NNUNET))
    with pytest.raises(ValueError, match=r"expected volumes, \.npy or NIfTI files, not images, got '.*imagesTr'"):
        pack_folder(tmp_path / "in", tmp_path / "out")


def test_the_test_images_of_the_decathlon(write, tmp_path):
    root = write({"imagesTr/a": 1, "labelsTr/a": 2, "imagesTs/b": 3, "imagesTs/c": 4})
    listed = ["./imagesTs/c.npy", "./imagesTs/b.npy"]
    (root / "dataset.json").write_text(json.dumps({**DECATHLON, "test": listed}))
    pack_folder(root / "imagesTs", tmp_path / "out")
    assert contents(tmp_path / "out") == {"c": ([4],), "b": ([3],)}


def test_a_case_of_the_decathlon_without_a_label_volume_is_named(write, tmp_path):
    root = write({"imagesTr/a": 1})
    (root / "dataset.json").write_text(json.dumps({**DECATHLON, "training": [{"image": "imagesTr/a.npy"}]}))
    with pytest.raises(ValueError, match=r"expected paths of image and label for each case, got \{'image': 'imagesTr"):
        pack_folder(root, tmp_path / "out")


# Two folders.


def test_a_folder_of_label_volumes_within_that_of_the_volumes(write, tmp_path, monkeypatch):
    root = write({"a": 1, "masks/a": 2})
    monkeypatch.chdir(tmp_path)
    for number, (folder, labels) in enumerate((("in", "in/masks"), ("in", root / "masks"), (root, "./in/masks"))):
        pack_folder(folder, tmp_path / str(number), labels=labels)
        assert contents(tmp_path / str(number)) == {"a": ([1], 2)}
    # Label volumes beside the volumes, named by their whole path.
    pack_folder("in", tmp_path / "pairs", pairs=("masks/{case}.npy", str(root / "{case}.npy")))
    assert contents(tmp_path / "pairs") == {"masks/a": ([2], 1)}


def test_two_folders_by_equal_names(write, tmp_path):
    files = {"case": 1, "case_0000": 2, "sub/b": 3}
    root = write({f"{folder}/{name}": value for folder in ("scans", "masks") for name, value in files.items()})
    pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")
    assert contents(tmp_path / "out") == {name: ([value], value) for name, value in files.items()}


@pytest.mark.parametrize(
    ("scan", "mask"), [("a_0000", "a"), ("a", "a_seg"), ("a", "A"), ("a", "sub/a"), ("sub/a", "a"), ("case_1", "case")]
)
def test_other_names_are_no_partners(write, tmp_path, scan, mask):
    root = write({f"scans/{scan}": 1, f"masks/{mask}": 2})
    with pytest.raises(FileNotFoundError, match=r"labels: expected a file of '.*' for each case, got none for 1 of 2"):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")


def test_two_label_volumes_of_one_name_are_both_named(write, tmp_path):
    root = write({"scans/a": 1, "masks/a": 2})
    (root / "masks" / "a.nii.gz").touch()
    with pytest.raises(
        ValueError, match=r"labels: expected one file for 'a'; move the other away, got .*a.nii.gz.*a.npy"
    ):
        pack_folder(root / "scans", tmp_path / "out", labels=root / "masks")


def test_the_folder_of_the_volumes_itself_is_refused(write, tmp_path):
    root = write({"a": 1, "a_seg": 2})
    with pytest.raises(FileNotFoundError, match="labels: expected another folder than that of the volumes"):
        pack_folder(root, tmp_path / "out", labels=root)


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


# Classes.


def test_folders_of_volumes_are_classes(write, tmp_path):
    pack_folder(write({"ill/a": 1, "ill/b": 2, "well/c": 3}), tmp_path / "out")
    data = PackedDataset(tmp_path / "out", keys=("files", "labels"))
    assert data.classes == ["ill", "well"]
    assert [(name, label.item()) for name, label in (data[n] for n in range(3))] == [
        ("ill/a.npy", 0), ("ill/b.npy", 0), ("well/c.npy", 1)
    ]  # fmt: skip


# Images.


@pytest.mark.parametrize("names", [("benign/b (1)", "benign/b (1)_mask"), ("a", "a-label", "b")])
def test_masks_among_images_are_an_error_unless_each_is_a_sample(tmp_path, names):
    image = pytest.importorskip("PIL.Image")
    for n, name in enumerate(names):
        path = tmp_path / "in" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (4, 4), n).save(path)
    with pytest.raises(ValueError, match=r"labels: expected files without label volumes, got '.*\.png'"):
        pack_folder(tmp_path / "in", tmp_path / "out")
    assert pack_folder(tmp_path / "in", tmp_path / "out", labels=False)["samples"] == len(names)


# What is refused.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"labels": "-lesion"},
            FileNotFoundError,
            "labels: expected a folder of label volumes; see also pairs=",
        ),
        ({"labels": True}, TypeError, "labels: expected a folder of label volumes, None or False"),
        ({"labels": "nowhere", "pairs": [("a.npy", None)]}, ValueError, "labels: expected None, because pairs= names"),
        (
            {"pairs": [("a.npy", None)], "classes": ["x"]},
            ValueError,
            "classes=.* does not apply to .npy files and label",
        ),
        ({"spacing": (1, 1)}, ValueError, "spacing=.* does not apply to .npy files"),
    ],
)
def test_what_is_refused(write, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        pack_folder(write({"a": 1}), tmp_path / "out", **options)


@pytest.mark.parametrize("place", ["scans", "masks"])
def test_a_folder_inside_of_what_is_read_is_refused(write, tmp_path, place):
    root = write({"scans/a": 1, "masks/a": 2})
    for out in (root / place / "packed", root / place / "sub" / "packed", root / place):
        with pytest.raises(ValueError, match=rf"out: expected a folder beside '.*{place}'"):
            pack_folder(root / "scans", out, labels=root / "masks")
    assert not (root / place / "packed").exists()


def test_patches_of_packed_pairs(write, tmp_path):
    pack_folder(write(BRATS), tmp_path / "out", pairs=(TWO_CHANNELS, "{case}/{case}-seg.npy"))
    data = PatchDataset(tmp_path / "out", (2, 2, 2), foreground=1.0, keys={"image": "volumes", "label": "labels"})
    assert data[1]["image"].shape == (2, 2, 2, 2)
    assert data[1]["label"].unique().tolist() == [20]
