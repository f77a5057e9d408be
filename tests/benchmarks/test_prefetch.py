"""The grid of the prefetching benchmark: complete, and its loads have the mean that they say."""

import pytest

from benchmarks import prefetch


def test_the_grid_is_complete():
    cells = prefetch.grid()
    assert len(set(map(str, cells))) == len(cells) == 2 * 3 * 3 * 3 + 2 * 3 * 3
    assert {cell.ratio for cell in cells} == {0.5, 1.0, 2.0}
    assert {cell.workers for cell in cells} == {0, 1, 2}


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
