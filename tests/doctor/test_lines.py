"""The time of lines, from samples: torch's work apart, per step or in all, by function."""

import pytest

from lightning_turbo.doctor.lines import lines_of, logging_of, worker_lines
from lightning_turbo.doctor.samples import Line
from lightning_turbo.doctor.timeline import Mark

MARKS = [
    Mark(0.0, "steps", "forward", "[Strategy]S.training_step", 0, 1),
    Mark(1.0, "steps", "forward", "[Strategy]S.training_step", 1, 1),
    Mark(2.0, "steps", "hooks", "[Callback]Mine.on_train_batch_end", 1, 1),
    Mark(3.0, "validation", "hooks", "[Strategy]S.validation_step", -1, 1),
    Mark(4.0, "set-up", "hooks", "", -1, 0),
    Mark(5.0, "first batch", "data", "next", 1, 1),
]


def line(number=3, function="work", **more):
    return Line(file="t.py", line=number, function=function, **more)


def times(samples, steps=1, torch=None, computing=1.0):
    """Return the lines of (mark, line) -> seconds, where only step 1 counts."""
    cpu = {key: computing * seconds for key, seconds in samples.items()}
    return lines_of(samples, cpu, MARKS, lambda step: step == 1, steps, torch or {})


def test_lines_of_one_function_are_summed_up_for_each_step():
    (found,) = times({(1, line(3)): 1.0, (1, line(5, call="inner")): 3.0, (1, line(9)): 0.1}, steps=2)
    assert [site.line for site in found.sites] == [5, 3], "the lines of a tenth or more, the most expensive first"
    assert (found.seconds, found.own, found.call) == (pytest.approx(2.05), pytest.approx(2.05), "inner")
    assert (found.part, found.phase, found.site.function) == ("steps", "forward", "work")


def test_samples_of_other_steps_before_training_and_without_a_line_do_not_count():
    assert times({(0, line()): 1.0, (4, line()): 1.0, (1, Line()): 1.0}) == ()


@pytest.mark.parametrize(("given", "own", "torch"), [
    ({"kind": "network"}, None, None),
    ({"kind": "torch"}, 0.0, 4.0),
    ({"kind": "torch", "in_network": True}, 0.0, 0.0),
    ({"kind": "library"}, 4.0, 0.0),
    ({"kind": "direct"}, 3.0, 1.0),  # of which torch's functions take one second
    ({"kind": "direct", "in_network": True}, 3.0, 0.0),
])  # fmt: skip
def test_torchs_work_on_the_network_is_no_cost_of_the_line(given, own, torch):
    found = times({(1, line(**given)): 4.0}, torch={"steps": {("t.py", "work"): 1.0}})
    assert [(each.own, each.torch) for each in found] == ([] if own is None else [(own, torch)])


def test_a_function_that_is_mostly_torchs_is_all_torchs():
    (found,) = times({(1, line()): 4.0}, torch={"steps": {("t.py", "work"): 2.9}})
    assert (found.own, found.torch) == (0.0, 4.0)
    (found,) = times({(3, line()): 4.0}, torch={"validation": {("t.py", "work"): 2.9}})
    assert (found.part, found.own, found.torch) == ("validation", 0.0, 4.0)


def test_in_loading_and_hooks_torchs_work_is_a_cost_too():
    found = times({(2, line(kind="torch")): 1.0, (5, line(kind="torch")): 2.0})
    assert [(each.part, each.phase, each.own, each.hook) for each in found] == [
        ("steps", "data", 2.0, ""), ("steps", "hooks", 1.0, "[Callback]Mine.on_train_batch_end"),
    ]  # fmt: skip


@pytest.mark.parametrize(("computing", "waits"), [(0.05, True), (0.3, False)])
def test_a_line_waits_if_its_thread_hardly_computes(computing, waits):
    (found,) = times({(1, line()): 1.0}, computing=computing)
    assert found.waits is waits


def test_log_is_logging_with_a_share_of_each_phase():
    samples = {(1, line(logs=True, kind="library")): 1.0, (1, line(7)): 3.0, (0, line(logs=True)): 9.0}
    assert logging_of(samples, MARKS, lambda step: step == 1) == {"forward": 0.25}
    assert {each.phase for each in times(samples)} == {"forward", "logging"}
    few = {key: seconds / 100 for key, seconds in samples.items()}
    assert logging_of(few, MARKS, lambda step: step == 1) == {}, "too few samples"


def test_lines_of_worker_processes_share_what_the_training_process_waits():
    found = list(worker_lines({line(): 3.0, line(9, "other"): 1.0, line(kind="network"): 4.0}, "steps", 0.2))
    assert [(each.site.line, pytest.approx(each.own), each.where) for each in found] == [
        (3, 0.075, "in worker processes"), (9, 0.025, "in worker processes"),
    ]  # fmt: skip
    assert [each.own for each in worker_lines({line(): 3.0}, "steps", 0.0)] == [0.0], "the loader is faster"
