"""Collectives among the ranks of a run, on the host: states for checkpoints."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from lightning_turbo.errors import TurboWarning

__all__ = [
    "data_rank_and_size", "error_under_way", "gather_for_checkpoint", "host_group", "rank_and_size",
]  # fmt: skip

# The run's group and the gloo group made for it. A process may end one group and train in another.
_group: tuple[Any, Any] = (None, None)


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the world size; 0 and 1 without ``torch.distributed``."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def data_rank_and_size() -> tuple[int, int]:
    """Return the rank of this process among the ranks with samples of their own, and the number of these.

    Tensor-parallel peers need the same samples. Lightning's ``ModelParallelStrategy`` makes a device mesh with the axes
    ``data_parallel`` and ``tensor_parallel``, and its own sampler takes the place in the first one.
    """
    rank, size = rank_and_size()
    groups = torch.distributed.distributed_c10d._world.pg_names if size > 1 else ()
    # torch names the process groups of an axis after it, but takes the group of all ranks for an axis that spans them:
    # then the other axis has groups of one rank. The last groups are those of the latest mesh.
    for group in reversed([*groups]):
        if group.group_desc == "mesh_tensor_parallel" and group.size() == 1:
            break
        if group.group_desc == "mesh_data_parallel":
            return group.rank(), group.size()
    return rank, size


def host_group() -> Any:
    """Return a gloo group of all ranks. The first call makes it and is collective.

    NCCL would need memory on each GPU and a blocking copy of its results. The group is separate from the run's own,
    even if that is gloo, because the run's group may be inside another collective.
    """
    global _group
    world = torch.distributed.group.WORLD
    if _group[0] is not world:
        _group = world, torch.distributed.new_group(backend="gloo")
    return _group[1]


def gather_for_checkpoint(own: Any, name: str, *, to_all: bool = False) -> list[Any]:
    """Gather the data of every rank on rank 0, which writes checkpoints. Collective if there are several ranks.

    While an exception is being handled, the other ranks may never arrive. This rank then does not wait for them, so
    that the checkpoint is still written. Lightning raises its ``SIGTERMException`` on all ranks.

    Args:
        own: The data of this rank; tensors on the host.
        name: What the data are, for the warning.
        to_all: Gather on all ranks.

    Returns:
        One entry per rank (copies of ``own`` on ranks that do not gather), or ``[own]`` while an exception is being
            handled.

    Warns:
        TurboWarning: In that case, on rank 0.
    """
    rank, size = rank_and_size()
    if size == 1:
        return [own]
    if (error := error_under_way()) is not None:
        if rank == 0:
            warnings.warn(
                f"The checkpoint holds the {name} of rank 0 only, because a {type(error).__name__} was raised, so the "
                "other ranks may not take part. A run can resume from the checkpoint, but will differ from one that "
                "never stopped.",
                TurboWarning,
                stacklevel=3,
            )
        return [own]
    ranks = [own] * size
    if to_all:
        torch.distributed.all_gather_object(ranks, own, group=host_group())
    else:
        torch.distributed.gather_object(own, ranks if rank == 0 else None, group=host_group())
    return ranks


def error_under_way() -> BaseException | None:
    """Return the exception that only this rank may be handling; ``SIGTERMException`` is raised on all ranks."""
    error = sys.exc_info()[1]
    # Compared by name, because this layer does not know which copy of Lightning the class is from.
    return None if type(error).__name__ == "SIGTERMException" else error
