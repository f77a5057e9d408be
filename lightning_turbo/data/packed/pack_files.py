"""``pack_folder``: pack a folder of images or volumes for ``PackedDataset``."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_turbo._checks import expect, is_list, is_size
from lightning_turbo._optional import installed, require
from lightning_turbo.data.folders import find_classes, list_files
from lightning_turbo.data.packed.packing import Packing, Progress, digest_of, stamp_of

__all__ = ["pack_folder"]

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
NIFTI = (".nii", ".nii.gz")
KINDS = {"images": IMAGES, ".npy files": (".npy",), "NIfTI files": NIFTI}
READERS = {"images": "PIL", "NIfTI files": "nibabel"}
GREY = ("1", "L", "LA", "La")
BESIDE = ("affine", "spacing", "files")  # fields that are read if ``keys`` names them

Row = dict[str, Any]


def pack_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
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
    fourth axis of a NIfTI file, its channels, comes first. NIfTI files also give ``affine``, float64 (4, 4) from voxels
    to millimetres, and ``spacing``, float64 (3,) in millimetres. ``files`` holds the path below ``folder``.
    ``PackedDataset`` reads these three if ``keys`` names them.

    Subfolders are classes, and ``labels`` holds int64 labels. With ``labels=`` it holds int16 label volumes instead,
    and the places of up to 10,000 voxels of each class above 0 are stored for ``PatchDataset(foreground=)``. Hidden
    files and folders are ignored.

    The folder ``out`` appears when everything is in it. What is written before stands in ``<out>.partial``; if packing
    is interrupted, the next call goes on there, unless the files have changed.

    Args:
        folder: Folder with the files.
        out: Folder to write.
        labels: Folder with a label volume for each volume, of the same name (nnU-Net's ``_0000`` may be left out).
        size: (height, width) in pixels to resize images to, or (depth, height, width) in voxels to crop or pad volumes
            to about their centre, with their minimum, and label volumes with 0. Default: the sizes of the files.
        mode: ``"RGB"`` or ``"L"`` (grey) for all images. Default: grey if all images are grey, else ``"RGB"``.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass those of the training
            set if a class may be missing.
        modalities: The ends of the names of files that are channels of one volume, in the order of the channels:
            ``("_0000", "_0001")`` for nnU-Net, ``("-t1n", "-t2w")`` for BraTS.
        compress: Whether blosc2 compresses volumes, in chunks that it chooses; or the size of the chunks, best that
            of the patches.
        num_workers: Number of processes that read.
        skip_broken: Whether to skip files that cannot be packed and list them in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it holds a packed dataset and nothing else.
        progress: Called with the number of finished samples and of all samples.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names), ``classes``, ``samples``, ``skipped`` (a number), and
        ``foreground``, the name of the label volumes or ``None``.

    Raises:
        FileExistsError: If ``out`` exists and ``overwrite`` is not set, or it holds something else.
        FileNotFoundError: If ``folder`` is missing or has nothing to pack, or a label volume or modality is missing.
        MissingExtraError: If Pillow is missing for images, nibabel for NIfTI files, or blosc2 for ``compress``.
        OSError: If there is no room. What is written stays, and the next call goes on.
        TypeError: If a switch is not a bool, ``progress`` is not callable, or ``classes`` is not a sequence of names.
        ValueError: If an argument does not fit the files, files differ in kind, some cannot be packed (the message
            names all of them; NaN and infinite voxels, too, make a file one), or a subfolder is empty or not in
            ``classes``.

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
    _check_folders(source, Path(out))
    packing = Packing(Path(out), compress, num_workers, skip_broken, overwrite, progress)
    kind, files = _find_files(source)
    options = {"labels": labels, "size": size, "mode": mode, "classes": classes, "modalities": modalities}
    _check_options(kind, options)
    names, files, numbers = _read_classes(source, kind, files, labels, classes)
    images = kind == "images"
    volumes = [[file] for file in files] if modalities is None else _join_modalities(files, source, modalities)
    masks = [None] * len(volumes) if labels is None else _find_labels(volumes, source, Path(labels), modalities)
    read = partial(_read_image, mode=_find_mode(files, mode), size=size) if images else partial(_read_volume, size=size)
    samples = _Files(source, volumes, masks, numbers, read)
    stamps = [stamp_of(path) for path in itertools.chain(*volumes, masks) if path is not None]
    contents = {"classes": list(names), "foreground": None if labels is None else "labels"}
    return packing.write(samples, digest_of(options, stamps), contents, beside=BESIDE)


def _check_folders(source: Path, target: Path) -> None:
    """Refuse a missing source, and a target inside or around it."""
    expect(source.is_dir(), "folder", str(source), "an existing folder", FileNotFoundError)
    here, there = source.resolve(), target.resolve()
    nested = here.is_relative_to(there) or (target.exists() and there.is_relative_to(here))
    expect(not nested, "out", str(target), f"a folder beside {str(source)!r}")


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
    images, labels = kind == "images", options["labels"] is not None
    refused = ["labels", "modalities"] if images else ["mode", "classes"] if labels else ["mode"]
    for name in refused:
        if options[name] is not None:
            kinds = f"{kind} and label volumes" if labels else kind
            raise ValueError(f"{name}={options[name]!r} does not go with {kinds}. Leave it out.")
    axes, lengths = (2, "(height, width) in pixels") if images else (3, "(depth, height, width) in voxels")
    size, mode, ends = options["size"], options["mode"], options["modalities"]
    expect(size is None or is_size(size, axes), "size", size, f"{lengths}, each at least 1, or None")
    expect(mode in (None, "RGB", "L"), "mode", mode, "'RGB', 'L' (grey), or None")
    what = "the ends of names, such as ('_0000', '_0001'), each once, or None"
    expect(ends is None or (is_list(ends) and len(ends) == len(set(ends)) > 0), "modalities", ends, what)


def _read_classes(
    source: Path, kind: str, files: list[Path], labels: Any, classes: Sequence[str] | None
) -> tuple[Sequence[str], list[Path], list[int] | None]:
    """Return the classes of a folder, its files and their labels, or none without subfolders or with label volumes."""
    beside = [file.name for file in files if file.parent == source]
    if labels is not None or (classes is None and len(beside) == len(files)):
        return (), files, None
    expect(not beside, "folder", str(source), f"all files in the folders of the classes, but found {beside[:1]}")
    return find_classes(source, KINDS[kind], classes)


def _stem(path: Path, root: Path) -> str:
    return re.sub(r"\.(npy|nii|nii\.gz)$", "", path.relative_to(root).as_posix(), flags=re.IGNORECASE)


def _join_modalities(files: list[Path], source: Path, ends: Sequence[str]) -> list[list[Path]]:
    """Return for each volume the files of its channels."""
    volumes: dict[str, dict[str, Path]] = {}
    for path in files:
        stem = _stem(path, source)
        found = [end for end in ends if stem.endswith(end)]
        expect(found, "modalities", str(path), f"names that end in one of {list(ends)}")
        # The longest, as a name that ends in "_0001" ends in "1" too.
        end = max(found, key=len)
        volumes.setdefault(stem.removesuffix(end), {})[end] = path
    for stem, channels in volumes.items():
        what = f"each of {list(ends)} for the volume {stem!r}"
        expect(len(channels) == len(ends), "modalities", list(channels), what, FileNotFoundError)
    return [[channels[end] for end in ends] for channels in volumes.values()]


def _find_labels(
    volumes: Sequence[Sequence[Path]], source: Path, labels: Path, ends: Sequence[str] | None
) -> list[Path]:
    """Return the label volume of each volume: the file of the same name, without the end of its first modality."""
    end = "(_0000)?$" if ends is None else re.escape(ends[0]) + "$"
    names = [re.sub(end, "", _stem(paths[0], source)) for paths in volumes]
    there = {re.sub("(_0000)?$", "", _stem(path, labels)): path for path in list_files(labels, (".npy", *NIFTI))}
    if missing := sorted(set(names) - set(there)):
        raise FileNotFoundError(
            f"labels: expected a label volume with the name of each volume (nnU-Net's _0000 may be left out), got none "
            f"for {missing} in {str(labels)!r}."
        )
    return [there[name] for name in names]


class _Files:
    """The samples of a folder: each read from its files when it is asked for."""

    def __init__(
        self,
        source: Path,
        volumes: list[list[Path]],
        masks: Sequence[Path | None],
        numbers: list[int] | None,
        read: Callable[..., Row],
    ) -> None:
        self.source, self.volumes, self.masks, self.numbers, self.read = source, volumes, masks, numbers, read

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> Row:
        row = self.read(self.volumes[index], self.masks[index])
        if self.numbers is not None:
            row["labels"] = np.asarray(self.numbers[index], dtype=np.int64)
        return {**row, "files": self.volumes[index][0].relative_to(self.source).as_posix()}

    def name_of(self, index: int) -> str:
        """Return what an error message calls a sample."""
        return repr(str(self.volumes[index][0]))


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


def _read_volume(paths: Sequence[Path], mask: Path | None, *, size: Sequence[int] | None) -> Row:
    """Read a volume with its label volume, affine and spacing, cropped or padded to ``size`` about the centre."""
    volume, affine = _load_volume(paths[0])
    if len(paths) > 1:
        volume = np.stack([volume, *(_load_beside(path, volume, affine) for path in paths[1:])])
    row: Row = {"volumes": volume}
    if mask is not None:
        row["labels"] = _load_label(mask, volume, affine)
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
        volume, affine = np.load(path), None
    else:
        file = _open_nifti(path)
        volume = np.asanyarray(file.dataobj)
        if volume.dtype == np.float64 and file.get_data_dtype() != np.float64:  # nibabel applied slope and intercept
            volume = volume.astype(np.float32)
        volume = np.moveaxis(volume, 3, 0) if volume.ndim == 4 else volume
        affine = np.array(file.affine, dtype=np.float64)
    bad = 0 if volume.dtype.kind not in "fc" else volume.size - np.count_nonzero(np.isfinite(volume))
    what = "finite numbers; replace the others first"
    expect(not bad, f"values of {path.name!r}", f"{bad} that are NaN or infinite", what)
    return volume, affine


def _open_nifti(path: Path) -> Any:
    """Open a NIfTI file that is read at once, which is faster than the stream that nibabel would decompress."""
    import nibabel

    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        unzip: Any = importlib.import_module("isal.igzip") if installed("isal") else gzip
        content = unzip.decompress(content)
    kind = nibabel.Nifti2Image if content[:4] in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") else nibabel.Nifti1Image
    return kind.from_bytes(content)


def _load_beside(path: Path, volume: np.ndarray, affine: np.ndarray | None, axes: slice = slice(None)) -> np.ndarray:
    """Return a volume of the shape of another one, at the same place."""
    other, its_affine = _load_volume(path)
    name, shape = f"volume {str(path)!r}", volume.shape[axes]
    expect(other.shape == shape, name, other.shape, f"the shape {shape}")
    equal = affine is None or its_affine is None or np.allclose(affine, its_affine, atol=1e-3)
    expect(equal, name, its_affine, "the affine of its volume")
    return other


def _load_label(path: Path, volume: np.ndarray, affine: np.ndarray | None) -> np.ndarray:
    """Return a label volume as int16 if it fits its volume."""
    label = _load_beside(path, volume, affine, slice(-3, None))
    with np.errstate(invalid="ignore"):
        whole = label.astype(np.int16)
    expect(np.array_equal(whole, label), f"label volume {str(path)!r}", label.dtype, "whole numbers of 16 bits")
    return whole


def _fit(array: np.ndarray, start: np.ndarray, size: Sequence[int], fill: Any) -> np.ndarray:
    """Return the window of ``size`` voxels from ``start`` on, padded with ``fill`` outside of the array."""
    before = np.maximum(0, -start)
    after = np.maximum(0, start + size - array.shape[-3:])
    margins = [(0, 0)] * (array.ndim - 3) + list(zip(before, after, strict=True))
    padded = np.pad(array, margins, constant_values=fill)
    return padded[(..., *(slice(first, first + length) for first, length in zip(start + before, size, strict=True)))]
