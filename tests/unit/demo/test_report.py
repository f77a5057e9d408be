"""Rows, tables and picture."""

import io

import pytest

from lightning_turbo import _optional
from lightning_turbo.demo.figure import _smooth, draw_results
from lightning_turbo.demo.history import RunHistory
from lightning_turbo.demo.report import compare_volumes, make_row, print_results, readable_bytes
from lightning_turbo.errors import MissingExtraError
from lightning_turbo.measure import describe_machine


def a_row(accuracy, *, epochs=2, seconds=1.0, floor=0.95):
    history = RunHistory(samples=10)
    history.epoch_seconds = [seconds] * epochs
    history.val_accuracies = [accuracy] * epochs
    history.step_losses = [2.0, float("nan"), 0.5][: epochs + 1] if epochs else []
    history.bytes = {"weights": 1024, "gradients": 1024, "optimizer_state": 2048}
    return make_row(history, 2, floor)


def results(volumes=None, **levels):
    found = {"date": "2026-11-25 06:00 UTC", "settings": {"seed": 0}, "machine": describe_machine("cpu")}
    return {**found, "levels": levels, "volumes": volumes}


def shown(found):
    stream = io.StringIO()
    print_results(found, stream)
    return stream.getvalue()


VOLUMES = compare_volumes({"stock": a_row(0.91, seconds=3.0), "tuned": a_row(0.925)}, {"settings": ["O1", "workers-2"]})


def test_a_row_passes_only_if_it_is_complete_and_good_enough():
    rows = [a_row(0.95), a_row(0.949), a_row(0.99, epochs=1), a_row(0.0, epochs=0)]
    assert [row["passed"] for row in rows] == [True, False, False, False]
    assert [row["complete"] for row in rows] == [True, True, False, False]
    assert rows[3]["val_accuracy"] is None
    assert rows[0]["step_losses"] == [2.0, None, 0.5]  # as JSON can say it


def test_the_tables_say_what_was_found():
    text = shown(results(O0=a_row(0.98), O1=a_row(0.5), O2=a_row(0.98, epochs=1)))
    assert all(part in text for part in ("0.980", "too low", "stopped", "4 KiB"))
    assert "Volumes" not in text
    text = " ".join(shown(results(VOLUMES, O0=a_row(0.98))).split())  # a title wraps over its table
    assert "Volumes from compressed files: 3.00 times as fast, accuracy 91.0% and 92.5%." in text
    assert "O1 + workers-2" in text


def test_bytes_are_written_with_their_unit():
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 290_000: "283 KiB", 5 * 2**20: "5.0 MiB", 2**41: "2048.0 GiB"}
    assert {count: readable_bytes(count) for count in texts} == texts


def test_the_picture_is_drawn_even_of_an_unfinished_run(tmp_path, monkeypatch):
    draw_results(results(O0=a_row(0.9), O3=a_row(0.98), O1=a_row(0.0, epochs=0)), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    draw_results(results(), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000
    monkeypatch.setattr(_optional, "installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"lightning-turbo\[pictures\]"):
        draw_results(results(), tmp_path / "demo.png")


def test_a_smoothed_curve_starts_at_its_first_loss_and_passes_over_what_is_not_finite():
    assert _smooth([2.0, float("nan"), 2.0]) == pytest.approx([2.0] * 3)
    assert 0.5 < _smooth([2.0, 0.5])[1] < 2.0


def test_the_titles_say_what_was_found(tmp_path):
    levels = {"O0": a_row(0.98), "O3": a_row(0.97)}
    levels["O3"]["samples_per_second"] = 2 * levels["O0"]["samples_per_second"]
    levels["O3"]["bytes"] = {name: size / 2 for name, size in levels["O0"]["bytes"].items()}
    draw_results(results(VOLUMES, **levels), tmp_path / "demo.svg")
    drawn = (tmp_path / "demo.svg").read_text()
    titles = (
        "accuracies within 1.0 points",
        "O3 2.00 times O0",
        "O3 0.50 of O0",
        VOLUMES["headline"],
        "workers-2",
        " 4 KiB",
        " 2 KiB",
    )
    for title in titles:
        assert title in drawn  # matplotlib writes each text beside its outlines, as a comment
