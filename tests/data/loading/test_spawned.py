"""Objects that a worker process cannot be given where it is not forked are named before one starts."""

import pytest
from torch.utils.data import DataLoader

from lightning_turbo.data import PrefetchLoader
from tests.data.samples import Rows

SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


def inside(depth, value):
    """A list in a list, and so on, with a value in the innermost one."""
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PrefetchLoader(Rows(3, lambda n: n), **SPAWNED), "by 'spawn'; got dataset.load, <func"),
    (lambda: PrefetchLoader.of(DataLoader([open], collate_fn=lambda b: b, **SPAWNED)), "got collate_fn, <f"),
    (lambda: PrefetchLoader([{"a": (abs, lambda: 1)}], **SPAWNED), r"got dataset\[0\]\['a'\]\[1\], <function"),
    (lambda: PrefetchLoader([{lambda: 1}], **SPAWNED), r"got dataset\[0\]\[0\], <function"),
    (lambda: PrefetchLoader(inside(30, lambda: 1), **SPAWNED), r"got dataset(\[0\]){20}, \[\["),  # far enough inside
])  # fmt: skip
def test_what_cannot_be_pickled_is_named_before_a_worker_starts(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("settings", [SPAWNED, {}], ids=["spawned", "none"])
def test_what_can_be_pickled_is_taken_as_it_is_and_without_processes_all_else_too(settings):
    data = Rows(3, abs if settings else lambda n: n)
    assert PrefetchLoader(data, 2, worker_init_fn=abs, **settings).dataset is data
