"""``pack``: write the samples of any dataset into a folder for ``PackedDataset``, whole or not at all."""

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
from lightning_turbo.data.loading.spawned import check_workers_can_start
from lightning_turbo.data.packed.intensities import describe_intensities, draw_intensities
from lightning_turbo.data.packed.rows import Encoded, RowWriter, encode_row
from lightning_turbo.data.packed.structure import to_json
from lightning_turbo.errors import TurboWarning

__all__ = ["CONTENTS", "Packing", "Progress", "digest_of", "digest_of_sample", "pack", "stamp_of"]

CONTENTS = "packed.json"
JOURNAL = "journal"
PLACES = 10_000  # of foreground, kept for each class of a sample

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

    A sample is a tensor, an array, a number, a string, or dictionaries, lists and tuples of these, each sample with
    the same structure. Its parts become fields: the keys of a dictionary, ``0``, ``1``, ... of a list or tuple, joined
    by dots where one lies in another; ``data`` if a sample has no parts. ``PackedDataset`` returns the structure again:
    lists, tuples and dictionaries with their keys, and tensors and strings in them. Random transforms belong behind it,
    as its ``sample_transform``. The affine of MONAI's tensors becomes the field ``<name>.affine``, which is read if
    ``keys`` names it.

    The folder ``out`` appears when everything is in it. What is written before stands in ``<out>.partial``; if packing
    is interrupted, the next call goes on there, if the dataset has as many samples and the first one is the same.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``.
        out: Folder to write.
        foreground: Name of the field with label volumes, one channel at most. The places of up to 10,000 voxels of each
            class above 0 are stored for ``PatchDataset(foreground=)``, and 10,000 intensities of the foreground of each
            scan for ``intensities``.
        compress: Whether blosc2 compresses arrays of 64 KiB and more, in chunks that it chooses; or the size of the
            chunks in the last axes, best that of the patches.
        num_workers: Number of processes that load samples.
        skip_broken: Whether to skip samples that raise an error and list them in ``<out>.broken.txt``.
        overwrite: Whether to replace ``out`` if it holds a packed dataset and nothing else.
        progress: Called with the number of finished samples and of all samples.

    Returns:
        The contents of ``packed.json``: ``arrays`` (names in the structure of a sample, as JSON keeps it), ``samples``,
        ``skipped`` (a number), ``classes`` (those of the dataset, if it has any), ``foreground``, and
        ``intensities`` of its foreground: for each field of volumes and each channel ``mean``, ``std``, ``min``,
        ``percentile_00_5``, ``median``, ``percentile_99_5`` and ``max``, each scan weighing the same.

    Raises:
        FileExistsError: If ``out`` exists and ``overwrite`` is not set, or it holds something else.
        KeyError: If no field is named ``foreground``.
        MissingExtraError: If blosc2 is missing for ``compress``.
        OSError: If there is no room. What is written stays, and the next call goes on.
        TypeError: If a sample holds something else, or an argument has a wrong type.
        ValueError: If the dataset is empty, samples differ in structure, or two parts of one have the same name.

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
    """How samples are written into a folder: the arguments that ``pack`` and ``pack_folder`` share."""

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
        """Refuse a folder that exists, unless it may be replaced, or is welcome as it is."""
        what = "a folder that does not exist, or with overwrite=True (--overwrite) one that holds only a packed dataset"
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
            key: What the samples follow from. Only files with the same key are continued. ``None``: the first sample.
            contents: Further entries of ``packed.json``.
            catch: Whether errors of the dataset are collected.
            beside: Fields that are no part of a sample unless they are asked for.
        """
        encoder = _Encoder(dataset, contents["foreground"], catch)
        first = encoder.begin(self.compress)
        key = digest_of(key or first, len(dataset), self.compress, contents["foreground"])
        with _unfinished_folder(self.target, key) as (folder, journal):
            if self.target.exists() and not self.overwrite:  # another process finished it meanwhile
                shutil.rmtree(folder)
                # An error for ``pack``; a cache takes what the other process wrote.
                self._check_target()
                return json.loads((self.target / CONTENTS).read_text())
            with contextlib.closing(RowWriter(folder, journal)) as writer:
                repaired = any(not isinstance(encoder[index], str) for index in writer.broken)
            if repaired:  # the place of a sample that an earlier call could not load is taken
                _begin_journal(folder, journal, key)
            with contextlib.closing(RowWriter(folder, journal)) as writer:
                self._append_all(writer, encoder)
                self._report(writer)
                if writer.count:
                    writer.finish()
            arrays = encoder.template
            if beside:
                arrays = tuple(name for name in arrays if name not in beside)
                # One field alone is the sample.
                arrays = arrays[0] if len(arrays) == 1 else arrays
            contents = {"arrays": to_json(arrays), **contents, "samples": writer.count, "skipped": len(writer.broken)}
            contents["intensities"] = describe_intensities(folder)
            (folder / CONTENTS).write_text(json.dumps(contents, indent=1))
            # Without its journal the folder holds what a packed dataset holds. After a kill before the rename, the next
            # call begins again from the first sample.
            journal.close()  # on Windows a file that is open stays
            (folder / JOURNAL).unlink()
            if self.target.exists():
                shutil.rmtree(self.target)
            folder.replace(self.target)
        return contents

    def _append_all(self, writer: RowWriter, encoder: _Encoder) -> None:
        """Load and write what is not written yet."""
        # A generator of its own: the loader would draw its seed from the global one, whose numbers are the user's.
        total = len(encoder)
        left = range(writer.done, len(encoder))
        loader = DataLoader(
            encoder, None, sampler=left, num_workers=self.workers, collate_fn=_same, generator=torch.Generator(),
            worker_init_fn=_end_with_parent,
        )  # fmt: skip
        check_workers_can_start(loader)
        for loaded in loader:
            try:
                writer.append(loaded if isinstance(loaded, str) else encoder.check(loaded, writer.done))
            except OSError as error:
                with contextlib.suppress(OSError):  # the rest of the row, which found no room
                    writer.close()
                raise OSError(
                    error.errno,
                    f"{error.strerror} after {writer.done} of {total} samples. They stay in {str(writer.folder)!r}; "
                    "make room and pack again, which goes on there, or remove it",
                ) from error
            if self.progress is not None:
                self.progress(writer.done, total)

    def _report(self, writer: RowWriter) -> None:
        """Write the list of what was left out beside the folder, or raise an error that names all of it."""
        lines = "".join(f"{line}\n" for line in writer.broken.values())
        if self.skip_broken and writer.count and lines:
            self.target.with_name(f"{self.target.name}.broken.txt").write_text(lines)
        elif lines:
            kept = f" The others stay in {str(writer.folder)!r}, where that call goes on." if writer.count else ""
            raise _BrokenSamplesError(
                f"{len(writer.broken)} of {writer.done} samples cannot be packed:\n{lines}"
                f"Repair or remove them, or skip them with skip_broken=True (--skip-broken).{kept}",
                keep=writer.count > 0,
            )


class _BrokenSamplesError(ValueError):
    """Some samples cannot be packed; ``keep`` says whether the others stay for a call that skips these."""

    def __init__(self, message: str, *, keep: bool) -> None:
        super().__init__(message)
        self.keep = keep


class _Encoder(Dataset[Any]):
    """A dataset of the samples of another one, as they are written: their structure, and the rows of their fields."""

    def __init__(self, dataset: Any, foreground: str | None, catch: bool) -> None:
        self.dataset = dataset
        self.foreground = foreground
        self.catch = catch
        self.compress: bool | Sequence[int] = False
        self.template: Any = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Encoded]] | str:
        """Return the structure and the rows of a sample, or what is wrong with it."""
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
        """Take the structure from the first sample that can be loaded, and return a digest of its rows."""
        good = (sample for sample in map(self.__getitem__, range(len(self))) if not isinstance(sample, str))
        self.template, rows = next(good, (None, {}))
        self.compress = compress  # whose bytes may be others for the same sample
        return _digest_of_rows(rows)

    def check(self, loaded: tuple[Any, dict[str, Encoded]], index: int) -> dict[str, Encoded]:
        """Return the rows of a sample that has the structure of the first one."""
        template, rows = loaded
        expect(template == self.template, f"sample {index}", template, f"the structure {self.template!r} of the first")
        return rows


def digest_of_sample(dataset: Any, index: int) -> str:
    """Return a digest of a sample as it is written."""
    fields: dict[str, Any] = {}
    _flatten(dataset[index], "", fields)
    return _digest_of_rows({name: encode_row(value) for name, value in fields.items()})


def _digest_of_rows(rows: Mapping[str, Encoded]) -> str:
    return digest_of(*((name, row.kind, row.shape, hashlib.sha256(row.data).digest()) for name, row in rows.items()))


def _same(sample: Any) -> Any:
    return sample


def _end_with_parent(worker: int) -> None:
    """End a worker process once the one that packs is gone; torch's waits until somebody reads what it has loaded."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=wait, daemon=True).start()


def _flatten(value: Any, name: str, fields: dict[str, Any]) -> Any:
    """Put the parts of a sample into ``fields``, and return its structure with their names in it."""
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
    """Return a part of a sample as a field, and the affine of a tensor of MONAI's as another one."""
    valid = not set(name) & set("/\\\0") and not name.startswith(".")
    expect(valid, "name", name, "a name of a field that a file can have")
    found = {name: _as_row(name, value)}
    affine = getattr(value, "affine", None) if isinstance(value, torch.Tensor) else None
    if affine is not None:
        found[f"{name}.affine"] = np.asarray(affine, dtype=np.float64)
    return found


def _add_fields(fields: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Put further fields beside others; refuse a second one of a name, as of the keys 1 and "1"."""
    twice = sorted(set(fields) & set(found))
    expect(not twice, "sample", f"two parts called {twice}", "one part for each name of a field; rename one")
    fields |= found


def _as_row(name: str, value: Any) -> np.ndarray | str:
    """Return a part of a sample as an array, or as the string that it is."""
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
    """Return the classes of a label volume with their numbers of places, some places of each class, and intensities."""
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
    """Return whether a folder is empty or holds a packed dataset and nothing else."""
    found = list(folder.glob("*"))
    others = [path.name for path in found if path.is_dir() or path.suffix not in (".npy", ".index")]
    return folder.is_dir() and (not found or others == [CONTENTS])


@contextlib.contextmanager
def _unfinished_folder(target: Path, key: str) -> Iterator[tuple[Path, Any]]:
    """Yield the folder beside ``target`` in which it is written, and its journal, when no other process writes there.

    An earlier call that was interrupted left both. They stay when this one is interrupted or finds no room.
    """
    folder = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        folder.mkdir(exist_ok=True)
        with (folder / JOURNAL).open("a+") as journal:
            journal.seek(0)
            if journal.readline() != f"{key}\n":
                _begin_journal(folder, journal, key)
            try:
                yield folder, journal
            except Exception as error:
                # The dataset's errors end with another dataset; a worker process that was killed is as an interruption.
                keep = isinstance(error, OSError) or str(error).startswith("DataLoader worker")
                if not getattr(error, "keep", keep):
                    journal.close()  # on Windows a file that is open stays
                    shutil.rmtree(folder)
                raise


def _begin_journal(folder: Path, journal: Any, key: str) -> None:
    """Remove what an earlier call wrote, and write the first line of the journal."""
    for path in folder.iterdir():
        if path.name != JOURNAL:
            path.unlink()
    journal.truncate(0)
    journal.write(f"{key}\n")
    journal.flush()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made, and removed in the end.

    It lies beside what is written: a folder that is renamed or removed could get another file from who waits.
    """
    try:
        import fcntl
    except ImportError:  # Windows: there one process packs at a time
        yield
        return
    while True:
        with path.open("a") as file:
            try:
                # Of the process alone: with flock(2) worker processes that outlive a killed one would hold its lock.
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                what = "The file system of %r has no locks. Let one process pack, and the others begin when it is done."
                warnings.warn(what % file.name, TurboWarning, stacklevel=2)
            # The process that held the lock has removed the file since, and another one may have made it again.
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
    """Return what changes with a file: its path, size and time of writing."""
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


def digest_of(*parts: Any) -> str:
    """Return a digest of values whose ``repr`` says all of them."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
