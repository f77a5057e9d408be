"""Builds a pipeline function for a ``DALILoader``, and tracks its position in the epoch."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import expect

__all__ = [
    "Built", "BuiltPipeline", "Placement", "Settings", "check_reader", "draw_seed", "explained", "own_arguments",
    "pipeline_arguments",
]  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """Where a pipeline runs: its shard, and a CUDA device or ``None`` for the CPU."""

    rank: int
    world_size: int
    device_id: int | None


@dataclass(frozen=True)
class Settings:
    """The user's settings for the pipeline; constant over the lifetime of a loader."""

    batch_size: int
    drop_last: bool
    prefetch: int
    num_threads: int | None
    arguments: Mapping[str, Any]


class Built(ABC):
    """What a ``DALILoader`` reads from, built for an epoch or from a ``snapshot`` in ``saved``.

    A ``DALILoader`` creates it at the first batch or ``len``, and drops it in ``close``, after an error, or when an
    epoch begins that it cannot reach. It was built for ``epoch``; since then it has completed ``passes`` epochs and
    returned ``taken`` batches of the current one.

    Args:
        meta: DALI's metadata of the reader.
        settings: The user's settings.
        placement: Where it runs.
        epoch: The epoch for which it is built.
        saved: A snapshot, or the one of a beginning.
    """

    def __init__(
        self, meta: Mapping[str, Any], settings: Settings, placement: Placement, epoch: int, saved: Mapping[str, Any]
    ) -> None:
        self.samples: int = meta["epoch_size"]
        self.placement = placement
        self.epoch = epoch
        self.passes, self.taken = saved["passes"], saved["taken"]
        self.settings = settings
        self._meta = meta

    @property
    def read_in_an_epoch(self) -> int:
        """Number of batches of a rank in an epoch, including one that ``drop_last`` drops."""
        return math.ceil(math.ceil(self.samples / self.placement.world_size) / self.settings.batch_size)

    def __len__(self) -> int:
        if self.settings.drop_last:
            return self.samples // self.placement.world_size // self.settings.batch_size
        return self.read_in_an_epoch

    def take(self) -> list[Tensor]:
        """Return the next batch, without padding in the last one."""
        tensors = [as_label(tensor) for tensor in self._read()]
        self.taken += 1
        if self.settings.drop_last or self.taken < len(self):
            return tensors
        kept = count_kept(self._meta, self.passes, len(self), self.settings.batch_size)
        return [tensor[:kept] for tensor in tensors]

    def rewind(self) -> None:
        """Advance from the end of an epoch to the start of the next."""
        self._rewind()
        self.passes, self.taken = self.passes + 1, 0

    def snapshot(self) -> dict[str, Any]:
        """Return DALI's checkpoint and the counters."""
        counters = {"epoch": self.epoch, "passes": self.passes, "taken": self.taken}
        return {"checkpoint": self._checkpoint(), **counters}

    def close(self) -> None:  # noqa: B027 - a pipeline ends with its last reference
        """End what is under way."""

    @abstractmethod
    def _read(self) -> list[Tensor]:
        """Return the next batch, padded if it is the last one."""

    @abstractmethod
    def _rewind(self) -> None:
        """Advance DALI from the end of an epoch to the start of the next."""

    @abstractmethod
    def _checkpoint(self) -> Any:
        """Return DALI's own state."""


class BuiltPipeline(Built):
    """A pipeline with DALI's iterator."""

    def __init__(
        self, pipeline: Any, settings: Settings, placement: Placement, epoch: int, saved: Mapping[str, Any]
    ) -> None:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        reader, meta = _check_readers(pipeline.reader_meta(), placement)
        super().__init__(meta, settings, placement, epoch, saved)
        self._names = [str(number) for number in range(pipeline.num_outputs)]
        # With PARTIAL, DALI gives an empty batch, whose mean loss is NaN, to a rank that is one sample short.
        policy = LastBatchPolicy.DROP if settings.drop_last else LastBatchPolicy.FILL
        self._iterator = DALIGenericIterator(
            [pipeline], self._names, reader_name=reader, last_batch_policy=policy, prepare_first_batch=False
        )
        if self.taken == len(self):
            next(self._iterator, None)  # a restored iterator must raise StopIteration before its reset

    def _read(self) -> list[Tensor]:
        (batch,) = next(self._iterator)
        return [batch[name] for name in self._names]

    def _rewind(self) -> None:
        self._iterator.reset()

    def _checkpoint(self) -> Any:
        (checkpoint,) = self._iterator.checkpoints()
        return checkpoint


def own_arguments(
    function: Callable[..., Any], settings: Settings, placement: Placement, seed: int, epoch: int
) -> dict[str, Any]:
    """Return those of the loader's own arguments that a user's function accepts, and the user's."""
    known = inspect.signature(function).parameters
    others = sorted(set(settings.arguments) - set(known))
    expect(not others, "arguments", others, f"arguments of the function, {list(known)}", TypeError)
    filled = {
        "shard_id": placement.rank,
        "num_shards": placement.world_size,
        "device": "cpu" if placement.device_id is None else "gpu",
        "order_seed": draw_seed(seed, epoch),
    }
    return {name: value for name, value in filled.items() if name in known} | dict(settings.arguments)


def pipeline_arguments(
    function: Callable[..., Any], settings: Settings, placement: Placement, seed: int, epoch: int
) -> dict[str, Any]:
    """Return the arguments of DALI and those that the pipeline function accepts."""
    return {
        "batch_size": settings.batch_size,
        "device_id": placement.device_id,
        "prefetch_queue_depth": settings.prefetch,
        "exec_dynamic": True,  # batches share DALI's memory and keep it alive
        "seed": draw_seed(seed, epoch, placement.rank + 1),
        "enable_checkpointing": True,
        **own_arguments(function, settings, placement, seed, epoch),
    }


def count_kept(meta: Mapping[str, Any], passes: int, batches: int, batch_size: int) -> int:
    """Return the number of samples in the last batch of an epoch, without padding.

    Args:
        meta: DALI's metadata of the reader.
        passes: Number of epochs that the reader has completed.
        batches: Number of batches in an epoch.
        batch_size: Samples per batch.
    """
    ranks = meta["number_of_shards"]
    samples = meta["epoch_size"]
    # After every epoch, DALI gives each rank the next shard, unless the reader sticks to its own.
    shard = (meta["shard_id"] + (0 if meta["stick_to_shard"] else passes)) % ranks
    size = (shard + 1) * samples // ranks - shard * samples // ranks
    # A rank that is one sample short keeps a duplicate, because an empty batch would make its step fail.
    return max(1, size - (batches - 1) * batch_size)


def draw_seed(*numbers: int) -> int:
    """Return a seed that is derived from the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def _check_readers(readers: Mapping[str, Mapping[str, Any]], placement: Placement) -> tuple[str, Mapping[str, Any]]:
    """Return a reader that counts the samples, after checking all of them."""
    expect(readers, "pipeline", "no reader", "a pipeline function with a reader, because without it has no length")
    name, first = next(iter(readers.items()))
    for other, meta in readers.items():
        check_reader(other, meta, placement, first["epoch_size"])
    return name, first


def check_reader(name: str, meta: Mapping[str, Any], placement: Placement, samples: int) -> None:
    """Raise an error for a reader of another shard, with another number of samples, or whose epochs overlap."""
    expected = {
        "shard_id": placement.rank,
        "number_of_shards": placement.world_size,
        "pad_last_batch": True,
        "epoch_size": samples,
    }
    got = {key: meta[key] for key in expected}
    if got != expected:
        raise ValueError(
            f"Expected the reader {name!r} to have {expected}, got {got}. Add the arguments shard_id and num_shards "
            "to the pipeline function, and pass them and pad_last_batch=True to each reader, over as many samples."
        )


def as_label(tensor: Tensor) -> Tensor:
    """Return one integer per sample as int64 of shape (batch,), and any other tensor unchanged."""
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.reshape(len(tensor)).to(torch.int64) if whole and tensor.numel() == len(tensor) else tensor


def explained(error: RuntimeError, placement: Placement, advice: str = "") -> RuntimeError:
    """Return an error of DALI together with its cause and advice.

    Args:
        error: The error that DALI raised.
        placement: Where the pipeline runs.
        advice: The caller's advice.
    """
    said = str(error)
    if error.__cause__ is not None:  # dynamic mode chains the actual error
        said = f"{said}: {error.__cause__}"
    if placement.device_id is None and "CUDA" in said and "driver" in said:
        advice = (
            "The pipeline uses a GPU operator (device='gpu' or 'mixed'), but this loader is on the CPU. Add a "
            "parameter device to the pipeline function and pass it to its operators, or run it with a GPU."
        )
    return RuntimeError(f"{said.rstrip()}\n{advice}" if advice else said)
