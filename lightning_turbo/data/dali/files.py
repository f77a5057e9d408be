"""``FilePipeline``: the base of the ready pipelines, over DALI's file reader."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, expect, is_number

__all__ = ["FilePipeline", "are_numbers", "check_dtype", "import_dali"]


def import_dali() -> Any:
    """Import DALI at its first use."""
    return importlib.import_module("nvidia.dali")


class FilePipeline(ABC):
    """A pipeline over files, each of them one sample, with one integer per file as labels, or none."""

    channels_last = False

    def __init__(self, files: Sequence[str], labels: Sequence[int] | None, *, shuffle: bool, index: bool) -> None:
        check_switches(shuffle=shuffle, index=index)
        self.files = tuple(files)
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.shuffle, self.index = shuffle, index

    @abstractmethod
    def define(self, dali: Any, encoded: Any, device: str) -> Any:
        """Define the DALI graph from the bytes of a file, on the CPU, to the sample on ``device``."""

    def finish(self, tensors: list[Tensor]) -> list[Tensor]:
        """Replace the positions of the files, which DALI returns, by labels."""
        sample, numbers = tensors
        sample = sample.movedim(-1, 1) if self.channels_last else sample  # a view
        rest = [] if self.labels is None else [torch.from_numpy(self.labels[numbers.numpy()])]
        rest += [numbers] * self.index
        return [sample, *(part.to(sample.device, non_blocking=True) for part in rest)]

    def definition(self, world_size: int) -> Callable[..., Any]:
        """Return the pipeline function, as DALI's ``pipeline_def`` makes it."""
        expect(len(self.files) >= world_size, "files", len(self.files), f"at least one for each of {world_size} ranks")
        dali = import_dali()

        @dali.pipeline_def
        def pipeline(shard_id: int, num_shards: int, device: str, order_seed: int) -> Any:
            # DALI seeds the shuffle of its file list with a constant. A list that is already shuffled by our seed, the
            # same on every rank, makes the order depend on the seed.
            order = np.arange(len(self.files))
            if self.shuffle:
                np.random.default_rng(order_seed).shuffle(order)
            encoded, number = dali.fn.readers.file(
                files=[self.files[n] for n in order],
                labels=order.tolist(),
                shuffle_after_epoch=self.shuffle,
                shard_id=shard_id,
                num_shards=num_shards,
                pad_last_batch=True,
                name="files",
            )
            return self.define(dali, encoded, device), number

        return pipeline

    def explain(self, error: RuntimeError) -> None:
        """Raise an error that names the broken file, if one caused ``error``."""
        message = str(error)
        file = next((file for file in self.files if file in message), None) or self.find_broken()
        if file is not None:
            reason = message.partition("encountered:")[2].strip().partition("\n")[0]
            raise ValueError(f"Cannot decode {file!r}: {reason} Repair the file or remove it.") from error

    def find_broken(self) -> str | None:
        """Return the first file whose header cannot be read, because DALI does not name every broken file."""
        return None


def are_numbers(values: Any, count: int, above: float = float("-inf")) -> bool:
    """Return whether ``values`` is a sequence of ``count`` finite numbers, all of them above a bound."""
    sequence = isinstance(values, (Sequence, np.ndarray)) and len(values) == count
    return sequence and all(is_number(value) and value > above for value in values)


def check_dtype(dtype: torch.dtype | str, accepted: Sequence[str]) -> str:
    """Return the name of ``dtype``, which may be a name itself."""
    name = str(dtype).removeprefix("torch.")
    expect(name in accepted, "dtype", dtype, f"one of {', '.join(f'torch.{kind}' for kind in accepted)}")
    return name
