"""``DALILoader``: a DALI pipeline, with DALI's iterator and checkpoints, as the loader of any training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_turbo import _optional
from lightning_turbo._checks import is_whole
from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo.data.dali.files import FilePipeline
from lightning_turbo.data.dali.pipeline import BuiltPipeline, Placement

__all__ = ["DALILoader"]

# What has to be the same in the run that saved in mid-epoch and in the run that loads.
COMMON = ("world_size", "batch_size", "last_batch", "samples", "batches")


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
        _check_whole(1, optional=True, num_threads=num_threads, world_size=world_size, batches=batches)
        _check_whole(0, optional=True, seed=seed, rank=rank)
        _check_ranks(rank, world_size)
        self.arguments, self.reader, self.batches = dict(arguments or {}), reader, batches
        _check_pipeline(pipeline, any((arguments, reader, batches)))
        self.pipeline, self.batch_size = pipeline, batch_size
        self.last_batch, self.outputs = _check_last_batch(last_batch), _check_names(outputs)
        self.device = check_device(device)
        self._threads, self.prefetch = num_threads, prefetch
        self.num_threads = num_threads or count_cores()
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._rank, self._world_size = rank, world_size
        self._built: BuiltPipeline | None = None
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
        self.device, self._rank, self._world_size = check_device(device), rank, world_size
        self.num_threads = self._threads or count_cores(ranks_here)

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
            tensors = self._take(built)
            self._batch += 1
            yield self._name(tensors)
            self._check_turn(turn)

    def _check_turn(self, turn: object) -> None:
        if self._turn is not turn:
            raise RuntimeError(
                "This iteration of the DALILoader ended when another one began, or when it was closed. "
                "Use a loader of its own for each iteration that runs at the same time."
            )

    def _take(self, built: BuiltPipeline) -> list[Tensor]:
        try:
            tensors = built.take()
        except RuntimeError as error:  # the pipeline has ended: the next epoch needs another one
            self._built = None
            if isinstance(self.pipeline, FilePipeline) and (broken := self.pipeline.explain(error)):
                raise broken from error
            raise
        return self.pipeline.finish(tensors) if isinstance(self.pipeline, FilePipeline) else tensors

    def _name(self, tensors: list[Tensor]) -> Any:
        if self.outputs is not None:
            return dict(zip(self.outputs, tensors, strict=True))
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def _start(self) -> BuiltPipeline:
        """Choose epoch and batch to begin with, and bring the pipeline there."""
        asked, self._asked = self._asked, None
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            return self._resume(loaded, asked)
        self.epoch, self._batch = (self.epoch + self._begun if asked is None else asked), 0
        self._begun = True
        return self._begin(self.epoch)

    def _resume(self, loaded: dict[str, Any], asked: int | None) -> BuiltPipeline:
        """Continue where a state was saved, or begin the epoch after it."""
        ended = loaded["batch"] == loaded["batches"]
        epoch = loaded["epoch"] + ended if asked is None else asked
        inside = epoch == loaded["epoch"] and loaded["batch"] > 0
        if inside or ended:
            self._restore(loaded, ended)
        built = self._current(epoch) if inside else self._begin(epoch)
        self.epoch, self._batch, self._begun = epoch, loaded["batch"] * inside, True
        if inside and ended:
            self._batch = len(built)  # of another size, maybe: nothing is left
        return built

    def _restore(self, loaded: dict[str, Any], ended: bool) -> None:
        """Build the pipeline at this rank's checkpoint."""
        saved = loaded["pipelines"].get(self._placement().rank)
        if saved is not None:
            self._built = None  # the old one goes before the new one takes memory
            self._built = BuiltPipeline(self, self._placement(), saved["epoch"], saved)
        elif not ended:
            raise ValueError(
                f"The state of the DALILoader has no checkpoint of the pipeline at batch {loaded['batch']} of epoch "
                f"{loaded['epoch']}: it was saved after close(), or by fewer ranks. Resume from another checkpoint."
            )

    def _begin(self, epoch: int) -> BuiltPipeline:
        """Bring the pipeline to the beginning of an epoch; DALI resets none in mid-epoch, so it is built again."""
        built = self._current(epoch)
        if built.taken == len(built):
            built.rewind()
        elif built.taken or built.epoch != epoch:
            self._built = None
            built = self._current(epoch)
        return built

    def _current(self, epoch: int) -> BuiltPipeline:
        """Return the pipeline for this rank; build one if there is none, or if rank, device or seed have changed."""
        placement = self._placement()
        if self._built is None or self._built.placement != placement:
            self._built = None
            self._built = BuiltPipeline(self, placement, epoch)
        return self._built

    def _placement(self) -> Placement:
        rank, world_size = self._rank, self._world_size
        if rank is None or world_size is None:
            rank, world_size = rank_and_size()
        device_id = self.device.index
        if self.device.type == "cuda" and device_id is None:
            device_id = torch.cuda.current_device()
        return Placement(rank, world_size, device_id, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out.

        Returns:
            Epoch, batch, seed, the sizes that have to agree on loading, and DALI's own checkpoint of every rank.
        """
        if self._loaded is not None:  # nothing was taken since
            return dict(self._loaded)
        built = self._current(self.epoch)
        own = built.snapshot() if built.taken == self._batch else None  # a closed pipeline has no checkpoint
        pipelines = {built.placement.rank: own}
        if rank_and_size()[1] == built.placement.world_size > 1:
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
        changed = [name for name in COMMON if state[name] != sizes[name]]
        if changed and 0 < state["batch"] < state["batches"]:
            before = f"{changed[0]}={state[changed[0]]!r}"
            raise ValueError(
                f"The state of the DALILoader is of batch {state['batch']} of {state['batches']} and was saved with "
                f"{before}, now it is {sizes[changed[0]]!r}. Resume with {before}, or from a checkpoint of an epoch's "
                "end."
            )
        if changed:
            state["pipelines"] = {}
        self.seed, self.epoch, self._batch = state["seed"], state["epoch"], state["batch"]
        self._loaded, self._asked, self._begun = state, None, False

    def _sizes(self, built: BuiltPipeline) -> dict[str, Any]:
        return {
            "samples": built.samples, "batches": len(built), "batch_size": self.batch_size,
            "world_size": built.placement.world_size, "last_batch": self.last_batch,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the built pipeline, which another process builds for itself."""
        return {**self.__dict__, "_built": None, "_turn": None}


def count_cores(ranks_here: int | None = None) -> int:
    """Return this process's part of the cores, 8 at most."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, there // (ranks_here or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def check_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that a pipeline shall fill: the CPU or a CUDA device that is there."""
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: DALI fills the memory of 'cpu' and 'cuda' only.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device. Use device='cpu' or repair the driver.")
    return chosen


def _check_whole(least: int, optional: bool = False, **values: Any) -> None:
    for name, value in values.items():
        if not is_whole(value, least) and not (optional and value is None):
            kind = ValueError if is_whole(value, -(2**63)) else TypeError
            raise kind(f"{name}={value!r}: expected a whole number, at least {least}.")


def _check_ranks(rank: int | None, world_size: int | None) -> None:
    if (rank is None) != (world_size is None) or (rank or 0) >= (world_size or 1):
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: pass both or none, and rank below world_size.")


def _check_pipeline(pipeline: Any, options: bool) -> None:
    ready = isinstance(pipeline, FilePipeline)
    if not ready and not getattr(pipeline, "_is_pipeline_def", False):
        raise TypeError(
            f"pipeline={pipeline!r}: expected a ready pipeline such as ImageFolder(...), or a function decorated "
            "with nvidia.dali.pipeline_def, not called. Of a class of Pipeline its define_graph becomes that "
            "function; iterators of nvidia.dali.plugin.pytorch are not needed."
        )
    if ready and options:
        raise ValueError("arguments, reader and batches are for a pipeline function; a ready pipeline has its own.")


def _check_last_batch(last_batch: str) -> str:
    if str(last_batch).lower() not in ("fill", "drop", "partial"):
        raise ValueError(f"last_batch={last_batch!r}: expected 'fill', 'drop' or 'partial'.")
    return last_batch.lower()


def _check_names(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    if isinstance(outputs, str) or not outputs or len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs={outputs!r}: expected a sequence with a name of its own for each output.")
    return tuple(outputs)
