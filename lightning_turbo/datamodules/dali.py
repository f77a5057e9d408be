"""DALIDataModule: DALI pipelines as Lightning's data, on the device and the shard that the Trainer gives each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_turbo import _optional
from lightning_turbo._lightning import LightningDataModule, MisconfigurationException, check_binding
from lightning_turbo.data.dali import DALILoader, FileRecipe, ImageFolder

__all__ = ["DALIDataModule"]

# jsonargparse takes the first that fits, and would take anything for an os.PathLike: Any stands for that.
Source = FileRecipe | DALILoader | DataLoader[Any] | Callable[..., Any] | str | Any

# Lightning's stages, and the loaders that each of them uses.
LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class DALIDataModule(LightningDataModule):
    """Feed a Trainer from DALI: training, validation, test and prediction.

    Each source is one of these:

    * a folder of images: ``ImageFolder`` with training's augmentation for ``train``, evaluation's for the others,
      and without labels for ``predict``;
    * a ready pipeline (``ImageFolder``, ``VolumeFiles``) or a function made by DALI's ``pipeline_def``;
    * a ``DALILoader`` with settings of its own;
    * anything else that can be iterated, such as a torch ``DataLoader``: it is handed on as it is.

    The pipelines are built in ``setup``, on each rank for itself: on the CPU if the Trainer runs there, else on the
    rank's own GPU, with the shard that Lightning's strategy gives the rank. ``teardown`` releases them. The state of
    the training loader is saved with every checkpoint, so that a run goes on at the very batch where it stopped.

    Args:
        train: Source of the training batches.
        val: Source of the validation batches.
        test: Source of the test batches.
        predict: Source of the batches to predict.
        batch_size: Samples a batch and rank, at least 1.
        last_batch: What training does with the samples that do not fill a batch: ``"partial"``, ``"fill"`` or
            ``"drop"``. The others are always ``"partial"``, each sample once.
        device: ``"cpu"`` keeps the pipelines on the CPU although the Trainer runs on a GPU; by default they follow it.
        images: Further arguments of ``ImageFolder``, for the sources that are folders.
        options: Further arguments of every ``DALILoader`` that is made here: ``outputs``, ``num_threads``,
            ``prefetch``, ``seed``, ``arguments``, ``reader``, ``batches``.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If a source is none of these, ``images`` is no mapping, or an argument of a loader has a wrong type.
        ValueError: If no source is given, or the arguments of a loader are wrong.

    Example:
        >>> data = DALIDataModule("images/train", "images/val", batch_size=64)  # doctest: +SKIP
        >>> Trainer().fit(model, data)  # doctest: +SKIP
    """

    def __init__(
        self,
        train: Source | None = None,
        val: Source | None = None,
        test: Source | None = None,
        predict: Source | None = None,
        *,
        batch_size: int,
        last_batch: str = "partial",
        device: str | None = None,
        images: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_binding("DALIDataModule")
        _optional.require("nvidia.dali", "DALIDataModule")
        sources = {"train": train, "val": val, "test": test, "predict": predict}
        if all(source is None for source in sources.values()):
            raise ValueError("DALIDataModule without a source: give at least one of train, val, test and predict.")
        if device not in (None, "cpu"):
            raise ValueError(f"device={device!r}: accepted are None, which follows the Trainer, and 'cpu'.")
        if images is not None and not isinstance(images, Mapping):
            raise TypeError(f"images={images!r}: give further arguments of ImageFolder as a dictionary, or None.")
        self._device = device
        self.loaders: dict[str, Any] = {}
        for name, source in sources.items():
            if isinstance(source, (str, os.PathLike)):
                labels = {} if name != "predict" else {"labelled": False}
                source = ImageFolder(Path(source), **{"train": name == "train", **labels, **(images or {})})
            if isinstance(source, FileRecipe) or (callable(source) and getattr(source, "_is_pipeline_def", False)):
                how = last_batch if name == "train" else "partial"
                source = DALILoader(source, batch_size, last_batch=how, **options)
            not_made = isinstance(source, Mapping) and "class_path" in source  # what jsonargparse leaves of an error
            if source is not None and (not_made or not hasattr(source, "__iter__")):
                raise TypeError(
                    f"{name}={source!r} is no source of batches: give a folder, a ready pipeline such as ImageFolder, "
                    "a function decorated with nvidia.dali.pipeline_def, or a loader. In a file, correct class_path "
                    "and init_args."
                )
            self.loaders[name] = source
            hook = f"{name}_dataloader"
            if source is None and getattr(type(self), hook) is getattr(DALIDataModule, hook):
                setattr(self, hook, None)  # Lightning takes the hook for undefined

    def setup(self, stage: str) -> None:
        """Build the pipelines of a stage, on this rank's device and for its shard.

        Raises:
            ValueError: If no Trainer is there to tell device and shard.
            MisconfigurationException: If ``overfit_batches`` shall repeat the batches of an order that is shuffled.
        """
        trainer: Any = self.trainer
        if trainer is None:
            raise ValueError("DALIDataModule.setup needs a Trainer: pass the DALIDataModule to Trainer.fit.")
        recipe = getattr(self.loaders["train"], "pipeline", None)
        if stage == "fit" and trainer.overfit_batches and isinstance(recipe, FileRecipe) and recipe.shuffle:
            raise MisconfigurationException(
                f"overfit_batches={trainer.overfit_batches}, but the training order is shuffled, so that each epoch "
                "would have other batches. Give a source that does not shuffle: ImageFolder(..., shuffle=False)."
            )
        # The shard of the data, which is not the rank where a strategy also splits the model.
        shard = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        for loader in self._own(stage):
            device = self._device or trainer.strategy.root_device
            loader.place(device, shard["rank"], shard["num_replicas"], trainer.num_devices)
            loader.build()

    def teardown(self, stage: str) -> None:
        """Release the pipelines of a stage."""
        for loader in self._own(stage):
            loader.close()

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return self.loaders["train"]

    def val_dataloader(self) -> Any:
        """Return the validation loader."""
        return self.loaders["val"]

    def test_dataloader(self) -> Any:
        """Return the test loader."""
        return self.loaders["test"]

    def predict_dataloader(self) -> Any:
        """Return the loader of what is to be predicted."""
        return self.loaders["predict"]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loader, for Lightning's checkpoints."""
        train = self.loaders["train"]
        return {"train": train.state_dict()} if isinstance(train, DALILoader) and train.built else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the position of the training loader from a checkpoint."""
        train = self.loaders["train"]
        if isinstance(train, DALILoader) and train.built and "train" in state_dict:
            train.load_state_dict(state_dict["train"])

    def _own(self, stage: str) -> list[DALILoader]:
        return [self.loaders[name] for name in LOADERS[stage] if isinstance(self.loaders[name], DALILoader)]
