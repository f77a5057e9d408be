"""The casts of one level in one run: models, optimizer states, and the context of a forward pass."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from lightning_turbo.amp.autocast import FunctionCasts
from lightning_turbo.amp.grad_scaler import params_of
from lightning_turbo.amp.half import HalfCalls
from lightning_turbo.amp.kept_modules import find_kept, has_sparse_gradients, needs_float32
from lightning_turbo.amp.levels import HALF_DTYPES, Properties, half_dtype_for, resolve
from lightning_turbo.errors import AmpUsageError, TurboWarning

__all__ = ["LevelCasts", "refuse_deepspeed"]


class LevelCasts:
    """The casts of a level, from ``convert`` to ``restore``; used by ``apex_api.py`` and the plugin ``ApexAMP``.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        device_type: Device type of the model, such as ``"cuda"`` or ``"cpu"``.
        dtype: The half dtype. ``None`` uses ``cast_model_type`` if that is a half dtype, otherwise float16 on CUDA and
            bfloat16 elsewhere.
        keep_fp32_modules: Modules that compute in float32, by name or class.
        cast_lists: As in ``FunctionCasts``.
        **overrides: apex's overrides of the level, see ``resolve``.

    Raises:
        AmpUsageError: If the level or an override is invalid.
    """

    def __init__(
        self,
        opt_level: str,
        *,
        device_type: str,
        dtype: torch.dtype | None = None,
        keep_fp32_modules: Sequence[str | type[nn.Module]] = (),
        cast_lists: str = "torch",
        **overrides: Any,
    ) -> None:
        asked = overrides.get("cast_model_type")
        usual = asked if asked in HALF_DTYPES else half_dtype_for(device_type)
        self.dtype = usual if dtype is None else dtype
        self.properties: Properties = resolve(opt_level, dtype=self.dtype, **overrides)
        self.device_type = device_type
        is_one = isinstance(keep_fp32_modules, (str, type))
        self.keep_fp32_modules = [keep_fp32_modules] if is_one else list(keep_fp32_modules)
        if self.keep_fp32_modules and not self.properties.casts_to_half:
            raise AmpUsageError(
                f"keep_fp32_modules={keep_fp32_modules!r} contradicts {opt_level}, which casts no module. Leave it "
                "out; at O1 run the function under torch.autocast(..., enabled=False)."
            )
        self.input_dtype: torch.dtype | None = None  # the dtype to which a Trainer's batches are cast
        casts = FunctionCasts(device_type, self.dtype, cast_lists)
        self.function_casts = casts if self.properties.patch_torch_functions else None
        self.half_calls: HalfCalls | None = None
        self._written: list[str] = []  # names of written buffers, for the next run and for a checkpoint after this one
        # Weak references: a program may replace optimizers repeatedly, and their state is as large as the model.
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # Active casts and optimizers belong to this process.
        return {**vars(self), "optimizers": None, "half_calls": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.optimizers = weakref.WeakSet()

    @property
    def keeps_masters(self) -> bool:
        """Whether parameters stay float32 and are cast in calls (O2), instead of being half themselves (O3)."""
        return self.properties.casts_to_half and bool(self.properties.master_weights)

    @property
    def halves_weights(self) -> bool:
        """Whether parameters are half themselves (O3)."""
        return self.properties.casts_to_half and not self.properties.master_weights

    def convert(self, roots: Sequence[nn.Module], *, steps: bool = False) -> None:
        """Make the models compute as the level requires.

        Args:
            roots: The models.
            steps: Whether calls of the first model may be training steps; see ``HalfCalls``.

        Raises:
            AmpUsageError: If a module cannot be cast: a TorchScript, a sharded or a lazy module.
        """
        level = self.properties
        if level.cast_model_type is None:
            return
        for root in roots:
            _check_castable(root, level.opt_level)
        self.half_calls = HalfCalls(
            roots,
            level.cast_model_type,
            halves_weights=self.halves_weights,
            output_dtype=level.cast_model_outputs,
            keep_batchnorm_fp32=bool(level.keep_batchnorm_fp32),
            kept=self._kept_modules(roots),
            steps=steps,
        )
        self.half_calls.start()
        self.half_calls.note_written(self._written)

    def _kept_modules(self, roots: Sequence[nn.Module]) -> Iterable[nn.Module]:
        """Return the modules that stay float32: those named by the user, and types that need it."""
        kept = {id(module): module for module in find_kept(roots, self.keep_fp32_modules)}
        for part in (part for root in roots for part in root.modules()):
            if needs_float32(part) or (self.keeps_masters and has_sparse_gradients(part)):
                kept.setdefault(id(part), part)
        return kept.values()

    def attach(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Cast an optimizer's state to the dtype of the parameters that it updates.

        Raises:
            AmpUsageError: At O3, if the optimizer does not update half weights; see ``_refuse_fused_sgd``.

        Warns:
            TurboWarning: If the optimizer holds parameters of none of the models, at O2 and O3.
        """
        self.optimizers.add(optimizer)
        if self.halves_weights:
            _refuse_fused_sgd(optimizer)
            _cast_state(optimizer)
        in_models = {param for model in models for param in model.parameters()}
        uncast = sum(param not in in_models for param in params_of(optimizer))
        if uncast and self.properties.casts_to_half:
            warnings.warn(
                f"{type(optimizer).__name__} holds {uncast} parameters that belong to no model, so "
                f"{self.properties.opt_level} does not cast them. Make them part of a model, or give amp.initialize "
                "every model that the optimizer trains.",
                TurboWarning,
                stacklevel=4,
            )

    @property
    def _active(self) -> FunctionCasts | HalfCalls | None:
        """The object that casts: that of O1, that of O0, O2 and O3 while models are converted, or nothing."""
        return self.function_casts or self.half_calls

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager of a forward pass."""
        return contextlib.nullcontext() if self._active is None else self._active.forward_context()

    def backward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager of a backward pass; checkpointed forward passes are repeated in it unchanged."""
        return contextlib.nullcontext() if self._active is None else self._active.backward_context()

    def written_buffers(self) -> list[str]:
        """Return the names of buffers of the first model that calls have written, and that are float32 since then."""
        if self.half_calls is not None:
            self._written = self.half_calls.written_buffers()
        return self._written

    def note_written(self, names: Iterable[str]) -> None:
        """Keep these buffers in float32, as in the run whose state is loaded."""
        self._written = list(names)
        if self.half_calls is not None:
            self.half_calls.note_written(self._written)

    def restore(self) -> None:
        """Restore models and optimizers."""
        self.written_buffers()  # for a checkpoint that is saved after the run
        if self.half_calls is not None:
            self.half_calls.stop()
        if self.halves_weights:
            for optimizer in self.optimizers:
                _cast_state(optimizer)
        self.half_calls = None
        self.optimizers.clear()


def _cast_state(optimizer: Optimizer) -> None:
    """Cast an optimizer's state to the dtype of its parameters, as torch does when it loads a state."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _refuse_fused_sgd(optimizer: Optimizer) -> None:
    """Raise an error for torch's fused SGD on a CPU if it ignores half weights, as in torch 2.13 (issue 191763).

    Raises:
        AmpUsageError: If the optimizer is a fused SGD and this version of torch has the bug.
    """
    fused = [group for group in optimizer.param_groups if group.get("fused")] if type(optimizer) is SGD else []
    params = (param for group in fused for param in group["params"])
    if any(param.device.type == "cpu" and param.dtype in HALF_DTYPES for param in params) and not _moves_half_weights():
        raise AmpUsageError(
            "O3: expected an SGD that updates half weights on a CPU, got SGD(fused=True), which ignores them in torch "
            f"{torch.__version__}. Leave out fused=True, or use O2."
        )


@functools.cache
def _moves_half_weights() -> bool:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=1.0, fused=True).step()
    return not weight.any()


def refuse_deepspeed(kind: type) -> None:
    """Raise an error if a strategy or a model is one of DeepSpeed, which casts and scales itself.

    Raises:
        AmpUsageError: If the class has one of DeepSpeed's names.
    """
    if any(base.__name__ in ("DeepSpeedStrategy", "DeepSpeedEngine") for base in kind.__mro__):
        raise AmpUsageError(
            f"O0 to O3: expected a strategy or model that does not scale losses itself, got {kind.__name__}. Use "
            "DeepSpeed's own precision: precision='bf16-mixed' or '16-mixed', or its configuration."
        )


def _is_sharded(tensor: Tensor) -> bool:
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def _check_castable(model: nn.Module, opt_level: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AmpUsageError(
                f"{opt_level}: expected Python modules, got a TorchScript module ({module.original_name}). Train the "
                "original module, and script or trace it afterwards; or use O0 or O1."
            )
        if any(map(_is_sharded, module.parameters(recurse=False))):
            raise AmpUsageError(
                f"{opt_level}: expected whole parameters, got those of a {type(module).__name__} sharded by FSDP2. Use "
                "O1, or fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=...)) without a level."
            )
        if any(is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            raise AmpUsageError(
                f"{opt_level}: expected modules with weights, got a {type(module).__name__} that has not been called "
                "yet. Call the model on a batch first, for example in configure_model."
            )
