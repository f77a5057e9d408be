"""Checks what is installed and what the machine has, without importing Lightning, and says what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_turbo._machine import count_cores
from lightning_turbo._optional import installed_version

__all__ = ["Line", "as_text", "check", "failed"]

MALICIOUS = {("lightning", "2.6.2"), ("lightning", "2.6.3")}
ADVISORY = "GHSA-w37p-236h-pfx3"
LITTLE_SHARED_MEMORY = 2**30
"""Docker's default is 64 MiB, which a few batches fill; 1 GiB is a choice, not a measurement."""

_APEX = {
    "absent": "absent; ApexAMP has O0-O3 of its own",
    "amp": "NVIDIA's, with amp",
    "no amp": "NVIDIA's, without amp, which it dropped; ApexAMP has O0-O3 of its own",
    "stranger": "a package that is not NVIDIA's: PyPI's apex is an unrelated project",
}


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check, and what to do if it is not ok."""

    name: str
    status: str  # "ok", "note" or "fault"
    what: str
    remedy: str = ""


def check() -> list[Line]:
    """Check this machine. Each line is ok, or says what is wrong and what to do.

    Note:
        Runs ``nvidia-smi`` if it exists; creates no CUDA context and does not import Lightning.
    """
    gpus = _ask_driver()
    dali = installed_version("nvidia-dali-cuda130") or installed_version("nvidia-dali-cuda120")
    return [
        torch_line(torch.__version__, torch.version.cuda, gpus=len(gpus), usable=torch.cuda.is_available()),
        *[Line(f"GPU {i}", "ok", gpu) for i, gpu in enumerate(gpus)],
        *[lightning_line(name, installed_version(name)) for name in _installed_lightnings()],
        apex_line(find_apex()),
        Line("DALI", "ok", dali or "absent; only DALILoader and DALIDataModule need it"),
        Line("cores", "ok", str(count_cores())),
        *[shared_memory_line(shutil.disk_usage(path).total) for path in ("/dev/shm",) if os.path.isdir(path)],
    ]


def failed(lines: Sequence[Line]) -> bool:
    """Return whether a line reports a fault."""
    return any(line.status == "fault" for line in lines)


def as_text(lines: Sequence[Line]) -> str:
    """Return the lines as text for the terminal."""
    width, marks = max(len(line.name) for line in lines), {"ok": "ok   ", "note": "note ", "fault": "FAULT"}
    rows = []
    for line in lines:
        rows.append(f"{marks[line.status]}  {line.name:{width}}  {line.what}")
        rows += [f"{'':7}{'':{width}}  -> {line.remedy}"] if line.remedy else []
    return "\n".join(rows)


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``"2.6.0+cu124"`` gives ``(2, 6)``."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _line(name: str, what: str, *problems: tuple[object, str, str]) -> Line:
    """Return a line with the first problem (condition, status, remedy) whose condition holds, otherwise an ok line."""
    found = next((problem[1:] for problem in problems if problem[0]), ("ok", ""))
    return Line(name, found[0], what, found[1])


def torch_line(version: str, cuda: str | None, gpus: int = 0, usable: bool = False) -> Line:
    """Return the line about torch: its version, the CUDA that it was built with, and whether it can use the GPUs."""
    old = "lightning_turbo needs torch 2.6 or newer: pip install --upgrade torch"
    cpu_only = "this machine has a GPU: install torch's CUDA build; see pytorch.org"
    unusable = "torch cannot use the GPU under this driver: update the driver, or install a torch for an older CUDA"
    return _line(
        "torch",
        f"{version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}, Python {platform.python_version()}",
        (_version(version) < (2, 6), "fault", old),
        (gpus and not cuda, "fault", cpu_only),
        (gpus and not usable, "fault", unusable),
    )


def lightning_line(name: str, version: str | None) -> Line:
    """Return the line about one of Lightning's two distributions."""
    stolen = (
        f"a malicious upload ({ADVISORY}): pip uninstall lightning; treat every secret that this machine could reach "
        "as stolen and change it"
    )
    unfit = f"lightning_turbo needs 2.5 or newer, below 3: pip install --upgrade {name}"
    return _line(
        name,
        version or "not installed",
        (version is None, "fault", "pip install 'lightning>=2.5,!=2.6.2,!=2.6.3,<3'"),
        ((name, version) in MALICIOUS, "fault", stolen),
        (not (2, 5) <= _version(version or "") < (3,), "fault", unfit),
    )


def _installed_lightnings() -> list[str]:
    return [name for name in ("lightning", "pytorch-lightning") if installed_version(name)] or ["lightning"]


def apex_line(kind: str) -> Line:
    """Return the line about apex; ``kind`` is a result of ``find_apex``."""
    remedy = "pip uninstall apex; ApexAMP needs none, and NVIDIA's is built from its repository"
    return _line("apex", _APEX[kind], (kind == "stranger", "fault", remedy))


def shared_memory_line(size: int) -> Line:
    """Return the line about shared memory of ``size`` bytes."""
    remedy = "loader workers pass batches through it and die when it is full: docker run --shm-size=8g"
    return _line("/dev/shm", f"{size / 2**20:.0f} MiB", (size < LITTLE_SHARED_MEMORY, "note", remedy))


def _ask_driver() -> list[str]:
    """Return the GPUs that the driver reports; none if nvidia-smi is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def find_apex() -> str:
    """Return which apex is installed, without importing it: "absent", "amp", "no amp" or "stranger"."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folder = Path((spec.submodule_search_locations or [""])[0])
    known = {"amp": "amp", "multi_tensor_apply": "no amp", "normalization": "no amp", "optimizers": "no amp"}
    return next((known[name] for name in known if (folder / name).is_dir()), "stranger")
