"""DALILoader: a DALI pipeline as the loader of any training loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_turbo import _optional
from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo.data.dali.definition import DefinitionStream
from lightning_turbo.data.dali.engine import Settings, check_device, check_driver, dali
from lightning_turbo.data.dali.files import FileStream
from lightning_turbo.data.dali.order import LastBatch, check_last_batch
from lightning_turbo.data.dali.recipe import FileRecipe

__all__ = ["DALILoader"]

# What has to be the same in the run that saved and the run that loads.
COMMON = ("samples", "batches", "batch_size", "world_size", "last_batch")


class DALILoader:
    """Iterate over the batches of a DALI pipeline, sharded by rank, with a true length and a state.

    Every ``iter`` is an epoch from its beginning, whatever was left of the one before. A batch is a tuple in the
    order of the pipeline's outputs, a dictionary if ``outputs`` names them, or the tensor itself if there is one
    output without a name. An output with one integer a sample, a label, has the shape (batch,) and dtype int64.

    The pipeline is built at the first use, on each rank for itself, and released by ``close``.

    Args:
        pipeline: A ready pipeline (``ImageFolder``, ``VolumeFiles`` or another ``FileRecipe``), or a function made by
            DALI's ``pipeline_def``. Of the arguments of such a function, ``shard_id``, ``num_shards`` and ``device``
            (``"cpu"`` or ``"gpu"``) are filled in; its reader needs ``pad_last_batch=True``.
        batch_size: Samples a batch and rank, at least 1.
        outputs: Names of the outputs, for dictionaries.
        last_batch: What becomes of the samples that do not fill a batch on every rank: ``"partial"`` gives smaller
            batches, each sample once; ``"fill"`` repeats samples; ``"drop"`` leaves them out. The number of batches
            is the same on every rank.
        device: Where the batches shall lie: ``"cpu"``, ``"cuda"`` (torch's current device) or ``"cuda:<number>"``.
        num_threads: CPU threads of the pipeline; by default this rank's part of the cores, 8 at most. The ranks of
            this machine are counted by the Trainer, and outside of one by torchrun (``LOCAL_WORLD_SIZE``).
        prefetch: Batches that DALI prepares ahead, at least 1.
        seed: Seed of order and augmentation, at least 0, the same on every rank; by default the seed of Lightning's
            ``seed_everything``, or 0 without it.
        rank: This rank; by default that of ``torch.distributed``, or 0.
        world_size: Number of ranks; by default that of ``torch.distributed``, or 1.
        arguments: Further arguments of a pipeline function.
        reader: Of a pipeline function with several readers, the name of the one that counts the samples.
        batches: Of a pipeline function without a reader, the batches of an epoch.

    Attributes:
        epoch: Number of the epoch that the last batch came from.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If ``pipeline`` is neither of the two.
        ValueError: If an argument is out of its range, or contradicts another one.
        RuntimeError: If the driver is too old for the installed DALI, for a CUDA device.

    Note:
        One iteration at a time: a second ``iter`` ends the first. ``state_dict`` of a pipeline function on several
        ranks gathers the state of all of them, so call it on every rank at once, as Lightning does.

    Example:
        >>> loader = DALILoader(ImageFolder("images/train", train=True), batch_size=32)  # doctest: +SKIP
        >>> for images, labels in loader: ...  # doctest: +SKIP

    Source: NVIDIA DALI 2.4, pipeline and checkpointing documentation.
    """

    def __init__(
        self,
        pipeline: FileRecipe | Callable[..., Any],
        batch_size: int,
        *,
        outputs: Sequence[str] | None = None,
        last_batch: str = "partial",
        device: torch.device | str | int | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        reader: str | None = None,
        batches: int | None = None,
    ) -> None:
        _optional.require("nvidia.dali", "DALILoader")
        for name, value, least in (
            ("batch_size", batch_size, 1), ("num_threads", num_threads, 1), ("prefetch", prefetch, 1),
            ("seed", seed, 0), ("rank", rank, 0), ("world_size", world_size, 1), ("batches", batches, 1),
        ):  # fmt: skip
            if value is None and name not in ("batch_size", "prefetch"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: give a whole number, at least {least}.")
            if value < least:
                raise ValueError(f"{name}={value!r}: give a whole number, at least {least}.")
        if (rank is None) != (world_size is None) or (rank or 0) >= (world_size or 1):
            raise ValueError(f"rank={rank!r}, world_size={world_size!r}: give both or none, and rank below world_size.")
        if not isinstance(pipeline, FileRecipe):
            if not getattr(pipeline, "_is_pipeline_def", False):
                raise TypeError(
                    f"pipeline={pipeline!r}: give a ready pipeline such as ImageFolder(...), or a function decorated "
                    "with nvidia.dali.pipeline_def, not called. Of a class of Pipeline its define_graph becomes that "
                    "function; iterators of nvidia.dali.plugin.pytorch fall away."
                )
            if unknown := set(arguments or ()) - set(inspect.signature(pipeline).parameters):
                raise TypeError(
                    f"arguments={arguments!r}: the pipeline function takes no {sorted(unknown)}, but "
                    f"{list(inspect.signature(pipeline).parameters)}."
                )
        elif arguments or reader or batches:
            raise ValueError("arguments, reader and batches are for a pipeline function; a ready pipeline has its own.")
        self.pipeline, self.batch_size = pipeline, batch_size
        self.last_batch: LastBatch = check_last_batch(last_batch)
        self.outputs = _checked_names(outputs, pipeline)
        self.device = check_device(device)
        self._threads, self.prefetch = num_threads, prefetch
        self.num_threads = num_threads or _cores()
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._rank, self._world_size = rank, world_size
        self._options = {"arguments": dict(arguments or {}), "reader": reader, "batches": batches}
        self._stream: FileStream | DefinitionStream | None = None
        self.epoch = 0
        self._batch = 0
        self._begun = False
        self._asked: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._turn: object = None
        self._running: FileStream | DefinitionStream | None = None  # the stream that epoch and batch speak of
        if self.device.type == "cuda":
            check_driver(dali().__cuda_version__)

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """What Lightning looks for: it announces each epoch to ``loader.batch_sampler.sampler.set_epoch``."""
        return SimpleNamespace(sampler=self, batch_size=self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, or the one that a loaded state belongs to.

        Without it epochs are counted. A state that was loaded is used up at the next epoch: if that has the state's
        number it goes on where the state was saved, else it starts at its beginning.
        """
        self._asked = epoch

    @property
    def built(self) -> bool:
        """Whether the loader holds a pipeline, or at least its order of files, for this rank."""
        return self._stream is not None

    def place(
        self, device: torch.device | str | int, rank: int, world_size: int, ranks_here: int | None = None
    ) -> None:
        """Move the loader to another device, rank and number of ranks; a built pipeline is released.

        Args:
            device: As in the constructor.
            rank: As in the constructor.
            world_size: As in the constructor.
            ranks_here: How many ranks share this machine's cores, 1 or more; by default what torchrun says, or 1. A
                ``num_threads`` that was given stays.
        """
        self.close()
        self.device, self._rank, self._world_size = check_device(device), rank, world_size
        self.num_threads = self._threads or _cores(ranks_here)

    def build(self) -> None:
        """Build the pipeline now, on this rank, instead of at the first use."""
        stream = self._placed()
        if isinstance(stream, FileStream):
            stream.build()

    def close(self) -> None:
        """Release the pipeline, its threads and its memory; the next epoch builds it anew."""
        self._turn = self._running = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return len(self._placed())

    def __iter__(self) -> Iterator[Any]:
        self._turn = turn = object()
        return self._epoch_of(turn)

    def _epoch_of(self, turn: object) -> Iterator[Any]:
        # Nothing happens before the first batch: Lightning calls iter() first and set_epoch() after it.
        self._check_turn(turn)
        stream = self._start()
        while self._batch < len(stream):
            tensors = stream.take()
            self._batch += 1
            yield self._named(tensors)
            self._check_turn(turn)

    def _check_turn(self, turn: object) -> None:
        if self._turn is not turn:
            raise RuntimeError(
                "This iteration of the DALILoader ended when another one began, or when it was closed. "
                "Use a loader of its own for each iteration that runs at the same time."
            )

    def _start(self) -> FileStream | DefinitionStream:
        """Choose epoch and batch to begin with, and bring the pipeline there."""
        stream = self._placed()
        asked, self._asked = self._asked, None
        loaded, self._loaded = self._loaded, None
        batch, saved = 0, None
        if loaded is not None:
            saved = loaded["pipelines"].get(stream.settings.rank)
            finished = loaded["batch"] == len(stream)
            epoch = loaded["epoch"] + finished if asked is None else asked
            batch = loaded["batch"] if epoch == loaded["epoch"] else 0
        elif asked is not None:
            epoch = asked
        else:
            epoch = self.epoch + self._begun
        self.epoch, self._batch, self._begun, self._running = epoch, batch, True, stream
        if isinstance(stream, FileStream):
            stream.start(epoch, batch)
        else:
            stream.start(epoch, batch, saved)
        return stream

    def _placed(self) -> FileStream | DefinitionStream:
        """The stream for this rank, made anew if rank, number of ranks or device have changed."""
        rank, world_size, device_id = self._rank, self._world_size, None
        if rank is None or world_size is None:
            rank, world_size = rank_and_size()
        if self.device.type == "cuda":
            device_id = torch.cuda.current_device() if self.device.index is None else self.device.index
        settings = Settings(
            batch_size=self.batch_size, num_threads=self.num_threads, device_id=device_id, prefetch=self.prefetch,
            rank=rank, world_size=world_size, seed=self.seed,
        )  # fmt: skip
        if self._stream is None or self._stream.settings != settings:
            if self._stream is not None:
                self._stream.close()
            if isinstance(self.pipeline, FileRecipe):
                self._stream = FileStream(self.pipeline, settings, self.last_batch)
            else:
                self._stream = DefinitionStream(self.pipeline, settings, self.last_batch, **self._options)
            _check_number(self.outputs, self._stream.outputs)
        return self._stream

    def _named(self, tensors: list[Tensor]) -> Any:
        if self.outputs is not None:
            return dict(zip(self.outputs, tensors, strict=True))
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out.

        Returns:
            Epoch, batch, seed, the sizes that have to agree on loading, and for a pipeline function DALI's own
            checkpoint of every rank.
        """
        stream = self._placed()
        if self._loaded is not None:  # nothing was taken since
            return dict(self._loaded)
        pipelines = {}
        if isinstance(stream, DefinitionStream):
            pipelines = _gathered(stream.settings, stream.snapshot() if stream is self._running else None, self._batch)
        return {
            "epoch": self.epoch, "batch": self._batch, "seed": self.seed, **self._sizes(stream), "pipelines": pipelines,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on, at the next ``iter``, where ``state_dict`` was called.

        Raises:
            ValueError: If the state was saved with another number of samples, batches or ranks, another batch size
                or another treatment of the last batch.
        """
        stream = self._placed()
        sizes = self._sizes(stream)
        for name in COMMON:
            if state_dict[name] != sizes[name]:
                raise ValueError(
                    f"The state of the DALILoader was saved with {name}={state_dict[name]!r}, now it is "
                    f"{sizes[name]!r}. Resume with what it was saved with."
                )
        self.seed = state_dict["seed"]
        self.epoch, self._batch = state_dict["epoch"], state_dict["batch"]
        self._loaded, self._asked, self._begun = dict(state_dict), None, False

    def _sizes(self, stream: FileStream | DefinitionStream) -> dict[str, Any]:
        return {
            "samples": stream.samples, "batches": len(stream), "batch_size": self.batch_size,
            "world_size": stream.settings.world_size, "last_batch": self.last_batch,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the built pipeline, which another process builds for itself."""
        return {**self.__dict__, "_stream": None, "_running": None, "_turn": None}


def _gathered(settings: Settings, own: dict[str, Any] | None, batch: int) -> dict[int, Any]:
    """The snapshots of all ranks by rank, as far as torch.distributed joins them."""
    if rank_and_size()[1] != settings.world_size:
        return {settings.rank: own}
    ranks = gather_for_checkpoint(own, "DALI pipelines' states", batch, to_all=True)
    return dict(enumerate(ranks)) if len(ranks) > 1 else {settings.rank: own}


def _cores(ranks_here: int | None = None) -> int:
    """This process's part of the cores, 8 at most."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, there // (ranks_here or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def _checked_names(outputs: Sequence[str] | None, pipeline: FileRecipe | Callable[..., Any]) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    names = tuple(outputs) if isinstance(outputs, Sequence) else ()
    if isinstance(outputs, str) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"outputs={outputs!r}: give the names of the outputs as a sequence of strings.")
    if len(set(names)) < len(names):
        raise ValueError(f"outputs={outputs!r}: give each output a name of its own.")
    if isinstance(pipeline, FileRecipe):
        _check_number(names, pipeline.outputs)
    return names


def _check_number(names: tuple[str, ...] | None, outputs: int) -> None:
    if names is not None and len(names) != outputs:
        raise ValueError(f"outputs={names!r} are {len(names)} names, but the pipeline has {outputs} outputs.")
