"""``pack_folder``, which turns a folder of images or volumes into arrays for ``PackedDataset``."""

from __future__ import annotations

import contextlib
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
from lightning_turbo.data.folders import check_classes, find_classes, list_files

__all__ = ["CONTENTS", "pack_folder"]

CONTENTS = "packed.json"
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
NIFTI = (".nii", ".nii.gz")
KINDS = {"images": IMAGES, ".npy files": (".npy",), "NIfTI files": NIFTI}
GREY = ("1", "L", "LA", "La")

Row = dict[str, np.ndarray]


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
    """Pack the images or volumes below ``folder`` into one array, once, so that training reads whole batches.

    Images (decoded with Pillow, turned as their EXIF data says) become ``images.npy``, uint8 ``(n, channels, height,
    width)``; transparency is left out. ``.npy`` and NIfTI files become ``volumes.npy``, ``(n, ...)`` in their own
    dtype and order of axes; a fourth axis of a NIfTI file, its channels, comes first. NIfTI files also make
    ``affine.npy``, float64 ``(n, 4, 4)`` from index to millimetres, and ``spacing.npy``, float64 ``(n, 3)`` in
    millimetres; ``PackedDataset`` reads them if ``keys`` names them.

    Subfolders, linked ones included, are classes in alphabetical order, and ``labels.npy`` holds their numbers as
    int64. With ``labels=`` it holds a label volume for each volume instead, int16. Hidden files and folders are passed
    over. An ``.npz`` file in place of ``folder`` has its arrays unpacked.

    Args:
        folder: Where the files are, or an ``.npz`` file. It is not changed.
        out: The folder to write. It appears when everything is in it, or not at all.
        labels: A folder with a label volume for each volume, of the same name (nnU-Net's ``_0000`` left out).
        size: ``(height, width)`` in pixels to resize images to, or ``(depth, height, width)`` in voxels to which
            volumes are cut or padded about their centre; without it all must have the same size. Volumes are padded
            with their lowest value, label volumes with 0.
        mode: ``"RGB"`` or ``"L"`` (grey) for all images; by default grey if every image is, else ``"RGB"``.
        classes: Names of the classes in the order of their numbers; by default the subfolders, sorted. Pass those of
            the training set where a class may be missing.
        skip_broken: Whether files that cannot be packed are left out; ``<out>.broken.txt`` then names them.
        overwrite: Whether an ``out`` that is there is replaced; one that holds anything but a packed dataset is not.
        progress: Called with the number of files done and of all.

    Returns:
        The contents, as written to ``packed.json``: ``arrays`` (their names), ``classes``, ``samples``, and
        ``skipped``, the number of files that were left out.

    Raises:
        FileExistsError: If ``out`` is there and ``overwrite`` is not set, or it is not what this function writes.
        FileNotFoundError: If ``folder`` or ``labels`` is not there, or holds nothing to pack.
        MissingExtraError: If there are images and Pillow is not installed, or NIfTI files and nibabel is not.
        TypeError: If a switch is not a bool, ``progress`` cannot be called, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not fit the files, files differ in shape, dtype or kind, some cannot be packed
            (the message names all), a subfolder holds nothing or is not in ``classes``, or one of ``folder`` and
            ``out`` lies in the other.

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
    options = {"labels": labels, "size": size, "mode": mode, "classes": check_classes(classes)}
    _check_folders(source, target, overwrite)
    with _whole_folder(target) as partial:
        if source.suffix == ".npz":
            _check_options(options, "an .npz file", ())
            contents = _unpack(source, partial, progress or _ignore)
        else:
            pack = _Pack(source, **options)
            broken = target.with_name(f"{target.name}.broken.txt") if skip_broken else None
            contents = pack.write(partial, broken, progress or _ignore)
        (partial / CONTENTS).write_text(json.dumps(contents, indent=1))
    return contents


class _Pack:
    """The files of one folder and how each becomes a row."""

    def __init__(self, source: Path, labels: Any, size: Any, mode: Any, classes: tuple[str, ...] | None) -> None:
        kind, self.files = _find_files(source)
        self.images, self.size = kind == "images", size
        _check_choices(kind, {"labels": labels, "size": size, "mode": mode, "classes": classes})
        if kind != ".npy files":
            require("PIL" if self.images else "nibabel", f"pack_folder with {kind}")
        self.classes, self.numbers, self.labels, self.mode = (), None, None, mode
        if labels is not None:
            self.labels = _pair(self.files, source, Path(labels))
        elif classes is not None or {path.parent for path in self.files} != {source}:
            self._read_classes(source, KINDS[kind], classes)
        if self.images and mode is None:
            self.mode = "L" if all(map(_is_grey, self.files)) else "RGB"

    def _read_classes(self, source: Path, suffixes: Sequence[str], classes: tuple[str, ...] | None) -> None:
        parents = {path.parent: path for path in self.files}
        if source in parents:
            raise ValueError(
                f"{str(source)!r} holds files beside the folders of the classes, as {parents[source].name!r}. "
                "Move them into one."
            )
        self.classes, self.files, self.numbers = find_classes(source, suffixes, classes)

    def write(self, partial: Path, skip: Path | None, progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Write a row for each file, and return the contents.

        Args:
            partial: The folder to write to.
            skip: The list to write of the files that cannot be packed; ``None`` raises.
            progress: Called after each file.
        """
        broken: list[str] = []
        with _Rows(partial) as rows:
            for place, path in enumerate(self.files):
                try:
                    row = self.read(place)
                except Exception as error:  # Pillow and nibabel raise errors of many kinds
                    broken.append(f"{str(path)!r}: {error}")
                else:
                    rows.append(path, row)
                progress(place + 1, len(self.files))
        self._report(broken, skip)
        arrays = [name for name in rows.names if name not in ("affine", "spacing")]
        return {"arrays": arrays, "classes": list(self.classes), "samples": rows.count, "skipped": len(broken)}

    def _report(self, broken: list[str], skip: Path | None) -> None:
        """Raise an error that names all broken files, or write a list of them."""
        if skip is not None and len(broken) < len(self.files):
            skip.write_text("".join(f"{line}\n" for line in broken))
        elif broken:
            raise ValueError(
                f"{len(broken)} of {len(self.files)} files cannot be packed:\n" + "\n".join(broken) + "\nRepair or "
                "remove them, or leave them out with skip_broken=True (--skip-broken)."
            )

    def read(self, place: int) -> Row:
        """Return the arrays of one file, by name."""
        path = self.files[place]
        if self.images:
            row = {"images": _read_image(path, self.mode, self.size)}
        else:
            volume, affine = _read_volume(path)
            row = {"volumes": volume}
            if self.labels is not None:
                row["labels"] = _read_label(self.labels[place], volume, affine)
            row, affine = _fit(row, affine, self.size)
            if affine is not None:
                row |= {"affine": affine, "spacing": np.sqrt(np.square(affine[:3, :3]).sum(axis=0))}
        return row if self.numbers is None else {**row, "labels": np.asarray(self.numbers[place], dtype=np.int64)}


class _Rows:
    """``.npy`` files that grow by a row at a time; memory that is mapped would end the process on a full disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.names = folder, 0, ()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, path: Path, row: Row) -> None:
        """Write a row, which has to be like the first."""
        if not self.count:
            self.names, self._first, self._path = tuple(row), row, path
            self._files = {name: self._stack.enter_context((self.folder / f"{name}.npy").open("wb")) for name in row}
            self._stack.callback(self._write_headers)
            self._write_headers()
        for name, array in row.items():
            first = self._first[name]
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"{str(path)!r} has {name} of {array.dtype} {array.shape} and {str(self._path)!r} of {first.dtype} "
                    f"{first.shape}; all must be alike. Pass size= (--size) to make them of one size."
                )
            self._files[name].write(array.tobytes())
        self.count += 1

    def _write_headers(self) -> None:
        for name, file in self._files.items():
            first = self._first[name]
            shape = (self.count, *first.shape)  # numpy leaves room in the header for the number to grow
            header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)


def _check_folders(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a source that is not there, and a target that must not be replaced."""
    if not source.exists():
        raise FileNotFoundError(
            f"{str(source)!r} is not there. Pass a folder of images, .npy or NIfTI files, or an .npz file."
        )
    here, there = source.resolve(), target.resolve()
    if here.is_relative_to(there) or (target.exists() and there.is_relative_to(here)):  # it would be packed too
        raise ValueError(f"One of {str(source)!r} and {str(target)!r} lies in the other. Pass a folder beside it.")
    if target.exists():
        _check_replaceable(target, overwrite)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    """Refuse to replace anything but a packed dataset or an empty folder."""
    if not overwrite:
        raise FileExistsError(
            f"{str(target)!r} is there already. Pass another folder, or overwrite=True (--overwrite)."
        )
    names = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    arrays = {path.name for path in target.glob("*.npy") if path.is_file()}
    if names and names != {CONTENTS, *arrays}:
        raise FileExistsError(
            f"{str(target)!r} holds more than a packed dataset, so that it is not replaced. Pass another folder."
        )


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside ``target`` to write to, which takes its place when the block ends well."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _ignore(done: int, total: int) -> None:
    """Show no progress."""


def _find_files(source: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files below a folder, and the files."""
    found = {kind: files for kind, suffixes in KINDS.items() if (files := list_files(source, suffixes))}
    if not found:
        known = ", ".join(sum(KINDS.values(), ()))
        raise FileNotFoundError(f"{str(source)!r} holds nothing to pack. Expected files that end in {known}.")
    if len(found) > 1:
        raise ValueError(f"{str(source)!r} holds both {' and '.join(found)}. Pack them from folders of their own.")
    return next(iter(found.items()))


def _check_choices(kind: str, options: dict[str, Any]) -> None:
    """Refuse what does not go with a kind of files."""
    if kind == "images":
        _check_options(options, kind, ("size", "mode", "classes"))
    elif options["labels"] is not None:
        _check_options(options, "label volumes", ("size", "labels"))
    else:
        _check_options(options, kind, ("size", "classes"))
    _check_size(options["size"], 2 if kind == "images" else 3)
    if options["mode"] not in (None, "RGB", "L"):
        raise ValueError(f"mode={options['mode']!r}: expected 'RGB', 'L' for grey, or None.")


def _check_options(options: dict[str, Any], kind: str, accepted: Sequence[str]) -> None:
    for name, value in options.items():
        if value is not None and name not in accepted:
            raise ValueError(f"{name}={value!r} does not go with {kind}. Leave it out.")


def _check_size(size: Any, count: int) -> None:
    if size is None:
        return
    if not isinstance(size, Sequence) or len(size) != count or not all(is_whole(n, 1) for n in size):
        axes = "(height, width) in pixels" if count == 2 else "(depth, height, width) in voxels"
        raise ValueError(f"size={size!r}: expected {axes}, each at least 1, or None.")


def _unpack(source: Path, partial: Path, progress: Callable[[int, int], Any]) -> dict[str, Any]:
    """Write each array of an ``.npz`` file, and return the contents."""
    samples = 0
    with np.load(source) as arrays:
        names = sorted(arrays.files)
        for done, name in enumerate(names, 1):
            if Path(name).name != name:  # it would lie elsewhere, maybe outside
                raise ValueError(f"{str(source)!r} holds an array {name!r}; expected names of files. Rename it.")
            try:
                array = arrays[name]
            except ValueError as error:
                raise ValueError(f"{str(source)!r}: {name!r} cannot be packed: {error}. Leave it out.") from error
            np.save(partial / f"{name}.npy", array)
            samples = max(samples, len(array) if array.ndim else 0)
            progress(done, len(names))
    return {"arrays": names, "classes": [], "samples": samples, "skipped": 0}


def _pair(files: Sequence[Path], source: Path, labels: Path) -> list[Path]:
    """Return the label volume of each volume: the same path below ``labels``, whatever the kind of file."""
    there = {_stem(path.relative_to(labels)): path for path in list_files(labels, (".npy", *NIFTI))}
    names = [_stem(path.relative_to(source)) for path in files]
    if missing := sorted(set(names) - set(there)):
        raise FileNotFoundError(
            f"labels={str(labels)!r} holds no label volume for {missing!r}. Expected files of the same name as the "
            "volumes; nnU-Net's _0000 may be left out."
        )
    return [there[name] for name in names]


def _stem(path: Path) -> str:
    name = re.sub(r"\.(npy|nii|nii\.gz)$", "", path.as_posix(), flags=re.IGNORECASE)
    return name.removesuffix("_0000")


def _is_grey(path: Path) -> bool:
    """Tell whether an image is grey, from its header; one that cannot be read counts as grey, and is told of later."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.mode in GREY or image.mode[0] in "IF"
    except Exception:  # Pillow raises errors of many kinds
        return True


def _read_image(path: Path, mode: str, size: Sequence[int] | None) -> np.ndarray:
    """Return one image as uint8 ``(channels, height, width)``."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        _check_pixels(opened)
        image = ImageOps.exif_transpose(opened).convert(mode)
    if size is not None and (image.height, image.width) != tuple(size):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _check_pixels(image: Any) -> None:
    """Refuse an image whose values Pillow would cut off, at 255 or to 8 bits, and one of several pages."""
    stored = re.search(r"\w+;16[BLN]", str(getattr(image, "tile", "")))  # as what colours of 16 bits are decoded
    if stored or image.mode[0] in "IF":
        kind = stored[0] if stored else image.mode
        raise ValueError(f"its pixels are of mode {kind!r}, expected 8 bits; .npy files may hold more")
    if image.format == "TIFF" and (pages := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it has {pages} pages, expected 1; save what is a volume as a .npy file")


def _read_volume(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Return one volume and its affine; a ``.npy`` file has none."""
    if path.suffix.lower() == ".npy":
        return np.load(path), None
    import nibabel

    file: Any = nibabel.load(path)
    volume = np.asanyarray(file.dataobj)
    if volume.dtype == np.float64 and file.get_data_dtype() != np.float64:  # scaled by nibabel
        volume = volume.astype(np.float32)
    return (np.moveaxis(volume, 3, 0) if volume.ndim == 4 else volume), np.asarray(file.affine, dtype=np.float64)


def _read_label(path: Path, volume: np.ndarray, affine: np.ndarray | None) -> np.ndarray:
    """Return a label volume as int16, after a check that it lies on its volume."""
    label, other = _read_volume(path)
    if label.shape != volume.shape[-3:]:
        raise ValueError(f"its label volume {str(path)!r} has the shape {label.shape}, expected {volume.shape[-3:]}")
    if affine is not None and other is not None and not np.allclose(affine, other, atol=1e-3):
        raise ValueError(f"its label volume {str(path)!r} has another affine, so that it lies elsewhere")
    if not np.array_equal(whole := label.astype(np.int16), label):
        raise ValueError(f"its label volume {str(path)!r} holds values that are not whole numbers of 16 bits")
    return whole


def _fit(row: Row, affine: np.ndarray | None, size: Sequence[int] | None) -> tuple[Row, np.ndarray | None]:
    """Cut or pad volumes to a size about their centre, and move the affine's origin along."""
    if size is None:
        return row, affine
    start = [(have - want) // 2 for have, want in zip(row["volumes"].shape[-3:], size, strict=True)]
    fitted = {name: _cut(array, start, size, 0 if name == "labels" else array.min()) for name, array in row.items()}
    if affine is not None:
        affine = np.array(affine)
        affine[:3, 3] += affine[:3, :3] @ start
    return fitted, affine


def _cut(array: np.ndarray, start: Sequence[int], size: Sequence[int], fill: Any) -> np.ndarray:
    """Return the box of ``size`` voxels that begins at ``start``, with ``fill`` where it sticks out of the array."""
    box = np.full((*array.shape[:-3], *size), fill, dtype=array.dtype)
    inside, outside = [], []
    for begin, want, have in zip(start, size, array.shape[-3:], strict=True):
        inside.append(slice(max(0, -begin), min(want, have - begin)))
        outside.append(slice(max(0, begin), min(have, begin + want)))
    box[(..., *inside)] = array[(..., *outside)]
    return box
