"""The pictures of the stored pages: drawn from the pages' own tables, with a message that the page holds."""

import re

import pytest

from benchmarks import charts
from benchmarks.suite import BenchError
from tests.contract.test_docs import holds

PICTURES = {path.name for path in charts.PAGES.glob("*.png")}


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.picture)
def test_a_chart_has_each_of_its_rows_and_a_message_whose_figures_the_page_holds(chart):
    page = charts.PAGES / f"{chart.page}.md"
    rows = charts.read_bars(chart, page.read_text())
    assert [name for name, *_ in rows] == list(chart.bars)
    assert len(rows) <= 14
    assert all(low <= value <= high for _, value, low, high in rows)
    assert {*chart.ours, *chart.peers} - set(chart.bars) <= set(charts.LEVELS)
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", re.sub(r"O\d|\d+ ms|bf16\S*", "", charts.title_of(chart)))
    assert [figure for figure in figures if not holds(page, figure)] == []


def test_every_stored_picture_is_drawn_by_the_command():
    assert {chart.picture for chart in charts.CHARTS} == PICTURES


def test_the_command_draws_the_pages_that_are_asked_for(tmp_path, capsys):
    assert charts.main(["patches_", "lengths", "--out", str(tmp_path)]) == 0
    assert {path.name.partition("_")[0] for path in tmp_path.iterdir()} == {"patches", "lengths"}
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_a_row_that_the_page_lacks_is_named():
    chart = charts.Chart("page", {"here": "", "gone": ""})
    table = "| case | ms a step |\n| --- | --- |\n| here | 2.0 (1.0-3.0) |\n"
    with pytest.raises(BenchError, match=r"page\.png: expected rows with 'ms a step', got none for \['gone'\]"):
        charts.read_bars(chart, table)
    assert charts.read_bars(charts.Chart("page", {"here": ""}), table) == [("here", 2.0, 1.0, 3.0)]
