"""The table of O0-O3 and which override is legal at which level: pure data and checks, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lightning_turbo.errors import AmpOverrideError, AmpUsageError

__all__ = ["HALF_DTYPES", "INITIAL_DYNAMIC_SCALE", "LEVELS", "Properties", "half_dtype_for", "resolve"]

HALF_DTYPES = (torch.float16, torch.bfloat16)

# The first scale of a dynamic loss scaler, apex's value.
INITIAL_DYNAMIC_SCALE = 2.0**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Properties:
    """What a level does, after the user's overrides.

    ``None`` means that the property does not apply at this level.
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    """Dtype of weights, of the model's floating inputs and of its arithmetic; ``None`` leaves the model alone."""
    patch_torch_functions: bool
    """Whether casts are inserted around functions (O1). The name is apex's; nothing is patched here."""
    keep_batchnorm_fp32: bool | None
    """Whether affine batch norm keeps float32 weights and statistics when the model is cast."""
    master_weights: bool | None
    """Whether the optimizer updates float32 masters of half weights."""
    loss_scale: float | str
    """A static factor above zero, or ``"dynamic"``."""
    cast_model_outputs: torch.dtype | None = None
    """Dtype of the model's floating outputs; ``None`` takes float32 when the model is cast."""

    @property
    def casts_to_half(self) -> bool:
        """Whether the model's weights become half precision."""
        return self.cast_model_type in HALF_DTYPES


# float16 here means the half dtype: resolve() puts in the one that is asked for.
LEVELS: dict[str, Properties] = {
    "O0": Properties(
        opt_level="O0",
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        keep_batchnorm_fp32=None,
        master_weights=False,
        loss_scale=1.0,
    ),
    "O1": Properties(
        opt_level="O1",
        cast_model_type=None,
        patch_torch_functions=True,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale="dynamic",
    ),
    "O2": Properties(
        opt_level="O2",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    "O3": Properties(
        opt_level="O3",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
}


def half_dtype_for(device_type: str) -> torch.dtype:
    """Return what "half" means on a device: float16 on CUDA, bfloat16 elsewhere.

    Few CPUs compute in float16; several compute in bfloat16.
    """
    return torch.float16 if device_type == "cuda" else torch.bfloat16


def resolve(opt_level: str, *, dtype: torch.dtype, **overrides: Any) -> Properties:
    """Return the properties of a level with the user's overrides applied and checked.

    With bfloat16, whose exponent is float32's, a dynamic scale is not needed: the default scale of O1 and O2 is
    then 1.0.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``: the letter O and a digit.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        **overrides: Any field of ``Properties`` but ``opt_level``; ``None`` keeps the level's own value.

    Returns:
        The level's properties.

    Raises:
        AmpUsageError: If the level is unknown or an override contradicts it (``RuntimeError`` and ``ValueError``).
        AmpOverrideError: If ``keep_batchnorm_fp32`` or ``master_weights`` is no truth value (an
            ``AssertionError`` too, as in apex).
        TypeError: If ``dtype`` or an override of a dtype is no torch dtype.

    Source: the semantics of NVIDIA apex.amp, ``initialize`` and its ``Properties``.
    """
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        hint = " It is the letter O, not the digit zero." if str(opt_level)[:1] == "0" else ""
        raise AmpUsageError(
            f"opt_level={opt_level!r} is unknown: expected one of {', '.join(map(repr, LEVELS))}.{hint} "
            "Pass one of these texts."
        )
    _check_dtype("dtype", dtype)
    if dtype not in HALF_DTYPES:
        raise AmpUsageError(
            f"dtype={dtype!r}: expected torch.float16 or torch.bfloat16. "
            "Leave it out for the device's own choice, or take O0 for float32."
        )
    level = LEVELS[opt_level]
    if level.casts_to_half:
        level = replace(level, cast_model_type=dtype)
    if level.loss_scale == "dynamic" and dtype is torch.bfloat16:
        level = replace(level, loss_scale=1.0)
    known = {field.name for field in fields(Properties)} - {"opt_level"}
    changes = {}
    for name, value in overrides.items():
        if name not in known:
            raise AmpUsageError(f"Unknown override {name}={value!r}: expected {', '.join(sorted(known))}.")
        if value is not None:
            changes[name] = _CHECKS[name](level, name, value)
    return replace(level, **changes)


def _check_dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a torch dtype, as torch.float16.")
    return value


def _check_cast_model_type(level: Properties, name: str, value: Any) -> torch.dtype:
    _check_dtype(name, value)
    if not value.is_floating_point:
        raise AmpUsageError(f"{name}={value!r}: expected a floating dtype: torch.float32 or half precision.")
    if level.opt_level == "O1" and value is not torch.float32:
        raise AmpUsageError(
            f"{name}={value!r} contradicts O1, which keeps the weights in float32 and casts around functions. "
            f"Leave it out, or take O2 or O3 for a model in {value!r}."
        )
    return value


def _check_outputs(level: Properties, name: str, value: Any) -> torch.dtype:
    _check_dtype(name, value)
    if not value.is_floating_point:
        raise AmpUsageError(f"{name}={value!r}: expected a floating dtype, as torch.float32.")
    return value


def _check_patch(level: Properties, name: str, value: Any) -> bool:
    flag = _truth(name, value)
    if flag and level.opt_level != "O1":
        raise AmpUsageError(
            f"{name}={value!r} contradicts {level.opt_level}: only O1 casts around functions. Leave it out, or take O1."
        )
    return flag


def _check_keep_batchnorm(level: Properties, name: str, value: Any) -> bool:
    flag = _truth(name, {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value)
    if level.opt_level == "O1":
        raise AmpUsageError(
            f"{name}={value!r} contradicts O1, where batch norm keeps its float32 weights anyway and the function "
            "runs in the dtype of its input. Leave it out, or take O2 or O3."
        )
    return flag


def _check_master_weights(level: Properties, name: str, value: Any) -> bool:
    flag = _truth(name, value)
    if level.opt_level == "O1":
        raise AmpUsageError(
            f"{name}={value!r} contradicts O1, whose weights are float32 themselves. Leave it out, or take O2 or O3."
        )
    return flag


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        texts = " or the texts 'True' and 'False'" if name == "keep_batchnorm_fp32" else ""
        raise AmpOverrideError(f"{name}={value!r}: expected True or False{texts}.")
    return value


def _check_loss_scale(level: Properties, name: str, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if isinstance(value, bool) or not (math.isfinite(scale) and scale > 0.0):
        raise AmpUsageError(
            f"{name}={value!r}: expected 'dynamic' or a finite number above zero, also as text. "
            "Pass 'dynamic' if unsure."
        )
    return scale


_CHECKS = {
    "cast_model_outputs": _check_outputs,
    "cast_model_type": _check_cast_model_type,
    "keep_batchnorm_fp32": _check_keep_batchnorm,
    "loss_scale": _check_loss_scale,
    "master_weights": _check_master_weights,
    "patch_torch_functions": _check_patch,
}
