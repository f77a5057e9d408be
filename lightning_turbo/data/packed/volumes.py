"""Reads volumes and label volumes from ``.npy`` and NIfTI files for packing."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_turbo._checks import expect
from lightning_turbo._optional import installed
from lightning_turbo.errors import TurboWarning

__all__ = ["read_volume", "warn_of_two_affines"]

CLOSE = 1e-3  # millimeters by which affines may differ
SAME = 1e-3  # voxels; a smaller difference in position is ignored
EXACT_UP_TO = 1 << 24  # float32 holds each integer up to this one


def read_volume(
    paths: Sequence[Path], mask: Path | None, *, spacing: Sequence[float] | None, size: Sequence[int] | None
) -> dict[str, Any]:
    """Read a volume with its label volume, affine and spacing; resample it and crop or pad it about its center.

    Args:
        paths: The files of its channels.
        mask: The label volume, or ``None``.
        spacing: Voxel spacing in millimeters to resample to, or ``None``.
        size: Size to crop or pad to, or ``None``.
    """
    first, *others = paths
    volume, affine = _load(first)
    if others:
        volume = np.stack([volume, *(_load_beside(path, volume, affine) for path in others)])
    row = {"volumes": volume}
    if mask is not None:
        row["labels"] = _load_label(mask, volume, affine)
    changed = size is not None or spacing is not None
    expect(volume.ndim >= 3 or not changed, "volume", volume.shape, "3 axes, to resample, crop or pad it")
    if spacing is not None:
        row, affine = _at_spacing(row, affine, spacing)
    if size is not None:
        row, affine = _at_size(row, affine, size)
    if affine is not None:
        row |= {"affine": affine, "spacing": np.linalg.norm(affine[:3, :3], axis=0)}
    return row


def _at_spacing(row: dict[str, Any], affine: Any, spacing: Sequence[float]) -> tuple[dict[str, Any], Any]:
    """Return the volumes and their affine, resampled to another voxel spacing."""
    given = np.linalg.norm(affine[:3, :3], axis=0)
    expect((given > 0).all(), "spacing of the file", given.tolist(), "spacings above 0, to resample it")
    steps = np.divide(spacing, given)
    scaled = affine.copy()
    scaled[:3, :3] *= steps
    volume = _as_float32(row["volumes"], is_whole=row["volumes"].dtype.kind in "iu")
    resampled = {"volumes": _resample(volume, steps, nearest=False)}
    if "labels" in row:
        resampled["labels"] = _resample(row["labels"], steps, nearest=True)
    return resampled, scaled


def _resample(volume: np.ndarray, steps: np.ndarray, *, nearest: bool) -> np.ndarray:
    """Return a volume resampled along its last three axes, starting at its first voxel.

    An axis of ``n`` voxels gets ``round((n - 1) / step + 1)`` voxels, as in MONAI's ``Spacing``. The last one may lie
    half a step beyond the border, where the last voxel is repeated.

    Args:
        volume: Of shape ``(..., *space)``.
        steps: Distance between the new voxels along each axis, in voxels.
        nearest: Whether to take the nearest voxel, as for labels, instead of SciPy's cubic spline.
    """
    from scipy.ndimage import affine_transform

    space = np.array(volume.shape[-3:])
    new = np.round((space - 1) / steps + 1).astype(int)
    if np.array_equal(new, space) and np.abs((new - 1) * steps - (space - 1)).max() < SAME:
        return volume
    if nearest:
        places = [np.rint(np.arange(count) * step).astype(int) for count, step in zip(new, steps, strict=True)]
        return volume[(..., *np.ix_(*map(np.minimum, places, space - 1)))]
    resampled = [
        affine_transform(each, steps, output_shape=tuple(new), order=3, mode="nearest")
        for each in volume.reshape(-1, *space)
    ]
    return np.stack(resampled).reshape(*volume.shape[:-3], *new)


def _as_float32(volume: np.ndarray, *, is_whole: bool) -> np.ndarray:
    """Return a volume as float32.

    Args:
        volume: The volume.
        is_whole: Whether it holds integers, of which float32 has to hold each.

    Raises:
        ValueError: If float32 cannot hold an integer.
    """
    with np.errstate(over="ignore"):
        result = volume.astype(np.float32)
    if is_whole and volume.dtype.itemsize > 2:
        far = np.unique(volume[np.abs(result) >= EXACT_UP_TO]).tolist()
        lost = [each for each in far if float(np.float32(each)) != each]  # Python compares integers and floats exactly
        what = "integers that float32 can hold, the dtype of volumes that are shifted by an intercept or resampled"
        expect(not lost, "voxels", lost[:1], what)
    return result


def _at_size(row: dict[str, Any], affine: Any, size: Sequence[int]) -> tuple[dict[str, Any], Any]:
    """Return the volumes, cropped or padded about their center, and their affine."""
    start = np.subtract(row["volumes"].shape[-3:], size) // 2
    if affine is not None:
        affine[:3, 3] += affine[:3, :3] @ start
    return {
        name: _fit(array, start, size, 0 if name == "labels" else array.min()) for name, array in row.items()
    }, affine


def warn_of_two_affines(paths: Sequence[Path]) -> None:
    """Warn in how many NIfTI files sform and qform differ, and which one is used."""
    import nibabel

    found = []
    for path in paths:
        # Unreadable files are reported when they are packed.
        with contextlib.suppress(Exception):
            header: Any = nibabel.load(path).header
            sform, qform = header.get_sform(coded=True)[0], header.get_qform(coded=True)[0]
            if sform is not None and qform is not None and not np.allclose(sform, qform, atol=CLOSE):
                found.append(path.name)
    if found:
        warnings.warn(
            f"sform and qform differ in {len(found)} of {len(paths)} files, such as {found[0]!r}. The sform is used, "
            "as in nibabel; ITK may use the qform. Set both to the right one if it matters.",
            TurboWarning,
            stacklevel=4,
        )


def _load(path: Path) -> tuple[np.ndarray, Any]:
    """Return a volume with channels first, and the affine of a NIfTI file."""
    if path.suffix.lower() == ".npy":
        volume = np.load(path)
        affine = None
    else:
        file = _open_nifti(path)
        volume = np.asanyarray(file.dataobj)
        if volume.dtype == np.float64 and file.get_data_dtype() != np.float64:  # nibabel applied slope and intercept
            is_whole = file.get_data_dtype().kind in "iu" and abs(file.dataobj.slope) == 1
            volume = _as_float32(volume, is_whole=is_whole)
        # SimpleITK, FSL and others write a trailing axis of size 1, and vectors along the fifth axis.
        volume = volume.squeeze(tuple(axis for axis in range(3, volume.ndim) if volume.shape[axis] == 1))
        expect(volume.ndim <= 4, f"axes of {path.name!r}", volume.shape, "three axes, plus one for channels")
        volume = np.moveaxis(volume, 3, 0) if volume.ndim == 4 else volume
        affine = np.array(file.affine, dtype=np.float64)
    expect(volume.size, f"voxels of {path.name!r}", volume.shape, "at least one")
    expect(volume.dtype.kind in "biufc", f"values of {path.name!r}", str(volume.dtype), "numbers", TypeError)
    bad = 0 if volume.dtype.kind not in "fc" else volume.size - np.count_nonzero(np.isfinite(volume))
    what = "finite numbers; replace others first"
    expect(not bad, f"values of {path.name!r}", f"{bad} that are NaN or infinite", what)
    return volume, affine


def _open_nifti(path: Path) -> Any:
    """Open a NIfTI file from memory, which is faster than nibabel's stream decompression."""
    import nibabel

    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        unzip: Any = importlib.import_module("isal.igzip") if installed("isal") else gzip
        content = unzip.decompress(content)
    kind = nibabel.Nifti2Image if content[:4] in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") else nibabel.Nifti1Image
    return kind.from_bytes(content)


def _load_beside(path: Path, volume: np.ndarray, affine: Any, axes: slice = slice(None)) -> np.ndarray:
    """Return a volume with the shape and affine of another one."""
    other, its_affine = _load(path)
    name = f"volume {str(path)!r}"
    shape = volume.shape[axes]
    if other.shape != shape and len(other.shape) > len(shape):
        # The .npy file of a label volume may have a channel axis, like its volume.
        other = other.reshape(other.shape[-len(shape) :]) if other.size == np.prod(shape) else other
    expect(other.shape == shape, name, other.shape, f"the shape {shape}")
    equal = affine is None or its_affine is None or np.allclose(affine, its_affine, atol=CLOSE)
    expect(equal, name, its_affine, "the affine of its volume")
    return other


def _load_label(path: Path, volume: np.ndarray, affine: Any) -> np.ndarray:
    """Return a label volume as int16, after checking that it matches its volume."""
    label = _load_beside(path, volume, affine, slice(-3, None))
    with np.errstate(invalid="ignore"):
        whole = label.astype(np.int16)
    wrong = label[whole != label]
    found = f"{wrong.size} others, such as {wrong[0]:.6g}" if wrong.size else None
    expect(found is None, f"label volume {str(path)!r}", found, "16-bit integers")
    return whole


def _fit(array: np.ndarray, start: np.ndarray, size: Sequence[int], fill: Any) -> np.ndarray:
    """Return the window of ``size`` voxels from ``start``, padded with ``fill`` outside the array."""
    before = np.maximum(0, -start)
    after = np.maximum(0, start + size - array.shape[-3:])
    margins = [(0, 0)] * (array.ndim - 3) + list(zip(before, after, strict=True))
    padded = np.pad(array, margins, constant_values=fill)
    return padded[(..., *(slice(first, first + length) for first, length in zip(start + before, size, strict=True)))]
