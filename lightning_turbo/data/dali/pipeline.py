"""``BuiltPipeline``: a DALI pipeline built for one rank, with DALI's iterator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import expect
from lightning_turbo.data.dali.files import FilePipeline

if TYPE_CHECKING:
    from lightning_turbo.data.dali.loader import DALILoader

__all__ = ["BuiltPipeline", "Placement"]

BEGINNING = {"checkpoint": None, "passes": 0, "taken": 0}
Placement = tuple[int, int, int | None]
"""Rank, number of ranks, and CUDA device or ``None`` for the CPU: what a built pipeline is bound to."""


class BuiltPipeline:
    """A pipeline built with the settings of ``loader`` for an epoch, or to continue at the ``snapshot`` in ``saved``.

    It holds DALI's iterator, and counts the epochs and batches taken from it.
    """

    def __init__(
        self, loader: DALILoader, placement: Placement, epoch: int, saved: Mapping[str, Any] = BEGINNING
    ) -> None:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        self.placement, self.epoch, self._partial = placement, epoch, loader.last_batch == "partial"
        self.passes, self.taken = saved["passes"], saved["taken"]
        pipeline = _build(loader, placement, epoch, saved["checkpoint"])
        reader = _choose_reader(sorted(pipeline.reader_meta()), loader.reader)
        self._meta = pipeline.reader_meta(reader)
        self.samples: int = self._meta["epoch_size"]
        _check_reader(reader, self._meta, placement)
        self._names = [str(number) for number in range(pipeline.num_outputs)]
        # DALI's own PARTIAL gives an empty batch, whose mean loss is NaN, to a rank that is one sample short.
        policy = LastBatchPolicy.DROP if loader.last_batch == "drop" else LastBatchPolicy.FILL
        self._iterator = DALIGenericIterator(
            [pipeline], self._names, reader_name=reader, last_batch_policy=policy, prepare_first_batch=False
        )
        if self.taken == len(self):
            next(self._iterator, None)  # a restored iterator can only be reset after it has raised StopIteration

    def __len__(self) -> int:
        return len(self._iterator)

    def take(self) -> list[Tensor]:
        """Return the next batch, without the padding of the last one."""
        (batch,) = next(self._iterator)
        self.taken += 1
        kept = self._count_kept() if self._partial and self.taken == len(self) else None
        return [_as_label(batch[name])[:kept] for name in self._names]

    def rewind(self) -> None:
        """Go from the end of an epoch to the start of the next."""
        self._iterator.reset()
        self.passes, self.taken = self.passes + 1, 0

    def snapshot(self) -> dict[str, Any]:
        """Return DALI's checkpoint and the counters."""
        (checkpoint,) = self._iterator.checkpoints()
        return {"checkpoint": checkpoint, "epoch": self.epoch, "passes": self.passes, "taken": self.taken}

    def _count_kept(self) -> int:
        """Return the number of samples in the last batch of the epoch that are not padding."""
        ranks, samples = self._meta["number_of_shards"], self._meta["epoch_size"]
        # DALI hands each rank the next shard after every epoch, unless it sticks to its own.
        shard = (self._meta["shard_id"] + (0 if self._meta["stick_to_shard"] else self.passes)) % ranks
        size = (shard + 1) * samples // ranks - shard * samples // ranks
        # A rank one sample short keeps a repeated one: with an empty batch its step would fail.
        return max(1, size - (len(self) - 1) * self._iterator.batch_size)


def _build(loader: DALILoader, placement: Placement, epoch: int, checkpoint: bytes | None) -> Any:
    """Call the pipeline function with the arguments that it takes, and build the pipeline."""
    rank, world_size, device_id = placement
    definition: Any = loader.pipeline
    if isinstance(definition, FilePipeline):
        definition = definition.definition(world_size)
    known = inspect.signature(definition).parameters
    others = sorted(set(loader.arguments) - set(known))
    expect(not others, "arguments", others, f"arguments of the pipeline function, {list(known)}", TypeError)
    filled = {
        "shard_id": rank,
        "num_shards": world_size,
        "device": "cpu" if device_id is None else "gpu",
        "order_seed": _draw_seed(loader.seed, epoch),
    }
    pipeline = definition(
        batch_size=loader.batch_size,
        num_threads=loader.num_threads,
        device_id=device_id,
        prefetch_queue_depth=loader.prefetch,
        exec_dynamic=True,  # batches share DALI's memory, which lives as long as they do
        seed=_draw_seed(loader.seed, epoch, rank + 1),
        enable_checkpointing=True,
        checkpoint=checkpoint,
        **{name: value for name, value in filled.items() if name in known},
        **loader.arguments,
    )
    pipeline.build()
    return pipeline


def _draw_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def _choose_reader(readers: list[str], reader: str | None) -> str:
    """Return the name of the reader that counts the samples."""
    if reader is None and len(readers) == 1:
        return readers[0]
    what = f"the one of the readers {readers} that counts the samples; a pipeline without a reader has no length"
    expect(reader in readers, "reader", reader, what)
    return str(reader)


def _check_reader(name: str, meta: Mapping[str, Any], placement: Placement) -> None:
    """Refuse a reader of another shard, and one whose epochs run into each other."""
    expected = {"shard_id": placement[0], "number_of_shards": placement[1], "pad_last_batch": True}
    got = {key: meta[key] for key in expected}
    if got != expected:
        raise ValueError(
            f"Expected the reader {name!r} to have {expected}, got {got}. Add the arguments shard_id and num_shards to "
            "the pipeline function, and pass them and pad_last_batch=True to the reader."
        )


def _as_label(tensor: Tensor) -> Tensor:
    """Return one integer per sample as int64 of shape (batch,), and any other tensor unchanged."""
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.reshape(len(tensor)).to(torch.int64) if whole and tensor.numel() == len(tensor) else tensor
