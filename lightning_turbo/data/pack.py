"""``pack_folder``: pack a folder of images or volumes into arrays for ``PackedDataset``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from lightning_turbo._checks import check_functions, check_switches, expect, is_size
from lightning_turbo._optional import require
from lightning_turbo.data.folders import find_classes, list_files

__all__ = ["CONTENTS", "pack_folder"]

CONTENTS = "packed.json"
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
NIFTI = (".nii", ".nii.gz")
KINDS = {"images": IMAGES, ".npy files": (".npy",), "NIfTI files": NIFTI}
READERS = {"images": "PIL", "NIfTI files": "nibabel"}
GREY = ("1", "L", "LA", "La")

VOLUMES = {"size", "labels", "classes"}
OPTIONS = {
    "images": {"size", "mode", "classes"},
    ".npy files": VOLUMES,
    "NIfTI files": VOLUMES,
    "label volumes": {"size", "labels"},
}
SIZES = {
    2: "(height, width) in pixels, each at least 1, or None",
    3: "(depth, height, width) in voxels, each at least 1, or None",
}

Row = dict[str, np.ndarray]
Job = Callable[[], Row]
Progress = Callable[[int, int], Any]


def pack_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    size: Sequence[int] | None = None,
    mode: str | None = None,
    classes: Sequence[str] | None = None,
    skip_broken: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> dict[str, Any]:
    """Pack the images or volumes below ``folder`` into arrays for ``PackedDataset``.

    Images become ``images.npy``, uint8 (samples, channels, height, width), rotated as their EXIF orientation says and
    without transparency. ``.npy`` and NIfTI files become ``volumes.npy`` (samples, ...) with their dtype and order of
    axes; the fourth axis of a NIfTI file, its channels, comes first. NIfTI files also give ``affine.npy``, float64
    (samples, 4, 4) from voxels to millimetres, and ``spacing.npy``, float64 (samples, 3) in millimetres, which
    ``PackedDataset`` reads if ``keys`` names them.

    Subfolders are classes, and ``labels.npy`` holds int64 labels. With ``labels=`` it holds int16 label volumes
    instead. Hidden files and folders are ignored.

    Args:
        folder: Folder with the files.
        out: Folder to write. It is created only if everything succeeds.
        labels: Folder with a label volume for each volume, of the same name (nnU-Net's ``_0000`` may be left out).
        size: (height, width) in pixels to resize images to, or (depth, height, width) in voxels to crop or pad volumes
            to about their centre, with their minimum, and label volumes with 0. Default: all files have one size.
        mode: ``"RGB"`` or ``"L"`` (grey) for all images. Default: grey if all images are grey, else ``"RGB"``.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass those of the training
            set if a class may be missing.
        skip_broken: Whether to skip files that cannot be packed and list them in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it holds a packed dataset and nothing else.
        progress: Called with the number of finished files and of all files.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names), ``classes``, ``samples``, and ``skipped`` (a number).

    Raises:
        FileExistsError: If ``out`` exists and ``overwrite`` is not set, or it holds something else.
        FileNotFoundError: If ``folder`` is missing or has nothing to pack, or a label volume is missing.
        MissingExtraError: If Pillow is missing for images, or nibabel for NIfTI files.
        TypeError: If a switch is not a bool, ``progress`` is not callable, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not fit the files, files differ in shape, dtype or kind, some cannot be packed
            (the message names all of them), or a subfolder is empty or not in ``classes``.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "scans").mkdir()
        >>> for n in range(3):
        ...     np.save(root / "scans" / f"{n}.npy", np.full((2, 2), n))
        >>> pack_folder(root / "scans", root / "packed")["samples"]
        3
    """
    check_switches(overwrite=overwrite, skip_broken=skip_broken)
    check_functions(progress=progress)
    source, target = Path(folder), Path(out)
    _check_folders(source, target, overwrite)
    kind, files = _find_files(source)
    _check_options(kind, {"labels": labels, "size": size, "mode": mode, "classes": classes})
    with _replace_folder(target) as unfinished:
        names, files, numbers = _read_classes(source, kind, files, labels, classes)
        images = kind == "images"
        jobs = _list_images(files, mode, size) if images else _list_volumes(files, source, labels, size)
        rows, broken = _write_rows(unfinished, files, numbers, jobs, progress)
        _report_broken(broken, len(files), target, skip_broken)
        arrays = [name for name in rows.first if name not in ("affine", "spacing")]
        contents = {"arrays": arrays, "classes": list(names), "samples": rows.count, "skipped": len(broken)}
        (unfinished / CONTENTS).write_text(json.dumps(contents, indent=1))
    return contents


def _check_folders(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a missing source, and a target that is neither new nor a packed dataset to overwrite."""
    expect(source.is_dir(), "folder", str(source), "an existing folder", FileNotFoundError)
    here, there = source.resolve(), target.resolve()
    nested = here.is_relative_to(there) or (target.exists() and there.is_relative_to(here))
    expect(not nested, "out", str(target), f"a folder beside {str(source)!r}")
    what = "a folder that does not exist, or with overwrite=True (--overwrite) one that holds only a packed dataset"
    replaceable = not target.exists() or (overwrite and _is_packed(target))
    expect(replaceable, "out", str(target), what, FileExistsError)


def _is_packed(folder: Path) -> bool:
    """Return whether a folder is empty or holds a packed dataset and nothing else."""
    found = list(folder.glob("*"))
    others = [path.name for path in found if path.is_dir() or path.suffix != ".npy"]
    return folder.is_dir() and (not found or others == [CONTENTS])


def _find_files(source: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files below a folder, and the files."""
    found = {kind: files for kind, suffixes in KINDS.items() if (files := list_files(source, suffixes))}
    known = ", ".join(itertools.chain(*KINDS.values()))
    expect(found, "folder", str(source), f"a folder with files that end in {known}", FileNotFoundError)
    expect(len(found) == 1, "folder", str(source), f"one kind of files, not {' and '.join(found)}")
    ((kind, files),) = found.items()
    if kind in READERS:
        require(READERS[kind], f"pack_folder with {kind}")
    return kind, files


def _check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse options of other kinds of files, and wrong values."""
    kinds = [kind] if options["labels"] is None else [kind, "label volumes"]
    for name, value in options.items():
        if value is not None and not all(name in OPTIONS[each] for each in kinds):
            raise ValueError(f"{name}={value!r} does not go with {' and '.join(kinds)}. Leave it out.")
    axes = 2 if kind == "images" else 3
    size, mode = options["size"], options["mode"]
    expect(size is None or is_size(size, axes), "size", size, SIZES[axes])
    expect(mode in (None, "RGB", "L"), "mode", mode, "'RGB', 'L' (grey), or None")


@contextlib.contextmanager
def _replace_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside ``target`` that replaces it if the block succeeds."""
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if target.exists():
            shutil.rmtree(target)
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_classes(
    source: Path, kind: str, files: list[Path], labels: Any, classes: Sequence[str] | None
) -> tuple[Sequence[str], list[Path], list[int] | None]:
    """Return the classes of a folder, its files and their labels, or none without subfolders or with label volumes."""
    beside = [file.name for file in files if file.parent == source]
    if labels is not None or (classes is None and len(beside) == len(files)):
        return (), files, None
    expect(not beside, "folder", str(source), f"all files in the folders of the classes, but found {beside[:1]}")
    return find_classes(source, KINDS[kind], classes)


def _list_images(files: list[Path], mode: str | None, size: Sequence[int] | None) -> list[Job]:
    """Return for each image a function that reads it."""
    if mode is None:
        mode = "L" if all(map(_is_grey, files)) else "RGB"
    return [partial(_read_image, file, mode, size) for file in files]


def _list_volumes(files: list[Path], source: Path, labels: Any, size: Sequence[int] | None) -> list[Job]:
    """Return for each volume a function that reads it, with its label volume if there are any."""
    masks = [None] * len(files) if labels is None else _find_labels(files, source, Path(labels))
    return [partial(_read_volume, file, mask, size) for file, mask in zip(files, masks, strict=True)]


def _find_labels(files: Sequence[Path], source: Path, labels: Path) -> list[Path]:
    """Return the label volume of each volume: the file with the same relative path, apart from the suffix."""
    there = {_stem(path.relative_to(labels)): path for path in list_files(labels, (".npy", *NIFTI))}
    names = [_stem(path.relative_to(source)) for path in files]
    if missing := sorted(set(names) - set(there)):
        raise FileNotFoundError(
            f"labels: expected a label volume with the name of each volume (nnU-Net's _0000 may be left out), got none "
            f"for {missing} in {str(labels)!r}."
        )
    return [there[name] for name in names]


def _stem(path: Path) -> str:
    return re.sub(r"(_0000)?\.(npy|nii|nii\.gz)$", "", path.as_posix(), flags=re.IGNORECASE)


class _Rows:
    """``.npy`` files that grow row by row. Mapped memory would crash the process on a full disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.first: Row = {}
        self._path: Path | None = None

    def append(self, path: Path, row: Row) -> None:
        """Write a row of the same names, shapes and dtypes as the first one."""
        if not self.count:
            self.first, self._path = row, path
            self.write_headers("wb")
        for name, array in row.items():
            if (array.shape, array.dtype) != (self.first[name].shape, self.first[name].dtype):
                raise ValueError(
                    f"Expected {name} of {self.first[name].dtype} {self.first[name].shape} as in {str(self._path)!r}, "
                    f"got {array.dtype} {array.shape} of {str(path)!r}. Pass size= (--size) for files of unequal size."
                )
            with (self.folder / f"{name}.npy").open("ab") as file:
                file.write(array.tobytes())
        self.count += 1

    def write_headers(self, mode: str = "r+b") -> None:
        """Write the number of rows into the headers, in which numpy reserves space for it."""
        for name, first in self.first.items():
            descr, shape = np.lib.format.dtype_to_descr(first.dtype), (self.count, *first.shape)
            with (self.folder / f"{name}.npy").open(mode) as file:
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(cast("Any", file), header)


def _write_rows(
    folder: Path, files: list[Path], numbers: list[int] | None, jobs: list[Job], progress: Progress | None
) -> tuple[_Rows, list[str]]:
    """Write a row for each file that can be read, and return the errors of the others."""
    rows, broken = _Rows(folder), []
    for done, (path, read) in enumerate(zip(files, jobs, strict=True)):
        label = {} if numbers is None else {"labels": np.asarray(numbers[done], dtype=np.int64)}
        try:
            row = read() | label
        except Exception as error:  # Pillow and nibabel raise many kinds of errors
            broken.append(f"{str(path)!r}: {error}")
        else:
            rows.append(path, row)
        if progress is not None:
            progress(done + 1, len(jobs))
    rows.write_headers()
    return rows, broken


def _report_broken(broken: list[str], total: int, target: Path, skip: bool) -> None:
    """Write the list of broken files beside ``target``, or raise an error that names all of them."""
    if skip and len(broken) < total:
        target.with_name(f"{target.name}.broken.txt").write_text("".join(f"{line}\n" for line in broken))
    elif broken:
        raise ValueError(
            f"{len(broken)} of {total} files cannot be packed:\n" + "\n".join(broken) + "\nRepair or remove them, or "
            "skip them with skip_broken=True (--skip-broken)."
        )


def _is_grey(path: Path) -> bool:
    """Return whether an image is grey, by its header; a broken one, which is reported later, may be."""
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(path) as image:  # Pillow raises many kinds of errors
        return image.mode in GREY or image.mode[0] in "IF"
    return True


def _read_image(path: Path, mode: str, size: Sequence[int] | None) -> Row:
    """Decode an image to uint8 (channels, height, width)."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        _check_pixels(opened)
        image = ImageOps.exif_transpose(opened).convert(mode)
    if size is not None and (image.height, image.width) != tuple(size):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.atleast_3d(np.asarray(image))
    return {"images": pixels.transpose(2, 0, 1)}


def _check_pixels(image: Any) -> None:
    """Refuse pixels that Pillow would clip or truncate to 8 bits, and images of several pages."""
    stored = re.search(r"\w+;16[BLN]", str(getattr(image, "tile", "")))  # how Pillow decodes 16-bit colours
    kind = stored[0] if stored else image.mode
    expect(not stored and image.mode[0] not in "IF", "pixels", kind, "8 bits per channel; save more as .npy files")
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    expect(pages == 1, "pages", pages, "1; save volumes as .npy files")


def _read_volume(path: Path, label: Path | None, size: Sequence[int] | None) -> Row:
    """Read a volume with its label volume, affine and spacing, cropped or padded to ``size`` about the centre."""
    volume, affine = _load_volume(path)
    row = {"volumes": volume}
    if label is not None:
        row["labels"] = _load_label(label, volume, affine)
    start = np.zeros(3, dtype=int)
    if size is not None:
        start = np.subtract(volume.shape[-3:], size) // 2
        row = {name: _fit(array, start, size, 0 if name == "labels" else array.min()) for name, array in row.items()}
    if affine is not None:
        affine[:3, 3] += affine[:3, :3] @ start
        row |= {"affine": affine, "spacing": np.linalg.norm(affine[:3, :3], axis=0)}
    return row


def _load_volume(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a volume, and the affine of a NIfTI file."""
    if path.suffix.lower() == ".npy":
        return np.load(path), None
    import nibabel

    file: Any = nibabel.load(path)
    volume = np.asanyarray(file.dataobj)
    if volume.dtype == np.float64 and file.get_data_dtype() != np.float64:  # nibabel applied slope and intercept
        volume = volume.astype(np.float32)
    return (np.moveaxis(volume, 3, 0) if volume.ndim == 4 else volume), np.array(file.affine, dtype=np.float64)


def _load_label(path: Path, volume: np.ndarray, affine: np.ndarray | None) -> np.ndarray:
    """Return a label volume as int16 if it fits its volume."""
    label, other = _load_volume(path)
    name, whole = f"label volume {str(path)!r}", label.astype(np.int16)
    expect(label.shape == volume.shape[-3:], name, label.shape, f"the shape {volume.shape[-3:]}")
    equal = affine is None or other is None or np.allclose(affine, other, atol=1e-3)
    expect(equal, name, other, "the affine of its volume")
    expect(np.array_equal(whole, label), name, label.dtype, "whole numbers of 16 bits")
    return whole


def _fit(array: np.ndarray, start: np.ndarray, size: Sequence[int], fill: Any) -> np.ndarray:
    """Return the window of ``size`` voxels from ``start`` on, padded with ``fill`` outside of the array."""
    before = np.maximum(0, -start)
    after = np.maximum(0, start + size - array.shape[-3:])
    margins = [(0, 0)] * (array.ndim - 3) + list(zip(before, after, strict=True))
    padded = np.pad(array, margins, constant_values=fill)
    return padded[(..., *(slice(first, first + length) for first, length in zip(start + before, size, strict=True)))]
