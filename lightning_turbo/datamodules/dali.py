"""``DALIDataModule``: feeds a Trainer from DALI pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_turbo import _optional
from lightning_turbo._checks import expect
from lightning_turbo._lightning import LightningDataModule, check_binding
from lightning_turbo.data.dali import DALILoader, DynamicPipeline, ImageFolder

__all__ = ["DALIDataModule"]

# jsonargparse takes the first type that fits. Any stands for os.PathLike, which would accept every value.
Source = ImageFolder | DynamicPipeline | DALILoader | DataLoader[Any] | Callable[..., Any] | str | Any

# Lightning's stages, and the loaders that each of them uses.
LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class DALIDataModule(LightningDataModule):
    """Load training, validation, test and prediction batches with DALI.

    Each stage has one source:

    * a folder of images, read with ``ImageFolder``: with training augmentation for ``train``, without labels for
    ``predict``, and as for evaluation otherwise;
    * an ``ImageFolder``, a ``DynamicPipeline``, or a function decorated with DALI's ``pipeline_def``;
    * a ``DALILoader`` with its own settings, or any other loader, such as a torch ``DataLoader``, which the Trainer
    gets unchanged. For several loaders, override the hook of the stage.

    ``setup`` builds the pipelines on each rank, on the CPU if the Trainer runs there and otherwise on the rank's GPU,
    with the shard that the strategy assigns. ``teardown`` releases them. Each checkpoint holds the state of the
    training loader, so that a run resumes at the next batch.

    Args:
        train: Source of the training batches.
        val: Source of the validation batches.
        test: Source of the test batches.
        predict: Source of the batches to predict.
        batch_size: Samples per batch and rank, at least 1.
        drop_last: Whether training drops the samples that do not fill a batch. The other stages never drop samples.
        classes: Class names in the order of their labels, for sources that are folders. Default: the subfolders of
            ``train``, even for a validation set that lacks one of them.
        images: Additional arguments of ``ImageFolder``, for sources that are folders.
        options: Additional arguments of each ``DALILoader``, such as ``num_threads`` or ``seed``.

    Raises:
        MissingExtraError: If DALI is not installed.
        TypeError: If a source has another type.
        ValueError: If there is no source, the classes of two sources differ, or an argument of a loader is invalid.

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
        drop_last: bool = False,
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
        options["batch_size"] = batch_size
        self.loaders: dict[str, Any] = {}
        for name, source in sources.items():
            drops = drop_last and name == "train"
            self.loaders[name] = self._make_loader(name, source, classes, images or {}, drop_last=drops, **options)
            # The first source with classes determines those of the following ones.
            own = getattr(getattr(self.loaders[name], "pipeline", None), "classes", None)
            classes = classes or own
            # Otherwise a label would stand for another class.
            what = f"the classes {classes!r} of the other sources. Pass classes= to each ImageFolder"
            expect(not own or list(own) == list(classes or ()), name, own, what)

    def _make_loader(self, name: str, source: Any, classes: Any, images: Mapping[str, Any], **options: Any) -> Any:
        """Return the loader of one stage, or ``None``."""
        if source is None:
            # Lightning skips a stage whose hook is None, but a subclass may define the hook itself.
            if getattr(type(self), f"{name}_dataloader") is getattr(DALIDataModule, f"{name}_dataloader"):
                setattr(self, f"{name}_dataloader", None)
            return None
        if isinstance(source, (str, os.PathLike)):
            kind: dict[str, Any] = {"labeled": False} if name == "predict" else {"classes": classes}
            source = ImageFolder(source, **{"train": name == "train", **kind, **images})
        if isinstance(source, (ImageFolder, DynamicPipeline)) or getattr(source, "_is_pipeline_def", False):
            source = DALILoader(source, **options)
        # If jsonargparse cannot create an object, it leaves a dictionary with class_path.
        loads = hasattr(source, "__iter__") and not isinstance(source, (Mapping, list, tuple))
        kinds = "a folder, an ImageFolder, a DynamicPipeline, a function decorated with pipeline_def, or a loader"
        expect(loads, name, source, f"{kinds} (in a config file, check class_path and init_args)", TypeError)
        return source

    def setup(self, stage: str) -> None:
        """Build the pipelines of a stage for the device and shard of this rank.

        Raises:
            ValueError: If the datamodule has no Trainer.
        """
        trainer: Any = self.trainer
        expect(trainer, "trainer", trainer, "a Trainer, which determines device and shard; use Trainer.fit")
        # The data shard differs from the rank if a strategy also splits the model.
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
        loader = self.loaders["train"]
        return {"train": loader.state_dict()} if isinstance(loader, DALILoader) and loader.built else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of the training loader from a checkpoint."""
        loader = self.loaders["train"]
        if "train" in state_dict and isinstance(loader, DALILoader) and loader.built:
            loader.load_state_dict(state_dict["train"])

    def _own(self, stage: str) -> list[DALILoader]:
        return [self.loaders[name] for name in LOADERS[stage] if isinstance(self.loaders[name], DALILoader)]
