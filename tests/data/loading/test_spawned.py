"""Objects that a worker process cannot be given where it is not forked are named before one starts."""

import pytest
from torch.utils.data import DataLoader

from lightning_turbo.data import PrefetchLoader
from tests.data.samples import Rows

SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PrefetchLoader(Rows(3, lambda n: n), **SPAWNED), "by 'spawn'; got dataset.load, <func"),
    (lambda: PrefetchLoader.of(DataLoader([open], collate_fn=lambda b: b, **SPAWNED)), "got collate_fn, <f"),
])  # fmt: skip
def test_what_cannot_be_pickled_is_named_before_a_worker_starts(make, message):
    with pytest.raises(TypeError, match=message):
        make()
