import time

import torch

from lightning_turbo.bench.meter import Meter


class Runner:
    """Answers the meter with orders given beforehand, and keeps what it was told."""

    def __init__(self, *orders):
        self.orders = list(orders)
        self.events = []

    def __call__(self, event):
        self.events.append(event)
        return self.orders.pop(0)


def round_of(steps, lead=0):
    return {"order": "round", "lead": lead, "steps": steps}


END = {"order": "end"}


def test_warm_up_and_lead_are_not_measured():
    runner = Runner(round_of(4, lead=3), round_of(4, lead=3), END)
    meter = Meter(runner, warmup=5)
    steps = 0
    pause = 0.05
    while meter.step(samples=2):
        steps += 1
        first_round, second_round = range(5 + 3, 5 + 3 + 4), range(12 + 3, 12 + 3 + 4)
        if steps not in (*first_round, *second_round):
            time.sleep(pause)
    assert steps == 5 + 2 * 7 - 1
    assert meter.over
    assert [event["event"] for event in runner.events] == ["ready", "round", "round"]
    for event in runner.events[1:]:
        assert event["steps"] == 4
        assert event["samples"] == 8
        assert event["seconds"] < pause


def test_the_time_of_a_round_is_that_of_its_steps():
    runner = Runner(round_of(3), END)
    meter = Meter(runner, warmup=1)
    while meter.step():
        time.sleep(0.02)
    assert 0.06 <= runner.events[1]["seconds"] < 0.2


def test_the_time_in_which_the_case_waits_for_its_turn_is_not_measured():
    class Slow(Runner):
        def __call__(self, event):
            time.sleep(0.1)
            return super().__call__(event)

    runner = Slow(round_of(2), round_of(2), END)
    meter = Meter(runner, warmup=1)
    while meter.step():
        pass
    assert all(event["seconds"] < 0.05 for event in runner.events[1:])


def test_after_the_end_every_further_step_says_so():
    meter = Meter(Runner(END), warmup=2)
    assert meter.step()
    assert not meter.step()
    assert not meter.step()
    assert not meter.step()


def test_a_case_on_a_gpu_gives_back_what_it_does_not_use_before_it_waits(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronise"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("give back"))

    class Asked(Runner):
        def __call__(self, event):
            order.append("wait")
            return super().__call__(event)

    meter = Meter(Asked(round_of(1, lead=1), END), device="cuda", warmup=1)
    while meter.step():
        order.append("step")
    turn = ["synchronise", "give back", "wait"]
    assert order == [*turn, "synchronise", "step", "synchronise", "step", *turn]
