"""The search on a simulated machine: times come from a table with noise, and the clock is simulated."""

import json
import math
import random

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, new_row
from lightning_turbo.tune.candidates import Baseline, list_candidates, select, why_not
from lightning_turbo.tune.evidence import DEFAULT, Configuration, compare_losses
from lightning_turbo.tune.search import FINAL, Search

NOT_HERE = ("cuda", "huge pages", "new workers")


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch):
    """Gives the same order of trials on every machine."""
    monkeypatch.setattr("lightning_turbo.tune.search.computes_in_bfloat16", lambda: False)


PRECISION = ("bf16-mixed", "O1", "O2")
PARTS = ("channels-last", "no-bias", "fused", "threads-1")


class Machine:
    """Measures configurations without running anything.

    Args:
        factors: The factor of each setting on the time of a step; for a pair, the additional factor of both.
        step: Seconds of a step of the unchanged script, with one batch, and of the loader only.
        noise: Standard deviation between processes.
        seconds: Budget.
        fails: Settings whose process fails, with status and reason.
        losses: Settings that change the losses, and the size of the change.
        cost: Seconds that a process takes.
        stop: After so many calls, Ctrl-C is pressed.
        facts: Of the script.
        borders: Seconds of the boundaries between its epochs.
    """

    def __init__(
        self, factors, *, step=(0.010, 0.010, 0.0001), noise=0.0, seconds=600.0, fails=(), losses=(), cost=2.0,
        stop=math.inf, facts=(), borders=(),
    ):  # fmt: skip
        self.factors, self.times, self.noise, self.left = factors, step, noise, seconds
        self.fails, self.changed, self.cost, self.stop = dict(fails), dict(losses), cost, stop
        self.facts = {"accumulate": 1, "lacks": NOT_HERE, **dict(facts)}
        self.borders = list(borders)
        self.draw = random.Random(0)
        self.calls = []

    def set_pace(self, step_seconds, accumulate):
        self.pace = (step_seconds, accumulate)

    def seconds(self, configuration):
        if configuration.mode != "step":
            return self.times[1 + (configuration.mode == "loader")]
        seconds = self.times[0]
        for name in configuration.names:
            seconds *= self.factors.get(name, 1.0)
        for pair, factor in self.factors.items():
            if isinstance(pair, tuple) and set(pair) <= set(configuration.names):
                seconds *= factor
        return seconds * math.exp(self.draw.gauss(0.0, self.noise))

    def measure(self, configurations):
        assert len(set(configurations)) == len(configurations)
        self.calls.append(list(configurations))
        self.left -= self.cost * len(configurations)
        if self.left < 0 or len(self.calls) > self.stop:
            raise InterruptedRunError
        return {configuration: self.row(configuration) for configuration in configurations}

    def row(self, configuration):
        row = new_row()
        if broken := [name for name in configuration.names if name in self.fails]:
            status, reason = self.fails[broken[0]]
            return {**row, "status": status, "reason": reason}
        row["rounds"] = [
            {"sweep": n, "process": 0, "seconds": self.seconds(configuration), "steps": 1} for n in range(3)
        ]
        change = sum(self.changed.get(name, 0.0) for name in configuration.names)
        row["numbers"] = {"facts": self.facts, "losses": [1.0 + change, 0.5 + change], "borders": self.borders}
        return {**row, "status": "ok"}


def search(machine, only=(), **options):
    made = Search(select(list_candidates(2), only), machine, **options)
    made.run()
    return made


@pytest.mark.parametrize(("factors", "chosen"), [
    ({}, ()),
    ({"fused": 0.9}, ("fused",)),
    ({"fused": 0.9, "lean": 0.8, "compile": 1.3}, ("lean", "fused")),
    # The better of two settings for the same option.
    ({"bf16-mixed": 0.7, "O1": 0.5, "O2": 0.8}, ("O1",)),
    # A setting that helps alone, but not in addition to another one, is removed.
    ({"compile": 0.7, "lean": 0.9, ("compile", "lean"): 1 / 0.9}, ("compile",)),
    # The better of two conflicting settings stays.
    ({"compile": 0.8, "no-bias": 0.9, ("compile", "no-bias"): 1.3}, ("compile",)),
])  # fmt: skip
def test_the_settings_that_help_together_are_found(factors, chosen):
    made = search(Machine(factors, noise=0.01))
    assert made.chosen.names == chosen
    assert [name for name, trial in made.trials.items() if trial.kept] == list(chosen)
    assert made.verdict.startswith("nothing helps here") == (not chosen)
    if chosen:
        expected = math.prod(factors[name] for name in chosen)
        assert made.final.ratio == pytest.approx(expected, rel=0.05)
        assert made.final.interval[0] < made.final.ratio < made.final.interval[1] < 1.0
        assert len(made.final.logs) == FINAL


def test_nothing_is_recommended_if_nothing_helps():
    for seed in range(20):
        machine = Machine({}, noise=0.03)
        machine.draw.seed(seed)
        made = search(machine)
        assert made.chosen.names == ()
        assert "nothing helps here" in made.verdict


def test_a_faster_step_is_not_promised_if_the_epoch_is_dominated_by_other_work():
    """Twenty steps of 4 ms, and 4 s of rollouts: ``lean`` saves 1 % of an epoch."""
    rollouts = {"step": (0.004, 0.004, 0.0001), "noise": 0.01, "borders": [4.0], "facts": {"batches": 20}}
    made = search(Machine({"lean": 0.6}, **rollouts), ("lean",))
    assert made.chosen.names == () or made.final.ratio == pytest.approx((19 * 0.6 * 0.004 + 4) / (19 * 0.004 + 4), 1e-3)
    assert made.trials["lean"].alone.step_ratio == pytest.approx(0.6, rel=0.05)
    assert made.baseline.epoch_ms == pytest.approx(4076, rel=0.01)
    assert made.runner.pace[0] == pytest.approx(0.204, rel=0.01), "rounds are short, or each would cross boundaries"


def test_the_epoch_length_is_learned_from_a_later_process():
    class Late(Machine):
        def row(self, configuration):
            self.facts = {**self.facts, "batches": 20 if len(self.calls) > 1 else None}
            return super().row(configuration)

    made = search(Late({"lean": 0.6}, noise=0.01), ("lean",))
    assert (made.baseline.batches, made.final.of_epochs) == (20, True)


LOADERS = {"prefetch", "prefetch-threads", "workers-1", "workers-2"}
SHARED = {"prefetch-omp-1", "workers-2-omp-1"}  # loading and the step use the same cores
EVERYTHING = {"lean", "compile", *PRECISION, *PARTS, "release-gradients"}


@pytest.mark.parametrize(("step", "lacks", "tried"), [
    ((0.010, 0.0099, 0.0001), (), EVERYTHING),
    ((0.010, 0.0002, 0.0098), (), LOADERS),
    # On a busy machine the difference of two medians is unreliable, so the time of the loader alone counts.
    ((0.248, 0.249, 0.0209), ("compiler",), LOADERS | SHARED | EVERYTHING - {"compile", "lean"}),
    ((0.5, 0.5, 0.001), ("convolutions", "norms", "optimizer"),
     {"compile", *PRECISION, "release-gradients", "threads-1"}),
    ((0.5, 0.5, 0.001), ("own strategy", "own precision", "automatic"), set(PARTS)),
    ((0.010, 0.010, 0.0001), ("float32 weights", "Lightning 2.6"), EVERYTHING - {"lean", *PRECISION}),
])  # fmt: skip
def test_candidates_beyond_the_headroom_are_skipped_with_a_reason(step, lacks, tried):
    machine = Machine({}, step=step, facts={"lacks": (*NOT_HERE, *lacks)})
    made = search(machine)
    assert {
        name for configurations in machine.calls[2:] for configuration in configurations for name in configuration.names
    } == tried
    for name, trial in made.trials.items():
        assert trial.why.startswith("not tried because ") == (name not in tried), (name, trial.why)
    assert made.trials["device-prefetch"].why == "not tried because it needs a CUDA device"
    if made.baseline.loading > 0.5:
        assert made.trials["pack"].why == "not tried because packing was not timed"
        assert "no random transform of MONAI or torchvision" in made.trials["augment-batches"].why
    if "float32 weights" in lacks:
        assert "the network's weights are float64" in made.trials["O1"].why


def test_the_current_number_of_workers_is_tried_with_persistence_or_other_threads():
    table = list_candidates(8)
    baseline = Baseline(step_ms=10.0, one_batch_ms=5.0, loader_ms=9.0, num_workers=8, batches=20)
    for name, reason in {"workers-8": "the loader has as many", "workers-8-persistent": "", "workers-8-omp-4": "",
                         "workers-4": ""}.items():  # fmt: skip
        (candidate,) = select(table, [name])
        assert why_not(candidate, baseline) == reason, name


ENDS = ("kept: ", "no gain", "undecided because ", "no better than ", "failed: ", "not tried because ")


@pytest.mark.parametrize("seconds", [60.0, 120.0, 180.0, 600.0, 3000.0])
@pytest.mark.parametrize("step", [(0.010, 0.010, 0.0001), (0.010, 0.006, 0.005)])
@pytest.mark.parametrize("noise", [0.005, 0.04])
def test_the_time_budget_is_used_and_kept(seconds, step, noise):
    machine = Machine({"lean": 0.7, "fused": 0.8, "prefetch": 0.9}, step=step, noise=noise, seconds=seconds)
    made = search(machine)
    assert machine.left > -0.1 * seconds
    assert not made.interrupted or seconds < 180
    assert made.chosen.names[-2:] == ("lean", "fused") or seconds < 600
    assert all(trial.why.startswith(ENDS) for trial in made.trials.values())
    late = [trial for trial in made.trials.values() if "because the time" in trial.why]
    ended = [trial for trial in made.trials.values() if trial.why.startswith("no gain: ")]
    assert not (late and seconds > 600)
    if late or not all(trial.alone.decided for trial in ended):
        # The rest is shorter than another group and the last comparison, with their margin.
        assert machine.left < machine.cost * (5 + 0.4 * 12) + 0.5 * min(seconds, 120.0)
    if late:
        if not made.final.logs:
            assert machine.left < 3 * machine.cost, "there was nothing to confirm"
        untried_reported = f"{len(late)} of {len(made.trials)} settings were not tried" in made.verdict
        assert made.chosen.names or untried_reported or (made.interrupted and "the time was over" in made.verdict)


def test_undecided_settings_get_more_processes_the_best_first():
    machine = Machine({"lean": 0.9, "fused": 0.96, "O1": 1.2}, noise=0.05, seconds=2000.0)
    made = search(machine, ("lean", "fused", "O1", "threads-1"))
    counts = {name: len(trial.alone.logs) for name, trial in made.trials.items()}
    assert counts["O1"] < counts["threads-1"], counts
    assert all(trial.alone.decided for trial in made.trials.values())
    assert made.trials["lean"].kept


@pytest.mark.parametrize(("factors", "chosen"), [
    ({"bf16-mixed": 0.7, "O1": 0.69}, "bf16-mixed"), ({"bf16-mixed": 0.7, "O1": 0.6}, "O1"),
])  # fmt: skip
def test_the_simpler_of_two_similar_settings_is_recommended(factors, chosen):
    made = search(Machine(factors, noise=0.002), PRECISION)
    assert made.chosen.names == (chosen,)
    (other,) = set(factors) - {chosen}
    assert made.trials[other].why.startswith(f"no better than {chosen} of its kind: a step 1.")


def test_lightnings_setting_is_recommended_if_the_gain_of_another_is_not_significant():
    trials = Search(select(list_candidates(2), PRECISION), Machine({}))
    for name, logs in (("bf16-mixed", [-0.2, -0.3, -0.25]), ("O2", [-0.2, -0.3, -0.25]), ("O1", [-0.3, -0.4, -0.35])):
        trials.trials[name].alone.logs += logs
    assert [each.candidate.name for each in trials.winners()] == ["bf16-mixed"]
    trials.trials["bf16-mixed"].alone.logs[:] = [-0.05, -0.06, -0.05]
    assert [each.candidate.name for each in trials.winners()] == ["O1"]


@pytest.mark.parametrize(("bf16", "o1", "chosen"), [
    (-0.2, -0.35, "bf16-mixed"), (-0.1, -0.35, "O1"), (0.1, -0.35, "O1"), (-0.35, -0.2, "bf16-mixed"),
])  # fmt: skip
def test_with_one_process_each_lightnings_setting_is_confirmed_if_it_gains_half_as_much(bf16, o1, chosen):
    trials = Search(select(list_candidates(2), ("O1", "bf16-mixed", "fused")), Machine({}))
    for name, log in (("bf16-mixed", bf16), ("O1", o1), ("fused", -0.3)):
        trials.trials[name].alone.logs.append(log)
    assert [each.candidate.name for each in trials.winners()] == [chosen]


@pytest.mark.parametrize(("device", "most"), [("cpu", 5), ("cuda", 2)])
def test_fewer_processes_share_a_gpu(device, most):
    machine = Machine({"fused": 0.8, "O1": 0.7, "no-bias": 0.9}, facts={"device": device})
    assert search(machine).chosen.names == ("no-bias", "fused", "O1")
    assert max(len(configurations) for configurations in machine.calls[2:]) == most


def test_with_little_time_the_last_comparison_decides_about_the_best():
    machine = Machine({"lean": 0.75, "fused": 0.9}, noise=0.05, cost=8.0, seconds=150.0)
    made = search(machine, ("lean", "fused", "O1"))
    assert [len(trial.alone.logs) for trial in made.trials.values()] == [1, 1, 1]
    assert made.chosen.names == ("lean",)
    assert made.trials["fused"].why.startswith(
        "undecided because the time that was left was needed to confirm a gain: a step 1."
    )
    assert made.trials["fused"].why.endswith("times as fast (in one process)")


def test_with_little_time_untried_settings_are_not_reported_as_useless():
    class Lucky(Machine):
        def seconds(self, configuration):
            return super().seconds(configuration) * (
                0.8 if configuration.names == ("channels-last",) and len(self.calls) == 3 else 1.0
            )

    made = search(Lucky({"channels-last": 1.05}, noise=0.01, cost=8.0, seconds=150.0))
    assert made.verdict.startswith("nothing is recommended: 6 of 25 settings were not tried, for want of time; ")
    assert made.verdict.endswith("the last comparison did not confirm channels-last")


def test_with_little_time_a_large_gain_is_confirmed_before_the_rest_is_tried():
    machine = Machine({"workers-2": 0.4}, step=(0.035, 0.002, 0.027), noise=0.02, cost=5.0, seconds=120.0)
    made = search(machine)
    assert made.chosen.names == ("workers-2",)
    assert made.trials["fused"].why == "not tried because the time that was left was needed to confirm a gain"


@pytest.mark.parametrize(("one_batch", "first"), [(0.009, "channels-last"), (0.0055, "prefetch"), (0.003, "prefetch")])
def test_the_setting_with_the_largest_possible_gain_is_tried_first(one_batch, first):
    machine = Machine({}, step=(0.010, one_batch, 0.010 - one_batch))
    search(machine)
    assert machine.calls[2][1] == Configuration((first,))


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 15])
def test_ctrl_c_keeps_the_measurements(stop):
    machine = Machine({"channels-last": 0.7, "fused": 0.8}, noise=0.01, stop=stop)
    made = search(machine)
    assert made.interrupted
    assert made.chosen.names == ()
    ended, _, best = made.verdict.partition("; the best so far is ")
    before = "the last comparison" if stop > 2 else "any setting was tried"
    assert ended == f"nothing is recommended: the search was ended before {before}"
    assert best.startswith("channels-last: a step 1.4") == (stop > 2)
    assert not any("the time" in trial.why for trial in made.trials.values())
    assert (made.baseline is not None) == (stop > 1)
    assert sum(bool(trial.alone.logs) for trial in made.trials.values()) >= 4 * (stop > 2)
    assert all(trial.why for trial in made.trials.values())


def test_a_failed_setting_is_a_row_with_its_error():
    machine = Machine(
        {"lean": 0.7}, fails={"compile": ("skipped", "it cannot be traced"), "fused": ("failed", "an error")}
    )
    made = search(machine)
    assert made.trials["compile"].why == "not tried because it cannot be traced"
    assert made.trials["fused"].why == "failed: an error"
    assert made.chosen.names == ("lean",)


class AtTheEnd(Machine):
    """A machine on which the combination of all settings has another result in the last comparison."""

    def row(self, configuration):
        row = super().row(configuration)
        is_last = len(self.calls) > 1 and len(self.calls[-1]) == 2 and len(configuration.names) == 2
        return {**row, **self.last} if is_last else row


def test_settings_that_fail_in_the_last_comparison_are_not_recommended():
    machine = AtTheEnd({"lean": 0.7, "fused": 0.8}, noise=0.01)
    machine.last = {"status": "failed", "reason": "an error."}
    made = search(machine, ("lean", "fused"))
    assert made.chosen == DEFAULT
    assert made.verdict == "nothing is recommended: lean + fused failed in the last comparison: an error"
    assert [trial.why for trial in made.trials.values()] == ["failed: an error, in the last comparison"] * 2
    assert [len(configurations) for configurations in machine.calls[-2:]] == [3, 2], "it is not tried again"


def test_same_maths_refuses_settings_that_change_the_losses_together():
    machine = AtTheEnd({"lean": 0.7, "release-gradients": 0.8}, noise=0.01)
    machine.last = {"numbers": {"facts": machine.facts, "losses": [1.0, 0.6]}}
    made = search(machine, ("lean", "release-gradients"), same_maths=True)
    assert made.chosen == DEFAULT
    assert made.verdict == "nothing is recommended: lean + release-gradients changes the losses"
    assert {trial.why for trial in made.trials.values()} == {
        "failed: it changes the losses, which --same-maths refuses"
    }


@pytest.mark.parametrize(("factor", "said", "end"), [
    (1.0, {"lean": ["of lean", "of both"]}, "no effect: of lean"),
    (0.7, {"lean": ["of lean"]}, "kept: "),
    (1.0, {"lean": ["of both"]}, "no gain: "),
])  # fmt: skip
def test_a_setting_that_warns_of_no_effect_is_not_tried_again(factor, said, end):
    class Warned(Machine):
        def row(self, configuration):
            row = super().row(configuration)
            row["numbers"]["no_effect"] = ["of both", *said.get(str(configuration), [])]
            return row

    machine = Warned({"lean": factor}, noise=0.01)
    made = search(machine, ("lean",))
    assert made.trials["lean"].why.startswith(end)
    tried = sum(Configuration(("lean",)) in configurations for configurations in machine.calls)
    assert (tried == 1) == end.startswith("no effect")


def test_a_failed_setting_is_not_counted_as_untried():
    assert search(Machine({}, fails={"fused": ("failed", "an error")})).verdict == "nothing helps here"


@pytest.mark.parametrize("status", ["failed", "skipped"])
@pytest.mark.parametrize("cost", [2.0, 20.0])  # with long processes there is time for only one round
def test_settings_that_fail_together_are_tried_separately(cost, status):
    class Picky(Machine):
        def row(self, configuration):
            if {"lean", "fused"} <= set(configuration.names):
                return {**new_row(), "status": status, "reason": "not both."}
            return super().row(configuration)

    made = search(Picky({"lean": 0.7, "fused": 0.8}, noise=0.01, cost=cost), ("lean", "fused"))
    assert made.chosen.names == ("lean",)
    assert made.trials["fused"].why.startswith("failed: not both, beside lean")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("groups", "chosen"), [
    ([{"fused", "channels-last"}], ("no-bias", "fused")),
    ([{"fused", "no-bias"}], ("channels-last", "fused")),
    ([{"fused", "channels-last"}, {"no-bias", "O1"}], ("fused", "O1")),
    ([{"fused", "channels-last", "no-bias"}], ("channels-last", "fused", "O1")),
])  # fmt: skip
def test_settings_that_fail_together_are_dropped_and_others_stay(groups, chosen, device):
    class Picky(Machine):
        def row(self, configuration):
            if any(group <= set(configuration.names) for group in groups):
                return {**new_row(), "status": "failed", "reason": "not together"}
            return super().row(configuration)

    factors = {"no-bias": 0.9, "channels-last": 0.7, "fused": 0.5}
    if "O1" in chosen:
        factors["O1"] = 0.6
    made = search(Picky(factors, noise=0.01, facts={"device": device}))
    assert made.chosen.names == chosen
    for name in set(factors) - set(chosen):
        assert made.trials[name].why.startswith("failed: not together, beside ")


def test_a_script_is_measured_alone_if_three_processes_do_not_fit():
    class Small(Machine):
        def measure(self, configurations):
            rows = super().measure(configurations)
            full = {**new_row(), "status": "skipped", "reason": "out of memory"}
            return rows if len(self.calls) != 2 else {**rows, Configuration(): full}

    made = search(Small({"lean": 0.7}, noise=0.01))
    assert made.baseline.step_ms == pytest.approx(10.0, rel=0.1)
    assert made.chosen.names == ("lean",)


def test_a_script_that_cannot_be_measured_is_refused():
    machine = Machine({})
    machine.row = lambda configuration: {**new_row(), "status": "skipped", "reason": "it made no Trainer"}
    with pytest.raises(TurboError, match="the script cannot be measured: it made no Trainer"):
        search(machine)
    assert len(machine.calls) == 1


def test_same_maths_keeps_only_bitwise_equal_settings():
    machine = Machine({"lean": 0.7, "release-gradients": 0.8}, noise=0.01, losses={"lean": 1e-7})
    made = Search(select(list_candidates(2), same_maths=True), machine, same_maths=True)
    made.run()
    assert set(made.trials) >= {"lean", "prefetch", "huge-pages"}
    assert not {"fused", "compile", "O1"} & set(made.trials)
    assert made.chosen.names == ("release-gradients",)
    assert made.trials["lean"].why == "failed: it changes the losses, which --same-maths refuses"


def test_a_second_search_resumes_the_first_one():
    first = search(Machine({"lean": 0.7, "fused": 0.97}, noise=0.01, stop=6))
    assert first.interrupted
    machine = Machine({"lean": 0.7, "fused": 0.97}, noise=0.01)
    second = Search(list_candidates(2), machine)
    second.restore(json.loads(json.dumps(first.state())))
    second.run()
    assert not any(
        configuration.mode != "step" for configurations in machine.calls for configuration in configurations
    ), "the headroom is known"
    assert second.chosen.names[0] == "lean"
    for name, trial in first.trials.items():
        assert second.trials[name].alone.logs[: len(trial.alone.logs)] == trial.alone.logs
    assert len(second.trials["fused"].alone.logs) > len(first.trials["fused"].alone.logs) > 0


@pytest.mark.parametrize(("losses", "other", "result"), [
    ([1.0, 0.5], [1.0, 0.5, 0.4], "same bits"),
    ([1.0, 0.5], [1.0, 0.5 + 1e-6], "rounding"),
    ([1.0, 0.5], [1.0, 0.51], "other maths"),
    ([1.0, 0.5, 0.4, 0.3], [1.0, 0.5, 0.4, 0.2], "rounding"),  # it grows, later
    ([None], [None], "same bits"), ([None], [1.0], "other maths"), ([], [1.0], ""),
])  # fmt: skip
def test_the_comparison_of_the_losses_of_the_first_steps(losses, other, result):
    assert compare_losses(losses, other) == result


def test_names_of_candidates_are_checked():
    table = list_candidates(8)
    workers = select(table, ["workers-?"], ["workers-1"])
    assert [each.name for each in workers] == ["workers-2", "workers-4", "workers-8"]
    with pytest.raises(TurboError, match="nothing is left to try"):
        select(table, ["O1"], ["O*"])


@pytest.mark.parametrize(("losses", "result"), [
    ({}, "same bits"), ({"lean": 1e-7}, "rounding"), ({"lean": 0.1}, "other maths"), ({"O1": 0.0}, "other maths"),
])  # fmt: skip
def test_the_effect_on_results_follows_the_losses_and_the_table(losses, result):
    made = search(Machine({"lean": 0.7, "O1": 0.7}, losses=losses), ("O1",) if "O1" in losses else ("lean",))
    assert made.result(made.chosen, made.final) == result
    assert made.chosen.names
