"""What torch's iterator finds on a loader while it is made, in place of the loader's own dataset and ``collate_fn``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_turbo.data.loading.whole_batches import WholeBatches, as_it_is, has_whole_batches

__all__ = ["stand_ins", "standing_in"]


def stand_ins(loader: Any, threaded: Any) -> dict[str, Any]:
    """Return the attributes that a loader is to have while torch's iterator is made; none where nothing is gained.

    Args:
        loader: A ``DataLoader`` over a dataset with indices, which torch's own iterator loads.
        threaded: A ``ThreadedDataset`` around its dataset, or ``None``.
    """
    if has_whole_batches(loader):
        return {"dataset": WholeBatches(loader.dataset), "collate_fn": as_it_is}
    return {} if threaded is None else {"dataset": threaded}


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
