"""The facts about a machine, and one line of the judgement on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Environment", "Gpu", "Line", "huge_pages", "version"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, as the driver tells it."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What is installed and what the machine has; ``None`` means absent or unknown."""

    python: str
    torch: str
    torch_cuda: str | None = None
    """The CUDA that torch was built with."""
    torch_architectures: tuple[str, ...] = ()
    """What torch was built for, such as ``sm_80``."""
    cudnn: int | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, ...] | None = None
    """The newest CUDA that the driver can run."""
    nvcc: str | None = None
    gpus: tuple[Gpu, ...] = ()
    lightning: str | None = None
    pytorch_lightning: str | None = None
    apex: str = "absent"
    """``"absent"``, ``"amp"``, ``"no amp"`` or ``"stranger"``."""
    dali: str | None = None
    """The name of DALI's distribution."""
    dali_version: str | None = None
    prefetch_generator: str | None = None
    torchdata: str | None = None
    cores: int = 1
    omp_threads: str | None = None
    shared_memory: int | None = None
    """Bytes of ``/dev/shm``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What is said about one part."""

    name: str
    status: Literal["ok", "note", "fault"]
    what: str
    mend: str = ""


def huge_pages() -> str | None:
    """Return the kernel's rule for large pages, ``always``, ``madvise`` or ``never``; ``None`` where it has none."""
    try:
        rules = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return rules.partition("[")[2].partition("]")[0] or None


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, up to three: ``"2.6.0+cu124"`` gives ``(2, 6, 0)``."""
    found = re.match(r"\d+(\.\d+){0,2}", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
