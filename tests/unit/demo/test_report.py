"""Table, results.json and picture."""

import io
import json

import pytest
import torch
from rich.console import Console

from lightning_turbo.demo import figure
from lightning_turbo.demo.figure import draw_results
from lightning_turbo.demo.history import RunHistory
from lightning_turbo.demo.report import level_row, machine, readable_bytes, results_table, write_results
from lightning_turbo.errors import MissingExtraError


def a_row(accuracy, *, epochs=2, asked=2):
    history = RunHistory(samples=10)
    history.epoch_seconds = [1.0] * epochs
    history.val_accuracies = [accuracy] * epochs
    history.val_losses = [0.1] * epochs
    history.step_losses = [2.0, 1.0, 0.5][: epochs + 1] if epochs else []
    history.bytes = {"weights": 1024, "gradients": 1024, "optimizer_state": 2048}
    return level_row(history, epochs=asked, floor=0.95)


def shown(table):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def results(**levels):
    return {
        "settings": {"data": "digits", "seed": 0},
        "machine": machine(torch.device("cpu")),
        "levels": levels,
    }


def test_a_row_passes_only_if_it_is_complete_and_good_enough():
    rows = [a_row(0.95), a_row(0.949), a_row(0.99, epochs=1), a_row(0.0, epochs=0)]
    assert [row["passed"] for row in rows] == [True, False, False, False]
    assert [row["complete"] for row in rows] == [True, True, False, False]
    assert rows[3]["val_accuracy"] is None


def test_the_table_marks_what_is_too_low_or_stopped():
    text = shown(results_table({"O0": a_row(0.98), "O1": a_row(0.5), "O2": a_row(0.98, epochs=1)}, 0.95))
    assert all(part in text for part in ("0.980", "0.500 (too low)", "0.980 (stopped)", "4 KiB"))


def test_bytes_are_written_with_their_unit():
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 290_000: "283 KiB", 5 * 2**20: "5.0 MiB", 2**41: "2048.0 GiB"}
    assert {count: readable_bytes(count) for count in texts} == texts


def test_results_are_strict_json_written_whole(tmp_path):
    path = tmp_path / "results.json"
    write_results({"losses": [1.0, float("nan"), float("inf")], "n": 3}, path)

    def no_constants(name):
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=no_constants) == {"losses": [1.0, None, None], "n": 3}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_results({"bad": object()}, path)
    assert json.loads(path.read_text())["n"] == 3


def test_the_picture_is_drawn_even_of_an_unfinished_run(tmp_path, monkeypatch):
    row = a_row(0.9)
    row["step_losses"] = [2.0, None, 0.5]  # a loss that was not finite
    draw_results(results(O0=row, O3=a_row(0.98), O1=a_row(0.0, epochs=0)), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    draw_results(results(), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000
    monkeypatch.setattr(figure._optional, "installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"lightning-turbo\[demo\]"):
        draw_results(results(), tmp_path / "demo.png")


def test_smoothing_starts_at_the_first_value_follows_and_leaves_out_gaps():
    smooth = figure._smooth([4.0] * 3 + [float("nan")] + [0.0] * 200)
    assert smooth[:4] == pytest.approx([4.0] * 4)
    assert smooth[-1] < 0.01


def test_the_titles_say_what_was_found(tmp_path):
    levels = {"O0": a_row(0.98), "O3": a_row(0.97)}
    levels["O3"]["samples_per_second"] = 2 * levels["O0"]["samples_per_second"]
    levels["O3"]["bytes"] = {name: size / 2 for name, size in levels["O0"]["bytes"].items()}
    draw_results(results(**levels), tmp_path / "demo.svg")
    drawn = (tmp_path / "demo.svg").read_text()
    for title in ("accuracies within 1.0 points", "O3 2.00 times O0", "O3 0.50 of O0"):
        assert title in drawn  # matplotlib writes each text beside its outlines, as a comment
