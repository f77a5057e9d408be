"""``pack_folder``: pack a folder of images or volumes for ``PackedDataset``."""

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
from lightning_turbo.data.packed.packing import Packing, Progress, digest_of, stamp_of
from lightning_turbo.data.packed.volumes import read_volume, warn_of_two_affines

__all__ = ["pack_folder"]

READERS = {"images": "PIL", "NIfTI files": "nibabel"}
GREY = ("1", "L", "LA", "La")
BESIDE = ("affine", "spacing", "files")  # fields that are read if ``keys`` names them

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
    """Pack the images or volumes below ``folder``, as they are or at one size, for ``PackedDataset``.

    Images become the field ``images``, uint8 (channels, height, width), rotated as their EXIF orientation says and
    without transparency. ``.npy`` and NIfTI files become ``volumes`` with their dtype, shape and order of axes; the
    fourth axis of a NIfTI file, its channels, comes first, unless it has one entry. NIfTI files also give ``affine``,
    float64 (4, 4) from voxels to millimetres, and ``spacing``, float64 (3,) in millimetres. ``files`` holds the path
    below ``folder``. ``PackedDataset`` reads these three if ``keys`` names them.

    Subfolders are classes, and ``labels`` holds int64 labels. With label volumes it holds these instead, int16, and the
    places of up to 10,000 voxels of each class above 0 are stored for ``PatchDataset(foreground=)``, and 10,000
    intensities of the foreground for ``intensities``. Hidden files and folders are ignored.

    The layouts of nnU-Net and of the Medical Segmentation Decathlon (``imagesTr``, ``labelsTr``, ``dataset.json``) are
    packed as they are, and so are label volumes beside their volumes, as BraTS and ACDC have them.

    The folder ``out`` appears when everything is in it. What is written before stands in ``<out>.partial``; if packing
    is interrupted, or some files are broken, the next call goes on there, unless the files have changed.

    Args:
        folder: Folder with the files.
        out: Folder to write, outside of ``folder``.
        labels: Folder with a label volume for each volume, of the same name (nnU-Net's ``_0000``, or an end such as
            ``_seg``, may differ). Or the end of the names of label volumes in ``folder``: ``"-lesion"``. Default:
            ``labelsTr``, and those beside the volumes whose names end in seg, dseg, segmentation, mask, msk, label or
            gt. ``False``: these are left out.
        spacing: Distances of voxels in millimetres, in the order of the axes, to resample NIfTI files to: volumes by
            cubic splines to float32, label volumes by their nearest voxel. The first voxel stays in its place.
        size: (height, width) in pixels to resize images to, or (depth, height, width) in voxels to crop or pad volumes
            to about their centre, with their minimum, and label volumes with 0. Default: the sizes of the files.
        mode: ``"RGB"`` or ``"L"`` (grey) for all images. Default: grey if all images are grey, else ``"RGB"``.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass those of the training
            set if a class may be missing.
        modalities: The ends of the names of files that are channels of one volume, in the order of the channels:
            ``("-t1n", "-t2w")`` for BraTS. Other channels of these volumes are left out. Default: ``("_0000", ...)`` of
            nnU-Net's ``dataset.json``, else each file is a volume.
        compress: Whether blosc2 compresses volumes, in chunks that it chooses; or the size of the chunks, best that
            of the patches.
        num_workers: Number of processes that read.
        skip_broken: Whether to skip what cannot be packed, as damaged files, links to nothing, and volumes without
            their label volume, and list it in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it holds a packed dataset and nothing else.
        progress: Called with the number of finished samples and of all samples.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names), ``classes`` (of nnU-Net's ``dataset.json`` where there are
        label volumes), ``samples``, ``skipped`` (a number), ``foreground``, the name of the label volumes or ``None``,
        and ``intensities``.

    Raises:
        FileExistsError: If ``out`` exists and ``overwrite`` is not set, or it holds something else.
        FileNotFoundError: If ``folder`` is missing or has nothing to pack, or a label volume or modality is missing.
        MissingExtraError: If Pillow is missing for images, nibabel for NIfTI files, or blosc2 for ``compress``.
        OSError: If there is no room. What is written stays, and the next call goes on.
        TypeError: If a switch is not a bool, ``progress`` is not callable, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not fit the files, files differ in kind, two files could be the label volume or
            channel of one volume, some files cannot be packed (the message names all of them; NaN and infinite voxels,
            too, make a file one), or a subfolder is empty or not in ``classes``.

    Warns:
        TurboWarning: If sform and qform of NIfTI files name other places. The sform is taken.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "scans").mkdir()
        >>> for n in range(3):
        ...     np.save(root / "scans" / f"{n}.npy", np.full((2, 2 + n), n))
        >>> pack_folder(root / "scans", root / "packed")["samples"]
        3
    """
    # All arguments are compared with the names of the files before the first of them is read.
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
        read = partial(read_volume, labelled=layout.masks is not None, spacing=spacing, size=size)
    paths = [path for path in itertools.chain(*layout.volumes, layout.masks or ()) if path is not None]
    if kind == "NIfTI files":
        warn_of_two_affines(paths)
    contents = {"classes": list(layout.classes), "foreground": None if layout.masks is None else "labels"}
    key = digest_of(options, layout.volumes, layout.masks, list(map(_stamp_of, paths)))
    return packing.write(_Files(source, layout, read), key, contents, beside=BESIDE)


def _check_folders(source: Path, target: Path, labels: Labels) -> None:
    """Refuse a missing source, and a target inside or around a folder that is read."""
    expect(source.is_dir(), "folder", str(source), "an existing folder", FileNotFoundError)
    there = target.resolve()
    for place in (source, *([] if labels is None or isinstance(labels, bool) else [Path(labels)])):
        here = place.resolve()
        nested = here.is_relative_to(there) or (place.is_dir() and there.is_relative_to(here))
        expect(not nested, "out", str(target), f"a folder beside {str(place)!r}")


def _check_options(kind: str, options: dict[str, Any], labels: Labels) -> None:
    """Refuse options of other kinds of files, and wrong values."""
    expect(labels is not True, "labels", labels, "a folder, the end of names, None or False", TypeError)
    images = kind == "images"
    named = None if labels is False else labels
    refused = ["labels", "modalities"] if images else ["mode"]
    refused += ["classes"] if named and not images else []
    refused += [] if kind == "NIfTI files" else ["spacing"]
    given = {**options, "labels": named}
    for name in refused:
        if given[name] is not None:
            kinds = f"{kind} and label volumes" if named else kind
            raise ValueError(f"{name}={given[name]!r} does not go with {kinds}. Leave it out.")
    _check_values(images, options)


def _check_values(images: bool, options: dict[str, Any]) -> None:
    """Refuse values that an option cannot have."""
    axes, lengths = (2, "(height, width) in pixels") if images else (3, "(depth, height, width) in voxels")
    what = {
        "size": f"{lengths}, each at least 1, or None",
        "mode": "'RGB', 'L' (grey), or None",
        "modalities": "the ends of names, such as ('_0000', '_0001'), each once, or None",
        "spacing": "three distances in millimetres above 0, or None",
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


def _stamp_of(path: Path) -> tuple[Any, ...]:
    """Return what changes with a file; that of a link to nothing is read as a broken file."""
    try:
        return stamp_of(path)
    except OSError as error:
        return str(path), error.errno


class _Files:
    """The samples of a folder: each read from its files when it is asked for."""

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
        """Return what an error message calls a sample."""
        return repr(str(self._first(index)))


def _find_mode(files: list[Path], mode: str | None) -> str:
    """Return the mode of all images."""
    return mode or ("L" if all(map(_is_grey, files)) else "RGB")


def _is_grey(path: Path) -> bool:
    """Return whether an image is grey, by its header; a broken one, which is reported later, may be."""
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(path) as image:  # Pillow raises many kinds of errors
        return image.mode in GREY or image.mode[0] in "IF"
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
    """Refuse pixels that Pillow would clip or truncate to 8 bits, and images of several pages."""
    stored = re.search(r"\w+;16[BLN]", str(getattr(image, "tile", "")))  # how Pillow decodes 16-bit colours
    kind = stored[0] if stored else image.mode
    expect(not stored and image.mode[0] not in "IF", "pixels", kind, "8 bits per channel; save more as .npy files")
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    expect(pages == 1, "pages", pages, "1; save volumes as .npy files")
