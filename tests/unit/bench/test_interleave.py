"""How many cases start at the same time, and how the time is shared, on a clock of the test's own."""

import io
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from lightning_turbo.bench import interleave, interrupt, progress
from lightning_turbo.bench.case import Suite
from lightning_turbo.bench.progress import Progress, Work
from lightning_turbo.bench.settings import BenchSettings

START, ROUND = 10.0, 1.0  # seconds


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    for module in (interleave, interrupt, progress):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


class Process:
    """A case whose start and whose rounds take their time on the clock."""

    running = 0
    most = 0

    def __init__(self, clock):
        self.clock = clock
        self.order = None
        self.resume()

    def resume(self):
        Process.running += 1
        Process.most = max(Process.most, Process.running)

    def hold(self):
        Process.running -= 1

    def tell(self, order):
        self.order = order["order"]
        self.resume()

    def listen(self, timeout, check):
        check()
        if self.order == "end":
            return {"event": "done", "numbers": {}, "start_bytes": 0, "peak_bytes": 0, "threads": 1}
        self.clock[0] += ROUND if self.order else START
        return {"event": "round" if self.order else "ready", "seconds": ROUND, "steps": 1, "samples": 0}

    def close(self, grace=0.0):
        pass


def run(clock, monkeypatch, *, later=(), groups=3, cases=2, seconds=float("inf"), shown=None, **options):
    """Measure some groups of cases; return the run."""
    suite = Suite("s", "about", seconds=seconds, rounds=1000)
    for group in range(groups):
        for case in range(cases):
            suite.add(f"{group}{case}", lambda meter: {}, base=f"{group}0", baseline=group == case == 0)
    settings = BenchSettings(device="cpu", **options)
    limit = interrupt.Interrupt(settings.seconds)
    shown = shown(limit.deadline) if shown else MagicMock()
    made = interleave.SuiteRun(suite, settings, Path(), shown, limit, later=list(later), save=lambda: None)
    monkeypatch.setattr(made, "_spawn", lambda name: Process(clock))
    made.run()
    return made


@pytest.mark.parametrize(("device", "most"), [("cpu", 4), ("cuda", 2)])
def test_no_more_cases_start_at_the_same_time_than_the_memory_of_a_gpu_takes(clock, monkeypatch, device, most):
    monkeypatch.setattr(interleave.os, "cpu_count", lambda: 16)
    suite = Suite("s", "about")
    for number in range(9):
        suite.add(str(number), lambda meter: {}, baseline=number == 0)
    settings = BenchSettings(device="cpu")
    object.__setattr__(settings, "device", device)
    made = interleave.SuiteRun(suite, settings, Path(), MagicMock(), interrupt.Interrupt(), later=[], save=lambda: None)
    monkeypatch.setattr(made, "_spawn", lambda name: Process(clock))
    monkeypatch.setattr(Process, "running", 0)
    monkeypatch.setattr(Process, "most", 0)
    made._start(made.chosen, float("inf"))
    assert (Process.most, Process.running, len(made.alive)) == (most, 0, 9)


def test_a_limit_is_shared_among_all_that_are_to_be_started(clock, monkeypatch):
    rows = run(clock, monkeypatch, minutes=4).rows.values()
    # 80 seconds a group: 20 for its two starts, 60 for rounds.
    assert [len(row["rounds"]) for row in rows] == [30] * 6
    assert {row["status"] for row in rows} == {"ok"}
    assert clock[0] <= 240


def test_suites_to_come_have_their_share(clock, monkeypatch):
    run(clock, monkeypatch, minutes=8, later=[Work(6, 6000, 60.0)])
    assert clock[0] <= 240


def test_what_no_time_was_left_for_says_so(clock, monkeypatch):
    rows = run(clock, monkeypatch, minutes=0.9).rows
    # 18 seconds a group, and two starts take 20: three rounds nevertheless, then one group more, then the end.
    assert [len(rows[name]["rounds"]) for name in ("00", "01", "10", "11")] == [3] * 4
    assert {rows[name]["reason"] for name in ("20", "21")} == {"no time was left for it"}


@pytest.mark.parametrize("processes", [1, 2])
def test_those_that_could_be_started_in_time_are_measured(clock, monkeypatch, processes):
    monkeypatch.setattr(interleave.os, "cpu_count", lambda: 1)
    rows = run(clock, monkeypatch, minutes=1, groups=1, cases=9, processes=processes)
    # Two thirds of a minute, or of half a minute each time: five starts, or three and two.
    rounds, reasons = zip(*((len(row["rounds"]), row["reason"]) for row in rows.rows.values()), strict=True)
    started = {1: 5, 2: 3}[processes]
    assert min(rounds[:started]) >= 2
    assert set(rounds[started:]) == {0}
    assert reasons == ("",) * started + ("no time was left for it",) * (9 - started)


class Shown(Progress):
    """Keeps what it would show: when, and how much time is left."""

    def __init__(self, deadline=float("inf")):
        super().__init__(deadline)
        self.seen = []

    def advance(self, kind):
        super().advance(kind)
        self.seen.append((progress.time.monotonic(), self.left))


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (150.0, {"minutes": 2.5}),
        (105.0, {"quick": True}),
        (6 * START + 90.0, {"seconds": 90.0}),  # rounds alone have that limit
    ],
)
def test_no_more_time_is_left_than_the_limit_gives(clock, monkeypatch, limit, options):
    seen = run(clock, monkeypatch, shown=Shown, **options).progress.seen
    assert len(seen) > 20
    # A round at the end of a sweep may go beyond its limit.
    assert all(now + left <= limit + 2 * ROUND for now, left in seen)


def test_the_time_that_is_left_is_told_from_starts_and_rounds(clock, monkeypatch):
    made = run(clock, monkeypatch, shown=Shown, rounds=5)
    whole = 6 * START + 30 * ROUND
    told = [now + left for now, left in made.progress.seen]
    assert clock[0] == whole
    assert told[:2] == [float("inf")] * 2, "no round was run yet"
    assert told[2:] == pytest.approx([whole] * len(told[2:]))


def test_the_suites_to_come_are_counted(clock, monkeypatch):
    later = [Work(4, 4000, 25.0)]
    seen = run(clock, monkeypatch, shown=Shown, rounds=5, later=later).progress.seen
    assert sum(seen[-1]) == pytest.approx(clock[0] + 4 * START + 25.0)


def test_a_terminal_shows_the_time_that_is_left(clock):
    screen = io.StringIO()
    shown = Progress(clock[0] + 105.0, Console(file=screen, force_terminal=True, width=80))
    with shown:
        shown.expect([Work(4, 100, 4.0)])
        clock[0] += 20.0
        shown.advance("starts")
    assert "0:01:04" in screen.getvalue()
