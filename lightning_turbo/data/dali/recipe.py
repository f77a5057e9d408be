"""What a ready pipeline is made of: files, labels, random numbers and a graph of DALI operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_number

__all__ = ["DTYPES", "FileRecipe", "are_numbers", "check_dtype"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


def are_numbers(values: Any, count: int) -> bool:
    """Tell whether values are so many finite numbers."""
    return isinstance(values, (Sequence, np.ndarray)) and len(values) == count and all(map(is_number, values))


def check_dtype(dtype: torch.dtype | str, accepted: Sequence[str]) -> str:
    """Return the name of ``dtype``, given as torch's or by name, or refuse it.

    Raises:
        ValueError: If it is none of ``accepted``.
    """
    for name in accepted:
        if dtype in (name, DTYPES[name]):
            return name
    raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(f'torch.{name}' for name in accepted)}.")


class FileRecipe(ABC):
    """Base of the ready pipelines; subclass it to put a graph of your own on the loader's order of files.

    The loader decides which files form a batch, reads them and hands their bytes to ``define``. All that is random
    comes from ``draw``, whose generator is a function of seed, epoch, rank and batch: so a batch is the same whether
    the run was stopped and resumed or not.

    Args:
        files: Paths, at least one.
        labels: One integer a file, or ``None`` if there are none.
        shuffle: Whether each epoch has a new order.
        index: Whether the last output is the number of the file in ``files``, int64 of shape (batch,).

    Raises:
        TypeError: If ``shuffle`` or ``index`` is no bool.
        ValueError: If there are no files, or not as many labels, or a label is no integer.

    Attributes:
        files: Paths, in the order that ``index`` counts.
        labels: int64 of shape (files,), or ``None``.
        branches: Whether ``define`` has an ``if`` on a value of the sample (DALI's ``enable_conditionals``).
    """

    branches = False

    def __init__(self, files: Sequence[str], labels: Sequence[int] | None, *, shuffle: bool, index: bool) -> None:
        check_switches(shuffle=shuffle, index=index)
        self.files = () if isinstance(files, str) else tuple(files)
        if not self.files:
            raise ValueError(f"files={files!r}: give a sequence of paths, at least one.")
        if labels is not None and len(labels) != len(self.files):
            raise ValueError(f"{len(labels)} labels for {len(self.files)} files: give one for each file, or None.")
        given = None if labels is None else np.asarray(labels)
        if given is not None and given.dtype.kind not in "US" and not np.array_equal(given, np.trunc(given)):
            raise ValueError(f"labels hold {given.dtype} numbers that are not whole: give integers.")
        self.labels = None if given is None else given.astype(np.int64)
        self.shuffle = shuffle
        self.index = index

    @property
    def outputs(self) -> int:
        """Number of tensors in a batch."""
        return 1 + (self.labels is not None) + self.index

    @property
    def random(self) -> bool:
        """Whether ``draw`` returns anything, so that epochs differ even in the same order."""
        return bool(self.draw(np.random.default_rng(0), 1))

    def draw(self, generator: np.random.Generator, batch: int) -> dict[str, np.ndarray]:
        """Draw what is random in a batch: by name, arrays whose first dimension is ``batch``.

        The same names come back as arguments of ``define``. The default draws nothing.
        """
        return {}

    @abstractmethod
    def define(self, dali: Any, encoded: Any, device: str, **drawn: Any) -> Any:
        """Return the DALI graph from a file's bytes (a ``DataNode`` of uint8) to the finished sample.

        Args:
            dali: The module ``nvidia.dali``, with ``dali.fn`` and ``dali.types``.
            encoded: The bytes of a file, on the CPU.
            device: ``"cpu"`` or ``"gpu"``, where the result shall lie.
            drawn: What ``draw`` drew, each a ``DataNode`` with one value a sample.
        """

    def finish(self, batch: Tensor) -> Tensor:
        """Return the batch as the user gets it; a view, for example with its channels moved."""
        return batch
