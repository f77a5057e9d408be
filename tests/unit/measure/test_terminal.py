"""How far a run is, in plain text: on a terminal and elsewhere."""

import io
import math
import os

import pytest

from lightning_turbo.measure import Progress, Work, progress


class Screen(io.StringIO):
    """A terminal: what is erased cannot be read any more."""

    def isatty(self):
        return True

    def shown(self):
        lines = self.getvalue().split("\n")
        return [line.rpartition("\r\x1b[K")[2] for line in lines]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    return now


def test_a_terminal_shows_one_line_that_changes_and_keeps_what_is_said(clock):
    screen = Screen()
    with Progress(stream=screen) as shown:
        assert screen.shown() == [f"[{'':30}] 0 s passed: starting"]
        shown.expect([Work(1, 2, math.inf)])
        shown.show("toy, starting")
        clock[0] += 10
        shown.advance("starts")
        shown.show("toy, round 1")
        clock[0] += 5
        shown.advance("rounds")
        assert screen.shown() == [f"[{'#' * 22:30}] 15 s passed, about 5 s left: toy, round 1"[:59]]
        shown.say("toy: failed")
        assert screen.shown()[0] == "toy: failed"
        assert screen.shown()[1].startswith(f"[{'#' * 22:30}] 15 s passed")
        shown.show("a" * 100)
        assert {len(line) for line in screen.shown()[1:]} == {59}
    assert screen.shown() == ["toy: failed", ""], "the last line is gone"


def test_elsewhere_there_are_plain_lines_now_and_then_without_control_codes(clock):
    stream = io.StringIO()
    with Progress(deadline=400.0, stream=stream) as shown:
        shown.expect([Work(0, 100, math.inf)])
        for _ in range(8):
            shown.show("toy")
            clock[0] += 5
            shown.advance("rounds")
        shown.say("it is said")
    lines = stream.getvalue().splitlines()
    assert lines == ["20 s passed, about 280 s left", "40 s passed, about 260 s left", "it is said"]
