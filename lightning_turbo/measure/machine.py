"""Where something was measured: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._machine import count_cores
from lightning_turbo._optional import installed_version

__all__ = ["OtherLoad", "computes_in_bfloat16", "describe_machine", "huge_pages"]

DISTRIBUTIONS = (
    *("torch", "lightning", "pytorch-lightning", "prefetch_generator", "numpy", "nvidia-dali-cuda120"),
    *("nvidia-dali-cuda130", "torchdata", "accelerate", "mosaicml", "timm", "monai", "apex"),
)
# Environment variables that change how long a step takes or where its memory comes from.
VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "GLIBC_TUNABLES", "GOMP_SPINCOUNT", "KMP_AFFINITY"),
    *("KMP_BLOCKTIME", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
    *("MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE"),
)


def _cpuinfo(field: str) -> str | None:
    """The first value of a field of /proc/cpuinfo, or ``None`` where the system has no such file or field."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, None)


def computes_in_bfloat16() -> bool | None:
    """Tell whether the CPU has instructions for bfloat16; ``None`` where that cannot be read."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    return None if flags is None else bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def huge_pages() -> str | None:
    """Return the kernel's rule for large pages, ``always``, ``madvise`` or ``never``; ``None`` where it has none."""
    try:
        rules = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return rules.partition("[")[2].partition("]")[0] or None


class OtherLoad:
    """How many cores other programs take, on Linux, from its making on.

    Of the time in which the machine's cores were busy, what this process and its children took is left out. Children
    count once they have ended and were waited for, so that it is asked then.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._before = _busy_seconds()

    def cores(self) -> float | None:
        """Return the mean number of cores, or ``None`` where the system does not tell."""
        now = _busy_seconds()
        passed = time.monotonic() - self._begun
        if now is None or self._before is None or passed <= 0:
            return None
        return max(0.0, (now - self._before) / passed)


def _busy_seconds() -> float | None:
    """The seconds that all cores were busy since the machine began, without those of this process and its children."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = [int(each) for number, each in enumerate(fields[:8]) if number not in (3, 4)]
    return sum(busy) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, ``+`` if it was edited; ``None`` outside of one."""
    folder = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # An installed package may lie within the checkout of another project.
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:
            return None
        edited = git("status", "--porcelain", "--untracked-files=no", "--", str(folder))
        return git("rev-parse", "HEAD") + ("+" if edited else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe_machine(device: str) -> dict[str, Any]:
    """Return what a reader must know of the machine and the software to judge a number, in plain values."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": count_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": computes_in_bfloat16(),
        "transparent_huge_pages": huge_pages(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "lightning_turbo": installed_version("lightning-turbo"),
        "commit": _commit(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := installed_version(name)) is not None},
    }
    return facts | (_describe_gpu() if device == "cuda" else {})


def _describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
