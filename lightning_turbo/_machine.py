"""The machine as this process may use it."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["count_cores"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def count_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1: by affinity, and by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Return the cores that the smallest quota of this process's cgroups allows, infinity without one."""
    quotas = [math.inf]
    for root, path in _cgroups():
        # The quota of each group holds for all groups below it. In a container the own group may be the root.
        for folder in (root / path, *(root / path).parents):
            if folder == root or root in folder.parents:
                quotas.append(_quota_in(folder))
    return min(quotas)


def _cgroups() -> list[tuple[Path, str]]:
    """Return the roots of the cgroups that limit CPU time, and the path of this process's group below each."""
    try:
        rows = [row.split(":", 2) for row in OWN_CGROUP.read_text("utf-8").splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in rows:
        if not controllers:
            found.append((CGROUPS, path.lstrip("/")))  # version 2
        elif "cpu" in controllers.split(","):
            found += [(CGROUPS / name, path.lstrip("/")) for name in ("cpu", controllers)]  # version 1
    return found


def _quota_in(folder: Path) -> float:
    """Return the cores that the quota of one group allows."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text("utf-8").strip() for name in names).split()
        except (OSError, ValueError):
            continue
        return int(quota) / int(period) if quota.isdigit() and int(period) else math.inf  # "max" and -1 are no limit
    return math.inf
