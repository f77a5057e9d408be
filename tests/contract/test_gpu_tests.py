"""``python -m pytest -m gpu`` runs in a clone with only torch, one package of Lightning, and pytest installed."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ABSENT = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_installed(cls, name, path=None, target=None):
    return None if name.split(".")[0] in %r else find_spec(name, path, target)

PathFinder.find_spec = classmethod(find_installed)
"""
# Packages that neither torch nor pytorch_lightning requires.
PACKAGES = ("lightning", "monai", "nilearn", "nvidia", "pytest_timeout", "pytorch_optimizer", "skimage", "sklearn")

# These take minutes on a CPU. The first one delays a real device; simulated devices detect missing synchronization
# without a delay.
LONG = (
    "tests/gpu/test_device_prefetch.py::test_no_batch_is_read_too_early_or_overwritten",
    "tests/gpu/test_apex_amp.py::test_o2_needs_less_memory_where_activations_dominate",
    "tests/gpu/test_tricks.py::test_the_peak_of_the_forward_pass_is_lower_by_the_gradients",
)


def test_gpu_tests_import_few_packages():
    """They and their helpers import none of ``PACKAGES``. The slow form collects them without these packages."""
    found, todo = set(), [*(TESTS / "gpu").glob("*.py"), TESTS / "conftest.py"]
    while todo:
        path = todo.pop()
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            files = [(TESTS.parent / name.replace(".", "/")).with_suffix(".py") for name in names]
            new = {file for file in files if file.exists() and TESTS in file.parents} - found
            found |= new | {name.partition(".")[0] for name in names}
            todo += new
    assert TESTS / "trainers.py" in found
    assert found.isdisjoint(PACKAGES)


@pytest.mark.slow
def test_gpu_tests_are_collected_with_few_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ABSENT % (PACKAGES,))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    modules = {line.split("::")[0] for line in found.stdout.splitlines() if "::" in line}
    there = {path.relative_to(TESTS.parent).as_posix() for path in (TESTS / "gpu").glob("test_*.py")}
    assert modules == there - {"tests/gpu/test_dali.py"}, "only the tests of DALI are skipped"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
def test_gpu_tests_pass_on_simulated_devices():
    """Without a GPU, no other test covers transfers to a device and training steps on it."""
    run = TESTS / "release" / "pretended_cuda" / "run.py"
    left_out = [f"--deselect={test}" for test in LONG]
    found = subprocess.run([sys.executable, run, *left_out], capture_output=True, text=True, timeout=880)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-3000:]


def test_only_the_gpu_folder_has_gpu_tests():
    mark = "mark." + "gpu"
    assert {path.parent for path in TESTS.rglob("*.py") if mark in path.read_text()} == {TESTS / "gpu"}
