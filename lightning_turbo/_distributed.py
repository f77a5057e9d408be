"""What the ranks of one run tell one another when a checkpoint is written."""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch

from lightning_turbo.errors import TurboWarning

__all__ = ["gather_for_checkpoint", "rank_and_size"]

PATIENCE = 10.0  # seconds that a rank waits for others that may never come, and for what they send
SIGNAL_HANDLER = "_slurm_sigusr_handler_fn"  # Lightning's, which writes a checkpoint wherever a signal finds the rank
_missed = float("-inf")
_group: Any = None
# Groups are never let go of: to end one may wait for ever, for a thread of gloo's that waits for Python's lock to let
# go of a tensor (seen with torch 2.6).
_groups: list[Any] = []


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process and how many there are; 0 and 1 without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def gather_for_checkpoint(own: Any, name: str, place: int | None = None, *, to_all: bool = False) -> list[Any]:
    """Return what every rank has on rank 0, which writes checkpoints; on others what they have, for each rank.

    A rank that an error or a signal has brought here may be alone: the others have died, or wait for it in the middle
    of a step. Then it goes on without them, so that the checkpoint is written.

    Args:
        own: What this rank has; tensors on the host.
        name: What it is, in a few words.
        place: The batch at which this rank stands, if known; ranks that were stopped at different ones have nothing in
            common.
        to_all: Return what every rank has on all of them.

    Returns:
        One entry for each rank; only ``own`` if not all of them are at this place.

    Warns:
        TurboWarning: In that case, on rank 0.

    Note:
        A collective call with several ranks. It goes from host to host: NCCL would take the memory of all on each GPU.
        Its group is its own, because in that of the run another collective may be under way.
    """
    rank, size = rank_and_size()
    if size == 1:
        return [own]
    may_be_alone = _may_be_alone()
    if may_be_alone and time.monotonic() - _missed <= PATIENCE:
        ranks, missing = [own], "which did not come a moment ago"
    else:
        label = name, place if may_be_alone else None
        ranks, missing = _gather(own, label, PATIENCE if may_be_alone else None, to_all)
    if missing and rank == 0:
        warnings.warn(
            f"The checkpoint is written with the {name} of rank 0 alone, without those of the other ranks, {missing}. "
            "A run can go on from it, but does not equal one that was never stopped.",
            TurboWarning,
            stacklevel=3,
        )
    return ranks


def _gather(own: Any, label: tuple[str, Any], limit: float | None, to_all: bool) -> tuple[list[Any], str]:
    """Return what the ranks have, and why that is only ``own``; an empty text if it is of all."""
    global _missed
    rank, size = rank_and_size()
    try:
        group = _meet(limit)
        labels: list[Any] = [None] * size
        torch.distributed.all_gather_object(labels, label, group=group)
        if any(other != label for other in labels):
            return [own], "which are at other batches"
        ranks = [own] * size
        if to_all:
            torch.distributed.all_gather_object(ranks, own, group=group)
        else:
            torch.distributed.gather_object(own, ranks if rank == 0 else None, group=group)
    except RuntimeError:
        if limit is None:
            raise
        _missed = time.monotonic()
        return [own], f"which did not come within {PATIENCE:g} s"
    return ranks, ""


def _meet(limit: float | None) -> Any:
    """Return a group of gloo's when all ranks are here; one that they did not come to is not used again.

    Args:
        limit: Seconds to wait for the others; ``None`` for as long as torch does.

    Raises:
        RuntimeError: If they did not come.
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
    """Whether the process groups have not been destroyed since this one was made."""
    try:
        return torch.distributed.get_rank(group) >= 0
    except ValueError:
        return False


def _may_be_alone() -> bool:
    """Whether an error, or a signal in the middle of a step, has brought this rank here."""
    if sys.exc_info()[1] is not None:
        return True
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != SIGNAL_HANDLER:
        frame = frame.f_back
    return frame is not None
