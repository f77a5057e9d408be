"""``Trainer(plugins=[ApexAMP("O1")])``: O0-O3 as a precision plugin of Lightning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_turbo._checks import check_switches, expect, is_whole
from lightning_turbo._distributed import gather_for_checkpoint
from lightning_turbo._lightning import (
    LightningModule,
    MisconfigurationException,
    Precision,
    check_binding,
    loaded_checkpoint,
    rank_zero_warn,
    refuse_as_callback,
)
from lightning_turbo.amp import registration
from lightning_turbo.amp.convert import KNOWN_KEYS, find_scaler_state
from lightning_turbo.amp.engine import AmpEngine, params_of
from lightning_turbo.amp.half_forward import cast_floats, refuse_half
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import AmpUsageError, TurboWarning
from lightning_turbo.plugins import pending_gradients
from lightning_turbo.plugins.nonfinite import NonFiniteWatch
from lightning_turbo.plugins.real_apex import is_native, take_over
from lightning_turbo.plugins.skip_aware import SkipAwareConfig

__all__ = ["ApexAMP"]

NO_SCALE = {"loss_scale": 1.0, "unskipped": 0}  # what a run without a scale saves


class ApexAMP(Precision):
    """apex's O0-O3 for Lightning: ``Trainer(plugins=[ApexAMP("O1")])``.

    O0 is float32, and O1 casts function by function. At O2 the module's parameters are float32 and what the optimizers
    update; while the module, or a module in it, is called, half copies take their positions. At O3 the weights are
    half while the Trainer runs. "half" is float16 on CUDA and bfloat16 elsewhere, or what ``dtype`` says. The
    ``state_dict`` of the module is float32 at every level, so that a run can continue at another level.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        cast_model_type: apex's override of the dtype of the weights.
        keep_batchnorm_fp32: apex's override; also the texts ``"True"`` and ``"False"``. Not with O1.
        master_weights: apex's override: whether weights stay float32 outside of calls. Not with O1.
        loss_scale: apex's override: ``"dynamic"``, or a number above zero, also as text. By default dynamic at O1 and
            O2 with float16, else 1.0.
        min_loss_scale: The dynamic scale does not fall below it.
        max_loss_scale: The dynamic scale does not grow above it.
        cast_model_outputs: apex's override: dtype of what guarded modules return.
        scale_window: Steps without overflow before the dynamic scale doubles.
        exact_masters: ``False`` rounds O2's weights to half once, at the start, as apex does.
        keep_float32: At O2 and O3: names of modules as in ``module.named_modules()``, or their classes. These compute
            in float32, with all that is below them.
        compress_gradients: At O2 under DistributedDataParallel: whether gradients travel between ranks in half
            precision, as apex's did, through torch's own compression hook. ``False`` leaves them float32.
        num_losses: Manual optimization only: how many losses have a scale of their own, chosen by
            ``self.manual_backward(loss, loss_id=1)``.
        cast_lists: For O1: ``"apex"`` obeys apex's lists of functions, ``"torch"`` those of ``torch.autocast``
            alone. By default apex's with float16 and torch's with bfloat16.
        cast_cache: For O1: cast a weight once, not at every use, until the next backward pass or step. For networks
            that use a weight many times; it must not be changed between forward passes in any other way.
        max_consecutive_skips: So many skipped steps in a row end the run with an error that names the step and the
            first module with non-finite values; 1 or more.
        log_scale: Log ``amp/loss_scale`` and ``amp/skipped_steps`` of the first loss at every optimizer step, where
            losses are scaled.
        backend: ``"apex"`` hands all over to an installed NVIDIA apex that has ``apex.amp``, see ``RealApexAMP``.

    Raises:
        AmpUsageError: If the level, an override or a limit is refused (a ``ValueError`` and a ``RuntimeError``).
        TypeError: If a dtype is none, or a switch no bool.
        LightningMismatchError: If the program uses the other import name of Lightning.

    Note:
        The scale is settled once per optimizer step (``amp.scale_loss`` settles it once per backward pass). A skipped
        step does not advance schedulers with ``interval="step"``. With a fused optimizer and no such scheduler no
        value comes to the host.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import ApexAMP
        >>> Trainer(accelerator="cpu", plugins=[ApexAMP("O2")], logger=False).precision_plugin.opt_level
        'O2'

    Source: the opt levels of NVIDIA apex.amp.
    """

    owns_pending_gradients = True  # see pending_gradients
    state_key = refuse_as_callback("plugins=[...]")

    def __init__(
        self,
        opt_level: str = "O1",
        *,
        dtype: torch.dtype | None = None,
        cast_model_type: torch.dtype | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        cast_model_outputs: torch.dtype | None = None,
        scale_window: int = 2000,
        exact_masters: bool = True,
        keep_float32: Sequence[str | type[nn.Module]] = (),
        compress_gradients: bool = True,
        num_losses: int = 1,
        cast_lists: str | None = None,
        cast_cache: bool = False,
        max_consecutive_skips: int = 25,
        log_scale: bool = False,
        backend: str = "native",
    ) -> None:
        check_switches(
            exact_masters=exact_masters,
            compress_gradients=compress_gradients,
            cast_cache=cast_cache,
            log_scale=log_scale,
        )
        if not is_native(backend):
            take_over(self, locals())
            return
        super().__init__()
        check_binding("ApexAMP")
        number = "a whole number from 1 on"
        expect(
            is_whole(max_consecutive_skips, 1), "max_consecutive_skips", max_consecutive_skips, number, AmpUsageError
        )
        self.opt_level = opt_level
        self.max_consecutive_skips = max_consecutive_skips
        self.log_scale = log_scale
        self._settings: dict[str, Any] = {
            "dtype": dtype, "cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights, "loss_scale": loss_scale, "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale, "cast_model_outputs": cast_model_outputs, "scale_window": scale_window,
            "exact_masters": exact_masters, "keep_float32": keep_float32, "num_losses": num_losses,
            "cast_lists": cast_lists, "cast_cache": cast_cache,
        }  # fmt: skip
        # The device is known only when the Trainer sets up; what can be refused is refused here.
        likely = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = AmpEngine(opt_level, device_type=likely, **self._settings)
        self._compress_gradients = compress_gradients
        self._has_double = False
        self._model: Any = None  # the module, or what wraps it for several ranks
        self._loaded_window: dict[str, Any] | None = None
        self._watch: NonFiniteWatch | None = None
        self._undo = contextlib.ExitStack()  # what teardown ends
        self._state_found = False

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute
        """Lightning's own name for the nearest of its precisions."""
        half = "bf16" if self._engine.dtype is torch.bfloat16 else "16"
        return {"O0": "32-true", "O1": f"{half}-mixed"}.get(self.opt_level, f"{half}-true")

    @property
    def half_dtype(self) -> torch.dtype:
        """The half dtype; final once the Trainer has set up."""
        return self._engine.dtype

    @property
    def loss_scale(self) -> float:
        """The scale of the first loss now; waits for the device if dynamic."""
        return self._engine.scalers[0].loss_scale

    @property
    def skipped_steps(self) -> int:
        """How many steps overflowed in this run; waits for the device."""
        return sum(scaler.skipped_steps for scaler in self._engine.scalers)

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last optimizer step was skipped; waits for the device."""
        return self._engine.skipped_last_step

    # Setting up and giving back

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let the module compute as the level says. Called by the strategy, before optimizers are made."""
        device = module.trainer.strategy.root_device if isinstance(module, LightningModule) else torch.device("cpu")
        self.place_on(device.type)
        refuse_half(module, HALF_DTYPES)
        self._has_double = any(t.dtype is torch.float64 for t in (*module.parameters(), *module.buffers()))
        if self._engine.properties.casts_to_half:
            # A training step calls parts of the module on their own. Parts without weights, as losses and metrics,
            # then compute in the dtype that they are given.
            inner = [part for part in module.modules() if next(part.parameters(), None) is not None]
            self._engine.convert([module], inner, steps=True)
        return module

    def place_on(self, device_type: str) -> None:
        """Settle the half dtype by the kind of device, as ``"cuda"``; a strategy that sets up does so itself."""
        if self._engine.device_type != device_type:
            self._engine = AmpEngine(self.opt_level, device_type=device_type, **self._settings)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Meet the optimizers, and let schedulers wait on skipped steps."""
        engine, module = self._engine, _unwrapped(model)
        self._model = model
        for optimizer in optimizers:
            self._meet(optimizer, module)
        if engine.function_casts is not None:
            registration.apply_registered(engine.function_casts)
            self._undo.callback(registration.restore_registered)
        if optimizers:
            self._prepare_training(model, module)
        if engine.is_dynamic:
            lr_schedulers = [self._around(config) for config in lr_schedulers]
        return model, optimizers, lr_schedulers

    def _prepare_training(self, model: nn.Module, module: Any) -> None:
        if self._compress_gradients and self._engine.keeps_masters and isinstance(model, DistributedDataParallel):
            _compress(model, self._engine.dtype)
        self._watch = NonFiniteWatch(module, self.max_consecutive_skips)
        self._undo.callback(self._watch.remove)
        self._read_foreign_state(module)

    def _around(self, config: Any) -> Any:
        return SkipAwareConfig.around(config, self) if config.interval == "step" else config

    def _meet(self, optimizer: Optimizer, module: Any) -> None:
        if not self._engine.knows(optimizer):
            _refuse_many_closures(optimizer, self._engine, automatic=module.automatic_optimization)
            self._engine.attach(optimizer, [module])

    def _meet_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of now; a program may have made some while it trains."""
        if self._model is None:
            return []
        module = _unwrapped(self._model)
        for optimizer in module.trainer.optimizers:
            self._meet(optimizer, module)
        return list(module.trainer.optimizers)

    def teardown(self) -> None:
        """Give module and optimizers back as they were."""
        self._undo.close()
        self._engine.restore()
        self._model = self._watch = self._loaded_window = None

    # A step

    def convert_input(self, data: Any) -> Any:
        """At O0, bring floating tensors of a batch to float32, as apex brings the model's inputs.

        Not if the module has float64 weights, which stay.
        """
        return cast_floats(data, torch.float32) if self.opt_level == "O0" and not self._has_double else data

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the level's context of a forward pass, of any stage."""
        return self._engine.region()

    def train_step_context(self) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]  # no generator
        """Return the same for a training step; before the first, gradients from a checkpoint are put back."""
        if self._loaded_window is not None:
            self._restore_window(self._loaded_window)
            self._loaded_window = None
        return self._engine.region()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, loss_id: int = 0, **kwargs: Any) -> None:
        """Scale the loss and run the backward pass.

        Args:
            tensor: The loss, a scalar.
            model: The LightningModule.
            optimizer: Unused, as in Lightning's own plugins.
            *args: For ``Tensor.backward``.
            loss_id: Manual optimization only: which of ``num_losses`` scales to use.
            **kwargs: For ``Tensor.backward``.
        """
        if not isinstance(model, LightningModule):
            raise AmpUsageError(
                f"ApexAMP: expected a LightningModule that a Trainer trains, got a {type(model).__name__}. Without a "
                "Trainer, with Fabric too, take lightning_turbo.amp."
            )
        engine = self._engine
        trained = [optimizer for optimizer in self._meet_optimizers() if _is_trained(optimizer)]
        if engine.scales and not trained:
            raise MisconfigurationException(
                f"ApexAMP({self.opt_level!r}): expected optimizers from configure_optimizers, whose gradients are "
                "unscaled, got none. Return yours there, and get them by self.optimizers(); or pass loss_scale=1.0."
            )
        # In manual optimization each pass is unscaled at once, so that the user may look at the gradients; but not
        # those that DDP does not average yet.
        averages = getattr(self._model, "require_backward_grad_sync", True)
        later = model.automatic_optimization or not averages
        with engine.backward(trained, loss_id, delay_unscale=later):
            model.backward(engine.scaler(loss_id).scale(tensor), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, clip, then step or skip, and settle the scale.

        Returns:
            What the optimizer's step returned, and for a skipped step what the closure did.
        """
        engine = self._engine
        self._meet(optimizer, model)
        if engine.scales:
            result = closure()  # forward and backward pass
            return self._scaled_step(optimizer, model, result, **kwargs)
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        engine.forget_casts()
        engine.note_gradients_used(optimizer)
        return result

    def _scaled_step(self, optimizer: Any, model: Any, result: Any, **kwargs: Any) -> Any:
        engine = self._engine
        engine.unscale(optimizer)
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None and not engine.is_waiting(optimizer):
            engine.clear_last_skip()
            return None
        output = engine.step(optimizer, lambda: optimizer.step(closure=lambda: result, **kwargs))
        engine.update()
        engine.forget_casts()
        self._follow_up(model)
        return result if output is None else output

    def _follow_up(self, model: Any) -> None:
        engine = self._engine
        if engine.is_dynamic and self._watch is not None:
            self._watch.after_step(max(scaler.recent_skips_in_a_row for scaler in engine.scalers))
            self._warn_of_missing_state(model)
        if self.log_scale:
            scale, skipped = engine.scalers[0].values_to_log()
            model.log("amp/loss_scale", scale)
            model.log("amp/skipped_steps", skipped)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state in apex's format, and in mid-window the gradients accumulated so far.

        In manual optimization these are of every optimizer that has not stepped since a backward pass which it was
        not toggled off for. In mid-window this is a collective call under DDP: every rank's gradients are gathered.
        """
        engine, optimizers = self._engine, self._meet_optimizers()
        state: dict[str, Any] = dict(engine.state_dict())
        for name, scaler in engine.named_scalers().items():
            if scaler.dynamic and state[name] == NO_SCALE:
                state[name]["dynamic"] = True
        waiting = [engine.is_waiting(optimizer) for optimizer in optimizers]
        if any(waiting):
            gradients = zip(pending_gradients.collect(optimizers), waiting, strict=True)
            own = [part if waits else {} for part, waits in gradients]
            state["accumulated_gradients"] = gather_for_checkpoint(own, "accumulated gradients")
            state.update(engine.window_state(optimizers))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state written by this plugin, at any level.

        A static scale stays what this run says, and a dynamic one begins again if the file is of a run without a
        scale.
        """
        self._state_found = True
        for name, scaler in self._engine.named_scalers().items():
            state = state_dict.get(name, NO_SCALE)
            if scaler.dynamic and state != NO_SCALE:
                scaler.load_state_dict(state)
        if "accumulated_gradients" in state_dict:
            self._loaded_window = state_dict

    def _restore_window(self, state: dict[str, Any]) -> None:
        """Put gradients back that a checkpoint holds, now that Lightning clears them no more."""
        optimizers = self._meet_optimizers()
        sizes = [len(list(params_of(optimizer))) for optimizer in optimizers]
        gradients = pending_gradients.entry_of_this_rank(state["accumulated_gradients"], sizes)
        if gradients is not None:
            factors = [self._factor(state, loss) for loss in state["scaled_by"]]
            pending_gradients.put_back(optimizers, gradients, factors, self._model)
            self._engine.resume_window(optimizers, gradients, state)

    def _factor(self, state: dict[str, Any], loss: int | None) -> float:
        """Return what brings gradients from the scale that a loss had in a state to the one that it has now."""
        return 1.0 if loss is None else self._engine.scaler(loss).loss_scale / state[f"loss_scaler{loss}"]["loss_scale"]

    def _read_foreign_state(self, module: Any) -> None:
        """Take over scaler state that another precision plugin wrote into the checkpoint."""
        checkpoint = loaded_checkpoint(module.trainer)
        self._state_found = not checkpoint or type(self).__qualname__ in checkpoint
        if not self._state_found:
            state, _ = find_scaler_state(checkpoint)
            if state is not None:
                self.load_state_dict(state)

    def _warn_of_missing_state(self, model: Any) -> None:
        if self._state_found:
            return
        self._state_found = True
        rank_zero_warn(
            f"The checkpoint at {model.trainer.ckpt_path} holds no loss scaler's state under any of "
            f"{', '.join(KNOWN_KEYS)}: it was not restored, and the loss scale starts again. Lightning 2 drops what "
            "Lightning 1.x wrote before a plugin sees it: add AmpCheckpointIO() to the Trainer's plugins, or convert "
            "the file with `lightning-turbo convert`.",
            category=TurboWarning,
        )


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _is_trained(optimizer: Optimizer) -> bool:
    return any(param.requires_grad for param in params_of(optimizer))


def _refuse_many_closures(optimizer: Optimizer, engine: AmpEngine, *, automatic: bool) -> None:
    """Refuse LBFGS and SAM where the loss scale would not follow them.

    Raises:
        MisconfigurationException: If the optimizer's step runs the closure several times while there is a loss scale,
            or if an overflow could not be skipped.
    """
    plugin, kind = f"ApexAMP({engine.properties.opt_level!r})", type(optimizer).__name__
    two_steps = hasattr(optimizer, "first_step")  # SAM and its kin
    many = isinstance(optimizer, LBFGS) or (two_steps and automatic)
    if many and engine.scales:
        instead = "step by first_step and second_step in manual optimization" if two_steps else "another optimizer"
        raise MisconfigurationException(
            f"{plugin}: expected an optimizer that runs its closure once a step, got {kind}. Take O0, or {instead}."
        )
    if two_steps and engine.is_dynamic:
        raise MisconfigurationException(
            f"{plugin}: expected a fixed loss scale for {kind}, between whose two steps an overflow cannot be skipped, "
            "got a dynamic one. Pass dtype=torch.bfloat16 or loss_scale=128.0."
        )


def _compress(ddp: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Let gradients travel between ranks in half precision, unless the user has a hook of their own there."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

    hook: Any = fp16_compress_hook if dtype is torch.float16 else bf16_compress_hook
    works = hook is fp16_compress_hook or next(ddp.parameters()).is_cuda  # that for bfloat16 needs NCCL
    if works and not ddp._comm_hooks:
        ddp.register_comm_hook(None, hook)
