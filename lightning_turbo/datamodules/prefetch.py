"""``PrefetchDataModule``: prefetching for every loader of a LightningDataModule, by inheritance."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_functions, check_switches, expect
from lightning_turbo._lightning import (
    CombinedLoader,
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    batch_limits,
    check_binding,
    given_hyperparameters,
)
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.data.contents import Contents
from lightning_turbo.data.device import DeviceTransfer
from lightning_turbo.data.loader import DEPTH, PrefetchLoader, lock_of
from lightning_turbo.data.prefetcher import check_count
from lightning_turbo.data.sample_seeds import SeededDataset, check_seed, index_sampler_name, seed_samples
from lightning_turbo.data.tune_workers import tune_workers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["PrefetchDataModule"]

_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_SHARED = ("num_workers", "pin_memory")
_ACCEPTED = ("prefetch_batches", "threads", "device_prefetch", "device_transform", "sample_seeds", *_SHARED)


@dataclass(frozen=True)
class _Settings:
    """What a PrefetchDataModule was asked for."""

    prefetch_batches: int
    threads: int
    device_prefetch: bool
    device_transform: Callable[[Any], Any] | None
    num_workers: int | str | None
    pin_memory: bool | None
    sample_seeds: int | None

    def __post_init__(self) -> None:
        check_count("prefetch_batches", self.prefetch_batches)
        check_count("threads", self.threads)
        check_switches(device_prefetch=self.device_prefetch)
        check_functions(device_transform=self.device_transform)
        if self.sample_seeds is not None:
            check_seed(self.sample_seeds, "sample_seeds")
        expect(self.pin_memory in (None, True, False), "pin_memory", self.pin_memory, "True, False or None", TypeError)
        if isinstance(self.num_workers, str):
            expect(self.num_workers == "auto", "num_workers", self.num_workers, "a number of processes or 'auto'")
        elif self.num_workers is not None:
            check_count("num_workers", self.num_workers, 0)


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
        num_workers: Worker processes of every loader, or ``"auto"`` to find the number by measurement
            (``tune_workers``) when a loader is first asked for, which leaves one alone that gives no batch in time, or
            whose data could be other data with worker processes; ``None`` leaves the loaders' own.
        pin_memory: Replaces the loaders' own ``pin_memory``; ``None`` leaves it.
        sample_seeds: A seed from which, with the epoch and the index of a sample, all random numbers follow that are
            drawn while it is loaded; see ``seed_samples``. A loader that is seeded already keeps its seed.
        **kwargs: For the class behind this one. If that class has an argument ``num_workers`` or ``pin_memory``, a
            value given for it goes there (``num_workers="auto"`` does not), and its ``hparams`` hold what it got.

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
        num_workers: int | str | None = None,
        pin_memory: bool | None = None,
        sample_seeds: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        theirs = inspect.signature(super().__init__).parameters
        own = {"num_workers": num_workers, "pin_memory": pin_memory}
        for name in _SHARED:
            if name in theirs and own[name] is not None and own[name] != "auto":
                kwargs[name], own[name] = own[name], None
        own["sample_seeds"] = sample_seeds
        self._prefetch = _Settings(prefetch_batches, threads, device_prefetch, device_transform, **own)
        self._prefetch_found: dict[tuple[str, int], int] = {}
        self._prefetch_transfers: dict[str, DeviceTransfer] = {}
        self._prefetch_warned = False
        if getattr(super().__init__, "__func__", None) is LightningDataModule.__init__:
            # It ignores arguments, or fails on them, depending on the version. Lightning's from_datasets offers
            # batch_size to every constructor that takes keywords. (jsonargparse takes a kwargs.pop for an argument.)
            if "batch_size" in kwargs:
                del kwargs["batch_size"]  # noqa: RUF051
            if args or kwargs:
                raise TypeError(
                    f"{type(self).__name__} has no argument for {_describe(args, kwargs)}; expected are "
                    f"{', '.join(_ACCEPTED)}, by name, and those of a DataModule behind it. Remove or rename what was "
                    "passed."
                )
        # save_hyperparameters in a class behind reads these names here, and is to find what that class got.
        behind = {**_defaults_behind(type(self)), **dict(zip(theirs, args, strict=False))}
        num_workers = behind.get("num_workers", num_workers) if num_workers in (None, "auto") else num_workers
        pin_memory = behind.get("pin_memory", pin_memory) if pin_memory is None else pin_memory
        with given_hyperparameters(num_workers=num_workers, pin_memory=pin_memory):
            super().__init__(*args, **kwargs)  # jsonargparse reads here which class takes the others

    def __setattr__(self, name: str, value: Any) -> None:
        # from_datasets, and some users, set the methods on the object.
        value = _with_prefetching(value, name, self) if name in _LOADERS and callable(value) else value
        super().__setattr__(name, value)
        if name == "trainer" and value is not None:  # Lightning sets it before a run restores anything
            attach_exact_resume(value)


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def _with_prefetching(method: Callable[..., Any], name: str, owner: Any = None) -> Callable[..., Any]:
    """Return a ``*_dataloader`` method of a class, or of the object ``owner``, whose loaders have prefetching."""

    @functools.wraps(method)
    def loaders(*self: Any) -> Any:
        datamodule = self[0] if owner is None else owner
        if "_prefetch" not in vars(datamodule):
            raise RuntimeError(
                f"{type(datamodule).__name__}.__init__ does not call super().__init__(); PrefetchDataModule needs it."
            )
        return _add_prefetching(datamodule, method(*self), name)

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
        vars(twin)["_prefetch_turn"] = lock_of(datamodule)  # a lock cannot be copied, and Lightning records attributes
        if trainer is not None:
            twin._prefetch_wanted = _Wanted(trainer, *place)
            if isinstance(twin.dataset, SeededDataset):  # also one that is made again for each epoch begins here
                getattr(twin, index_sampler_name(twin)).epoch = trainer.current_epoch
        return twin

    return _map_loaders(loaders, convert)


def _convert(datamodule: Any, loader: DataLoader[Any], place: tuple[str, int], transfer: DeviceTransfer | None) -> Any:
    """Return a loader with prefetching, as the settings say; one that has it is kept, and its own settings too."""
    settings: _Settings = datamodule._prefetch
    changes = _changes(datamodule, loader, place)
    if not isinstance(loader, PrefetchLoader):
        return PrefetchLoader.of(
            _variant(loader, **changes), prefetch_batches=settings.prefetch_batches, threads=settings.threads,
            transfer=transfer,
        )  # fmt: skip
    twin: Any = _variant(loader, **changes) if changes else loader
    twin.transfer = transfer or twin.transfer
    return twin


def _changes(datamodule: Any, loader: DataLoader[Any], place: tuple[str, int]) -> dict[str, Any]:
    """Return the settings of workers and memory in which a loader is to differ from what it is."""
    settings: _Settings = datamodule._prefetch
    workers = settings.num_workers
    if workers == "auto":
        found = datamodule._prefetch_found
        if place not in found:
            found[place] = _tune(loader, place[0], getattr(loader, "threads", settings.threads))
        workers = found[place]
    chosen = {"num_workers": workers, "pin_memory": settings.pin_memory}
    return {name: value for name, value in chosen.items() if value is not None and value != getattr(loader, name)}


def _choose_transfer(datamodule: Any, trainer: Any) -> DeviceTransfer | None:
    """Return what moves batches ahead under this Trainer; ``None`` if Lightning's own move is left to do it."""
    settings: _Settings = datamodule._prefetch
    strategy, transform = trainer.strategy, settings.device_transform
    device = strategy.root_device
    # A strategy that keeps batches ahead on the device itself says so with this attribute.
    streams = (
        settings.device_prefetch and device.type == "cuda" and not getattr(strategy, "prefetches_to_device", False)
    )
    if not streams and transform is None:
        return None
    hooks = _overridden(datamodule, LightningDataModule) + _overridden(trainer.lightning_module, LightningModule)
    if hooks and transform is not None:
        raise MisconfigurationException(
            f"device_transform={transform!r} runs between on_before_batch_transfer and on_after_batch_transfer, but "
            f"{' and '.join(hooks)} is overridden. Call it in on_after_batch_transfer instead."
        )
    if hooks:
        if not datamodule._prefetch_warned:
            datamodule._prefetch_warned = True
            warnings.warn(
                f"device_prefetch has no effect, because {' and '.join(hooks)} is overridden and has to see each batch "
                "in its turn. Loading goes on in the background. Pass device_prefetch=False, or use "
                "on_after_batch_transfer.",
                NoEffectWarning,
                stacklevel=2,
            )
        return None
    if device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(
            f"device_transform works on CPU and CUDA devices, and this trainer uses {device}. "
            "Call it in on_after_batch_transfer instead."
        )
    transfers = datamodule._prefetch_transfers
    if str(device) not in transfers:  # one side stream a run
        transfers[str(device)] = DeviceTransfer(device, transform=transform, ahead=streams)
    return transfers[str(device)]


class _Wanted:
    """How many batches a Trainer asks a loader for at most; infinity where it does not say, and in another process."""

    def __init__(self, trainer: Any, name: str, index: int) -> None:
        self.trainer: weakref.ref[Any] | None = weakref.ref(trainer)
        self.name = name
        self.index = index

    def __call__(self) -> int | float:
        trainer = None if self.trainer is None else self.trainer()
        running = trainer is not None and trainer.state.status.value == "running"
        limits = (batch_limits(trainer, self.name) if running else None) or []
        return limits[self.index] if self.index < len(limits) else float("inf")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}


def _defaults_behind(cls: type) -> dict[str, Any]:
    # The defaults of the constructors behind PrefetchDataModule, as far as each hands on what it does not know.
    defaults: dict[str, Any] = {}
    for behind in cls.__mro__[cls.__mro__.index(PrefetchDataModule) + 1 :]:
        parameters = inspect.signature(behind.__init__).parameters
        defaults = {**{name: parameter.default for name, parameter in parameters.items()}, **defaults}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return defaults


def _tune(loader: DataLoader[Any], name: str, threads: int) -> int:
    """Return the number of worker processes found by measurement, or the loader's own where it has to keep that."""
    why = _why_processes_would_differ(loader.dataset)
    if not why:
        try:
            return tune_workers(
                lambda **settings: (
                    _variant(loader, **settings)
                    if threads == 1
                    else PrefetchLoader.of(_variant(loader, **settings), threads=threads)
                )
            ).num_workers
        except RuntimeError as error:  # a batch may be slow or missing; one that is broken tells so itself, in its turn
            why = f"{error} Pass a number of processes in place of 'auto', for example what tune_workers finds."
    warnings.warn(
        f"num_workers='auto' leaves a loader of {name} as it is, with num_workers={loader.num_workers}: {why}",
        NoEffectWarning,
        stacklevel=2,
    )
    return loader.num_workers


def _why_processes_would_differ(dataset: Any) -> str:
    """Return why worker processes might not load what this process loads; empty if nothing speaks against them."""
    if isinstance(dataset, IterableDataset):
        return (
            f"{type(dataset).__name__} is an IterableDataset, and with another number of processes it gives other "
            "batches: each sample several times, if it does not divide its data among them. Pass a number."
        )
    error = Contents(dataset).error
    if error is None:
        return ""
    return (
        f"the dataset holds something that processes cannot share, as an open file or a connection ({error}). Open it "
        "in each process, at the first sample, or pass a number."
    )


def _overridden(owner: Any, base: type) -> list[str]:
    """Which of the hooks that see a batch before its copy are not Lightning's own."""
    names = ("on_before_batch_transfer", "transfer_batch_to_device")
    found = [name for name in names if getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)]
    return [f"{type(owner).__name__}.{name}" for name in found]


def _variant(loader: DataLoader[Any], **settings: Any) -> Any:
    """A copy of ``loader`` with other settings of its workers; those that are ``None`` stay."""
    twin = copy.copy(loader)
    for name, value in vars(twin).items():
        if isinstance(value, list) and name.startswith("__"):
            vars(twin)[name] = list(value)  # changes are noted in it, and these are the copy's own
    workers = settings.get("num_workers")
    if workers == 0 and loader.num_workers:
        # What a loader without workers refuses.
        twin.multiprocessing_context = twin.prefetch_factor = None
        twin.timeout = 0
        vars(twin)["persistent_workers"] = False
    vars(twin)["_iterator"] = None
    for name in ("num_workers", "pin_memory"):
        value = settings.get(name)
        if value is not None and value != getattr(twin, name):
            setattr(twin, name, value)
    if twin.num_workers and twin.prefetch_factor is None:
        twin.prefetch_factor = 2
    return twin


def _map_loaders(loaders: Any, function: Callable[[Any], Any]) -> Any:
    """Call ``function`` on every ``DataLoader`` in a structure of loaders and return the like structure."""

    def convert(each: Any) -> Any:
        if isinstance(each, CombinedLoader):
            twin = copy.copy(each)
            twin.flattened = [_map_loaders(loader, function) for loader in each.flattened]
            return twin
        return function(each) if isinstance(each, DataLoader) else each

    return tree_map(convert, loaders)  # it takes apart what Lightning takes apart
