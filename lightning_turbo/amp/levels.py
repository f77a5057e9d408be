"""The table of levels O0-O3 and their valid overrides: data and checks, no tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_turbo._checks import expect, is_number
from lightning_turbo.errors import AmpOverrideError, AmpUsageError

__all__ = ["HALF_DTYPES", "INITIAL_DYNAMIC_SCALE", "LEVELS", "OptLevel", "Properties", "half_dtype_for", "resolve"]

OptLevel = Literal["O0", "O1", "O2", "O3"]
"""The letter O and a digit."""

HALF_DTYPES = (torch.float16, torch.bfloat16)

# Initial value of a dynamic loss scale, as in apex.
INITIAL_DYNAMIC_SCALE = 2.0**16


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a level, after the user's overrides.

    ``None`` means that the property does not apply at this level.
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    """Dtype of weights, floating-point inputs and arithmetic; ``None`` leaves the model unchanged."""
    patch_torch_functions: bool
    """Whether casts are inserted around functions (O1). The name is apex's; nothing is patched."""
    keep_batchnorm_fp32: bool | None
    """Whether affine batch norm keeps float32 weights and statistics when the model is cast."""
    master_weights: bool | None
    """Whether the optimizer updates float32 masters of half weights."""
    loss_scale: float | str
    """A static factor above zero or ``"dynamic"``."""
    cast_model_outputs: torch.dtype | None = None
    """Dtype of the model's floating-point outputs; ``None`` means float32 if the model is cast."""

    @property
    def casts_to_half(self) -> bool:
        """Whether the model's weights are cast to half precision."""
        return self.cast_model_type in HALF_DTYPES


# float16 stands for the half dtype here: resolve() replaces it with the requested one.
LEVELS = {
    level.opt_level: level
    for level in (
        # level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
        Properties("O0", torch.float32, False, None, False, 1.0),
        Properties("O1", None, True, None, None, "dynamic"),
        Properties("O2", torch.float16, False, True, True, "dynamic"),
        Properties("O3", torch.float16, False, False, False, 1.0),
    )
}


def half_dtype_for(device_type: str) -> torch.dtype:
    """Return the half dtype of a device type: float16 on CUDA, bfloat16 elsewhere.

    Few CPUs compute in float16; many compute in bfloat16.
    """
    return torch.float16 if device_type == "cuda" else torch.bfloat16


def resolve(opt_level: str, *, dtype: torch.dtype, **overrides: Any) -> Properties:
    """Return the properties of a level with the user's overrides applied and checked.

    bfloat16 has the exponent range of float32 and needs no loss scale: the default is 1.0 at every level.

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``: the letter O and a digit.
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        **overrides: Any field of ``Properties`` except ``opt_level``; ``None`` keeps the level's value.

    Returns:
        The level's properties.

    Raises:
        AmpUsageError: If the level is unknown or an override contradicts it (a ``RuntimeError`` and a ``ValueError``).
        AmpOverrideError: If ``keep_batchnorm_fp32`` or ``master_weights`` is not a bool (also an ``AssertionError``, as
            in apex).
        TypeError: If ``dtype`` or a dtype override is not a torch dtype.

    Source: the semantics of NVIDIA apex.amp, ``initialize`` and its ``Properties``.
    """
    known = "'O0', 'O1', 'O2' or 'O3' (the letter O and a digit)"
    expect(opt_level in tuple(LEVELS), "opt_level", opt_level, known, AmpUsageError)
    expect(isinstance(dtype, torch.dtype), "dtype", dtype, "a torch dtype, such as torch.float16", TypeError)
    half = "torch.float16 or torch.bfloat16 (for float32 use O0)"
    expect(dtype in HALF_DTYPES, "dtype", dtype, half, AmpUsageError)
    level = LEVELS[opt_level]
    weights = dtype if level.casts_to_half else level.cast_model_type
    scale = 1.0 if dtype is torch.bfloat16 else level.loss_scale
    changes = {name: _read(level, name, value) for name, value in overrides.items() if value is not None}
    cast = changes.get("cast_model_type")
    agrees = cast not in HALF_DTYPES or cast is dtype
    expect(agrees, "cast_model_type", cast, f"{dtype}, as requested by dtype=", AmpUsageError)
    return replace(level, **{"cast_model_type": weights, "loss_scale": scale, **changes})


def _read(level: Properties, name: str, value: Any) -> Any:
    """Convert an override to a property, or raise an error if the level does not allow it."""
    read = _READERS[name](name, value)
    accepted, reason = _FIXED.get((level.opt_level, name), (read, ""))
    if read != accepted:
        raise AmpUsageError(f"{name}={value!r} contradicts {level.opt_level}: {reason}.")
    return read


def _read_dtype(name: str, value: Any) -> torch.dtype:
    expect(isinstance(value, torch.dtype), name, value, "a torch dtype, such as torch.float16", TypeError)
    expect(value.is_floating_point, name, value, "a floating-point dtype, such as torch.float32", AmpUsageError)
    return value


def _read_truth(name: str, value: Any) -> bool:
    expect(isinstance(value, bool), name, value, "True or False", AmpOverrideError)
    return value


def _read_truth_or_text(name: str, value: Any) -> bool:
    read = {"True": True, "False": False}.get(str(value))
    expect(read is not None, name, value, "True or False, also as a string", AmpOverrideError)
    return bool(read)


def _read_scale(name: str, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    number = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
    scales = "'dynamic' or a finite number above zero, also as a string"
    expect(is_number(number) and number > 0.0, name, value, scales, AmpUsageError)
    return float(number)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_outputs": _read_dtype,
    "cast_model_type": _read_dtype,
    "keep_batchnorm_fp32": _read_truth_or_text,
    "loss_scale": _read_scale,
    "master_weights": _read_truth,
    "patch_torch_functions": _read_truth,
}

# The only value that a level accepts for an override, and the reason; None if it accepts none.
_FIXED: dict[tuple[str, str], tuple[Any, str]] = {
    ("O1", "cast_model_type"): (torch.float32, "its weights stay float32. Use O2 or O3 for a model in half precision"),
    ("O1", "keep_batchnorm_fp32"): (None, "batch norm keeps its float32 weights anyway. Leave it out"),
    ("O1", "master_weights"): (None, "its weights are float32 themselves. Leave it out, or use O2 or O3"),
    **{
        (level, "patch_torch_functions"): (False, "only O1 casts around functions. Leave it out, or use O1")
        for level in ("O0", "O2", "O3")
    },
}
