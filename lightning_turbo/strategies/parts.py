"""The parts that both turbo strategies add, each switched by an argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from lightning_turbo._compat import LightningDataModule, LightningModule, Strategy, rank_zero_info, rank_zero_warn
from lightning_turbo.callbacks.memory_format import MemoryFormat
from lightning_turbo.data.device import DevicePrefetcher
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.memory_format import FORMATS
from lightning_turbo.optim.gradients import release_after_steps

__all__ = ["TurboParts"]

MatmulPrecision = Literal["highest", "high", "medium"]


class TurboParts:
    """What a turbo strategy does beyond Lightning's; the strategy calls it at the right moments.

    Args:
        device_prefetch: Keep the next batches on the CUDA device.
        prefetch_batches: How many of them, 1 or more.
        memory_format: ``None`` leaves it, ``"channels_last"`` or ``"contiguous"`` sets it, ``"measure"`` times both on
            the module's ``example_input_array`` and takes the faster one.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark`` during the run; ``None`` leaves it.
        matmul_precision: ``torch.set_float32_matmul_precision`` during the run on CUDA; ``None`` leaves it.
        release_gradients: Set gradients to None right after each optimizer step.

    Raises:
        ValueError: If a setting is not one of those.
        TypeError: If a switch is no bool.
    """

    def __init__(
        self,
        *,
        device_prefetch: bool,
        prefetch_batches: int,
        memory_format: str | None,
        cudnn_benchmark: bool | None,
        matmul_precision: MatmulPrecision | None,
        release_gradients: bool,
    ) -> None:
        for name, value in (("device_prefetch", device_prefetch), ("release_gradients", release_gradients)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is no bool; accepted are True and False.")
        if cudnn_benchmark is not None and not isinstance(cudnn_benchmark, bool):
            raise TypeError(f"cudnn_benchmark={cudnn_benchmark!r} is no bool; accepted are True, False and None.")
        if isinstance(prefetch_batches, bool) or not isinstance(prefetch_batches, int) or prefetch_batches < 1:
            raise ValueError(f"prefetch_batches={prefetch_batches!r}; accepted is a whole number from 1 on.")
        if memory_format not in (None, "measure", *FORMATS):
            raise ValueError(
                f"memory_format={memory_format!r}; accepted are None, 'measure', 'channels_last' and 'contiguous'."
            )
        if matmul_precision not in (None, "highest", "high", "medium"):
            raise ValueError(
                f"matmul_precision={matmul_precision!r}; accepted are None, 'highest', 'high' and 'medium'."
            )
        self.device_prefetch = device_prefetch
        self.prefetch_batches = prefetch_batches
        self.memory_format: Any = memory_format
        self.cudnn_benchmark = cudnn_benchmark
        self.matmul_precision: MatmulPrecision | None = matmul_precision
        self.release_gradients = release_gradients
        self._borrowed = ExitStack()
        self._prefetchers: list[DevicePrefetcher] = []
        self._told: set[str] = set()

    def before_setup(self, strategy: Strategy, trainer: Any) -> None:
        """Set the process's switches and the memory format, before the module is moved and wrapped."""
        device = strategy.root_device
        if device.type == "cuda":
            self._borrowed.enter_context(_cudnn_benchmark(self.cudnn_benchmark))
            self._borrowed.enter_context(_matmul_precision(self.matmul_precision))
        else:
            parts = {
                "device_prefetch": self.device_prefetch,
                "cudnn_benchmark": self.cudnn_benchmark is not None,
                "matmul_precision": self.matmul_precision is not None,
            }
            meaningless = [name for name, asked in parts.items() if asked]
            if meaningless:
                self._tell(
                    f"{', '.join(meaningless)} {'have' if len(meaningless) > 1 else 'has'} no meaning on {device}."
                )
        if self.memory_format is not None:
            MemoryFormat(self.memory_format).setup(trainer, trainer.lightning_module, trainer.state.fn.value)

    def after_setup(self, strategy: Strategy) -> None:
        """Follow the optimizers' steps."""
        if self.release_gradients:
            for release in release_after_steps(strategy.optimizers):
                self._borrowed.callback(release.remove)

    def loader(self, strategy: Strategy, loader: Any) -> Any:
        """Return the loader with the next batches on the device, or as it is where that has no use."""
        if not self.device_prefetch or strategy.root_device.type != "cuda" or isinstance(loader, DevicePrefetcher):
            return loader
        hooks = _transfer_hooks(strategy.lightning_module)
        if hooks:
            if "hooks" not in self._told:
                self._told.add("hooks")
                rank_zero_warn(
                    f"device_prefetch is set aside, because {' and '.join(hooks)} is overridden and has to see each "
                    "batch in its turn. Use on_after_batch_transfer, or pass device_prefetch=False.",
                    category=NoEffectWarning,
                )
            return loader
        if isinstance(loader, DataLoader) and not loader.pin_memory:
            self._tell("device_prefetch copies fastest from pinned memory: pass pin_memory=True to the DataLoader.")
        prefetcher = DevicePrefetcher(loader, strategy.root_device, prefetch_batches=self.prefetch_batches)
        self._prefetchers.append(prefetcher)
        return prefetcher

    def give_back(self) -> None:
        """Put every switch back, end the prefetching, and follow no optimizer any more."""
        for prefetcher in self._prefetchers:
            prefetcher.close()
        self._prefetchers.clear()
        self._borrowed.close()

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_info(f"turbo: {message}")


def _transfer_hooks(module: Any) -> list[str]:
    """Which overridden hooks see a batch before its copy."""
    found = []
    for owner, base in ((module, LightningModule), (getattr(module.trainer, "datamodule", None), LightningDataModule)):
        for name in ("on_before_batch_transfer", "transfer_batch_to_device"):
            if owner is not None and getattr(type(owner), name) is not getattr(base, name):
                found.append(f"{type(owner).__name__}.{name}")
    return found


@contextmanager
def _cudnn_benchmark(value: bool | None) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    if value is not None:
        torch.backends.cudnn.benchmark = value
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _matmul_precision(value: MatmulPrecision | None) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if value is not None:
        torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
