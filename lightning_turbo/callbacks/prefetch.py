"""``Prefetch``: prefetching for every loader of a Trainer, wherever the loader is created."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_turbo._checks import check_count, check_functions, check_switches
from lightning_turbo._lightning import (
    Callback,
    MisconfigurationException,
    check_binding,
    rank_zero_warn,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import batch_limit, gives_sampler, hooks_before_transfer
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.loading.device import DeviceTransfer
from lightning_turbo.data.loading.loader import DEPTH, PrefetchLoader, seed_samples
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler
from lightning_turbo.data.sample_seeds import check_seed
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["Prefetch", "wrap_loader"]


def wrap_loader(
    loader: DataLoader[Any],
    trainer: Any,
    *,
    prefetch_batches: int = DEPTH,
    threads: int = 1,
    transfer: DeviceTransfer | None = None,
) -> PrefetchLoader[Any]:
    """Return a prefetching loader like ``loader`` that loads no further ahead than a Trainer will ask for.

    Args:
        loader: A ``DataLoader``. A ``PrefetchLoader`` is returned itself, with its own settings.
        trainer: The Trainer that will iterate it.
        prefetch_batches: Number of batches to keep ready, 1 or more.
        threads: Number of threads that load samples concurrently, 1 or more.
        transfer: Moves the batches to a device; ``None`` keeps the loader's own.
    """
    if not isinstance(loader, PrefetchLoader):
        loader = PrefetchLoader.of(loader, prefetch_batches=prefetch_batches, threads=threads)
    loader.transfer = transfer or loader.transfer
    limit = functools.partial(_limit, weakref.ref(trainer), weakref.ref(loader))
    loader.limit_batches(limit, functools.partial(_epoch, weakref.ref(trainer)))
    return loader


class Prefetch(Callback):
    """Prepare the next batches of every ``DataLoader`` of a Trainer in the background.

    Each ``DataLoader`` is replaced with an equivalent ``PrefetchLoader``, wherever it is created: in a LightningModule,
    in a DataModule, or passed to ``fit``; alone, in lists, dicts or a ``CombinedLoader``. It is wrapped when Lightning
    passes it to the strategy, after a distributed sampler was added. On a CUDA device the next batches are also copied,
    on a side stream. A ``PrefetchLoader`` keeps its settings.

    The callback starts in ``setup`` and undoes all its changes in ``teardown`` or on an exception. Until then a loader
    loads no further ahead than the Trainer will ask for: a live stream under ``limit_train_batches`` loses no sample.
    Whoever else iterates a loader meanwhile, such as a callback that shows a batch, disturbs nothing. A Trainer takes
    one of these callbacks; a ``PrefetchDataModule`` brings one.

    Args:
        prefetch_batches: Number of batches each loader without worker processes keeps ready, 1 or more. The default of
            8 suits loads of uneven duration.
        threads: Number of threads that load samples concurrently for each loader, in this process or in each worker
            process, 1 or more; see ``PrefetchLoader``. The datasets must allow calls from several threads.
        device_prefetch: Whether to copy the next batches to a CUDA device ahead of time. Has no effect, with a warning,
            if ``on_before_batch_transfer`` or ``transfer_batch_to_device`` is overridden, because those hooks must see
            each batch in its turn.
        device_transform: Called on each batch on the device, before ``on_after_batch_transfer``; for example
            ``Normalize``.
        sample_seeds: A seed. Together with the epoch and the index of a sample, it determines all random numbers drawn
            while the sample is loaded; see ``seed_samples``. A loader that is already seeded keeps its seed.
        exact_resume: Whether to add ``ExactResume`` to the Trainer, so that a resumed run equals one that never
            stopped. ``False`` leaves checkpoints unchanged; Lightning then resumes shuffled loaders in another order.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In ``setup``, if the Trainer has another one of these callbacks.

    Warns:
        NoEffectWarning: If a loader is not a ``DataLoader``, which is then used unchanged.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import Prefetch
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[Prefetch(threads=2)])
    """

    def __init__(
        self,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        *,
        device_prefetch: bool = True,
        device_transform: Callable[[Any], Any] | None = None,
        sample_seeds: int | None = None,
        exact_resume: bool = True,
    ) -> None:
        check_binding("Prefetch")
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_count("threads", threads)
        check_switches(device_prefetch=device_prefetch, exact_resume=exact_resume)
        check_functions(device_transform=device_transform)
        self.exact_resume = exact_resume
        self.device_prefetch = device_prefetch
        self.device_transform = device_transform
        self.sample_seeds = sample_seeds if sample_seeds is None else check_seed(sample_seeds, "sample_seeds")
        self._replaced: ReplacedMethod | None = None
        self._given: list[tuple[weakref.ref[Any], Any]] = []  # the user's loaders and their original transfers

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy, to which Lightning passes each loader, return a prefetching one."""
        self._end()
        if sum(isinstance(each, Prefetch) for each in trainer.callbacks) > 1:
            raise MisconfigurationException(
                "Prefetch: expected one for all loaders of a Trainer, got several in its callbacks and its "
                "PrefetchDataModule. Leave one of them out, and give its arguments to the other."
            )
        if self.exact_resume:
            attach_exact_resume(trainer)
        process = functools.partial(self._process, trainer, self._choose_transfer(trainer))
        self._replaced = ReplacedMethod(trainer.strategy, "process_dataloader", process)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the strategy."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the strategy."""
        self._end()

    def _end(self) -> None:
        if self._replaced is not None:
            self._replaced.put_back()
            self._replaced = None
        # In reverse: a loader that was processed again, for example for another epoch, had our transfer by then.
        for loader, transfer in reversed(self._given):
            if (alive := loader()) is not None:
                alive.transfer = transfer
                alive.limit_batches(None)
        self._given.clear()

    def _process(self, trainer: Any, transfer: Any, process: Callable[[Any], Any], loader: Any) -> Any:
        return process(self._wrap(trainer, transfer, loader))

    def _wrap(self, trainer: Any, transfer: DeviceTransfer | None, loader: Any) -> Any:
        """Return a prefetching loader like ``loader``, or the loader itself if it does not support prefetching."""
        if not isinstance(loader, DataLoader):
            self._tell_of_foreign(loader)
            return loader
        if gives_sampler(trainer):
            _tell_of_replaced(loader.batch_sampler, _stage_of(trainer))
        owned = loader
        if self.sample_seeds is not None and getattr(loader, "sample_seeds", None) is None:
            loader = self._with_seeds(loader)
        before = getattr(loader, "transfer", None)
        wrapped = wrap_loader(
            loader, trainer, prefetch_batches=self.prefetch_batches, threads=self.threads, transfer=transfer
        )
        if wrapped is owned:
            self._given.append((weakref.ref(wrapped), before))
        return wrapped

    def _with_seeds(self, loader: DataLoader[Any]) -> PrefetchLoader[Any]:
        if isinstance(loader, PrefetchLoader):  # which keeps its settings
            return seed_samples(loader, self.sample_seeds or 0)
        return PrefetchLoader.of(
            loader, prefetch_batches=self.prefetch_batches, threads=self.threads, sample_seeds=self.sample_seeds
        )

    def _tell_of_foreign(self, loader: Any) -> None:
        if not isinstance(loader, DALILoader):  # a DALILoader prefetches by itself
            rank_zero_warn(
                f"Prefetching has no effect on a {type(loader).__name__}, which is not a DataLoader: its "
                "batches are loaded one at a time. Call PrefetchLoader.of on the DataLoader inside, or use a "
                "PrefetchIterator there.",
                category=NoEffectWarning,
            )

    def _choose_transfer(self, trainer: Any) -> DeviceTransfer | None:
        """Return what moves batches ahead of time under this Trainer; ``None`` leaves the move to Lightning."""
        device = trainer.strategy.root_device
        transform = self.device_transform
        # A strategy that copies batches ahead of time has this attribute.
        theirs = getattr(trainer.strategy, "device_prefetch", False)
        if transform is None and (theirs or not self.device_prefetch or device.type != "cuda"):
            return None
        if hooks := hooks_before_transfer(trainer.lightning_module, getattr(trainer, "datamodule", None)):
            _set_aside(transform, " and ".join(hooks))
            return None
        return DeviceTransfer(device, transform=transform, ahead=self.device_prefetch)


def _tell_of_replaced(batch_sampler: Any, stage: str) -> None:
    """Warn about a user's batch sampler that Lightning has rebuilt around its own sampler."""
    kind = type(batch_sampler)
    ours = (BatchSampler, LengthBatchSampler)
    if isinstance(batch_sampler, BatchSampler) and kind not in ours:
        rank_zero_warn(
            f"Lightning has rebuilt the {kind.__name__} of {stage}_dataloader around a sampler that splits the samples "
            "among the ranks: its batches differ from those on one rank, and ranks may have different numbers of them. "
            "Use LengthBatchSampler, or Trainer(use_distributed_sampler=False) with a batch sampler that splits its "
            "batches itself.",
            category=TurboWarning,
        )


def _stage_of(trainer: Any) -> str:
    return trainer.state.stage.dataloader_prefix


def _set_aside(transform: Any, hooks: str) -> None:
    """Report that hooks must see each batch in its turn: a warning, or an error if a transform would be lost."""
    if transform is not None:
        raise MisconfigurationException(
            f"device_transform={transform!r} runs between on_before_batch_transfer and on_after_batch_transfer, but "
            f"{hooks} is overridden. Call it in on_after_batch_transfer instead."
        )
    rank_zero_warn(
        f"device_prefetch has no effect, because {hooks} is overridden and must see each batch in its turn. Loading in "
        "the background continues. Pass device_prefetch=False, or use on_after_batch_transfer.",
        category=NoEffectWarning,
    )


def _limit(trainer: weakref.ref[Any], loader: weakref.ref[Any]) -> float:
    """Return the most batches that a Trainer asks a loader for. The loader may outlive both."""
    asks, asked = trainer(), loader()
    return inf if asks is None or asked is None else batch_limit(asks, asked)


def _epoch(trainer: weakref.ref[Any]) -> int:
    """Return the current epoch of a Trainer."""
    asked = trainer()
    return 0 if asked is None else asked.current_epoch
