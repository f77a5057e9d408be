"""``cache_transforms``: packs the samples of a dataset once and finds them again by a user-defined key."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_turbo._checks import expect
from lightning_turbo._random import GeneratorWatch, generators_in, same_random_numbers
from lightning_turbo.data.folders import list_files
from lightning_turbo.data.packed.packing import Packing, Progress, encode_sample
from lightning_turbo.errors import TurboWarning

__all__ = ["cache_transforms", "stamp_files"]

PLAIN = (str, bytes, bool, int, float, type(None))
# A sample that draws random numbers is loaded again, up to this often and this long, to see whether it changes.
LOADS = 32
SECONDS = 10.0

Key: TypeAlias = "str | Callable[[Any], Any]"


def cache_transforms(
    dataset: Any,
    folder: str | os.PathLike[str],
    *,
    key: Key | None = None,
    foreground: str | None = None,
    compress: bool | Sequence[int] = False,
    num_workers: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Return a folder with the samples of ``dataset`` for ``PackedDataset``, packed now or in an earlier run.

    The deterministic part of a pipeline (reading, resampling, normalizing) runs once; random transforms go into
    ``sample_transform`` of ``PackedDataset`` or ``transform`` of ``PatchDataset``.

    The folder's name is a digest of ``key``, the number of samples, ``foreground`` and ``compress``, and of nothing
    else: after a change of files or code you get the old samples until you change ``key``. Old folders stay until you
    remove them.

    Several processes and threads may call this at once, such as the ranks of a run: one packs while the others wait. It
    works with one folder per node or a shared one.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``; returns samples that ``pack`` accepts.
        folder: The folder for the packed folders.
        key: Identifies how the samples are made: a string such as ``"spacing 1.5, v2"``, or a function of the dataset
            that returns strings, numbers, and tuples, lists or dictionaries of them. ``stamp_files`` returns a string
            that changes with the files.
        foreground: As in ``pack``.
        compress: As in ``pack``.
        num_workers: Number of worker processes that load samples.
        progress: Called with the number of finished samples and the total.

    Raises:
        TypeError: If ``key`` is missing or contains other types.
        ValueError: If ``dataset`` or ``key`` is empty, or a sample changes each time it is loaded.

    Warns:
        TurboWarning: If loading the first sample draws random numbers that do not change it.

    Note:
        Only the first sample is checked for random numbers. The global RNGs are left unchanged, whether the call packs
        or not.

    Example:
        >>> import tempfile
        >>> from lightning_turbo.data import PackedDataset
        >>> folder = tempfile.mkdtemp()
        >>> cached = cache_transforms([1.5, 2.5], folder, key="numbers, v1")
        >>> cached == cache_transforms([1.5, 2.5], folder, key="numbers, v1"), float(PackedDataset(cached)[1])
        (True, 2.5)
    """
    expect(len(dataset), "dataset", len(dataset), "at least one sample")
    checked = _check_key(key(dataset) if callable(key) else key)
    name = _digest_of(checked, len(dataset), foreground, compress)
    packing = Packing(Path(folder) / name[:32], compress, num_workers, progress=progress, exist_ok=True)
    if not packing.target.exists():
        contents = {"classes": list(getattr(dataset, "classes", ())), "foreground": foreground}
        # A run that packs continues with the same random numbers as a run that finds the samples packed.
        with same_random_numbers():
            _check_sample_is_the_same(dataset)
            packing.write(dataset, contents, catch=False)
    return packing.target


def stamp_files(*paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> str:
    """Return a digest of the names, sizes and modification times of files, for ``cache_transforms(key=)``.

    Args:
        *paths: Files, folders, and lists of them. A folder stands for all its files, except hidden ones, by their
            relative paths.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there is no file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("one")
        >>> before = stamp_files(folder)
        >>> _ = (folder / "a.txt").write_text("another")
        >>> before == stamp_files(folder)
        False
    """
    stamps: list[Any] = []
    for each in paths:
        for path in [each] if isinstance(each, (str, os.PathLike)) else each:
            folder = Path(path)
            if folder.is_dir():
                stamps += [(str(file.relative_to(folder)), *_stamp_of(file)) for file in list_files(folder, ("",))]
            else:
                expect(folder.exists(), "paths", str(path), "files and folders that exist", FileNotFoundError)
                stamps.append((str(folder), *_stamp_of(folder)))
    expect(stamps, "paths", paths, "at least one file")
    return _digest_of(stamps)


def _stamp_of(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _digest_of(*parts: Any) -> str:
    """Return a digest of values whose ``repr`` describes them fully."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def _check_key(key: Any) -> Any:
    """Return a key whose ``repr`` describes it fully; otherwise raise an error that says what to write."""
    what = (
        "a description of how samples are made, such as key='spacing 1.5, v1', which you change with the code; or a "
        "function, such as key=lambda dataset: ('v1', stamp_files(dataset.files)), which follows the files too"
    )
    expect(key is not None and _is_plain(key), "key", key, what, TypeError)
    expect(key not in ("", (), [], {}), "key", key, what)
    return key


def _is_plain(value: Any) -> bool:
    """Return whether the ``repr`` of a value is the same in every process."""
    if isinstance(value, Mapping):
        return type(value) is dict and _is_plain([part for pair in value.items() for part in pair])
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else type(value) in PLAIN


def _check_sample_is_the_same(dataset: Any) -> None:
    """Raise an error if the first sample of a dataset changes each time it is loaded."""
    with GeneratorWatch(generators_in(dataset)) as watch:
        first = encode_sample(dataset[0])
    if not watch.drew:
        return
    # Transforms may draw a number for a probability of 1, like TorchIO's, and still return the same sample.
    begun = time.monotonic()
    loads = 0
    drawn = " and ".join(watch.drew)
    what = "the same sample each time; move random transforms behind the cache"
    while loads < 2 or (loads < LOADS and time.monotonic() - begun < SECONDS):
        loads += 1
        expect(encode_sample(dataset[0]) == first, "dataset", f"one that draws from {drawn}", what)
    warnings.warn(
        f"The first sample draws from {drawn}. It was identical {loads + 1} times and is packed. A transform that "
        "rarely changes a sample would be frozen in the cache: move random transforms behind it.",
        TurboWarning,
        stacklevel=3,
    )
