"""What the ready pipelines share: DALI's own file reader, labels, and the name of a broken file."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_number

__all__ = ["FilePipeline", "are_numbers", "check_dtype", "import_dali"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


def import_dali() -> Any:
    """Import DALI when it is needed: ``import lightning_turbo`` stays light."""
    return importlib.import_module("nvidia.dali")


class FilePipeline(ABC):
    """A pipeline over files, each of them one sample, with or without a label.

    Args:
        files: Paths, at least one.
        labels: One integer a file, or ``None``.
        shuffle: Whether each epoch has a new order.
        index: Whether the last output is the number of the file in ``files``.
    """

    branches = False
    """Whether ``define`` has an ``if`` on a value of the sample (DALI's ``enable_conditionals``)."""

    def __init__(self, files: Sequence[str], labels: Sequence[int] | None, *, shuffle: bool, index: bool) -> None:
        check_switches(shuffle=shuffle, index=index)
        self.files = tuple(files)
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.shuffle, self.index = shuffle, index

    @property
    def outputs(self) -> int:
        """Number of tensors in a batch."""
        return 1 + (self.labels is not None) + self.index

    @abstractmethod
    def define(self, dali: Any, encoded: Any, device: str) -> Any:
        """Return the DALI graph from a file's bytes, on the CPU, to the finished sample on ``device``."""

    @abstractmethod
    def view(self, batch: Tensor) -> Tensor:
        """Return the batch in the shape that the user gets, a view."""

    def finish(self, tensors: list[Tensor]) -> list[Tensor]:
        """Make samples and numbers of files, as the pipeline returns them, a batch with labels."""
        sample, numbers = tensors
        rest = [] if self.labels is None else [torch.from_numpy(self.labels[numbers.numpy()])]
        rest += [numbers] if self.index else []
        return [self.view(sample), *(part.to(sample.device, non_blocking=True) for part in rest)]

    def definition(self, world_size: int) -> Callable[..., Any]:
        """Return a function that makes the pipeline, as DALI's ``pipeline_def`` does."""
        if len(self.files) < world_size:
            raise ValueError(
                f"{len(self.files)} files for {world_size} ranks: every rank needs at least one. "
                "Pass more files or use fewer devices."
            )
        dali = import_dali()

        @dali.pipeline_def(enable_conditionals=self.branches)
        def pipeline(shard_id: int, num_shards: int, device: str, order_seed: int) -> Any:
            # DALI shuffles the whole list again after each epoch, but always in the same way: so the list itself
            # comes in an order of the seed. It is the same on every rank, because each reads its part of it.
            order = np.arange(len(self.files))
            if self.shuffle:
                np.random.default_rng(order_seed).shuffle(order)
            encoded, number = dali.fn.readers.file(
                files=[self.files[place] for place in order],
                labels=order.tolist(),
                shuffle_after_epoch=self.shuffle,
                shard_id=shard_id,
                num_shards=num_shards,
                pad_last_batch=True,
                name="files",
            )
            return self.define(dali, encoded, device), number

        return pipeline

    def explain(self, error: RuntimeError) -> ValueError | None:
        """Return an error that names the file which the pipeline failed at; ``None`` if no file is to blame."""
        message = str(error)
        file = next((file for file in self.files if file in message), None) or self.find_broken()
        if file is None:
            return None
        reason = message.partition("encountered:")[2].strip().partition("\n")[0]
        return ValueError(f"{file!r} could not be made a sample ({reason}). Repair the file or remove it.")

    @abstractmethod
    def find_broken(self) -> str | None:
        """Return the first file whose header cannot be read: DALI's decoders do not name every broken file."""


def are_numbers(values: Any, count: int) -> bool:
    """Tell whether values are so many finite numbers."""
    return isinstance(values, (Sequence, np.ndarray)) and len(values) == count and all(map(is_number, values))


def check_dtype(dtype: torch.dtype | str, accepted: Sequence[str]) -> str:
    """Return the name of ``dtype``, torch's or a name, or refuse it.

    Raises:
        ValueError: If it is none of ``accepted``.
    """
    for name in accepted:
        if dtype in (name, DTYPES[name]):
            return name
    raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(f'torch.{name}' for name in accepted)}.")
