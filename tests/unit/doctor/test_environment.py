"""The facts about this machine: gathered without Lightning, without a device, and written as text and JSON."""

import json
import subprocess
import sys

import pytest
import torch

from lightning_turbo import cli
from lightning_turbo.doctor import environment
from lightning_turbo.doctor.machine import Line

LINES = [Line(name="torch", status="ok", what="2.6"), Line(name="apex", status="fault", what="no", mend="go away")]


def test_the_facts_of_this_machine_are_gathered():
    env = environment.gather()
    assert env.torch == torch.__version__
    assert env.cores >= 1
    assert env.lightning or env.pytorch_lightning
    assert env.prefetch_generator


def test_neither_lightning_nor_a_device_is_touched():
    code = (
        "import sys, torch; from lightning_turbo.doctor import environment as e; e.check();"
        "print([n for n in ('lightning', 'pytorch_lightning', 'apex', 'nvidia.dali') if n in sys.modules],"
        "torch.cuda.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.split("\n")[0] == "[] False"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([], "absent"),
        (["apex/__init__.py", "apex/amp/__init__.py"], "amp"),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "no amp"),
        (["apex/__init__.py", "apex/models.py"], "stranger"),
    ],
)
def test_the_three_cases_of_apex_are_told_apart(files, kind, tmp_path, monkeypatch):
    for each in files:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("raise RuntimeError('must not be imported')")
    hidden = [path for path in sys.path if path and not path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *hidden])
    assert environment._apex() == kind


def test_programs_that_are_absent_or_fail_tell_nothing():
    assert environment._output("no-such-program-here") == ""
    assert environment._output(sys.executable, "-c", "raise SystemExit(3)") == ""
    assert environment._output(sys.executable, "-c", "print('said')") == "said\n"


def test_gpus_are_read_from_the_driver(monkeypatch):
    rows = "NVIDIA A100, 80GB, 8.0, 81920\nbroken, N/A, N/A\n"
    monkeypatch.setattr(environment, "_output", lambda *command: rows)
    (gpu,) = environment._gpus()
    assert (gpu.name, gpu.capability, gpu.memory) == ("NVIDIA A100, 80GB", (8, 0), 81920 * 2**20)


def test_nvcc_is_read(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda *command: "Cuda compilation tools, release 12.4, V12.4.131")
    assert environment._nvcc() == "12.4"
    monkeypatch.setattr(environment, "_output", lambda *command: "")
    assert environment._nvcc() is None


def test_every_line_says_what_is_wrong_and_how_to_mend_it():
    text = environment.as_text(LINES)
    assert "ok     torch  2.6" in text
    assert "FAULT  apex   no" in text
    assert "-> go away" in text


@pytest.mark.parametrize(("lines", "status"), [(LINES, 1), (LINES[:1], 0)])
def test_the_command_prints_json_and_fails_on_a_fault(lines, status, monkeypatch, capsys):
    monkeypatch.setattr(environment, "check", lambda: lines)
    assert cli.main(["doctor", "--json"]) == status
    assert json.loads(capsys.readouterr().out) == environment.as_json(lines)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().out == environment.as_text(lines) + "\n"
