"""The corpus: each bad habit is named with its line, and nothing is said about clean programs."""

import importlib.util
import linecache
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Doctor
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.doctor.rules import RULES, diagnose
from tests.integration.doctor_corpus import CLEAN_PROGRAMS, HEADER, SICK_PROGRAMS
from tests.integration.doctor_runs import QUIET, trainer

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*"),
]
SEEN = {"warmup": 1, "timed": 3, "watched": 3}


@pytest.fixture
def own_time(monkeypatch):
    """Times the steps by what this thread computes: what other programs on the machine take is no habit of the loop."""
    monkeypatch.setattr("lightning_turbo.doctor.timeline.time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Trains the Model of a program for an epoch; returns the doctor's report and the program's file."""

    def examine(program):
        path = tmp_path / "program.py"
        path.write_text(HEADER + program)
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location("corpus_program", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        options = dict(getattr(module, "TRAINER", {}))
        doctor = Doctor(**SEEN)
        torch.manual_seed(1)
        trainer(doctor, *options.pop("callbacks", []), **options).fit(module.Model())
        assert not doctor.report.short
        return doctor.report, path

    return examine


def test_every_rule_that_a_cpu_shows_is_in_the_corpus():
    told = {rule.name for rule in RULES if re.search(rf"(<-|line:|,) {rule.name}\b", "".join(SICK_PROGRAMS))}
    elsewhere = {"float32", "pin-memory", "lost-sampler", "graph-breaks", "recompiles", "worker-draws",
                 "repeated-draws"}  # fmt: skip
    assert told == {rule.name for rule in RULES} - elsewhere


@pytest.mark.parametrize("program", SICK_PROGRAMS)
def test_the_bad_habit_is_named_with_its_line(program, examine):
    report, path = examine(program)
    found = {(place.site.line, finding.rule) for finding in report.findings for place in finding.places
             if place.site is not None and place.site.file == str(path)}  # fmt: skip
    found |= {(None, finding.rule) for finding in report.findings if finding.site is None}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        _, mark, rules = line.partition("# <- ")
        assert {(number, rule) for rule in rules.split(", ") if mark} <= found
        _, mark, rule = line.partition("# without a line: ")
        assert not mark or (None, rule) in found


@pytest.mark.parametrize("program", CLEAN_PROGRAMS)
def test_nothing_is_said_about_a_clean_program(program, examine, own_time):
    report, _ = examine(program)
    assert report.facts.watched == 3
    assert report.above("info") == []


def fit(model, data=None, **more):
    doctor = Doctor(**SEEN)
    trainer(doctor, limit_train_batches=8, limit_val_batches=0, **more).fit(model, data)
    return doctor.report


def test_loading_that_computes_is_seen_by_the_same_clock_at_the_line_of_fit(own_time):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, i):
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
            return torch.ones(32)

    findings = fit(BoringModel(), DataLoader(Slow(), batch_size=4)).above("info")
    assert {each.rule for each in findings} == {"waits-for-data", "workers"}
    for each in findings:
        assert ".fit(model, data)" in linecache.getline(each.site.file, each.site.line)


def tokens(**batches):
    numbers = torch.arange(32 * 5).view(32, 5) % 11
    return DataLoader(TensorDataset(numbers, numbers), **batches)


class Network(LightningLSTM):
    def prepare_data(self):
        """Downloads nothing."""


class Attention(LightningTransformer):
    def prepare_data(self):
        """Downloads nothing."""


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (BoringModel, lambda: None),
        (ManualOptimBoringModel, lambda: None),
        (lambda: Network(vocab_size=11), lambda: tokens(batch_sampler=[range(5)] * 8)),
        (lambda: DemoNet(dims=2, classes=10),
         lambda: DataLoader(TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 10), batch_size=4)),
    ],
    ids=["boring", "manual", "lstm", "demo"],
)  # fmt: skip
def test_nothing_is_said_about_lightnings_own_examples_and_the_demo(model, data, own_time):
    report = fit(model(), data())
    assert report.facts.watched == 3
    assert report.above("info") == []


@pytest.mark.skipif(
    not hasattr(Transformer, "generate_square_subsequent_mask"), reason="2.5.0's mask is made on the device"
)
def test_the_one_habit_of_lightnings_transformer_is_named(own_time):
    """It makes its mask on the CPU in every step, and moves it: no copy here, a wait in each step on a GPU."""
    report = fit(Attention(vocab_size=11), tokens(batch_size=4))
    assert report.above("info") == []
    (finding,) = [each for each in report.findings if each.rule == "made-on-host"]
    assert ".to(inputs.device)" in linecache.getline(finding.site.file, finding.site.line)
    on_a_gpu = diagnose(replace(report.facts, device="cuda:0"))
    assert [each.level for each in on_a_gpu if each.rule == "made-on-host"] == ["warning"]
