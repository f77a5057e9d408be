"""Groups the files below a folder into samples: the channels of a volume, with its label volume or class."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_turbo._checks import expect
from lightning_turbo.data.folders import find_classes, list_files

__all__ = ["KINDS", "VOLUMES", "Layout", "find_images", "find_kind", "find_volumes"]

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
NIFTI = (".nii", ".nii.gz")
VOLUMES = (".npy", *NIFTI)
KINDS = {"images": IMAGES, ".npy files": (".npy",), "NIfTI files": NIFTI}

# Suffixes of label volumes beside their volumes, as in BraTS, ACDC, BIDS, KiTS and many others.
MASK = re.compile(r"(?:^|(?<=/)|[-_. ])(seg|dseg|segmentation|mask|msk|label|labels|gt)$", re.IGNORECASE)

# Further words in file names that mark a label volume, but do not say of which volume.
WORDS = re.compile(r"(d?seg|segmentations?|masks?|msk|labels?(tr|ts)?|gt|ground_?truth)\d*", re.IGNORECASE)
MARKS = ("-", "_", ".", " ", "/")  # separators between the name of a case and a suffix

Labels = str | os.PathLike[str] | bool | None


class Layout(NamedTuple):
    """The files of each sample.

    Attributes:
        volumes: The files of each sample, one per channel; ``None`` for a missing one.
        masks: The label volume of each sample, or ``None`` if it is missing; ``None`` if there are no label volumes.
        numbers: The class index of each sample; ``None`` if there are no classes.
        classes: Names of the classes.
    """

    volumes: list[list[Path | None]]
    masks: list[Path | None] | None
    numbers: list[int] | None
    classes: Sequence[str]


class _Description(NamedTuple):
    """The contents of a ``dataset.json`` of nnU-Net or the Medical Segmentation Decathlon."""

    ends: tuple[str, ...]
    classes: tuple[str, ...]


def find_kind(source: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files below a folder, and the files; for nnU-Net, the training files."""
    place = _images_in(source)
    found = {kind: files for kind, suffixes in KINDS.items() if (files := list_files(place, suffixes))}
    known = ", ".join(suffix for suffixes in KINDS.values() for suffix in suffixes)
    expect(found, "folder", str(place), f"a folder with files of type {known}", FileNotFoundError)
    expect(len(found) == 1, "folder", str(place), f"one kind of files, not {' and '.join(found)}")
    ((kind, files),) = found.items()
    return kind, files


def find_images(source: Path, files: list[Path], labels: Labels, classes: Sequence[str] | None) -> Layout:
    """Return the images of a folder and their classes."""
    stems = {_stem(path, source) for path in files}
    masks = {path for path, case in _masks_among(source, files).items() if case in stems}
    if masks and labels is not False:
        raise ValueError(
            f"labels: expected only images, got masks such as {str(min(masks))!r}. Move them away, or pass "
            "labels=False (--labels none), which skips them."
        )
    files = [path for path in files if path not in masks]
    names, numbers = _read_classes(source, files, classes)
    return Layout([[path] for path in files], None, numbers, names)


def find_volumes(
    source: Path,
    files: list[Path],
    labels: Labels,
    modalities: Sequence[str] | None,
    classes: Sequence[str] | None,
    *,
    allow_missing: bool,
) -> Layout:
    """Return the volumes of a folder with their channels, and their label volumes or classes.

    Args:
        source: The folder.
        files: The files in it.
        labels: A folder of label volumes, or the suffix of those beside the volumes. ``None`` recognizes them by name,
            and ``labelsTr`` of nnU-Net. ``False`` skips them.
        modalities: The suffixes of files that are channels. ``None`` reads them from nnU-Net's ``dataset.json``.
        classes: Names of the classes, which are subfolders. Default: the subfolders, if any.
        allow_missing: Whether a missing channel or label volume becomes ``None`` instead of an error.

    Raises:
        FileNotFoundError: If a channel or label volume is missing.
        ValueError: If files are ambiguous; the message names two of them.
    """
    described = _read_description(source)
    labels = _labels_of(source, labels)
    source = _images_in(source)
    modalities = _ends_of(files, source, modalities, described)
    masks = _find_masks(source, files, labels)
    volumes = _join_channels([path for path in files if path not in masks.beside], source, modalities)
    if not allow_missing:
        _check_channels(volumes, modalities or ("",))
    _check_no_masks(source, volumes, labels, classes)
    if labels is False or (labels is None and not masks.by_case):
        found, numbers = _read_classes_of_volumes(source, volumes, classes)
        return Layout([volume.files for volume in volumes], None, numbers, found)
    pairs = _pair(volumes, masks, None if allow_missing else str(labels or ""))
    return Layout([volume.files for volume in volumes], pairs, None, described.classes)


def _labels_of(source: Path, labels: Labels) -> Labels:
    """Return where the label volumes are; by default those for training in nnU-Net's layout."""
    images = source if source.name == "imagesTr" else source / "imagesTr"
    there = images.with_name("labelsTr")
    return there if labels is None and there.is_dir() and images.is_dir() else labels


def _ends_of(
    files: Iterable[Path], source: Path, modalities: Sequence[str] | None, described: _Description
) -> Sequence[str] | None:
    """Return the suffixes of the channels; by default those of nnU-Net, if every file has one of them."""
    if modalities is not None:
        return modalities
    found = described.ends and all(_stem(path, source).endswith(described.ends) for path in files)
    return described.ends if found else None


def _images_in(source: Path) -> Path:
    """Return the folder of the training images in nnU-Net's layout, or the folder itself."""
    training = source / "imagesTr"
    return training if training.is_dir() else source


def _stem(path: Path, root: Path) -> str:
    """Return the name of a file below a folder, without its suffix."""
    return re.sub(r"\.(nii\.gz|\w+)$", "", path.relative_to(root).as_posix(), flags=re.IGNORECASE)


def _read_description(source: Path) -> _Description:
    """Return the contents of a ``dataset.json`` in a folder or beside ``imagesTr`` and ``imagesTs``."""
    place = source.parent if source.name in ("imagesTr", "imagesTs") else source
    path = place / "dataset.json"
    if not path.is_file():
        return _Description((), ())
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: expected JSON as written by nnU-Net ({error}).") from error
    found = found if isinstance(found, Mapping) else {}
    channels = found.get("channel_names", found.get("modality"))
    ends = tuple(f"_{number:04}" for number in range(len(channels))) if isinstance(channels, Mapping) else ()
    labels = found.get("labels")
    return _Description(ends, _names_of_labels(labels) if isinstance(labels, Mapping) else ())


def _names_of_labels(labels: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ..., or none if the numbers are different."""
    if any(key.isdigit() for key in labels):  # {"0": "background", ...}, as in the first version of nnU-Net
        name_of = {str(number): str(name) for number, name in labels.items()}
    else:
        name_of = {str(number): str(name) for name, number in labels.items()}
    names = tuple(name_of.get(str(number), "") for number in range(len(name_of)))
    return names if all(names) else ()


def _read_classes(
    source: Path, files: list[Path], classes: Sequence[str] | None
) -> tuple[Sequence[str], list[int] | None]:
    """Return the classes of a folder and the class index of each file; none without subfolders."""
    beside = [file.name for file in files if file.parent == source]
    if classes is None and len(beside) == len(files):
        return (), None
    expect(not beside, "folder", str(source), f"all files in class folders, but found {beside[:1]}")
    suffixes = sorted({suffix for known in KINDS.values() for suffix in known})
    names, found, numbers = find_classes(source, suffixes, classes)
    number_of = dict(zip(found, numbers, strict=True))
    return names, [number_of[file] for file in files]


# Channels


class _Volume(NamedTuple):
    """A volume: its name without the suffixes of its channels, and the file of each channel."""

    name: str
    files: list[Path | None]

    @property
    def first(self) -> Path:
        return next(path for path in self.files if path is not None)


def _join_channels(files: Sequence[Path], source: Path, ends: Sequence[str] | None) -> list[_Volume]:
    """Combine files, which are channels, into volumes; without suffixes each file is a volume."""
    expect(files, "labels", str(source), "volumes beside the label volumes", FileNotFoundError)
    if ends is None:
        return [_Volume(_stem(path, source), [path]) for path in files]
    volumes: dict[str, dict[str, Path]] = {}
    others = []
    for path in files:
        stem = _stem(path, source)
        # The longest match, because a name that ends in "_0001" also ends in "1".
        end = max((end for end in ends if stem.endswith(end)), key=len, default=None)
        if end is None:
            others.append(path)
            continue
        name = stem.removesuffix(end)
        there = volumes.setdefault(name, {}).setdefault(end, path)
        expect(there is path, "modalities", [str(there), str(path)], f"one file for {end!r} of the volume {name!r}")
    # Channels of these volumes that were not requested are skipped; any other file may be misnamed.
    what = f"names that end in one of {list(ends)}, or belong to a volume that has these"
    for path in others:
        expect(not volumes.keys().isdisjoint(_cases_of(_stem(path, source))), "modalities", str(path), what)
    return [_Volume(name, [channels.get(end) for end in ends]) for name, channels in volumes.items()]


def _check_channels(volumes: Iterable[_Volume], ends: Sequence[str]) -> None:
    """Raise an error for a volume that lacks a channel."""
    for name, files in volumes:
        got = [end for end, path in zip(ends, files, strict=True) if path is not None]
        what = f"each of {list(ends)} for the volume {name!r}"
        expect(len(got) == len(ends), "modalities", got, what, FileNotFoundError)


def _read_classes_of_volumes(
    source: Path, volumes: Sequence[_Volume], classes: Sequence[str] | None
) -> tuple[Sequence[str], list[int] | None]:
    """Return the classes and the class index of each volume."""
    # A folder named like its only volume is a case, as in BraTS, not a class.
    cases = all(volume.first.parent.name == Path(volume.name).name for volume in volumes)
    return ((), None) if cases and classes is None else _read_classes(source, [each.first for each in volumes], classes)


# Label volumes


class _Masks(NamedTuple):
    """The label volumes.

    Attributes:
        by_case: Label volumes by the name of their case.
        by_short_name: Those with a further suffix, such as ``_seg``, by the name without it.
        beside: Label volumes among the files of the volumes.
    """

    by_case: dict[str, list[Path]]
    by_short_name: dict[str, list[Path]]
    beside: set[Path]


def _masks_among(source: Path, files: Iterable[Path]) -> dict[Path, str]:
    """Return the files that are named like label volumes, each with the name of its case."""
    stems = {path: _stem(path, source) for path in files}
    return {path: MASK.sub("", stem) for path, stem in stems.items() if MASK.search(stem)}


def _cases_of(name: str) -> list[str]:
    """Return the cases that a file may belong to, longest name first: its own name and those before a separator."""
    begins = [name[: at + (mark == "/")] for at, mark in enumerate(name) if mark in MARKS]
    return [name, *reversed(begins), *([] if "/" in name else [""])]


def _find_masks(source: Path, files: list[Path], labels: Labels) -> _Masks:
    """Return the label volumes selected by ``labels``, or those found beside the volumes."""
    if labels is False:
        named = {path for path in files if _is_named_as_mask(source, path)}
        return _masks_of({}, named if len(named) < len(files) else set())
    if labels is None or labels is True:
        return _masks_by_names(source, files)
    if Path(labels).resolve() == source.resolve():
        masks = _masks_by_names(source, files)
        ends = "-seg, _seg, _mask, _label, _gt and the like"
        what = f"names of label volumes that end in {ends}; pass any other suffix, such as labels='_lesion'"
        expect(masks.by_case, "labels", str(labels), what, FileNotFoundError)
        return masks
    if Path(labels).is_dir():
        there = list_files(labels, VOLUMES)
        return _masks_of({path: _stem(path, Path(labels)) for path in there}, set(there).intersection(files))
    return _masks_by_end(source, files, str(labels))


def _masks_by_names(source: Path, files: Iterable[Path]) -> _Masks:
    """Return the files that are named like label volumes, if other files belong to their cases."""
    cases = _masks_among(source, files)
    # In a folder that only contains masks, the masks are the volumes.
    others = {case for path in files if path not in cases for case in _cases_of(_stem(path, source))}
    return _masks_of({}, set()) if others.isdisjoint(cases.values()) else _masks_of(cases, set(cases))


def _is_named_as_mask(source: Path, path: Path) -> bool:
    """Return whether a folder, or the first or last word of the file name, marks a label volume."""
    *folders, stem = _stem(path, source).split("/")
    words = [word for word in re.split(r"[-_. ]", stem) if word and not word.isdigit()]
    return any(WORDS.fullmatch(word) for word in (*folders, *words[:1], *words[-1:]))


def _check_no_masks(source: Path, volumes: Sequence[_Volume], labels: Labels, classes: Sequence[str] | None) -> None:
    """Raise an error if some volumes are named like label volumes and no argument resolves this."""
    masks = [volume.first for volume in volumes if _is_named_as_mask(source, volume.first)]
    if labels is None and classes is None and 0 < len(masks) < len(volumes):
        raise ValueError(
            f"labels: expected only volumes, got {str(masks[0])!r}, which is named like a label volume. Pack the "
            "folder of the volumes alone, with labels= for the folder or the suffix of the label volumes; or skip them "
            "with labels=False (--labels none)."
        )


def _masks_by_end(source: Path, files: Iterable[Path], end: str) -> _Masks:
    """Return the files whose names have a suffix."""
    stems = {path: _stem(path, source) for path in files}
    cases = {path: stem.removesuffix(end) for path, stem in stems.items() if stem.endswith(end)}
    what = f"a folder, or the suffix of label volumes in {str(source)!r}"
    expect(cases, "labels", end, what, FileNotFoundError)
    # Further label volumes of these cases are skipped.
    named = set(cases.values())
    others = {path for path, case in _masks_among(source, files).items() if case in named}
    return _masks_of(cases, {*cases, *others})


def _masks_of(cases: Mapping[Path, str], beside: set[Path]) -> _Masks:
    by_case: dict[str, list[Path]] = {}
    by_short_name: dict[str, list[Path]] = {}
    for path, case in cases.items():
        by_case.setdefault(case, []).append(path)
        if MASK.search(case):
            by_short_name.setdefault(MASK.sub("", case), []).append(path)
    return _Masks(by_case, by_short_name, beside)


def _pair(volumes: Sequence[_Volume], masks: _Masks, place: str | None) -> list[Path | None]:
    """Return the label volume of each volume; raise an error for a missing one, unless ``place`` is ``None``."""
    pairs = [_label_of(volume, masks) for volume in volumes]
    _check_each_has_one_volume(volumes, pairs, masks)
    missing = [volume.name for volume, path in zip(volumes, pairs, strict=True) if path is None]
    if missing and place is not None:
        raise FileNotFoundError(
            f"labels: expected a label volume with the name of each volume (nnU-Net's _0000 and suffixes such as _seg "
            f"may differ), got none for {missing} {f'in {place!r}' if place else 'beside it'}. Skip these with "
            "skip_broken=True (--skip-broken), or skip all label volumes with labels=False (--labels none)."
        )
    return pairs


def _label_of(volume: _Volume, masks: _Masks) -> Path | None:
    """Return the label volume of a volume: one with its exact name before those with another suffix."""
    name = volume.name
    by_case = masks.by_case
    if masks.beside and name not in by_case:
        name = next((case for case in _cases_of(name) if case in by_case), name)
    candidates = by_case.get(name, [])
    if not candidates:
        short = name.removesuffix("_0000")
        found = (by_case.get(short, []), *(masks.by_short_name.get(each, []) for each in {name, short}))
        candidates = sorted(path for paths in found for path in paths)
    title = str(volume.first)
    what = f"one label volume for {title!r}; remove the other, or select a suffix, such as labels='_seg'"
    expect(len(candidates) < 2, "labels", list(map(str, candidates)), what)
    return candidates[0] if candidates else None


def _check_each_has_one_volume(volumes: Sequence[_Volume], pairs: Sequence[Path | None], masks: _Masks) -> None:
    """Raise an error if a label volume belongs to two volumes, which are probably channels of one."""
    volumes_of: dict[Path, list[str]] = {}
    for volume, path in zip(volumes, pairs, strict=True):
        if path is not None:
            volumes_of.setdefault(path, []).append(volume.name)
    for path, names in volumes_of.items():
        if len(names) > 1:
            case = next(case for case, paths in masks.by_case.items() if path in paths)
            ends = tuple(name.removeprefix(case) or "_0000" for name in names)
            raise ValueError(
                f"labels: expected one volume for the label volume {str(path)!r}, got {names}. If they are channels of "
                f"one volume, name their suffixes: modalities={ends} (--modalities={','.join(ends)})."
            )
