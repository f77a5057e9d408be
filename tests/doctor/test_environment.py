"""The check of the machine: without Lightning or a device, and with a line for each part."""

import importlib.abc
import importlib.machinery
import sys

import pytest
import torch

from lightning_turbo import cli
from lightning_turbo.doctor import environment
from lightning_turbo.doctor.environment import Line

LINES = [Line("torch", "ok", "2.6"), Line("apex", "fault", "no", "go away")]


@pytest.mark.parametrize(("line", "status", "remedy"), [
    (environment.torch_line("2.6.0+cu124", "12.4", gpus=2, usable=True), "ok", ""),
    (environment.torch_line("2.5.1", None), "fault", "2.6 or newer"),
    (environment.torch_line("2.6.0", None, gpus=1), "fault", "CUDA build"),
    (environment.torch_line("2.6.0+cu124", "12.4", gpus=1), "fault", "update the driver"),
    (environment.lightning_line("lightning", "2.6.6"), "ok", ""),
    (environment.lightning_line("lightning", "2.6.2"), "fault", "change it"),
    (environment.lightning_line("pytorch-lightning", "2.6.2"), "ok", ""),
    (environment.lightning_line("lightning", "1.9.5"), "fault", "2.5 or newer"),
    (environment.lightning_line("lightning", "3.0.0"), "fault", "below 3"),
    (environment.lightning_line("lightning", None), "fault", "pip install"),
    (environment.apex_line("absent"), "ok", ""),
    (environment.apex_line("stranger"), "fault", "pip uninstall apex"),
    (environment.shared_memory_line(2**30), "ok", ""),
    (environment.shared_memory_line(64 * 2**20), "note", "--shm-size"),
])  # fmt: skip
def test_each_part_of_the_environment_has_a_line(line, status, remedy):
    assert line.status == status
    assert remedy in line.remedy
    assert bool(line.remedy) == (status != "ok")


UNUSED = ("lightning", "pytorch_lightning", "apex", "nvidia")


class Refused(importlib.abc.MetaPathFinder):
    """Refuses to import packages, which may still be looked for."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in UNUSED and name != "nvidia":
            spec = importlib.machinery.ModuleSpec(name, self)
            spec.loader = self
            return spec
        return None

    def create_module(self, spec):
        raise AssertionError(f"{spec.name} is imported")

    def exec_module(self, module):
        raise NotImplementedError


def test_the_environment_check_uses_neither_lightning_nor_a_device(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in (*UNUSED, "lightning_turbo"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refused(), *sys.meta_path])
    lines = importlib.import_module("lightning_turbo.doctor.environment").check()
    with pytest.raises(AssertionError, match="is imported"):
        importlib.import_module("lightning")
    assert not torch.cuda.is_initialized()
    assert {"torch", "apex", "DALI", "cores"} <= {line.name for line in lines}


@pytest.mark.parametrize(
    ("folders", "kind"),
    [([], "absent"), (["apex/amp"], "amp"), (["apex/optimizers"], "no amp"), (["apex/models"], "stranger")],
)
def test_kinds_of_apex_are_distinguished_without_importing_it(folders, kind, tmp_path, monkeypatch):
    for each in folders:
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    hidden = [path for path in sys.path if path and not path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *hidden])
    assert environment.find_apex() == kind


@pytest.mark.parametrize(("script", "names"), [("echo 'A100, 8.0'", ["GPU 0"]), ("exit 3", [])])
def test_gpus_are_read_from_nvidia_smi(script, names, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        lines = environment.check()
    assert [line.name for line in lines if "GPU" in line.name] == names


@pytest.mark.parametrize(("lines", "status"), [(LINES, 1), (LINES[:1], 0)])
def test_the_environment_command_fails_on_a_fault(lines, status, monkeypatch, capsys):
    monkeypatch.setattr(environment, "check", lambda: lines)
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    assert "ok     torch" in text
    assert ("FAULT  apex   no" in text and "-> go away" in text) == bool(status)
