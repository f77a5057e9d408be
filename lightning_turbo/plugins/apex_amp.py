"""``Trainer(plugins=[ApexAMP("O1")])``: O0-O3 as a precision plugin of Lightning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import LightningModule, Precision, check_binding, loaded_checkpoint, rank_zero_warn
from lightning_turbo.amp import functions
from lightning_turbo.amp.collectives import on_dense
from lightning_turbo.amp.convert import KNOWN_KEYS, find_scaler_state
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.amp.function_casts import to_float
from lightning_turbo.amp.model_casts import first_tensor_of, parts_of
from lightning_turbo.errors import AmpUsageError, TurboWarning
from lightning_turbo.plugins import refusals
from lightning_turbo.plugins.accumulated import Waiting, open_window
from lightning_turbo.plugins.float_hooks import FloatHooks
from lightning_turbo.plugins.nonfinite import NonFiniteWatch
from lightning_turbo.plugins.rank_gradients import RankGradients
from lightning_turbo.plugins.real_apex import is_native, take_over
from lightning_turbo.plugins.skip_aware import SkipAwareConfig

__all__ = ["ApexAMP"]

NO_SCALE = {"loss_scale": 1.0, "unskipped": 0}  # what a run without a scale saves


class ApexAMP(Precision):
    """apex's O0-O3 for Lightning: ``Trainer(plugins=[ApexAMP("O1")])``.

    | Level | Weights | Batch norm | Forward | Masters | Default loss scale |
    |---|---|---|---|---|---|
    | O0 | float32 | float32 | float32 | no | 1.0 |
    | O1 | float32 | float32 | autocast | no | dynamic |
    | O2 | half | float32 | inputs to half, outputs back | float32 | dynamic |
    | O3 | half | half | as O2 | no | 1.0 |

    "half" is float16 on CUDA and bfloat16 elsewhere, or what ``dtype`` says. With bfloat16 the default scale is 1.0.

    At O2 and O3 the module's weights are half while the Trainer runs, and float32 again afterwards. At O2 the
    optimizers hold float32 masters, and half gradients are folded into the masters' as the backward pass makes
    them: outside of the hooks from there to the step, read them in ``optimizer.param_groups`` or inside
    ``float_weights()``. The ``state_dict`` of the module is float32 at every level, so that a checkpoint may go on
    at another level.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        cast_model_type: apex's override of the dtype of the weights.
        keep_batchnorm_fp32: apex's override; also the texts ``"True"`` and ``"False"``. Not with O1.
        master_weights: apex's override. Not with O1.
        loss_scale: apex's override: ``"dynamic"``, or a number above zero, also as text.
        min_loss_scale: The dynamic scale does not fall below it.
        max_loss_scale: The dynamic scale does not grow above it.
        cast_model_outputs: apex's override: dtype of what guarded modules return.
        scale_window: Steps without overflow before the dynamic scale doubles.
        exact_masters: ``False`` rounds O2's masters to half at the start, as apex does.
        num_losses: Manual optimization only: how many losses have a scale of their own, chosen by
            ``self.manual_backward(loss, loss_id=1)``.
        cast_lists: For O1: ``"apex"`` obeys apex's lists of functions, ``"torch"`` those of ``torch.autocast``
            alone. By default apex's with float16 and torch's with bfloat16.
        cast_cache: For O1: cast a weight once, not at every use, until the next backward pass or step. For networks
            that use a weight many times; it must not be changed between forward passes in any other way.
        max_consecutive_skips: So many skipped steps in a row end the run with an error that names the step and the
            first module with non-finite values; 1 or more.
        log_scale: Log ``amp/loss_scale`` and ``amp/skipped_steps`` at every optimizer step.
        backend: ``"apex"`` hands all over to an installed NVIDIA apex that has ``apex.amp``, see ``RealApexAMP``.

    Raises:
        AmpUsageError: If the level, an override or a limit is refused (a ``ValueError`` and a ``RuntimeError``).
        TypeError: If a dtype is none, or ``exact_masters``, ``cast_cache`` or ``log_scale`` no bool.
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
        num_losses: int = 1,
        cast_lists: str | None = None,
        cast_cache: bool = False,
        max_consecutive_skips: int = 25,
        log_scale: bool = False,
        backend: str = "native",
    ) -> None:
        check_switches(exact_masters=exact_masters, cast_cache=cast_cache, log_scale=log_scale)
        if not is_native(backend):
            take_over(self, locals())
            return
        super().__init__()
        check_binding("ApexAMP")
        if isinstance(max_consecutive_skips, bool) or not isinstance(max_consecutive_skips, int):
            raise TypeError(f"max_consecutive_skips={max_consecutive_skips!r} is no int; accepted is an int from 1 on.")
        if max_consecutive_skips < 1:
            raise AmpUsageError(f"max_consecutive_skips={max_consecutive_skips!r}; accepted is an int from 1 on.")
        self.opt_level = opt_level
        self.max_consecutive_skips = max_consecutive_skips
        self.log_scale = log_scale
        self._settings: dict[str, Any] = {
            "dtype": dtype, "cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights, "loss_scale": loss_scale, "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale, "cast_model_outputs": cast_model_outputs, "scale_window": scale_window,
            "exact_masters": exact_masters, "num_losses": num_losses, "cast_lists": cast_lists,
            "cast_cache": cast_cache,
        }  # fmt: skip
        # The device is known only when the Trainer sets up; what can be refused is refused here.
        likely = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = AmpEngine(opt_level, device_type=likely, **self._settings)
        self._placed = self._has_double = False
        self._ranks: RankGradients | None = None
        self._unstepped: set[Optimizer] = set()  # with gradients that wait for their step
        self._waiting: Waiting | None = None
        self._is_automatic = True
        self._optimizers: list[Optimizer] = []
        self._watch: NonFiniteWatch | None = None
        self._undo = contextlib.ExitStack()  # what teardown ends
        self._float_hooks = FloatHooks()
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

    def float_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the module's parameters are O2's float32 masters; what is changed in them stays.

        An average of weights needs it. Lightning's own callbacks that average weights, or thaw them, run in it.
        """
        return self._engine.widened()

    # Setting up and giving back

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the module's weights if the level says so. Called by the strategy, before optimizers are made."""
        device = module.trainer.strategy.root_device if isinstance(module, LightningModule) else torch.device("cpu")
        self.place_on(device.type)
        refusals.refuse_half_module(module, self.opt_level)
        self._has_double = first_tensor_of(module, (torch.float64,)) is not None
        if self._engine.properties.casts_to_half:
            # A training step uses the module's own buffers outside of any module.
            self._engine.convert(*parts_of(module), step_owner=module)
        return module

    def place_on(self, device_type: str) -> None:
        """Settle the half dtype by the kind of device, as ``"cuda"``; a strategy that sets up does so itself."""
        if not self._placed or self._engine.device_type != device_type:
            self._engine = AmpEngine(self.opt_level, device_type=device_type, **self._settings)
            self._placed = True

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Give the optimizers their masters, and let schedulers stand still on skipped steps."""
        engine = self._engine
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module: Any = model if ddp is None else ddp.module
        self._optimizers = list(optimizers)
        self._is_automatic = module.automatic_optimization
        for optimizer in optimizers:
            self._take(optimizer)
        self._ranks = None if ddp is None else RankGradients(ddp, engine.weights)
        if engine.weights is not None and optimizers:
            if ddp is None:
                engine.weights.fold_as_produced()
            else:
                # DDP made the ranks' half weights alike; the masters must be alike as well.
                for master in engine.weights.masters():
                    on_dense(torch.distributed.broadcast, master.data, src=0)
        if engine.is_dynamic:
            lr_schedulers = [SkipAwareConfig.around(c, self) if c.interval == "step" else c for c in lr_schedulers]
        if engine.weights is not None and engine.has_masters and isinstance(module, LightningModule):
            self._float_hooks.wrap(module, engine.widened, engine.weights)
            self._undo.callback(self._float_hooks.remove)
            self._undo.callback(refusals.refuse_strangers(engine).remove)
        if engine.function_casts is not None:
            functions.apply_registered(engine.function_casts)
            self._undo.callback(functions.restore_registered)
        if optimizers:
            self._watch = NonFiniteWatch(module, self.max_consecutive_skips)
            self._undo.callback(self._watch.remove)
            self._read_foreign_state(module)
        return model, optimizers, lr_schedulers

    def _take(self, optimizer: Optimizer) -> None:
        refusals.refuse_many_closures(optimizer, self._engine, automatic=self._is_automatic)
        self._engine.attach(optimizer)

    def teardown(self) -> None:
        """Give module and optimizers back as they were: float32 weights, the module's own parameters."""
        self._undo.close()
        self._engine.restore()
        self._optimizers = []
        self._ranks = self._watch = self._waiting = None
        self._unstepped.clear()

    # A step

    def convert_input(self, data: Any) -> Any:
        """At O0, bring floating tensors of a batch to float32, as apex brings the model's inputs.

        Not if the module has float64 weights, which stay.
        """
        return to_float(data) if self.opt_level == "O0" and not self._has_double else data

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return O1's casts around the step of any stage."""
        return self._engine.region()

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """O1's casts around the training step."""
        self._put_waiting_gradients_back()
        with self._engine.region():
            yield

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
        refusals.refuse_loop_by_hand(model)
        engine, scaler = self._engine, self._engine.scaler(loss_id)
        each_pass = not model.automatic_optimization and (engine.scales or engine.has_masters)
        of_buckets = self._ranks is not None and self._ranks.ddp.gradient_as_bucket_view
        kept = engine.stash(self._optimizers, of_buckets=of_buckets) if each_pass else {}
        gathered = kept if each_pass else None
        if self._ranks is not None:
            self._ranks.before_backward(gathered)
        with engine.backward_region():
            model.backward(scaler.scale(tensor), *args, **kwargs)
        engine.forget_casts()
        averaged = self._ranks is not None and self._ranks.after_backward(gathered)
        if each_pass:
            engine.collect(self._optimizers, kept, loss_id, release=True)
            if averaged:
                engine.agree_on_overflow(self._optimizers)
        self._unstepped.update(o for o in self._optimizers if any(p.requires_grad for p in self.main_params(o)))

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks that follow a backward pass."""
        with self._float_hooks.after_backward():
            return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, clip, then step or skip, and settle the scale."""
        engine = self._engine
        if not engine.scales and not engine.has_masters:
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            engine.forget_casts()
            self._unstepped.discard(optimizer)
            return result
        if all(known is not optimizer for known in self._optimizers):  # made anew while training
            self._take(optimizer)
            self._optimizers = list(model.trainer.optimizers)
        result = closure()
        nothing_to_do = model.automatic_optimization and result is None and not self._unstepped
        if model.automatic_optimization and not nothing_to_do:
            engine.unscale(optimizer)
        with self._float_hooks.before_step():
            self._after_closure(model, optimizer)
        if nothing_to_do:
            engine.take_no_step()
            return result
        output = engine.step(optimizer, lambda: optimizer.step(**kwargs))
        engine.update()
        engine.forget_casts()
        self._unstepped.discard(optimizer)
        if engine.is_dynamic:
            if self._watch is not None:
                self._watch.after_step(max(s.recent_skips_in_a_row for s in engine.scalers))
            if not self._state_found:
                self._warn_of_missing_state(model)
        if self.log_scale:
            scale = engine.scalers[0].loss_scale_tensor
            model.log("amp/loss_scale", engine.scalers[0].loss_scale if scale is None else scale)
            model.log("amp/skipped_steps", engine.scalers[0].skipped_steps_tensor(model.device))
        return output

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state in apex's format, and in mid-window the gradients accumulated so far.

        In manual optimization these are of every optimizer that has not stepped since a backward pass which it was
        not toggled off for. In mid-window this is a collective call under DDP: every rank's gradients are gathered.
        """
        state: dict[str, Any] = dict(self._engine.state_dict())
        for scaler, own in zip(self._engine.scalers, state.values(), strict=True):
            if scaler.dynamic and own == NO_SCALE:
                own["dynamic"] = True
        if self._unstepped:
            state.update(open_window(self._engine, self._optimizers, self._unstepped, scaled=self._is_automatic))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state written by this plugin, at any level.

        A static scale stays what this run says, and a dynamic one begins anew if the file is of a run without a scale.
        """
        self._state_found = True
        for index, scaler in enumerate(self._engine.scalers):
            state = state_dict.get(f"loss_scaler{index}")
            if state is not None and scaler.dynamic and state != NO_SCALE:
                scaler.load_state_dict(state)
        if "accumulated_gradients" in state_dict:
            self._waiting = Waiting(state_dict)

    def _put_waiting_gradients_back(self) -> None:
        """Go on in the middle of an accumulation window."""
        if self._waiting is None:
            return
        # Under automatic optimization they are scaled, as those that will be added to them.
        self._unstepped.update(self._waiting.put_back(self._engine, self._optimizers, scaled=self._is_automatic))
        self._waiting = None
        if self._ranks is not None:
            self._ranks.go_on(p for optimizer in self._optimizers for p in self.main_params(optimizer))

    def _read_foreign_state(self, module: Any) -> None:
        """Take over scaler state that another precision plugin wrote into the checkpoint."""
        checkpoint = loaded_checkpoint(module.trainer)
        self._state_found = not checkpoint or type(self).__qualname__ in checkpoint
        if not self._state_found:
            state, _ = find_scaler_state(checkpoint)
            if state is not None:
                self.load_state_dict(state)

    def _warn_of_missing_state(self, model: Any) -> None:
        self._state_found = True
        rank_zero_warn(
            f"The checkpoint at {model.trainer.ckpt_path} holds no loss scaler's state under any of "
            f"{', '.join(KNOWN_KEYS)}: it was not restored, and the loss scale starts anew. Lightning 2 drops what "
            "Lightning 1.x wrote before a plugin sees it: add AmpCheckpointIO() to the Trainer's plugins, or convert "
            "the file with `lightning-turbo convert`.",
            category=TurboWarning,
        )
