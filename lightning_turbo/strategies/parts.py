"""The parts that both turbo strategies add, each switched by an argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from weakref import ref

import torch

from lightning_turbo._checks import check_switches, is_whole
from lightning_turbo._lightning import (
    LightningDataModule,
    LightningModule,
    Strategy,
    check_lean,
    is_fitting,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo.callbacks.grad_to_none import release_in
from lightning_turbo.callbacks.memory_format import MemoryFormat
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.device import DevicePrefetcher
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.memory_format import FORMATS
from lightning_turbo.strategies.calls import inherits, is_unprofiled
from lightning_turbo.strategies.lean import install

__all__ = ["TurboParts"]

MatmulPrecision = Literal["highest", "high", "medium"]


class TurboParts:
    """What a turbo strategy does beyond Lightning's; the strategy calls it at the right moments.

    Args:
        device_prefetch: Keep the next batches on the CUDA device.
        prefetch_batches: How many of them, 1 or more.
        memory_format: ``None`` leaves it, ``"channels_last"`` or ``"contiguous"`` sets it, ``"measure"`` times both on
            the module's ``example_input_array`` and takes the faster one.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark`` during the run on CUDA; ``None`` leaves it, and so does
            ``True`` where determinism is asked for, because cuDNN would choose its algorithms by the clock.
        matmul_precision: ``torch.set_float32_matmul_precision`` during the run on CUDA; ``None`` leaves it.
        release_gradients: Set gradients to None right after each optimizer step.
        lean_step: Run the training step with direct calls of its hooks.
        lean_logging: Keep logged values where they are until somebody reads them.
        sigterm_every: Batches between two agreements of the ranks on signals, 1 or more; 1 is Lightning's way.

    Raises:
        ValueError: If a setting is not one of those.
        TypeError: If a switch is no bool.
        LightningMismatchError: If a lean part is asked for under a Lightning that it was not written from.
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
        lean_step: bool,
        lean_logging: bool,
        sigterm_every: int = 1,
    ) -> None:
        check_switches(
            device_prefetch=device_prefetch,
            release_gradients=release_gradients,
            lean_step=lean_step,
            lean_logging=lean_logging,
        )
        if cudnn_benchmark is not None and not isinstance(cudnn_benchmark, bool):
            raise TypeError(f"cudnn_benchmark={cudnn_benchmark!r} is no bool; accepted are True, False and None.")
        for name, count in (("prefetch_batches", prefetch_batches), ("sigterm_every", sigterm_every)):
            if not is_whole(count, 1):
                raise ValueError(f"{name}={count!r}; accepted is a whole number from 1 on.")
        if memory_format not in (None, "measure", *FORMATS):
            raise ValueError(
                f"memory_format={memory_format!r}; accepted are None, 'measure', 'channels_last' and 'contiguous'. "
                "Leave it out to keep the module's own."
            )
        if matmul_precision not in (None, "highest", "high", "medium"):
            raise ValueError(
                f"matmul_precision={matmul_precision!r}; accepted are None, 'highest', 'high' and 'medium'. "
                "Leave it out to keep torch's setting."
            )
        lean = {"lean_step=True": lean_step, "lean_logging=True": lean_logging}
        for option, asked in {**lean, f"sigterm_every={sigterm_every}": sigterm_every > 1}.items():
            if asked:
                check_lean(option)
        self.device_prefetch = device_prefetch
        self.prefetch_batches = prefetch_batches
        self.memory_format: Any = memory_format
        self.cudnn_benchmark = cudnn_benchmark
        self.matmul_precision: MatmulPrecision | None = matmul_precision
        self.release_gradients = release_gradients
        self.lean_step = lean_step
        self.lean_logging = lean_logging
        self.sigterm_every = sigterm_every
        self._borrowed = ExitStack()
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a process that is started with it, has nothing to give back.
        return {**vars(self), "_borrowed": ExitStack()}

    def before_setup(self, strategy: Strategy, trainer: Any) -> None:
        """Set the process's switches and the memory format, before the module is moved and wrapped."""
        self.give_back()  # a run that an error in on_exception ended was not torn down
        device = strategy.root_device
        if device.type == "cuda":
            benchmark = self.cudnn_benchmark
            if benchmark and (torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic):
                benchmark = None
                self._tell("cudnn_benchmark is set aside in a deterministic run.")
            self._borrowed.enter_context(_cudnn_benchmark(benchmark))
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

    def after_setup(self, strategy: Strategy, trainer: Any) -> None:
        """Follow the optimizers' steps, and make the loop lean."""
        if self.release_gradients:
            for release in release_in(trainer):
                self._borrowed.callback(release.remove)
        if is_fitting(trainer) and (self.lean_step or self.lean_logging or self.sigterm_every > 1):
            if self.lean_step and not is_unprofiled(trainer):
                self._tell("lean_step has no meaning under a profiler, which names every call of Lightning's loop.")
            parts = {"step": self.lean_step, "logging": self.lean_logging, "sigterm_every": self.sigterm_every}
            self._borrowed.callback(install(trainer, **parts))

    def loader(self, strategy: Strategy, loader: Any) -> Any:
        """Return the loader with the next batches on the device, or as it is where that has no use."""
        # DALI keeps batches ahead itself; its state takes a collective call, which a batch must not wait for.
        ahead = isinstance(loader, (DevicePrefetcher, DALILoader))
        if not self.device_prefetch or strategy.root_device.type != "cuda" or ahead:
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
        prefetcher = DevicePrefetcher(loader, strategy.root_device, prefetch_batches=self.prefetch_batches)
        self._borrowed.callback(_close, ref(prefetcher))  # a loader that is replaced ends with its workers
        return prefetcher

    def give_back(self) -> None:
        """Put every switch back, end the prefetching, and follow no optimizer any more."""
        self._borrowed.close()

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_info(f"turbo: {message}")


def _close(prefetcher: ref[DevicePrefetcher]) -> None:
    alive = prefetcher()
    if alive is not None:
        alive.close()


def _transfer_hooks(module: Any) -> list[str]:
    """Which overridden hooks see a batch before its copy."""
    found = []
    for owner, base in ((module, LightningModule), (getattr(module.trainer, "datamodule", None), LightningDataModule)):
        for name in ("on_before_batch_transfer", "transfer_batch_to_device"):
            if owner is not None and not inherits(owner, base, (name,)):
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
    if value is None:
        yield
        return
    # From torch 2.9 on there is a second interface. What it was set to is put back as well, and has to be out of the
    # way while the first one is read, which refuses where both were used.
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    found = [(each, each.fp32_precision) for each in backends if hasattr(each, "fp32_precision")]
    for each, _ in found:
        each.fp32_precision = "ieee"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for each, precision in found:
            each.fp32_precision = precision
