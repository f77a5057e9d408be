"""``DALIDataModule``: feed a Trainer from DALI pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_turbo import _optional
from lightning_turbo._checks import expect
from lightning_turbo._lightning import LightningDataModule, check_binding
from lightning_turbo.data.dali import DALILoader, ImageFolder
from lightning_turbo.data.dali.files import FilePipeline

__all__ = ["DALIDataModule"]

# jsonargparse takes the first type that fits. Any stands for os.PathLike, which would take every value.
Source = FilePipeline | DALILoader | DataLoader[Any] | Callable[..., Any] | str | Any

# Lightning's stages, and the loaders that each of them uses.
LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class DALIDataModule(LightningDataModule):
    """Load training, validation, test and prediction batches with DALI.

    ``val``, ``test`` and ``predict`` also take a list of sources. A source is one of:

    * a folder of images, read by ``ImageFolder`` with the augmentation of the training for ``train``, as for
      evaluation otherwise, and without labels for ``predict``;
    * a ready pipeline (``ImageFolder``, ``VolumeFiles``) or a function decorated with DALI's ``pipeline_def``;
    * a ``DALILoader`` with its own settings;
    * any other iterable, such as a torch ``DataLoader``, which the Trainer gets unchanged.

    ``setup`` builds the pipelines on each rank: on the CPU if the Trainer runs there, else on the GPU of the rank, with
    the shard that the strategy assigns. ``teardown`` releases them. Each checkpoint holds the state of the training
    loader, so that a run resumes at the next batch.

    Args:
        train: Source of the training batches.
        val: Source of the validation batches.
        test: Source of the test batches.
        predict: Source of the batches to predict.
        batch_size: Samples per batch and rank, at least 1.
        last_batch: What training does with the samples that do not fill a batch: ``"partial"``, ``"fill"`` or
            ``"drop"``. The other sources always use ``"partial"``, each sample once.
        classes: Class names in the order of their labels, for sources that are folders. Default: the folders of
            ``train``, also for a validation set that lacks one of them.
        images: Further arguments of ``ImageFolder``, for sources that are folders.
        options: Further arguments of each ``DALILoader``, such as ``num_threads`` or ``seed``.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If a source is none of these.
        ValueError: If there is no source, the classes of two sources differ, or an argument of a loader is wrong.

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
        classes: Sequence[str] | None = None,
        images: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_binding("DALIDataModule")
        _optional.require("nvidia.dali", "DALIDataModule")
        sources = {"train": train, "val": val, "test": test, "predict": predict}
        given = [name for name, source in sources.items() if source is not None]
        expect(given, "train, val, test, predict", None, "at least one source")
        self._batch_size, self._images, self._classes = batch_size, dict(images or {}), classes
        self._last_batch = {"train": last_batch}
        self._options = options  # written like this, jsonargparse finds the arguments of DALILoader
        self._dali: dict[str, list[DALILoader]] = {name: [] for name in sources}
        self.loaders = {name: self._make_loaders(name, source) for name, source in sources.items()}

    def _make_loaders(self, name: str, source: Any) -> Any:
        """Return the loader or the list of loaders for one hook of Lightning."""
        if source is None:
            return self._skip_stage(f"{name}_dataloader")
        if isinstance(source, (list, tuple)) and name != "train":
            return [self._make_loader(name, part) for part in source]
        return self._make_loader(name, source)

    def _skip_stage(self, hook: str) -> None:
        """Set a hook to ``None``, for which Lightning skips the stage, unless a subclass defines the hook itself."""
        if getattr(type(self), hook) is getattr(DALIDataModule, hook):
            setattr(self, hook, None)

    def _make_loader(self, name: str, source: Any) -> Any:
        """Return the loader of one source."""
        if isinstance(source, (str, os.PathLike)):
            kind: dict[str, Any] = {"labelled": False} if name == "predict" else {"classes": self._classes}
            source = ImageFolder(source, **{"train": name == "train", **kind, **self._images})
        if isinstance(source, FilePipeline) or getattr(source, "_is_pipeline_def", False):
            last_batch = self._last_batch.get(name, "partial")
            source = DALILoader(source, self._batch_size, last_batch=last_batch, **self._options)
        if isinstance(source, DALILoader):
            self._dali[name].append(source)
            self._compare_classes(name, getattr(source.pipeline, "classes", None))
        # jsonargparse leaves a dictionary with class_path if it cannot create the object.
        loads = hasattr(source, "__iter__") and not isinstance(source, Mapping)
        kinds = "a folder, a ready pipeline such as ImageFolder, a function decorated with pipeline_def, or a loader"
        expect(loads, name, source, f"{kinds} (in a config file, check class_path and init_args)", TypeError)
        return source

    def _compare_classes(self, name: str, classes: Sequence[str] | None) -> None:
        """Use the first classes for all sources, and refuse others, whose labels would have another meaning."""
        self._classes = self._classes or classes
        if classes and list(classes) != list(self._classes or ()):
            raise ValueError(
                f"{name}: expected the classes {self._classes!r} of the other sources, got {classes!r}. Pass classes= "
                "to DALIDataModule or to each ImageFolder."
            )

    def setup(self, stage: str) -> None:
        """Build the pipelines of a stage for the device and the shard of this rank.

        Raises:
            ValueError: If the datamodule has no Trainer.
        """
        trainer: Any = self.trainer
        expect(trainer, "trainer", trainer, "a Trainer, because it tells device and shard; use Trainer.fit")
        # The shard of the data is not the rank if a strategy also splits the model.
        shard = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        for loader in self._own(stage):
            loader.place(trainer.strategy.root_device, shard["rank"], shard["num_replicas"], trainer.num_devices)
            len(loader)  # builds the pipeline

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
        """Return the prediction loader."""
        return self.loaders["predict"]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loader for a checkpoint."""
        return {"train": loader.state_dict() for loader in self._dali["train"] if loader.built}  # noqa: B035 - one at most

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of the training loader from a checkpoint."""
        for loader in self._dali["train"]:
            if loader.built and "train" in state_dict:
                loader.load_state_dict(state_dict["train"])

    def _own(self, stage: str) -> list[DALILoader]:
        return [loader for name in LOADERS[stage] for loader in self._dali[name]]
