"""A pipeline that the user wrote, in motion: its own reader keeps the order, DALI's checkpoints the position."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lightning_turbo.data.dali.engine import Engine, Settings, dali
from lightning_turbo.data.dali.order import LastBatch

__all__ = ["DefinitionStream"]


class DefinitionStream:
    """Epochs of a pipeline definition: from its beginning, from the end of the last epoch, or from a checkpoint.

    Args:
        definition: A function made by DALI's ``pipeline_def``.
        settings: What the pipeline is built with.
        last_batch: ``"partial"``, ``"fill"`` or ``"drop"``.
        arguments: Further arguments of ``definition``.
        reader: Name of the reader that counts the samples; by default the only one.
        batches: Batches an epoch, for a pipeline without a reader.

    Raises:
        TypeError: If ``definition`` returns no pipeline.
        ValueError: If the reader is not sharded by rank, does not pad its last batch, or cannot be told.
    """

    def __init__(
        self,
        definition: Callable[..., Any],
        settings: Settings,
        last_batch: LastBatch,
        *,
        arguments: Mapping[str, Any],
        reader: str | None,
        batches: int | None,
    ) -> None:
        self.definition, self.settings, self.last_batch = definition, settings, last_batch
        self.arguments, self._reader, self._announced = dict(arguments), reader, batches
        self._engine: Engine | None = None
        self._taken = self._reader_epoch = 0
        self._build(epoch=0)

    def __len__(self) -> int:
        return self._batches

    def start(self, epoch: int, batch: int, saved: Mapping[str, Any] | None = None) -> None:
        """Go to a batch of an epoch.

        An epoch that was not finished is left by building the pipeline anew, with the seed of the new epoch.

        Args:
            epoch: Number of the epoch; it seeds a pipeline that is built anew.
            batch: Batches of it that were seen already; above 0 it needs ``saved``.
            saved: What ``snapshot`` returned at this place, or at the end of the epoch before.

        Raises:
            ValueError: If ``batch`` is above 0 and there is no checkpoint to go on from.
        """
        if saved is not None and (batch or saved["taken"] == self._batches):
            self._build(epoch=saved["built_for"], checkpoint=saved["checkpoint"])
            self._reader_epoch, self._taken = saved["reader_epoch"], saved["taken"]
        elif batch:
            raise ValueError(
                f"batch={batch} of epoch {epoch} has no checkpoint of the pipeline: the state was saved after close(), "
                "or by fewer ranks. Resume from another checkpoint."
            )
        if batch:
            return
        if self._engine is not None and self._taken == self._batches:
            self._next_epoch(self._engine)
        elif self._engine is None or self._used or self._built_for != epoch:
            self._build(epoch=epoch)

    def take(self) -> list[Tensor]:
        """Return the next batch.

        Raises:
            ValueError: If the pipeline ends before the batches that were announced.
        """
        if self._engine is None:
            raise RuntimeError("the pipeline is closed; iter() begins a new epoch.")
        self._used = True
        try:
            tensors = self._engine.take()
        except StopIteration:
            taken, self._taken = self._taken, 0
            self.close()
            raise ValueError(
                f"The pipeline ended after {taken} batches of {self._batches}. Give batches= the number that its "
                "source has in an epoch, and let the source begin again: an iterable or generator function by "
                "external_source(cycle='raise'), a callable after its StopIteration."
            ) from None
        except RuntimeError:
            self.close()
            raise
        self._taken += 1
        kept = self._kept()
        return tensors if kept is None else [tensor[:kept] for tensor in tensors]

    def snapshot(self) -> dict[str, Any] | None:
        """Return this rank's position, DALI's checkpoint and the counters around it; ``None`` once closed."""
        if self._engine is None:
            return None
        checkpoint = self._engine.pipeline.checkpoint() if self._used else self._beginning
        return {
            "checkpoint": checkpoint,
            "built_for": self._built_for,
            "reader_epoch": self._reader_epoch,
            "taken": self._taken,
        }

    def close(self) -> None:
        """Release the pipeline with its threads and memory."""
        self._engine = None

    def _build(self, *, epoch: int, checkpoint: bytes | None = None) -> None:
        """Build the pipeline, at the beginning or at DALI's checkpoint."""
        self.close()
        settings = self.settings
        offered = {
            "shard_id": settings.rank,
            "num_shards": settings.world_size,
            "device": "cpu" if settings.device_id is None else "gpu",
        }
        known = inspect.signature(self.definition).parameters
        pipeline = self.definition(
            **settings.for_pipeline(),
            seed=int(np.random.SeedSequence([settings.seed, epoch, settings.rank]).generate_state(1)[0] >> 1),
            enable_checkpointing=True,
            checkpoint=checkpoint,
            **{name: value for name, value in offered.items() if name in known and name not in self.arguments},
            **self.arguments,
        )
        if not isinstance(pipeline, dali().Pipeline):
            raise TypeError(
                f"{self.definition!r} returned {pipeline!r}, no DALI pipeline. "
                "Decorate it with nvidia.dali.pipeline_def."
            )
        engine = Engine(pipeline)
        self.outputs = engine.outputs
        self._count(pipeline.reader_meta())
        self._beginning = pipeline.checkpoint()
        self._engine, self._built_for, self._used = engine, epoch, False
        self._reader_epoch = self._taken = 0

    def _count(self, readers: Mapping[str, Mapping[str, int]]) -> None:
        """Find how many batches an epoch has, and how many more the reader makes of it."""
        self._surplus, self._meta, self.samples = 0, None, None
        if not readers and self._reader is None:
            if self._announced is None:
                raise ValueError(
                    "The pipeline has no reader to count its samples: give batches=, the length of an epoch."
                )
            self._batches = self._announced
            return
        if self._announced is not None:
            raise ValueError(f"batches={self._announced}, but the reader counts them. Leave batches= out.")
        if self._reader is None and len(readers) > 1:
            raise ValueError(
                f"The pipeline has the readers {sorted(readers)}: choose the one that counts with reader=."
            )
        name = self._reader or next(iter(readers))
        if name not in readers:
            raise ValueError(f"reader={name!r}: the pipeline has the readers {sorted(readers)}.")
        self._meta, size, ranks = dict(readers[name]), self.settings.batch_size, self.settings.world_size
        self.samples = samples = self._meta["epoch_size"]
        shards = self._meta["number_of_shards"], self._meta["shard_id"]
        if shards != (ranks, self.settings.rank):
            raise ValueError(
                f"The reader {name!r} has num_shards={shards[0]} and shard_id={shards[1]}, but this is rank "
                f"{self.settings.rank} of {ranks}. Let the definition take the arguments shard_id and num_shards and "
                "hand them to the reader."
            )
        if not self._meta["pad_last_batch"] and samples % (ranks * size):
            raise ValueError(
                f"The reader {name!r} has pad_last_batch=False, and {samples} samples are no multiple of {ranks} ranks "
                f"times batch_size={size}: epochs would run into one another. Give the reader pad_last_batch=True."
            )
        made = math.ceil(math.ceil(samples / ranks) / size)
        self._batches = samples // ranks // size if self.last_batch == "drop" else made
        if not self._batches:
            raise ValueError(
                f"last_batch='drop' leaves no batch: {samples} samples over {ranks} ranks are {samples // ranks} a "
                f"rank, fewer than batch_size={size}. Use a smaller batch_size or last_batch='partial'."
            )
        self._surplus = made - self._batches

    def _next_epoch(self, engine: Engine) -> None:
        """Go from the end of an epoch to the beginning of the next."""
        for _ in range(self._surplus):
            engine.take()
        self._used = self._used or self._surplus > 0
        if self._meta is None:
            engine.rewind()
        self._taken = 0
        self._reader_epoch += 1

    def _kept(self) -> int | None:
        """How many samples of the batch just taken are no padding; ``None`` for all."""
        if self._meta is None or self.last_batch != "partial" or self._taken < self._batches:
            return None
        ranks = self.settings.world_size
        shard = self._meta["shard_id"] + (0 if self._meta["stick_to_shard"] else self._reader_epoch)
        first, last = ((shard % ranks + edge) * self._meta["epoch_size"] // ranks for edge in (0, 1))
        # A rank one sample short keeps one that is repeated: an empty batch would stop the step.
        return max(1, last - first - (self._batches - 1) * self.settings.batch_size)
