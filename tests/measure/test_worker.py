"""The measured process: its reports and its end."""

import io
import json
import math

import pytest
import torch

from lightning_turbo.measure import RoundTimer, SkippedError, worker
from lightning_turbo.measure.worker import Channel, peak_bytes, serve


def events_of(run):
    """Return the events that a run sends."""
    events = io.StringIO()
    serve(Channel(io.StringIO(), events), RoundTimer(lambda event: {}), run)
    return [json.loads(line) for line in events.getvalue().splitlines()]


def fails(error):
    raise error


def test_reported_numbers_are_python_numbers_at_any_depth():
    numbers = {"losses": [1, torch.tensor(0.5), math.nan], "facts": {"batches": math.inf, "lacks": ("cuda",)}}
    (event,) = events_of(lambda: numbers)
    assert event["event"] == "done"
    assert event["numbers"] == {"losses": [1, 0.5, None], "facts": {"batches": None, "lacks": ["cuda"]}}


@pytest.mark.parametrize(("error", "event", "reason"), [
    (SkippedError("not here"), "skipped", "not here"),
    (ValueError("expected a,\ngot b"), "failed", "ValueError: expected a,"),
    (ValueError("word " * 99), "failed", "ValueError: " + " ".join(["word"] * 37) + " ..."),
])  # fmt: skip
def test_the_end_of_a_run_is_reported_in_one_line(error, event, reason):
    assert events_of(lambda: fails(error)) == [{"event": event, "reason": reason}]


def test_a_worker_ends_with_its_controlling_program(monkeypatch):
    monkeypatch.setattr(worker, "end_process", lambda status: fails(SystemExit(status)))
    with pytest.raises(SystemExit) as error:
        Channel(io.StringIO(""), io.StringIO()).receive()
    assert error.value.code == 1


def test_a_system_without_memory_information_has_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "STATUS", tmp_path / "absent")
    assert peak_bytes(torch.device("cpu")) is None
    (tmp_path / "absent").write_text("VmPeak:   9 kB\nVmHWM:    3 kB\n")
    assert peak_bytes(torch.device("cpu")) == 3 * 1024
