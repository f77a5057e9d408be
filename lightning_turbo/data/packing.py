"""``pack_folder``, which turns a folder of images or volumes into arrays for ``PackedDataset``."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_turbo._checks import check_functions, check_switches, is_whole
from lightning_turbo._optional import require

__all__ = ["CONTENTS", "pack_folder"]

CONTENTS = "packed.json"
IMAGES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
ARRAYS = frozenset({".npy"})


def pack_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> dict[str, Any]:
    """Pack the images or volumes below ``folder`` into one array, once, so that training reads whole batches.

    Images (decoded with Pillow) become ``images.npy``, uint8 ``(n, channels, height, width)``: one channel if the
    first image is grey, else three. Transparency is left out. ``.npy`` files become ``volumes.npy``, ``(n, ...)`` in
    their own dtype. Where the files lie in subfolders, linked ones included, each is a class, in alphabetical order,
    and ``labels.npy`` holds its number as int64.
    An ``.npz`` file in place of ``folder`` has its arrays unpacked.

    Args:
        folder: Where the files are, or an ``.npz`` file. It is not changed.
        out: The folder to write. It appears when everything is in it, or not at all.
        size: ``(height, width)`` in pixels to resize images to; without it all must have the same size.
        overwrite: Whether an ``out`` that is there is replaced; one that holds anything but a packed dataset is not.
        progress: Called with the number of files done and of all.

    Returns:
        The contents, as written to ``packed.json``: ``arrays`` (their names), ``classes``, ``samples``.

    Raises:
        FileExistsError: If ``out`` is there and ``overwrite`` is not set, or it is not what this function writes.
        FileNotFoundError: If ``folder`` is not there or holds nothing to pack.
        MissingExtraError: If there are images and Pillow is not installed.
        TypeError: If ``overwrite`` is no bool or ``progress`` cannot be called.
        ValueError: If ``size`` is no pair of whole numbers above 0 or given for arrays, files differ in shape, dtype or
            kind, one cannot be read, has more than 8 bits a channel or more than one page, an array has a name that is
            no file's, ``folder`` lies in ``out``, or an ``out`` to overwrite in ``folder``.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "scans").mkdir()
        >>> for n in range(3):
        ...     np.save(root / "scans" / f"{n}.npy", np.full((2, 2), n))
        >>> pack_folder(root / "scans", root / "packed")["samples"]
        3
    """
    check_switches(overwrite=overwrite)
    check_functions(progress=progress)
    if size is not None and not (isinstance(size, Sequence) and len(size) == 2 and all(is_whole(n, 1) for n in size)):
        raise ValueError(f"size={size!r}; accepted is (height, width) in pixels, each at least 1, or None.")
    source, target = Path(folder), Path(out)
    if size is not None and source.suffix == ".npz":
        raise ValueError(f"size={size!r} is for images, and {str(source)!r} holds arrays. Leave it out.")
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{str(target)!r} is there already. Pass another folder, or overwrite=True (--overwrite)."
        )
    if not source.exists():
        raise FileNotFoundError(
            f"{str(source)!r} is not there. Pass a folder of images or .npy files, or an .npz file."
        )
    here, there = source.resolve(), target.resolve()
    if here.is_relative_to(there) or (target.exists() and there.is_relative_to(here)):  # it would be packed too
        raise ValueError(f"One of {str(source)!r} and {str(target)!r} lies in the other. Pass a folder beside it.")
    if target.exists() and not _is_packed(target):
        raise FileExistsError(
            f"{str(target)!r} holds more than a packed dataset, so that it is not replaced. Pass another folder."
        )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if source.suffix == ".npz":
            contents = _unpack(source, partial, progress)
        else:
            contents = _pack(source, partial, size, progress)
        (partial / CONTENTS).write_text(json.dumps(contents, indent=1))
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return contents


def _is_packed(target: Path) -> bool:
    if not target.is_dir():
        return False
    names = {path.name for path in target.iterdir()}
    arrays = {name for name in names if name.endswith(".npy") and (target / name).is_file()}
    return not names or names == {CONTENTS, *arrays}


def _unpack(source: Path, partial: Path, progress: Any) -> dict[str, Any]:
    with np.load(source) as arrays:
        names = sorted(arrays.files)
        samples = {}
        for done, name in enumerate(names, 1):
            if Path(name).name != name:  # it would lie elsewhere, maybe outside
                raise ValueError(f"{str(source)!r} holds an array {name!r}; accepted are names of files. Rename it.")
            try:
                array = arrays[name]
            except ValueError as error:
                raise ValueError(f"{str(source)!r}: {name!r} cannot be packed: {error}. Leave it out.") from error
            np.save(partial / f"{name}.npy", array)
            samples[name] = len(array) if array.ndim else 0
            if progress is not None:
                progress(done, len(names))
    return {"arrays": names, "classes": [], "samples": max(samples.values(), default=0)}


def _pack(source: Path, partial: Path, size: tuple[int, int] | None, progress: Any) -> dict[str, Any]:
    files = sorted(path for path in _files_below(source) if path.suffix.lower() in IMAGES | ARRAYS)
    if not files:
        raise FileNotFoundError(
            f"{str(source)!r} holds nothing to pack. Accepted are images ({', '.join(sorted(IMAGES))}) and .npy files."
        )
    kinds = {path.suffix.lower() in IMAGES for path in files}
    if len(kinds) > 1:
        raise ValueError(f"{str(source)!r} holds both images and .npy files. Pack them from folders of their own.")
    images = kinds.pop()
    if size is not None and not images:
        raise ValueError(f"size={size!r} is for images, and {str(source)!r} holds .npy files. Leave it out.")
    if images:
        require("PIL", "pack_folder with images")
    name = "images" if images else "volumes"
    first = _read(files[0], None, size)
    mode = "L" if images and first.shape[0] == 1 else "RGB"
    header = {
        "descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": (len(files), *first.shape)
    }  # fmt: skip
    with (partial / f"{name}.npy").open("wb") as array:  # memory that is mapped would end the process on a full disk
        np.lib.format.write_array_header_1_0(array, header)
        for done, path in enumerate(files, 1):
            sample = _read(path, mode, size)
            if sample.shape != first.shape or sample.dtype != first.dtype:
                raise ValueError(
                    f"{str(path)!r} is {sample.dtype} {sample.shape} and {str(files[0])!r} is {first.dtype} "
                    f"{first.shape}; all must be alike. " + ("Pass size=(height, width)." if images else "")
                )
            array.write(sample.tobytes())
            if progress is not None:
                progress(done, len(files))
    classes = sorted({path.relative_to(source).parts[0] for path in files if path.parent != source})
    if classes:
        if any(path.parent == source for path in files):
            raise ValueError(f"{str(source)!r} holds files both in class folders and beside them. Move the latter.")
        labels = [classes.index(path.relative_to(source).parts[0]) for path in files]
        np.save(partial / "labels.npy", np.asarray(labels, dtype=np.int64))
    return {"arrays": [name, "labels"] if classes else [name], "classes": classes, "samples": len(files)}


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, linked ones included, but for links to where they lie themselves."""
    for where, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(where, name) for name in names)
        here = Path(where).resolve()
        folders[:] = [name for name in folders if not here.is_relative_to((here / name).resolve())]


def _read(path: Path, mode: str | None, size: tuple[int, int] | None) -> np.ndarray:
    """One volume, or one image as uint8 ``(channels, height, width)``."""
    try:
        return np.load(path) if path.suffix.lower() in ARRAYS else _image(path, mode, size)
    except Exception as error:  # Pillow raises errors of many kinds
        raise ValueError(f"{str(path)!r} cannot be packed: {error}. Repair the file or take it away.") from error


def _image(path: Path, mode: str | None, size: tuple[int, int] | None) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as opened:
        stored = re.search(r"\w+;16[BLN]", str(getattr(opened, "tile", "")))  # as what colours of 16 bits are decoded
        if stored or opened.mode[0] in "IF":  # Pillow would cut their values off, at 255 or to 8 bits
            kind = stored[0] if stored else opened.mode
            raise ValueError(f"its pixels are of mode {kind!r}, accepted are 8 bits; .npy files may hold more")
        if opened.format == "TIFF" and (pages := getattr(opened, "n_frames", 1)) > 1:
            raise ValueError(f"it has {pages} pages, accepted is 1; save what is a volume as a .npy file")
        image = opened.convert(mode or Image.getmodebase(opened.mode))
    if size is not None and (image.height, image.width) != tuple(size):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
