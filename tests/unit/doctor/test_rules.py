"""Each rule speaks at its threshold and is silent below it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_turbo.doctor.facts import (
    BatchTensor,
    Call,
    Facts,
    Loader,
    OptimizerFacts,
    Part,
    SchedulerFacts,
    Site,
)
from lightning_turbo.doctor.report import Report, as_json, as_text
from lightning_turbo.doctor.rules import RULES, diagnose
from lightning_turbo.doctor.rules.rule import LEVELS

SITE = Site(file="train.py", line=7)
MIB = 2**20
CUDA = Facts(device="cuda:0", capability=(8, 0), watched=4, matmul_precision="high", cores=8)
CPU = Facts(watched=4, cores=8)
SLOW = {"data": 0.02, "forward": 0.08}
LOADER = Loader(type="DataLoader", standard=True, sampler="RandomSampler", site=SITE)


def calls(kind, count=4, steps=4, **more):
    return (Call(kind=kind, name="x", site=SITE, count=count, steps=steps, **more),)


def batch(dtype="torch.float32", size=8 * MIB, narrow=None):
    return (BatchTensor(name="batch[0]", dtype=dtype, shape=(4, 3), bytes=size, bytes_as_uint8=narrow),)


def adam(**more):
    return (OptimizerFacts(name="Adam", can_fuse=True, parameters=10, **more),)


def cyclic(**more):
    return (SchedulerFacts(name="CyclicLR", site=SITE, **more),)


# Rule -> cases of (facts, the level it has to have, or None for silence).
CASES = {
    "host-sync": [
        (replace(CPU, calls=calls("sync")), "warning"),
        (replace(CPU, calls=calls("sync", count=2, steps=2)), "warning"),
        (replace(CPU, calls=calls("sync", count=1, steps=1)), "info"),
        (replace(CUDA, calls=calls("sync")), "warning"),
        (replace(CPU, calls=calls("sync", within="a layer of torch")), "info"),
        (replace(CUDA, calls=calls("sync", within="torchmetrics")), "warning"),
        (replace(CPU, calls=calls("log")), None),
    ],
    "progress-bar-sync": [
        (replace(CUDA, calls=calls("log")), "info"),
        (replace(CUDA, calls=calls("log", count=1, steps=1)), "info"),
        (replace(CPU, calls=calls("log")), "info"),
        (CUDA, None),
    ],
    "array-copy": [
        (replace(CPU, calls=calls("copy")), "warning"),
        (replace(CPU, calls=calls("copy", count=1, steps=1)), "info"),
        (CPU, None),
    ],
    "made-on-host": [
        (replace(CUDA, calls=calls("moved")), "warning"),
        (replace(CUDA, calls=calls("moved", count=1, steps=1)), "info"),
        (replace(CPU, calls=calls("moved")), "info"),
        (CPU, None),
    ],
    "round-trip": [
        (replace(CUDA, calls=calls("round trip")), "warning"),
        (replace(CUDA, calls=calls("round trip", count=1, steps=1)), "info"),
        (replace(CPU, calls=calls("round trip")), "info"),
        (CPU, None),
    ],
    "housekeeping": [
        (replace(CPU, calls=calls("housekeeping")), "warning"),
        (replace(CPU, calls=calls("housekeeping", count=1, steps=1)), "info"),
        (CPU, None),
    ],
    "retained-graph": [
        (replace(CPU, retained=(Part(name="self.losses", growing=True, site=SITE),)), "warning"),
        (replace(CPU, retained=(Part(name="self.last", growing=False),)), "info"),
        (CPU, None),
    ],
    "retain-graph": [
        (replace(CPU, calls=calls("last retain")), "warning"),
        (replace(CPU, calls=calls("last retain", count=1, steps=1)), "info"),
        (replace(CPU, calls=calls("retain")), "info"),
        (CPU, None),
    ],
    "memory-growth": [
        (replace(CUDA, memory=tuple(i * MIB for i in range(5))), "warning"),
        (replace(CUDA, memory=tuple(i * MIB for i in range(4))), None),
        (replace(CUDA, memory=(0, MIB, 2 * MIB, 2 * MIB, 3 * MIB)), None),
        (replace(CUDA, memory=(5, 5, 5, 5, 5)), None),
    ],
    "anomaly-mode": [
        (replace(CPU, anomaly=True), "warning"),
        (replace(CPU, calls=calls("anomaly")), "warning"),
        (CPU, None),
    ],
    "profiler": [
        (replace(CPU, profiler="AdvancedProfiler"), "warning"),
        (replace(CPU, profiler="SimpleProfiler"), "info"),
        (replace(CPU, autograd_profiler=True), "warning"),
        (replace(CPU, calls=calls("profiler")), "warning"),
        (CPU, None),
    ],
    "benchmark-off": [
        (replace(CUDA, convolutions=True, shapes=1, seen=4), "info"),
        (replace(CUDA, convolutions=True, shapes=1, seen=3), None),
        (replace(CUDA, convolutions=True, shapes=2, seen=4), None),
        (replace(CUDA, convolutions=False, shapes=1, seen=4), None),
        (replace(CUDA, convolutions=True, shapes=1, seen=4, benchmark=True), None),
        (replace(CUDA, convolutions=True, shapes=1, seen=4, deterministic=True), None),
        (replace(CPU, convolutions=True, shapes=1, seen=4), None),
    ],
    "benchmark-thrashes": [
        (replace(CUDA, convolutions=True, shapes=4, seen=8, benchmark=True), "warning"),
        (replace(CUDA, convolutions=True, shapes=3, seen=8, benchmark=True), None),
        (replace(CUDA, convolutions=True, shapes=2, seen=2, benchmark=True), None),
        (replace(CUDA, convolutions=True, shapes=4, seen=8), None),
    ],
    "waits-for-data": [
        (replace(CPU, phases=SLOW), "warning"),
        (replace(CPU, phases={"data": 0.006, "forward": 0.05}), "warning"),
        (replace(CPU, phases={"data": 0.005, "forward": 0.001}), None),  # not above 5 ms
        (replace(CPU, phases={"data": 0.01, "forward": 0.09}), None),  # not above 10 %
        (CPU, None),
    ],
    "workers": [
        (replace(CPU, phases=SLOW, loader=LOADER), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=3, prefetch_factor=2)), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=4, prefetch_factor=2)), None),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=4, prefetch_factor=1)), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=9, prefetch_factor=2)), "warning"),
        (replace(CPU, loader=replace(LOADER, workers=9, prefetch_factor=2)), "info"),
        (replace(CPU, loader=LOADER), None),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, standard=False)), None),
    ],
    "pin-memory": [
        (replace(CUDA, loader=LOADER, batch=batch()), "warning"),
        (replace(CUDA, loader=LOADER, batch=batch(size=8 * MIB - 1)), "info"),
        (replace(CUDA, loader=replace(LOADER, pin_memory=True), batch=batch()), None),
        (replace(CPU, loader=LOADER, batch=batch()), None),
    ],
    "persistent-workers": [
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=3, batches=49), "warning"),
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=3, batches=50), "info"),
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=1, batches=49), None),
        (replace(CPU, loader=replace(LOADER, workers=2, persistent_workers=True), epochs=3), None),
        (replace(CPU, loader=replace(LOADER, workers=2, dataset_set_epoch=True), epochs=3), None),
        (replace(CPU, loader=LOADER, epochs=3), None),
    ],
    "lost-sampler": [
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=False)), "error"),
        (replace(CPU, world_size=2, loader=Loader(type="Wrapper", standard=False, sharded=False)), "error"),
        (replace(CPU, world_size=2, loader=Loader(type="Unknown", standard=False)), None),
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=True)), None),
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=False, iterable_dataset=True)), None),
        (replace(CPU, world_size=1, loader=replace(LOADER, sharded=False)), None),
    ],
    "frozen-set-epoch": [
        (replace(CPU, loader=replace(LOADER, workers=1, persistent_workers=True, dataset_set_epoch=True)), "warning"),
        (replace(CPU, loader=replace(LOADER, workers=1, dataset_set_epoch=True)), None),
        (replace(CPU, loader=replace(LOADER, workers=1, persistent_workers=True)), None),
    ],
    "wide-batch": [
        (replace(CPU, batch=batch("torch.float64", size=64)), "warning"),
        (replace(CPU, batch=batch(narrow=2 * MIB)), "info"),
        (replace(CPU, batch=batch(size=8 * MIB - 1, narrow=2 * MIB)), None),
        (replace(CPU, batch=batch()), None),
    ],
    "float32": [
        (replace(CUDA, matmul_precision="highest"), "warning"),
        (replace(CUDA, capability=(7, 0)), "warning"),
        (CUDA, None),
        (replace(CUDA, capability=(6, 1), matmul_precision="highest"), None),
        (replace(CUDA, precision="bf16-mixed", matmul_precision="highest"), None),
        (replace(CUDA, precision="64-true", matmul_precision="highest"), None),
        (replace(CPU, matmul_precision="highest"), None),
    ],
    "odd-sizes": [
        (replace(CUDA, precision="16-mixed", layers=(Part(name="head", sizes=(64, 1001)),)), "info"),
        (replace(CUDA, precision="16-mixed", layers=(Part(name="head", sizes=(3, 64)),)), None),
        (replace(CUDA, precision="16-mixed", layers=(Part(name="head", sizes=(64, 1000)),)), None),
        (replace(CUDA, layers=(Part(name="head", sizes=(64, 1001)),)), None),
    ],
    "clip-before-unscale": [(replace(CPU, calls=calls("scaled clip")), "error"), (CPU, None)],
    "clips-nothing": [(replace(CPU, calls=calls("empty clip")), "error"), (CPU, None)],
    "falling-scale": [
        (replace(CPU, scales=(8.0, 4.0, 2.0)), "warning"),
        (replace(CPU, scales=(8.0, 4.0, 4.0)), None),
        (replace(CPU, scales=(0.5, 0.5)), "warning"),
        (CPU, None),
    ],
    "loop-optimizer": [
        (replace(CPU, optimizers=adam(foreach=False)), "warning"),
        (replace(CPU, optimizers=adam(foreach=False, fused=True)), None),
        (replace(CUDA, optimizers=adam()), "info"),
        (replace(CUDA, optimizers=adam(fused=True)), None),
        (replace(CPU, optimizers=adam()), None),
    ],
    "gradients-kept": [(replace(CPU, calls=calls("kept gradients")), "warning"), (CPU, None)],
    "unused-parameters": [
        (replace(CPU, unused=(Part(name="spare.weight"),)), "info"),
        (replace(CPU, world_size=2, unused=(Part(name="spare.weight"),)), "warning"),
        (CPU, None),
    ],
    "short-window": [
        (replace(CPU, accumulate=4, batches=10), "warning"),
        (replace(CPU, accumulate=4, batches=12), None),
        (replace(CPU, accumulate=4, batches=10, exact_windows=True), None),
        (replace(CPU, accumulate=1, batches=10), None),
        (replace(CPU, accumulate=4, batches=None), None),
    ],
    "bias-before-norm": [(replace(CPU, biases=(Part(name="net.0"),)), "info"), (CPU, None)],
    "validation-graph": [
        (replace(CPU, validation_graph=True), "info"),
        (replace(CPU, validates=True, inference_mode=False), "info"),
        (replace(CPU, validates=True), None),
        (replace(CPU, inference_mode=False), None),
    ],
    "graph-breaks": [(replace(CPU, graph_breaks={"Data-dependent branching": 2}), "info"), (CPU, None)],
    "recompiles": [(replace(CPU, recompiled=1), "warning"), (CPU, None)],
    "stepped-per-epoch": [
        (replace(CPU, epochs=9, schedulers=cyclic(length=10)), "warning"),
        (replace(CPU, epochs=10, schedulers=cyclic(length=10)), None),
        (replace(CPU, epochs=None, schedulers=cyclic(length=10)), None),
        (replace(CPU, epochs=9, schedulers=cyclic(length=10, interval="step")), None),
        (replace(CPU, epochs=9, automatic=False, schedulers=cyclic(length=10)), None),
        (replace(CPU, epochs=9, schedulers=(SchedulerFacts(name="StepLR"),)), None),
    ],
    "never-turns": [
        (replace(CPU, schedulers=cyclic(interval="step", turn=101, steps=100)), "warning"),
        (replace(CPU, schedulers=cyclic(interval="step", turn=100, steps=100)), None),
        (replace(CPU, schedulers=cyclic(interval="step", turn=101)), None),
    ],
    "cycled-beta": [
        (replace(CPU, schedulers=cyclic(interval="step", cycles_beta=True)), "warning"),
        (replace(CPU, schedulers=cyclic(interval="step")), None),
    ],
}


def test_every_rule_has_cases_for_both():
    assert sorted(CASES) == sorted(rule.name for rule in RULES)
    for cases in CASES.values():
        assert {level is None for _, level in cases} == {True, False}


@pytest.mark.parametrize(
    ("name", "facts", "level"),
    [(name, facts, level) for name, cases in CASES.items() for facts, level in cases],
    ids=[f"{name}-{i}" for name, cases in CASES.items() for i in range(len(cases))],
)
def test_a_rule_speaks_at_its_threshold(name, facts, level):
    findings = next(rule for rule in RULES if rule.name == name).findings(facts)
    assert {finding.level for finding in findings} == ({level} if level else set())
    assert all(finding.rule == name and finding.what and finding.cost for finding in findings)
    assert all(finding.remedy.endswith(".") and finding.diff == "" for finding in findings)


def test_nothing_is_said_of_nothing():
    assert diagnose(Facts()) == []


def test_the_gravest_comes_first_and_then_the_costliest():
    facts = replace(
        CUDA,
        world_size=2,
        loader=replace(LOADER, pin_memory=True, sharded=False),
        profiler="SimpleProfiler",
        calls=(
            Call(kind="sync", name="cheap", site=SITE, count=4, steps=4, seconds=0.1),
            Call(kind="sync", name="dear", site=SITE, count=4, steps=4, seconds=0.9),
        ),
    )
    found = [(finding.level, finding.what.split()[0]) for finding in diagnose(facts)]
    assert [level for level, _ in found] == sorted((level for level, _ in found), key=LEVELS.index)
    assert [what for _, what in found if what in ("cheap", "dear")] == ["dear", "cheap"]


def lines(*numbers, **more):
    return tuple(
        Call(kind="sync", name=".item()", site=Site(file="/t.py", line=n), count=4, steps=4, seconds=0.004, **more)
        for n in numbers
    )


LAYERS = tuple(Part(name=f"block.{i}.conv", site=SITE) for i in range(16))


@pytest.mark.parametrize(
    ("facts", "count", "places"),
    [
        (replace(CUDA, calls=lines(3, 5, 9)), 3, ["/t.py:3", "/t.py:5", "/t.py:9"]),
        (replace(CUDA, calls=lines(3, 5, within="torchmetrics")), 2, ["/t.py:3", "/t.py:5"]),
        (replace(CPU, biases=LAYERS), 16, ["train.py:7 (block.0.conv, block.1.conv, block.2.conv and 13 more)"]),
        (replace(CPU, unused=LAYERS[:2]), 2, ["train.py:7 (block.0.conv, block.1.conv)"]),
        (replace(CPU, unused=LAYERS[:1]), 1, ["train.py:7"]),
        (replace(CPU, unused=(Part(name="a"), Part(name="b"))), 2, ["a, b"]),
        (replace(CUDA, layers=tuple(replace(each, sizes=(65,)) for each in LAYERS[:3]), precision="16-mixed"), 3,
         ["train.py:7 (block.0.conv, block.1.conv, block.2.conv)"]),
    ],
)  # fmt: skip
def test_one_cause_is_one_finding_with_its_places(facts, count, places):
    report = Report(facts=facts, findings=tuple(diagnose(facts)))
    (finding,) = as_json(report)["findings"]
    assert (finding["count"], finding["places"]) == (count, places)
    assert (f"{count} places: " in " ".join(as_text(report, 120).split())) == (count > 1)


@pytest.mark.parametrize(
    ("within", "remedy"),
    [
        ("", "torch.where"),
        ("torchmetrics", "nan_strategy='disable'"),
        ("torch.distributions", "validate_args=False"),
        ("a layer of torch", "nothing to change"),
    ],
)
def test_the_remedy_fits_the_cause(within, remedy):
    (finding,) = diagnose(replace(CPU, calls=calls("sync", within=within)))
    assert remedy in finding.remedy
    assert (f"within {within}" in finding.what) == bool(within)


def test_a_measured_cost_is_per_step_and_of_all_places():
    (finding,) = diagnose(replace(CUDA, calls=lines(3, 5)))
    assert finding.seconds == pytest.approx(0.002)
    assert finding.cost.startswith("2.00 ms")


def test_the_rate_is_told_in_words():
    def told(**more):
        return diagnose(replace(CPU, calls=calls("sync", **more)))[0].what

    assert told().endswith("once a step")
    assert told(count=12).endswith("3 times a step")
    assert told(count=1, steps=1).endswith("in 1 of 4 steps")


PAGE = Path(__file__).parents[3] / "docs" / "symptoms.md"


def test_the_page_of_symptoms_has_each_rule_with_its_remedy_and_its_card():
    rows = dict(re.findall(r"^\| [^|]+ \| `([a-z0-9-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(rows) == sorted(rule.name for rule in RULES)
    for rule in RULES:
        assert rows[rule.name].endswith(f" | {rule.remedy} | [{rule.card}](cards/{rule.card}.md)"), rule.name
        assert (PAGE.parent / "cards" / f"{rule.card}.md").exists()
