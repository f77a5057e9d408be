"""The demo, run as a user runs it."""

import dataclasses
import io
import itertools
import json
import resource
import signal
import warnings

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_turbo import cli
from lightning_turbo.demo import DemoError, DemoSettings, run, search
from lightning_turbo.demo import data as demo_data
from lightning_turbo.demo.data import VolumePatches, load_digits
from lightning_turbo.demo.history import RunHistory
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.demo.run import run_demo
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY


def demo(out, **settings):
    """Runs the demo on the CPU; returns exit status, results and what was shown."""
    stream = io.StringIO()
    settings = {"device": "cpu", "tune_seconds": 0, **settings}
    status = run_demo(DemoSettings(out=out, **settings), stream)
    return status, json.loads((out / "results.json").read_text()), stream.getvalue()


@pytest.fixture
def _few_digits(monkeypatch):
    """Three batches an epoch."""

    def load(seed):
        data = load_digits(seed)
        return dataclasses.replace(data, train=TensorDataset(*(tensor[:96] for tensor in data.train.tensors)))

    monkeypatch.setattr(demo_data, "load_digits", load)


def test_levels_take_turns_reach_the_accuracy_and_everything_is_written(tmp_path):
    out = tmp_path / "[bold]"  # looks like markup
    status, results, shown = demo(out, levels=("O1", "O3"), epochs=3)
    assert status == 0
    assert results["settings"] == {"levels": ["O1", "O3"], "epochs": 3, "seed": 0}
    lines = [line.split("validation")[0].split() for line in shown.splitlines() if "  epoch " in line]
    assert lines == [[level, "epoch", f"{epoch}/3"] for epoch in range(1, 4) for level in ("O1", "O3")]
    for level, row in results["levels"].items():
        assert row["passed"], level
        assert row["val_accuracy"] >= 0.95
        assert len(row["step_losses"]) == 3 * 43  # 1347 samples in batches of 32
        assert row["step_losses"][-1] < 0.5 < row["step_losses"][0]
        assert (row["epochs"], row["loss_scale"], row["skipped_steps"]) == (3, 1.0, 0)
    assert results["levels"]["O3"]["bytes"]["total"] * 2 < results["levels"]["O1"]["bytes"]["total"] * 1.01
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "[bold]/results.json" in shown
    assert "\x1b" not in shown  # no terminal, no control codes


@pytest.mark.usefixtures("_few_digits")
def test_a_level_below_its_accuracy_is_a_failure(tmp_path):
    status, results, shown = demo(tmp_path, levels=("O0",), epochs=1)
    assert (status, results["levels"]["O0"]["passed"]) == (1, False)
    assert "too low" in shown
    assert "O0: expected an accuracy of 0.95, got 0." in shown


@pytest.mark.usefixtures("_few_digits")
def test_the_epochs_of_the_demo_are_those_of_one_fit(tmp_path):
    """Each epoch is a fit of its own, which resumes from the checkpoint of the one before; older ones do not count."""
    demo(tmp_path, levels=("O0",), epochs=1, seed=3)
    _, results, _ = demo(tmp_path, levels=("O0",), epochs=3)
    data = demo_data.load_digits(0)
    torch.manual_seed(0)
    model = DemoNet(dims=2, classes=10)
    order = DistributedSampler(data.train, num_replicas=1, rank=0, shuffle=True, seed=0)
    trainer = quiet_trainer(max_epochs=3, num_sanity_val_steps=0)
    losses = []
    model.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(outputs["loss"].item())
    with warnings.catch_warnings(), run._one_thread():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data.train, 32, sampler=order), DataLoader(data.val, 256))
    assert results["levels"]["O0"]["step_losses"] == losses


def test_ctrl_c_keeps_what_was_complete(tmp_path, monkeypatch):
    batches, count = itertools.count(1), RunHistory.on_train_batch_end

    def press(self, *arguments):
        count(self, *arguments)
        if next(batches) == 43 + 20:  # in the second epoch
            raise KeyboardInterrupt

    monkeypatch.setattr(RunHistory, "on_train_batch_end", press)
    handler = signal.getsignal(signal.SIGINT)
    status, stopped, shown = demo(tmp_path, levels=("O2",), epochs=2)
    assert status == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert stopped["levels"]["O2"]["epochs"] == 1
    assert "Stopped after the last complete epoch" in shown


@pytest.fixture
def _few_volumes(monkeypatch):
    """Four batches an epoch, of random cubes, whose label is the sign of their mean."""
    volume = torch.randn(60, 60, 60, generator=torch.Generator().manual_seed(0))
    volume[30:] += 1.0
    corners = torch.randint(32, (64, 3), generator=torch.Generator().manual_seed(0)).numpy()
    labels = torch.from_numpy(corners[:, 0] > 16).long()
    patches = VolumePatches(volume, corners, labels)
    data = demo_data.DemoData(train=patches, val=patches, dims=3, classes=2, batch_size=16)
    monkeypatch.setattr(demo_data, "load_mni", lambda: data)
    monkeypatch.setattr(run, "VOLUME_EPOCHS", 2)


@pytest.mark.usefixtures("_few_digits", "_few_volumes")
@pytest.mark.parametrize("helps", [("prefetch", "O1", *["lean"] * KNOWS_WEIGHTS_ONLY), ()])
def test_volumes_are_trained_with_and_without_what_was_found(tmp_path, monkeypatch, helps):
    """The search measures for real; what it is told of the time is the test's, so that its answer is known."""
    measure = search.ScriptInProcess._measure

    def told(self, case):
        row = measure(self, case)
        assert row["status"] in ("ok", "skipped"), row
        factor = 0.5 ** len(set(case.names) & set(helps)) * 1.001 ** len(case.names)
        waits = 1.0 if case.mode == "step" else 0.5
        row["rounds"] = [{**each, "seconds": 0.01 * waits * factor, "steps": 1} for each in row["rounds"]]
        return row

    monkeypatch.setattr(search.ScriptInProcess, "_measure", told)
    monkeypatch.setattr(search, "ROUNDS", [{"order": "round", "lead": 0, "steps": 1}])
    untried = "workers-*", "prefetch-threads", "bf16-mixed", "O2", "fused", "release*", "channels*"
    monkeypatch.setattr(search, "WITHOUT", (*search.WITHOUT, *untried))
    status, results, shown = demo(tmp_path, levels=("O0",), epochs=1, tune_seconds=1e6)
    assert status == 1, "that of the level"
    volumes = results["volumes"]
    assert set(volumes["settings"]) == set(helps)
    assert [len(row["step_losses"]) for row in volumes["rows"].values()] == [8, 8]
    stock, tuned = (row["step_losses"] for row in volumes["rows"].values())
    assert stock == tuned if not helps else stock == pytest.approx(tuned, rel=0.1)
    assert volumes["headline"] in " ".join(shown.split())
    assert ("times as fast, accuracy" in volumes["headline"]) == bool(helps)
    assert ("Nothing was found that helps" in volumes["headline"]) != bool(helps)
    assert {"tune.json", "turbo.py", "turbo.yaml", "tune.png"} <= {path.name for path in (tmp_path / "tune").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_reaches_its_accuracy_everywhere(tmp_path):
    status, results, _ = demo(tmp_path, tune_seconds=30)
    assert (status, {row["passed"] for row in results["levels"].values()}) == (0, {True})
    assert all(row["val_accuracy"] > 0.85 for row in results["volumes"]["rows"].values())


@pytest.mark.parametrize(("settings", "message"), [
    ({"out": "a-file"}, r"out: expected a folder that can be written, .* \(File exists\)"),
    ({"device": f"cuda:{torch.cuda.device_count()}"}, "device: expected one of this machine"),
])  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, settings, message):
    (tmp_path / "a-file").touch()
    settings = {"device": "cpu", **settings, "out": tmp_path / settings.get("out", "")}
    with pytest.raises(DemoError, match=message):
        run_demo(DemoSettings(**settings), io.StringIO())


def test_a_full_disk_is_told_in_a_line(tmp_path, capsys):
    command = ["demo", "--device", "cpu", "--levels", "O0", "--tune-seconds", "0", "--out", str(tmp_path)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # less than a checkpoint takes
    try:
        assert cli.main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err
    assert told.startswith("lightning-turbo: error: ")
    assert "O0.ckpt' could not be written" in told
    assert len(told.splitlines()) == 1
    assert not list(tmp_path.rglob(".*"))
