"""The callback that loads the first batches of an epoch while the last one ends."""

from __future__ import annotations

from typing import Any

from lightning_turbo._lightning import (
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
    begin_epoch_again,
    check_binding,
    rank_zero_warn,
    set_sampler_epoch,
)
from lightning_turbo._random import same_random_numbers
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["PrefetchNextEpoch"]


class PrefetchNextEpoch(Callback):
    """Begin to load the next epoch before the last step of this one, so that no epoch begins with waiting.

    Without it, the first batch of each epoch is loaded while nothing else happens; and worker processes, where they
    are not persistent, start. With it, that goes on beside the last step, validation and the writing of checkpoints.
    Needs training loaders with prefetching: ``PrefetchDataModule`` or ``PrefetchLoader``. It adds ``ExactResume``.

    Warns:
        NoEffectWarning: If no training loader can begin early: it has no prefetching, or reads an ``IterableDataset``
            without worker processes or with a ``StatefulDataLoader``.

    Note:
        The order of an epoch is drawn from the random generators before the last step of the epoch before it, and not
        after validation. It is another order than without the callback if something draws in between on the CPU, or
        if several loaders shuffle, and the same in each run with the same seed. A checkpoint keeps it. What depends
        on the epoch and is set in ``on_train_epoch_start``, as a dataset's own ``set_epoch``, comes too late for the
        batches that are loaded by then.

    Example:
        >>> from lightning_turbo import PrefetchNextEpoch
        >>> callback = PrefetchNextEpoch()
    """

    def __init__(self) -> None:
        check_binding("PrefetchNextEpoch")
        self._begun: list[Any] = []
        self._restored: list[Any] = []
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add ``ExactResume``: Lightning alone loads no state of a loader after a whole epoch."""
        attach_exact_resume(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return which loaders have begun the next epoch. Its order is in their own states in the checkpoint."""
        return {"begun": [loader is not None for loader in self._begun]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep which loaders had begun the next epoch, for when training starts."""
        self._restored = state_dict["begun"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin again the epoch that was begun when the checkpoint was written."""
        restored, self._restored = self._restored, []
        able = _able_loaders(trainer)
        if not any(restored):
            return
        if len(restored) != len(able):
            rank_zero_warn(
                f"PrefetchNextEpoch: the checkpoint has the order of the next epoch for {len(restored)} training "
                f"loaders, and this run has {len(able)}. Their orders are drawn again.",
                category=TurboWarning,
            )
            return
        loop: Any = trainer.fit_loop
        with same_random_numbers():
            for loader, begun in zip(able, restored, strict=True):
                if begun:
                    set_sampler_epoch(loader, loop.epoch_progress.current.processed)
                    loader.start_next_epoch()
            begin_epoch_again(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the next epoch if this batch is the last, and another epoch follows."""
        self._begun = []  # it is this epoch now
        if not trainer.is_last_batch or not _goes_on(trainer):
            return
        for loader in _able_loaders(trainer):
            set_sampler_epoch(loader, trainer.current_epoch + 1)
            self._begun.append(loader if loader.start_next_epoch() else None)
        if not any(loader is not None for loader in self._begun) and not self._told:
            self._told = True
            rank_zero_warn(
                "PrefetchNextEpoch changes nothing here: no training loader can begin an epoch early. Inherit "
                "PrefetchDataModule or use PrefetchLoader, for an IterableDataset with num_workers above 0 and without "
                "StatefulDataLoader; or remove the callback.",
                category=NoEffectWarning,
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop what was begun."""
        self._drop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop what was begun, if no epoch came after all."""
        self._restored = []
        self._drop()

    def _drop(self) -> None:
        for loader in self._begun:
            if loader is not None:
                loader.load_state_dict(loader.state_dict())  # ends thread and workers, and keeps the order
        self._begun = []


def _goes_on(trainer: Any) -> bool:
    """Whether an epoch follows that takes its batches from the loaders of this one, as far as can be told."""
    following = trainer.current_epoch + 1
    over = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= following
    stops = 0 <= trainer.max_steps <= trainer.global_step + 1
    every = trainer.reload_dataloaders_every_n_epochs
    return not (over or stops or trainer.should_stop or (every and following % every == 0))


def _able_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders with prefetching, in whatever structure they are."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if hasattr(loader, "start_next_epoch")]
