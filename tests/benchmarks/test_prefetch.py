"""The loads of the prefetching benchmark have the stated mean."""

import pytest

from benchmarks import prefetch


def test_uneven_loads_have_the_mean_of_even_ones(monkeypatch):
    spent = []
    monkeypatch.setattr(prefetch, "_spend", lambda kind, seconds: spent.append(seconds))
    means = []
    for uneven in (False, True):
        spent.clear()
        data = prefetch.Loads(prefetch.Cell(step="free", load="io", uneven=uneven), 24)
        assert [data[index] for index in range(len(data))] == list(range(24 * prefetch.SAMPLES))
        means.append(sum(spent) / 24)
    assert means == pytest.approx([prefetch.STEP] * 2)
