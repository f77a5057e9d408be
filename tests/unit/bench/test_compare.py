import copy

import pytest

from lightning_turbo.bench.command import compare_files
from lightning_turbo.bench.compare import compare_results, differences
from lightning_turbo.bench.report import write_results


def results(**cases):
    rows = []
    for name, (seconds, peak) in cases.items():
        rounds = [{"sweep": n, "seconds": s, "steps": 1, "samples": 0} for n, s in enumerate(seconds)]
        rows.append({"case": name, "base": "base", "rounds": rounds, "numbers": {}, "peak_bytes": peak})
    return {
        "format": 1,
        "machine": {"processor": "a", "cores": 2, "system": "b"},
        "settings": {"device": "cpu", "threads": None, "quick": False},
        "suites": [{"suite": "s", "baseline": "base", "rows": rows}],
    }


BEFORE = results(base=([1.0, 1.0, 1.0], 100), a=([2.0, 2.1, 2.2], 100), noisy=([1.0, 3.0, 5.0], 100))


def verdicts(after, **options):
    return {(c.case, c.quantity): c.verdict for c in compare_results(BEFORE, after, **options)}


def test_nothing_changed():
    assert set(verdicts(BEFORE).values()) == {"same"}


def test_slower_and_larger():
    after = results(base=([1.0, 1.0, 1.0], 100), a=([2.6, 2.7, 2.8], 120), noisy=([1.5, 3.4, 5.5], 100))
    found = verdicts(after)
    assert found[("a", "time")] == "slower"
    assert found[("a", "peak memory")] == "larger"
    assert found[("noisy", "time")] == "same", "within the spread of both runs"


def test_faster_and_smaller():
    after = results(base=([1.0, 1.0, 1.0], 100), a=([1.0, 1.1, 1.2], 50), noisy=([1.0, 3.0, 5.0], 100))
    found = verdicts(after)
    assert found[("a", "time")] == "faster"
    assert found[("a", "peak memory")] == "smaller"


def test_the_threshold_decides():
    after = results(base=([1.0, 1.0, 1.0], 100), a=([2.3, 2.31, 2.32], 100), noisy=([1.0, 3.0, 5.0], 100))
    assert verdicts(after)[("a", "time")] == "slower"
    assert verdicts(after, threshold=0.2)[("a", "time")] == "same"
    with pytest.raises(ValueError, match=r"threshold=-1; accepted is 0 or more, for example 0.05 for 5 %. Raise it."):
        verdicts(after, threshold=-1)


def test_new_and_gone_cases():
    after = results(base=([1.0, 1.0, 1.0], 100), b=([1.0, 1.0, 1.0], 100))
    found = verdicts(after)
    assert found[("a", "time")] == "gone"
    assert found[("b", "time")] == "new"


def test_on_another_machine_the_ratios_to_the_baseline_are_compared():
    after = results(base=([2.0, 2.0, 2.0], 100), a=([4.0, 4.2, 4.4], 100), noisy=([2.0, 6.0, 10.0], 100))
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


def test_inputs_are_left_alone():
    before, after = copy.deepcopy(BEFORE), copy.deepcopy(BEFORE)
    list(compare_results(before, after))
    assert before == after == BEFORE


def test_the_exit_status_tells_whether_something_got_worse(tmp_path, capsys):
    after = results(base=([1.0, 1.0, 1.0], 100), a=([2.6, 2.7, 2.8], 100), noisy=([1.0, 3.0, 5.0], 100))
    write_results(BEFORE, tmp_path / "a")
    write_results(after, tmp_path / "b")
    assert compare_files(tmp_path / "a", tmp_path / "b") == 1
    shown = capsys.readouterr().out
    assert "s: a" in shown
    assert "slower" in shown
    assert "1 slower or larger, 0 otherwise changed, 5 the same." in shown
    assert compare_files(tmp_path / "b", tmp_path / "a") == 0
    assert compare_files(tmp_path / "a", tmp_path / "a") == 0
