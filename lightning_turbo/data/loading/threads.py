"""``ThreadedDataset``: the samples of a batch, loaded by a pool of threads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from lightning_turbo._random import GeneratorWatch, generators_in
from lightning_turbo.data.loading.ahead import may_wait, serve_in_this_thread
from lightning_turbo.data.loading.thread_state import ThreadState, add_thread_note
from lightning_turbo.errors import NoEffectWarning

__all__ = ["Draws", "ThreadedDataset"]


class Draws:
    """What loading the samples of a loader's dataset draws from, in words; ``None`` until a batch was loaded."""

    found: str | None = None


class ThreadedDataset:
    """A dataset whose batches are loaded by several threads, a sample each. All else is the dataset's own.

    A loader makes one for each iterator, whose end closes it; each worker process has a copy. The threads start with
    the second batch that is loaded, and end with ``close`` and with the process; a forked child starts threads of its
    own. Always: a batch has its samples in their order, and the error of the first one that has one. Where the first
    batch draws random numbers, all samples are loaded one after another, as the numbers would depend on timing.

    Args:
        dataset: The dataset.
        threads: The number of threads.
        draws: What is known of all passes of the loader in this process.
    """

    def __init__(self, dataset: Any, threads: int, draws: Draws) -> None:
        # Other attributes that are set belong to the dataset, see __setattr__.
        vars(self).update(_dataset=dataset, _threads=threads, _draws=draws, _pool=None, _process=None)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return the samples at ``indices``."""
        if self._draws.found is None:
            return self._load_and_look(indices)
        if self._draws.found:
            return [self._dataset[index] for index in indices]
        if self._pool is None or self._process != os.getpid():
            pool = ThreadPoolExecutor(
                self._threads, "lightning_turbo-prefetch", initializer=_enter, initargs=(ThreadState(),)
            )
            vars(self).update(_pool=pool, _process=os.getpid())
        threads: Any = self._pool
        loads = [threads.submit(self._dataset.__getitem__, index) for index in indices]
        samples = []
        try:
            for each in loads:
                samples.append(each.result())
            return samples
        except BaseException as error:
            for each in loads:
                each.cancel()
            add_thread_note(error)
            raise
        finally:
            # An error keeps this frame, and the loads keep their errors.
            each = loads = None

    def _load_and_look(self, indices: Sequence[Any]) -> list[Any]:
        """Load samples one after another, and find out whether that draws random numbers."""
        with GeneratorWatch(generators_in(self._dataset)) as watch:
            samples = [self._dataset[index] for index in indices]
        self._draws.found = watch.found
        # In the process that trains, its iterator warns.
        if watch.found and get_worker_info() is not None:
            warnings.warn(
                f"threads={self._threads} has no effect in this worker process: loading {watch.found}. In several "
                "threads its numbers would depend on timing, whatever the seed. Leave threads out, and raise "
                "num_workers.",
                NoEffectWarning,
                stacklevel=2,
            )
        return samples

    def __len__(self) -> int:
        return len(self._dataset)

    def close(self) -> None:
        """End the threads, and wait for them where that may be waited for. The next batch starts others."""
        pool = self._pool
        vars(self)["_pool"] = None
        if pool is not None and self._process == os.getpid():
            # The collector may close this in any thread, also in one of these.
            pool.shutdown(wait=may_wait(), cancel_futures=True)

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _enter(modes: ThreadState) -> None:
    modes.enter()
    serve_in_this_thread()
