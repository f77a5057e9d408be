"""Each rank's loaders go on where they stood: Lightning's checkpoints hold the states of rank 0's alone."""

from __future__ import annotations

import pickle
from typing import Any

from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo.callbacks.prefetch_next_epoch import PrefetchNextEpoch

__all__ = ["keep_states_of_ranks", "take_states_of_rank"]

KEY = "lightning_turbo.loaders"


def keep_states_of_ranks(module: Any, checkpoint: dict[str, Any]) -> None:
    """Add the states of every rank's loaders to a checkpoint, if not all are the same. A collective call.

    Orders differ from rank to rank where samplers or loaders draw from generators that were seeded differently.

    Args:
        module: The LightningModule of the Trainer that writes it.
        checkpoint: What it dumped.
    """
    own = [place[name] for place, name in _places(module, checkpoint)]
    if own and rank_and_size()[1] > 1:
        ranks = gather_for_checkpoint(own, "loaders' states", module.trainer.fit_loop.total_batch_idx)
        if len({pickle.dumps(states) for states in ranks}) > 1:
            checkpoint[KEY] = ranks


def take_states_of_rank(module: Any, checkpoint: dict[str, Any]) -> None:
    """Put this rank's states in the place of rank 0's, if as many ranks wrote the checkpoint.

    Args:
        module: The LightningModule of the Trainer that is about to restore it.
        checkpoint: What was read; changed in place.
    """
    ranks = checkpoint.get(KEY, [])
    rank, size = rank_and_size()
    if len(ranks) == size:
        for (place, name), state in zip(_places(module, checkpoint), ranks[rank], strict=False):
            place[name] = state


def _places(module: Any, checkpoint: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where a checkpoint has states of training loaders: those of the epoch, and of one that was begun early."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    callbacks = checkpoint.get("callbacks", {})
    early = [each.state_key for each in module.trainer.callbacks if isinstance(each, PrefetchNextEpoch)]
    places = [(loop, "combined_loader"), *((callbacks, key) for key in early)]
    return [(place, name) for place, name in places if name in place]
