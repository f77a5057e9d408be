"""Describes where something was measured: hardware, versions, commit."""

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

__all__ = ["OtherLoad", "computes_in_bfloat16", "describe_machine"]

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
    """Return the first value of a field of /proc/cpuinfo, or ``None`` if the file or field does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, None)


def computes_in_bfloat16() -> bool | None:
    """Return whether the CPU has bfloat16 instructions; ``None`` if unknown."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    return None if flags is None else bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def _huge_pages() -> str | None:
    """Return the kernel's setting for huge pages, ``always``, ``madvise`` or ``never``; ``None`` if there is none."""
    try:
        rules = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return rules.partition("[")[2].partition("]")[0] or None


class OtherLoad:
    """Measures how many cores other programs use, on Linux, from its creation on.

    It subtracts the time of this process and its children from the busy time of all cores. The system counts children
    once they have ended and been waited for, so read the result then.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._before = _busy_seconds()

    def cores(self) -> float | None:
        """Return the mean number of cores, or ``None`` if unknown."""
        now = _busy_seconds()
        passed = time.monotonic() - self._begun
        if now is None or self._before is None or passed <= 0:
            return None
        return max(0.0, (now - self._before) / passed)


def _busy_seconds() -> float | None:
    """Return the busy seconds of all cores since boot, without those of this process and its children."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = [int(each) for number, each in enumerate(fields[:8]) if number not in (3, 4)]
    return sum(busy) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _commit() -> str | None:
    """Return the commit of the package's checkout, with ``+`` if it was edited; ``None`` outside a checkout."""
    folder = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # An installed package may be inside the checkout of another project.
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:
            return None
        edited = git("status", "--porcelain", "--untracked-files=no", "--", str(folder))
        return git("rev-parse", "HEAD") + ("+" if edited else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe_machine(device: str) -> dict[str, Any]:
    """Return the facts about machine and software that a reader needs to judge a number, as plain values."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": count_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": computes_in_bfloat16(),
        "transparent_huge_pages": _huge_pages(),
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
