"""The tune command from settings to exit status, without processes: what it keeps, resumes from, and refuses."""

import dataclasses
import io
import json
import os
import signal

import pytest

from lightning_turbo.cli import main
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, machine, new_row
from lightning_turbo.tune import command
from lightning_turbo.tune.runner import TuneSettings
from lightning_turbo.tune.search import FINAL
from lightning_turbo.tune.worker import OUT_OF_MEMORY

BATCHES = {"size": 8, "samples": 10_000, "drop_last": False, "optimizers": ["SGD"]}


class Still:
    """A runner that returns the values of a table without noise, and records its calls."""

    cost, left = 1.0, 1e6
    fault, at = None, 0  # the error that one of its calls raises

    def __init__(self, settings, candidates, interrupt, progress, scratch):
        assert scratch.is_dir()
        self.interrupt, self.calls, self.order = interrupt, [], {"steps": 3}
        made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def set_pace(self, step_seconds, accumulate):
        pass

    def measure(self, configurations):
        self.calls.append([str(configuration) for configuration in configurations])
        if len(self.calls) == self.at:
            self.interrupt.pressed = self.fault is InterruptedRunError
            raise self.fault
        return {configuration: self.row(configuration) for configuration in configurations}

    def row(self, configuration):
        if configuration.batch_size > 16:
            return {**new_row(), "status": "skipped", "reason": OUT_OF_MEMORY}
        seconds = (0.0001 if configuration.mode == "loader" else 0.010) * 0.8 ** len(configuration.names)
        rounds = [{"sweep": n, "process": 0, "seconds": seconds, "steps": 1} for n in range(3)]
        facts = {"accumulate": 1, "lacks": ["cuda", "huge pages", "new workers"], "batches": 10}
        numbers = {"facts": facts, "losses": [1.0, 0.5], "batches": BATCHES}
        return {**new_row(), "status": "ok", "rounds": rounds, "numbers": numbers}

    def spawn(self, configuration):
        return self

    def listen(self, timeout, check):
        os.kill(os.getpid(), signal.SIGINT)
        check()

    def close(self, grace):
        pass


made = []


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ScriptRunner", Still)
    monkeypatch.setattr(Still, "fault", None)
    monkeypatch.setattr(Still, "at", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return TuneSettings(program="train.py", out=tmp_path / "out", only=("lean", "fused"))


def run(settings, **changes):
    said = io.StringIO()
    return command.run_tune(dataclasses.replace(settings, **changes), said), said.getvalue()


def test_a_search_for_some_settings_keeps_the_measurements_of_others(settings):
    run(settings)
    before = json.loads((settings.out / "measured.json").read_text())["alone"]
    run(settings, resume=True, only=("fused",))
    assert json.loads((settings.out / "measured.json").read_text())["alone"] == before
    run(settings, resume=True, only=("lean",))
    assert made[-1].calls == [["default", "lean"]] * FINAL, "from the last comparison"


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_measurements_are_kept_after_an_error(settings, fault, monkeypatch):
    monkeypatch.setattr(Still, "fault", fault)
    monkeypatch.setattr(Still, "at", 1)
    with pytest.raises(fault):
        run(settings)
    assert not (settings.out / "measured.json").exists(), "nothing was measured"
    monkeypatch.setattr(Still, "at", 6)
    with pytest.raises(fault):
        run(settings)
    monkeypatch.setattr(Still, "at", 0)
    run(settings, resume=True)
    assert "one batch" not in made[-1].calls[0]


def test_after_ctrl_c_the_exit_status_is_130(settings, monkeypatch):
    status, said = run(settings, confirm=True)
    assert status == 130
    assert "Whole epochs were not measured: default failed: it was ended." in said
    monkeypatch.setattr(Still, "fault", InterruptedRunError)
    for at in (1, 6):
        monkeypatch.setattr(Still, "at", at)
        assert run(settings)[0] == 130


def test_the_batch_size_is_found_and_written(settings):
    status, said = run(settings, batch_size=True)
    assert status == 0
    path = settings.out / "batch_size.md"
    written = path.read_text()
    assert written.startswith("The largest batch that fits is 16 (")
    assert " The fastest a sample is 16: 2.00 times as fast" in written
    assert all(each in said for each in (*filter(None, written.splitlines()), str(path)))
    assert not (settings.out / "tune.md").exists()


def test_after_ctrl_c_in_the_batch_size_search_the_measurements_are_written(settings, monkeypatch):
    monkeypatch.setattr(Still, "fault", InterruptedRunError)
    monkeypatch.setattr(Still, "at", 4)
    assert run(settings, batch_size=True)[0] == 130
    assert "the search was ended" in (settings.out / "batch_size.md").read_text()


def test_a_missing_device_is_refused(settings, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TurboError, match="torch sees no CUDA device: expected 'cpu' or 'auto'"):
        run(settings, device="cuda")
    assert not settings.out.exists()


def refusal(settings, **changes):
    with pytest.raises(TurboError) as error:
        run(settings, resume=True, **changes)
    return str(error.value)


def test_a_search_is_not_resumed_with_another_script_module_or_version(settings, tmp_path, monkeypatch):
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    for program, file in {
        "package_of_test.train": package / "train.py",
        "package_of_test": package / "__main__.py",
        "train": tmp_path / "train.py",
    }.items():
        file.write_text("batch_size = 8")
        module = {"program": program, "module": True}
        run(settings, **module)
        run(settings, resume=True, **module)
        file.write_text("batch_size = 512")
        assert "measured.json has another script. Leave --resume out" in refusal(settings, **module)
    run(settings, program="package_of_test.nowhere", module=True)
    run(settings)
    (tmp_path / "train.py").write_text("another")
    assert "has another script." in refusal(settings)
    run(settings)
    real = machine.installed_version
    monkeypatch.setattr(machine, "installed_version", lambda name: "0" if name == "lightning-turbo" else real(name))
    monkeypatch.setattr(machine.platform, "python_version", lambda: "0")
    assert "has another python and lightning_turbo." in refusal(settings)


@pytest.mark.parametrize("text", ['{"of": {', "{}", "[]", '{"of": null}', '{"baseline": {"odd": 1}}'])
def test_a_truncated_or_invalid_results_file_is_refused_in_one_line(settings, text, capsys):
    settings.out.mkdir()
    if "baseline" in text:
        text = json.dumps({"of": command._origin(settings), **json.loads(text)})
    (settings.out / "measured.json").write_text(text)
    assert main(["tune", "--resume", "--only", "lean,fused", "--out", str(settings.out), "train.py"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "measured.json: expected what this version of tune writes, got" in error
