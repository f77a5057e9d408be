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

PATIENCE = 10.0  # seconds that a rank waits for others that may never come
TRANSFER = 300.0  # seconds for what they send then
SIGNAL_HANDLER = "_slurm_sigusr_handler_fn"  # Lightning's, which writes a checkpoint wherever a signal finds the rank
_missed = -PATIENCE


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process and how many there are; 0 and 1 without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def gather_for_checkpoint(own: Any, name: str, place: int | None = None) -> list[Any]:
    """Return what every rank has on rank 0, which writes checkpoints; on others what they have, for each rank.

    A rank that an error or a signal has brought here may be alone: the others have died, or wait for it in the middle
    of a step. Then it goes on without them, so that the checkpoint is written.

    Args:
        own: What this rank has; tensors on the host.
        name: What it is, in a few words.
        place: The batch of the run at which this rank stands, if known; ranks at different ones have nothing in common.

    Returns:
        One entry for each rank; only ``own`` if not all of them are at this place.

    Warns:
        TurboWarning: In that case, on rank 0.

    Note:
        A collective call with several ranks. It goes from host to host: NCCL would take the memory of all on each GPU.
        Its groups are made anew, because in that of the run another collective may be under way.
    """
    global _missed
    rank, size = rank_and_size()
    if size == 1:
        return [own]
    may_be_alone = _may_be_alone()
    why = "which did not come a moment ago"
    if not may_be_alone or time.monotonic() - _missed > PATIENCE:
        try:
            places: list[Any] = [None] * size
            group = _group(PATIENCE if may_be_alone else None)
            torch.distributed.all_gather_object(places, (name, place), group=group)
            torch.distributed.destroy_process_group(group)
            if all(other == places[0] for other in places):
                ranks = [own] * size
                group = _group(TRANSFER if may_be_alone else None)
                torch.distributed.gather_object(own, ranks if rank == 0 else None, group=group)
                torch.distributed.destroy_process_group(group)
                return ranks
            why = "which are at other batches"
        except RuntimeError:
            if not may_be_alone:
                raise
            _missed = time.monotonic()
            why = f"which did not come within {PATIENCE:g} s"
    if rank == 0:
        warnings.warn(
            f"The checkpoint is written with the {name} of rank 0 alone, without those of the other ranks, {why}. A "
            "run can go on from it, but does not equal one that was never stopped.",
            TurboWarning,
            stacklevel=3,
        )
    return [own]


def _group(limit: float | None) -> Any:
    return torch.distributed.new_group(backend="gloo", timeout=None if limit is None else timedelta(seconds=limit))


def _may_be_alone() -> bool:
    """Whether an error, or a signal in the middle of a step, has brought this rank here."""
    if sys.exc_info()[1] is not None:
        return True
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != SIGNAL_HANDLER:
        frame = frame.f_back
    return frame is not None
