"""The grid of the prefetching benchmark: complete, and its cells can be measured."""

import pytest

from benchmarks import prefetch


def test_the_grid_is_complete():
    cells = prefetch.grid()
    assert len(cells) == len(set(cells)) == 2 * 3 * 3 * 3 + 2 * 3 * 3
    assert {cell.ratio for cell in cells} == {0.5, 1.0, 2.0}
    assert {cell.workers for cell in cells} == {0, 1, 2}
    assert len({str(cell) for cell in cells}) == len(cells)


def test_a_cell_is_measured_against_its_bound(monkeypatch):
    monkeypatch.setattr(prefetch, "STEP", 1e-4)
    times = iter([0.03, 0.02, *[0.06] * 3])  # load and step alone, then each loader
    monkeypatch.setattr(prefetch, "_seconds", lambda batches, cell, skip: next(times))
    found = prefetch.measure_cell(prefetch.Cell(step="free", load="io"), rounds=1, steps=16)
    assert found == {"seconds": 0.03, **dict.fromkeys(prefetch.LOADERS, 0.5)}


def test_uneven_loads_have_the_mean_of_even_ones(monkeypatch):
    spent = []
    monkeypatch.setattr(prefetch, "_spend", lambda kind, seconds: spent.append(seconds))
    means = []
    for uneven in (False, True):
        spent.clear()
        list(prefetch.build("DataLoader", prefetch.Cell(step="free", load="io", uneven=uneven), 24))
        means.append(sum(spent) / 24)
    assert means == pytest.approx([prefetch.STEP] * 2)


def test_the_table(capsys, monkeypatch):
    monkeypatch.setattr(prefetch, "measure_cell", lambda cell, rounds: dict.fromkeys(prefetch.LOADERS, 0.5))
    prefetch.main(["--quick", "--only", "free step, even"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| cell | DataLoader | BackgroundGenerator | PrefetchLoader |"
    assert len(lines) == 2 + 3
    assert lines[2].endswith("| 0.50 | 0.50 | 0.50 |")
