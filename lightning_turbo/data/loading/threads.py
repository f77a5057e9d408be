"""``ThreadedDataset``: the samples of a batch, loaded by several threads."""

from __future__ import annotations

import contextlib
import operator
import os
import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from torch.utils.data import get_worker_info

from lightning_turbo._random import GeneratorWatch, generators_in
from lightning_turbo.data.loading.locks import load_in_this_thread
from lightning_turbo.data.loading.thread_state import ThreadState, add_thread_note
from lightning_turbo.errors import NoEffectWarning

__all__ = ["ThreadedDataset"]


class ThreadedDataset:
    """A dataset whose batches are loaded by several threads, a sample each. All else is the dataset's own.

    The first two batches are loaded by the calling thread alone, and watched: the first line by line, the second by the
    states before and after it. If they draw from the global RNGs, or from a generator that the dataset holds, so are
    all others: in several threads the numbers would depend on timing. Each worker process finds that out for itself.
    The threads start with the third batch, and end with ``close``, after an error (whoever keeps the error keeps this
    object), and with the process; a forked child starts threads of its own.
    """

    def __init__(self, dataset: Any, threads: int) -> None:
        # Other attributes that are set belong to the dataset, see __setattr__.
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_threads", threads)
        object.__setattr__(self, "_pool", None)
        object.__setattr__(self, "_process", None)  # that started the threads
        object.__setattr__(self, "_watched", 0)  # batches
        object.__setattr__(self, "_draws", False)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        if self._draws:
            return [self._dataset[index] for index in indices]
        if self._watched < 2:
            return self._load_watched(indices)
        if self._pool is None or self._process != os.getpid():
            settings = {"initializer": _enter, "initargs": (ThreadState(),)}
            started = ThreadPoolExecutor(self._threads, "lightning_turbo-prefetch", **settings)
            object.__setattr__(self, "_pool", started)
            object.__setattr__(self, "_process", os.getpid())
        pool: Any = self._pool
        try:
            return _SharedBatch(self._dataset, list(indices)).load_in(pool, self._threads)
        except BaseException as error:
            self.close()
            add_thread_note(error)
            raise

    def _load_watched(self, indices: Any) -> list[Any]:
        lines = 0 if self._watched else GeneratorWatch.LINES
        with GeneratorWatch(generators_in(self._dataset), lines=lines) as watch:
            samples = [self._dataset[index] for index in indices]
        object.__setattr__(self, "_draws", bool(watch.found))
        object.__setattr__(self, "_watched", self._watched + 1)
        if watch.found and get_worker_info() is not None:  # in the process of the loader, the loader warns
            warnings.warn(
                f"Loading {watch.found}: in several threads the numbers would depend on timing, whatever the seed. One "
                f"thread loads instead of threads={self._threads}. Derive the random numbers of a sample from its "
                "index, or use more worker processes.",
                NoEffectWarning,
                stacklevel=2,
            )
        return samples

    def __len__(self) -> int:
        return len(self._dataset)

    def close(self) -> None:
        """End the threads. The next batch starts others."""
        pool = self._pool
        object.__setattr__(self, "_pool", None)
        if pool is not None and self._process == os.getpid():
            pool.shutdown(cancel_futures=True)

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}


class _SharedBatch:
    """The samples of one batch, of which each thread takes the next one until none is left.

    One task for each thread, not for each sample: to wake the thread that waits takes as long as to load a small one.
    It lives for one call of ``load_in``. Always: places are taken in their order, so that where one fails, those before
    it are loaded, or being loaded.
    """

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self._dataset = dataset
        self._indices = indices
        self._samples: list[Any] = [None] * len(indices)
        self._left = deque(range(len(indices)))  # places that no thread has taken
        self._errors: list[tuple[int, BaseException]] = []

    def load_in(self, pool: ThreadPoolExecutor, threads: int) -> list[Any]:
        """Load the samples; raise the error of the first one that has one, as a single thread would."""
        try:
            wait([pool.submit(self._load) for _ in range(min(threads, len(self._indices)))])
        finally:  # an interrupt, after which no more are wanted
            self._left.clear()
        if not self._errors:
            return self._samples
        _, error = min(self._errors, key=operator.itemgetter(0))
        self._errors.clear()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _load(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._load_one(self._left.popleft())

    def _load_one(self, place: int) -> None:
        try:
            self._samples[place] = self._dataset[self._indices[place]]
        except BaseException as error:
            self._errors.append((place, error))
            self._left.clear()


def _enter(modes: ThreadState) -> None:
    modes.enter()
    load_in_this_thread(serves=True)
