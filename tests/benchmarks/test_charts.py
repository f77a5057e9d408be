"""The charts of the stored pages: drawn from the tables of the pages, with titles whose figures are in the page."""

import re

import pytest

from benchmarks import charts
from tests.contract.test_docs import holds

PICTURES = {path.name for path in charts.PAGES.glob("*.png")}


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.picture)
def test_a_chart_has_the_rows_of_its_page_and_a_title_with_figures_of_the_page(chart):
    page = charts.PAGES / f"{chart.page}.md"
    rows = charts.read_bars(chart, page.read_text())
    assert [name for name, *_ in rows] == list(chart.bars)
    assert len(rows) <= 14
    assert all(low <= value <= high for _, value, low, high in rows)
    assert {*chart.ours, *chart.peers} - set(chart.bars) <= set(charts.LEVELS)
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", re.sub(r"O\d|\d+ ms|bf16\S*", "", charts.title_of(chart)))
    assert [figure for figure in figures if not holds(page, figure)] == []


def test_every_stored_chart_is_drawn_by_the_command():
    assert {chart.picture for chart in charts.CHARTS} == PICTURES


def test_the_command_draws_the_selected_pages(tmp_path):
    assert charts.main(["patches_", "lengths", "--out", str(tmp_path)]) == 0
    assert {path.name.partition("_")[0] for path in tmp_path.iterdir()} == {"patches", "lengths"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
