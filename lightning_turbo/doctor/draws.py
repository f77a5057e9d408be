"""Whether a dataset draws random numbers where worker processes load it: told by loading one sample in such a worker.

Nothing of the training process is touched: the worker has its own copy of the dataset and of all generators, and the
loader that starts it draws its seed from a generator of its own.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from lightning_turbo.data.sample_seeds import SeededDataset

__all__ = ["find_draws"]

SECONDS = 10
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


def find_draws(loader: Any) -> dict[str, tuple[str, ...]]:
    """Return which generators a sample's load draws from, as fields of ``Loader``.

    ``draws`` names them all; ``repeated`` those in the dataset that give every worker the same numbers. Both are empty
    where no worker loads, where the numbers belong to the samples, and where the load fails or takes over 10 seconds.
    """
    if not loader.num_workers or isinstance(loader.dataset, (IterableDataset, SeededDataset)):
        return {}
    changes = _load_in_workers(loader, min(loader.num_workers, 2))
    draws = {name: state for each in changes for name, state in each.items()}
    # What two workers' copies of a generator drew was the same if it left them in one state.
    same = set(changes[0].items()) & set(changes[1].items()) if len(changes) == 2 else set()
    return {"draws": tuple(draws), "repeated": tuple(name for name, _ in sorted(same))}


def _load_in_workers(loader: DataLoader[Any], workers: int) -> list[dict[str, str]]:
    """Load the first sample once in each of some workers; return the generators that it moved, and their states."""
    probe = _Probe(loader.worker_init_fn)
    with warnings.catch_warnings():  # about cores and forks, which the loader's own workers have told already
        warnings.simplefilter("ignore")
        try:
            twin = DataLoader(
                loader.dataset,
                batch_size=None,
                sampler=[0] * workers,
                num_workers=workers,
                timeout=SECONDS,
                multiprocessing_context=loader.multiprocessing_context,
                worker_init_fn=probe.begin,
                collate_fn=probe.compare,
                generator=torch.Generator(),
            )
            return list(twin)
        except Exception as error:  # whatever the user's dataset raises there, its own workers will raise, too
            traceback.clear_frames(error.__traceback__)  # they hold the workers, in a cycle with the error
            return []


class _Probe:
    """Compares, within a worker, the generators before and after it loads a sample.

    The worker's dataset is the loader's own, so that a ``worker_init_fn`` that seeds it finds it.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn
        self.before: dict[str, str] = {}

    def begin(self, worker_id: int) -> None:
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        self.before = _states()

    def compare(self, sample: Any) -> dict[str, str]:
        return {name: state for name, state in _states().items() if self.before.get(name, state) != state}


def _states() -> dict[str, str]:
    """Return a digest of each generator's state in this worker, by the generator's name."""
    states: dict[str, Any] = {
        "torch's generator": torch.get_rng_state().numpy(),
        "NumPy's generator": np.random.get_state(),
        "Python's generator": random.getstate(),
    }
    info: Any = get_worker_info()
    dataset = info.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    states |= _own_states("dataset", dataset)
    for name in ("transform", "transforms", "target_transform"):
        states |= _own_states(f"dataset.{name}", getattr(dataset, name, None))
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in states.items()}


def _own_states(path: str, owner: Any) -> dict[str, Any]:
    own = getattr(owner, "__dict__", {})
    return {f"{path}.{name}": _state_of(value) for name, value in own.items() if isinstance(value, GENERATORS)}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.get_state()
    return state.numpy() if isinstance(state, torch.Tensor) else state
