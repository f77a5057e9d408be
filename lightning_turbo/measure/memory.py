"""How much memory this process takes: resident bytes on the CPU, allocated bytes on CUDA."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["current_bytes", "peak_bytes"]

STATUS = Path("/proc/self/status")


def _status(field: str) -> int | None:
    """One size of /proc/self/status in bytes, or ``None`` where the system has no such file."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def current_bytes(device: torch.device) -> int | None:
    """Return the bytes in use now: allocated by torch on CUDA, resident on the CPU; ``None`` without ``/proc``."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes in use so far.

    ``VmHWM`` is read on the CPU; ``ru_maxrss`` would start at the peak of the parent process.

    Returns:
        Bytes, or ``None`` on a CPU whose system has no ``/proc``.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")
