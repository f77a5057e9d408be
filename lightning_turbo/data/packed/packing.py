"""``pack``: writes the samples of any dataset into a folder for ``PackedDataset``, completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo._checks import check_count, check_functions, check_switches, expect, is_list, is_whole
from lightning_turbo._optional import require
from lightning_turbo.data.packed.intensities import describe_intensities, draw_intensities
from lightning_turbo.data.packed.rows import Encoded, RowWriter, encode_row
from lightning_turbo.data.packed.structure import to_json
from lightning_turbo.errors import TurboWarning

__all__ = ["CONTENTS", "Packing", "Progress", "digest_of", "digest_of_sample", "pack", "stamp_of"]

CONTENTS = "packed.json"
JOURNAL = "journal"
PLACES = 10_000  # foreground positions to store per class of a sample
# Held by the thread that packs. The lock file is one of the process, so that its threads would pass it together.
_turns = threading.RLock()

Progress = Callable[[int, int], Any]


def pack(
    dataset: Any,
    out: str | os.PathLike[str],
    *,
    foreground: str | None = None,
    compress: bool | Sequence[int] = False,
    num_workers: int = 0,
    skip_broken: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pack the samples of any dataset, of one shape or of many, for ``PackedDataset`` and ``PatchDataset``.

    A sample is a tensor, an array, a number, a string, or dictionaries, lists and tuples of these; all samples have the
    same structure. Its parts become fields, named by the keys of a dictionary or ``0``, ``1``, ... for a list or tuple,
    joined with dots if nested; a sample without parts becomes ``data``. ``PackedDataset`` returns the same structure of
    lists, tuples and dictionaries, with tensors and strings in it. Put random transforms behind it, as its
    ``sample_transform``. The affine of MONAI's tensors becomes the field ``<name>.affine``, which is only read if
    ``keys`` names it.

    The folder ``out`` appears once everything is in it. Until then the data are in ``<out>.partial``; after an
    interruption, the next call continues there if the dataset has the same length and the same first sample.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``.
        out: Folder to write.
        foreground: Name of the field with label volumes, which have at most one channel. The positions of up to 10,000
            voxels of each class above 0 are stored for ``PatchDataset(foreground=)``, and 10,000 foreground intensities
            per scan for ``intensities``.
        compress: Whether to compress arrays of 64 KiB and more with blosc2, in chunks of a size that it chooses; or the
            chunk size along the last axes, ideally the patch size.
        num_workers: Number of worker processes that load samples.
        skip_broken: Whether to skip samples that raise an error and list them in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it holds a packed dataset and nothing else.
        progress: Called with the number of finished samples and the total.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names in the structure of a sample, as JSON), ``samples``,
            ``skipped`` (a number), ``classes`` (of the dataset, if any), ``foreground``, and the foreground
            ``intensities``: for each volume field and channel ``mean``, ``std``, ``min``, ``percentile_00_5``,
            ``median``, ``percentile_99_5`` and ``max``, with equal weight for each scan.

    Raises:
        FileExistsError: If ``out`` exists without ``overwrite``, or contains anything else.
        KeyError: If there is no field named ``foreground``.
        MissingExtraError: If blosc2 is missing for ``compress``.
        OSError: If the disk is full. The data so far stay, and the next call continues.
        TypeError: If a sample contains other types, or an argument has the wrong type.
        ValueError: If the dataset is empty, samples differ in structure, or two parts have the same name.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "packed"
        >>> pack([{"x": torch.ones(n), "y": n} for n in (2, 3)], folder)["arrays"]
        {'x': 'x', 'y': 'y'}
    """
    packing = Packing(Path(out), compress, num_workers, skip_broken, overwrite, progress)
    expect(len(dataset), "dataset", len(dataset), "at least one sample")
    contents = {"classes": list(getattr(dataset, "classes", ())), "foreground": foreground}
    return packing.write(dataset, None, contents, catch=skip_broken)


class Packing:
    """Writes samples into a folder: the arguments and steps that ``pack`` and ``pack_folder`` share."""

    def __init__(
        self,
        target: Path,
        compress: bool | Sequence[int] = False,
        num_workers: int = 0,
        skip_broken: bool = False,
        overwrite: bool = False,
        progress: Progress | None = None,
        *,
        exist_ok: bool = False,
    ) -> None:
        check_switches(skip_broken=skip_broken, overwrite=overwrite)
        check_functions(progress=progress)
        check_count("num_workers", num_workers, 0)
        chunks = is_list(compress) and len(compress) > 0 and all(is_whole(length, 1) for length in compress)
        what = "True, False, or the lengths of a chunk, each at least 1"
        expect(chunks or isinstance(compress, bool), "compress", compress, what, TypeError)
        if compress:
            require("blosc2", "compress")
        self.target = target
        self.compress = compress
        self.workers = num_workers
        self.skip_broken = skip_broken
        self.overwrite = overwrite
        self.progress = progress
        self.exist_ok = exist_ok
        self._check_target()

    def _check_target(self) -> None:
        """Raise an error if the folder exists, unless it may be replaced or ``exist_ok`` is set."""
        what = "a new folder, or with overwrite=True (--overwrite) one that contains only a packed dataset"
        replaceable = not self.target.exists() or (self.overwrite and _is_packed(self.target))
        expect(replaceable or self.exist_ok, "out", str(self.target), what, FileExistsError)

    def write(
        self,
        dataset: Any,
        key: str | None,
        contents: dict[str, Any],
        *,
        catch: bool = True,
        beside: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write all samples, and return the contents of ``packed.json``.

        Args:
            dataset: Has ``__getitem__``, ``__len__``, and perhaps ``name_of(index)`` for messages.
            key: Identifies the samples. Only files with the same key are continued. ``None``: a digest of the first
                sample.
            contents: Additional entries of ``packed.json``.
            catch: Whether to collect errors of the dataset.
            beside: Fields that belong to a sample only on request.
        """
        encoder = _Encoder(dataset, contents["foreground"], catch)
        first = encoder.begin(self.compress)
        key = digest_of(key or first, len(dataset), self.compress, contents["foreground"])
        with _unfinished_folder(self.target, key) as (folder, journal):
            if self.target.exists() and not self.overwrite:  # another process or thread has finished it
                shutil.rmtree(folder)
                # An error for ``pack``; a cache uses what the other process wrote.
                self._check_target()
                return json.loads((self.target / CONTENTS).read_text())
            with contextlib.closing(RowWriter(folder, journal)) as writer:
                repaired = any(not isinstance(encoder[index], str) for index in writer.broken)
            if repaired:  # rows are in order, so a sample that failed before has no room
                _begin_journal(folder, journal, key)
            with contextlib.closing(RowWriter(folder, journal)) as writer:
                self._append_all(writer, encoder)
                self._report(writer)
                writer.finish()
            arrays = encoder.template
            if beside:
                arrays = tuple(name for name in arrays if name not in beside)
                # A single field is the sample itself.
                arrays = arrays[0] if len(arrays) == 1 else arrays
            contents = {"arrays": to_json(arrays), **contents, "samples": writer.count, "skipped": len(writer.broken)}
            contents["intensities"] = describe_intensities(folder)
            (folder / CONTENTS).write_text(json.dumps(contents, indent=1))
            # Without its journal, the folder contains exactly a packed dataset. After a kill before the rename, the
            # next call starts again from the first sample.
            journal.close()  # Windows does not delete an open file
            (folder / JOURNAL).unlink()
            if self.target.exists():
                shutil.rmtree(self.target)
            folder.replace(self.target)
        return contents

    def _append_all(self, writer: RowWriter, encoder: _Encoder) -> None:
        """Load and write the remaining samples."""
        # With its own generator, because the loader would draw its seed from the user's global one.
        total = len(encoder)
        left = range(writer.done, len(encoder))
        loader = DataLoader(
            encoder, None, sampler=left, num_workers=self.workers, collate_fn=_same, generator=torch.Generator(),
            worker_init_fn=_end_with_parent,
        )  # fmt: skip
        for loaded in loader:
            try:
                writer.append(loaded if isinstance(loaded, str) else encoder.check(loaded, writer.done))
            except OSError as error:
                with contextlib.suppress(OSError):  # flushing the rest of the row fails again
                    writer.close()
                raise OSError(
                    error.errno,
                    f"{error.strerror} after {writer.done} of {total} samples. They stay in {str(writer.folder)!r}; "
                    "free some space and pack again, which continues there, or remove the folder",
                ) from error
            if self.progress is not None:
                self.progress(writer.done, total)

    def _report(self, writer: RowWriter) -> None:
        """Write the list of skipped samples beside the folder, or raise an error that lists all broken ones."""
        lines = "".join(f"{line}\n" for line in writer.broken.values())
        if self.skip_broken and writer.count and lines:
            self.target.with_name(f"{self.target.name}.broken.txt").write_text(lines)
        elif lines:
            kept = f" The others stay in {str(writer.folder)!r}, where the next call continues." if writer.count else ""
            raise _BrokenSamplesError(
                f"{len(writer.broken)} of {writer.done} samples cannot be packed:\n{lines}"
                f"Repair or remove them, or skip them with skip_broken=True (--skip-broken).{kept}",
                keep=writer.count > 0,
            )


class _BrokenSamplesError(ValueError):
    """Some samples cannot be packed; ``keep`` says whether the others stay for a call that skips the broken ones."""

    def __init__(self, message: str, *, keep: bool) -> None:
        super().__init__(message)
        self.keep = keep


class _Encoder(Dataset[Any]):
    """A dataset of encoded samples: the structure of each, and the encoded rows of its fields."""

    def __init__(self, dataset: Any, foreground: str | None, catch: bool) -> None:
        self.dataset = dataset
        self.foreground = foreground
        self.catch = catch
        self.compress: bool | Sequence[int] = False
        self.template: Any = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Encoded]] | str:
        """Return the structure and rows of a sample, or a description of what is wrong with it."""
        name_of = getattr(self.dataset, "name_of", "sample {}".format)
        try:
            fields: dict[str, Any] = {}
            template = _flatten(self.dataset[index], "", fields)
            expect(fields, "sample", template, "at least one part")
            if self.foreground is not None:
                _add_fields(fields, _find_foreground(self.foreground, fields))
            return template, {name: encode_row(value, self.compress) for name, value in fields.items()}
        except Exception as error:  # Pillow, nibabel and datasets raise many kinds of errors
            if not self.catch:
                raise
            return f"{name_of(index)}: {error}"

    def begin(self, compress: bool | Sequence[int]) -> str:
        """Read the structure from the first sample that can be loaded, and return a digest of its rows."""
        good = (sample for sample in map(self.__getitem__, range(len(self))) if not isinstance(sample, str))
        self.template, rows = next(good, (None, {}))
        self.compress = compress  # set afterwards: compressed bytes may differ for the same sample
        return _digest_of_rows(rows)

    def check(self, loaded: tuple[Any, dict[str, Encoded]], index: int) -> dict[str, Encoded]:
        """Return the rows of a sample after comparing its structure with the first one's."""
        template, rows = loaded
        expect(template == self.template, f"sample {index}", template, f"the structure {self.template!r} of the first")
        return rows


def digest_of_sample(dataset: Any, index: int) -> str:
    """Return a digest of a sample in its encoded form."""
    fields: dict[str, Any] = {}
    _flatten(dataset[index], "", fields)
    return _digest_of_rows({name: encode_row(value) for name, value in fields.items()})


def _digest_of_rows(rows: Mapping[str, Encoded]) -> str:
    return digest_of(*((name, row.kind, row.shape, hashlib.sha256(row.data).digest()) for name, row in rows.items()))


def _same(sample: Any) -> Any:
    return sample


def _end_with_parent(worker: int) -> None:
    """End a worker process when its parent is gone; torch's workers wait until their data are read."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=wait, daemon=True).start()


def _flatten(value: Any, name: str, fields: dict[str, Any]) -> Any:
    """Add the parts of a sample to ``fields``, and return its structure with their names."""
    prefix = name and f"{name}."
    if isinstance(value, Mapping):
        keys = all(isinstance(key, (str, int, float)) for key in value)
        expect(keys, name or "sample", list(value), "keys that are strings or numbers", TypeError)
        return {key: _flatten(part, f"{prefix}{key}", fields) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_flatten(part, f"{prefix}{number}", fields) for number, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    _add_fields(fields, _as_fields(name or "data", value))
    return name or "data"


def _as_fields(name: str, value: Any) -> dict[str, Any]:
    """Return a part of a sample as a field, plus another one for the affine of a MONAI tensor."""
    valid = not set(name) & set("/\\\0") and not name.startswith(".")
    expect(valid, "name", name, "a field name that is a valid file name")
    found = {name: _as_row(name, value)}
    affine = getattr(value, "affine", None) if isinstance(value, torch.Tensor) else None
    if affine is not None:
        found[f"{name}.affine"] = np.asarray(affine, dtype=np.float64)
    return found


def _add_fields(fields: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add fields; raise an error for a duplicate name, for example from the keys 1 and "1"."""
    twice = sorted(set(fields) & set(found))
    expect(not twice, "sample", f"two parts called {twice}", "one part per field name; rename one")
    fields |= found


def _as_row(name: str, value: Any) -> np.ndarray | str:
    """Return a part of a sample as an array or a string."""
    if isinstance(value, str):
        return value
    what = "a tensor, an array, a number or a string, in dictionaries, lists or tuples"
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except TypeError as error:  # such as bfloat16
        raise TypeError(f"{name}: expected a dtype that NumPy has, got {getattr(value, 'dtype', value)!r}.") from error
    expect(array.dtype.kind in "biufc", name, type(value).__name__, what, TypeError)
    return array


def _find_foreground(name: str, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the classes of a label volume with numbers of positions, some positions per class, and intensities."""
    expect(name in fields, "foreground", name, f"one of {list(fields)}", KeyError)
    label = fields[name]
    inside = np.flatnonzero(label > 0)
    values = label.ravel()[inside]
    classes = np.unique(values)
    expect(np.array_equal(classes, classes.astype(np.int64)), name, classes.tolist(), "integers")
    chooser = np.random.default_rng(0)
    places = [inside[values == each] for each in classes]
    few = [each if len(each) <= PLACES else np.sort(chooser.choice(each, PLACES, replace=False)) for each in places]
    voxels = np.concatenate([np.zeros(0, dtype=np.int64), *few])
    counts = np.array([(each, len(chosen)) for each, chosen in zip(classes, few, strict=True)], dtype=np.int64)
    axes = np.stack(np.unravel_index(voxels, label.shape), axis=1).astype(np.int32)
    places_of = {f"{name}.classes": counts.reshape(-1, 2), f"{name}.places": axes}
    return places_of | draw_intensities(name, fields, inside)


def _is_packed(folder: Path) -> bool:
    """Return whether a folder is empty or contains a packed dataset and nothing else."""
    found = list(folder.glob("*"))
    others = [path.name for path in found if path.is_dir() or path.suffix not in (".npy", ".index")]
    return folder.is_dir() and (not found or others == [CONTENTS])


@contextlib.contextmanager
def _unfinished_folder(target: Path, key: str) -> Iterator[tuple[Path, Any]]:
    """Yield the partial folder beside ``target`` and its journal, while no other process or thread writes there.

    An interrupted call leaves both, for the next one to continue; so does a full disk.
    """
    folder = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _turns, _locked(folder.with_name(folder.name + ".lock")):
        folder.mkdir(exist_ok=True)
        with (folder / JOURNAL).open("a+") as journal:
            journal.seek(0)
            if journal.readline() != f"{key}\n":
                _begin_journal(folder, journal, key)
            try:
                yield folder, journal
            except Exception as error:
                # After an error of the dataset, the dataset changes. A killed worker process counts as an interruption.
                keep = isinstance(error, OSError) or str(error).startswith("DataLoader worker")
                if not getattr(error, "keep", keep):
                    journal.close()  # Windows does not delete an open file
                    shutil.rmtree(folder)
                raise


def _begin_journal(folder: Path, journal: Any, key: str) -> None:
    """Remove the data of an earlier call, and write the first line of the journal."""
    for path in folder.iterdir():
        if path.name != JOURNAL:
            path.unlink()
    journal.truncate(0)
    journal.write(f"{key}\n")
    journal.flush()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which is created first and removed at the end.

    It is beside the folder, not in it: waiting processes would hold a lock in a folder that was renamed or removed.
    """
    try:
        import fcntl
    except ImportError:  # on Windows only one process may pack at a time; its threads wait for one another
        yield
        return
    while True:
        with path.open("a") as file:
            try:
                # A lock per process: with flock(2), worker processes that outlive a killed parent would hold its lock.
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                what = "The file system of %r has no locks. Let one process pack, and start the others when it is done."
                warnings.warn(what % file.name, TurboWarning, stacklevel=2)
            # The previous holder has removed the file, and another process may have created it again.
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if os.path.samestat(found, os.fstat(file.fileno())):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def stamp_of(path: Path) -> tuple[str, int, int]:
    """Return values that change with a file: path, size and modification time."""
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


def digest_of(*parts: Any) -> str:
    """Return a digest of values whose ``repr`` describes them fully."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
