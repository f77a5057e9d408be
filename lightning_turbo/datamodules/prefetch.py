"""``PrefetchDataModule``: prefetching for every loader of a LightningDataModule, by inheritance."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_count, check_functions, check_switches
from lightning_turbo._lightning import (
    CombinedLoader,
    LightningDataModule,
    MisconfigurationException,
    batch_limits,
    check_binding,
    hooks_before_transfer,
)
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.data.contents import Contents
from lightning_turbo.data.device import DeviceTransfer
from lightning_turbo.data.loader import DEPTH, PrefetchLoader, with_workers
from lightning_turbo.data.sample_seeds import SeededDataset, check_seed, index_sampler_name, seed_samples
from lightning_turbo.data.tune_workers import tune_workers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["PrefetchDataModule"]

_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_ACCEPTED = ("prefetch_batches", "threads", "device_prefetch", "device_transform", "auto_workers", "sample_seeds")


@dataclass(frozen=True)
class _Settings:
    """What a PrefetchDataModule was asked for."""

    prefetch_batches: int
    threads: int
    device_prefetch: bool
    device_transform: Callable[[Any], Any] | None
    auto_workers: bool
    sample_seeds: int | None

    def __post_init__(self) -> None:
        check_count("prefetch_batches", self.prefetch_batches)
        check_count("threads", self.threads)
        check_switches(device_prefetch=self.device_prefetch, auto_workers=self.auto_workers)
        check_functions(device_transform=self.device_transform)
        if self.sample_seeds is not None:
            check_seed(self.sample_seeds, "sample_seeds")


class PrefetchDataModule(LightningDataModule):
    """A ``LightningDataModule`` whose loaders prepare their next batches in the background.

    Inherit it in place of ``LightningDataModule``, or in front of a DataModule that is there
    (``class Mine(PrefetchDataModule, Theirs)``). Every ``DataLoader`` that a ``*_dataloader`` method returns, alone or
    in lists, dicts and ``CombinedLoader``, becomes a ``PrefetchLoader``; other iterables are handed on as they are.
    On a CUDA device the next batches are copied on a side stream as well.

    Args:
        *args: For the class behind this one.
        prefetch_batches: How many batches each loader keeps ready, 1 or more. The default of 8 serves loads of uneven
            duration.
        threads: How many threads load samples at the same time for each loader, in this process or in each worker
            process, 1 or more; see ``PrefetchLoader``. The datasets have to allow calls from several threads. With 1,
            the loaders of this DataModule that have no worker processes load in turns, as they may share a dataset.
        device_prefetch: Whether the next batches are copied ahead on a CUDA device. Not done, with a warning, where
            ``on_before_batch_transfer`` or ``transfer_batch_to_device`` is overridden, because these have to see each
            batch in its turn.
        device_transform: Called on each batch on the device, before ``on_after_batch_transfer``; for example
            ``Normalize``.
        auto_workers: Whether the number of worker processes of each loader is found by measurement (``tune_workers``)
            when the loader is first asked for; ``num_workers="auto"`` says the same, except in YAML. A loader that
            gives no batch in time, or whose data could be other data with worker processes, keeps its own number, with
            a warning.
        sample_seeds: A seed from which, with the epoch and the index of a sample, all random numbers follow that are
            drawn while it is loaded; see ``seed_samples``. A loader that is seeded already keeps its seed.
        **kwargs: For the class behind this one.

    Raises:
        TypeError: If an argument has a wrong type, or is unknown here and no DataModule is behind to take it.
        ValueError: If an argument is out of range.

    Example:
        >>> class Digits(PrefetchDataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader(range(4), batch_size=2)
        >>> [batch.tolist() for batch in Digits().train_dataloader()]
        [[0, 1], [2, 3]]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _LOADERS:
            method = getattr(cls, name)
            # What LightningDataModule itself defines stays, so that Lightning sees that it is not overridden.
            if method is not getattr(LightningDataModule, name) and not hasattr(method, "_prefetches"):
                setattr(cls, name, _with_prefetching(method, name))

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        device_prefetch: bool = True,
        device_transform: Callable[[Any], Any] | None = None,
        auto_workers: bool = False,
        sample_seeds: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        auto_workers = _take_auto(kwargs) or auto_workers
        self._prefetch = _Settings(
            prefetch_batches, threads, device_prefetch, device_transform, auto_workers, sample_seeds
        )
        self._prefetch_found: dict[tuple[str, int], int] = {}
        self._prefetch_transfers: dict[torch.device, DeviceTransfer] = {}
        alone = getattr(super().__init__, "__func__", None) is LightningDataModule.__init__
        if alone and (args or kwargs):  # which it ignores, or fails on, depending on the version
            raise TypeError(
                f"{type(self).__name__} has no argument for {_describe(args, kwargs)}; expected are "
                f"{', '.join(_ACCEPTED)}, by name, and those of a DataModule behind it. Remove or rename what was "
                "passed."
            )
        super().__init__(*args, **kwargs)  # jsonargparse reads here which class takes the others

    @classmethod
    def from_datasets(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a DataModule of datasets, as Lightning's method does; takes the arguments of this class as well."""
        theirs = inspect.signature(LightningDataModule.from_datasets).parameters
        given = {name: kwargs.pop(name) for name in [*kwargs] if name in theirs}
        datamodule, plain = cls(**kwargs), LightningDataModule.from_datasets(*args, **given)
        for name in vars(plain).keys() & _LOADERS:
            setattr(datamodule, name, vars(plain)[name])
        return datamodule

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LOADERS and callable(value):  # some users set the methods on the object
            value = MethodType(_with_prefetching(lambda _, given=value: given(), name), self)
        super().__setattr__(name, value)
        if name == "trainer" and value is not None:  # Lightning sets it before a run restores anything
            attach_exact_resume(value)


def _take_auto(settings: dict[str, Any]) -> bool:
    """Take ``num_workers`` out of settings if it is ``"auto"`` or ``None``; tell whether it is ``"auto"``."""
    workers = settings.get("num_workers", 0)
    if workers in (None, "auto"):
        del settings["num_workers"]
    return workers == "auto"


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def _with_prefetching(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a ``*_dataloader`` method whose loaders have prefetching."""

    @functools.wraps(method)
    def loaders(datamodule: Any) -> Any:
        if "_prefetch" not in vars(datamodule):
            raise RuntimeError(
                f"{type(datamodule).__name__}.__init__ does not call super().__init__(); PrefetchDataModule needs it."
            )
        return _add_prefetching(datamodule, method(datamodule), name)

    vars(loaders)["_prefetches"] = True
    return loaders


def _add_prefetching(datamodule: Any, loaders: Any, name: str) -> Any:
    """Return the loaders of one method with prefetching; their structure stays."""
    trainer = getattr(datamodule, "trainer", None)
    transfer = _choose_transfer(datamodule, trainer) if trainer is not None else None
    count = iter(range(1 << 30))
    seeds = datamodule._prefetch.sample_seeds

    def convert(loader: DataLoader[Any]) -> Any:
        place = name, next(count)
        if seeds is not None and not isinstance(loader.dataset, SeededDataset):
            loader = seed_samples(loader, seeds)
        twin = _convert(datamodule, loader, place, transfer)
        if trainer is not None:
            twin.limit_batches(functools.partial(_wanted, weakref.ref(trainer), *place))
            if isinstance(twin.dataset, SeededDataset):  # also one that is made again for each epoch begins here
                getattr(twin, index_sampler_name(twin)).epoch = trainer.current_epoch
        return twin

    return _map_loaders(loaders, convert)


def _convert(datamodule: Any, loader: DataLoader[Any], place: tuple[str, int], transfer: DeviceTransfer | None) -> Any:
    """Return a loader with prefetching, as the settings say; one that has it is kept, and its own settings too."""
    settings: _Settings = datamodule._prefetch
    if settings.auto_workers:
        found = datamodule._prefetch_found
        if place not in found:
            found[place] = _tune(loader, place[0], getattr(loader, "threads", settings.threads))
        loader = with_workers(loader, found[place])
    if not isinstance(loader, PrefetchLoader):
        return PrefetchLoader.of(
            loader, prefetch_batches=settings.prefetch_batches, threads=settings.threads, transfer=transfer
        )
    loader.transfer = transfer or loader.transfer
    return loader


def _choose_transfer(datamodule: Any, trainer: Any) -> DeviceTransfer | None:
    """Return what moves batches ahead under this Trainer; ``None`` if Lightning's own move is left to do it."""
    settings: _Settings = datamodule._prefetch
    device, transform = trainer.strategy.root_device, settings.device_transform
    # A strategy that keeps batches ahead on the device itself says so with this attribute.
    alone = device.type == "cuda" and not getattr(trainer.strategy, "device_prefetch", False)
    ahead = settings.device_prefetch and alone
    if not ahead and transform is None:
        return None
    if hooks := hooks_before_transfer(trainer.lightning_module, datamodule):
        _set_aside(transform, " and ".join(hooks))
        return None
    # One side stream a run.
    return datamodule._prefetch_transfers.setdefault(device, DeviceTransfer(device, transform=transform, ahead=ahead))


def _set_aside(transform: Any, hooks: str) -> None:
    """Tell that hooks have to see each batch in its turn: a warning, or an error where a transform would be lost."""
    if transform is not None:
        raise MisconfigurationException(
            f"device_transform={transform!r} runs between on_before_batch_transfer and on_after_batch_transfer, but "
            f"{hooks} is overridden. Call it in on_after_batch_transfer instead."
        )
    warnings.warn(
        f"device_prefetch has no effect, because {hooks} is overridden and has to see each batch in its turn. Loading "
        "goes on in the background. Pass device_prefetch=False, or use on_after_batch_transfer.",
        NoEffectWarning,
        stacklevel=2,
    )


def _wanted(ref: weakref.ref[Any], name: str, index: int) -> float:
    """Return how many batches a Trainer asks a loader for at most; infinity where it does not say."""
    trainer = ref()
    running = trainer is not None and trainer.state.status.value == "running"
    limits = (batch_limits(trainer, name) if running else None) or []
    return limits[index] if index < len(limits) else float("inf")


def _tune(loader: DataLoader[Any], name: str, threads: int) -> int:
    """Return the number of worker processes found by measurement, or the loader's own where it has to keep that."""

    def make_loader(num_workers: int) -> Any:
        twin = with_workers(loader, num_workers)
        return twin if threads == 1 else PrefetchLoader.of(twin, threads=threads)

    why = _why_processes_would_differ(loader.dataset)
    if not why:
        try:
            return tune_workers(make_loader).num_workers
        except RuntimeError as error:  # a batch may be slow or missing; one that is broken tells so itself, in its turn
            why = f"{error} Give the loader a number of processes itself, for example what tune_workers finds."
    warnings.warn(
        f"auto_workers leaves a loader of {name} as it is, with num_workers={loader.num_workers}: {why}",
        NoEffectWarning,
        stacklevel=2,
    )
    return loader.num_workers


def _why_processes_would_differ(dataset: Any) -> str:
    """Return why worker processes might not load what this process loads; empty if nothing speaks against them."""
    if isinstance(dataset, IterableDataset):
        return (
            f"{type(dataset).__name__} is an IterableDataset, and with another number of processes it gives other "
            "batches: each sample several times, if it does not divide its data among them."
        )
    error = Contents(dataset).error
    if error is None:
        return ""
    return (
        f"the dataset holds something that processes cannot share, as an open file or a connection ({error}). Open it "
        "in each process, at the first sample."
    )


def _map_loaders(loaders: Any, function: Callable[[Any], Any]) -> Any:
    """Call ``function`` on every ``DataLoader`` in a structure of loaders and return the like structure."""

    def convert(each: Any) -> Any:
        if isinstance(each, CombinedLoader):
            twin = copy.copy(each)
            twin.flattened = [_map_loaders(loader, function) for loader in each.flattened]
            return twin
        return function(each) if isinstance(each, DataLoader) else each

    return tree_map(convert, loaders)  # it takes apart what Lightning takes apart
