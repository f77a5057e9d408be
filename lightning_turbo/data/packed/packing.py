"""``pack``: writes the samples of any dataset into a folder for ``PackedDataset``, completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import multiprocessing
import os
import platform
import re
import shutil
import threading
import uuid
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

__all__ = ["CONTENTS", "Packing", "Progress", "encode_sample", "pack"]

CONTENTS = "packed.json"
PLACES = 10_000  # foreground positions to store per class of a sample
# Held by the thread that packs. The lock file is one of the process, so that its threads would pass it together.
_turns = threading.RLock()
# File locks may be local to one machine, so a machine removes only its own leftovers.
_MACHINE = re.sub(r"\W+", "-", platform.node())

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

    The folder ``out`` appears once everything is in it. Until then the data are in a folder beside it, which an error
    removes; what a killed process left there is removed by the next call.

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
        OSError: If the disk is full.
        TypeError: If a sample contains other types, or an argument has the wrong type.
        ValueError: If the dataset is empty, samples differ in structure, two parts have the same name, or a field has
            integers beside floats that cannot hold them.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "packed"
        >>> pack([{"x": torch.ones(n), "y": n} for n in (2, 3)], folder)["arrays"]
        {'x': 'x', 'y': 'y'}
    """
    packing = Packing(Path(out), compress, num_workers, skip_broken, overwrite, progress)
    expect(len(dataset), "dataset", len(dataset), "at least one sample")
    contents = {"classes": list(getattr(dataset, "classes", ())), "foreground": foreground}
    return packing.write(dataset, contents, catch=skip_broken)


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
        self, dataset: Any, contents: dict[str, Any], *, catch: bool = True, beside: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Write all samples, and return the contents of ``packed.json``.

        Args:
            dataset: Has ``__getitem__``, ``__len__``, and perhaps ``name_of(index)`` for messages.
            contents: Additional entries of ``packed.json``.
            catch: Whether to collect errors of the dataset.
            beside: Fields that belong to a sample only on request.
        """
        with _alone(self.target) as is_alone:
            # Another process or thread may have finished it: an error for ``pack``, while a cache uses it.
            self._check_target()
            if self.target.exists() and not self.overwrite:
                return json.loads((self.target / CONTENTS).read_text())
            with _new_folder(self.target, is_alone) as folder:
                encoder = _Encoder(dataset, contents["foreground"], self.compress, catch)
                template, written, broken = self._fill(folder, encoder)
                names = tuple(name for name in template if name not in beside) if beside else template
                # A single field of a folder's files is the sample itself, as with ``keys`` of one name.
                arrays = names[0] if beside and len(names) == 1 else names
                contents = {"arrays": to_json(arrays), **contents, "samples": written, "skipped": len(broken)}
                contents["intensities"] = describe_intensities(folder)
                (folder / CONTENTS).write_text(json.dumps(contents, indent=1))
                self._put_in_place(folder)
            if broken:
                self.target.with_name(f"{self.target.name}.broken.txt").write_text("".join(broken))
        return contents

    def _fill(self, folder: Path, encoder: _Encoder) -> tuple[Any, int, list[str]]:
        """Write the samples; return their structure, their number, and a line for each one that is broken."""
        # With its own generator, because the loader would draw its seed from the user's global one.
        loader = DataLoader(
            encoder, None, shuffle=False, num_workers=self.workers, collate_fn=_same, generator=torch.Generator(),
            worker_init_fn=_end_with_parent,
        )  # fmt: skip
        template, broken, total = None, [], len(encoder)
        with contextlib.closing(RowWriter(folder)) as writer:
            for number, loaded in enumerate(loader):
                if isinstance(loaded, str):
                    broken.append(f"{loaded}\n")
                else:
                    found, rows = loaded
                    template = found if template is None else template
                    expect(found == template, f"sample {number}", found, f"the structure {template!r} of the first")
                    with _explaining(writer, f"after {number} of {total} samples"):
                        writer.append(rows)
                if self.progress is not None:
                    self.progress(number + 1, total)
            if broken and not (self.skip_broken and writer.count):
                raise ValueError(
                    f"{len(broken)} of {total} samples cannot be packed:\n{''.join(broken)}"
                    "Repair or remove them, or skip them with skip_broken=True (--skip-broken)."
                )
            with _explaining(writer, f"after {total} of {total} samples"):
                writer.finish()
        return template, writer.count, broken

    def _put_in_place(self, folder: Path) -> None:
        """Give a complete folder its name. What it replaces is renamed first, so that it is never there in part."""
        old = folder.with_name(f"{folder.name}-old")
        if self.target.exists() and self.overwrite:
            self.target.replace(old)
        try:
            folder.replace(self.target)
        except OSError:  # where locks do not keep processes apart, the first one to finish wins
            if not self.target.exists():
                if old.exists():
                    old.replace(self.target)
                raise
            self._check_target()
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _explaining(writer: RowWriter, when: str) -> Iterator[None]:
    """Say what to do if the writer's files cannot be written."""
    try:
        yield
    except OSError as error:
        # What the files still hold in memory does not fit either, and would raise the same error unexplained.
        with contextlib.suppress(OSError):
            writer.close()
        raise OSError(error.errno, f"{error.strerror or error} {when}. Free some space and pack again") from error


class _Encoder(Dataset[Any]):
    """A dataset of encoded samples: the structure of each, and the encoded rows of its fields."""

    def __init__(self, dataset: Any, foreground: str | None, compress: bool | Sequence[int], catch: bool) -> None:
        self.dataset = dataset
        self.foreground = foreground
        self.compress = compress
        self.catch = catch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Encoded]] | str:
        """Return the structure and rows of a sample, or a description of what is wrong with it."""
        name_of = getattr(self.dataset, "name_of", "sample {}".format)
        try:
            return encode_sample(self.dataset[index], self.foreground, self.compress)
        except Exception as error:  # Pillow, nibabel and datasets raise many kinds of errors
            if not self.catch:
                raise
            return f"{name_of(index)}: {error}"


def encode_sample(
    sample: Any, foreground: str | None = None, compress: bool | Sequence[int] = False
) -> tuple[Any, dict[str, Encoded]]:
    """Return the structure of a sample with names in place of its parts, and the encoded rows of its fields."""
    fields: dict[str, Any] = {}
    template = _flatten(sample, "", fields)
    expect(fields, "sample", template, "at least one part")
    if foreground is not None:
        _add_fields(fields, _find_foreground(foreground, fields))
    return template, {name: encode_row(value, compress) for name, value in fields.items()}


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
def _new_folder(target: Path, is_alone: bool) -> Iterator[Path]:
    """Yield a new folder beside ``target``, which is removed afterwards unless it was renamed.

    Args:
        target: Where the folder is to go.
        is_alone: Whether no other process of this machine packs into ``target``: what is left there beside it was left
            by a process that was killed.
    """
    own = f"{target.name}.partial-{_MACHINE}-"
    # Followed by a number, not by the rest of the name of another machine.
    for path in target.parent.glob(f"{glob.escape(own)}{'[0-9a-f]' * 32}*") if is_alone else ():
        shutil.rmtree(path, ignore_errors=True)
    folder = target.with_name(f"{own}{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[bool]:
    """Wait until no other process or thread packs into ``target``; yield whether locks of files can tell.

    The lock is one of a file beside the folder, created first and removed at the end, not of one in it: waiting
    processes would hold a lock in a folder that was renamed or removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f"{target.name}.lock")
    with _turns:
        try:
            import fcntl
        except ImportError:  # Windows
            yield False
            return
        while True:
            with path.open("a") as file:
                is_locked = _lock(fcntl, file)
                # The previous holder has removed the file, and another process may have created it again.
                try:
                    is_same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
                except FileNotFoundError:
                    is_same = False
                if is_same or not is_locked:
                    try:
                        yield is_locked
                    finally:
                        path.unlink(missing_ok=True)
                    return


def _lock(fcntl: Any, file: Any) -> bool:
    """Lock a file for this process, and return whether its file system has locks."""
    try:
        # A lock per process: with flock(2), worker processes that outlive a killed parent would hold its lock.
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True
