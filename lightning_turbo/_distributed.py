"""Collectives among the ranks of a run for checkpoints."""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch

from lightning_turbo.errors import TurboWarning

__all__ = ["gather_for_checkpoint", "rank_and_size"]

PATIENCE = 10.0  # seconds that a rank waits for others that may never come, and for their data
SIGNAL_HANDLER = "_slurm_sigusr_handler_fn"  # Lightning's, which saves a checkpoint at whatever line the signal arrives
_missed = float("-inf")
_group: Any = None
# Groups are kept forever: destroying one can deadlock with a gloo thread that needs the GIL to free a tensor (seen with
# torch 2.6).
_groups: list[Any] = []


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the world size; 0 and 1 without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def gather_for_checkpoint(own: Any, name: str, place: int | None = None, *, to_all: bool = False) -> list[Any]:
    """Gather the data of every rank on rank 0, which writes checkpoints.

    After an error or a signal this rank may be alone: the others have died, or wait for it within a step. Then it
    continues without them, so that the checkpoint is written.

    Args:
        own: The data of this rank; tensors on the host.
        name: A few words for the data, for the warning.
        place: Number of this rank's batch, if known; data of ranks that stopped at different batches do not belong
            together.
        to_all: Gather on all ranks.

    Returns:
        One entry for each rank (copies of ``own`` on ranks that do not gather); ``[own]`` if not all ranks are there.

    Warns:
        TurboWarning: In that case, on rank 0.

    Note:
        A collective call with several ranks, on gloo: NCCL would need memory for all ranks' data on each GPU. It has
        a group of its own, because the run's may be in another collective.
    """
    rank, size = rank_and_size()
    if size == 1:
        return [own]
    may_be_alone = _may_be_alone()
    if may_be_alone and time.monotonic() - _missed <= PATIENCE:
        ranks, missing = [own], "they did not come a moment ago"
    else:
        label = name, place if may_be_alone else None
        ranks, missing = _gather(own, label, PATIENCE if may_be_alone else None, to_all)
    if missing and rank == 0:
        warnings.warn(
            f"The checkpoint holds the {name} of rank 0 only; those of the other ranks are lost: {missing}. A run can "
            "resume from it, but will differ from one that never stopped.",
            TurboWarning,
            stacklevel=3,
        )
    return ranks


def _gather(own: Any, label: tuple[str, Any], limit: float | None, to_all: bool) -> tuple[list[Any], str]:
    """Return the data of the ranks, and the reason if that is only ``own``, else an empty text."""
    global _missed
    rank, size = rank_and_size()
    try:
        group = _meet(limit)
        labels: list[Any] = [None] * size
        torch.distributed.all_gather_object(labels, label, group=group)
        if any(other != label for other in labels):
            return [own], "they are at other batches"
        ranks = [own] * size
        if to_all:
            torch.distributed.all_gather_object(ranks, own, group=group)
        else:
            torch.distributed.gather_object(own, ranks if rank == 0 else None, group=group)
    except RuntimeError:
        if limit is None:
            raise
        _missed = time.monotonic()
        return [own], f"they did not come within {PATIENCE:g} s"
    return ranks, ""


def _meet(limit: float | None) -> Any:
    """Return a gloo group once all ranks are here; after a timeout it is not used again.

    Args:
        limit: Seconds to wait for the others; ``None``: torch's default.

    Raises:
        RuntimeError: If a rank did not come in time.
    """
    global _group
    timeout = None if limit is None else timedelta(seconds=limit)
    group: Any = _group
    _group = None
    fresh = group is None or not _is_known(group)
    if fresh:
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        _groups.append(group)
    torch.distributed.monitored_barrier(group, timeout=timeout)
    if not fresh or limit is None:  # a new one keeps its limit for all that it sends
        _group = group
    return group


def _is_known(group: Any) -> bool:
    """Whether this group still exists: ``destroy_process_group`` may have been called since."""
    try:
        return torch.distributed.get_rank(group) >= 0
    except ValueError:
        return False


def _may_be_alone() -> bool:
    """Whether this rank is here because of an error, or of a signal within a step."""
    if sys.exc_info()[1] is not None:
        return True
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != SIGNAL_HANDLER:
        frame = frame.f_back
    return frame is not None
