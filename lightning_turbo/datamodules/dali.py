"""DALIDataModule: DALI pipelines as Lightning's data, on the device and the shard that the Trainer gives each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_turbo import _optional
from lightning_turbo._lightning import LightningDataModule, MisconfigurationException, check_binding
from lightning_turbo.data.dali import DALILoader, ImageFolder
from lightning_turbo.data.dali.files import FilePipeline

__all__ = ["DALIDataModule"]

# jsonargparse takes the first that fits, and would take anything for an os.PathLike: Any stands for that.
Source = FilePipeline | DALILoader | DataLoader[Any] | Callable[..., Any] | str | Any

# Lightning's stages, and the loaders that each of them uses.
LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class DALIDataModule(LightningDataModule):
    """Feed a Trainer from DALI: training, validation, test and prediction.

    Each source is one of these; ``val``, ``test`` and ``predict`` take a list of them too:

    * a folder of images: ``ImageFolder`` with training's augmentation for ``train``, evaluation's for the others,
      and without labels for ``predict``;
    * a ready pipeline (``ImageFolder``, ``VolumeFiles``) or a function made by DALI's ``pipeline_def``;
    * a ``DALILoader`` with settings of its own;
    * anything else that can be iterated, such as a torch ``DataLoader``: it is handed on as it is.

    The pipelines are built in ``setup``, on each rank for itself: on the CPU if the Trainer runs there, else on the
    rank's own GPU, with the shard that Lightning's strategy gives the rank. ``teardown`` releases them. The state of
    the training loader is saved with every checkpoint, so that a run continues at the very batch where it stopped.

    Args:
        train: Source of the training batches.
        val: Source of the validation batches.
        test: Source of the test batches.
        predict: Source of the batches to predict.
        batch_size: Samples a batch and rank, at least 1.
        last_batch: What training does with the samples that do not fill a batch: ``"partial"``, ``"fill"`` or
            ``"drop"``. The others are always ``"partial"``, each sample once.
        device: ``"cpu"`` keeps the pipelines on the CPU although the Trainer runs on a GPU; by default they follow it.
        classes: Names of the classes in the order of their numbers, for the sources that are folders; by default the
            folders of ``train``, also for a validation set where one of them is missing.
        images: Further arguments of ``ImageFolder``, for the sources that are folders.
        options: Further arguments of every ``DALILoader`` that is made here: ``outputs``, ``num_threads``,
            ``prefetch``, ``seed``, ``arguments``, ``reader``, ``batches``.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If a source is none of these, ``images`` is not a mapping, or an argument has a wrong type.
        ValueError: If no source is passed, the classes of two sources differ, or an argument of a loader is wrong.

    Example:
        >>> data = DALIDataModule("images/train", "images/val", batch_size=64)  # doctest: +SKIP
        >>> Trainer().fit(model, data)  # doctest: +SKIP
    """

    def __init__(
        self,
        train: Source | None = None,
        val: Source | Sequence[Source] | None = None,
        test: Source | Sequence[Source] | None = None,
        predict: Source | Sequence[Source] | None = None,
        *,
        batch_size: int,
        last_batch: str = "partial",
        device: str | None = None,
        classes: Sequence[str] | None = None,
        images: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_binding("DALIDataModule")
        _optional.require("nvidia.dali", "DALIDataModule")
        sources = {"train": train, "val": val, "test": test, "predict": predict}
        _check_arguments(sources, device, images)
        self._batch_size, self._device, self._images, self._classes = batch_size, device, dict(images or {}), classes
        self._options = options  # in this form jsonargparse finds the arguments of DALILoader
        self.loaders: dict[str, Any] = {}
        self._dali: dict[str, list[DALILoader]] = {name: [] for name in sources}
        for name, source in sources.items():
            how = last_batch if name == "train" else "partial"
            if isinstance(source, (list, tuple)) and name != "train":
                self.loaders[name] = [self._make_loader(name, part, how) for part in source]
            else:
                self.loaders[name] = self._make_loader(name, source, how) if source is not None else None
            self._define(f"{name}_dataloader", source)

    def _define(self, hook: str, source: Any) -> None:
        """Let Lightning take a hook without a source for undefined, unless a subclass defines it."""
        if source is None and getattr(type(self), hook) is getattr(DALIDataModule, hook):
            setattr(self, hook, None)

    def _make_loader(self, name: str, source: Any, last_batch: str) -> Any:
        """Return the loader of one source."""
        if isinstance(source, (str, os.PathLike)):
            source = self._open_folder(name, source)
        if isinstance(source, FilePipeline) or getattr(source, "_is_pipeline_def", False):
            source = DALILoader(source, self._batch_size, last_batch=last_batch, **self._options)
        if isinstance(source, DALILoader):
            self._dali[name].append(source)
        _check_source(name, source)
        self._compare_classes(name, getattr(getattr(source, "pipeline", None), "classes", None))
        return source

    def _open_folder(self, name: str, folder: str | os.PathLike[str]) -> ImageFolder:
        kind: dict[str, Any] = {"labelled": False} if name == "predict" else {"classes": self._classes}
        return ImageFolder(folder, **{"train": name == "train", **kind, **self._images})

    def _compare_classes(self, name: str, classes: Sequence[str] | None) -> None:
        """Take the first classes for all sources, and refuse others: equal numbers would mean different things."""
        if not classes:
            return
        self._classes = self._classes or classes
        if list(classes) != list(self._classes):
            raise ValueError(
                f"{name} has the classes {list(classes)!r}, the sources before it {list(self._classes)!r}, so that a "
                "label would not mean the same. Pass classes= to DALIDataModule or to each ImageFolder."
            )

    def setup(self, stage: str) -> None:
        """Build the pipelines of a stage, on this rank's device and for its shard.

        Raises:
            ValueError: If there is no Trainer to tell device and shard.
            MisconfigurationException: If ``overfit_batches`` would repeat batches of an order that is shuffled.
        """
        trainer: Any = self.trainer
        if trainer is None:
            raise ValueError("DALIDataModule.setup needs a Trainer: pass the DALIDataModule to Trainer.fit.")
        shuffled = getattr(getattr(self.loaders["train"], "pipeline", None), "shuffle", False)
        if stage == "fit" and trainer.overfit_batches and shuffled:
            raise MisconfigurationException(
                f"overfit_batches={trainer.overfit_batches}, but the training order is shuffled, so that each epoch "
                "would have other batches. Pass a source that does not shuffle: ImageFolder(..., shuffle=False)."
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
        """Return the loader of the batches to predict."""
        return self.loaders["predict"]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loader, for Lightning's checkpoints."""
        train = self.loaders["train"]
        return {"train": train.state_dict()} if isinstance(train, DALILoader) and train.built else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of the training loader from a checkpoint."""
        train = self.loaders["train"]
        if isinstance(train, DALILoader) and train.built and "train" in state_dict:
            train.load_state_dict(state_dict["train"])

    def _own(self, stage: str) -> list[DALILoader]:
        return [loader for name in LOADERS[stage] for loader in self._dali[name]]


def _check_source(name: str, source: Any) -> None:
    unmade = isinstance(source, Mapping) and "class_path" in source  # what jsonargparse leaves of an error
    if unmade or not hasattr(source, "__iter__"):
        raise TypeError(
            f"{name}={source!r} is not a source of batches: expected a folder, a ready pipeline such as ImageFolder, "
            "a function decorated with nvidia.dali.pipeline_def, or a loader. In a file, correct class_path and "
            "init_args."
        )


def _check_arguments(sources: Mapping[str, Any], device: Any, images: Any) -> None:
    if set(map(type, sources.values())) == {type(None)}:
        raise ValueError("DALIDataModule has no source: pass at least one of train, val, test and predict.")
    if device not in (None, "cpu"):
        raise ValueError(f"device={device!r}: expected None, which follows the Trainer, or 'cpu'.")
    if images is not None and not isinstance(images, Mapping):
        raise TypeError(f"images={images!r}: expected further arguments of ImageFolder as a dictionary, or None.")
