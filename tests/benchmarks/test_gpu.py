"""The suite for GPUs: how kernels are counted, and its cases in their smallest form on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import TASKS, TELLING, ProfilingTimer, count_kernels, kernels_of, profiled
from benchmarks.runner import Settings
from benchmarks.suite import CaseTimer, SkippedError, load_suite


def timer_of(steps):
    orders = iter(
        [{"order": "round", "lead": 2, "steps": 1, "seconds": 0.0}, {"order": "round", "lead": 1, "steps": steps}]
    )
    events = []

    def ask(event):
        events.append(event)
        return next(orders, {"order": "end"})

    return CaseTimer(ask, quick=True), events


def test_number_of_kernels_and_busy_share():
    assert count_kernels([], 3) == {}
    # Two overlap, one lies within another, and nothing runs from 6 to 8.
    found = count_kernels([(8, 10), (0, 4), (3, 6), (1, 2)], steps=2)
    assert found == {"kernels_a_step": 2, "busy_share": pytest.approx(8 / 10)}


def test_annotations_and_host_operations_are_not_kernels():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        SimpleNamespace(device_type=kind, is_user_annotation=note, time_range=SimpleNamespace(start=0, end=end))
        for kind, note, end in ((cuda, False, 3), (cuda, True, 9), (cpu, False, 9), (cuda, False, 2), (cuda, False, 1))
    ]
    assert kernels_of(events, cuda=True) == {"kernels_a_step": 1, "busy_share": 1}


def test_profiled_steps_follow_the_timed_ones():
    timer, events = timer_of(steps=4)
    watch, steps = ProfilingTimer(timer), 0
    weight = torch.ones(3)
    running = True
    while running:
        for _ in range(5):
            weight.mul_(weight)
        steps += 1
        running = watch.step(samples=2)
    assert [event["event"] for event in events] == ["ready", "round", "round"]
    assert (events[-1]["steps"], events[-1]["samples"]) == (4, 8)
    assert steps == 30 + 3, "thirty for the loss, three under the profiler"
    assert watch.numbers == {"operators_a_step": 5}


@pytest.mark.parametrize("task", ["transformer 12 x 768", pytest.param("3D UNet, 4 x 96^3", marks=pytest.mark.slow)])
def test_a_case_trains_in_its_smallest_form(task):
    timer, _ = timer_of(steps=1)
    case = load_suite("gpu").known[f"{task}: O2, bf16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", False)  # the case changes it
        numbers = case.run(timer, **case.config)
    assert numbers["loss"] > 0
    assert numbers["operators_a_step"] > 10


def test_cases_that_need_a_gpu_are_skipped():
    timer, _ = timer_of(steps=1)
    for config in ({"precision": "16-mixed"}, {"graph": True}, {"amp": {"dtype": "fp16"}}):
        with pytest.raises(SkippedError):
            profiled(timer, what="plain", task=next(iter(TASKS)), **config)


def test_a_short_run_measures_rows_with_their_baselines():
    suite = load_suite("gpu")
    assert Settings(suite="gpu", minutes=27).chosen(suite) == list(suite.known)
    chosen = Settings(suite="gpu", minutes=6).chosen(suite)
    assert sorted(chosen) == sorted(TELLING)
    assert {suite.base(name) for name in chosen} <= set(chosen)


@pytest.mark.parametrize(
    "name",
    [
        "small tensors: PrefetchLoader",
        "AdamW, fused: merged",
        "two stops: ExactResume",
        "texts: LengthBatchSampler",
        pytest.param("forkserver: PrefetchLoader", marks=pytest.mark.slow),
        pytest.param("scans: PatchDataset", marks=pytest.mark.slow),
    ],
)
def test_a_part_runs_in_its_smallest_form(name, monkeypatch):
    timer, events = timer_of(steps=1)
    case = load_suite("gpu").known[name]
    for package in case.needs:
        pytest.importorskip(package)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    numbers = case.run(timer, **case.config)
    assert events[-1]["event"] == "round"
    assert not {"twice", "never"} & set(numbers) or numbers["twice"] + numbers["never"] == 0
