"""``PrefetchDataModule``: prefetching for every loader of a LightningDataModule, through inheritance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lightning_turbo._lightning import LightningDataModule, check_binding
from lightning_turbo.callbacks.prefetch import Prefetch
from lightning_turbo.data.loading.loader import DEPTH

__all__ = ["PrefetchDataModule"]

_ACCEPTED = ("prefetch_batches", "threads", "device_prefetch", "device_transform", "sample_seeds", "exact_resume")


class PrefetchDataModule(LightningDataModule):
    """A ``LightningDataModule`` whose Trainer prepares the next batches in the background.

    Inherit from it instead of ``LightningDataModule``, or put it before an existing DataModule (``class
    Mine(PrefetchDataModule, Theirs)``). It does what the callback ``Prefetch`` does, with the same arguments, in runs
    of this DataModule: a Trainer that gets the DataModule also gets that callback, until the end of the run. The
    ``*_dataloader`` methods return their loaders unchanged, so nothing is prefetched without a Trainer; use
    ``PrefetchLoader`` there.

    Args:
        *args: Arguments of the next class.
        prefetch_batches: Number of batches each loader keeps ready, 1 or more.
        threads: Number of threads that load samples concurrently for each loader, 1 or more.
        device_prefetch: Whether to copy the next batches to a CUDA device ahead of time.
        device_transform: Called on each batch on the device, before ``on_after_batch_transfer``.
        sample_seeds: A seed that determines all random numbers of a sample.
        exact_resume: Whether to add ``ExactResume`` to the Trainer, so that a resumed run equals one that never
            stopped.
        **kwargs: Arguments of the next class.

    Raises:
        TypeError: If an argument has the wrong type, or is unknown and there is no other DataModule to take it.
        ValueError: If an argument is out of range.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> class Digits(PrefetchDataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader(range(4), batch_size=2)
        >>> datamodule = Digits(threads=2)
    """

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        device_prefetch: bool = True,
        device_transform: Callable[[Any], Any] | None = None,
        sample_seeds: int | None = None,
        exact_resume: bool = True,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        self._prefetch = _OfDataModule(
            prefetch_batches,
            threads,
            device_prefetch=device_prefetch,
            device_transform=device_transform,
            sample_seeds=sample_seeds,
            exact_resume=exact_resume,
        )
        alone = getattr(super().__init__, "__func__", None) is LightningDataModule.__init__
        if alone and (args or kwargs):  # ignored or an error, depending on the version
            given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            raise TypeError(
                f"{type(self).__name__} has no argument for {given}; expected {', '.join(_ACCEPTED)}, by name, and "
                "the arguments of a DataModule after it. Remove or rename what was passed."
            )
        super().__init__(*args, **kwargs)  # jsonargparse finds the class of the other arguments here

    @classmethod
    def from_datasets(cls, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's method, return a DataModule of datasets; also takes the arguments of this class."""
        theirs = inspect.signature(LightningDataModule.from_datasets).parameters
        given = {name: kwargs.pop(name) for name in [*kwargs] if name in theirs}
        datamodule = cls(**kwargs)
        plain = LightningDataModule.from_datasets(*args, **given)
        for name, method in vars(plain).items():
            if name.endswith("_dataloader"):
                setattr(datamodule, name, method)
        return datamodule

    # Lightning sets this attribute before it calls any hook, whichever hooks a subclass overrides.
    @property
    def trainer(self) -> Any:
        """The Trainer that runs this DataModule or ran it last. Setting it adds the callback to the Trainer."""
        return vars(self).get("trainer")

    @trainer.setter
    def trainer(self, trainer: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["trainer"] = trainer
        if trainer is None:
            return
        if "_prefetch" not in vars(self):
            raise RuntimeError(
                f"{type(self).__name__}.__init__ does not call super().__init__(); PrefetchDataModule needs it."
            )
        self._prefetch.attach(trainer)


class _OfDataModule(Prefetch):
    """The callback of a DataModule. It leaves the Trainer after the run, because the next run may use another one."""

    def attach(self, trainer: Any) -> None:
        """Add this callback before the others, because a checkpoint callback must come last."""
        if self not in trainer.callbacks:
            trainer.callbacks = [self, *trainer.callbacks]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore strategy and Trainer."""
        super().teardown(trainer, pl_module, stage)
        self._detach(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore strategy and Trainer."""
        super().on_exception(trainer, pl_module, exception)
        self._detach(trainer)

    def _detach(self, trainer: Any) -> None:
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]
