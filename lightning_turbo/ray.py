"""Ray Train: the strategy for its workers, and reports within epochs. Ray is imported when they are made."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from typing import Any

from lightning_turbo import _optional
from lightning_turbo._checks import check_count, inherits
from lightning_turbo._lightning import (
    Callback,
    DDPStrategy,
    LightningModule,
    MisconfigurationException,
    Strategy,
    Trainer,
    bound_name,
    check_binding,
)
from lightning_turbo.errors import LightningMismatchError
from lightning_turbo.strategies.turbo_ddp import TurboDDPStrategy

__all__ = ["RayTurboDDPStrategy", "ReportSteps"]


class RayTurboDDPStrategy(TurboDDPStrategy):
    """``TurboDDPStrategy`` for the workers of Ray Train, which start the ranks and choose their devices.

    An instance is a ``ray.train.lightning.RayDDPStrategy`` too, as ``ray.train.lightning.prepare_trainer`` demands. It
    is made in the train function, beside the plugin ``ray.train.lightning.RayLightningEnvironment()``.

    Train functions run in a thread, where no signal arrives. The strategy therefore adds ``Preemption(signals=())``,
    which names ranks with different numbers of batches, and no more.

    Args:
        *args: As in ``TurboDDPStrategy``.
        **kwargs: As in ``TurboDDPStrategy``. The process group is that of ``ray.train.torch.TorchConfig``.

    Raises:
        MissingExtraError: If Ray is not installed.
        LightningMismatchError: If Ray uses the other import name of Lightning.

    Example:
        >>> strategy = RayTurboDDPStrategy()  # doctest: +SKIP
        >>> Trainer(strategy=strategy, plugins=[RayLightningEnvironment()], devices="auto")  # doctest: +SKIP
    """

    _signals = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> RayTurboDDPStrategy:
        """Make an instance of this class and Ray's."""
        return object.__new__(_with_ray(cls))


@functools.cache
def _with_ray(cls: type[RayTurboDDPStrategy]) -> type[RayTurboDDPStrategy]:
    """Return the class with Ray's among its bases."""
    _optional.require("ray", cls.__name__)
    own = bound_name()  # before Ray imports a copy of Lightning
    rays = importlib.import_module("ray.train.lightning").RayDDPStrategy
    if not issubclass(rays, DDPStrategy):
        raise LightningMismatchError(
            f"{cls.__name__} is built on {own}, but ray.train.lightning uses lightning.pytorch wherever it is "
            "installed. Import lightning.pytorch in this program, or uninstall the package lightning."
        )
    return cls if issubclass(cls, rays) else type(cls.__name__, (cls, rays), {"__module__": cls.__module__})


class ReportSteps(Callback):
    """Save a checkpoint and report it to Ray Train every few steps, and at the end of each epoch.

    ``ray.train.lightning.RayTrainReportCallback`` reports at the end of epochs alone. With ``RayTurboDDPStrategy`` and
    ``Prefetch`` a run that Ray starts again goes on from the step of the last report, with each sample of the epoch
    once, also with another number of workers.

    All ranks save one file, ``checkpoint.ckpt``, in the folder of Ray's checkpoint, after the other callbacks. The file
    is complete before the ranks report it, also with a ``CheckpointIO`` that writes in the background. The metrics are
    the Trainer's ``callback_metrics``, ``"epoch"`` and ``"step"``.

    Strategies that shard the model (FSDP, ``ModelParallelStrategy``, DeepSpeed) are refused: all of their ranks save at
    and load from the path of rank 0, but a report takes a folder of each rank.

    Args:
        every_n_steps: Optimizer steps between two reports, at least 1.

    Raises:
        MissingExtraError: If Ray is not installed.
        TypeError: If the number is not an integer.
        ValueError: If the number is below 1.
        MisconfigurationException: In ``fit``, with a strategy that shards the model.

    Example:
        >>> report = ReportSteps(every_n_steps=100)  # doctest: +SKIP
        >>> checkpoint = ray.train.get_checkpoint()  # doctest: +SKIP
        >>> with checkpoint.as_directory() as folder:  # doctest: +SKIP
        ...     trainer.fit(model, ckpt_path=f"{folder}/{ReportSteps.CHECKPOINT_NAME}")
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, every_n_steps: int) -> None:
        check_binding("ReportSteps")
        _optional.require("ray", "ReportSteps")
        self.every_n_steps = check_count("every_n_steps", every_n_steps)
        self._reported = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Come after the other callbacks, so that a checkpoint holds what they do with a batch."""
        if stage == "fit" and not inherits(trainer.strategy, Strategy, ("save_checkpoint",)):
            raise MisconfigurationException(
                "ReportSteps: expected a strategy that saves one file with the weights of all ranks, such as "
                f"RayTurboDDPStrategy, got {type(trainer.strategy).__name__}. Its ranks save parts, at a path of rank "
                "0, so that no rank could report the whole. Save with ModelCheckpoint(every_n_train_steps=N, dirpath=F)"
                " to a folder F that all machines share, and pass the newest checkpoint in it as ckpt_path."
            )
        callbacks: Any = trainer
        callbacks.callbacks = [*(each for each in callbacks.callbacks if each is not self), self]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count at the step at which the run begins or goes on."""
        self._reported = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report after each ``every_n_steps``-th step."""
        # A step count may pass over a multiple, as with several optimizers, and stays within an accumulation window.
        if trainer.global_step // self.every_n_steps > self._reported // self.every_n_steps:
            self.report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of an epoch, with the metrics of its validation."""
        self.report(trainer)

    def report(self, trainer: Any) -> None:
        """Save and report now, on all ranks; also as the ``ending`` of ``Preemption``.

        Args:
            trainer: The Trainer of a train function.
        """
        train = importlib.import_module("ray.train")
        self._reported = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME), weights_only=False)
            trainer.strategy.checkpoint_io.teardown()  # waits for a file that is written in a thread
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))
