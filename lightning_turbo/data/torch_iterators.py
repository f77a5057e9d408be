"""What is done with the iterators of torch's ``DataLoader`` and of the classes that inherit from it."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_turbo._pytree import pin_batch
from lightning_turbo.data.producer import give_up
from lightning_turbo.data.resume import IndexTape, Place

__all__ = ["copied", "count_once", "end_workers", "guarded", "leave", "load", "undivided"]

# Seconds. How long a wait for a worker process goes on before it is asked whether there is still a reason to.
SLICE = 0.1


def load(source: Any, indices: Any) -> Any:
    """Load one batch as torch's iterator ``source`` does; several threads may at the same time."""
    batch = source._dataset_fetcher.fetch(indices)
    return pin_batch(batch) if source._pin_memory else batch


def undivided(loader: Any, source: Any) -> str:
    """Return why several threads cannot load what the iterator ``source`` of ``loader`` would; empty if they can."""
    if isinstance(loader.dataset, IterableDataset):
        return f"the dataset is an IterableDataset ({type(loader.dataset).__name__}), which one thread runs through"
    if loader.num_workers:
        return f"num_workers={loader.num_workers} processes load, and a thread takes what they have ready"
    if not isinstance(source, _SingleProcessDataLoaderIter):
        return f"{type(loader).__name__} does not load by torch's own iterator"
    return ""


def guarded(source: Any) -> Any:
    """Return the iterator ``source``, made safe where one thread waits for worker processes that another one ends.

    A Trainer does so with persistent ones. Left to itself the wait would go on for ever, or the epoch end before its
    time without a word; here that is an error. A thread whose batch nobody will ask for waits no longer.
    """
    if hasattr(source, "_try_get_data"):
        reference = weakref.ref(source)
        source._next_data = functools.partial(_next_data, reference)
        source._try_get_data = functools.partial(_try_get_data, reference)
    return source


def _next_data(reference: Callable[[], Any]) -> Any:
    source = reference()
    try:
        return type(source)._next_data(source)
    finally:
        if source._persistent_workers:  # others are ended at the end; without them, batches are left out
            _check_workers(source)


def _try_get_data(reference: Callable[[], Any], timeout: float = 5.0) -> tuple[bool, Any]:
    source, end = reference(), time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            got = type(source)._try_get_data(source, max(0.0, min(left, SLICE)))
        except (OSError, EOFError) as error:  # what a worker process sends it also has to hand over
            _check_workers(source)
            dead = _wait_for_death(source._workers)
            if not dead:
                raise
            raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
        if got[0] or left <= SLICE:
            return got
        _check_workers(source)
        if source._tasks_outstanding:  # without them it is being set up for its next epoch
            give_up()


def _wait_for_death(workers: Any, patience: float = 1.0) -> str:
    """Return the pids of those that have died, as soon as there are any: a killed process closes its files first."""
    end = time.monotonic() + patience
    while True:
        dead = [str(worker.pid) for worker in workers if not worker.is_alive()]
        if dead or time.monotonic() >= end:
            return ", ".join(dead)
        time.sleep(0.01)


def _check_workers(source: Any) -> None:
    if source._shutdown:
        raise RuntimeError(
            "The worker processes of this iterator were ended before it was, by its loader or by the Trainer that used "
            "it. Call iter() on the loader again."
        )


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


def leave(source: Any, tape: IndexTape | None, place: Place) -> None:
    """Let go of an iterator: end its worker processes, and take back what its sampler drew ahead."""
    end_workers(source)
    if tape is not None:
        tape.put_back(place)


def copied(state_dict: Callable[[], Any]) -> Any:
    """Return a state, cut loose from objects that go on changing."""
    return copy.deepcopy(state_dict())


def count_once(source: Any, state: dict[str, Any]) -> None:
    """Have an iterator of torchdata's count what it runs through as it goes on; it does so twice.

    From the state that it would give then, nothing could go on: it tells of twice as many batches.

    Args:
        source: The iterator.
        state: What it was made from.
    """
    snapshot = state.get("_snapshot")
    begun = state.get("_num_yielded") if snapshot is None else snapshot["_snapshot_step"]
    if begun is None or not hasattr(source, "_num_yielded"):
        return
    surplus = source._num_yielded - begun - state.get("_steps_since_snapshot", 0)
    source._num_yielded -= surplus
    if snapshot is not None and source._snapshot["_snapshot_step"] != begun:
        source._snapshot["_snapshot_step"] -= surplus
