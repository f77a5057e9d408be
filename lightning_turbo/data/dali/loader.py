"""``DALILoader``: iterate over a DALI pipeline in any training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from lightning_turbo import _optional
from lightning_turbo._checks import check_switches, expect, is_whole
from lightning_turbo._distributed import data_rank_and_size, gather_for_checkpoint
from lightning_turbo._machine import count_cores
from lightning_turbo.data.dali.dynamic import BuiltDynamic, DynamicPipeline
from lightning_turbo.data.dali.images import ImageFolder
from lightning_turbo.data.dali.pipelines import Built, BuiltPipeline, Placement, Settings, explained, pipeline_arguments

__all__ = ["DALILoader"]

WHOLE = "an integer of at least"
# A state saved inside an epoch can only be loaded if these are equal.
COMMON = ("world_size", "batch_size", "drop_last", "samples", "batches")
BEGINNING = {"checkpoint": None, "passes": 0, "taken": 0}


class DALILoader:
    """Iterate over the batches of a DALI pipeline, sharded by rank, with an exact length and a resumable state.

    Each ``iter`` starts an epoch. A batch is a tuple in the order of the pipeline's outputs, or the tensor itself for
    one output. An output with one integer per sample, such as a label, has shape (batch,) and dtype int64.

    Each rank builds the pipeline at its first use; ``close`` releases it.

    Args:
        pipeline: An ``ImageFolder``, a ``DynamicPipeline``, or a function decorated with DALI's ``pipeline_def``. If
            such a function has parameters named ``shard_id``, ``num_shards``, ``device`` (``"cpu"`` or ``"gpu"``) or
            ``order_seed`` (the same on every rank), the loader passes them. Its readers need ``pad_last_batch=True``
            and the same number of samples.
        batch_size: Samples per batch and rank, at least 1.
        drop_last: Whether to drop the samples that do not fill a batch on every rank; otherwise the last batch is
            smaller. All ranks have the same number of batches.
        device: Device of the batches: ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:<index>"``.
        num_threads: CPU threads of the pipeline. Default: the cores divided by the number of ranks on this machine, at
            most 8. The Trainer or torchrun (``LOCAL_WORLD_SIZE``) provides that number.
        prefetch: Number of batches that DALI prepares ahead, at least 1.
        seed: Seed of order and augmentation, at least 0, the same on every rank. Default: the seed of Lightning's
            ``seed_everything``, or 0.
        rank: Rank of this process. Default: that of ``torch.distributed``, the same for tensor-parallel peers, or 0.
        world_size: Number of ranks. Default: that of ``torch.distributed``, without tensor-parallel peers, or 1.
        arguments: Additional arguments of the pipeline function.

    Attributes:
        epoch: Epoch of the last batch.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If ``pipeline`` has another type, or ``drop_last`` is not a bool.
        ValueError: If an argument is out of range or contradicts another one.

    Note:
        Only one iteration at a time is possible. ``state_dict`` is a collective call: every rank must make it.

    Example:
        >>> loader = DALILoader(ImageFolder("images/train", train=True), batch_size=32)  # doctest: +SKIP
        >>> for images, labels in loader: ...  # doctest: +SKIP

    Source: NVIDIA DALI 2.4, pipeline, PyTorch plugin and checkpointing documentation.
    """

    def __init__(
        self,
        pipeline: ImageFolder | DynamicPipeline | Callable[..., Any],
        batch_size: int,
        *,
        drop_last: bool = False,
        device: torch.device | str | int | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        _optional.require("nvidia.dali", "DALILoader")
        for name, value in {"batch_size": batch_size, "prefetch": prefetch}.items():
            expect(is_whole(value, 1), name, value, f"{WHOLE} 1")
        expect(num_threads is None or is_whole(num_threads, 1), "num_threads", num_threads, f"{WHOLE} 1, or None")
        expect(seed is None or is_whole(seed, 0), "seed", seed, f"{WHOLE} 0, or None")
        ranks = rank is world_size is None or (is_whole(rank, 0) and is_whole(world_size, rank + 1))
        expect(ranks, "rank, world_size", (rank, world_size), "both or neither, and rank below world_size")
        check_switches(drop_last=drop_last)
        ready = isinstance(pipeline, ImageFolder)
        is_known = isinstance(pipeline, (ImageFolder, DynamicPipeline)) or getattr(pipeline, "_is_pipeline_def", False)
        kind = "an ImageFolder, a DynamicPipeline, or an uncalled function decorated with nvidia.dali.pipeline_def"
        expect(is_known, "pipeline", pipeline, kind, TypeError)
        expect(not (ready and arguments), "arguments", arguments, "None, because an ImageFolder sets its own")
        self.pipeline: Any = pipeline
        self._settings = Settings(batch_size, drop_last, prefetch, num_threads, dict(arguments or {}))
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        # The current epoch, the number of its batches returned so far, and the epoch that the next iter() begins.
        self.epoch = self._batch = self._next = 0
        self._loaded: dict[str, Any] | None = None
        self._built: Built | None = None
        self.place("cpu" if device is None else device, rank, world_size)

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The attribute through which Lightning calls ``loader.batch_sampler.sampler.set_epoch``."""
        return SimpleNamespace(sampler=self, batch_size=self._settings.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Without this call, epochs are counted.

        A loaded state resumes if ``epoch`` is its epoch; otherwise ``epoch`` starts at its first batch.
        """
        self._next = epoch

    def place(
        self, device: torch.device | str | int, rank: int | None, world_size: int | None, ranks_here: int | None = None
    ) -> None:
        """Move the loader to another device, rank and number of ranks, and release its pipeline.

        The arguments are those of the constructor, plus the number of ranks that share the cores of this machine.
        """
        self.close()
        self.device = torch.device(device)
        self._shard = (rank, world_size)
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        expect(self.device.type in there, "device", device, f"a device of type {' or '.join(there)}")
        ranks_here = ranks_here or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.num_threads = self._settings.num_threads or max(1, min(8, count_cores() // ranks_here))

    @property
    def built(self) -> bool:
        """Whether the pipeline is built; ``len`` builds it."""
        return self._built is not None

    def close(self) -> None:
        """Release the pipeline, its threads and its memory. The next epoch rebuilds it."""
        if self._built is not None:
            self._built.close()
        self._built = None

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        return len(self._current(self.epoch))

    def __iter__(self) -> Iterator[Any]:
        # The body runs at the first batch, because Lightning calls set_epoch after iter.
        built = self._begin()
        epoch = self.epoch
        while self._batch < len(built):
            try:
                tensors = built.take()
            except RuntimeError as error:
                self.close()  # a failed pipeline cannot run again
                ready = self.pipeline if isinstance(self.pipeline, ImageFolder) else None
                raise explained(error, built.placement, ready.name_broken() if ready else "") from error
            tensors = self.pipeline.finish(tensors) if isinstance(self.pipeline, ImageFolder) else tensors
            self._batch += 1
            yield tuple(tensors) if len(tensors) > 1 else tensors[0]
            if (self._built, self.epoch) != (built, epoch):
                raise RuntimeError(
                    "Expected one iteration of the DALILoader at a time, but another one has started, or the loader "
                    "was closed. Use one loader per iteration."
                )

    def _begin(self) -> Built:
        """Move the pipeline to the first batch of the next epoch, or to the position of a loaded state."""
        loaded = self._loaded
        self._loaded = None
        epoch = self._next
        self._next = self._next + 1
        if loaded is not None:
            self._restore(loaded, epoch)
            if loaded["batch"] and epoch == loaded["epoch"]:
                return self._current(epoch)
        self.epoch = epoch
        self._batch = 0
        built = self._current(epoch)
        if built.taken == len(built):
            built.rewind()
        elif built.taken or built.epoch != epoch:
            self.close()  # DALI cannot reset a pipeline inside an epoch
        return self._current(epoch)

    def _restore(self, loaded: dict[str, Any], epoch: int) -> None:
        """Rebuild the pipeline from the checkpoint of this rank."""
        self.close()  # release the old pipeline before the new one allocates memory
        saved = loaded["pipelines"].get(self._placement().rank)
        inside = epoch == loaded["epoch"] and 0 < loaded["batch"] < loaded["batches"]
        what = "with a checkpoint of the pipeline: it was saved after close(), or by fewer ranks"
        expect(saved or not inside, "state_dict", f"batch {loaded['batch']} of epoch {epoch}", what)
        if saved:
            self._built = self._build(saved["epoch"], saved)

    def _current(self, epoch: int) -> Built:
        """Return the pipeline; build it for ``epoch`` if there is none, or if rank, world size or device changed."""
        if self._built is None or self._built.placement != self._placement():
            self.close()
            try:
                self._built = self._build(epoch)
            except RuntimeError as error:
                raise explained(error, self._placement()) from error
        return self._built

    def _build(self, epoch: int, saved: Mapping[str, Any] = BEGINNING) -> Built:
        placement = self._placement()
        if isinstance(self.pipeline, DynamicPipeline):
            settings = self._settings
            return BuiltDynamic(self.pipeline, settings, placement, self.num_threads, self.seed, epoch, saved)
        ready = isinstance(self.pipeline, ImageFolder)
        function = self.pipeline.definition() if ready else self.pipeline
        given = pipeline_arguments(function, self._settings, placement, self.seed, epoch)
        pipeline = function(num_threads=self.num_threads, checkpoint=saved["checkpoint"], **given)
        pipeline.build()
        return BuiltPipeline(pipeline, self._settings, placement, epoch, saved)

    def _placement(self) -> Placement:
        rank, world_size = self._shard
        if rank is None or world_size is None:
            rank, world_size = data_rank_and_size()
        device_id = self.device.index
        if self.device.type == "cuda" and device_id is None:
            device_id = torch.cuda.current_device()
        return Placement(rank, world_size, device_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last returned batch, with DALI's checkpoint of every rank."""
        if self._loaded is not None:
            return dict(self._loaded)
        built = self._current(self.epoch)
        own = built.snapshot() if built.taken == self._batch else None  # close() loses the position
        pipelines = {built.placement.rank: own}
        if data_rank_and_size()[1] == built.placement.world_size > 1:
            # Tensor-parallel peers have the same one.
            ranks = gather_for_checkpoint((built.placement.rank, own), "DALI pipelines' states", to_all=True)
            pipelines = dict(ranks)
        position = {"epoch": self.epoch, "batch": self._batch, "seed": self.seed}
        return {**position, **self._sizes(built), "pipelines": pipelines}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the saved position at the next ``iter``.

        A state from the end of an epoch also fits another number of ranks, batch size and so on; the next epoch then
        has a new order.

        Raises:
            ValueError: If the state was saved inside an epoch with another number of samples, batches or ranks, another
                ``batch_size`` or another ``drop_last``.
        """
        state = dict(state_dict)
        sizes = self._sizes(self._current(self.epoch))
        changed = {name: state[name] for name in COMMON if state[name] != sizes[name]}
        if changed and 0 < state["batch"] < state["batches"]:
            now = {name: sizes[name] for name in changed}
            raise ValueError(
                f"Expected {changed}, with which the DALILoader's state was saved at batch {state['batch']} of "
                f"{state['batches']}, got {now}. Restore these values, or resume from a checkpoint at an epoch's end."
            )
        if changed:
            state |= {**sizes, "pipelines": {}, "batch": sizes["batches"] if state["batch"] else 0}
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._batch = state["batch"]
        self._loaded = state
        self._next = state["epoch"] + (state["batch"] == state["batches"])

    def _sizes(self, built: Built) -> dict[str, Any]:
        own = {"batch_size": self._settings.batch_size, "drop_last": self._settings.drop_last}
        return {**own, "samples": built.samples, "batches": len(built), "world_size": built.placement.world_size}

    def __getstate__(self) -> dict[str, Any]:
        """Drop the pipeline, which another process rebuilds."""
        return {**self.__dict__, "_built": None}
