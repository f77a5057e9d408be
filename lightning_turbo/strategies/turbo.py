"""``Trainer(strategy="turbo")``: Lightning's single-device strategy plus the techniques around the step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import (
    CheckpointIO,
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
from lightning_turbo.callbacks.prefetch import wrap_loader
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.loading.device import DeviceTransfer
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.compile import check_compile, compiled_in_place
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO
from lightning_turbo.strategies.lean_loop import LeanStrategy, find_custom_loops, install_lean, is_profiled

__all__ = ["TurboParts", "TurboStrategy"]


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
        release_gradients: bool = True,
        lean: bool | None = None,
        compile: str | dict[str, Any] | None = None,
        exact_resume: bool = True,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        check_switches(device_prefetch=device_prefetch, release_gradients=release_gradients, exact_resume=exact_resume)
        check_switches(none=True, lean=lean)
        check_compile(compile)
        if lean:
            require_lean_loop("lean=True")
        super().__init__(*args, **kwargs)
        self.device_prefetch = device_prefetch
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
        """Set up like Lightning, then add the parts of the run."""
        self._cleanup.close()  # Lightning calls no teardown after an error in on_exception
        super().setup(trainer)
        # Networks are compiled on their device, and optimizers are created there.
        if self.compile is not None:
            self._cleanup.enter_context(compiled_in_place(trainer.lightning_module, self.compile, _log))
        if is_fitting(trainer):
            self._release_gradients(trainer)
            self._make_lean(trainer)

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
        release_gradients: Whether to set gradients to None before the forward pass after each step; see ``GradToNone``.
        lean: Whether to run Lightning's loop with direct calls of its hooks (same order, same results), and to check
            and move logged values only where something changed. Values for the progress bar become numbers when they
            are read. ``None``: if this version of Lightning was compared, its loop is unmodified and there is no
            profiler. What the loop may leave out is decided before the first
            batch.
        compile: ``"network"``, ``"blocks"`` or a dict of arguments for ``torch.compile``; see
            ``lightning_turbo.nn.compiled_in_place``.
        exact_resume: Whether to add ``ExactResume``, so that a resumed run equals one that never stopped.
        **kwargs: As ``*args``.

    Raises:
        MisconfigurationException: If the Trainer has more than one device or more than one machine.
        ValueError: If ``compile`` has none of these values.
        TypeError: If a switch is not a bool, or an argument unknown.
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
