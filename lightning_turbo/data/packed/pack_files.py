"""``pack_folder``: packs a folder of images or volumes for ``PackedDataset``."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_turbo._checks import expect, is_list, is_number, is_size
from lightning_turbo._optional import require
from lightning_turbo.data.packed.packing import Packing, Progress
from lightning_turbo.data.packed.pairs import Found, Pairs, describe_pairs, find_samples, name_below
from lightning_turbo.data.packed.volumes import read_volume, warn_of_two_affines

__all__ = ["pack_folder"]

READERS = {"images": "PIL", "NIfTI files": "nibabel"}
GRAY = ("1", "L", "LA", "La")
BESIDE = ("affine", "spacing", "files")  # fields that are only read if ``keys`` names them

Row = dict[str, Any]


def pack_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | bool | None = None,
    pairs: Pairs | None = None,
    spacing: Sequence[float] | None = None,
    size: Sequence[int] | None = None,
    mode: str | None = None,
    classes: Sequence[str] | None = None,
    compress: bool | Sequence[int] = False,
    num_workers: int = 0,
    skip_broken: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pack the images or volumes below ``folder``, as they are or resized, for ``PackedDataset``.

    Images become the field ``images``, uint8 (channels, height, width), rotated according to their EXIF orientation and
    without transparency. ``.npy`` and NIfTI files become ``volumes`` with their dtype, shape and axis order, except
    that the fourth axis of a NIfTI file, its channels, comes first, or is dropped if it has one entry. NIfTI files also
    provide ``affine``, float64 (4, 4) from voxels to millimeters, and ``spacing``, float64 (3,) in millimeters.
    ``files`` holds the path relative to ``folder``. ``PackedDataset`` only reads these three if ``keys`` names them.

    Subfolders are classes, and ``labels`` holds int64 class indices. With label volumes it holds those instead, as
    int16; the positions of up to 10,000 voxels of each class above 0 are stored for ``PatchDataset(foreground=)``, and
    10,000 foreground intensities for ``intensities``. Hidden files and folders are skipped.

    Folders of nnU-Net and the Medical Segmentation Decathlon (``imagesTr``, ``labelsTr``, ``dataset.json``) are read as
    they are. Which label volume belongs to which volume is printed before anything is packed. A file without a partner,
    or with two, is an error.

    The folder ``out`` appears once everything is in it, as with ``pack``.

    Args:
        folder: Folder to read.
        out: Folder to write, outside ``folder``.
        labels: Folder with one label volume per volume, of the same name below it. ``False``: no label volumes,
            whatever the files are named. Default: those of ``dataset.json``, or none.
        pairs: Which files belong together; their paths are relative to ``folder``, or absolute. A list of rows
            ``(image, label)``; or the path of a CSV file, itself relative to the working directory, whose first line
            names its columns, of which one is ``label``; or two patterns, such as ``("volume-{case}.nii",
            "segmentation-{case}.nii")``, in which ``{case}`` stands for the same name, within a folder or a file. A
            list of files, columns or patterns in place of ``image`` are the channels of one volume. ``None`` in place
            of ``label``: no label volumes.
        spacing: Voxel spacing in millimeters, in the order of the axes, to resample NIfTI files to: volumes with cubic
            splines to float32, label volumes by nearest voxel. The first voxel keeps its position. Needs SciPy.
        size: (height, width) in pixels to resize images to, or (depth, height, width) in voxels to crop or pad volumes
            to about their center; volumes are padded with their minimum, label volumes with 0. Default: the sizes of
            the files.
        mode: ``"RGB"`` or ``"L"`` (grayscale) for all images. Default: ``"L"`` if all images are gray, else ``"RGB"``.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass the classes of the
            training set if some may be missing here.
        compress: Whether to compress volumes with blosc2, in chunks of a size that it chooses; or the chunk size,
            ideally the patch size.
        num_workers: Number of worker processes that read files.
        skip_broken: Whether to skip what cannot be packed, such as damaged files and broken links, and list it in
            ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it contains a packed dataset and nothing else.
        progress: Called with the number of finished samples and the total.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names), ``classes`` (from nnU-Net's ``dataset.json`` if there are
            label volumes), ``samples``, ``skipped`` (a number), ``foreground``, the name of the label volumes or
            ``None``, and ``intensities``.

    Raises:
        FileExistsError: If ``out`` exists without ``overwrite``, or contains anything else.
        FileNotFoundError: If ``folder`` is missing or has nothing to pack, or a file has no partner.
        MissingExtraError: If Pillow (images), nibabel (NIfTI files), SciPy (``spacing``) or blosc2 (``compress``) is
            missing.
        OSError: If the disk is full.
        TypeError: If a switch is not a bool, ``progress`` is not callable, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not match the files, files differ in kind, a file has two partners, files may be
            label volumes and no argument says whose, some files cannot be packed (the message lists all of them,
            including those with NaN or infinite voxels), or a subfolder is empty or not in ``classes``.

    Warns:
        TurboWarning: If sform and qform of NIfTI files differ. The sform is used.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "scans").mkdir()
        >>> for n in range(3):
        ...     np.save(root / "scans" / f"{n}.npy", np.full((2, 2 + n), n))
        >>> pack_folder(root / "scans", root / "packed")["samples"]
        3
    """
    # All arguments are checked against the file names before any file is read.
    source = Path(folder).absolute()  # the name of "." tells whether it is nnU-Net's
    _check_folders(source, Path(out), labels)
    packing = Packing(Path(out), compress, num_workers, skip_broken, overwrite, progress)
    expect(labels is None or pairs is None, "labels", labels, "None, because pairs= names the label volumes")
    found = find_samples(source, labels, pairs, classes)
    is_labeled = found.masks is not None
    options = {"spacing": spacing, "size": size, "mode": mode, "classes": classes}
    _check_options(found.kind, options, is_labeled or pairs is not None)
    read = _reader(found, mode, size, spacing)
    if is_labeled or len(found.images[0]) > 1:
        print(describe_pairs(found, source))  # noqa: T201 - to be seen before hours of packing
    contents = {"classes": list(found.classes), "foreground": "labels" if is_labeled else None}
    return packing.write(_Files(source, found, read), contents, beside=BESIDE)


def _reader(
    found: Found, mode: str | None, size: Sequence[int] | None, spacing: Sequence[float] | None
) -> Callable[..., Row]:
    """Return a function that reads the files of a sample, after checking that the packages for it are there."""
    if found.kind in READERS:
        require(READERS[found.kind], f"pack_folder with {found.kind}")
    if found.kind == "images":
        return partial(_read_image, mode=_find_mode([path for (path,) in found.images], mode), size=size)
    if spacing is not None:
        require("scipy", "pack_folder(spacing=)")
    if found.kind == "NIfTI files":
        warn_of_two_affines([*itertools.chain(*found.images), *(found.masks or ())])
    return partial(read_volume, spacing=spacing, size=size)


def _check_folders(source: Path, target: Path, labels: Any) -> None:
    """Raise an error if the source is missing, or the target is inside or around a folder that is read."""
    expect(source.is_dir(), "folder", str(source), "an existing folder", FileNotFoundError)
    expect(labels is not True, "labels", labels, "a folder of label volumes, None or False", TypeError)
    there = target.resolve()
    for place in (source, *([] if labels is None or isinstance(labels, bool) else [Path(labels)])):
        here = place.resolve()
        nested = here.is_relative_to(there) or (place.is_dir() and there.is_relative_to(here))
        expect(not nested, "out", str(target), f"a folder beside {str(place)!r}")


def _check_options(kind: str, options: dict[str, Any], is_labeled: bool) -> None:
    """Raise an error for options that do not apply to this kind of files, and for invalid values."""
    images = kind == "images"
    refused = [] if images else ["mode"]
    refused += ["classes"] if is_labeled else []
    refused += [] if kind == "NIfTI files" else ["spacing"]
    for name in refused:
        if options[name] is not None:
            kinds = f"{kind} and label volumes" if is_labeled else kind
            raise ValueError(f"{name}={options[name]!r} does not apply to {kinds}. Leave it out.")
    axes, lengths = (2, "(height, width) in pixels") if images else (3, "(depth, height, width) in voxels")
    size, mode, spacing = options["size"], options["mode"], options["spacing"]
    expect(size is None or is_size(size, axes), "size", size, f"{lengths}, each at least 1, or None")
    expect(mode in (None, "RGB", "L"), "mode", mode, "'RGB', 'L' (grayscale), or None")
    what = "three distances in millimeters above 0, or None"
    expect(spacing is None or _is_spacing(spacing), "spacing", spacing, what)


def _is_spacing(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(is_number(each) and each > 0 for each in value)


class _Files:
    """The samples of a folder, each read from its files on access."""

    def __init__(self, source: Path, found: Found, read: Callable[..., Row]) -> None:
        self.source = source
        self.found = found
        self.read = read

    def __len__(self) -> int:
        return len(self.found.images)

    def __getitem__(self, index: int) -> Row:
        found = self.found
        row = self.read(found.images[index], None if found.masks is None else found.masks[index])
        if found.numbers is not None:
            row["labels"] = np.asarray(found.numbers[index], dtype=np.int64)
        return {**row, "files": name_below(found.images[index][0], self.source)}

    def name_of(self, index: int) -> str:
        """Return the name of a sample for error messages."""
        return repr(str(self.found.images[index][0]))


def _find_mode(files: list[Path], mode: str | None) -> str:
    """Return the mode of all images."""
    return mode or ("L" if all(map(_is_gray, files)) else "RGB")


def _is_gray(path: Path) -> bool:
    """Return whether an image is gray according to its header; a broken one, reported later, counts as gray."""
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(path) as image:  # Pillow raises many kinds of errors
        return image.mode in GRAY or image.mode[0] in "IF"
    return True


def _read_image(paths: Sequence[Path], mask: None, *, mode: str, size: Sequence[int] | None) -> Row:
    """Decode an image to uint8 (channels, height, width)."""
    from PIL import Image, ImageOps

    with Image.open(paths[0]) as opened:
        _check_pixels(opened)
        image = ImageOps.exif_transpose(opened).convert(mode)
    if size is not None and (image.height, image.width) != tuple(size):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.atleast_3d(np.asarray(image))
    return {"images": pixels.transpose(2, 0, 1)}


def _check_pixels(image: Any) -> None:
    """Raise an error for pixels that Pillow would clip or truncate to 8 bits, and for images with several pages."""
    stored = re.search(r"\w+;16[BLN]", str(getattr(image, "tile", "")))  # how Pillow decodes 16-bit colors
    kind = stored[0] if stored else image.mode
    expect(not stored and image.mode[0] not in "IF", "pixels", kind, "8 bits per channel; save others as .npy files")
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    expect(pages == 1, "pages", pages, "1; save volumes as .npy files")
