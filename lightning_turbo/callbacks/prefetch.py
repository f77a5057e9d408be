"""``Prefetch``: prefetching for every loader of a Trainer, wherever the loader is created."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_turbo._checks import answer_unknown, check_count, check_functions, check_switches
from lightning_turbo._lightning import (
    Callback,
    MisconfigurationException,
    check_binding,
    rank_zero_warn,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import batch_limit, gives_sampler, hooks_before_transfer, is_asked_by_loop
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.loading.device import DeviceTransfer
from lightning_turbo.data.loading.loader import DEPTH, PrefetchLoader, with_workers
from lightning_turbo.data.loading.tune_workers import tune_workers, why_not_processes
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler
from lightning_turbo.data.sample_seeds import EpochBatchSampler, SeededDataset, check_seed, seed_samples
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
    loader.limit_batches(limit, is_asked_by_loop, functools.partial(_epoch, weakref.ref(trainer)))
    return loader


class Prefetch(Callback):
    """Prepare the next batches of every ``DataLoader`` of a Trainer in the background.

    Each ``DataLoader`` is replaced with an equivalent ``PrefetchLoader``, wherever it is created: in a LightningModule,
    in a DataModule, or passed to ``fit``; alone, in lists, dicts or a ``CombinedLoader``. It is wrapped when Lightning
    passes it to the strategy, after a distributed sampler was added. On a CUDA device the next batches are also copied,
    on a side stream. A ``PrefetchLoader`` keeps its settings.

    The callback starts in ``setup`` and undoes all its changes in ``teardown`` or on an exception. Until then a loader
    loads no further ahead than the Trainer will ask for: a live stream under ``limit_train_batches`` loses no sample.
    If anything else iterates a loader meanwhile, such as a callback that shows a batch, it gets an iterator of its own.

    If a Trainer has several, including a ``PrefetchDataModule``, the first one acts for all, with the combined
    settings.

    Args:
        prefetch_batches: Number of batches each loader keeps ready, 1 or more. The default of 8 suits loads of uneven
            duration.
        threads: Number of threads that load samples concurrently for each loader, in this process or in each worker
            process, 1 or more; see ``PrefetchLoader``. The datasets must allow calls from several threads. With 1,
            loaders without worker processes take turns, because they may share a dataset.
        num_workers: Number of worker processes of each loader, 0 or more; ``None`` keeps the loader's own.
        persistent_workers: Whether worker processes stay alive between epochs. Epochs then start sooner, and from the
            second one on the samples come in another order than without, because torch draws one random number less.
            ``None`` keeps the loader's setting.
        auto_workers: Whether to measure the best number of worker processes (``tune_workers``), once for each stage,
            dataset class and batch size. A loader that yields no batch in time, or whose data might change with worker
            processes, keeps its own number, with a warning.
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
        TypeError: If an argument has the wrong type or does not exist; the message suggests the right name.
        ValueError: If an argument is out of range, or has no effect in combination with the others.
        MisconfigurationException: In ``setup``, if two of these callbacks give different values for one setting.

    Warns:
        NoEffectWarning: If a loader is not a ``DataLoader``, which is then used unchanged, or if
            ``persistent_workers=True`` applies to a loader without worker processes.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import Prefetch
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[Prefetch(threads=2)])
    """

    @answer_unknown(
        batches="prefetch_batches",
        buffer_size="prefetch_batches",
        depth="prefetch_batches",
        max_prefetch="prefetch_batches",
        prefetch_factor="prefetch_batches",
        queue_size="prefetch_batches",
        workers="num_workers",
        pin_memory="device_prefetch",
        seed="sample_seeds",
        seeds="sample_seeds",
        transform="device_transform",
    )
    def __init__(
        self,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        *,
        num_workers: int | None = None,
        persistent_workers: bool | None = None,
        auto_workers: bool = False,
        device_prefetch: bool = True,
        device_transform: Callable[[Any], Any] | None = None,
        sample_seeds: int | None = None,
        exact_resume: bool = True,
    ) -> None:
        check_binding("Prefetch")
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_count("threads", threads)
        check_switches(auto_workers=auto_workers, device_prefetch=device_prefetch, exact_resume=exact_resume)
        check_switches(none=True, persistent_workers=persistent_workers)
        check_functions(device_transform=device_transform)
        self.num_workers = num_workers if num_workers is None else check_count("num_workers", num_workers, 0)
        if auto_workers and num_workers is not None:
            raise ValueError(f"num_workers={num_workers} has no effect with auto_workers=True. Leave one of them out.")
        if persistent_workers and num_workers == 0:
            raise ValueError("persistent_workers=True: expected num_workers of 1 or more, got 0.")
        self.persistent_workers = persistent_workers
        self.auto_workers = auto_workers
        self.exact_resume = exact_resume
        self.device_prefetch = device_prefetch
        self.device_transform = device_transform
        self.sample_seeds = sample_seeds if sample_seeds is None else check_seed(sample_seeds, "sample_seeds")
        self._acting: Prefetch | None = None  # during a run: itself, or one with the combined settings
        self._found_workers: dict[Any, int | None] = {}
        self._replaced: ReplacedMethod | None = None
        self._given: list[tuple[weakref.ref[Any], Any]] = []  # the user's loaders and their original transfers

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy, to which Lightning passes each loader, return a prefetching one."""
        self._end()
        together = [each for each in trainer.callbacks if isinstance(each, Prefetch)]
        if together and together[0] is not self:
            return
        self._acting = self if len(together) < 2 else Prefetch(**_join_settings(together))
        self._acting._found_workers = self._found_workers
        self._acting._begin(trainer)

    def _begin(self, trainer: Any) -> None:
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
        acting = self._acting
        self._acting = None
        if acting is not None:
            acting._put_back()

    def _put_back(self) -> None:
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
        if self.sample_seeds is not None and not isinstance(loader.dataset, SeededDataset):
            loader = seed_samples(loader, self.sample_seeds)
        workers = self._count_workers(trainer, loader)
        if workers is not None:
            loader = with_workers(loader, workers, persistent=self.persistent_workers)
        if self.persistent_workers and not loader.num_workers:
            rank_zero_warn(
                f"persistent_workers=True has no effect on a loader of {_stage_of(trainer)}_dataloader, which has no "
                "worker processes. Pass num_workers=1 or more to Prefetch or to the loader, or leave it out.",
                category=NoEffectWarning,
            )
        before = getattr(loader, "transfer", None)
        wrapped = wrap_loader(
            loader, trainer, prefetch_batches=self.prefetch_batches, threads=self.threads, transfer=transfer
        )
        if wrapped is owned:
            self._given.append((weakref.ref(wrapped), before))
        return wrapped

    def _tell_of_foreign(self, loader: Any) -> None:
        if not isinstance(loader, DALILoader):  # a DALILoader prefetches by itself
            rank_zero_warn(
                f"Prefetching has no effect on a {type(loader).__name__}, which is not a DataLoader: its "
                "batches are loaded one at a time. Call PrefetchLoader.of on the DataLoader inside, or use a "
                "PrefetchIterator there.",
                category=NoEffectWarning,
            )

    def _count_workers(self, trainer: Any, loader: DataLoader[Any]) -> int | None:
        """Return the number of worker processes for a loader; ``None`` to leave the loader unchanged."""
        if not self.auto_workers:
            if self.num_workers is None and self.persistent_workers is None:
                return None
            return loader.num_workers if self.num_workers is None else self.num_workers
        stage = _stage_of(trainer)
        place = stage, type(loader.dataset), loader.batch_size
        if place not in self._found_workers:
            self._found_workers[place] = _tune(loader, stage, getattr(loader, "threads", self.threads))
        found = self._found_workers[place]
        return loader.num_workers if found is None else found

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


def _join_settings(callbacks: Sequence[Prefetch]) -> dict[str, Any]:
    """Return the arguments of one callback that combines the settings of several.

    Raises:
        MisconfigurationException: If two of them give different values and neither is the default.
    """
    joined: dict[str, Any] = {}
    for name, parameter in inspect.signature(Prefetch).parameters.items():
        given = [value for each in callbacks if (value := getattr(each, name)) != parameter.default]
        if any(value != given[0] for value in given):
            raise MisconfigurationException(
                f"{name}: expected one value for all loaders of a Trainer, got {' and '.join(map(repr, given))} from "
                "the Prefetch of its callbacks and its PrefetchDataModule. Give it to one of them."
            )
        if given:
            joined[name] = given[0]
    return joined


def _tell_of_replaced(batch_sampler: Any, stage: str) -> None:
    """Warn about a user's batch sampler that Lightning has rebuilt around its own sampler."""
    kind = type(batch_sampler)
    ours = (BatchSampler, EpochBatchSampler, LengthBatchSampler)
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


def _tune(loader: DataLoader[Any], stage: str, threads: int) -> int | None:
    """Return the measured best number of worker processes; ``None`` if each loader must keep its own."""

    def make_loader(num_workers: int) -> Any:
        twin = with_workers(loader, num_workers)
        return twin if threads == 1 else PrefetchLoader.of(twin, threads=threads)

    why = why_not_processes(loader.dataset)
    if not why:
        try:
            return tune_workers(make_loader).num_workers
        except RuntimeError as error:  # slow or missing batches; a broken one raises in its turn
            why = f"{error} Set num_workers on the loader, for example to the result of tune_workers."
    rank_zero_warn(
        f"auto_workers does not change a loader of {stage}_dataloader with num_workers={loader.num_workers}: {why}",
        category=NoEffectWarning,
    )
    return None
