"""The corpus: the Doctor reports each bad habit with its line, and nothing for clean programs and the examples."""

import gc
import importlib.util
import linecache
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch.utils.data import DataLoader, TensorDataset

import lightning_turbo
from examples.demo.model import DemoNet
from lightning_turbo import Doctor, PrefetchLoader
from lightning_turbo.doctor.rules import RULES
from tests.integration.doctor_corpus import CLEAN_PROGRAMS, HEADER, SICK_PROGRAMS
from tests.integration.doctor_runs import QUIET, trainer

EXAMPLES = Path(lightning_turbo.__file__).parent.parent / "examples"
pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("free_alarm"),
    pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary"),
]
SEEN = {"warmup": 1, "timed": 5, "watched": 3}


@pytest.fixture
def own_time(monkeypatch):
    """Times the steps by what they do: other programs and collections of the suite's garbage don't count."""
    own = SimpleNamespace(perf_counter=time.thread_time, process_time=time.process_time)
    monkeypatch.setattr("lightning_turbo.doctor.timeline.time", own)
    monkeypatch.setattr("lightning_turbo.doctor.samples.time", own)
    # A full collection takes 20 to 45 ms in a process with many tests behind it, five of these steps 10 ms.
    gc.disable()
    yield
    gc.enable()


def fit(model, data=None, **more):
    doctor, callbacks = Doctor(**SEEN), more.pop("callbacks", [])
    torch.manual_seed(1)
    trainer(doctor, *callbacks, **more).fit(model, data)
    assert not doctor.report.short
    return doctor.report


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes a program to a file and imports it."""

    def load(program):
        # Worker processes that are not forked import the module by its name.
        path = tmp_path / "corpus_program.py"
        monkeypatch.syspath_prepend(tmp_path)
        path.write_text(HEADER + program)
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location("corpus_program", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_corpus_covers_every_rule_that_applies_on_a_cpu():
    covered = {rule.name for rule in RULES if re.search(rf"(<-|line:|,) {rule.name}\b", "".join(SICK_PROGRAMS))}
    elsewhere = {"float32", "pin-memory", "lost-sampler", "repeated-draws", "compute-bound", "copy-bound",
                 "loop-overhead", "slow-first-batch", "slow-metrics", "slow-checkpoint",
                 "processor-threads"}  # fmt: skip
    assert covered == {rule.name for rule in RULES} - elsewhere


@pytest.fixture
def anomaly():
    """Switches anomaly detection off again."""
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("program", SICK_PROGRAMS)
@pytest.mark.usefixtures("anomaly")
def test_the_doctor_reports_a_bad_habit_with_its_line(program, load):
    module = load(program)
    report = fit(module.Model(), **getattr(module, "TRAINER", {}))
    found = {(place.site.line, finding.rule) for finding in report.findings for place in finding.places
             if place.site is not None and place.site.file == module.__file__}  # fmt: skip
    found |= {(None, finding.rule) for finding in report.findings if finding.site is None}
    for number, line in enumerate(Path(module.__file__).read_text().splitlines(), 1):
        _, mark, rules = line.partition("# <- ")
        assert {(number, rule) for rule in rules.split(", ") if mark} <= found
        _, mark, rule = line.partition("# without a line: ")
        assert not mark or (None, rule) in found


def check_clean(*given, **more):
    report = fit(*given, **more)
    assert report.facts.seen.watched == 3
    assert report.above("info") == []


@pytest.mark.parametrize("program", CLEAN_PROGRAMS)
def test_the_doctor_reports_nothing_for_a_clean_program(program, load, own_time):
    module = load(program)
    check_clean(module.Model(), **getattr(module, "TRAINER", {}))


def sleep():
    time.sleep(0.01)


@pytest.mark.parametrize(("kind", "load", "remedy"), [
    (DataLoader, sleep, "PrefetchLoader for a background thread"), (PrefetchLoader, sleep, "raise threads"),
])  # fmt: skip
def test_a_finding_about_a_loader_passed_to_fit_has_the_line_of_fit_and_a_suitable_remedy(kind, load, remedy):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            load()
            return torch.ones(32)

    findings = fit(BoringModel(), kind(Slow(), batch_size=4), limit_val_batches=0).above("info")
    assert {each.rule for each in findings} == {"waits-for-data", "workers", "slow-line"}
    assert remedy in next(each.remedy for each in findings if each.rule == "waits-for-data")
    for each in findings:
        text = "time.sleep(0.01)" if each.rule == "slow-line" else ".fit(model, data)"
        assert text in linecache.getline(each.site.file, each.site.line)


def batches(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=4)


@pytest.mark.parametrize(("model", "data"), [
    (BoringModel, None), (ManualOptimBoringModel, None),
    (lambda: DemoNet(dims=2, classes=10), batches(torch.randn(40, 1, 8, 8), torch.arange(40) % 10)),
], ids=["boring", "manual", "demo"])  # fmt: skip
def test_the_doctor_reports_nothing_for_lightnings_examples_and_the_demo(model, data, own_time):
    check_clean(model(), data, limit_train_batches=10, limit_val_batches=0)


def test_the_doctor_reports_nothing_for_the_lines_to_add(monkeypatch, own_time):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lines = importlib.import_module("add_apex_amp")
    check_clean(
        lines.Digits(), lines.FastDigitsData(), limit_train_batches=10, limit_val_batches=0, max_epochs=4
    )  # fmt: skip
