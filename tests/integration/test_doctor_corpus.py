"""The corpus: each sick module's bad habit is named with its line, and nothing is said about a clean one."""

import importlib.util
import linecache
import re
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Doctor
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.doctor.rules import diagnose

CORPUS = Path(__file__).parents[1] / "doctor_corpus"
SICK = sorted((CORPUS / "sick").glob("*.py"))
CLEAN = sorted((CORPUS / "clean").glob("*.py"))
MARK = re.compile(r"# <- finding: ([a-z-0-9]+)")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches .* is smaller than the logging interval.*"),
]


def load(path, monkeypatch):
    monkeypatch.syspath_prepend(str(CORPUS))
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def examine(path, monkeypatch, **settings):
    """Trains a module of the corpus for an epoch and returns the doctor's report."""
    module = load(path, monkeypatch)
    doctor = Doctor(warmup=1, timed=3, watched=3, **settings)
    options = dict(getattr(module, "TRAINER", {}))
    callbacks = [doctor, *options.pop("callbacks", [])]
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
               "enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0, **options}  # fmt: skip
    # Where there is a CUDA device, DataParallel would take its network there, away from the Trainer's.
    monkeypatch.setattr(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        if hasattr(module, "WARNS"):
            warnings.filterwarnings("ignore", message=re.escape(module.WARNS))
        torch.manual_seed(1)
        Trainer(callbacks=callbacks, **options).fit(module.Model())
    torch.use_deterministic_algorithms(deterministic)
    return doctor.report


@pytest.fixture
def own_time(monkeypatch):
    """Times the steps by what this thread computes: what other programs on the machine take is no habit of the loop."""
    monkeypatch.setattr("lightning_turbo.doctor.timeline.time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.mark.parametrize("path", SICK, ids=lambda path: path.stem)
def test_the_bad_habit_is_named_with_its_line(path, monkeypatch):
    marks = [(number, mark[1]) for number, line in enumerate(path.read_text().splitlines(), 1)
             if (mark := MARK.search(line))]  # fmt: skip
    assert len(marks) == 1, "a module of the corpus has one marked line"
    report = examine(path, monkeypatch)
    assert not report.short
    found = [(place.site.line, finding.rule) for finding in report.findings for place in finding.places
             if place.site is not None and Path(place.site.file) == path]  # fmt: skip
    assert marks[0] in found, f"found {[(f.rule, f.site) for f in report.findings]}"


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_nothing_is_said_about_a_clean_module(path, monkeypatch, own_time):
    report = examine(path, monkeypatch)
    assert not report.short
    assert report.facts.watched == 3
    assert report.above("info") == []


def test_loading_that_computes_is_seen_by_the_same_clock(own_time):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, i):
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
            return torch.ones(32)

    report = fit(BoringModel(), DataLoader(Slow(), batch_size=4))
    assert {each.rule for each in report.above("info")} == {"waits-for-data", "workers"}


def fit(model, data=None, **more):
    doctor = Doctor(warmup=1, timed=3, watched=3)
    Trainer(callbacks=[doctor], limit_train_batches=8, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accelerator="cpu", **{"max_epochs": 1, **more}).fit(model, data)  # fmt: skip
    return doctor.report


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
        (BoringModel, None),
        (ManualOptimBoringModel, None),
        (lambda: Network(vocab_size=11), lambda: tokens(batch_sampler=[range(5)] * 8)),
    ],
    ids=["boring", "manual", "lstm"],
)
def test_nothing_is_said_about_lightnings_own_examples(model, data, own_time):
    report = fit(model(), data() if data else None)
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


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*")
def test_nothing_is_said_about_the_demo(own_time):
    data = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,)))
    report = fit(DemoNet(dims=2, classes=10), DataLoader(data, batch_size=4))
    assert report.facts.watched == 3
    assert report.above("info") == []
