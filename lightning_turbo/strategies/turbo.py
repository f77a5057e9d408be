"""``Trainer(strategy="turbo")``: Lightning's single-device strategy plus the techniques around the step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, Literal
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_choice, check_switches, suggest
from lightning_turbo._lightning import (
    CheckpointIO,
    DDPStrategy,
    GradientAccumulationScheduler,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    WrappingCheckpointIO,
    check_binding,
    rank_zero_info,
    rank_zero_warn,
    repr_with_copy,
)
from lightning_turbo._trainer import (
    hooks_before_transfer,
    is_fitting,
    lightning_version,
    refuse_as_callback,
    require_lean_loop,
    supports_lean_loop,
)
from lightning_turbo.callbacks.exact_resume import attach_exact_resume
from lightning_turbo.callbacks.grad_to_none import no_effect_reason, release_before_forward
from lightning_turbo.callbacks.memory_format import MemoryFormat
from lightning_turbo.callbacks.prefetch import wrap_loader
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.loading.device import DeviceTransfer
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.compile import check_compile, compiled_in_place
from lightning_turbo.nn.memory_format import MemoryFormatName, format_name
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO
from lightning_turbo.strategies.lean_loop import LeanStrategy, find_custom_loops, install_lean, is_profiled

__all__ = ["TurboParts", "TurboStrategy"]

MatmulPrecision = Literal["highest", "high", "medium"]


class TurboParts(Strategy):
    """The parts that both turbo strategies add to Lightning's; see ``TurboStrategy`` for the arguments.

    They come before Lightning's strategy in the bases and extend its methods; ``LeanStrategy`` comes after it.
    """

    state_key = refuse_as_callback("strategy=...")
    __repr__ = repr_with_copy

    def __init__(
        self,
        *args: Any,
        device_prefetch: bool = True,
        memory_format: MemoryFormatName | torch.memory_format | None = None,
        cudnn_benchmark: bool | None = True,
        matmul_precision: MatmulPrecision | None = None,
        release_gradients: bool = True,
        lean: bool | None = None,
        compile: str | dict[str, Any] | None = None,
        exact_resume: bool = True,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        _refuse_unknown(type(self), kwargs)
        check_switches(device_prefetch=device_prefetch, release_gradients=release_gradients, exact_resume=exact_resume)
        check_switches(none=True, cudnn_benchmark=cudnn_benchmark, lean=lean)
        check_choice("matmul_precision", matmul_precision, (None, "highest", "high", "medium"))
        check_compile(compile)
        if lean:
            require_lean_loop("lean=True")
        super().__init__(*args, **kwargs)
        self.device_prefetch = device_prefetch
        self.memory_format: MemoryFormatName | None = None if memory_format is None else format_name(memory_format)
        self.cudnn_benchmark = cudnn_benchmark
        self.matmul_precision: MatmulPrecision | None = matmul_precision
        self.release_gradients = release_gradients
        self.lean = lean
        self.compile = compile
        self.exact_resume = exact_resume
        self._cleanup = ExitStack()  # undoes what a run changes

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a spawned process, has nothing to undo.
        return {**super().__getstate__(), "_cleanup": ExitStack()}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint IO, by default an ``AtomicCheckpointIO``, also inside a wrapper."""
        if self._checkpoint_io is None:  # created on first use, because the Trainer refuses two
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # Lightning's setter keeps an existing one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        """Set up the device and the ranks, and add ``ExactResume`` to the Trainer."""
        super().setup_environment()
        if self.exact_resume:
            attach_exact_resume(self.lightning_module.trainer)  # pyright: ignore[reportOptionalMemberAccess]

    def setup(self, trainer: Any) -> None:
        """Set up like Lightning, with the added parts before and after."""
        self._cleanup.close()  # Lightning calls no teardown after an error in on_exception
        # The memory format is set before Lightning's setup, in which DDP arranges its buckets by the strides of the
        # weights. The rest comes after it, because networks are compiled on their device and optimizers are created
        # there.
        self._set_switches()
        if self.memory_format is not None:
            MemoryFormat(self.memory_format).setup(trainer, trainer.lightning_module, trainer.state.fn.value)
        super().setup(trainer)
        if self.compile is not None:
            self._cleanup.enter_context(compiled_in_place(trainer.lightning_module, self.compile, _log))
        if is_fitting(trainer):
            self._release_gradients(trainer)
            self._make_lean(trainer)

    def _set_switches(self) -> None:
        if self.root_device.type != "cuda":
            asked = (self.device_prefetch, self.cudnn_benchmark is not None, self.matmul_precision is not None)
            names = ("device_prefetch", "cudnn_benchmark", "matmul_precision")
            if unused := list(compress(names, asked)):
                _log(f"no effect on {self.root_device}: {', '.join(unused)}.")
            return
        cudnn: Any = torch.backends.cudnn
        benchmark = self.cudnn_benchmark
        if benchmark and (torch.are_deterministic_algorithms_enabled() or cudnn.deterministic):
            _log("cudnn_benchmark is off in a deterministic run.")
        elif benchmark is not None:
            self._cleanup.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = benchmark
        if self.matmul_precision is not None:
            self._cleanup.enter_context(_matmul_precision(self.matmul_precision))

    def _release_gradients(self, trainer: Any) -> None:
        if not self.release_gradients:
            return
        if reason := no_effect_reason(trainer):
            _log(f"release_gradients has no effect: {reason}.")
            return
        self._cleanup.callback(release_before_forward(trainer))

    def _make_lean(self, trainer: Any) -> None:
        """Install the lean parts if nothing prevents it; otherwise log the reason."""
        if self.lean is False:
            return
        if not supports_lean_loop():
            _log(f"lean off: the training loop of Lightning {lightning_version()} was not compared with the lean one.")
        elif custom := find_custom_loops(trainer):
            _log(f"lean off: {' and '.join(custom)} replaces Lightning's training loop.")
        elif is_profiled(trainer):
            _log("lean off: a profiler names every call of Lightning's own training loop.")
        else:
            self._cleanup.callback(install_lean(trainer))

    def on_train_start(self) -> None:
        """Apply a ``GradientAccumulationScheduler`` to the rest of a resumed epoch too."""
        super().on_train_start()
        trainer: Any = self.lightning_module.trainer  # pyright: ignore[reportOptionalMemberAccess]
        # The scheduler does this in on_train_epoch_start, which Lightning does not call inside an epoch. Lightning
        # calls this method after the callbacks' on_train_start, in which the scheduler accepts no value but 1.
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader that copies its next batches ahead of time, if that helps."""
        loader: Any = super().process_dataloader(dataloader)
        # DALI prefetches by itself, and reading its state is a collective call, which must not delay a batch.
        if not self.device_prefetch or self.root_device.type != "cuda" or isinstance(loader, DALILoader):
            return loader
        if not isinstance(loader, DataLoader):
            _log(f"device_prefetch has no effect on a {type(loader).__name__}, which is not a DataLoader.")
            return loader
        module: Any = self.lightning_module
        if hooks := hooks_before_transfer(module, getattr(module.trainer, "datamodule", None)):
            rank_zero_warn(
                f"device_prefetch is off, because {' and '.join(hooks)} is overridden and must run right before its "
                "batch is used. Override on_after_batch_transfer instead, or pass device_prefetch=False.",
                category=NoEffectWarning,
            )
            return loader
        # A transfer that the user set on a loader is kept, and is the loader's again after the run.
        own = getattr(loader, "transfer", None)
        transfer = DeviceTransfer(self.root_device) if own is None else None  # None keeps the loader's own
        prefetching = wrap_loader(loader, module.trainer, transfer=transfer)
        # A weak reference, so that a replaced loader can end its workers.
        self._cleanup.callback(_release, ref(prefetching), own)
        return prefetching

    def teardown(self) -> None:
        """Undo the changes of ``setup`` to the process, the Trainer and the network, and stop prefetching."""
        self._cleanup.close()
        super().teardown()


def _log(message: str) -> None:
    rank_zero_info(f"turbo: {message}")


@contextmanager
def _matmul_precision(precision: MatmulPrecision) -> Iterator[None]:
    """Set the precision of float32 matrix products, and restore torch's older and newer settings."""
    # Newer torch has a setting per backend, and reading the older setting is an error if only those were set.
    modules = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    newer: Any = [module for module in modules if hasattr(module, "fp32_precision")]
    before = [module.fp32_precision for module in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"  # torch's default
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for module, value in zip(newer, before, strict=True):
            # A value inherited from the setting for all backends must follow that one again.
            module.fp32_precision = "none" if value == getattr(torch.backends, "fp32_precision", None) else value


def _refuse_unknown(strategy: type, given: Iterable[str]) -> None:
    """Raise an error for unknown arguments of a strategy, which also lists the known ones.

    Lightning's DDP passes unknown arguments to torch's, which would only refuse them when it wraps the module.
    """
    owners = [base for base in strategy.__mro__ if "__init__" in vars(base)]
    if issubclass(strategy, DDPStrategy):
        owners.append(DistributedDataParallel)
    known = {name for owner in owners for name in inspect.signature(owner).parameters}
    known -= {"args", "kwargs", "module", "device_ids"}  # Lightning passes the last two itself
    for name in given:
        if name not in known:
            hint = suggest(name, known) or "."
            raise TypeError(
                f"{strategy.__name__}: unknown argument {name!r}{hint} The known ones are {', '.join(sorted(known))}."
            )


class _OneDeviceStrategy(SingleDeviceStrategy):
    """Lightning's single-device strategy; refuses a Trainer with more devices, and takes the Trainer's device."""

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        # Lightning's strategy requires a device; the Trainer's replaces it before anything is moved.
        super().__init__("cpu" if device is None else device, accelerator, checkpoint_io, precision_plugin)
        self._parallel_devices: list[torch.device] | None = None if device is None else [self._root_device]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list; set by the Trainer."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy='turbo' expected one device, got {len(devices)}. Pass strategy='turbo_ddp'."
            )
        self._parallel_devices = devices
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """The number of machines; set by the Trainer."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(
                f"strategy='turbo' expected num_nodes=1, got num_nodes={num_nodes}. Pass strategy='turbo_ddp'."
            )


class TurboStrategy(TurboParts, _OneDeviceStrategy, LeanStrategy):
    """Lightning's single-device strategy plus the techniques around the step: ``strategy="turbo"``.

    The log names parts that have no effect on the device.

    Args:
        *args: As in Lightning's ``SingleDeviceStrategy``: ``device`` (default: the Trainer's), ``accelerator``,
            ``checkpoint_io`` and ``precision_plugin``; also by name.
        device_prefetch: Whether to keep the next two batches on the CUDA device, after Lightning has set its sampler.
        memory_format: ``"channels_last"`` or ``"contiguous"``, or torch's object; see ``MemoryFormat``.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark`` during the run on CUDA. Only ``None`` keeps that of
            ``Trainer(benchmark=...)``, because Lightning does not tell whether it was given. Off in a deterministic
            run, because cuDNN would choose its algorithms by timing.
        matmul_precision: ``torch.set_float32_matmul_precision`` during the run on CUDA: ``"highest"``, ``"high"`` or
            ``"medium"``.
        release_gradients: Whether to set gradients to None before the forward pass after each step; see ``GradToNone``.
        lean: Whether to run Lightning's loop with direct calls of its hooks (same order, same results), keeping logged
            values as tensors until they are read. ``None``: if this version of Lightning was compared, its loop is
            unmodified and there is no profiler. What the loop may leave out is decided before the first batch.
        compile: ``"network"``, ``"blocks"`` or a dict of arguments for ``torch.compile``; see
            ``lightning_turbo.nn.compiled_in_place``.
        exact_resume: Whether to add ``ExactResume``, so that a resumed run equals one that never stopped.
        **kwargs: As ``*args``; unknown ones raise an error.

    Raises:
        MisconfigurationException: If the Trainer has more than one device or more than one machine.
        ValueError: If an argument has none of these values.
        TypeError: If a switch is not a bool, a number not an integer, or an argument unknown.
        LightningMismatchError: If ``lean`` is ``True`` and the loop of this version of Lightning was not compared.

    Example:
        >>> import lightning_turbo
        >>> from lightning.pytorch import Trainer
        >>> type(Trainer(accelerator="cpu", strategy="turbo", logger=False).strategy).__name__
        'TurboStrategy'
    """

    strategy_name = "turbo"


def _release(loader: ref[PrefetchLoader[Any]], transfer: DeviceTransfer | None) -> None:
    """Close a loader, and restore its transfer."""
    alive = loader()
    if alive is not None:
        alive.close()
        alive.transfer = transfer
