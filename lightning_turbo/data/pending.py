"""``ThreadedDataset``: the samples of a batch, and of the batches after it, loaded by several threads."""

from __future__ import annotations

import multiprocessing.util
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from lightning_turbo._pytree import pin_batch
from lightning_turbo._random import changed_generators, shared_state
from lightning_turbo.data.contents import Contents
from lightning_turbo.data.thread_state import ThreadState
from lightning_turbo.errors import NoEffectWarning

__all__ = ["Pending", "PendingCollate", "ThreadedDataset"]


class Pending:
    """A batch whose samples are being loaded. In a worker process it is finished when it is sent.

    torch's worker hands a batch over to a thread that pickles it, and goes on with the next list of indices: so the
    samples of that are loaded beside those of this one.
    """

    def __init__(self, samples: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.samples = samples
        self.collate_fn = collate_fn
        self.pins = False

    def result(self) -> Any:
        """Wait for the samples and return the batch."""
        samples = self.samples
        whole = isinstance(samples, Future)
        loaded = samples.result() if whole else [sample for part in samples for sample in part.result()]
        batch = self.collate_fn(loaded)
        return pin_batch(batch) if self.pins else batch

    def pin_memory(self) -> Pending:
        """Pin the memory of the batch as well, once it is there."""
        self.pins = True
        return self

    def __reduce__(self) -> Any:
        try:
            return _same, (self.result(),)
        except BaseException:  # else torch's sending thread would end, and its receiver wait for ever
            info = get_worker_info()
            where = f"in DataLoader worker process {'?' if info is None else info.id}"
            return _same, (ExceptionWrapper(where=where),)


def _same(batch: Any) -> Any:
    return batch


class PendingCollate:
    """A ``collate_fn`` for what a ``ThreadedDataset`` hands out."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Pending:
        """Return the batch of these samples, which are being loaded."""
        return Pending(samples, self.collate_fn)


class ThreadedDataset:
    """A dataset that hands out futures of its samples, which so many threads load. All else is the dataset's own.

    Each thread loads one part of a batch. The first batch is loaded by the asking thread alone. If that draws from the
    global RNGs, or from one that the dataset holds, so are all others: in several threads the numbers would depend on
    timing. ``profile`` keeps that, in each worker process for itself. A dataset with ``__getitems__`` is asked for a
    whole batch at a time.
    """

    def __init__(self, dataset: Any, threads: int, profile: Any) -> None:
        vars(self).update(_dataset=dataset, _threads=threads, _profile=profile, _pool=None)

    def __getitem__(self, index: Any) -> Any:
        return self._begin(lambda submit: submit(self._dataset.__getitem__, index))

    def __getitems__(self, indices: Any) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch:
            return self._begin(lambda submit: submit(fetch, indices))
        indices = list(indices)
        size = max(1, -(-len(indices) // self._threads))
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        return self._begin(lambda submit: [submit(self._load, part) for part in parts])

    def _load(self, indices: Any) -> list[Any]:
        return [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)

    def _begin(self, load: Callable[[Callable[..., Future[Any]]], Any]) -> Any:
        """Call ``load`` with what begins a call in a thread, or with ``_run_now``."""
        if self._profile.alone is None:
            # The samples alone are watched here: in the whole of a first batch, the sampler's seed is drawn too.
            contents = Contents(self._dataset)
            before = shared_state(), contents.states()
            samples = load(_run_now)
            self._decide(changed_generators(before[0], shared_state()), before[1] != contents.states())
            return samples
        return load(_run_now if self._profile.alone else self._executor().submit)

    def _decide(self, drew: list[str], own: bool) -> None:
        self._profile.alone = own or bool(drew)
        if own or (drew and get_worker_info() is not None):  # in the process itself, the loader speaks of the others
            whose = "a random generator that the dataset holds" if own else f"the global RNG of {' and '.join(drew)}"
            warnings.warn(
                f"Loading draws from {whose}: in several threads the numbers would depend on timing, whatever the "
                f"seed. One thread loads instead of threads={self._threads}. Derive the random numbers of a sample "
                "from its index, or use more worker processes.",
                NoEffectWarning,
                stacklevel=2,
            )

    def _executor(self) -> ThreadPoolExecutor:
        pool = self._pool
        if pool is None:
            pool = ThreadPoolExecutor(self._threads, "lightning_turbo-prefetch", initializer=ThreadState().enter)
            vars(self)["_pool"] = pool
            if get_worker_info() is not None:  # a worker that ends does not load what nobody will ask for
                settings = {"wait": False, "cancel_futures": True}
                multiprocessing.util.Finalize(None, pool.shutdown, kwargs=settings, exitpriority=1)
        return pool

    def close(self) -> None:
        """End the threads, and do not begin what was not begun."""
        pool = self._pool
        vars(self)["_pool"] = None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}


def _run_now(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function here, with a future as the result."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
    return future
