"""A DALI pipeline that is built for one rank, with DALI's iterator over it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_turbo.data.dali.files import FilePipeline

if TYPE_CHECKING:
    from lightning_turbo.data.dali.loader import DALILoader

__all__ = ["BuiltPipeline", "Placement"]

BEGINNING = {"checkpoint": None, "passes": 0, "taken": 0}


class Placement(NamedTuple):
    """What a built pipeline is bound to."""

    rank: int
    world_size: int
    device_id: int | None
    """The CUDA device, or ``None`` for the CPU alone."""
    seed: int


class BuiltPipeline:
    """A built pipeline, DALI's iterator over it, and how many epochs and batches were taken from it.

    Args:
        loader: The loader, whose settings it is built with.
        placement: Rank, number of ranks, device and seed.
        epoch: Number of the epoch that it is built for.
        saved: What ``snapshot`` returned, to continue there.

    Raises:
        ValueError: If its reader is not sharded by rank, does not pad its last batch or cannot be told, or the batches
            are none.
    """

    def __init__(
        self, loader: DALILoader, placement: Placement, epoch: int, saved: Mapping[str, Any] = BEGINNING
    ) -> None:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        self.placement, self.epoch, self._partial = placement, epoch, loader.last_batch == "partial"
        self.passes, self.taken = saved["passes"], saved["taken"]
        pipeline = _build(loader, placement, epoch, saved["checkpoint"])
        reader = _choose_reader(pipeline.reader_meta(), loader.reader, loader.batches)
        self._meta = pipeline.reader_meta(reader) if reader else {}
        self.samples: int | None = self._meta.get("epoch_size")
        _check_reader(reader, self._meta, placement, loader.batch_size)
        self._names = [str(number) for number in range(pipeline.num_outputs)]
        # DALI's own "partial" gives a rank that is one sample short an empty batch, whose mean loss is NaN.
        policy = LastBatchPolicy.DROP if loader.last_batch == "drop" and reader else LastBatchPolicy.FILL
        self._iterator = DALIGenericIterator(
            [pipeline], self._names, reader_name=reader, last_batch_policy=policy, prepare_first_batch=False
        )
        self._batches = loader.batches or len(self._iterator)
        if not self._batches:
            raise ValueError(
                f"last_batch='drop' leaves no batch: {self.samples} samples over {placement.world_size} ranks are "
                f"fewer a rank than batch_size={loader.batch_size}. Use a smaller batch_size or last_batch='partial'."
            )
        if self.taken == self._batches:
            next(self._iterator, None)  # a source has to see its end before a restored pipeline can be reset

    def __len__(self) -> int:
        return self._batches

    def take(self) -> list[Tensor]:
        """Return the next batch.

        Raises:
            ValueError: If the pipeline ends before the batches that were announced.
        """
        batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(
                f"The pipeline ended after {self.taken} batches of {self._batches}. Pass batches= with the number that "
                "its source has in an epoch, and let the source begin again: an iterable or generator function by "
                "external_source(cycle='raise'), a callable after its StopIteration."
            )
        self.taken += 1
        kept = self._count_kept() if self._partial and self._meta and self.taken == self._batches else None
        return [_as_label(batch[0][name])[:kept] for name in self._names]

    def rewind(self) -> None:
        """Go from the end of an epoch to the beginning of the next."""
        self._iterator.reset()
        self.passes, self.taken = self.passes + 1, 0

    def snapshot(self) -> dict[str, Any]:
        """Return DALI's checkpoint and the counters around it."""
        (checkpoint,) = self._iterator.checkpoints()
        return {"checkpoint": checkpoint, "epoch": self.epoch, "passes": self.passes, "taken": self.taken}

    def _count_kept(self) -> int:
        """Return how many samples of the last batch of an epoch are not padding."""
        ranks, samples = self._meta["number_of_shards"], self._meta["epoch_size"]
        shard = (self._meta["shard_id"] + (0 if self._meta["stick_to_shard"] else self.passes)) % ranks
        size = (shard + 1) * samples // ranks - shard * samples // ranks
        # A rank one sample short keeps one that is repeated: an empty batch would stop the step.
        return max(1, size - (self._batches - 1) * self._iterator.batch_size)


def _build(loader: DALILoader, placement: Placement, epoch: int, checkpoint: bytes | None) -> Any:
    """Call the definition with what it takes, and build the pipeline that it returns."""
    rank, world_size, device_id, seed = placement
    definition, count = loader.pipeline, None
    if isinstance(definition, FilePipeline):
        count, definition = definition.outputs, definition.definition(world_size)
    arguments = {
        "shard_id": rank,
        "num_shards": world_size,
        "device": "cpu" if device_id is None else "gpu",
        "order_seed": _draw_seed(seed, epoch),
        **loader.arguments,
    }
    known = inspect.signature(definition).parameters
    if unknown := sorted(set(loader.arguments) - set(known)):
        raise TypeError(f"arguments={loader.arguments!r}: the pipeline function takes no {unknown}, but {list(known)}.")
    pipeline = definition(
        batch_size=loader.batch_size,
        num_threads=loader.num_threads,
        device_id=device_id,
        prefetch_queue_depth=loader.prefetch,
        exec_dynamic=True,  # batches share DALI's memory, which lives as long as they do
        seed=_draw_seed(seed, epoch, rank + 1),
        enable_checkpointing=True,
        checkpoint=checkpoint,
        **{name: value for name, value in arguments.items() if name in known},
    )
    pipeline.build()
    _check_outputs(loader.outputs, count or pipeline.num_outputs)
    return pipeline


def _check_outputs(names: tuple[str, ...] | None, count: int) -> None:
    if names is not None and len(names) != count:
        raise ValueError(f"outputs={names!r} are {len(names)} names, but the pipeline has {count} outputs.")


def _draw_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def _choose_reader(readers: Mapping[str, Any], reader: str | None, batches: int | None) -> str | None:
    """Return the name of the reader that counts the samples; ``None`` if there is none."""
    if reader is not None and reader not in readers:
        raise ValueError(f"reader={reader!r}: the pipeline has the readers {sorted(readers)}.")
    if bool(readers) == (batches is not None):
        raise ValueError(
            f"batches={batches}, and the pipeline has the readers {sorted(readers)}: pass batches=, the length of an "
            "epoch, if there is no reader to count the samples, and only then."
        )
    if reader is None and len(readers) > 1:
        raise ValueError(f"The pipeline has the readers {sorted(readers)}: choose the one that counts with reader=.")
    return reader or next(iter(readers), None)


def _check_reader(name: str | None, meta: Mapping[str, Any], placement: Placement, batch_size: int) -> None:
    """Refuse a reader that reads another shard, or whose epochs run into one another."""
    if not meta:
        return
    rank, ranks, samples = placement.rank, placement.world_size, meta["epoch_size"]
    if (meta["number_of_shards"], meta["shard_id"]) != (ranks, rank):
        raise ValueError(
            f"The reader {name!r} has num_shards={meta['number_of_shards']} and shard_id={meta['shard_id']}, but this "
            f"is rank {rank} of {ranks}. Let the definition take the arguments shard_id and num_shards and hand them "
            "to the reader."
        )
    if not meta["pad_last_batch"] and samples % (ranks * batch_size):
        raise ValueError(
            f"The reader {name!r} has pad_last_batch=False, and {samples} samples are not a multiple of {ranks} ranks "
            f"times batch_size={batch_size}: epochs would run into one another. Give the reader pad_last_batch=True."
        )


def _as_label(tensor: Tensor) -> Tensor:
    """Return one integer a sample as int64 of shape (batch,); anything else as it is."""
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.reshape(len(tensor)).to(torch.int64) if whole and tensor.numel() == len(tensor) else tensor
