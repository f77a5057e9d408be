"""Finds the files of each sample below a folder: its channels, and its label volume or class."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lightning_turbo._checks import expect, is_list
from lightning_turbo.data.folders import find_classes, list_files

__all__ = ["Found", "Pairs", "describe_pairs", "find_samples", "name_below"]

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
NIFTI = (".nii", ".nii.gz")
VOLUMES = (".npy", *NIFTI)
KINDS = {"images": IMAGES, ".npy files": (".npy",), "NIfTI files": NIFTI}
SUFFIXES = (*IMAGES, *VOLUMES)

CASE = "{case}"
LABEL = "label"  # the column of a table
SHOWN = 10  # pairs that are printed; of more, the first and the last

# Words in the names of files and folders that mark a label volume, but do not say of which volume.
WORDS = re.compile(r"(d?seg|segmentations?|masks?|msk|labels?(tr|ts)?|gt|ground_?truth)\d*", re.IGNORECASE)

Pairs: TypeAlias = "str | os.PathLike[str] | Sequence[Any]"


class Found(NamedTuple):
    """The files of each sample.

    Attributes:
        kind: One of ``KINDS``.
        images: The files of each sample, one per channel.
        masks: The label volume of each sample; ``None`` if there are no label volumes.
        numbers: The class index of each sample; ``None`` if there are no classes.
        classes: Names of the classes.
    """

    kind: str
    images: list[list[Path]]
    masks: list[Path] | None = None
    numbers: list[int] | None = None
    classes: Sequence[str] = ()


def find_samples(source: Path, labels: Any, pairs: Pairs | None, classes: Sequence[str] | None) -> Found:
    """Return the samples of a folder.

    Args:
        source: The folder.
        labels: A folder with a label volume of the same name for each volume. ``None``: that of a ``dataset.json``, or
            no label volumes. ``False``: no label volumes, whatever files are named.
        pairs: What ``pack_folder`` takes.
        classes: Names of the classes, which are subfolders. Default: the subfolders, if any.

    Raises:
        FileNotFoundError: If there is nothing to pack, or a file has no partner.
        ValueError: If a file has two partners, or files may be label volumes and nothing says whose.
    """
    if pairs is not None:
        return _of_rows(_read_pairs(source, pairs))
    if labels is not None and labels is not False:
        return _of_rows(_pair_by_name(source, Path(labels)))
    described = _read_description(source, labels is None)
    return _without_label_volumes(source, labels, classes) if described is None else described


def describe_pairs(found: Found, source: Path) -> str:
    """Return which files make a volume, and which label volume belongs to it, a line each."""
    lines = []
    for number, paths in enumerate(found.images):
        label = "" if found.masks is None else f" -> {name_below(found.masks[number], source)}"
        lines.append(f"  {' + '.join(name_below(path, source) for path in paths)}{label}")
    if len(lines) > SHOWN:
        half = SHOWN // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} more ...", *lines[-half:]]
    what = "without label volumes" if found.masks is None else "with their label volumes"
    return "\n".join([f"{len(found.images)} volumes {what}:", *lines])


def name_below(path: Path, source: Path) -> str:
    """Return the path of a file below a folder, or the whole path if it is not below it."""
    return path.relative_to(source).as_posix() if path.is_relative_to(source) else str(path)


def _stem(path: Path, root: Path) -> str:
    """Return the name of a file below a folder, without its suffix."""
    return re.sub(r"\.(nii\.gz|\w+)$", "", path.relative_to(root).as_posix(), flags=re.IGNORECASE)


def _kind_of(files: Iterable[Path], place: str) -> str:
    """Return the one kind of files."""
    names = [path.name.lower() for path in files]
    found = [kind for kind, suffixes in KINDS.items() if any(name.endswith(suffixes) for name in names)]
    expect(found, "folder", place, f"a folder with files of type {', '.join(SUFFIXES)}", FileNotFoundError)
    expect(len(found) == 1, "folder", place, f"one kind of files, not {' and '.join(found)}")
    return found[0]


# With label volumes

Row: TypeAlias = "tuple[list[Path], Path | None]"


def _of_rows(rows: Sequence[Row], classes: Sequence[str] = ()) -> Found:
    """Return volumes with their label volumes, all of them or none, each file once."""
    images = [paths for paths, _ in rows]
    masks = [mask for _, mask in rows if mask is not None]
    what = "a label volume for each volume or none"
    expect(len(masks) in (0, len(rows)), "pairs", f"{len(masks)} of {len(rows)}", what)
    lengths = set(map(len, images))
    expect(len(lengths) == 1 and 0 not in lengths, "pairs", sorted(lengths), "the same number of channels in each row")
    files = list(itertools.chain(*images))
    _check_files([*files, *masks])
    kind = _kind_of(files, f"of {len(files)} files")
    others = [str(path) for path in masks if not path.name.lower().endswith(VOLUMES)]
    expect(kind != "images" and not others, "pairs", others[:1] or kind, "volumes, .npy or NIfTI files")
    return Found(kind, images, masks or None, None, classes)


def _check_files(files: Sequence[Path]) -> None:
    """Raise an error for a file that is missing or named twice. A link to nothing is reported when it is read."""
    for path in files:
        expect(path.is_file() or path.is_symlink(), "pairs", str(path), "files that exist", FileNotFoundError)
    twice = [path for path, count in Counter(map(os.path.abspath, files)).items() if count > 1]
    expect(not twice, "pairs", twice, "each file once")


def _pair_by_name(source: Path, labels: Path) -> list[Row]:
    """Return the volumes of a folder, each with the label volume of the same name in another folder."""
    expect(labels.is_dir(), "labels", str(labels), "a folder of label volumes; see also pairs=", FileNotFoundError)
    masks = list_files(labels, VOLUMES)
    files = _others(list_files(source, SUFFIXES), masks)
    expect(files, "labels", str(labels), f"another folder than that of the volumes, {str(source)!r}", FileNotFoundError)
    _kind_of(files, str(source))
    columns = [
        (str(root), _by_name([(_stem(path, root), path) for path in paths]))
        for root, paths in ((source, files), (labels, masks))
    ]
    return _joined("labels", columns)


def _others(files: Iterable[Path], masks: Iterable[Path]) -> list[Path]:
    """Return the files that are no label volumes, however the paths of the two are written."""
    taken = set(map(os.path.abspath, masks))
    return [path for path in files if os.path.abspath(path) not in taken]


def _by_name(files: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Return files by name; raise an error if two have the same."""
    found: dict[str, Path] = {}
    for name, path in files:
        other = found.setdefault(name, path)
        expect(other is path, "labels", [str(other), str(path)], f"one file for {name!r}; move the other away")
    return found


def _read_pairs(source: Path, pairs: Pairs) -> list[Row]:
    """Return the rows of a table, or the files that patterns find."""
    if isinstance(pairs, (str, os.PathLike)):
        return _read_table(source, Path(pairs))
    what = "the path of a CSV file, rows of (image, label), or two patterns with {case}"
    expect(is_list(pairs) and len(pairs) > 0, "pairs", pairs, what, TypeError)
    if CASE in repr(pairs):
        expect(len(pairs) == 2 and CASE in repr(pairs[0]), "pairs", pairs, "two patterns, (images, labels)")
        return _match(source, _as_list(pairs[0]), pairs[1])
    return [_read_row(source, row, what) for row in pairs]


def _read_row(source: Path, row: Any, what: str) -> Row:
    """Return the files of a row ``(image, label)``."""
    expect(is_list(row) and len(row) == 2, "pairs", row, what, TypeError)
    images, label = _as_list(row[0]), row[1]
    names = images if label is None else [*images, label]
    are_paths = all(isinstance(name, (str, os.PathLike)) and os.fspath(name) for name in names)
    expect(are_paths, "pairs", row, "paths in each row (image, label), or None for no label volume", TypeError)
    return [source / name for name in images], None if label is None else source / label


def _as_list(names: Any) -> list[Any]:
    return list(names) if is_list(names) else [names]


def _read_table(source: Path, path: Path) -> list[Row]:
    """Return the rows of a CSV file: its column ``label``, and all others as channels."""
    what = "an existing CSV file, or two patterns with {case}, (images, labels)"
    expect(path.is_file(), "pairs", str(path), what, FileNotFoundError)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"pairs: expected a CSV file in UTF-8, got {str(path)!r} ({error}). Save it as UTF-8."
        ) from error
    with io.StringIO(text, newline="") as file:
        table = csv.DictReader(file)
        columns = list(table.fieldnames or ())
        what = f"a CSV file whose first line names the columns: one for each channel, and {LABEL!r}"
        expect(LABEL in columns and len(columns) > 1, "pairs", columns, what)
        rows = list(table)
    for number, row in enumerate(rows, 2):
        full = None not in row and all(row.values())
        expect(full, f"line {number} of {str(path)!r}", list(row.values()), f"a file for each of {columns}")
    expect(rows, "pairs", str(path), "at least one row")
    return [([source / row[name] for name in columns if name != LABEL], source / row[LABEL]) for row in rows]


def _match(source: Path, images: list[Any], label: Any) -> list[Row]:
    """Return the files that patterns find, joined by what stands for ``{case}``."""
    masks = {} if label is None else _find(source, label)
    columns = []
    for each in images:
        found = _find(source, each)
        # The pattern "{case}.nii.gz" also fits the label volumes "{case}_seg.nii.gz" beside the volumes.
        kept = set(_others(found.values(), masks.values()))
        columns.append((each, {case: path for case, path in found.items() if path in kept}))
    return _joined("pairs", columns if label is None else [*columns, (label, masks)], has_masks=label is not None)


def _find(source: Path, pattern: Any) -> dict[str, Path]:
    """Return the files that fit a pattern, by the name of their case."""
    valid = isinstance(pattern, (str, os.PathLike)) and CASE in os.fspath(pattern)
    expect(valid, "pairs", pattern, f"patterns with {CASE}, such as 'scans/{CASE}.nii.gz'")
    first, *others = str(source / pattern).split(CASE)
    known = re.compile(re.escape(first) + "(?P<case>[^/]+)" + "(?P=case)".join(map(re.escape, others)))
    names = glob.glob("*".join(map(glob.escape, (first, *others))))
    return {match["case"]: Path(match[0]) for match in map(known.fullmatch, names) if match is not None}


def _joined(name: str, columns: Sequence[tuple[str, Mapping[str, Path]]], *, has_masks: bool = True) -> list[Row]:
    """Return a row for each case; the last column is that of the label volumes."""
    cases = sorted(set().union(*(files for _, files in columns)))
    expect(cases, name, [column for column, _ in columns], "patterns that some files fit", FileNotFoundError)
    for column, files in columns:
        missing = [case for case in cases if case not in files]
        if missing:
            raise FileNotFoundError(
                f"{name}: expected a file of {column!r} for each case, got none for {len(missing)} of {len(cases)}: "
                f"{missing[:SHOWN]}. Say which files belong together with pairs= (--pairs), patterns or a list."
            )
    rows = [[files[case] for _, files in columns] for case in cases]
    return [(row[:-1], row[-1]) if has_masks else (row, None) for row in rows]


def _read_description(source: Path, with_labels: bool) -> Found | None:
    """Return the samples of nnU-Net's or the Medical Segmentation Decathlon's ``dataset.json``, if there is one."""
    images = source if source.name in ("imagesTr", "imagesTs") else source / "imagesTr"
    path = images.parent / "dataset.json"
    if not (path.is_file() and images.is_dir()):
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: expected JSON as written by nnU-Net ({error}).") from error
    expect(isinstance(found, Mapping), str(path), found, "JSON as written by nnU-Net")
    labels = found.get("labels")
    is_training = with_labels and images.name == "imagesTr"
    classes = _names_of_labels(labels) if is_training and isinstance(labels, Mapping) else ()
    return _of_rows(_listed(images, found, is_training) or _numbered(images, found, is_training), classes)


def _listed(images: Path, found: Mapping[str, Any], with_labels: bool) -> list[Row]:
    """Return the files that the Decathlon lists, if they are there; nnU-Net lists them without ``_0000``.

    A training case is a mapping with ``image`` and ``label``, a test case the path of its image.
    """
    listed = found.get("training" if images.name == "imagesTr" else "test")
    if not isinstance(listed, list):
        return []
    root = images.parent
    cases = [each if isinstance(each, Mapping) else {"image": each} for each in listed]
    if not any((root / str(case.get("image", ""))).is_file() for case in cases):
        return []
    names = ("image", "label") if with_labels else ("image",)
    for case in cases:
        what = f"paths of {' and '.join(names)} for each case"
        expect(all(isinstance(case.get(name), str) for name in names), "dataset.json", dict(case), what)
    return [([root / case["image"]], root / case["label"] if with_labels else None) for case in cases]


def _numbered(images: Path, found: Mapping[str, Any], with_labels: bool) -> list[Row]:
    """Return nnU-Net's files: ``imagesTr/{case}_0000.nii.gz``, one per channel, and ``labelsTr/{case}.nii.gz``."""
    channels = found.get("channel_names", found.get("modality"))
    expect(isinstance(channels, Mapping) and channels, "channel_names of dataset.json", channels, "names of channels")
    files = list_files(images, SUFFIXES)
    kind = _kind_of(files, str(images))
    expect(kind != "images", "folder", str(images), "volumes, .npy or NIfTI files, not images")
    endings = {path.name[len(Path(_stem(path, images)).name) :] for path in files}
    ending = found.get("file_ending", min(endings))
    patterns = [f"{images.name}/{CASE}_{number:04}{ending}" for number in range(len(channels))]
    rows = _match(images.parent, patterns, f"labelsTr/{CASE}{ending}" if with_labels else None)
    left = _others(files, itertools.chain(*(paths for paths, _ in rows)))
    what = f"files named {CASE}_0000{ending} to {CASE}_{len(channels) - 1:04}{ending}, one for each of its channels"
    expect(not left, "dataset.json", [path.name for path in left[:SHOWN]], what)
    return rows


def _names_of_labels(labels: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ..., or none if the numbers are different."""
    if any(key.isdigit() for key in labels):  # {"0": "background", ...}, as in the first version of nnU-Net
        name_of = {str(number): str(name) for number, name in labels.items()}
    else:
        name_of = {str(number): str(name) for name, number in labels.items()}
    names = tuple(name_of.get(str(number), "") for number in range(len(name_of)))
    return names if all(names) else ()


# Without label volumes


def _without_label_volumes(source: Path, labels: Any, classes: Sequence[str] | None) -> Found:
    """Return the files of a folder, each of which is a sample; subfolders are classes."""
    files = list_files(source, SUFFIXES)
    kind = _kind_of(files, str(source))
    if labels is None and classes is None:
        _check_no_masks(source, files)
    images = [[path] for path in files]
    beside = [file.name for file in files if file.parent == source]
    if classes is None and len(beside) == len(files):
        return Found(kind, images)
    expect(not beside, "folder", str(source), f"all files in class folders, but found {beside[:1]}")
    if classes is None and kind != "images":
        _check_no_cases(source, files)
    names, found, numbers = find_classes(source, SUFFIXES, classes)
    number_of = dict(zip(found, numbers, strict=True))
    return Found(kind, images, None, [number_of[file] for file in files], names)


def _check_no_masks(source: Path, files: Sequence[Path]) -> None:
    """Raise an error if some files, but not all, are named like label volumes."""
    masks = [path for path in files if _is_named_as_mask(_stem(path, source))]
    if 0 < len(masks) < len(files):
        raise ValueError(
            f"labels: expected files without label volumes, got {str(masks[0])!r}, which is named like one. Say which "
            "label volume belongs to which volume, with labels= for a folder or pairs= (--pairs); or pass labels=False "
            "(--labels none) if each file is a sample."
        )


def _is_named_as_mask(stem: str) -> bool:
    """Return whether a folder, or the first or last word of the file name, marks a label volume."""
    *folders, name = stem.split("/")
    words = [word for word in re.split(r"[-_. ]", name) if word and not word.isdigit()]
    return any(WORDS.fullmatch(word) for word in (*folders, *words[:1], *words[-1:]))


def _check_no_cases(source: Path, files: Sequence[Path]) -> None:
    """Raise an error if subfolders hold files of the same names, as those of cases do, and those of classes do not."""
    names: dict[str, set[str]] = {}
    for path in files:
        folder, _, name = _stem(path, source).partition("/")
        names.setdefault(folder, set()).add(name.replace(folder, ""))
    first, *others = names.values()
    alike = bool(others) and all(each == first for each in others) and (len(first) > 1 or "" in first)
    if alike:
        shown = sorted(path.name for path in files if path.relative_to(source).parts[0] == next(iter(names)))
        raise ValueError(
            f"classes: expected folders that are classes, got {list(names)[:2]}, whose files have the same names, "
            f"{shown[:SHOWN]}, as if each were a case. Say which files belong together with pairs= (--pairs), or pass "
            "classes= if they are classes."
        )
