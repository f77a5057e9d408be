"""The demo, run as a user runs it."""

import dataclasses
import io
import json
import os
import resource
import signal
import subprocess
import sys
import warnings

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch
from lightning.pytorch import Trainer
from rich.console import Console
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_turbo import cli
from lightning_turbo.demo import DemoError, DemoSettings, run
from lightning_turbo.demo.data import VolumePatches, load_digits, load_mni
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.demo.progress import RunProgress
from lightning_turbo.demo.run import run_demo


def demo(out, *, terminal=False, **settings):
    """Runs the demo on the CPU; returns exit status, results and what was shown."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    status = run_demo(DemoSettings(out=out, device="cpu", **settings), console)
    return status, json.loads((out / "results.json").read_text()), stream.getvalue()


def weights(out, level):
    return torch.load(out / "checkpoints" / f"{level}.ckpt", weights_only=True)["state_dict"]


EARLIER = '{"format": 1, "settings": {"data": "digits", "seed": 0, "epochs": 1, "levels": []}, "levels": {}}'


@pytest.fixture
def _few_digits(monkeypatch):
    """Three batches an epoch."""

    def load(seed):
        data = load_digits(seed)
        return dataclasses.replace(data, train=TensorDataset(*(tensor[:96] for tensor in data.train.tensors)))

    monkeypatch.setattr(run, "load_digits", load)


@pytest.fixture
def stop_after(monkeypatch):
    """Presses Ctrl-C after so many training batches."""

    def install(batches):
        seen = []
        before = RunProgress.on_train_batch_end

        def on_train_batch_end(self, *args):
            before(self, *args)
            seen.append(1)
            if len(seen) == batches:
                raise KeyboardInterrupt

        monkeypatch.setattr(RunProgress, "on_train_batch_end", on_train_batch_end)

    return install


def test_levels_take_turns_reach_the_accuracy_and_everything_is_written(tmp_path):
    out = tmp_path / "[bold]"  # looks like markup
    status, results, shown = demo(out, levels=("O1", "O3"), epochs=3)
    assert status == 0
    assert results["settings"] == {"levels": ["O1", "O3"], "epochs": 3, "data": "digits", "seed": 0}
    lines = [line.split("validation")[0].split() for line in shown.splitlines() if "  epoch " in line]
    assert lines == [[level, "epoch", f"{epoch}/3"] for epoch in range(1, 4) for level in ("O1", "O3")]
    for level, row in results["levels"].items():
        assert row["passed"], level
        assert row["val_accuracy"] >= 0.95
        assert len(row["step_losses"]) == 3 * 43  # 1347 samples in batches of 32
        assert row["step_losses"][-1] < 0.5 < row["step_losses"][0]
        assert (row["epochs"], row["half_dtype"], row["loss_scale"], row["skipped_steps"]) == (3, "bfloat16", 1.0, 0)
        assert list((out / "tensorboard" / level).glob("events.out.tfevents.*"))
    assert results["levels"]["O3"]["bytes"]["total"] * 2 < results["levels"]["O1"]["bytes"]["total"] * 1.01
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["O1.ckpt", "O3.ckpt"]
    assert "[bold]/results.json" in shown
    assert "\x1b" not in shown  # no terminal, no control codes


@pytest.mark.usefixtures("_few_digits")
def test_a_level_below_its_accuracy_is_a_failure_and_a_terminal_gets_one_bar(tmp_path):
    status, results, shown = demo(tmp_path, levels=("O0",), epochs=1, terminal=True)
    assert (status, results["levels"]["O0"]["passed"]) == (1, False)
    assert "too low" in shown
    assert "O0: expected an accuracy of 0.95, got 0." in shown
    assert "3/3 steps" in shown
    assert "\x1b" in shown
    assert "O0  epoch  1/1  validation accuracy" not in shown


@pytest.mark.usefixtures("_few_digits")
def test_the_epochs_of_the_demo_are_those_of_one_fit(tmp_path):
    """Each epoch is a fit of its own, which resumes from the checkpoint of the one before."""
    _, results, _ = demo(tmp_path, levels=("O0",), epochs=3)
    data = run.load_digits(0)
    torch.manual_seed(0)
    model = DemoNet(dims=2, classes=10)
    order = DistributedSampler(data.train, num_replicas=1, rank=0, shuffle=True, seed=0)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    losses = []
    model.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(outputs["loss"].item())
    with warnings.catch_warnings(), run._threads(data):
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data.train, 32, sampler=order), DataLoader(data.val, 256))
    assert results["levels"]["O0"]["step_losses"] == losses


@pytest.mark.parametrize(
    "level", ["O2", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O1", "O3"))]
)
def test_stopped_and_resumed_equals_never_stopped(tmp_path, level, stop_after):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, expected, _ = demo(whole, levels=(level,), epochs=2)

    handler = signal.getsignal(signal.SIGINT)
    stop_after(43 + 20)  # in the second epoch
    status, stopped, shown = demo(parts, levels=(level,), epochs=2)
    assert status == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert stopped["levels"][level]["epochs"] == 1
    assert f"Stopped after the last complete epoch. Continue with: lightning-turbo demo --resume --out {parts}" in shown

    _, resumed, _ = demo(parts, resume=True)
    for key in ("step_losses", "val_losses", "val_accuracies", "bytes"):
        assert resumed["levels"][level][key] == expected["levels"][level][key], key
    first, second = weights(whole, level), weights(parts, level)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.usefixtures("_few_digits")
def test_resume_adds_epochs_and_levels_and_keeps_the_rest(tmp_path):
    demo(tmp_path, levels=("O0",), epochs=1, seed=5)
    _, results, shown = demo(tmp_path, levels=("O3",), epochs=2, resume=True)
    assert results["settings"] == {"levels": ["O0", "O3"], "epochs": 2, "data": "digits", "seed": 5}
    assert {level: row["epochs"] for level, row in results["levels"].items()} == {"O0": 1, "O3": 2}
    assert "O0  epoch" not in shown
    _, results, shown = demo(tmp_path, resume=True)
    assert results["levels"]["O0"]["epochs"] == 2
    assert "O0  epoch  2/2" in shown
    assert "O3  epoch" not in shown
    _, results, shown = demo(tmp_path, resume=True, epochs=1)  # fewer than were done: nothing is lost
    assert results["levels"]["O0"]["epochs"] == 2
    assert "epoch  1" not in shown


@pytest.mark.usefixtures("_few_digits")
def test_a_new_run_replaces_the_old_one(tmp_path):
    demo(tmp_path, levels=("O0", "O3"), epochs=1)
    _, results, _ = demo(tmp_path, levels=("O3",), epochs=1)
    assert list(results["levels"]) == ["O3"]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["O3.ckpt"]
    assert len(list((tmp_path / "tensorboard" / "O3").glob("events.out.tfevents.*"))) == 1


def test_volumes_train_as_well(tmp_path, monkeypatch):
    whole = load_mni()
    train, val = (VolumePatches(part.volume, part.corners[:64], part.labels[:64]) for part in (whole.train, whole.val))
    monkeypatch.setattr(run, "load_mni", lambda: dataclasses.replace(whole, train=train, val=val, floor=0.0))
    status, results, _ = demo(tmp_path, levels=("O2",), epochs=1, data="mni")
    assert status == 0
    assert len(results["levels"]["O2"]["step_losses"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data", ["digits", "mni"])
def test_the_default_run_reaches_its_accuracy_at_every_level(tmp_path, data):
    status, results, _ = demo(tmp_path, data=data)
    assert (status, {row["passed"] for row in results["levels"].values()}) == (0, {True})


@pytest.mark.parametrize(("earlier", "settings", "message"), [
    (None, {}, r"resume: expected the results of an earlier demo, got '.*results\.json', which is missing or not"),
    ("{", {}, "not readable"),
    ('{"format": 1, "settings": {"data": "digits"}, "levels": {}}', {}, r"KeyError\('seed'\)"),
    (EARLIER.replace('"format": 1', '"format": 0'), {}, r"results\.json': expected 1, got 0"),
    (EARLIER, {"seed": 1}, "seed with --resume: expected 0 as before, got 1"),
    (EARLIER, {"data": "mni"}, "data with --resume: expected 'digits' as before, got 'mni'"),
    ("", {"out": "results.json", "resume": False}, r"out: expected a folder that can be written, .* \(File exists\)"),
    (None, {"device": f"cuda:{torch.cuda.device_count()}", "resume": False}, "device: expected one of this machine"),
])  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, earlier, settings, message):
    if earlier is not None:
        (tmp_path / "results.json").write_text(earlier)
    settings = {"device": "cpu", "resume": True, **settings, "out": tmp_path / settings.get("out", "")}
    with pytest.raises(DemoError, match=message):
        run_demo(DemoSettings(**settings), Console(file=io.StringIO()))


def test_a_full_disk_is_told_in_a_line_and_costs_nothing_that_was_there(tmp_path, capsys):
    out = tmp_path / "out"
    demo(out, levels=("O0",), epochs=1)
    again = ["demo", "--device", "cpu", "--resume", "--epochs", "2", "--out", str(out)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # less than a checkpoint takes
    try:
        assert cli.main(again) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err
    assert told.startswith("lightning-turbo: error: ")
    assert "O0.ckpt' could not be written" in told
    assert len(told.splitlines()) == 1
    assert json.loads((out / "results.json").read_text())["levels"]["O0"]["epochs"] == 1
    assert not list(out.rglob(".*"))
    assert cli.main(again) in (0, 1)
    assert json.loads((out / "results.json").read_text())["levels"]["O0"]["epochs"] == 2


@pytest.mark.slow
def test_ctrl_c_in_a_real_process(tmp_path):
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from lightning_turbo.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "demo", "--levels", "O0", "--epochs", "500", "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    with process:
        try:
            next(line for line in process.stdout if "2/500" in line)
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    assert "Traceback" not in rest
    assert "Continue with: lightning-turbo demo --resume --out runs/demo" in rest
    assert 2 <= json.loads((tmp_path / "runs/demo/results.json").read_text())["levels"]["O0"]["epochs"] < 500
