"""Two callbacks for settings that are otherwise written where a script makes its loaders and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_turbo._lightning import Callback, check_binding, rank_zero_warn
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.data.loader import PrefetchLoader, with_workers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["FusedOptimizers", "LoaderSettings", "can_fuse", "set_up_loader"]

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def can_fuse(optimizer: Optimizer) -> bool:
    """Tell whether torch has a fused step for an optimizer, and it does not run already."""
    groups = optimizer.param_groups
    return type(optimizer) in FUSED and not any(group.get("fused") for group in groups)


def fuse(optimizer: Optimizer) -> None:
    """Switch an optimizer to its fused step, whose counts are on the device of the parameters."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


def set_up_loader(
    loader: Any, *, num_workers: int | None, persistent_workers: bool, prefetch: bool, threads: int
) -> Any:
    """Return a loader like ``loader`` with these settings; what is not a ``DataLoader`` comes back as it is."""
    if not isinstance(loader, DataLoader):
        return loader
    if num_workers is not None:
        loader = with_workers(loader, num_workers, persistent=persistent_workers)
    if prefetch and not isinstance(loader, PrefetchLoader):
        return PrefetchLoader.of(loader, threads=threads)
    return loader


class LoaderSettings(Callback):
    """Load the batches of every loader of a Trainer with these settings, wherever the loaders are made.

    For loaders of one's own, write the settings there: ``DataLoader(num_workers=...)``, ``PrefetchDataModule``. Adds
    ``ExactResume``, as Lightning resumes loaders with worker processes in another order.

    Args:
        num_workers: Worker processes of each ``DataLoader``; ``None`` keeps the loader's own.
        persistent_workers: Whether they stay from epoch to epoch: each epoch begins sooner, and from the second one on
            the samples come in another order than without, because torch draws a random number less.
        prefetch: Whether a background thread prepares batches ahead, see ``PrefetchLoader``.
        threads: How many threads do, 1 or more.

    Example:
        >>> from lightning_turbo import LoaderSettings
        >>> callback = LoaderSettings(num_workers=2)
    """

    def __init__(
        self,
        num_workers: int | None = None,
        persistent_workers: bool = False,
        prefetch: bool = False,
        threads: int = 1,
    ) -> None:
        check_binding("LoaderSettings")
        self.settings: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent_workers,
            "prefetch": prefetch,
            "threads": threads,
        }
        self._replaced: ReplacedMethod | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the strategy, which Lightning asks about each loader, return one with the settings."""
        attach_exact_resume(trainer)
        self._restore()
        self._replaced = ReplacedMethod(trainer.strategy, "process_dataloader", self._process)

    def _process(self, process: Callable[[Any], Any], loader: Any) -> Any:
        return process(set_up_loader(loader, **self.settings))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the strategy as it was."""
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the strategy as it was."""
        self._restore()

    def _restore(self) -> None:
        if self._replaced is not None:
            self._replaced.put_back()
            self._replaced = None


class FusedOptimizers(Callback):
    """Run the steps of Adam, AdamW, SGD and Adagrad fused, as ``fused=True`` in their constructors does.

    Warns:
        NoEffectWarning: If no optimizer has a fused step.

    Example:
        >>> from lightning_turbo import FusedOptimizers
        >>> callback = FusedOptimizers()
    """

    def __init__(self) -> None:
        check_binding("FusedOptimizers")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch the optimizers, whose states are restored by now."""
        for optimizer in filter(can_fuse, trainer.optimizers):
            fuse(optimizer)
        if not any(type(optimizer) in FUSED for optimizer in trainer.optimizers):
            rank_zero_warn(
                "FusedOptimizers changes nothing here: no optimizer is an Adam, AdamW, SGD or Adagrad of torch. "
                "Remove it.",
                category=NoEffectWarning,
            )
