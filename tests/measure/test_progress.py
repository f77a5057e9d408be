"""The progress of a run in plain text, on a terminal and elsewhere."""

import io
import os

import pytest

from lightning_turbo.measure import Progress, progress


class Screen(io.StringIO):
    """A terminal on which erased text disappears."""

    def isatty(self):
        return True

    def shown(self):
        lines = self.getvalue().split("\n")
        return [line.rpartition("\r\x1b[K")[2] for line in lines]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda **_: os.terminal_size((60, 24)))
    return now


def test_a_terminal_shows_one_progress_line_and_keeps_messages(clock):
    screen = Screen()
    with Progress(deadline=120.0, stream=screen) as shown:
        assert screen.shown() == [f"[{'':30}] 0 s passed, 20 s left: starting"[:59]]
        clock[0] += 15
        shown.show("toy, round 1")
        assert screen.shown() == [f"[{'#' * 22:30}] 15 s passed, 5 s left: toy, round 1"[:59]]
        shown.say("toy: failed")
        assert screen.shown() == ["toy: failed", f"[{'#' * 22:30}] 15 s passed, 5 s left: toy, round 1"[:59]]
        clock[0] += 15
        shown.show("a" * 100)
        assert screen.shown()[1] == f"[{'#' * 30}] 30 s passed, 0 s left: {'a' * 100}"[:59]
    assert screen.shown() == ["toy: failed", ""], "the last line is erased"


def test_a_run_without_a_known_end_has_no_progress_bar(clock):
    screen = Screen()
    with Progress(deadline=float("inf"), stream=screen) as shown:
        clock[0] += 15
        shown.show("toy, round 1")
        assert screen.shown() == ["15 s passed: toy, round 1"]


@pytest.mark.parametrize(("deadline", "left"), [(400.0, (280, 260)), (float("inf"), ())])
def test_without_a_terminal_progress_is_plain_lines_without_control_codes(clock, deadline, left):
    stream = io.StringIO()
    with Progress(deadline=deadline, stream=stream) as shown:
        for _ in range(8):
            clock[0] += 5
            shown.show("toy")
        shown.say("it is said")
    suffixes = [f", {seconds} s left" for seconds in left] or ["", ""]
    lines = [f"{passed} s passed{left}: toy" for passed, left in zip((20, 40), suffixes, strict=True)]
    assert stream.getvalue().splitlines() == [*lines, "it is said"]
