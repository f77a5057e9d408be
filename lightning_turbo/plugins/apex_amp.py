"""``Trainer(plugins=[ApexAMP("O1")])``: O0-O3 as a Lightning precision plugin."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._checks import expect
from lightning_turbo._lightning import (
    LightningModule,
    MisconfigurationException,
    Precision,
    check_binding,
    repr_of_precision,
)
from lightning_turbo._trainer import loaded_checkpoint, refuse_as_callback, warn_of_open_window
from lightning_turbo.amp import registration
from lightning_turbo.amp.casts import LevelCasts, refuse_deepspeed
from lightning_turbo.amp.convert import find_scaler_state
from lightning_turbo.amp.grad_scaler import ApexGradScaler, forget_gradients, gradients_of, params_of
from lightning_turbo.amp.half import cast_floats, refuse_half
from lightning_turbo.amp.levels import HALF_DTYPES, OptLevel
from lightning_turbo.errors import AmpUsageError
from lightning_turbo.plugins.nonfinite import SkipCheck
from lightning_turbo.plugins.skip_aware import wrap_scheduler

__all__ = ["ApexAMP"]


class ApexAMP(Precision):
    """apex's O0-O3 for Lightning: ``Trainer(plugins=[ApexAMP("O1")])``.

    O0 is float32, and O1 casts function by function. At O2 the module's parameters are float32, and the optimizer
    updates them; during a call of the module or a submodule, half copies replace them. At O3 the weights are half while
    the Trainer runs. "Half" is float16 on CUDA and bfloat16 elsewhere, unless ``dtype`` is given. The module's
    ``state_dict`` is float32 at every level, so a run can resume at another level.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``, also as a string (``"float16"``, ``"bf16"``).
        loss_scale: apex's override: ``"dynamic"`` or a number above zero, also as a string. Default: dynamic at O1 and
            O2 with float16, otherwise 1.0.
        keep_batchnorm_fp32: apex's override; also ``"True"`` and ``"False"``. Not with O1.
        master_weights: apex's override: whether weights stay float32 outside calls. Not with O1.
        cast_model_outputs: apex's override: dtype of the network's outputs, also as a string.
        keep_fp32_modules: Names of modules as in ``module.named_modules()``, or classes, that compute in float32 at O2
            and O3, together with their submodules.
        scaler: A loss scaler with its own limits, instead of ``loss_scale``.

    Attributes:
        scaler: The loss scaler.

    Raises:
        AmpUsageError: If the level or an override is invalid (a ``ValueError`` and a ``RuntimeError``).
        TypeError: If a dtype is invalid, or ``scaler`` is not an ``ApexGradScaler``.
        NonFiniteError: If the last 50 steps were all skipped, at every 50th step.
        LightningMismatchError: If the program uses the other import name of Lightning.

    Note:
        The scale is updated once per optimizer step (``amp.scale_loss`` updates it once per backward pass). A skipped
        step does not advance schedulers with ``interval="step"``. With a fused optimizer and no such scheduler, only
        every 50th step synchronizes with the device.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import ApexAMP
        >>> Trainer(accelerator="cpu", plugins=[ApexAMP("O2")], logger=False).precision_plugin.opt_level
        'O2'

    Source: the opt levels of NVIDIA apex.amp.
    """

    state_key = refuse_as_callback("plugins=[...]")
    __repr__ = repr_of_precision
    warns_of_open_window = True

    # Lightning calls convert_module before it creates optimizers, connect afterwards, and load_state_dict when it
    # resumes. For each batch it calls convert_input, then either optimizer_step, whose closure runs forward_context and
    # backward, or in manual optimization all three as the module requests. Finally it calls teardown, even after an
    # error.

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        *,
        dtype: torch.dtype | str | None = None,
        loss_scale: float | str | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        cast_model_outputs: torch.dtype | str | None = None,
        keep_fp32_modules: Sequence[str | type[nn.Module]] = (),
        scaler: ApexGradScaler | None = None,
    ) -> None:
        super().__init__()
        check_binding("ApexAMP")
        valid = scaler is None or isinstance(scaler, ApexGradScaler)
        expect(valid, "scaler", scaler, "an ApexGradScaler or None", TypeError)
        expect(scaler is None or loss_scale is None, "loss_scale", loss_scale, "None beside a scaler", AmpUsageError)
        self.opt_level: OptLevel = opt_level
        self._settings: dict[str, Any] = {
            "dtype": _dtype_of("dtype", dtype),
            "loss_scale": loss_scale,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "cast_model_outputs": _dtype_of("cast_model_outputs", cast_model_outputs),
            "keep_fp32_modules": keep_fp32_modules,
        }
        self._skip_check = SkipCheck()
        # The device is unknown until the Trainer sets up, but arguments are checked here. Casts, and a default scaler,
        # are created again if the device type differs.
        self._casts = LevelCasts(
            opt_level, device_type="cuda" if torch.cuda.is_available() else "cpu", **self._settings
        )
        self.scaler = ApexGradScaler(self._casts.properties.loss_scale) if scaler is None else scaler
        self._makes_scaler = scaler is None

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute
        """Lightning's name for the closest of its own precisions."""
        half = "bf16" if self.half_dtype is torch.bfloat16 else "16"
        return {"O0": "32-true", "O1": f"{half}-mixed"}.get(self.opt_level, f"{half}-true")

    @property
    def half_dtype(self) -> torch.dtype:
        """The half dtype; final once the Trainer has set up."""
        return self._casts.dtype

    @property
    def loss_scale(self) -> float:
        """The current scale; synchronizes with the device if dynamic."""
        return self.scaler.get_scale()

    # Set-up and teardown

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make the module compute at the level. The strategy calls this before it creates optimizers."""
        device = torch.device("cpu")
        if isinstance(module, LightningModule):
            refuse_deepspeed(type(module.trainer.strategy))
            device = module.trainer.strategy.root_device
        if self._casts.device_type != device.type:
            self._casts = LevelCasts(self.opt_level, device_type=device.type, **self._settings)
            if self._makes_scaler:
                self.scaler = ApexGradScaler(self._casts.properties.loss_scale)
        refuse_half(module, HALF_DTYPES)
        if not self._casts.properties.casts_to_half:
            tensors = (*module.parameters(), *module.buffers())
            is_double = any(tensor.dtype is torch.float64 for tensor in tensors)
            self._casts.input_dtype = None if is_double else self._casts.properties.cast_model_type
            return module
        self._casts.convert([module], steps=True)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Attach the optimizers, and make schedulers wait after skipped steps."""
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        for optimizer in optimizers:
            self._attach(optimizer, module)
        if self._casts.function_casts is not None:
            registration.apply_registered(self._casts.function_casts)
        if optimizers:
            checkpoint = loaded_checkpoint(module.trainer)
            warn_of_open_window(module.trainer, checkpoint, self)
            # The state of another precision plugin or of apex; Lightning itself only passes this plugin's own.
            state, _ = find_scaler_state(checkpoint)
            self.load_state_dict(state or {})
        if self.scaler.dynamic:
            lr_schedulers = [wrap_scheduler(config, self.scaler) for config in lr_schedulers]
        return model, optimizers, lr_schedulers

    def _attach(self, optimizer: Optimizer, module: Any) -> None:
        """Start with an optimizer: cast its state for the level, and forget gradients of an earlier run."""
        if optimizer in self._casts.optimizers:
            return
        if self.scaler.dynamic and hasattr(optimizer, "first_step"):  # SAM and its variants
            raise MisconfigurationException(
                f"ApexAMP({self.opt_level!r}): expected a fixed loss scale for {type(optimizer).__name__}, because an "
                "overflow between its two steps cannot be skipped, got a dynamic one. Pass dtype=torch.bfloat16 or "
                "loss_scale=128.0."
            )
        self._casts.attach(optimizer, [module])
        forget_gradients(optimizer)

    def teardown(self) -> None:
        """Restore module and optimizers."""
        if self._casts.function_casts is not None:
            registration.restore_registered()
        self._casts.restore()

    # A step

    def convert_input(self, data: Any) -> Any:
        """At O0, cast the floating-point tensors of a batch to float32, as apex casts the model's inputs.

        Modules with float64 weights keep their inputs.
        """
        dtype = self._casts.input_dtype
        return data if dtype is None else cast_floats(data, dtype)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the level's context manager for a forward pass in any stage."""
        return self._casts.forward_context()

    train_step_context = forward_context  # type: ignore[assignment]  # Lightning's are generators

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run the backward pass.

        Args:
            tensor: The loss, a scalar.
            model: The LightningModule.
            optimizer: Unused, as in Lightning's own plugins.
            *args: Arguments of ``Tensor.backward``.
            **kwargs: Arguments of ``Tensor.backward``.
        """
        if not isinstance(model, LightningModule):
            raise AmpUsageError(
                f"ApexAMP: expected a LightningModule under a Trainer, got a {type(model).__name__}. Without a "
                "Trainer, or with Fabric, use lightning_turbo.amp."
            )
        # The program may have created new optimizers since the last pass.
        for each in model.trainer.optimizers:
            self._attach(each, model)
        trained = [each for each in model.trainer.optimizers if any(p.requires_grad for p in params_of(each))]
        if self.scaler.is_enabled() and not trained:
            raise MisconfigurationException(
                f"ApexAMP({self.opt_level!r}): expected optimizers from configure_optimizers, to unscale their "
                "gradients, got none. Return yours there, and get them from self.optimizers(); or pass loss_scale=1.0."
            )
        # In manual optimization each pass is unscaled at once, so that the user sees unscaled gradients, except for
        # those that DDP has not averaged yet.
        averages = getattr(model.trainer.strategy.model, "require_backward_grad_sync", True)
        unscale = averages and not model.automatic_optimization
        with self.scaler.backward(trained, unscale=unscale), self._casts.backward_context():
            model.backward(self.scaler.scale(tensor), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, clip, step or skip, and update the scale.

        Returns:
            The result of the optimizer's step, or for a skipped step that of the closure.
        """
        # Lightning's order. The closure runs forward and backward first, because only then are there gradients to
        # unscale. Hooks and clipping must see unscaled gradients. Overflow is detected while unscaling, because
        # clipping would turn an inf into a number. The scale changes last, because the gradients belong to the old one.
        scaler = self.scaler
        self._attach(optimizer, model)
        if not scaler.is_enabled():
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if model.automatic_optimization and gradients_of(optimizer).scaled_by is None:
            # training_step has returned None, which means no loss, for every batch of the window: nothing to step with.
            self._after_closure(model, optimizer)
            forget_gradients(optimizer)  # so that no scheduler waits
            return result
        scaler.check(optimizer)
        self._after_closure(model, optimizer)  # Lightning's: hooks, then clipping
        step = functools.partial(optimizer.step, closure=_once(result, optimizer), **kwargs)
        output = scaler.step(optimizer, step)
        scaler.settle()
        self._skip_check.after_step(scaler, model.trainer.global_step)
        return result if output is None else output

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state in apex's format if there is a scale, and the buffers that calls have written.

        Gradients of an accumulation window are not included.
        """
        state: dict[str, Any] = {"loss_scaler0": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        written = self._casts.written_buffers()
        return {**state, _WRITTEN: written} if written else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state written by this plugin, at any level, or by apex.

        A static scale keeps the value of this run.
        """
        if self.scaler.dynamic and "loss_scaler0" in state_dict:
            self.scaler.load_state_dict(state_dict["loss_scaler0"])
        if _WRITTEN in state_dict:
            self._casts.note_written(state_dict[_WRITTEN])


_WRITTEN = "written_buffers"  # their names, which are float32 in calls


def _dtype_of(argument: str, value: Any) -> Any:
    """Return a dtype given as an object or a string, as in YAML: ``"bf16"``, ``"float16"``, ``"torch.float16"``."""
    if not isinstance(value, str):
        return value
    name = {"bf16": "bfloat16", "fp16": "float16"}.get(value, value)
    found = getattr(torch, name.removeprefix("torch."), None)
    expect(isinstance(found, torch.dtype), argument, value, "a torch dtype or its name, such as 'bfloat16'", TypeError)
    return found


def _once(result: Any, optimizer: Any) -> Callable[[], Any]:
    """Return a closure for an optimizer's step whose forward and backward pass have already run; it may run once."""
    results = [result]

    def closure() -> Any:
        if not results:  # LBFGS and SAM would step again with the first pass's gradients
            raise MisconfigurationException(
                f"ApexAMP: expected an optimizer that runs its closure once per step, got {type(optimizer).__name__}, "
                "whose further passes the loss scale would not follow. Use O0, dtype=torch.bfloat16, or manual "
                "optimization with separate passes."
            )
        return results.pop()

    return closure
