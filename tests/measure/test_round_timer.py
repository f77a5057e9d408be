import pytest
import torch

from lightning_turbo.measure import RoundTimer, round_timer

END = {"order": "end"}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(round_timer.time, "perf_counter", lambda: now[0])
    return now


class Runner:
    """Sends the timer a list of orders while the clock advances, and keeps its events."""

    def __init__(self, clock, *orders):
        self.clock = clock
        self.orders = list(orders)
        self.events = []

    def __call__(self, event):
        self.clock[0] += 100.0
        self.events.append(event)
        return self.orders.pop(0)


def round_of(steps, lead=0):
    return {"order": "round", "lead": lead, "steps": steps}


@pytest.mark.parametrize("lead", [0, 3])
def test_only_the_steps_of_a_round_are_measured(clock, lead):
    runner = Runner(clock, round_of(4, lead), round_of(4, lead), END)
    made = RoundTimer(runner, warmup=5)
    steps = 0
    while made.step(samples=2):
        steps += 1
        clock[0] += steps  # each step takes a different time
    first, second = 5, 5 + 4 + lead  # the warmup is longer than a lead
    assert steps == second + 4 - 1
    expected = [sum(range(begin, begin + 4)) for begin in (first, second)]
    rounds = [{"event": "round", "seconds": seconds, "steps": 4, "samples": 8} for seconds in expected]
    assert runner.events == [{"event": "ready"}, *rounds]
    assert made.over
    assert not made.step()


def test_a_process_on_a_gpu_empties_its_cache_before_it_waits(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("give back"))
    orders = [round_of(1, lead=1), END]
    made = RoundTimer(lambda event: order.append("wait") or orders.pop(0), device="cuda", warmup=1)
    while made.step():
        order.append("step")
    turn = ["synchronize", "give back", "wait"]
    assert order == [*turn, "synchronize", "step", "synchronize", "step", *turn]
