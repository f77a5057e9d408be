"""The states of a rank's random generators in a checkpoint, also for ranks that the run did not have."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from lightning_turbo._distributed import rank_and_size
from lightning_turbo._random import same_random_numbers, set_shared_state, shared_state
from lightning_turbo.data.sample_seeds import seeds_of

__all__ = ["derive_random_states", "random_states", "set_random_states", "tell_of_random_states"]


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global RNGs, and of the generator of a CUDA device."""
    state = shared_state()
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_states(device: torch.device, state: dict[str, Any]) -> None:
    """Set the generators to what ``random_states`` or ``derive_random_states`` returned."""
    set_shared_state(state)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "cuda" and "seed" in state:
        torch.cuda.manual_seed(state["seed"])


def derive_random_states(first: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return states for a rank that the run did not have, which follow from those of rank 0 and its own number."""
    # From a saved state and not from a seed, because a checkpoint of another epoch has to give other numbers.
    digest = hashlib.blake2b(first["torch"].numpy().tobytes(), digest_size=4).digest()
    for_torch, for_python, for_numpy = seeds_of(int.from_bytes(digest, "little"), 0, rank, "rank")
    with same_random_numbers():
        torch.default_generator.manual_seed(for_torch)
        random.seed(for_python)
        np.random.seed(for_numpy)
        return {**shared_state(), "seed": for_torch}


def tell_of_random_states(ranks: int) -> list[str]:
    """Return what to tell of the random states of a run that had so many ranks; nothing if there are as many now."""
    size = rank_and_size()[1]
    if ranks > size:
        return [f"The random states of the last {ranks - size} of {ranks} ranks are dropped."]
    if ranks < size:
        return [f"The random states of the last {size - ranks} of {size} ranks follow from those of rank 0."]
    return []
