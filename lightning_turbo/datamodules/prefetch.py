"""``PrefetchDataModule``: prefetching for every loader of a LightningDataModule, by inheritance."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_functions, check_switches
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
from lightning_turbo.data.background import check_count, check_threads
from lightning_turbo.data.loader import DEPTH, PrefetchLoader
from lightning_turbo.data.transfer import DeviceTransfer
from lightning_turbo.data.workers import tune_workers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["PrefetchDataModule"]

_LOADERS = frozenset({"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"})
_SHARED = ("num_workers", "pin_memory")
_ACCEPTED = ("prefetch_batches", "prefetch_threads", "device_prefetch", "device_transform", *_SHARED)


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
        prefetch_threads: How many threads load for each loader without worker processes at the same time, 1 or more;
            see ``PrefetchLoader``. The datasets have to allow calls from several threads.
        device_prefetch: Whether the next batches are copied ahead on a CUDA device. Set aside, with a warning, where
            ``on_before_batch_transfer`` or ``transfer_batch_to_device`` is overridden, because these have to see each
            batch in its turn.
        device_transform: Called on each batch on the device, before ``on_after_batch_transfer``; for example
            ``Normalize``.
        num_workers: Worker processes of every loader, or ``"auto"`` to find the number by measurement
            (``tune_workers``) when a loader is first asked for, which leaves one alone that gives no batch in time;
            ``None`` leaves the loaders' own.
        pin_memory: Replaces the loaders' own ``pin_memory``; ``None`` leaves it.
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

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        prefetch_threads: int = 1,
        device_prefetch: bool = True,
        device_transform: Callable[[Any], Any] | None = None,
        num_workers: int | str | None = None,
        pin_memory: bool | None = None,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        theirs = inspect.signature(super().__init__).parameters
        given = {"num_workers": num_workers, "pin_memory": pin_memory}
        for name in _SHARED:
            if name in theirs and given[name] is not None and given[name] != "auto":
                kwargs[name], given[name] = given[name], None
        self._prefetch = _Settings(prefetch_batches, prefetch_threads, device_prefetch, device_transform, **given)
        if getattr(super().__init__, "__func__", None) is LightningDataModule.__init__:
            # It ignores arguments, or fails on them, depending on the version. Lightning's from_datasets offers
            # batch_size to every constructor that takes keywords. (jsonargparse takes a kwargs.pop for an argument.)
            if "batch_size" in kwargs:
                del kwargs["batch_size"]  # noqa: RUF051
            if args or kwargs:
                given_here = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
                raise TypeError(
                    f"{type(self).__name__} has no argument for {given_here}; accepted are {', '.join(_ACCEPTED)}, by "
                    "name, and those of a DataModule behind it. Remove or rename what is given."
                )
        # save_hyperparameters in a class behind reads these names here, and is to find what that class got.
        behind = {**_defaults_behind(type(self)), **dict(zip(theirs, args, strict=False))}
        num_workers = behind.get("num_workers", num_workers) if num_workers in (None, "auto") else num_workers
        pin_memory = behind.get("pin_memory", pin_memory) if pin_memory is None else pin_memory
        with given_hyperparameters(num_workers=num_workers, pin_memory=pin_memory):
            super().__init__(*args, **kwargs)  # jsonargparse reads here which class takes the others

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "trainer" and value is not None:  # Lightning sets it before a run restores anything
            attach_exact_resume(value)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        # Whoever defined the method, here or in a class behind, or set it on the object: its loaders get prefetching.
        # Methods of LightningDataModule itself stay recognisable as not overridden through __wrapped__.
        return self._prefetching_method(name, value) if name in _LOADERS and callable(value) else value

    def _prefetching_method(self, name: str, method: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(method)
        def loaders() -> Any:
            settings: _Settings | None = vars(self).get("_prefetch")
            if settings is None:
                raise RuntimeError(
                    f"{type(self).__name__}.__init__ does not call super().__init__(); PrefetchDataModule needs it."
                )
            return settings.apply(method(), name, getattr(self, "trainer", None), self)

        return loaders


class _Settings:
    """What a PrefetchDataModule was asked for, and the objects that last for its run."""

    def __init__(
        self,
        prefetch_batches: Any,
        prefetch_threads: Any,
        device_prefetch: Any,
        device_transform: Any,
        num_workers: Any,
        pin_memory: Any,
    ) -> None:
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.prefetch_threads = check_threads("prefetch_threads", prefetch_threads)
        check_switches(device_prefetch=device_prefetch)
        check_functions(device_transform=device_transform)
        if pin_memory is not None and not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory={pin_memory!r} is no bool; pass True, False, or None for the loaders' own.")
        if isinstance(num_workers, str) and num_workers != "auto":
            raise ValueError(f"num_workers={num_workers!r} is unknown; pass a number of processes or 'auto'.")
        if num_workers is not None and not isinstance(num_workers, str):
            if isinstance(num_workers, bool) or not isinstance(num_workers, int):
                raise TypeError(f"num_workers={num_workers!r} is no integer; pass a number of processes or 'auto'.")
            if num_workers < 0:
                raise ValueError(f"num_workers={num_workers!r} is negative; pass 0 or more processes, or 'auto'.")
        self.device_prefetch = device_prefetch
        self.device_transform = device_transform
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.found: dict[tuple[str, int], dict[str, Any]] = {}
        self.transfers: dict[str, DeviceTransfer] = {}
        self.warned = False

    def apply(self, loaders: Any, name: str, trainer: Any, datamodule: Any) -> Any:
        """Return the loaders of one method with prefetching; their structure stays."""
        transfer = self._transfer(trainer, datamodule) if trainer is not None else None
        count = iter(range(1 << 30))

        def convert(loader: DataLoader[Any]) -> Any:
            place = name, next(count)
            twin = self._convert(loader, place, transfer)
            if trainer is not None:
                twin._prefetch_wanted = _Wanted(trainer, *place)
            return twin

        return _map_loaders(loaders, convert)

    def _convert(self, loader: DataLoader[Any], place: tuple[str, int], transfer: DeviceTransfer | None) -> Any:
        own = isinstance(loader, PrefetchLoader)
        ahead: Any = loader if own else self
        chosen: dict[str, Any] = {
            "num_workers": self.num_workers,
            "prefetch_factor": None,
            "pin_memory": self.pin_memory,
        }
        if self.num_workers == "auto":
            if place not in self.found:
                self.found[place] = _tuned(loader, place[0], ahead.prefetch_threads)
            chosen.update({key: value for key, value in self.found[place].items() if chosen[key] in (None, "auto")})
        twin = _variant(loader, **chosen)
        return PrefetchLoader.of(
            twin,
            prefetch_batches=ahead.prefetch_batches,
            prefetch_threads=ahead.prefetch_threads,
            transfer=transfer if transfer or not own else loader.transfer,
        )

    def _transfer(self, trainer: Any, datamodule: Any) -> DeviceTransfer | None:
        """What moves batches ahead under this trainer; ``None`` if Lightning's own move is left to do it."""
        strategy = trainer.strategy
        device = strategy.root_device
        # A strategy that keeps batches ahead on the device itself says so with this attribute.
        streams = (
            self.device_prefetch and device.type == "cuda" and not getattr(strategy, "prefetches_to_device", False)
        )
        if not streams and self.device_transform is None:
            return None
        hooks = _overridden(datamodule, LightningDataModule) + _overridden(trainer.lightning_module, LightningModule)
        if hooks and self.device_transform is not None:
            raise MisconfigurationException(
                f"device_transform={self.device_transform!r} runs between on_before_batch_transfer and "
                f"on_after_batch_transfer, but {' and '.join(hooks)} is overridden. Call it in "
                "on_after_batch_transfer instead."
            )
        if hooks:
            if not self.warned:
                self.warned = True
                warnings.warn(
                    f"device_prefetch is set aside, because {' and '.join(hooks)} is overridden and has to see each "
                    "batch in its turn. Loading goes on in the background. Pass device_prefetch=False, or use "
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
        if str(device) not in self.transfers:  # one side stream a run
            apart: dict[str, Any] = {} if streams else {"min_bytes": sys.maxsize}
            self.transfers[str(device)] = DeviceTransfer(device, transform=self.device_transform, **apart)
        return self.transfers[str(device)]


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


def _tuned(loader: DataLoader[Any], name: str, threads: int) -> dict[str, Any]:
    """The settings of ``loader`` found by measurement, or its own where nothing could be measured."""
    try:
        return tune_workers(
            lambda **settings: PrefetchLoader.of(_variant(loader, **settings), prefetch_threads=threads)
        ).settings
    except RuntimeError as error:  # a batch may be slow or missing; one that is broken tells so itself, in its turn
        warnings.warn(
            f"num_workers='auto' leaves a loader of {name} as it is, with num_workers={loader.num_workers}: {error} "
            "Pass a number of processes in place of 'auto', for example what tune_workers finds in more seconds.",
            NoEffectWarning,
            stacklevel=2,
        )
        return {key: getattr(loader, key) for key in ("num_workers", "prefetch_factor", "pin_memory")}


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
    for name in ("num_workers", "prefetch_factor", "pin_memory"):
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
