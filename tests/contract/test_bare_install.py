"""After ``pip install .``, each command runs or names the extra that it needs.

The wheel is built and unpacked into a new environment, in which only the requirements of the wheel are importable.
``tests/release/package.py`` does the same with pip.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_turbo
from lightning_turbo._optional import EXTRAS
from tests.contract.test_floors import imports

ROOT = Path(lightning_turbo.__file__).parent.parent
SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(max_epochs=1, limit_val_batches=0, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(256, 32), batch_size=4))
"""


def build_wheel(folder):
    """Build the wheel from a copy of the tracked files, without leftovers of an earlier build."""
    listed = subprocess.run(
        ["git", "ls-files", "lightning_turbo", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, check=True, text=True, capture_output=True,
    ).stdout  # fmt: skip
    for name in filter(lambda name: (ROOT / name).exists(), listed.splitlines()):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "source", check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


def needed(requirements):
    """Return the distributions that the requirements need, including transitive ones."""
    found, todo = {}, list(requirements)
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            found[name, extra] = importlib.metadata.distribution(name)
            todo += [
                line.partition(";")[0]
                for line in found[name, extra].requires or ()
                if not (marker := Requirement(line).marker) or marker.evaluate({"extra": extra})
            ]
    return {name: distribution for (name, _), distribution in found.items()}.values()


def link(distribution, site):
    """Link a distribution into an environment, without others that share its namespace."""
    for file in distribution.files:
        parts = file.parts
        if parts[0] == ".." or "__pycache__" in parts:
            continue
        home = Path(distribution.locate_file(""))
        shared = len(parts) > 1 and not parts[0].endswith("-info") and not (home / parts[0] / "__init__.py").exists()
        name = Path(*parts[: 2 if shared else 1])
        if not (site / name).exists():
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).symlink_to(home / name)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a function that runs a command of the wheel in an environment with only its requirements."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    python = folder / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    with zipfile.ZipFile(build_wheel(folder)) as archive:
        archive.extractall(site)
    (own,) = importlib.metadata.distributions(path=[str(site)])
    for distribution in needed(line for line in own.requires if "extra ==" not in line):
        link(distribution, site)
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(folder)}

    work = folder / "work"
    work.mkdir()

    def run(*arguments):
        command = arguments if arguments[0] == "-c" else ("-m", "lightning_turbo", *arguments)
        done = subprocess.run(
            [python, *command], cwd=work, env=environment, capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    run.folder = work
    return run


def test_every_module_is_importable_and_a_command_names_its_missing_extra(bare):
    """In one process, because importing torch and Lightning is slow. ``pack`` has no readers of images and scans."""
    for name in ("photos/a/1.png", "scans/a/1.nii"):
        (bare.folder / name).parent.mkdir(parents=True)
        (bare.folder / name).touch()
    code = """
import contextlib, importlib, io, json, pkgutil, runpy, sys
import lightning_turbo
from lightning_turbo._optional import EXTRAS, installed

names = [each.name for each in pkgutil.walk_packages(lightning_turbo.__path__, "lightning_turbo.")]
modules = [importlib.import_module(name) for name in names if name != "lightning_turbo.__main__"]

def pack(folder):
    sys.argv = ["lightning-turbo", "pack", folder, "packed"]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_module("lightning_turbo", run_name="__main__")
        except SystemExit as end:
            return end.code, errors.getvalue()

print(json.dumps({
    "where": lightning_turbo.__file__, "optional": [name for name in EXTRAS if installed(name)],
    "modules": len(modules), "packs": [pack("photos"), pack("scans")],
}))
"""
    found = json.loads(bare("-c", code).stdout)
    assert "site-packages" in found["where"]
    assert found["optional"] == []
    assert found["modules"] > 100
    for status, errors in found["packs"]:
        assert status == 2
        assert errors.count("\n") == 1, errors
        assert "Install it with: pip install '.[pack]' in the clone" in errors
    assert not (bare.folder / "packed").exists()


def test_imports_inside_functions_are_required_or_optional_packages():
    """Functions may import packages when they are called; the slow tests below call only some of them."""
    core = {"torch", "lightning", "prefetch_generator", "numpy", "yaml", "lightning_utilities", "torchmetrics"}
    other_name = {"pytorch_lightning", "lightning_fabric"}
    known = core | other_name | {name.partition(".")[0] for name in EXTRAS} | set(sys.stdlib_module_names)
    found = {module.partition(".")[0] for path in (ROOT / "lightning_turbo").rglob("*.py") for module in imports(path)}
    assert found - known == {"lightning_turbo"}


@pytest.mark.slow  # short form: the imports inside functions, above
def test_doctor_convert_and_tune_run(bare):
    assert "torch" in bare("doctor").stdout
    (bare.folder / "train.py").write_text(SCRIPT)
    done = bare("doctor", "--json", "doctor.json", "train.py")
    assert (bare.folder / "doctor.json").exists(), done.stderr
    code = "import torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
    code += "torch.save({'model': m.state_dict(), 'optimizer': o.state_dict(), 'epoch': 1}, 'old.pt')\n"
    code += "import numpy, os; os.makedirs('arrays/a'); numpy.save('arrays/a/1.npy', numpy.ones((2, 3)))"
    bare("-c", code)
    assert "wrote new.ckpt" in bare("convert", "old.pt", "new.ckpt").stdout
    assert "1 samples" in bare("pack", "arrays", "packed").stdout


@pytest.mark.slow  # short form: in tests/tune/test_command.py
def test_tune_runs(bare):
    (bare.folder / "train.py").write_text(SCRIPT)
    done = bare("tune", "--minutes", "0.1", "--only", "fused", "train.py")
    written = {path.name for path in (bare.folder / "runs" / "tune").iterdir()}
    assert written == {"logs", "tune.json", "turbo.yaml"}
    assert "setting" in done.stdout
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


def test_each_extra_has_only_the_packages_that_messages_name(bare):
    own = importlib.metadata.distributions(path=[str(next((bare.folder.parent / "venv").glob("lib/*/site-packages")))])
    (requires,) = (each.requires for each in own if each.metadata["Name"] == "lightning-turbo")
    for extra in {extra for _, extra in EXTRAS.values()}:
        held = {Requirement(line).name for line in requires if f'extra == "{extra}"' in line}
        known = {name for names, its_extra in EXTRAS.values() for name in names if its_extra == extra}
        assert held <= known, extra
        assert held
