"""``PatchDataset``: random patches of packed volumes; only the patch is read."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_turbo._checks import check_count, check_functions, expect, is_list, is_number, is_whole
from lightning_turbo.data.packed.intensities import Intensities
from lightning_turbo.data.packed.packed_dataset import PackedDataset, open_fields
from lightning_turbo.data.packed.rows import Rows, open_rows, read_row, shape_at
from lightning_turbo.data.packed.structure import WholeBatch, build, split_batch
from lightning_turbo.data.sample_seeds import seed_sample

__all__ = ["PatchDataset"]

ANY = 0  # key for the share of foreground of any class


class Place(NamedTuple):
    """The position of a patch: the row of its scan, and the first voxel, which is negative inside the padding."""

    scan: int
    start: tuple[int, ...]


class PatchDataset(Dataset[Any]):
    """Random patches of the volumes of a packed folder, which may differ in size.

    The files are memory-mapped, and only the patch is read. Sample ``n`` is a patch of scan ``n // per_scan``. With a
    shuffling sampler, the patches of all scans come in random order; a distributed sampler splits patches, not scans,
    among the ranks. Volumes are returned with a leading channel axis, even if they have only one channel.

    The position of a patch is drawn from torch's global RNG. With sample seeds (``seed_samples``, ``sample_seeds=``) it
    is a function of (seed, epoch, index): the patches are the same with any number of workers and ranks, and after a
    restart.

    Args:
        source: A folder written by ``pack_folder`` or ``pack``.
        patch: Size of a patch in voxels (or pixels), without channels.
        per_scan: Number of patches per scan and epoch.
        foreground: Fraction of the patches, from 0 to 1, whose center is a foreground voxel, as far as the border
            allows. A class of the scan is drawn uniformly, then one of its positions. Or a fraction per class: ``{1:
            0.2, 2: 0.4}``. A scan without the class yields any patch. Requires the positions stored by
            ``pack_folder(labels=)`` or ``pack(foreground=)``.
        pad: Fill value where a scan is smaller than the patch: one number, with 0 for the label volumes that were named
            at packing, or a number per field that is cut. ``None``: an error.
        keys: Names of fields, as in ``PackedDataset``. Fields with the axes of the patch are cut; an affine becomes
            that of the patch; others are returned whole.
        scans: Rows of the scans to use, for example for training or validation. Default: all.
        transform: Called on each sample, for example a transform of MONAI or TorchIO.

    Attributes:
        intensities: Foreground statistics, as in ``PackedDataset``, over all packed scans.

    Raises:
        FileNotFoundError: If the folder is missing.
        KeyError: If a field in ``keys`` is missing.
        TypeError: If an argument has the wrong type.
        ValueError: If a scan is smaller than ``patch`` without ``pad``, differs in its number of axes or channels, or
            has fields of different shapes (the message names its file); if foreground positions or a class are missing;
            or if an argument is out of range.

    Example:
        >>> import tempfile
        >>> from lightning_turbo.data import pack
        >>> folder = tempfile.mkdtemp() + "/packed"
        >>> scans = [{"image": np.zeros((5 + n, 6, 7)), "label": np.eye(6, 7)[None].repeat(5 + n, 0)} for n in (0, 1)]
        >>> _ = pack(scans, folder, foreground="label")
        >>> data = PatchDataset(folder, (4, 4, 4), per_scan=3, foreground=1.0)
        >>> len(data), data[4]["image"].shape, bool(data[4]["label"].any())
        (6, torch.Size([1, 4, 4, 4]), True)
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        patch: Sequence[int],
        *,
        per_scan: int = 1,
        foreground: float | Mapping[int, float] = 0.0,
        pad: float | Mapping[str, float] | None = None,
        keys: Sequence[str] | Mapping[str, str] | None = None,
        scans: Sequence[int] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        sizes = is_list(patch) and len(patch) > 0 and all(is_whole(length, 1) for length in patch)
        expect(sizes, "patch", patch, "a size such as (96, 96, 96), each at least 1", TypeError)
        pads = pad.values() if isinstance(pad, Mapping) else () if pad is None else [pad]
        what = "a finite number, a mapping from fields to numbers, or None"
        expect(all(map(is_number, pads)), "pad", pad, what, TypeError)
        check_functions(transform=transform)
        self.patch = tuple(map(int, patch))
        self.per_scan = check_count("per_scan", per_scan)
        self.foreground = _check_shares(foreground)
        self.transform = transform
        self._source = source
        self._keys = keys
        self._opened: _Volumes | None = _Volumes(source, keys, len(self.patch))
        # All scans are checked now, because an error inside an epoch would end hours of training.
        self.scans = _rows_of(scans, len(self._opened))
        self._opened.check(self.scans, None if pad is not None else self.patch)
        self.pad = self._opened.fills(pad)
        self.intensities = self._opened.intensities
        if self.foreground:
            self._opened.check_foreground(self.scans, self.foreground)

    @property
    def _volumes(self) -> _Volumes:
        if self._opened is None:
            self._opened = _Volumes(self._source, self._keys, len(self.patch))
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}  # each process maps the files itself

    def __len__(self) -> int:
        return len(self.scans) * self.per_scan

    def __getitem__(self, index: int) -> Any:
        volumes = self._volumes
        place = self._draw(index)
        parts = {name: self._read(name, [place])[0] for name in volumes.arrays}
        sample = build(volumes.template, parts)
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the patches at ``indices``, read into one batch unless a transform needs single samples."""
        volumes = self._volumes
        if self.transform is not None or not volumes.batched:
            return [self[index] for index in indices]
        places = [self._draw(index) for index in indices]
        batch = build(volumes.template, {name: self._read(name, places) for name in volumes.arrays})
        return WholeBatch(split_batch(batch, len(indices)), batch)

    collate = staticmethod(PackedDataset.collate)

    def _draw(self, index: int) -> Place:
        """Draw the position of a patch. Every call makes the same number of draws."""
        seed_sample(index)
        scan = self.scans[range(len(self))[index] // self.per_scan]
        chance, which, where, *free = torch.rand(3 + len(self.patch), dtype=torch.float64).tolist()
        center = self._volumes.foreground_at(scan, self.foreground, chance, which, where)
        lengths = self._volumes.lengths(scan)
        start = []
        for axis, (length, size) in enumerate(zip(lengths, self.patch, strict=True)):
            room = length - size
            if room < 0:
                start.append(-(-room // 2))  # center the scan in the padding
            elif center is None:
                start.append(int(free[axis] * (room + 1)))
            else:
                # Near the border of the scan, the position is off the center of the patch.
                start.append(min(max(center[axis] - size // 2, 0), room))
        return Place(scan, tuple(start))

    def _read(self, name: str, places: Sequence[Place]) -> Any:
        """Return the patches of a field, or its rows if it is not cut, stacked if their shapes agree."""
        volumes = self._volumes
        if name in volumes.cut:
            # Read straight into the batch, in the machine's byte order, because torch supports no other.
            shape = (len(places), volumes.channels[name], *self.patch)
            batch = np.empty(shape, dtype=volumes.arrays[name].dtype.newbyteorder("="))
            for patch, place in zip(batch, places, strict=True):
                self._cut(name, place, patch)
            return torch.from_numpy(batch)
        rows = [read_row(volumes.arrays[name], place.scan) for place in places]
        if name.rpartition(".")[2] == "affine" and len(self.patch) == 3:
            # The affine maps voxels of the patch, whose first voxel is at ``start`` in the scan.
            for affine, place in zip(rows, places, strict=True):
                affine[:3, 3] += affine[:3, :3] @ np.array(place.start)
        return rows if isinstance(rows[0], str) else torch.from_numpy(np.stack(rows))

    def _cut(self, name: str, place: Place, patch: np.ndarray) -> None:
        """Read a patch of a field."""
        row = self._volumes.arrays[name][place.scan]
        # The patch may extend beyond the scan: the slices to read in the scan, and where they go in the patch.
        inside, outside = [], []
        for first, size, length in zip(place.start, self.patch, row.shape[-len(self.patch) :], strict=True):
            begin, end = max(first, 0), min(first + size, length)
            inside.append(slice(begin, end))
            outside.append(slice(begin - first, end - first))
        read = row[(*[slice(None)] * (row.ndim - len(inside)), *inside)]
        if read.shape[-len(inside) :] != self.patch:
            patch[...] = self.pad[name]
        patch[(slice(None), *outside)] = read


class _Volumes:
    """The fields of a packed folder, from which patches are cut.

    Attributes:
        arrays: The memory-mapped fields of a sample by name.
        cut: Names of the fields that are cut.
        batched: Whether all other fields have one shape.
        label: Name of the label volumes whose foreground positions are stored, or ``None``.
        intensities: Foreground statistics.
    """

    def __init__(self, source: Any, keys: Any, axes: int) -> None:
        paths = isinstance(source, (str, os.PathLike))
        expect(paths, "source", source, "a folder written by pack_folder or pack", TypeError)
        self._folder = Path(source)
        self._axes = axes
        contents, self.template, self.arrays = open_fields(source, keys)
        self.label = contents.get("foreground")
        self.intensities: Intensities = contents.get("intensities", {})
        ranks = {name: len(shape_at(rows, 0)) for name, rows in self.arrays.items()}
        self.cut = [name for name, rank in ranks.items() if rank >= axes and name.rpartition(".")[2] != "affine"]
        expect(self.cut, "patch", f"{axes} axes for fields of {ranks}", "a field with the axes of the patch")
        self.channels = {name: self._channels(name, 0) for name in self.cut}
        self.batched = not any(isinstance(rows, Rows) for name, rows in self.arrays.items() if name not in self.cut)
        self._classes, self._places = (self._beside(f"{self.label}.{what}") for what in ("classes", "places"))

    def __len__(self) -> int:
        return len(self.arrays[self.cut[0]])

    def _beside(self, name: str) -> Any:
        path = self._folder / f"{name}.npy"
        return open_rows(path) if path.exists() else None

    def _channels(self, name: str, scan: int) -> int:
        shape = shape_at(self.arrays[name], scan)
        return shape[0] if len(shape) > self._axes else 1

    def lengths(self, scan: int) -> tuple[int, ...]:
        """Return the shape of a scan without channels."""
        return shape_at(self.arrays[self.cut[0]], scan)[-self._axes :]

    def check(self, scans: Sequence[int], least: Sequence[int] | None) -> None:
        """Raise an error for inconsistent scans or scans smaller than ``least``; the message names the file."""
        files = self._beside("files")
        for scan in scans:
            file = f"scan {scan}" if files is None else f"{files[scan]!r}"
            lengths = self.lengths(scan)
            for name in self.cut:
                shape = shape_at(self.arrays[name], scan)
                title = f"{name} of {file}"
                what = f"{self._axes} axes, or channels and {self._axes} axes"
                expect(self._axes <= len(shape) <= self._axes + 1, title, shape, what)
                expect(shape[-self._axes :] == lengths, title, shape, f"the shape {lengths} of {self.cut[0]}")
                channels = self.channels[name]
                what = f"{channels} channels like the first scan, before the {self._axes} axes of patch"
                expect(self._channels(name, scan) == channels, title, shape, what)
            fits = least is None or all(map(operator.le, least, lengths))
            expect(fits, f"patch for {file}", least, f"a size of at most {lengths}, or pad= with a number")

    def fills(self, pad: float | Mapping[str, float] | None) -> dict[str, float]:
        """Return the fill value of each field; raise an error for a number that its dtype cannot hold."""
        if pad is None:
            return {}
        if isinstance(pad, Mapping):
            same = set(pad) == set(self.cut)
            expect(same, "pad", dict(pad), f"a number for each of {self.cut}", KeyError)
            numbers = {name: float(number) for name, number in pad.items()}
        else:
            # Any field beside the image may be a label, for which the number is probably wrong.
            clear = self.label is not None or len(self.cut) == 1 or pad == 0
            example = dict.fromkeys(self.cut, pad) | {self.cut[-1]: 0}
            expect(clear, "pad", pad, f"a number per field, such as {example}, because packing named no label field")
            numbers = {name: 0.0 if name == self.label else float(pad) for name in self.cut}
        for name, number in numbers.items():
            dtype = self.arrays[name].dtype
            with np.errstate(invalid="ignore"):
                held = np.asarray(number).astype(dtype).item()
            expect(np.isclose(held, number), "pad", number, f"a number that {name} of {dtype} can hold")
        return numbers

    def check_foreground(self, scans: Sequence[int], shares: Mapping[int, float]) -> None:
        """Raise an error for classes without a position in any scan."""
        stored = self._classes is not None
        expect(
            stored, "foreground", dict(shares), "0, or a folder packed with pack_folder(labels=) or pack(foreground=)"
        )
        found = {int(each) for scan in scans for each in self._classes[scan][:, 0]}
        missing = sorted(set(shares) - {ANY} - found)
        expect(found and not missing, "foreground", missing or "any", f"classes in the scans: {sorted(found)}")

    def foreground_at(
        self, scan: int, shares: Mapping[int, float], chance: float, which: float, where: float
    ) -> list[int] | None:
        """Return a foreground position, chosen by three numbers from 0 to 1, or ``None`` for any position."""
        # The first number decides whether, and from which share; the next which class; the last which of its positions.
        bounds = zip(shares, accumulate(shares.values()), strict=True)
        wanted = next((each for each, bound in bounds if chance < bound), None)
        if wanted is None:
            return None
        classes, counts = self._classes[scan].T
        row = int(which * len(classes)) if wanted == ANY else int(np.searchsorted(classes, wanted))
        if row == len(classes) or (wanted != ANY and classes[row] != wanted):
            return None
        place = self._places[scan][int(counts[:row].sum()) + int(where * counts[row])]
        return place[-self._axes :].tolist()


def _rows_of(scans: Any, total: int) -> list[int]:
    """Return the numbers of the scans to use."""
    if isinstance(scans, Iterable) and not hasattr(scans, "dtype"):
        scans = list(scans)
    rows = np.arange(total) if scans is None else np.asarray(scans)
    # A boolean mask would select rows 0 and 1 repeatedly.
    what = "integers, the rows of scans, such as np.flatnonzero(mask)"
    expect(rows.ndim == 1 and (not rows.size or rows.dtype.kind in "iu"), "scans", scans, what, TypeError)
    expect(rows.size, "scans", scans, "at least one row")
    outside = [row for row in rows.tolist() if not -total <= row < total]
    expect(not outside, "scans", outside[:1], f"rows of the {total} scans of the folder", IndexError)
    return [range(total)[row] for row in rows.tolist()]


def _check_shares(foreground: Any) -> dict[int, float]:
    """Return the share of each class; that of ``ANY`` applies to all classes."""
    shares = dict(foreground) if isinstance(foreground, Mapping) else {ANY: foreground}
    numbers = all(is_number(share) and share >= 0 for share in shares.values())
    keys = not isinstance(foreground, Mapping) or all(is_whole(each, 1) for each in shares)
    what = "a share from 0 to 1, or a mapping of classes above 0 to shares of at most 1 together"
    expect(numbers and keys and sum(shares.values()) < 1 + 1e-9, "foreground", foreground, what)
    return {each: float(share) for each, share in shares.items() if share}
