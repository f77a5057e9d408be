"""The number of processes that start at once, the order of their rounds, and the time limit, on a fake clock."""

from unittest.mock import MagicMock

import pytest

from lightning_turbo.measure import (
    InterleavedRounds,
    Interrupt,
    InterruptedRunError,
    ProcessError,
    interleaved,
    new_row,
)

TWICE = "sent {got!r} in place of {expected!r}: expected one process that trains, got a fork that trains too"
START, ROUND = 10.0, 1.0  # seconds
ORDER = {"steps": 1, "lead": 0}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interleaved.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(interleaved.os, "cpu_count", lambda: 16)
    return now


class Machine:
    """Creates processes whose starts and rounds advance the clock, and counts how many run."""

    def __init__(self, clock, **fails):
        self.clock = clock
        self.fails = fails
        self.error = ProcessError("gone")
        self.running = 0
        self.most = 0
        self.order = []
        self.open = set()
        self.most_open = 0

    def __call__(self, name):
        self.open.add(name)
        self.most_open = max(self.most_open, len(self.open))
        return FakeProcess(self, name)


class FakeProcess:
    """Answers its orders one by one, including those that nobody waited for."""

    def __init__(self, machine, name):
        self.machine, self.name, self.orders = machine, name, [None]
        self.resume()

    def resume(self):
        self.machine.running += 1
        self.machine.most = max(self.machine.most, self.machine.running)

    def hold(self):
        self.machine.running -= 1

    def tell(self, order):
        self.orders.append(order["order"])
        self.resume()
        if self.machine.fails.get(self.name) == f"{order['order']} sent":
            raise ProcessError("gone")

    def listen(self, timeout, check):
        check()
        order = self.orders.pop(0)
        fault = self.machine.fails.get(self.name)
        if fault == (order or "start"):
            raise self.machine.error
        if order == "end" or fault == f"{order or 'start'} done":
            return {"event": "done", "numbers": {"n": 1}, "peak_bytes": 0}
        if fault == f"{order} twice":  # the copy that a script forks sends its own events
            return {"event": "ready"}
        self.machine.clock[0] += ROUND if order else START
        self.machine.order += [self.name] * bool(order)
        return {"event": "round" if order else "ready", "seconds": ROUND, "steps": 1, "samples": 0}

    def close(self, grace=0.0):
        self.machine.open.discard(self.name)


def run(machine, names="abc", rounds=3, **options):
    rows = {name: new_row() for name in names}
    made = InterleavedRounds(machine, rows, interrupt=Interrupt(), progress=MagicMock(), at_once=2)
    made.run(list(names), [ORDER] * rounds, **options)
    return rows


def test_each_sweep_starts_with_another_process(clock):
    machine = Machine(clock)
    rows = run(machine, number=1)
    assert "".join(machine.order) == "abc" + "bca" + "cab"
    assert [(part["sweep"], part["process"]) for part in rows["a"]["rounds"]] == [(3, 1), (4, 1), (5, 1)]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows["b"]["numbers"] == {"n": 1}
    assert not machine.open


def test_each_round_has_its_own_number_of_steps(clock):
    told = []

    class Told(FakeProcess):
        def tell(self, order):
            told.append(order)
            super().tell(order)

    machine, rows = Machine(clock), {"a": new_row()}
    made = InterleavedRounds(lambda name: Told(machine, name), rows, interrupt=Interrupt(), progress=MagicMock())
    made.run("a", [{"steps": 5, "lead": 1}, {"steps": 4, "lead": 0}])
    assert told == [
        {"order": "round", "steps": 5, "lead": 1},
        {"order": "round", "steps": 4, "lead": 0},
        {"order": "end"},
    ]


def test_without_sigstop_each_process_is_measured_separately(clock, monkeypatch):
    monkeypatch.setattr(interleaved, "CAN_HOLD", False)
    machine = Machine(clock)
    rows = run(machine, seconds=6.0, rounds=1000, number=1)
    assert "".join(machine.order) == "aa" + "bb" + "cc", "a third of the time for each"
    assert machine.most_open == 1
    assert [part["sweep"] for part in rows["c"]["rounds"]] == [1000, 1001]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert not machine.open


def test_the_number_of_processes_that_start_at_once_is_limited(clock):
    machine = Machine(clock)
    run(machine, "abcdefghi", rounds=1)
    assert machine.most == 9, "all are resumed to end"
    machine.most = 0
    made = InterleavedRounds(
        machine, {n: new_row() for n in "abcdefghi"}, interrupt=Interrupt(), progress=MagicMock(), at_once=2
    )
    machine.running = 0
    made._start("abcdefghi", float("inf"))
    assert (machine.most, machine.running, len(made.alive)) == (2, 0, 9)


@pytest.mark.parametrize(("fault", "reason", "rounds"), [
    ("start", "gone", 0),
    ("start done", "ended before its first round", 0),
    ("round", "gone", 0),
    ("round done", "ended before its rounds were over", 0),
    ("round twice", TWICE.format(got="ready", expected="round"), 0),
    ("round sent", "gone", 0),
    ("end sent", "gone", 3),
    ("end", "gone", 3),
])  # fmt: skip
def test_a_failed_process_is_a_row_with_its_reason(clock, fault, reason, rounds):
    machine = Machine(clock, b=fault)
    rows = run(machine)
    assert (rows["b"]["status"], rows["b"]["reason"], len(rows["b"]["rounds"])) == ("failed", reason, rounds)
    assert all((rows[name]["status"], len(rows[name]["rounds"])) == ("ok", 3) for name in "ac")
    assert not machine.open


@pytest.mark.parametrize(("options", "rounds"), [
    ({"seconds": 30.0}, [10] * 3),
    ({"until": 60.0}, [10] * 3),  # the starts took 30 seconds
    ({"until": 1.0, "fewest": 2}, [2] * 3),
    ({"start_until": 5.0, "seconds": 2.0, "fewest": 1}, [1, 1, 0]),
])  # fmt: skip
def test_the_time_limit_is_kept(clock, options, rounds):
    rows = run(Machine(clock), **{"rounds": 1000, **options})
    assert [len(row["rounds"]) for row in rows.values()] == rounds
    assert [row["reason"] for row in rows.values()] == ["" if count else "no time was left for it" for count in rounds]


def test_measurements_before_an_interruption_are_kept(clock):
    machine = Machine(clock)
    rows = {name: new_row() for name in "abc"}
    with pytest.raises(InterruptedRunError):
        InterleavedRounds(machine, rows, interrupt=Interrupt(34.5), progress=MagicMock()).run("abc", [ORDER] * 1000)
    assert [len(row["rounds"]) for row in rows.values()] == [1, 2, 2]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert not machine.open


def test_the_measurements_of_the_first_process_are_kept_if_the_second_starts_too_late(clock):
    rows = {name: new_row() for name in "ab"}
    made = InterleavedRounds(Machine(clock), rows, interrupt=Interrupt(), progress=MagicMock())
    made.run("a", [ORDER] * 2)
    made.run("ab", [ORDER] * 2, number=1, start_until=0.0)
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", ""), ("skipped", interleaved.LATE)]
    assert len(rows["a"]["rounds"]) == 2


def test_a_second_ctrl_c_ends_all_processes_at_once(clock):
    machine = Machine(clock, b="round")
    machine.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    assert machine.most_open == 3
    assert not machine.open
