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
from lightning_turbo.data.packed.layouts import Labels, Layout, find_images, find_kind, find_volumes
from lightning_turbo.data.packed.packing import Packing, Progress
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
    labels: Labels = None,
    spacing: Sequence[float] | None = None,
    size: Sequence[int] | None = None,
    mode: str | None = None,
    classes: Sequence[str] | None = None,
    modalities: Sequence[str] | None = None,
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

    The layouts of nnU-Net and the Medical Segmentation Decathlon (``imagesTr``, ``labelsTr``, ``dataset.json``) are
    recognized, as are label volumes beside their volumes, as in BraTS and ACDC.

    The folder ``out`` appears once everything is in it, as with ``pack``.

    Args:
        folder: Folder to read.
        out: Folder to write, outside ``folder``.
        labels: Folder with one label volume per volume, with the same name (nnU-Net's ``_0000``, or a suffix such as
            ``_seg``, may differ); or the suffix of label volumes in ``folder``, such as ``"-lesion"``. Default:
            ``labelsTr``, and files beside the volumes with the suffix seg, dseg, segmentation, mask, msk, label or gt.
            ``False`` skips these.
        spacing: Voxel spacing in millimeters, in the order of the axes, to resample NIfTI files to: volumes with cubic
            splines to float32, label volumes by nearest voxel. The first voxel keeps its position.
        size: (height, width) in pixels to resize images to, or (depth, height, width) in voxels to crop or pad volumes
            to about their center; volumes are padded with their minimum, label volumes with 0. Default: the sizes of
            the files.
        mode: ``"RGB"`` or ``"L"`` (grayscale) for all images. Default: ``"L"`` if all images are gray, else ``"RGB"``.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass the classes of the
            training set if some may be missing here.
        modalities: Suffixes of the files that are channels of one volume, in the order of the channels: ``("-t1n",
            "-t2w")`` for BraTS. Other channels of these volumes are skipped. Default: ``("_0000", ...)`` from nnU-Net's
            ``dataset.json``; otherwise each file is a volume.
        compress: Whether to compress volumes with blosc2, in chunks of a size that it chooses; or the chunk size,
            ideally the patch size.
        num_workers: Number of worker processes that read files.
        skip_broken: Whether to skip what cannot be packed, such as damaged files, broken links and volumes without
            their label volume, and list it in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it contains a packed dataset and nothing else.
        progress: Called with the number of finished samples and the total.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names), ``classes`` (from nnU-Net's ``dataset.json`` if there are
            label volumes), ``samples``, ``skipped`` (a number), ``foreground``, the name of the label volumes or
            ``None``, and ``intensities``.

    Raises:
        FileExistsError: If ``out`` exists without ``overwrite``, or contains anything else.
        FileNotFoundError: If ``folder`` is missing or has nothing to pack, or a label volume or channel is missing.
        MissingExtraError: If Pillow (images), nibabel (NIfTI files) or blosc2 (``compress``) is missing.
        OSError: If the disk is full.
        TypeError: If a switch is not a bool, ``progress`` is not callable, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not match the files, files differ in kind, a label volume or channel is
            ambiguous, some files cannot be packed (the message lists all of them, including those with NaN or infinite
            voxels), or a subfolder is empty or not in ``classes``.

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
    source = Path(folder)
    _check_folders(source, Path(out), labels)
    packing = Packing(Path(out), compress, num_workers, skip_broken, overwrite, progress)
    kind, files = find_kind(source)
    if kind in READERS:
        require(READERS[kind], f"pack_folder with {kind}")
    options = {"spacing": spacing, "size": size, "mode": mode, "classes": classes, "modalities": modalities}
    _check_options(kind, options, labels)
    if kind == "images":
        layout = find_images(source, files, labels, classes)
        read: Callable[..., Row] = partial(_read_image, mode=_find_mode(files, mode), size=size)
    else:
        layout = find_volumes(source, files, labels, modalities, classes, allow_missing=skip_broken)
        read = partial(read_volume, labeled=layout.masks is not None, spacing=spacing, size=size)
    paths = [path for path in itertools.chain(*layout.volumes, layout.masks or ()) if path is not None]
    if kind == "NIfTI files":
        warn_of_two_affines(paths)
    contents = {"classes": list(layout.classes), "foreground": None if layout.masks is None else "labels"}
    return packing.write(_Files(source, layout, read), contents, beside=BESIDE)


def _check_folders(source: Path, target: Path, labels: Labels) -> None:
    """Raise an error if the source is missing, or the target is inside or around a folder that is read."""
    expect(source.is_dir(), "folder", str(source), "an existing folder", FileNotFoundError)
    there = target.resolve()
    for place in (source, *([] if labels is None or isinstance(labels, bool) else [Path(labels)])):
        here = place.resolve()
        nested = here.is_relative_to(there) or (place.is_dir() and there.is_relative_to(here))
        expect(not nested, "out", str(target), f"a folder beside {str(place)!r}")


def _check_options(kind: str, options: dict[str, Any], labels: Labels) -> None:
    """Raise an error for options that do not apply to this kind of files, and for invalid values."""
    expect(labels is not True, "labels", labels, "a folder, a suffix, None or False", TypeError)
    images = kind == "images"
    named = None if labels is False else labels
    refused = ["labels", "modalities"] if images else ["mode"]
    refused += ["classes"] if named and not images else []
    refused += [] if kind == "NIfTI files" else ["spacing"]
    given = {**options, "labels": named}
    for name in refused:
        if given[name] is not None:
            kinds = f"{kind} and label volumes" if named else kind
            raise ValueError(f"{name}={given[name]!r} does not apply to {kinds}. Leave it out.")
    _check_values(images, options)


def _check_values(images: bool, options: dict[str, Any]) -> None:
    """Raise an error for invalid values of options."""
    axes, lengths = (2, "(height, width) in pixels") if images else (3, "(depth, height, width) in voxels")
    what = {
        "size": f"{lengths}, each at least 1, or None",
        "mode": "'RGB', 'L' (grayscale), or None",
        "modalities": "distinct suffixes such as ('_0000', '_0001'), or None",
        "spacing": "three distances in millimeters above 0, or None",
    }
    valid = {
        "size": lambda size: is_size(size, axes),
        "mode": lambda mode: mode in ("RGB", "L"),
        "modalities": lambda ends: is_list(ends) and len(ends) == len(set(ends)) > 0,
        "spacing": _is_spacing,
    }
    for name, is_valid in valid.items():
        expect(options[name] is None or is_valid(options[name]), name, options[name], what[name])


def _is_spacing(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(is_number(each) and each > 0 for each in value)


class _Files:
    """The samples of a folder, each read from its files on access."""

    def __init__(self, source: Path, layout: Layout, read: Callable[..., Row]) -> None:
        self.source = source
        self.layout = layout
        self.read = read

    def __len__(self) -> int:
        return len(self.layout.volumes)

    def __getitem__(self, index: int) -> Row:
        volumes, masks, numbers, _ = self.layout
        row = self.read(volumes[index], None if masks is None else masks[index])
        if numbers is not None:
            row["labels"] = np.asarray(numbers[index], dtype=np.int64)
        return {**row, "files": self._first(index).relative_to(self.source).as_posix()}

    def _first(self, index: int) -> Path:
        return next(path for path in self.layout.volumes[index] if path is not None)

    def name_of(self, index: int) -> str:
        """Return the name of a sample for error messages."""
        return repr(str(self._first(index)))


def _find_mode(files: list[Path], mode: str | None) -> str:
    """Return the mode of all images."""
    return mode or ("L" if all(map(_is_grey, files)) else "RGB")


def _is_grey(path: Path) -> bool:
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
