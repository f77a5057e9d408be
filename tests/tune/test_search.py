"""The search on a simulated machine: times come from a table with noise, and the clock is simulated."""

import math
import random

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, new_row
from lightning_turbo.tune.candidates import list_candidates, select
from lightning_turbo.tune.promise import MOST
from lightning_turbo.tune.search import GROUP, Search

PRECISION = ("bf16-mixed", "O1", "O2")
PHASES = {"data": 0.2, "forward": 3.0, "backward": 4.0, "optimizer": 2.0, "hooks": 0.8}  # milliseconds


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch):
    """Gives the same order of trials on every machine."""
    monkeypatch.setattr("lightning_turbo.tune.search.computes_in_bfloat16", lambda: False)


class Machine:
    """Measures settings without running anything.

    Args:
        factors: The factor of each setting on the time of a step; for a pair, the additional factor of both.
        noise: Standard deviation between processes.
        seconds: Budget.
        fails: Settings whose process fails, with status and reason.
        start: Seconds until a process trains.
        stop: After so many calls, Ctrl-C is pressed.
        phases: Milliseconds of a step.
        facts: What the look sees besides.
    """

    def __init__(
        self, factors, *, noise=0.0, seconds=600.0, fails=(), start=2.0, stop=math.inf, phases=(), **facts
    ):  # fmt: skip
        self.factors, self.noise, self.left = factors, noise, seconds
        self.fails, self.start, self.stop = dict(fails), start, stop
        phases = {name: each / 1e3 for name, each in {**PHASES, **dict(phases)}.items()}
        known = {"batches": 100, "period": 100, "seconds": 1.0, "is_seen": True, "lacks": ["cuda", "new workers"]}
        self.facts = {"phases": phases, **known, **facts}
        self.draw = random.Random(0)
        self.calls = []

    def look(self):
        self.left -= self.start
        return {**new_row(), "status": "ok", "numbers": self.facts}

    def seconds(self, names):
        seconds = 0.01
        for name in names:
            seconds *= self.factors.get(name, 1.0)
        for pair, factor in self.factors.items():
            if isinstance(pair, tuple) and set(pair) <= set(names):
                seconds *= factor
        return seconds * math.exp(self.draw.gauss(0.0, self.noise))

    def measure(self, together, stretch):
        assert len(set(together)) == len(together)
        self.calls.append((list(together), stretch))
        self.left -= len(together) * (self.start + 0.01 * stretch.steps)
        if self.left < 0 or len(self.calls) > self.stop:
            raise InterruptedRunError
        return {names: self.row(names) for names in together}

    def row(self, names):
        if broken := [name for name in names if name in self.fails]:
            status, reason = self.fails[broken[0]]
            return {**new_row(), "status": status, "reason": reason}
        rounds = [{"sweep": n, "process": 0, "seconds": self.seconds(names), "steps": 1} for n in range(3)]
        return {**new_row(), "status": "ok", "rounds": rounds}


def search(machine, only=()):
    made = Search(select(list_candidates(2), only), machine)
    made.run()
    return made


LOADERS = {"prefetch", "prefetch-threads", "workers-1", "workers-2", "workers-1-persistent", "workers-2-persistent"}
SHARED = {"prefetch-omp-1", "workers-2-omp-1"}  # loading and the step use the same cores


@pytest.mark.parametrize(("factors", "chosen"), [
    ({}, ()),
    ({"fused": 0.9}, ("fused",)),
    ({"fused": 0.9, "lean": 0.8, "threads-1": 1.3}, ("lean", "fused")),
    # The best of the settings for the same thing.
    ({"workers-1": 0.7, "workers-2": 0.5, "prefetch": 0.8}, ("workers-2",)),
    # A setting that helps alone, but not in addition to another one, is left out.
    ({"threads-1": 0.7, "lean": 0.9, ("threads-1", "lean"): 1 / 0.9}, ("threads-1",)),
    ({"threads-1": 0.8, "fused": 0.9, ("threads-1", "fused"): 1.3}, ("threads-1",)),
])  # fmt: skip
def test_the_settings_that_help_together_are_found(factors, chosen):
    made = search(Machine(factors, noise=0.01, phases={"data": 1.0}))
    assert made.chosen == chosen
    assert [name for name, trial in made.trials.items() if trial.why == "kept"] == list(chosen)
    if chosen:
        low, high = made.promise.interval
        assert made.promise.factor == pytest.approx(1 / math.prod(factors[name] for name in chosen), rel=0.05)
        assert 1.0 < low < made.promise.factor < high
        assert made.promise.stretch.is_whole
        assert len(made.promise.logs) == MOST


def test_nothing_is_recommended_if_nothing_helps():
    recommended = 0
    for seed in range(20):
        machine = Machine({}, noise=0.03)
        machine.draw.seed(seed)
        recommended += bool(search(machine).chosen)
    assert recommended <= 1, "an interval of 95 %"


@pytest.mark.parametrize(("facts", "lacks", "tried"), [
    ({}, ("new workers",), {"lean", "fused", "bf16-mixed", "threads-1"}),
    ({"phases": {"data": 50.0}}, ("new workers",), LOADERS | SHARED | {"fused", "bf16-mixed", "threads-1"}),
    ({"phases": {"data": 500.0}}, ("new workers",), LOADERS),
    ({"phases": {"optimizer": 0.1, "hooks": 0.1}}, ("new workers",), {"bf16-mixed", "threads-1"}),
    ({}, ("own strategy", "own precision", "optimizer", "new workers"), {"threads-1"}),
])  # fmt: skip
def test_settings_for_what_takes_no_time_are_not_tried(facts, lacks, tried):
    machine = Machine({}, **facts, lacks=["cuda", *lacks])
    made = search(machine)
    assert {name for together, _ in machine.calls for names in together for name in names} == tried
    for name, trial in made.trials.items():
        assert trial.why.startswith("not tried because ") == (name not in tried), (name, trial.why)


def test_the_setting_that_usually_saves_most_is_tried_first():
    machine = Machine({}, phases={"data": 20.0})
    search(machine)
    assert machine.calls[0][0][:2] == [(), ("workers-1",)]
    machine = Machine({})
    search(machine)
    assert machine.calls[0][0] == [(), ("fused",), ("threads-1",), ("lean",), ("bf16-mixed",)]


@pytest.mark.parametrize(("factors", "chosen"), [
    ({"bf16-mixed": 0.7, "O1": 0.69}, "bf16-mixed"), ({"bf16-mixed": 0.7, "O1": 0.6}, "O1"),
])  # fmt: skip
def test_the_plainer_of_two_similar_settings_is_recommended(factors, chosen):
    made = search(Machine(factors, noise=0.002, device="cuda", lacks=["cpu"]), PRECISION)
    assert made.chosen == (chosen,)
    (other,) = set(factors) - {chosen}
    assert made.trials[other].why == f"no better than {chosen}"


@pytest.mark.parametrize(("device", "most"), [("cpu", GROUP + 1), ("cuda", 2)])
def test_fewer_processes_share_a_gpu(device, most):
    lacks = ["cpu" if device == "cuda" else "cuda"]
    machine = Machine({"fused": 0.8, "lean": 0.7, "bf16-mixed": 0.9}, device=device, lacks=lacks)
    assert search(machine).chosen == ("lean", "fused", "bf16-mixed")
    assert max(len(together) for together, _ in machine.calls) == most


@pytest.mark.parametrize("seconds", [40.0, 60.0, 120.0, 180.0, 600.0, 3000.0])
@pytest.mark.parametrize("noise", [0.005, 0.04])
def test_the_time_is_used_and_kept(seconds, noise):
    machine = Machine({"lean": 0.7, "fused": 0.8, "workers-2": 0.9}, noise=noise, seconds=seconds, phases={"data": 2.0})
    made = search(machine)
    assert machine.left > -0.1 * seconds
    assert all(trial.why for trial in made.trials.values())
    assert seconds < 120 or set(made.chosen) & {"lean", "fused"}
    assert bool(made.untried) == (seconds < 120)
    if seconds >= 600:
        assert made.chosen == ("workers-2", "lean", "fused")
        assert machine.calls[-1][1].is_whole


def test_a_large_gain_is_confirmed_although_there_is_no_time_for_the_rest():
    machine = Machine({"workers-2": 0.4}, noise=0.02, start=5.0, seconds=120.0, phases={"data": 30.0})
    made = search(machine)
    assert made.chosen == ("workers-2",)
    assert made.trials["fused"].why == "not tried because the time was over"


def test_epochs_that_do_not_fit_are_promised_by_equal_stretches():
    said = []
    machine = Machine({"lean": 0.7}, noise=0.01, seconds=200.0, batches=10_000, period=10_000)
    machine.facts["seconds"] = 100.0
    made = Search(select(list_candidates(2), ["lean"]), machine, said.append)
    made.run()
    assert made.chosen == ("lean",)
    assert not made.promise.stretch.is_whole
    assert 100 <= made.promise.stretch.steps < 10_000
    assert "whole epochs need --minutes 28." in said[0]


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_ctrl_c_keeps_what_was_found(stop):
    machine = Machine({"fused": 0.7}, noise=0.01, stop=stop)
    made = search(machine, ["fused", "lean"])
    assert made.interrupted
    assert made.chosen == ()
    if stop == 0:
        assert {trial.why for trial in made.trials.values()} == {"not tried because the search was ended"}
    if stop == 5:
        assert made.trials["fused"].why == "not confirmed because the search was ended"


def test_enough_pairs_count_although_the_time_was_over_before_the_last():
    machine = Machine({"fused": 0.7}, noise=0.01, stop=10)
    made = search(machine, ["fused"])
    assert made.interrupted
    assert 3 <= len(made.promise.logs) < MOST
    assert made.chosen == ("fused",)


@pytest.mark.parametrize(("status", "why"), [
    ("failed", "failed: an error"), ("skipped", "not tried because an error"),
])  # fmt: skip
def test_a_setting_that_fails_has_its_reason(status, why):
    made = search(Machine({"fused": 0.8, "lean": 0.9}, noise=0.01, fails={"fused": (status, "an error.")}))
    assert made.chosen == ("lean",)
    assert made.trials["fused"].why == why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("groups", "chosen"), [
    ([{"lean", "fused"}], ("lean", "bf16-mixed")),
    ([{"lean", "fused", "bf16-mixed"}], ("lean", "fused")),
    ([{"lean", "bf16-mixed"}], ("fused", "bf16-mixed")),
])  # fmt: skip
def test_settings_that_fail_together_are_left_out_one_by_one(groups, chosen, device):
    class Picky(Machine):
        def row(self, names):
            if any(group <= set(names) for group in groups):
                return {**new_row(), "status": "failed", "reason": "not together"}
            return super().row(names)

    lacks = ["cpu" if device == "cuda" else "cuda"]
    made = search(Picky({"lean": 0.7, "fused": 0.8, "bf16-mixed": 0.75}, noise=0.01, device=device, lacks=lacks))
    assert set(made.chosen) <= {"lean", "fused", "bf16-mixed"}
    assert made.chosen
    assert not any(group <= set(made.chosen) for group in groups)


def test_settings_that_fail_in_the_promise_are_not_recommended():
    class AtTheEnd(Machine):
        def row(self, names):
            if names and self.calls[-1][1].pairs > 1:
                return {**new_row(), "status": "failed", "reason": "an error."}
            return super().row(names)

    made = search(AtTheEnd({"lean": 0.7}, noise=0.01), ["lean"])
    assert made.chosen == ()
    assert made.trials["lean"].why == made.promise.error == "failed: an error"


def test_an_undecided_promise_recommends_nothing():
    class Later(Machine):
        def seconds(self, names):
            gains = self.calls[-1][1].pairs == 1
            return super().seconds(names if gains else ()) * math.exp(self.draw.gauss(0.0, 0.0 if gains else 0.2))

    made = search(Later({"lean": 0.7}), ["lean"])
    assert made.chosen == ()
    assert made.trials["lean"].why == "undecided"


def test_a_script_that_cannot_be_measured_is_refused():
    machine = Machine({})
    machine.look = lambda: {**new_row(), "status": "skipped", "reason": "it made no Trainer"}
    with pytest.raises(TurboError, match="the script cannot be measured: it made no Trainer"):
        search(machine)
    machine = Machine({})
    machine.row = lambda names: {**new_row(), "status": "failed", "reason": "no data"}
    with pytest.raises(TurboError, match="could be measured once, but not again: no data"):
        search(machine)
