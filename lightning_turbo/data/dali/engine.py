"""One built DALI pipeline, run a batch at a time, and its outputs as tensors of torch."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Engine", "Settings", "check_device", "check_driver", "dali"]


def dali() -> Any:
    """Import DALI when it is needed: ``import lightning_turbo`` stays light."""
    return importlib.import_module("nvidia.dali")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every pipeline of a loader is built with."""

    batch_size: int
    """Samples a batch."""
    num_threads: int
    """CPU threads of the pipeline."""
    device_id: int | None
    """The CUDA device, or ``None`` for the CPU alone."""
    prefetch: int
    """Batches that DALI keeps in work or ready."""
    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks."""
    seed: int
    """Seed of the run, the same on every rank."""

    def for_pipeline(self) -> dict[str, Any]:
        """Return the arguments that DALI's ``Pipeline`` takes."""
        return {
            "batch_size": self.batch_size,
            "num_threads": self.num_threads,
            "device_id": self.device_id,
            "prefetch_queue_depth": self.prefetch,
            "exec_dynamic": True,
        }


class Engine:
    """Runs one pipeline: as many runs ahead as its queue is deep, one batch out at a time.

    Args:
        pipeline: A DALI pipeline that has not run yet; it is built here.

    Raises:
        ValueError: If the pipeline has no outputs.
    """

    def __init__(self, pipeline: Any) -> None:
        try:
            pipeline.build()
        except NotImplementedError as error:
            raise ValueError("The pipeline has no outputs: its definition has to return at least one.") from error
        self.pipeline = pipeline
        self._runs = False
        self.outputs: int = pipeline.num_outputs
        if not self.outputs:
            raise ValueError("The pipeline has no outputs: its definition has to return at least one.")

    def schedule(self) -> None:
        """Start a run; the first call starts as many as the queue is deep."""
        self._runs = True
        self.pipeline.schedule_run()

    def rewind(self) -> None:
        """Let sources that have ended begin again; nothing happens while runs are under way."""
        if not self._runs:
            self.schedule()
        self.pipeline.reset()
        if self.pipeline.empty():
            self.schedule()

    def take(self) -> list[Tensor]:
        """Return the oldest batch and start another run.

        The tensors share DALI's memory, which lives as long as they do.

        Raises:
            StopIteration: If no run is under way.
            ValueError: If the samples of an output differ in shape.
        """
        if not self._runs:
            self.schedule()
        tensors = [_tensor(place, output) for place, output in enumerate(self.pipeline.share_outputs())]
        self.pipeline.release_outputs()
        self.schedule()
        return tensors

    def discard(self) -> None:
        """Drop the oldest batch without starting another run."""
        self.pipeline.share_outputs()
        self.pipeline.release_outputs()


def _tensor(place: int, output: Any) -> Tensor:
    """A batch of one output, without a copy; one integer a sample becomes int64 of shape (batch,)."""
    if not output.is_dense_tensor():
        raise ValueError(
            f"Output {place} of the pipeline has samples of different shapes, {output.shape()}, which make no batch. "
            "Resize, crop or pad them in the pipeline."
        )
    tensor = torch.from_dlpack(output.as_tensor())
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if whole and tensor.numel() == len(tensor):
        return tensor.reshape(len(tensor)).to(torch.int64)
    return tensor


def check_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that a pipeline shall fill: the CPU or a CUDA device that is there.

    Raises:
        ValueError: If it is neither.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device: give 'cpu', 'cuda' or 'cuda:<number>'.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: DALI fills the memory of 'cpu' and 'cuda' only.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device. Use device='cpu' or mend the driver.")
    return chosen


def check_driver(needed: int, driver: int | None = None) -> None:
    """Refuse a CUDA driver that is older than DALI's build.

    Args:
        needed: CUDA version of DALI's build, as in ``nvidia.dali.__cuda_version__`` (12086 for 12.8).
        driver: CUDA version of the driver; by default what the driver itself says.

    Raises:
        RuntimeError: If there is no driver or its major version is lower.
    """
    driver = _driver_version() if driver is None else driver
    if driver // 1000 < needed // 1000:
        have = f"supports CUDA {driver // 1000}" if driver else "could not be loaded"
        raise RuntimeError(
            f"The installed DALI is built for CUDA {needed // 1000}, but the driver {have}. Update NVIDIA's driver, "
            f"or install the build of DALI for an older CUDA (nvidia-dali-cuda120), or use device='cpu'."
        )


def _driver_version() -> int:
    version = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
