"""What torch's iterator finds on a loader while it is made, in place of the loader's own dataset and ``collate_fn``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_turbo.data.loading.hand_over import HandOver
from lightning_turbo.data.loading.spawned import start_method
from lightning_turbo.data.loading.whole_batches import WholeBatches, as_it_is, has_whole_batches
from lightning_turbo.data.loading.worker_start import LongLists, StartedWith, has_long_lists, preload
from lightning_turbo.data.loading.worker_streams import PlacedStream, WorkerPlaces

__all__ = ["stand_ins", "standing_in"]


def stand_ins(loader: Any, threaded: Any, lists: LongLists, places: WorkerPlaces | None = None) -> dict[str, Any]:
    """Return the attributes that a loader is to have while torch's iterator is made; none where nothing is gained.

    Args:
        loader: A ``DataLoader`` that torch's own iterator loads.
        threaded: A ``ThreadedDataset`` around its dataset, or ``None``.
        lists: Where long lists of its dataset go, for processes that are not forked.
        places: Returns the states of a stream in worker processes; ``None`` if it has none.
    """
    given: dict[str, Any] = {} if threaded is None else {"dataset": threaded}
    if has_whole_batches(loader):
        given = {"dataset": WholeBatches(loader.dataset), "collate_fn": as_it_is}
    if places is not None:
        given = {"dataset": PlacedStream(loader.dataset), "worker_init_fn": places.start}
    if loader.num_workers:
        get_state = None if places is None else places.state_after
        given["collate_fn"] = HandOver(given.get("collate_fn", loader.collate_fn), get_state)
        given.update(_for_the_start(loader, given, lists))
    return given


def _for_the_start(loader: Any, given: dict[str, Any], lists: LongLists) -> dict[str, Any]:
    """Prepare the start of processes that are not forked, and return what stands for their dataset."""
    method = start_method(loader.multiprocessing_context)
    dataset = given.get("dataset", loader.dataset)
    if method == "forkserver":
        preload([dataset, given["collate_fn"], loader.worker_init_fn])
    return {"dataset": StartedWith(dataset, lists)} if method != "fork" and has_long_lists(dataset) else {}


@contextlib.contextmanager
def standing_in(loader: Any, given: dict[str, Any]) -> Iterator[None]:
    """Give a loader other attributes for the time in which torch's iterator is made, which keeps them."""
    # torch finds them by these names, and lets nobody set the dataset after __init__.
    attributes = vars(loader)
    own = {name: attributes[name] for name in given}
    attributes.update(given)
    try:
        yield
    finally:
        attributes.update(own)
