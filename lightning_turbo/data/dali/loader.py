"""``DALILoader``: a DALI pipeline, with DALI's iterator and checkpoints, as the loader of any training loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_turbo import _optional
from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo.data.dali.files import FilePipeline

__all__ = ["DALILoader"]

LastBatch = Literal["fill", "drop", "partial"]

# What has to be the same in the run that saved in mid-epoch and in the run that loads.
COMMON = ("samples", "batches", "batch_size", "world_size", "last_batch")


class DALILoader:
    """Iterate over the batches of a DALI pipeline, sharded by rank, with a true length and a state.

    Every ``iter`` is an epoch from its beginning, whatever was left of the one before. A batch is a tuple in the
    order of the pipeline's outputs, a dictionary if ``outputs`` names them, or the tensor itself if there is one
    output without a name. An output with one integer a sample, a label, has the shape (batch,) and dtype int64.

    The pipeline is built at the first use, on each rank for itself, and released by ``close``.

    Args:
        pipeline: A ready pipeline (``ImageFolder``, ``VolumeFiles``), or a function made by DALI's ``pipeline_def``.
            Of the arguments of such a function, ``shard_id``, ``num_shards``, ``device`` (``"cpu"`` or ``"gpu"``) and
            ``order_seed`` (the same on every rank) are filled in; its reader needs ``pad_last_batch=True``.
        batch_size: Samples a batch and rank, at least 1.
        outputs: Names of the outputs, for dictionaries.
        last_batch: What becomes of the samples that do not fill a batch on every rank: ``"partial"`` gives a smaller
            batch, each sample once; ``"fill"`` repeats samples; ``"drop"`` leaves them out. The number of batches
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
        TypeError: If ``pipeline`` is neither of the two, or an argument has a wrong type.
        ValueError: If an argument is out of its range, or contradicts another one.

    Note:
        One iteration at a time: a second ``iter`` ends the first. ``state_dict`` on several ranks gathers the state of
        all of them, so call it on every rank at once, as Lightning does.

    Example:
        >>> loader = DALILoader(ImageFolder("images/train", train=True), batch_size=32)  # doctest: +SKIP
        >>> for images, labels in loader: ...  # doctest: +SKIP

    Source: NVIDIA DALI 2.4, pipeline, PyTorch plugin and checkpointing documentation.
    """

    def __init__(
        self,
        pipeline: FilePipeline | Callable[..., Any],
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
        _check_whole(1, batch_size=batch_size, prefetch=prefetch)
        given = {"num_threads": num_threads, "world_size": world_size, "batches": batches}
        _check_whole(1, **{name: value for name, value in given.items() if value is not None})
        _check_whole(0, **{n: v for n, v in (("seed", seed), ("rank", rank)) if v is not None})
        if (rank is None) != (world_size is None) or (rank or 0) >= (world_size or 1):
            raise ValueError(f"rank={rank!r}, world_size={world_size!r}: pass both or none, and rank below world_size.")
        self.arguments, self.reader, self.batches = dict(arguments or {}), reader, batches
        _check_pipeline(pipeline, self.arguments, reader, batches)
        self.pipeline, self.batch_size = pipeline, batch_size
        self.last_batch = _check_last_batch(last_batch)
        self.outputs = _check_names(outputs)
        if isinstance(pipeline, FilePipeline):
            _check_count(self.outputs, pipeline.outputs)
        self.device = _check_device(device)
        self._threads, self.prefetch = num_threads, prefetch
        self.num_threads = num_threads or _count_cores()
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._rank, self._world_size = rank, world_size
        self._built: _BuiltPipeline | None = None
        self.epoch = self._batch = 0
        self._begun = False
        self._asked: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._turn: object = None

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """What Lightning looks for: it announces each epoch to ``loader.batch_sampler.sampler.set_epoch``."""
        return SimpleNamespace(sampler=self, batch_size=self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, or the one that a loaded state belongs to.

        Without it epochs are counted. A state that was loaded is used up at the next epoch: if that has the state's
        number it continues where the state was saved, else it starts at its beginning.
        """
        self._asked = epoch

    @property
    def built(self) -> bool:
        """Whether the loader holds a pipeline."""
        return self._built is not None

    def place(
        self, device: torch.device | str | int, rank: int, world_size: int, ranks_here: int | None = None
    ) -> None:
        """Move the loader to another device, rank and number of ranks; a built pipeline is released.

        Args:
            device: As in the constructor.
            rank: As in the constructor.
            world_size: As in the constructor.
            ranks_here: How many ranks share this machine's cores, 1 or more; by default what torchrun says, or 1. A
                ``num_threads`` that was passed stays.
        """
        self.close()
        self.device, self._rank, self._world_size = _check_device(device), rank, world_size
        self.num_threads = self._threads or _count_cores(ranks_here)

    def build(self) -> None:
        """Build the pipeline now, on this rank, instead of at the first use."""
        self._current(self.epoch)

    def close(self) -> None:
        """Release the pipeline, its threads and its memory; the next epoch builds it again."""
        self._built = self._turn = None

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return len(self._current(self.epoch))

    def __iter__(self) -> Iterator[Any]:
        self._turn = turn = object()
        return self._iterate(turn)

    def _iterate(self, turn: object) -> Iterator[Any]:
        # Nothing happens before the first batch: Lightning calls iter() first and set_epoch() after it.
        self._check_turn(turn)
        built = self._start()
        while self._batch < len(built):
            try:
                tensors = built.take()
            except RuntimeError as error:  # the pipeline has ended: the next epoch needs another one
                self._built = None
                if isinstance(self.pipeline, FilePipeline):
                    raise self.pipeline.explain(error) from error
                raise
            self._batch += 1
            yield self._name(tensors)
            self._check_turn(turn)

    def _check_turn(self, turn: object) -> None:
        if self._turn is not turn:
            raise RuntimeError(
                "This iteration of the DALILoader ended when another one began, or when it was closed. "
                "Use a loader of its own for each iteration that runs at the same time."
            )

    def _start(self) -> _BuiltPipeline:
        """Choose epoch and batch to begin with, and bring the pipeline there."""
        asked, self._asked = self._asked, None
        loaded, self._loaded = self._loaded, None
        saved, batch = None, 0
        if loaded is None:
            epoch = self.epoch + self._begun if asked is None else asked
        else:
            ended = loaded["batch"] == loaded["batches"]
            epoch = loaded["epoch"] + ended if asked is None else asked
            batch = loaded["batch"] if epoch == loaded["epoch"] else 0
            saved = loaded["pipelines"].get(self._placement()[0])
            if saved is None and batch and not ended:
                raise ValueError(
                    f"The state of the DALILoader has no checkpoint of the pipeline at batch {batch} of epoch {epoch}: "
                    "it was saved after close(), or by fewer ranks. Resume from another checkpoint."
                )
            if saved is not None and (batch or ended):
                self._built = _BuiltPipeline(self, self._placement(), saved["epoch"], saved)
        built = self._current(epoch)
        if not batch:
            built = self._at_beginning(built, epoch)
        self.epoch, self._batch, self._begun = epoch, min(batch, len(built)), True
        return built

    def _at_beginning(self, built: _BuiltPipeline, epoch: int) -> _BuiltPipeline:
        """Bring a pipeline to the beginning of an epoch; DALI cannot reset one in mid-epoch, so it is built again."""
        if built.taken == len(built):
            built.rewind()
        elif built.taken or built.epoch != epoch:
            built = self._built = _BuiltPipeline(self, self._placement(), epoch)
        return built

    def _current(self, epoch: int) -> _BuiltPipeline:
        """Return the pipeline for this rank; build one if there is none, or if rank, device or seed have changed."""
        if self._built is None or self._built.placement != self._placement():
            self._built = None  # the old one goes before the new one takes memory
            self._built = _BuiltPipeline(self, self._placement(), epoch)
        return self._built

    def _placement(self) -> tuple[int, int, int | None, int]:
        """Return rank, number of ranks, the CUDA device or ``None``, and the seed."""
        rank, world_size = self._rank, self._world_size
        if rank is None or world_size is None:
            rank, world_size = rank_and_size()
        device_id = self.device.index
        if self.device.type == "cuda" and device_id is None:
            device_id = torch.cuda.current_device()
        return rank, world_size, device_id, self.seed

    def _name(self, tensors: list[Tensor]) -> Any:
        if isinstance(self.pipeline, FilePipeline):
            tensors = self.pipeline.finish(tensors)
        if self.outputs is not None:
            return dict(zip(self.outputs, tensors, strict=True))
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out.

        Returns:
            Epoch, batch, seed, the sizes that have to agree on loading, and DALI's own checkpoint of every rank.
        """
        if self._loaded is not None:  # nothing was taken since
            return dict(self._loaded)
        built = self._current(self.epoch)
        rank, world_size, *_ = built.placement
        own = built.snapshot() if built.taken == self._batch else None  # a closed pipeline has no checkpoint
        pipelines = {rank: own}
        if rank_and_size()[1] == world_size > 1:
            ranks = gather_for_checkpoint(own, "DALI pipelines' states", self._batch, to_all=True)
            pipelines = dict(enumerate(ranks)) if len(ranks) > 1 else pipelines
        position = {"epoch": self.epoch, "batch": self._batch, "seed": self.seed}
        return {**position, **self._sizes(built), "pipelines": pipelines}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue, at the next ``iter``, where ``state_dict`` was called.

        A state from the end of an epoch is good for another number of ranks, another batch size and so on, too: the
        next epoch then begins with a new order.

        Raises:
            ValueError: If the state is of mid-epoch and was saved with another number of samples, batches or ranks,
                another batch size or another treatment of the last batch.
        """
        state = dict(state_dict)
        sizes = self._sizes(self._current(self.epoch))
        if changed := [name for name in COMMON if state[name] != sizes[name]]:
            if 0 < state["batch"] < state["batches"]:
                name = changed[-1] if "world_size" not in changed else "world_size"
                raise ValueError(
                    f"The state of the DALILoader is of batch {state['batch']} of {state['batches']} and was saved "
                    f"with {name}={state[name]!r}, now it is {sizes[name]!r}. Resume with {name}={state[name]!r}, or "
                    "from a checkpoint of an epoch's end."
                )
            state["pipelines"] = {}
        self.seed, self.epoch, self._batch = state["seed"], state["epoch"], state["batch"]
        self._loaded, self._asked, self._begun = state, None, False

    def _sizes(self, built: _BuiltPipeline) -> dict[str, Any]:
        return {
            "samples": built.samples, "batches": len(built), "batch_size": self.batch_size,
            "world_size": built.placement[1], "last_batch": self.last_batch,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the built pipeline, which another process builds for itself."""
        return {**self.__dict__, "_built": None, "_turn": None}


class _BuiltPipeline:
    """A built pipeline, DALI's iterator over it, and how many epochs and batches were taken from it.

    Args:
        loader: The loader, whose settings it is built with.
        placement: Rank, number of ranks, the CUDA device or ``None``, and the seed.
        epoch: Number of the epoch that it is built for.
        saved: What ``snapshot`` returned, to continue there.
    """

    def __init__(
        self,
        loader: DALILoader,
        placement: tuple[int, int, int | None, int],
        epoch: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        self.placement, self.epoch, self.last_batch = placement, epoch, loader.last_batch
        self.passes, self.taken = (saved["passes"], saved["taken"]) if saved else (0, 0)
        pipeline = _make_pipeline(loader, placement, epoch, saved and saved["checkpoint"])
        reader = _choose_reader(pipeline.reader_meta(), loader.reader, loader.batches)
        self._meta = None if reader is None else pipeline.reader_meta(reader)
        self.samples: int | None = None if self._meta is None else self._meta["epoch_size"]
        if self._meta is not None:
            _check_reader(reader, self._meta, placement, loader.batch_size)
        _check_count(loader.outputs, _count_outputs(loader, pipeline))
        self._names = [str(number) for number in range(pipeline.num_outputs)]
        # DALI's own "partial" gives a rank that is one sample short an empty batch, whose mean loss is NaN.
        policy = LastBatchPolicy.DROP if self.last_batch == "drop" and reader else LastBatchPolicy.FILL
        self._iterator = DALIGenericIterator(
            [pipeline], self._names, reader_name=reader, last_batch_policy=policy, prepare_first_batch=False
        )
        self._batches = loader.batches or len(self._iterator)
        if not self._batches:
            raise ValueError(
                f"last_batch='drop' leaves no batch: {self.samples} samples over {placement[1]} ranks are fewer a rank "
                f"than batch_size={loader.batch_size}. Use a smaller batch_size or last_batch='partial'."
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
        kept = self._count_kept()
        return [_as_label(batch[0][name])[:kept] for name in self._names]

    def rewind(self) -> None:
        """Go from the end of an epoch to the beginning of the next."""
        self._iterator.reset()
        self.passes, self.taken = self.passes + 1, 0

    def snapshot(self) -> dict[str, Any]:
        """Return DALI's checkpoint and the counters around it."""
        (checkpoint,) = self._iterator.checkpoints()
        return {"checkpoint": checkpoint, "epoch": self.epoch, "passes": self.passes, "taken": self.taken}

    def _count_kept(self) -> int | None:
        """Return how many samples of the batch just taken are not padding; ``None`` for all."""
        if self._meta is None or self.last_batch != "partial" or self.taken < self._batches:
            return None
        ranks, samples = self._meta["number_of_shards"], self._meta["epoch_size"]
        shard = (self._meta["shard_id"] + (0 if self._meta["stick_to_shard"] else self.passes)) % ranks
        size = (shard + 1) * samples // ranks - shard * samples // ranks
        # A rank one sample short keeps one that is repeated: an empty batch would stop the step.
        return max(1, size - (self._batches - 1) * self._iterator.batch_size)


def _make_pipeline(
    loader: DALILoader, placement: tuple[int, int, int | None, int], epoch: int, checkpoint: bytes | None
) -> Any:
    """Call the definition with what it takes, and build the pipeline that it returns."""
    rank, world_size, device_id, seed = placement
    definition = loader.pipeline
    if isinstance(definition, FilePipeline):
        if len(definition.files) < world_size:
            raise ValueError(
                f"{len(definition.files)} files for {world_size} ranks: every rank needs at least one. "
                "Pass more files or use fewer devices."
            )
        definition = definition.definition()
    offered = {
        "shard_id": rank,
        "num_shards": world_size,
        "device": "cpu" if device_id is None else "gpu",
        "order_seed": _draw_seed(seed, epoch),
    }
    known = inspect.signature(definition).parameters
    pipeline = definition(
        batch_size=loader.batch_size,
        num_threads=loader.num_threads,
        device_id=device_id,
        prefetch_queue_depth=loader.prefetch,
        exec_dynamic=True,  # batches share DALI's memory, which lives as long as they do
        seed=_draw_seed(seed, epoch, rank + 1),
        enable_checkpointing=True,
        checkpoint=checkpoint,
        **{**{name: value for name, value in offered.items() if name in known}, **loader.arguments},
    )
    pipeline.build()
    return pipeline


def _draw_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def _choose_reader(readers: Mapping[str, Any], reader: str | None, batches: int | None) -> str | None:
    """Return the name of the reader that counts the samples; ``None`` if there is none."""
    if not readers and reader is None:
        if batches is None:
            raise ValueError("The pipeline has no reader to count its samples: pass batches=, the length of an epoch.")
        return None
    if batches is not None:
        raise ValueError(f"batches={batches}, but the reader counts them. Leave batches= out.")
    if reader is None and len(readers) > 1:
        raise ValueError(f"The pipeline has the readers {sorted(readers)}: choose the one that counts with reader=.")
    name = reader or next(iter(readers))
    if name not in readers:
        raise ValueError(f"reader={name!r}: the pipeline has the readers {sorted(readers)}.")
    return name


def _check_reader(name: str | None, meta: Mapping[str, Any], placement: tuple[Any, ...], batch_size: int) -> None:
    """Refuse a reader that reads another shard, or whose epochs run into one another."""
    rank, ranks, samples = placement[0], placement[1], meta["epoch_size"]
    if (meta["number_of_shards"], meta["shard_id"]) != (ranks, rank):
        raise ValueError(
            f"The reader {name!r} has num_shards={meta['number_of_shards']} and shard_id={meta['shard_id']}, but this "
            f"is rank {rank} of {ranks}. Let the definition take the arguments shard_id and num_shards and hand them to "
            "the reader."
        )
    if not meta["pad_last_batch"] and samples % (ranks * batch_size):
        raise ValueError(
            f"The reader {name!r} has pad_last_batch=False, and {samples} samples are not a multiple of {ranks} ranks "
            f"times batch_size={batch_size}: epochs would run into one another. Give the reader pad_last_batch=True."
        )


def _count_outputs(loader: DALILoader, pipeline: Any) -> int:
    return loader.pipeline.outputs if isinstance(loader.pipeline, FilePipeline) else pipeline.num_outputs


def _as_label(tensor: Tensor) -> Tensor:
    """Return one integer a sample as int64 of shape (batch,); anything else as it is."""
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.reshape(len(tensor)).to(torch.int64) if whole and tensor.numel() == len(tensor) else tensor


def _count_cores(ranks_here: int | None = None) -> int:
    """Return this process's part of the cores, 8 at most."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, there // (ranks_here or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def _check_whole(least: int, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected a whole number, at least {least}.")
        if value < least:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least {least}.")


def _check_pipeline(pipeline: Any, arguments: dict[str, Any], reader: str | None, batches: int | None) -> None:
    if isinstance(pipeline, FilePipeline):
        if arguments or reader or batches:
            raise ValueError("arguments, reader and batches are for a pipeline function; a ready pipeline has its own.")
        return
    if not getattr(pipeline, "_is_pipeline_def", False):
        raise TypeError(
            f"pipeline={pipeline!r}: expected a ready pipeline such as ImageFolder(...), or a function decorated "
            "with nvidia.dali.pipeline_def, not called. Of a class of Pipeline its define_graph becomes that "
            "function; iterators of nvidia.dali.plugin.pytorch are not needed."
        )
    known = list(inspect.signature(pipeline).parameters)
    if unknown := sorted(set(arguments) - set(known)):
        raise TypeError(f"arguments={arguments!r}: the pipeline function takes no {unknown}, but {known}.")


def _check_last_batch(last_batch: str) -> LastBatch:
    for known in get_args(LastBatch):
        if isinstance(last_batch, str) and last_batch.lower() == known:
            return known
    raise ValueError(f"last_batch={last_batch!r}: expected 'fill', 'drop' or 'partial'.")


def _check_names(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    names = tuple(outputs) if isinstance(outputs, Sequence) else ()
    if isinstance(outputs, str) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"outputs={outputs!r}: expected the names of the outputs as a sequence of strings.")
    if len(set(names)) < len(names):
        raise ValueError(f"outputs={outputs!r}: give each output a name of its own.")
    return names


def _check_count(names: tuple[str, ...] | None, outputs: int) -> None:
    if names is not None and len(names) != outputs:
        raise ValueError(f"outputs={names!r} are {len(names)} names, but the pipeline has {outputs} outputs.")


def _check_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that a pipeline shall fill: the CPU or a CUDA device that is there."""
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected 'cpu', 'cuda' or 'cuda:<number>'.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: DALI fills the memory of 'cpu' and 'cuda' only.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device. Use device='cpu' or repair the driver.")
    return chosen
