"""What is installed and what the machine has, found without importing Lightning or waking a device."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.cuda import nccl as torch_nccl

from lightning_turbo._optional import installed_version
from lightning_turbo.doctor.fitness import lines_for
from lightning_turbo.doctor.machine import Environment, Gpu, Line, version

__all__ = ["as_json", "as_text", "check", "failed", "gather"]

_MARKS = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}


def check() -> list[Line]:
    """Look at this machine and say of each part whether it is ok, or what is wrong and how to mend it."""
    return lines_for(gather())


def failed(lines: Sequence[Line]) -> bool:
    """Return whether one of the lines tells of a real fault."""
    return any(line.status == "fault" for line in lines)


def as_text(lines: Sequence[Line]) -> str:
    """Return the lines as text for the terminal."""
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{_MARKS[line.status]}  {line.name:{width}}  {line.what}")
        if line.mend:
            rows.append(f"{'':7}{'':{width}}  -> {line.mend}")
    return "\n".join(rows)


def as_json(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return the lines as plain dicts."""
    return [{"name": each.name, "status": each.status, "what": each.what, "mend": each.mend} for each in lines]


def gather() -> Environment:
    """Collect the facts that ``check`` judges.

    Note:
        Runs ``nvidia-smi`` and ``nvcc --version`` if they exist; no CUDA context is made, and Lightning is not
        imported.
    """
    dali = next((name for name in ("nvidia-dali-cuda130", "nvidia-dali-cuda120") if installed_version(name)), None)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()) if torch.version.cuda else (),
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,
        nccl=".".join(map(str, torch_nccl.version())) if nccl and torch.version.cuda else None,
        driver=_driver_version(),
        driver_cuda=_driver_cuda(),
        nvcc=_nvcc(),
        gpus=_gpus(),
        lightning=installed_version("lightning"),
        pytorch_lightning=installed_version("pytorch-lightning"),
        apex=_apex(),
        dali=dali,
        dali_version=installed_version(dali) if dali else None,
        prefetch_generator=installed_version("prefetch_generator"),
        torchdata=installed_version("torchdata"),
        cores=_cores(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _output(*command: str) -> str:
    """What a program prints, or an empty string if it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _driver_version() -> str | None:
    rows = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    return rows[0] if rows else None


def _gpus() -> tuple[Gpu, ...]:
    rows = _output("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")
    found = []
    for row in rows.splitlines():
        name, capability, memory = (part.strip() for part in row.rsplit(",", 2))
        numbers = version(capability)
        if len(numbers) == 2 and memory.isdigit():
            found.append(Gpu(name=name, capability=(numbers[0], numbers[1]), memory=int(memory) * 2**20))
    return tuple(found)


def _driver_cuda() -> tuple[int, ...] | None:
    """The newest CUDA that the driver can run."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if status == 0 and number.value else None


def _nvcc() -> str | None:
    found = re.search(r"release (\d+\.\d+)", _output("nvcc", "--version"))
    return found[1] if found else None


def _apex() -> str:
    """``"absent"``, ``"amp"``, ``"no amp"``, or ``"stranger"`` for the unrelated project of that name on PyPI."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    if any((folder / "amp" / "__init__.py").exists() for folder in folders):
        return "amp"
    known = ("multi_tensor_apply", "normalization", "optimizers")
    return "no amp" if any((folder / name).is_dir() for folder in folders for name in known) else "stranger"
