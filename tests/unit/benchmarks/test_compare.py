import copy

import pytest

from benchmarks.__main__ import main
from benchmarks.compare import compare_results
from benchmarks.runner import FORMAT, differences
from lightning_turbo.measure import write_json


def results(**cases):
    rows = []
    for name, (seconds, peak) in cases.items():
        rounds = [{"sweep": n, "seconds": s, "steps": 1, "samples": 0} for n, s in enumerate(seconds)]
        rows.append({"case": name, "base": "base", "rounds": rounds, "numbers": {}, "peak_bytes": peak})
    return {
        "format": FORMAT,
        "machine": {"processor": "a", "cores": 2, "system": "b"},
        "settings": {"device": "cpu", "threads": None, "quick": False},
        "suites": [{"suite": "s", "rows": rows}],
    }


def run(a=(2.0, 2.1, 2.2), peak=100, noisy=(1.0, 3.0, 5.0), base=(1.0, 1.0, 1.0)):
    return results(base=(base, 100), a=(a, peak), noisy=(noisy, 100))


BEFORE = run()


def verdicts(after, **options):
    return {
        (case.removeprefix("s: "), quantity): verdict
        for case, quantity, _, _, verdict in compare_results(BEFORE, after, **options)
    }


@pytest.mark.parametrize(("after", "options", "changed"), [
    (BEFORE, {}, {}),
    # The noisy one stays within the spread of both runs.
    (
        run(a=(2.6, 2.7, 2.8), peak=120, noisy=(1.5, 3.4, 5.5)), {},
        {("a", "time"): "slower", ("a", "peak memory"): "larger"},
    ),
    (run(a=(1.0, 1.1, 1.2), peak=50), {}, {("a", "time"): "faster", ("a", "peak memory"): "smaller"}),
    (run(a=(2.3, 2.31, 2.32)), {}, {("a", "time"): "slower"}),
    (run(a=(2.3, 2.31, 2.32)), {"threshold": 0.2}, {}),
])  # fmt: skip
def test_what_changed_by_more_than_threshold_and_spread(after, options, changed):
    assert {key: verdict for key, verdict in verdicts(after, **options).items() if verdict != "same"} == changed


def test_new_and_gone_cases():
    found = verdicts(results(base=([1.0, 1.0, 1.0], 100), b=([1.0, 1.0, 1.0], 100)))
    assert (found[("a", "time")], found[("b", "time")]) == ("gone", "new")
    with pytest.raises(ValueError, match=r"threshold=-1: expected 0 or more, for example 0.05 for 5 %"):
        verdicts(BEFORE, threshold=-1)


def test_on_another_machine_the_ratios_to_the_baseline_are_compared():
    after = run(base=(2.0, 2.0, 2.0), a=(4.0, 4.2, 4.4), noisy=(2.0, 6.0, 10.0))
    assert verdicts(after)[("a", "time")] == "slower", "the same machine took twice as long"
    after["machine"]["processor"] = "slow"
    assert differences(BEFORE, after) == ["processor: 'a' -> 'slow'"]
    found = verdicts(after)
    assert found[("a", "time / baseline")] == "same"
    assert ("base", "time / baseline") not in found


def test_environment_variables_that_change_times_are_a_difference():
    after = copy.deepcopy(BEFORE)
    after["machine"]["environment"] = {}
    assert differences(BEFORE, after) == []
    after["machine"]["environment"] = {"THP_MEM_ALLOC_ENABLE": "1"}
    assert differences(BEFORE, after) == ["environment: None -> {'THP_MEM_ALLOC_ENABLE': '1'}"]


def test_the_exit_status_tells_whether_something_got_worse(tmp_path, capsys):
    paths = [str(write_json(made, tmp_path / name)) for made, name in ((BEFORE, "a"), (run(a=(2.6, 2.7, 2.8)), "b"))]
    assert main(["compare", *paths]) == 1
    shown = capsys.readouterr().out
    assert "s: a" in shown
    assert "1 slower or larger, 0 otherwise changed, 5 same." in shown
    assert main(["compare", *reversed(paths), "--threshold", "0.2"]) == 0
