"""``Trainer(strategy="turbo")``: Lightning's strategy for one device with every part around the step switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from weakref import ref

import torch

from lightning_turbo._checks import check_switches, is_whole
from lightning_turbo._lightning import (
    CheckpointIO,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    check_binding,
    check_lean,
    hooks_before_transfer,
    is_fitting,
    is_followed,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo.callbacks.exact_resume import accumulate_as_scheduled, attach_exact_resume
from lightning_turbo.callbacks.grad_to_none import release_in
from lightning_turbo.callbacks.memory_format import MemoryFormat
from lightning_turbo.data.dali import DALILoader
from lightning_turbo.data.device import DevicePrefetcher
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.compile import check_compile, compiled_in_place
from lightning_turbo.nn.memory_format import FORMATS
from lightning_turbo.plugins.checkpoint_io import AmpCheckpointIO
from lightning_turbo.strategies.lean import LeanStrategy, install_lean, is_unprofiled, replaced_loops

__all__ = ["TurboParts", "TurboStrategy"]

MatmulPrecision = Literal["highest", "high", "medium"]


class TurboParts(Strategy):
    """The parts that both turbo strategies add to Lightning's; its arguments are theirs.

    Args:
        *args: For Lightning's strategy.
        device_prefetch: Keep the next batches on the CUDA device.
        prefetch_batches: How many of them, 1 or more.
        memory_format: ``None`` keeps it, ``"channels_last"`` or ``"contiguous"`` sets it, ``"measure"`` times both on
            the module's ``example_input_array`` and takes the faster one.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark`` during the run on CUDA; ``None`` keeps it, and so does
            ``True`` where determinism is asked for, because cuDNN would choose its algorithms by the clock.
        matmul_precision: ``torch.set_float32_matmul_precision`` during the run on CUDA; ``None`` keeps it.
        release_gradients: Set gradients to None right after each optimizer step.
        lean_step: Run the training step with direct calls of its hooks; ``None`` does so where it can.
        lean_logging: Keep logged values where they are until somebody reads them; ``None`` does so where it can.
        compile: ``None``, ``"network"``, ``"blocks"``, or a dict of arguments for ``torch.compile``.
        **kwargs: For Lightning's strategy.

    Raises:
        ValueError: If a setting is not one of those.
        TypeError: If a switch is not a bool.
        LightningMismatchError: If a lean part is ``True`` and Lightning is not 2.6.
    """

    sigterm_every = 1
    strategy_name = ""

    def __init__(
        self,
        *args: Any,
        device_prefetch: bool = True,
        prefetch_batches: int = 2,
        memory_format: str | None = None,
        cudnn_benchmark: bool | None = True,
        matmul_precision: MatmulPrecision | None = None,
        release_gradients: bool = True,
        lean_step: bool | None = None,
        lean_logging: bool | None = None,
        compile: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_binding(type(self).__name__)
        check_switches(device_prefetch=device_prefetch, release_gradients=release_gradients)
        check_switches(none=True, cudnn_benchmark=cudnn_benchmark, lean_step=lean_step, lean_logging=lean_logging)
        check_counts(prefetch_batches=prefetch_batches)
        check_choice("memory_format", memory_format, (None, "measure", *FORMATS))
        check_choice("matmul_precision", matmul_precision, (None, "highest", "high", "medium"))
        check_compile(compile)
        for option, asked in (("lean_step=True", lean_step), ("lean_logging=True", lean_logging)):
            if asked:
                check_lean(option)
        super().__init__(*args, **kwargs)
        self.checkpoint_io = self._checkpoint_io
        self.device_prefetch = device_prefetch
        self.prefetch_batches = prefetch_batches
        self.memory_format: Any = memory_format
        self.cudnn_benchmark = cudnn_benchmark
        self.matmul_precision: MatmulPrecision | None = matmul_precision
        self.release_gradients = release_gradients
        self.lean_step = lean_step
        self.lean_logging = lean_logging
        self.compile = compile
        self._borrowed = ExitStack()  # what puts back what a run changes
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a process that is started with it, has nothing to put back.
        return {**super().__getstate__(), "_borrowed": ExitStack()}

    @property
    def prefetches_to_device(self) -> bool:
        """Whether this strategy keeps batches on the device itself, so that a datamodule need not."""
        return self.device_prefetch

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints; the one that was passed is wrapped in ``AmpCheckpointIO``."""
        if self._checkpoint_io is None:  # made when it is needed: the Trainer refuses a second one beside it
            self._checkpoint_io = AmpCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io if io is None or isinstance(io, AmpCheckpointIO) else AmpCheckpointIO(io)

    def setup_environment(self) -> None:
        """Set up the device and the ranks, and have the run resume exactly."""
        super().setup_environment()
        attach_exact_resume(self.lightning_module.trainer)  # pyright: ignore[reportOptionalMemberAccess]

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with the parts before and after."""
        self._borrowed.close()  # a run that an error in on_exception ended was not torn down
        self._set_switches()
        if self.memory_format is not None:
            MemoryFormat(self.memory_format).setup(trainer, trainer.lightning_module, trainer.state.fn.value)
        self._before_lightning(trainer)
        super().setup(trainer)
        if self.compile is not None:
            self._borrowed.enter_context(compiled_in_place(trainer.lightning_module, self.compile, self._say))
        if self.release_gradients:
            for release in release_in(trainer):
                self._borrowed.callback(release.remove)
        if is_fitting(trainer):
            self._make_lean(trainer)

    def _before_lightning(self, trainer: Any) -> None:
        """Do what a strategy has to do before Lightning moves and wraps the module."""

    def _set_switches(self) -> None:
        device = self.root_device
        if device.type != "cuda":
            parts = {
                "device_prefetch": self.device_prefetch,
                "cudnn_benchmark": self.cudnn_benchmark is not None,
                "matmul_precision": self.matmul_precision is not None,
            }
            if unused := [name for name, asked in parts.items() if asked]:
                self._say(f"{', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect on {device}.")
            return
        benchmark = self.cudnn_benchmark
        if benchmark and (torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic):
            benchmark = None
            self._say("cudnn_benchmark is off in a deterministic run.")
        self._borrowed.enter_context(_cudnn_benchmark(benchmark))
        self._borrowed.enter_context(_matmul_precision(self.matmul_precision))

    def _make_lean(self, trainer: Any) -> None:
        """Put the lean parts in place where nothing is against it; the log says what is."""
        step, logging, sigterm_every = self.lean_step is not False, self.lean_logging is not False, self.sigterm_every
        if not (step or logging or sigterm_every > 1):
            return
        if not is_followed():  # with True or sigterm_every the constructor refused it
            self._say("Lightning's own training loop runs: lean_step and lean_logging need Lightning 2.6.")
            return
        others = replaced_loops(trainer)
        if others and (step or sigterm_every > 1):
            parts = ["lean_step"] * step + ["sigterm_every"] * (sigterm_every > 1)
            self._say(f"{' and '.join(parts)} off: {' and '.join(others)} replaces Lightning's training loop.")
            step, sigterm_every = False, 1
        if step and not is_unprofiled(trainer):
            self._say("lean_step off: a profiler names every call of Lightning's own training loop.")
            step = False
        self._borrowed.callback(install_lean(trainer, step=step, logging=logging, sigterm_every=sigterm_every))

    def on_train_start(self) -> None:
        """Accumulate what a scheduler says in the rest of an epoch too."""
        super().on_train_start()
        accumulate_as_scheduled(self.lightning_module.trainer)  # pyright: ignore[reportOptionalMemberAccess]

    def process_dataloader(self, dataloader: object) -> object:
        """Keep the next batches on the device, or return the loader as it is where that has no use."""
        loader: Any = super().process_dataloader(dataloader)
        # DALI keeps batches ahead itself; its state takes a collective call, which a batch must not wait for.
        ahead = isinstance(loader, (DevicePrefetcher, DALILoader))
        if not self.device_prefetch or self.root_device.type != "cuda" or ahead:
            return loader
        module: Any = self.lightning_module
        if hooks := hooks_before_transfer(module, getattr(module.trainer, "datamodule", None)):
            if "hooks" not in self._said:
                self._said.add("hooks")
                rank_zero_warn(
                    f"device_prefetch is off, because {' and '.join(hooks)} is overridden and has to see each batch in "
                    "its turn. Use on_after_batch_transfer, or pass device_prefetch=False.",
                    category=NoEffectWarning,
                )
            return loader
        prefetcher = DevicePrefetcher(loader, self.root_device, prefetch_batches=self.prefetch_batches)
        self._borrowed.callback(_close, ref(prefetcher))  # a loader that is replaced ends with its workers
        return prefetcher

    def teardown(self) -> None:
        """Put every switch back, end the prefetching, and take off what was set on the Trainer and the network."""
        self._borrowed.close()
        super().teardown()

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            rank_zero_info(f"turbo: {message}")


class TurboStrategy(TurboParts, SingleDeviceStrategy, LeanStrategy):
    """Lightning's strategy for one device with the techniques around the step switched on: ``strategy="turbo"``.

    | Part | Default | What it does; off is exactly Lightning's behaviour |
    |---|---|---|
    | ``device_prefetch`` | ``True`` | keeps the next batches on the CUDA device, after Lightning's sampler |
    | ``memory_format`` | ``None`` | channels last for 2D and 3D, or what a measurement finds faster |
    | ``cudnn_benchmark`` | ``True`` | on CUDA, for the run; off in a deterministic run; put back afterwards |
    | ``matmul_precision`` | ``None`` | ``"high"`` allows TF32 on CUDA, for the run; put back afterwards |
    | ``release_gradients`` | ``True`` | gradients to None right after the step |
    | ``lean_step`` | ``None`` | Lightning's loop with direct calls of its hooks; same order, same results |
    | ``lean_logging`` | ``None`` | a logged value stays where it is until somebody reads it |
    | ``compile`` | ``None`` | compiles the network, or its repeated blocks, in place for the run |
    | ``ExactResume`` | always | a resumed run equals one that never stopped |
    | checkpoint IO | always | reads the scaler state of old checkpoints |

    A part that has no effect on the device is named once in the log.

    Args:
        device: The device; by default the one that the Trainer chose.
        accelerator: As in Lightning.
        checkpoint_io: As in Lightning, as is one in the Trainer's ``plugins``; it is wrapped so that old scaler state
            is read.
        precision_plugin: As in Lightning.
        **parts: ``device_prefetch``, ``prefetch_batches`` (1 or more, 2), ``memory_format`` (``"channels_last"``,
            ``"contiguous"`` or ``"measure"``, which needs the module's ``example_input_array``), ``cudnn_benchmark``,
            ``matmul_precision`` (``"highest"``, ``"high"`` or ``"medium"``), ``release_gradients``, ``lean_step``,
            ``lean_logging`` (``None``: on where Lightning is 2.6, its loop is its own and there is no profiler) and
            ``compile`` (``"network"``, ``"blocks"`` or a dict for ``torch.compile``, see
            ``lightning_turbo.nn.compiled_in_place``).

    Raises:
        MisconfigurationException: If the Trainer has more than one device or more than one machine.
        ValueError: If a setting is not one of those above.
        TypeError: If a switch is not a bool.
        LightningMismatchError: If a lean part is ``True`` and Lightning is not 2.6.

    Example:
        >>> import lightning_turbo
        >>> from lightning.pytorch import Trainer
        >>> type(Trainer(accelerator="cpu", strategy="turbo", logger=False).strategy).__name__
        'TurboStrategy'
    """

    strategy_name = "turbo"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(
            device="cpu" if device is None else device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **parts,
        )
        self._parallel_devices: list[torch.device] | None = None if device is None else [self._root_device]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list; the Trainer puts in the one that it chose."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy='turbo' expected one device, got {len(devices)}. Take strategy='turbo_ddp'."
            )
        self._parallel_devices = devices
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """The number of machines; the Trainer puts in the one that it was given."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(
                f"strategy='turbo' expected num_nodes=1, got num_nodes={num_nodes}. Take strategy='turbo_ddp'."
            )


def check_counts(**counts: Any) -> None:
    """Refuse what is not a whole number from 1 on.

    Raises:
        ValueError: With the name and the value of the argument.
    """
    for name, count in counts.items():
        if not is_whole(count, 1):
            raise ValueError(f"{name}={count!r}: expected a whole number from 1 on.")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse what is not one of the choices.

    Raises:
        ValueError: With the name and the value of the argument, and the choices.
    """
    if value not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name}={value!r}: expected {', '.join(most)} or {last}. Leave it out to change nothing.")


def _close(prefetcher: ref[DevicePrefetcher]) -> None:
    alive = prefetcher()
    if alive is not None:
        alive.close()


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
