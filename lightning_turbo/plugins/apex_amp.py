"""``Trainer(plugins=[ApexAMP("O1")])``: O0-O3 as a precision plugin of Lightning."""

from __future__ import annotations

import contextlib
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
from lightning_turbo.amp.casts import LevelCasts
from lightning_turbo.amp.convert import find_scaler_state
from lightning_turbo.amp.grad_scaler import ApexGradScaler
from lightning_turbo.amp.gradients import GradientStage, params_of
from lightning_turbo.amp.half_forward import cast_floats, refuse_half
from lightning_turbo.amp.levels import HALF_DTYPES, OptLevel
from lightning_turbo.errors import AmpUsageError
from lightning_turbo.plugins.nonfinite import NonFiniteGuard
from lightning_turbo.plugins.skip_aware import wrap_scheduler

__all__ = ["ApexAMP"]


class ApexAMP(Precision):
    """apex's O0-O3 for Lightning: ``Trainer(plugins=[ApexAMP("O1")])``.

    O0 is float32, and O1 casts function by function. At O2 the module's parameters are float32 and what the optimizers
    update; while the module, or a module in it, is called, half copies take their positions. At O3 the weights are
    half while the Trainer runs. "half" is float16 on CUDA and bfloat16 elsewhere, or what ``dtype`` says. The
    ``state_dict`` of the module is float32 at every level, so that a run can continue at another level.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``, also as text (``"float16"``, ``"bf16"``).
        loss_scale: apex's override: ``"dynamic"``, or a number above zero, also as text. By default dynamic at O1 and
            O2 with float16, else 1.0.
        keep_batchnorm_fp32: apex's override; also the texts ``"True"`` and ``"False"``. Not with O1.
        master_weights: apex's override: whether weights stay float32 outside of calls. Not with O1.
        cast_model_outputs: apex's override: dtype of what the network returns, also as text.
        keep_fp32_modules: At O2 and O3: names of modules as in ``module.named_modules()``, or their classes. These
            compute in float32, with all that is below them.
        scaler: A loss scaler with limits of its own, in place of ``loss_scale``.

    Attributes:
        scaler: What scales the losses.

    Raises:
        AmpUsageError: If the level or an override is refused (a ``ValueError`` and a ``RuntimeError``).
        TypeError: If a dtype is none, or ``scaler`` no ``ApexGradScaler``.
        NonFiniteError: If about 125 steps in a row are skipped; it names the first module with inf or NaN.
        LightningMismatchError: If the program uses the other import name of Lightning.

    Note:
        The scale is settled once per optimizer step (``amp.scale_loss`` settles it once per backward pass). A skipped
        step does not advance schedulers with ``interval="step"``. With a fused optimizer and no such scheduler no
        step waits for a value from the device.

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

    # Lightning calls convert_module before it makes optimizers and connect afterwards; load_state_dict if it resumes;
    # for each batch convert_input, then either optimizer_step, whose closure runs forward_context and backward, or,
    # in manual optimization, all three where the module asks for them; and teardown, also after an error.

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
        self._guard = NonFiniteGuard()
        # The device is known only when the Trainer sets up; what can be refused is refused here. Casts, and a scaler
        # that was not given, are made again if it is of another kind.
        self._casts = LevelCasts(
            opt_level, device_type="cuda" if torch.cuda.is_available() else "cpu", **self._settings
        )
        self.scaler = ApexGradScaler(self._casts.properties.loss_scale) if scaler is None else scaler
        self._makes_scaler = scaler is None

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute
        """Lightning's own name for the nearest of its precisions."""
        half = "bf16" if self.half_dtype is torch.bfloat16 else "16"
        return {"O0": "32-true", "O1": f"{half}-mixed"}.get(self.opt_level, f"{half}-true")

    @property
    def half_dtype(self) -> torch.dtype:
        """The half dtype; final once the Trainer has set up."""
        return self._casts.dtype

    @property
    def loss_scale(self) -> float:
        """The scale now; waits for the device if dynamic."""
        return self.scaler.get_scale()

    # Setting up and giving back

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let the module compute as the level says. Called by the strategy, before optimizers are made."""
        device = module.trainer.strategy.root_device if isinstance(module, LightningModule) else torch.device("cpu")
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
        """Attach the optimizers, and let schedulers wait on skipped steps."""
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        for optimizer in optimizers:
            self._attach(optimizer, module)
        if self._casts.function_casts is not None:
            registration.apply_registered(self._casts.function_casts)
        if optimizers:
            checkpoint = loaded_checkpoint(module.trainer)
            warn_of_open_window(module.trainer, checkpoint, self)
            # The state of another precision plugin or of apex; Lightning hands over this plugin's own.
            state, _ = find_scaler_state(checkpoint)
            self.load_state_dict(state or {})
        if self.scaler.dynamic:
            lr_schedulers = [wrap_scheduler(config, self.scaler) for config in lr_schedulers]
        return model, optimizers, lr_schedulers

    def _attach(self, optimizer: Optimizer, module: Any) -> None:
        """Begin with an optimizer: cast its state as the level needs it, and forget gradients of an earlier run."""
        if optimizer in self._casts.optimizers:
            return
        if self.scaler.dynamic and hasattr(optimizer, "first_step"):  # SAM and its kin
            raise MisconfigurationException(
                f"ApexAMP({self.opt_level!r}): expected a fixed loss scale for {type(optimizer).__name__}, between "
                "whose two steps an overflow cannot be skipped, got a dynamic one. Pass dtype=torch.bfloat16 or "
                "loss_scale=128.0."
            )
        self._casts.attach(optimizer, [module])
        self.scaler.state_of(optimizer).dropped()

    def teardown(self) -> None:
        """Give module and optimizers back as they were."""
        if self._casts.function_casts is not None:
            registration.restore_registered()
        self._guard.remove()
        self._casts.restore()

    # A step

    def convert_input(self, data: Any) -> Any:
        """At O0, bring floating tensors of a batch to float32, as apex brings the model's inputs.

        Not if the module has float64 weights, which stay.
        """
        dtype = self._casts.input_dtype
        return data if dtype is None else cast_floats(data, dtype)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the level's context of a forward pass, of any stage."""
        return self._casts.forward_context()

    train_step_context = forward_context  # type: ignore[assignment]  # Lightning's are generators

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run the backward pass.

        Args:
            tensor: The loss, a scalar.
            model: The LightningModule.
            optimizer: Unused, as in Lightning's own plugins.
            *args: For ``Tensor.backward``.
            **kwargs: For ``Tensor.backward``.
        """
        if not isinstance(model, LightningModule):
            raise AmpUsageError(
                f"ApexAMP: expected a LightningModule that a Trainer trains, got a {type(model).__name__}. Without a "
                "Trainer, with Fabric too, take lightning_turbo.amp."
            )
        # A program may have made new optimizers since the last pass.
        for each in model.trainer.optimizers:
            self._attach(each, model)
        trained = [each for each in model.trainer.optimizers if any(p.requires_grad for p in params_of(each))]
        if self.scaler.is_enabled() and not trained:
            raise MisconfigurationException(
                f"ApexAMP({self.opt_level!r}): expected optimizers from configure_optimizers, whose gradients are "
                "unscaled, got none. Return yours there, and get them by self.optimizers(); or pass loss_scale=1.0."
            )
        # In manual optimization each pass is unscaled at once, so that the user may look at the gradients; but not
        # those that DDP does not average yet.
        averages = getattr(model.trainer.strategy.model, "require_backward_grad_sync", True)
        unscale = averages and not model.automatic_optimization
        with self.scaler.backward(trained, unscale=unscale), self._casts.backward_context():
            model.backward(self.scaler.scale(tensor), *args, **kwargs)
        self._casts.clear_cache()

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Let the guard see the gradients before hooks and clipping."""
        self._guard.before_step(self.scaler, optimizer)
        super()._after_closure(model, optimizer)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, clip, then step or skip, and settle the scale.

        Returns:
            What the optimizer's step returned, and for a skipped step what the closure did.
        """
        # Lightning's order. The closure runs forward and backward pass first, because only then there are gradients to
        # unscale; hooks and clipping must see them unscaled; whether to skip was found while unscaling, for clipping
        # would turn an inf into a number; and the scale moves last, because the gradients are of the old one.
        scaler = self.scaler
        self._attach(optimizer, model)
        if not scaler.is_enabled():
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            self._casts.clear_cache()
            self._guard.after_step(scaler, optimizer, model)
            return result
        result = closure()
        # In automatic optimization a step without "scaled" gradients has had no loss, as training_step may return None;
        # for the last batch of a window too, whose others left gradients.
        state = scaler.state_of(optimizer)
        has_gradients = not model.automatic_optimization or state.stage is GradientStage.SCALED
        if has_gradients:
            scaler.prepare_step(optimizer)
        self._after_closure(model, optimizer)  # Lightning's: hooks, then clipping
        if not has_gradients:
            state.dropped()  # so that no schedule waits
            return result
        output = scaler.step(optimizer, closure=_once(result, optimizer), **kwargs)
        scaler.settle()
        self._casts.clear_cache()
        self._guard.after_step(scaler, optimizer, model)
        return result if output is None else output

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state in apex's format, and nothing of a run without a scale.

        Gradients of an accumulation window are not part of it.
        """
        return {"loss_scaler0": self.scaler.state_dict()} if self.scaler.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state written by this plugin, at any level, or by apex.

        A static scale stays what this run says.
        """
        if self.scaler.dynamic and "loss_scaler0" in state_dict:
            self.scaler.load_state_dict(state_dict["loss_scaler0"])


def _dtype_of(argument: str, value: Any) -> Any:
    """Return a dtype that may be given as text, as YAML gives it: ``"bf16"``, ``"float16"``, ``"torch.float16"``."""
    if not isinstance(value, str):
        return value
    name = {"bf16": "bfloat16", "fp16": "float16"}.get(value, value)
    found = getattr(torch, name.removeprefix("torch."), None)
    expect(isinstance(found, torch.dtype), argument, value, "a torch dtype, also as text, as 'bfloat16'", TypeError)
    return found


def _once(result: Any, optimizer: Any) -> Callable[[], Any]:
    """Return a closure for the step of an optimizer whose forward and backward pass are over; it may be run once."""
    results = [result]

    def closure() -> Any:
        if not results:  # LBFGS and SAM would step again with the gradients of the first pass
            raise MisconfigurationException(
                f"ApexAMP: expected an optimizer that runs its closure once a step, got {type(optimizer).__name__}, "
                "whose later passes the loss scale would not follow. Take O0, dtype=torch.bfloat16, or its parts of a "
                "step in manual optimization."
            )
        return results.pop()

    return closure
