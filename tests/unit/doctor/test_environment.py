"""The machine: facts gathered without Lightning or a device, and a line for each part."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lightning_turbo import cli
from lightning_turbo.doctor import environment
from lightning_turbo.doctor.environment import Environment, Gpu, Line, lines_for

LINES = [Line("torch", "ok", "2.6"), Line("apex", "fault", "no", "go away")]
A100 = Gpu(name="A100", capability=(8, 0), memory=80 * 2**30)
GOOD = Environment(
    python="3.12.1",
    torch="2.6.0+cu124",
    torch_cuda="12.4",
    driver="550.54",
    driver_cuda=(12, 4),
    gpus=(A100, A100),
    lightning="2.6.6",
    prefetch_generator="1.0.3",
    cores=8,
    shared_memory=8 * 2**30,
)


def test_a_good_machine_is_ok_and_so_is_one_without_a_gpu():
    bare = Environment(python="3.10.1", torch="2.6.0", lightning="2.5.0", prefetch_generator="1.0.3")
    for env in (GOOD, bare):
        assert {each.status for each in lines_for(env)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "changes", "status", "remedy"),
    [
        ("torch", {"torch": "2.5.1"}, "fault", "2.6 or newer"),
        ("torch", {"torch_cuda": None}, "fault", "CUDA build"),
        ("GPU 0", {"gpus": (replace(A100, capability=(6, 1)),)}, "note", "save memory"),
        ("driver", {"driver_cuda": (11, 8)}, "fault", "update the driver"),
        ("driver", {"driver_cuda": (12, 2)}, "note", "compatible"),
        ("driver", {"driver_cuda": (13, 0)}, "ok", ""),
        ("lightning", {"lightning": "2.6.2"}, "fault", "change it"),
        ("lightning", {"lightning": "2.6.3"}, "fault", "change it"),
        ("lightning", {"lightning": "1.9.5"}, "fault", "2.5 or newer"),
        ("lightning", {"lightning": "3.0.0"}, "fault", "below 3"),
        ("pytorch-lightning", {"pytorch_lightning": "2.5.0"}, "ok", ""),
        ("Lightning", {"lightning": None}, "fault", "pip install"),
        ("apex", {"apex": "absent"}, "ok", ""),
        ("apex", {"apex": "amp"}, "ok", ""),
        ("apex", {"apex": "no amp"}, "ok", ""),
        ("apex", {"apex": "stranger"}, "fault", "pip uninstall apex"),
        ("DALI", {}, "ok", ""),
        ("DALI", {"dali": "nvidia-dali-cuda120", "dali_version": "2.4.0"}, "ok", ""),
        ("DALI", {"dali": "nvidia-dali-cuda130", "dali_version": "2.4.0"}, "fault", "580"),
        ("DALI", {"dali": "nvidia-dali-cuda130", "dali_version": "2.4.0", "gpus": ()}, "ok", ""),
        ("prefetch_generator", {"prefetch_generator": None}, "fault", "pip install"),
        ("cores", {"omp_threads": "8"}, "ok", ""),
        ("cores", {"omp_threads": "9"}, "note", "OMP_NUM_THREADS=8"),
        ("cores", {"omp_threads": "many"}, "note", "unset it"),
        ("cores", {"omp_threads": "1", "gpus": ()}, "note", "one core"),
        ("/dev/shm", {"shared_memory": 64 * 2**20}, "note", "--shm-size"),
    ],
)
def test_each_part_has_a_line(name, changes, status, remedy):
    found = next(each for each in lines_for(replace(GOOD, **changes)) if each.name == name)
    assert found.status == status, found
    assert remedy in found.remedy
    assert bool(found.remedy) == (status != "ok")


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
def test_the_cases_of_apex_are_told_apart_without_importing_it(files, kind, tmp_path, monkeypatch):
    for each in files:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("raise RuntimeError('must not be imported')")
    hidden = [path for path in sys.path if path and not path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *hidden])
    assert environment.gather().apex == kind


def test_gpus_and_driver_are_read_from_nvidia_smi(tmp_path):
    rows = {"compute_cap": "NVIDIA A100, 80GB, 8.0, 81920\\nbroken, N/A, N/A", "driver_version": "550.54.15"}
    script = "".join(f'case "$1" in *{key}*) printf "{text}\\n";; esac\n' for key, text in rows.items())
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        env = environment.gather()
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 3")
        broken = environment.gather()
    assert env.gpus == (Gpu(name="NVIDIA A100, 80GB", capability=(8, 0), memory=81920 * 2**20),)
    assert env.driver == "550.54.15"
    assert (broken.gpus, broken.driver) == ((), None)


@pytest.mark.parametrize(("lines", "status"), [(LINES, 1), (LINES[:1], 0)])
def test_the_command_prints_text_or_json_and_fails_on_a_fault(lines, status, monkeypatch, capsys):
    monkeypatch.setattr(environment, "check", lambda: lines)
    assert cli.main(["doctor", "--json"]) == status
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {"name": "torch", "status": "ok", "what": "2.6", "remedy": ""}
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    assert "ok     torch" in text
    assert ("FAULT  apex   no" in text and "-> go away" in text) == bool(status)
