"""The tune command from settings to exit status, without processes."""

import dataclasses
import io
import json

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, new_row
from lightning_turbo.tune import command
from lightning_turbo.tune.runner import TuneSettings

LOOK = {"phases": {"forward": 0.008, "optimizer": 0.002, "hooks": 0.001}, "lacks": ["cuda"]}


class Still:
    """A runner that returns the values of a table without noise, and records its calls."""

    start, left = 1.0, 1e6
    fault, at = None, 0  # the error that one of its calls raises

    def __init__(self, settings, candidates, interrupt, progress, scratch):
        assert scratch.is_dir()
        self.interrupt, self.calls = interrupt, []
        made.append(self)

    def look(self):
        return {**new_row(), "status": "ok", "numbers": {**LOOK, "batches": 10, "period": 10, "seconds": 0.12}}

    def measure(self, together, stretch):
        self.calls.append(together)
        if len(self.calls) == self.at:
            self.interrupt.pressed = self.fault is InterruptedRunError
            raise self.fault
        return {names: self.row(0.8 ** len(names)) for names in together}

    def row(self, seconds):
        return {**new_row(), "status": "ok", "rounds": [{"sweep": 0, "process": 0, "seconds": seconds, "steps": 1}]}


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


def test_the_search_is_written_and_said(settings, capsys):
    status, said = run(settings)
    assert status == 0
    results = json.loads((settings.out / "tune.json").read_text())
    assert results["chosen"]["settings"] == ["lean", "fused"]
    assert results["command"] == ["python", "train.py"]
    assert said.startswith(f"`python train.py`: {results['verdict']}.")
    assert all(str(settings.out / name) in said for name in ("tune.json", "turbo.yaml"))
    assert "A whole epoch without its validation, which was not seen, takes about" in capsys.readouterr().err


def test_after_ctrl_c_the_exit_status_is_130_and_what_was_found_is_written(settings, monkeypatch):
    monkeypatch.setattr(Still, "fault", InterruptedRunError)
    monkeypatch.setattr(Still, "at", 2)
    status, said = run(settings)
    assert status == 130
    assert json.loads((settings.out / "tune.json").read_text())["interrupted"]
    assert "the search was ended before anything could be promised" in said


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_another_error_is_not_hidden(settings, fault, monkeypatch):
    monkeypatch.setattr(Still, "fault", fault)
    monkeypatch.setattr(Still, "at", 1)
    with pytest.raises(fault):
        run(settings)


def test_a_folder_that_cannot_be_made_is_refused(settings, tmp_path):
    with pytest.raises(TurboError, match="expected a folder that can be made and written"):
        run(settings, out=tmp_path / "train.py")
    with pytest.raises(TurboError, match="'prefetsch' names no candidate"):
        run(settings, only=("prefetsch",))
