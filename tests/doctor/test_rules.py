"""Each rule reports a finding at its threshold and none below it."""

import itertools
import re
from dataclasses import fields
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest

from lightning_turbo.doctor.facts import (
    Call,
    Facts,
    FitFacts,
    HookTime,
    LineTime,
    Loader,
    OptimizerFacts,
    Part,
    RunSettings,
    SchedulerFacts,
    Seen,
    Site,
)
from lightning_turbo.doctor.report import Report, as_json, as_text
from lightning_turbo.doctor.rules import RULES, diagnose
from lightning_turbo.doctor.rules.rule import LEVELS
from lightning_turbo.doctor.timeline import PHASES

SITE = Site(file="train.py", line=7)
MIB = 2**20
CUDA = Facts(run=RunSettings(device="cuda:0", capability=(8, 0), tf32=True, cores=8), seen=Seen(watched=4), timed=5)
CPU = Facts(run=RunSettings(cores=8), seen=Seen(watched=4), timed=5)
SLOW = {"data": 0.02, "forward": 0.08}
LOADER = Loader(type="DataLoader", standard=True, sampler="RandomSampler", site=SITE)


def replace(facts, **changes):
    """Return facts with other values for fields at any depth."""
    for name, part in (("run", RunSettings), ("seen", Seen)):
        if isinstance(facts, Facts):
            own = {each.name: changes.pop(each.name) for each in fields(part) if each.name in changes}
            changes[name] = replace_fields(getattr(facts, name), **own)
    return replace_fields(facts, **changes)


def calls(kind, **more):
    return (Call(**{"kind": kind, "name": "x", "site": SITE, "count": 4, "steps": 4, **more}),)


def adam(**more):
    return (OptimizerFacts(name="Adam", **more),)


def cyclic(**more):
    return (SchedulerFacts(name="CyclicLR", site=SITE, aim="its first cycle", **more),)


def line(seconds=0.02, number=7, **more):
    """Return a line that takes these seconds of its own."""
    site = Site(file="train.py", line=number, function="training_step")
    given = {"seconds": seconds, "own": seconds, "text": "total += k", **more}
    return LineTime(**{"sites": (site,), **given})


WORKERS = replace(LOADER, workers=2)
STEP_HOOK = HookTime(name="[Callback]Mine.on_train_batch_end", seconds=0.02, in_steps=True)


def fit(loader=LOADER, validations=1, hooks=(), epoch=True, lines=(), **parts):
    """Return a run with epochs of 10 seconds, and other parts with these seconds."""
    rest = 10.0 - sum(parts.values()) if sum(parts.values()) < 5 else 10.0
    facts = FitFacts(
        parts={"steps": rest, **parts}, is_epoch=epoch, batches=100, validations=validations, saves=1, hooks=hooks
    )
    return replace(
        CPU, fit=facts, loader=loader, validation_loader=loader, epochs=9, batches=100, lines=lines,
        phases={"forward": 0.1},
    )  # fmt: skip


# Rule -> cases of (facts, the expected level, or None for no finding).
CASES = {
    "host-sync": [
        (replace(CUDA, calls=calls("sync")), "warning"),
        (replace(CPU, calls=calls("sync")), "info"),
        (replace(CUDA, calls=calls("sync", count=1, steps=1)), "info"),
        (replace(CUDA, calls=calls("sync", within="a layer of torch")), "info"),
        (replace(CUDA, calls=calls("sync", within="torchmetrics")), "warning"),
        (CPU, None),
    ],
    "progress-bar-sync": [(replace(CUDA, calls=calls("log")), "info"), (CUDA, None)],
    "made-on-host": [
        (replace(CUDA, calls=calls("moved")), "warning"),
        (replace(CUDA, calls=calls("moved", count=1, steps=1)), "info"),
        (replace(CPU, calls=calls("moved")), "info"),
        (CPU, None),
    ],
    "copied-array": [
        (replace(CPU, calls=calls("copied", seconds=0.0041), phases={"forward": 0.1}), "warning"),
        (replace(CPU, calls=calls("copied", seconds=0.0039), phases={"forward": 0.1}), "info"),  # not above 1 %
        (CPU, None),
    ],
    "housekeeping": [(replace(CPU, calls=calls("housekeeping")), "warning"), (CPU, None)],
    "retained-graph": [
        (replace(CPU, retained=(Part(name="self.losses", growing=True, site=SITE),)), "warning"),
        (replace(CPU, retained=(Part(name="self.last", growing=False),)), "info"),
        (CPU, None),
    ],
    "anomaly-mode": [
        (replace(CPU, anomaly=True), "warning"),
        (replace(CPU, calls=calls("anomaly")), "warning"),
        (CPU, None),
    ],
    "waits-for-data": [
        (replace(CPU, phases=SLOW), "warning"),
        (replace(CPU, phases={"data": 0.006, "forward": 0.05}), "warning"),
        (replace(CPU, phases={"data": 0.005, "forward": 0.001}), "info"),  # not above 5 ms
        (replace(CPU, phases={"data": 0.01, "forward": 0.09}), None),  # not above 10 %
        (CPU, None),
    ],
    "compute-bound": [
        (replace(CPU, phases={"forward": 0.09}, lines=(line(0.046),)), None),  # more than half of it
        (replace(CPU, phases={"forward": 0.09}, lines=(line(0.044),)), "info"),
        (replace(CPU, phases={"data": 0.01, "forward": 0.09}), "info"),
        (replace(CPU, phases={"forward": 0.01, "backward": 0.01, "optimizer": 0.01, "copy": 0.02}), "info"),
        (replace(CPU, phases=SLOW), None),
        (CPU, None),
    ],
    "copy-bound": [
        (replace(CUDA, phases={"copy": 0.006, "forward": 0.005}), "warning"),
        (replace(CUDA, phases={"copy": 0.005, "forward": 0.004}), "info"),
        (replace(CUDA, phases={"copy": 0.004, "forward": 0.005}), None),
        (CUDA, None),
    ],
    "loop-overhead": [
        (replace(CPU, phases={"hooks": 0.003, "logging": 0.003, "forward": 0.004}), "warning"),
        (replace(CPU, phases={"hooks": 0.002, "logging": 0.003, "forward": 0.004}), "info"),
        (replace(CPU, phases={"hooks": 0.0003, "forward": 0.0021}), "info"),
        (replace(CPU, phases={"hooks": 0.0003, "forward": 0.0001, "data": 0.002}), "info"),
        (replace(CPU, phases={"hooks": 0.0002, "forward": 0.0019}), None),  # not above 10 %
        (replace(CPU, phases={"logging": 0.0111, "forward": 0.0889}), "warning"),
        (replace(CPU, phases={"logging": 0.0099, "forward": 0.0901}), None),
        (replace(CPU, phases={"hooks": 0.029, "forward": 0.071}, fit=FitFacts(hooks=(STEP_HOOK,))), None),  # named
        (replace(CPU, phases={"hooks": 0.031, "forward": 0.069}, fit=FitFacts(hooks=(STEP_HOOK,))), "warning"),
        (replace(CPU, phases={"hooks": 0.021, "forward": 0.009}, fit=FitFacts(hooks=(STEP_HOOK,))), "warning"),
        (CPU, None),
    ],
    "workers": [
        (replace(CPU, phases=SLOW, loader=LOADER), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=3)), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=4)), None),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=1), local_ranks=2), "warning"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=2), local_ranks=2), None),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, workers=9)), "warning"),
        (replace(CPU, loader=replace(LOADER, workers=9)), "info"),
        (replace(CPU, phases=SLOW, loader=replace(LOADER, standard=False)), None),
    ],
    "pin-memory": [
        (replace(CUDA, loader=LOADER, batch=8 * MIB), "warning"),
        (replace(CUDA, loader=LOADER, batch=8 * MIB - 1), "info"),
        (replace(CUDA, loader=replace(LOADER, pin_memory=True), batch=8 * MIB), None),
        (replace(CUDA, loader=LOADER, batch=8 * MIB, objects=31), "warning"),
        (replace(CUDA, loader=LOADER, batch=8 * MIB, objects=32), None),
        (replace(CUDA, loader=replace(LOADER, prefetches=True), batch=8 * MIB, objects=32), "warning"),
        (replace(CPU, loader=LOADER, batch=8 * MIB), None),
    ],
    "persistent-workers": [
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=3, batches=49), "warning"),
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=3, batches=50), "info"),
        (replace(CPU, loader=replace(LOADER, workers=2), epochs=1, batches=49), None),
        (replace(CPU, loader=replace(LOADER, workers=2, persistent_workers=True), epochs=3), None),
        (fit(WORKERS, **{"first batch": 1.2}), "warning"),
        (fit(WORKERS, **{"first batch": 0.5}), "info"),
        (fit(replace(WORKERS, persistent_workers=True), **{"first batch": 1.2}), None),
        (replace(fit(WORKERS, **{"validation start": 1.2}), loader=LOADER), "warning"),
        (replace(fit(WORKERS, **{"validation start": 0.5}), loader=LOADER), "info"),
        (replace(fit(WORKERS), loader=LOADER), None),
    ],
    "lost-sampler": [
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=False)), "error"),
        (replace(CPU, world_size=2, loader=Loader(type="Wrapper", standard=False, sharded=False)), "error"),
        (replace(CPU, world_size=2, loader=Loader(type="Unknown", standard=False)), None),
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=True)), None),
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=False, iterable_dataset=True)), None),
        (replace(CPU, world_size=1, loader=replace(LOADER, sharded=False)), None),
        (replace(CPU, world_size=2, loader=replace(LOADER, sharded=False), gives_sampler=False), None),
    ],
    "many-objects": [
        (replace(CPU, phases=SLOW, objects=32, loader=replace(LOADER, workers=2)), "warning"),
        (replace(CPU, objects=32, loader=replace(LOADER, workers=2)), "info"),
        (replace(CPU, phases=SLOW, objects=31, loader=replace(LOADER, workers=2)), None),
        (replace(CPU, phases=SLOW, objects=32, loader=LOADER), None),  # no data crosses
        (replace(CPU, phases=SLOW, objects=32, loader=replace(LOADER, workers=2, prefetches=True)), None),
    ],
    "bias-before-norm": [(replace(CPU, biases=(Part(name="net.0", site=SITE),)), "info"), (CPU, None)],
    "slow-line": [
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.0101),)), "warning"),
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.0099),)), None),  # not a tenth of the step
        (replace(CPU, phases={"forward": 0.003}, lines=(line(0.00049),)), None),  # not half a millisecond
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.02, waits=True),)), None),  # the other rule
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.09, own=0.001, torch=0.001),)), None),  # of the network
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.02, phase="hooks"),)), None),  # named with its hook
        (replace(CPU, phases=SLOW, loader=LOADER, lines=(line(0.02, phase="data"),)), "warning"),
        (replace(CPU, phases={"data": 0.005}, loader=LOADER, lines=(line(0.004, phase="data"),)), "info"),
        (replace(CPU, phases={"logging": 0.04}, lines=(line(0.005, phase="logging"),)), "info"),
        (replace(CPU, phases={"logging": 0.04}, lines=(line(0.0051, phase="logging"),)), "warning"),
        (replace(CPU, phases=SLOW, lines=(line(0.02, phase="data", where="in worker processes"),)), "warning"),
        (fit(lines=(line(1.2, part="validation"),)), "warning"),
        (fit(lines=(line(0.6, part="validation"),)), "info"),
        (fit(lines=(line(0.4, part="validation"),)), None),
        (CPU, None),
    ],
    "waits-without-computing": [
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.0101, waits=True),)), "warning"),
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.0099, waits=True),)), None),
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.02),)), None),
        (replace(CPU, phases={"data": 0.1}, lines=(line(0.02, waits=True, phase="data"),)), None),
        (CPU, None),
    ],
    "torch-outside": [
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.02, own=0.0, torch=0.0101),)), "info"),
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.02, own=0.0, torch=0.0099),)), None),
        (replace(CPU, phases={"forward": 0.1}, lines=(line(0.09, own=0.05, torch=0.04),)), None),  # a slow line
        (CPU, None),
    ],
    "processor-threads": [
        (replace(CPU, threads=9), "warning"),
        (replace(CPU, threads=8), None),
        (replace(CPU, threads=8, local_ranks=2), "warning"),
        (replace(CPU, threads=8, loader=WORKERS), "info"),
        (replace(CPU, threads=1, loader=replace(WORKERS, workers=9)), None),  # the rule about workers
    ],
    "prints": [(replace(CPU, calls=calls("print")), "info"), (CPU, None)],
    "small-groups": [
        (replace(CPU, phases={"optimizer": 0.01, "forward": 0.1}, optimizers=adam(groups=32, kinds=3)), "warning"),
        (replace(CPU, phases={"optimizer": 0.001, "forward": 0.1}, optimizers=adam(groups=32, kinds=3)), "info"),
        (replace(CPU, phases={"optimizer": 0.01}, optimizers=adam(groups=32, kinds=17)), None),
        (replace(CPU, phases={"optimizer": 0.01}, optimizers=adam(groups=31, kinds=3)), None),
    ],
    "slow-first-batch": [
        (fit(**{"first batch": 1.2}), "warning"),
        (fit(**{"first batch": 0.6}), "info"),
        (fit(epoch=False, **{"first batch": 3.0}), None),  # of an epoch that may be much longer
        (fit(**{"first batch": 0.4}), None),
        (fit(loader=WORKERS, **{"first batch": 3.0}), None),  # another rule reports processes that restart
        (CPU, None),
    ],
    "long-validation": [
        (fit(validation=9.0, **{"validation start": 2.0}), "warning"),
        (fit(validation=9.0), None),
        (fit(validations=4, validation=2.0), "warning"),  # every few steps
        (fit(validations=4, validation=1.0), None),
        (fit(epoch=False, validation=2.0), "warning"),  # before the end of an epoch
        (CPU, None),
    ],
    "slow-metrics": [(fit(metrics=1.2), "warning"), (fit(metrics=0.6), "info"), (fit(metrics=0.4), None)],
    "slow-checkpoint": [
        (fit(checkpoints=1.2), "warning"),
        (fit(checkpoints=0.6), "info"),
        (fit(checkpoints=0.4), None),
    ],
    "slow-hook": [
        (fit(hooks=(HookTime(name="[Callback]Mine.on_train_epoch_end", seconds=1.2),)), "warning"),
        (
            fit(hooks=(HookTime(name="[Callback]Mine{'a': 1}.on_train_batch_end", seconds=0.0051, in_steps=True),)),
            "info",
        ),
        (fit(hooks=(HookTime(name="[Callback]Mine.on_train_batch_end", seconds=0.0101, in_steps=True),)), "warning"),
        (fit(hooks=(HookTime(name="[Callback]Mine.on_train_batch_end", seconds=0.0049, in_steps=True),)), None),
        (fit(hooks=(HookTime(name="[Callback]Mine.on_train_epoch_end", seconds=0.4),)), None),
    ],
    "wide-batch": [(replace(CPU, wide=("batch[0]",)), "warning"), (CPU, None)],
    "repeated-draws": [
        (replace(CPU, loader=replace(LOADER, workers=2, copied_generators=("dataset.rng",))), "info"),
        (CPU, None),
    ],
    "float32": [
        (replace(CUDA, tf32=False), "warning"),
        (replace(CUDA, capability=(7, 0)), "warning"),
        (CUDA, None),
        (replace(CUDA, capability=(6, 1), tf32=False), None),
        (replace(CUDA, precision="bf16-mixed", tf32=False), None),
        (CPU, None),
    ],
    "clip-before-unscale": [(replace(CPU, calls=calls("clip")), "error"), (CPU, None)],
    "loop-optimizer": [
        (replace(CPU, optimizers=adam(one_by_one=True)), "warning"),
        (replace(CUDA, optimizers=adam(can_fuse=True)), "info"),
        (replace(CPU, optimizers=adam(can_fuse=True)), None),
    ],
    "short-window": [
        (replace(CPU, accumulate=4, batches=10), "warning"),
        (replace(CPU, accumulate=4, batches=12), None),
        (replace(CPU, accumulate=4, batches=10, exact_windows=True), None),
        (replace(CPU, accumulate=1, batches=10), None),
        (replace(CPU, accumulate=4, batches=10, ends_epoch=False), None),
    ],
    "stepped-per-epoch": [
        (replace(CPU, epochs=9, schedulers=cyclic(length=10)), "warning"),
        (replace(CPU, epochs=10, schedulers=cyclic(length=10)), None),
        (replace(CPU, epochs=9, schedulers=cyclic(length=10, interval="step")), None),
        (replace(CPU, epochs=9, automatic=False, schedulers=cyclic(length=10)), None),
        (replace(CPU, epochs=9, schedulers=(SchedulerFacts(name="StepLR"),)), None),
    ],
}


def test_every_rule_has_cases_with_and_without_a_finding():
    assert sorted(CASES) == sorted(rule.name for rule in RULES)
    for cases in CASES.values():
        assert {level is None for _, level in cases} == {True, False}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_reports_at_its_threshold(name):
    rule = next(rule for rule in RULES if rule.name == name)
    for number, (facts, level) in enumerate(CASES[name]):
        findings = rule.findings(facts)
        assert {finding.level for finding in findings} == ({level} if level else set()), number
        assert all(finding.rule == name and finding.what and finding.cost for finding in findings)
        assert all(finding.remedy.endswith(".") for finding in findings)


def test_findings_are_sorted_by_level_and_cost():
    ((cheap,), (dear,)) = (calls("sync", name=name, seconds=n) for name, n in (("cheap", 0.1), ("dear", 0.9)))
    loader = replace(LOADER, pin_memory=True, sharded=False)
    facts = replace(CUDA, world_size=2, loader=loader, calls=(cheap, dear))
    assert diagnose(Facts()) == []
    found = [(each.level, each.what.split()[0]) for each in diagnose(facts)]
    assert [level for level, _ in found] == sorted((level for level, _ in found), key=LEVELS.index)
    assert [what for _, what in found if what in ("cheap", "dear")] == ["dear", "cheap"]


BY_TIME = ("waits-for-data", "workers", "copy-bound", "loop-overhead", "many-objects", "small-groups",
           "waits-without-computing", "slow-line")  # fmt: skip


@pytest.mark.parametrize("name", BY_TIME)
def test_rules_based_on_time_need_five_timed_steps_for_a_warning(name):
    rule = next(rule for rule in RULES if rule.name == name)
    facts = [each for each, level in CASES[name] if level == "warning"]
    assert facts
    for each in facts:
        assert {finding.level for finding in rule.findings(replace(each, timed=4))} == {"info"}
        assert {finding.level for finding in rule.findings(replace(each, timed=5))} == {"warning"}


def test_rules_based_on_settings_need_no_times():
    assert {rule.name for rule in RULES if rule.by_time} == set(BY_TIME)


def test_costs_are_compared_for_what_was_seen():
    slow = fit(checkpoints=2.0)
    in_steps = replace(slow, lines=(line(0.015),))  # 15 ms of 100 steps: 1.5 s
    assert [each.rule for each in diagnose(in_steps) if each.level == "warning"] == ["slow-checkpoint", "slow-line"]
    longer = replace(in_steps, fit=replace_fields(in_steps.fit, batches=1000))
    assert diagnose(longer)[0].rule == "slow-line"


def test_lines_of_one_function_are_one_finding():
    sites = tuple(Site(file="/t.py", line=n, function="slow") for n in (3, 5))
    facts = replace(CPU, phases={"forward": 0.1}, lines=(line(0.06, sites=sites, call="sleep", text="wait(1)"),))
    (finding,) = (each for each in diagnose(facts) if each.rule == "slow-line")
    assert [place.site.line for place in finding.places] == [3, 5]
    assert finding.what == "`wait(1)`, in sleep() takes 60% of the step, in training_step (and 1 more)"
    assert (finding.seconds, finding.cost) == (0.06, "60.00 ms a step (sampled)")
    assert facts.bound == "lines"
    (compute,) = (each for each in diagnose(replace(facts, lines=(line(0.04),))) if each.rule == "compute-bound")
    assert compute.what.startswith("60% of the step is forward, backward and optimizer besides the lines named here")


@pytest.mark.parametrize(("loader", "words", "others"), [
    (LOADER, "num_workers=1", "Raise"), (WORKERS, "Raise num_workers", "num_workers=1"),
    (replace_fields(LOADER, workers=8), "Make it cheaper", "num_workers"),
    (replace_fields(LOADER, standard=False), "Make it cheaper", "num_workers"),
])  # fmt: skip
def test_the_remedy_for_a_line_that_loads_has_an_effect_on_the_loader(loader, words, others):
    facts = replace(CPU, phases=SLOW, loader=loader, lines=(line(0.02, phase="data"),))
    (finding,) = (each for each in diagnose(facts) if each.rule == "slow-line")
    assert words in finding.remedy
    assert others not in finding.remedy


BOUND_BY = {"data": "waits-for-data", "compute": "compute-bound", "copy": "copy-bound", "loop": "loop-overhead"}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("phase", PHASES)
def test_every_verdict_has_its_finding(device, phase):
    for step, share in itertools.product([1e-4, 1e-3, 4e-3, 1e-2, 1.0], [0.11, 0.3, 0.7, 1.0]):
        rest = {each: (1 - share) * step / (len(PHASES) - 1) for each in PHASES}
        facts = replace(CPU, device=device, phases={**rest, phase: share * step}, tf32=True)
        (finding,) = (each for each in diagnose(facts) if each.rule == BOUND_BY[facts.bound])
        assert finding.remedy


WAITING = replace(CPU, phases={"data": 0.02, "forward": 0.02})


@pytest.mark.parametrize(("facts", "words", "others"), [
    (WAITING, "PrefetchLoader for a background thread", "raise threads"),
    (replace(WAITING, loader=replace(LOADER, prefetches=True)), "raise threads", "PrefetchLoader"),
    (replace(WAITING, phases={"data": 0.004, "forward": 0.002}), "too short for a thread", "PrefetchLoader"),
    (replace(WAITING, loader=replace(LOADER, draws="loading draws")), "Loading draws, so", "a background thread"),
    (replace(WAITING, loader=replace(LOADER, draws="the step draws", prefetches=True)), "num_workers=1", "threads"),
    (replace(WAITING, loader=replace(LOADER, workers=2)), "raise num_workers", "a background thread"),
])  # fmt: skip
def test_the_remedy_depends_on_the_wait_and_the_loader(facts, words, others):
    (finding,) = (each for each in diagnose(facts) if each.rule == "waits-for-data")
    assert words in finding.remedy
    assert others not in finding.remedy


COMPUTING = replace(CPU, phases={"forward": 0.05})


@pytest.mark.parametrize(("facts", "words", "others"), [
    (COMPUTING, ["ApexAMP", "instructions for bfloat16", "lightning-turbo tune"], ["MemoryFormat", "compile="]),
    (replace(COMPUTING, strategy="DDPStrategy"), ["TurboDDPStrategy(compile='blocks')"], []),
    (replace(COMPUTING, strategy="FSDPStrategy"), [], ["compile="]),
    (replace(COMPUTING, device="cuda:0"), ["ApexAMP", "lightning-turbo tune"], ["bfloat16"]),
    (replace(COMPUTING, convolutions=True), ["ApexAMP", "MemoryFormat", "lightning-turbo tune"], []),
    (replace(COMPUTING, precision="bf16-mixed"), ["lightning-turbo tune"], ["ApexAMP", "MemoryFormat"]),
])  # fmt: skip
def test_the_remedies_for_a_compute_bound_step(facts, words, others):
    (finding,) = (each for each in diagnose(facts) if each.rule == "compute-bound")
    assert all(word in finding.remedy for word in words)
    assert not any(word in finding.remedy for word in others)


@pytest.mark.parametrize(("strategy", "named"), [
    ("SingleDeviceStrategy", "strategy='turbo'"), ("DDPStrategy", "strategy='turbo_ddp'"),
    ("TurboStrategy", None), ("FSDPStrategy", None),
])  # fmt: skip
def test_a_turbo_strategy_is_recommended_for_its_share_of_a_step_where_it_can_replace_the_strategy(strategy, named):
    hook = HookTime(name="[Callback]Mine{'n': 1}.on_fit", seconds=0.0003, in_steps=True)
    facts = replace(CPU, strategy=strategy, phases={"forward": 0.0005, "hooks": 0.0004}, fit=FitFacts(hooks=(hook,)))
    (finding,) = (each for each in diagnose(facts) if each.rule == "loop-overhead")
    assert ("turbo" in finding.remedy) == (named is not None)
    assert named is None or named in finding.remedy
    assert "the longest of them Mine.on_fit (0.30 ms)" in finding.what
    facts = replace(facts, fit=FitFacts(hooks=(replace_fields(hook, seconds=0.00003),)))
    (finding,) = (each for each in diagnose(facts) if each.rule == "loop-overhead")
    assert finding.what.endswith("logging"), "a hook that takes less than a tenth of it is not the reason"


def test_no_strategy_is_recommended_where_a_hook_takes_the_time():
    facts = replace(CPU, strategy="SingleDeviceStrategy", phases={"hooks": 0.021, "forward": 0.009})
    (finding,) = (each for each in diagnose(facts) if each.rule == "loop-overhead")
    assert "turbo" in finding.remedy
    facts = replace(facts, fit=FitFacts(hooks=(STEP_HOOK,)))
    (finding,) = (each for each in diagnose(facts) if each.rule == "loop-overhead")
    assert "turbo" not in finding.remedy


def lines(*numbers, **more):
    return tuple(call for n in numbers for call in calls("sync", site=Site(file="/t.py", line=n), **more))


@pytest.mark.parametrize(("facts", "count", "places"), [
    (replace(CUDA, calls=lines(3, 5, 9)), 3, ["/t.py:3", "/t.py:5", "/t.py:9"]),
    (replace(CUDA, calls=lines(3, 5, within="torchmetrics")), 2, ["/t.py:3", "/t.py:5"]),
    (replace(CUDA, wide=("batch[0]", "batch[1]")), 2, ["batch[0], batch[1]"]),
])  # fmt: skip
def test_one_cause_is_one_finding_with_its_places(facts, count, places):
    report = Report(facts=facts, findings=tuple(diagnose(facts)))
    (finding,) = as_json(report)["findings"]
    assert (finding["count"], finding["places"]) == (count, places)
    assert (f"{count} places: " in " ".join(as_text(report, 120).split())) == (count > 1)


@pytest.mark.parametrize(("within", "remedy"), [
    ("", "torch.where"),
    ("torchmetrics", "nan_strategy='disable'"),
    ("torch.distributions", "validate_args=False"),
    ("a layer of torch", "nothing to change"),
])  # fmt: skip
def test_the_remedy_fits_the_cause(within, remedy):
    (finding,) = (
        each for each in diagnose(replace(CPU, calls=calls("sync", within=within))) if each.rule == "host-sync"
    )
    assert remedy in finding.remedy
    assert (f"within {within}" in finding.what) == bool(within)
    assert finding.what.endswith("once a step")


PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"


def test_the_symptoms_page_has_each_rule():
    names = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text("utf-8"), re.M)
    assert sorted(names) == sorted(rule.name for rule in RULES)
    assert {rule.card for rule in RULES} <= {path.stem for path in (PAGE.parent / "cards").glob("*.md")}


def test_the_lists_of_tricks_name_exactly_the_existing_rules():
    section = (PAGE.parent / "from-plain-pytorch.md").read_text("utf-8").partition("## Lists of tricks")[2]
    rows = [re.split(r" \| ", row)[1] for row in re.findall(r"^\| (?!Trick)(.+) \|$", section, re.M)]
    assert all("](" in row or "rule" in row or "by hand: " in row or "`TurboStrategy(" in row for row in rows)
    named = {
        name for row in rows for part in re.findall(r"rules? (`[^;]*)", row) for name in re.findall("`([^`]+)`", part)
    }
    assert named == {rule.name for rule in RULES}
