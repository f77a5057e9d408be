"""Old checkpoints: what apex and every version of Lightning wrote about their loss scalers, as ApexAMP reads it."""

from __future__ import annotations

import enum
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import is_whole
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import TurboError, TurboWarning

__all__ = [
    "KNOWN_KEYS",
    "CheckpointError",
    "convert_checkpoint",
    "find_scaler_state",
    "move_scaler_state",
    "to_torch_adam",
]

OWN_KEY = "ApexAMP"

# Where a checkpoint may hold scaler state, the newest first: Lightning 2 and 1.x name the plugin's class, older 1.x
# versions wrote one key for all, and plain apex scripts follow apex's documentation.
KNOWN_KEYS = (
    OWN_KEY,
    "MixedPrecision",
    "MixedPrecisionPlugin",
    "NativeMixedPrecisionPlugin",
    "ApexMixedPrecisionPlugin",
    "native_amp_scaling_state",
    "amp_scaling_state",
    "amp",
)

# What plain scripts call the parts of their checkpoints; apex's documentation first.
_PLAIN_NAMES = {
    "model": ("model", "state_dict", "model_state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict"),
    "lr_scheduler": ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict"),
    "epoch": ("epoch",),
    "step": ("global_step", "iteration", "step"),
}
_LIGHTNING = "pytorch-lightning_version"
_LIGHTNING_2 = "2.0.0"


class CheckpointError(TurboError, ValueError):
    """A file is not a checkpoint, or lacks a part."""


def find_scaler_state(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the scaler state of a checkpoint in apex's format, and the key it was under.

    Args:
        checkpoint: A loaded checkpoint of Lightning or of a plain apex script.

    Returns:
        ``({"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}, key)``, or ``(None, None)``.
    """
    for key in KNOWN_KEYS:
        state = checkpoint.get(key)
        if isinstance(state, Mapping) and state:
            converted = _to_apex(state)
            if converted is not None:
                return converted, key
    return None, None


def move_scaler_state(checkpoint: dict[str, Any]) -> str | None:
    """Move scaler state to the key under which Lightning gives it to ``ApexAMP``, in place.

    Args:
        checkpoint: A loaded checkpoint of Lightning.

    Returns:
        The key it was under, ``None`` if there was none.
    """
    state, key = find_scaler_state(checkpoint)
    if key is not None and key != OWN_KEY:
        checkpoint[OWN_KEY] = state
        del checkpoint[key]
    return key


def float_state(weights: Mapping[str, Any], old: str = "", new: str = "") -> OrderedDict[str, Any]:
    """Return a ``state_dict`` with its half tensors in float32, and with another prefix to its names.

    Args:
        weights: Is not changed.
        old: What names begin with; those that do not keep all of theirs.
        new: What they begin with then.
    """
    wide = OrderedDict(
        (new + name.removeprefix(old), value.detach().float() if _is_half(value) else value)
        for name, value in weights.items()
    )
    vars(wide)["_metadata"] = {  # the versions of modules, by path: some read their weights by them
        (new + (path and f"{path}.").removeprefix(old)).removesuffix("."): versions
        for path, versions in getattr(weights, "_metadata", {}).items()
    }
    return wide


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF_DTYPES


def to_torch_adam(optimizer: Any) -> Any:
    """Return the state of apex's FusedAdam as ``torch.optim.AdamW(fused=True)`` and ``Adam(fused=True)`` read it.

    apex counts the steps of a whole group, torch those of each parameter; and torch marks the groups that are fused.
    Of what apex's FP16_Optimizer wrote around an optimizer's state, that state is taken.

    Args:
        optimizer: What ``optimizer.state_dict()`` returned, under apex or not; never changed.

    Returns:
        The state, with ``step`` beside the moments of each parameter. All else is returned as it is.

    Example:
        >>> moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        >>> group = {"lr": 0.1, "bias_correction": True, "step": 3, "params": [0]}
        >>> to_torch_adam({"state": {0: moments}, "param_groups": [group]})["state"][0]["step"]
        tensor(3.)
    """
    if isinstance(optimizer, Mapping) and "fp32_from_fp16" in optimizer:  # FP16_Optimizer's
        optimizer = optimizer["optimizer_state_dict"]
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        return optimizer
    state, groups = dict(optimizer["state"]), []
    for group in optimizer["param_groups"]:
        # torch's groups have neither of the first two, and those of apex's other optimizers have the third.
        if {"step", "bias_correction"} <= group.keys() and "grad_averaging" not in group:
            for name in group["params"]:
                if "exp_avg_sq" in state.get(name, ()) and "step" not in state[name]:
                    state[name] = {**state[name], "step": torch.tensor(float(group["step"]), dtype=torch.float32)}
            group = {**group, "fused": True}
        groups.append(group)
    return {**optimizer, "state": state, "param_groups": groups}


def convert_checkpoint(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    to: str = "apex",
    prefix: str = "",
    growth_interval: int = 2000,
    trust: bool = False,
) -> Path:
    """Turn an old checkpoint into one that Lightning 2 loads, with the loss scale that it holds.

    Read are plain apex files, ``{"model": ..., "optimizer": ..., "amp": ...}`` as in apex's documentation or without
    ``"amp"`` as in its ImageNet example, and Lightning's own of any version. What is written loads with
    ``torch.load(..., weights_only=True)``. States of apex's FusedAdam come out as ``torch.optim.AdamW`` reads them.

    Args:
        old: The file to read; never changed.
        new: The file to write; must not exist.
        to: ``"apex"`` for ``Trainer(plugins=[ApexAMP(...)])``, ``"mixed"`` for ``Trainer(precision="16-mixed")``.
        prefix: For plain files: what the LightningModule puts before the names of the weights, as ``"model."``
            for a network in ``self.model``. ``"module."`` from DistributedDataParallel is dropped.
        growth_interval: For ``"mixed"``: steps without overflow before the scale doubles; 1 or more.
        trust: Unpickle whatever the file holds, which runs any code in it. Needed for Lightning 1.x files with
            objects in them.

    Returns:
        The path of the new file.

    Raises:
        CheckpointError: If the file is broken, foreign, holds objects and is not trusted, lacks a part, or counts
            epochs or steps with a value that is not a number.
        FileNotFoundError: If ``old`` or the folder of ``new`` is absent.
        FileExistsError: If ``new`` exists, ``old`` included.
        ValueError: If ``to`` or ``growth_interval`` is not accepted.

    Warns:
        TurboWarning: For entries that are left out because Lightning has no place for them or they are no plain data,
            for a plain file without scaler state, and for scalers beyond the one that ``"16-mixed"`` has.
    """
    if to not in ("apex", "mixed"):
        raise ValueError(f"to={to!r} is unknown: expected 'apex' (ApexAMP) or 'mixed' (precision='16-mixed').")
    if not is_whole(growth_interval, 1):
        raise ValueError(f"growth_interval={growth_interval!r}: expected an int of 1 or more.")
    old, new = Path(old), Path(new)
    _check_paths(old, new)
    checkpoint = _read(old, trust)
    state, key = find_scaler_state(checkpoint)
    result, taken = _from_lightning(checkpoint) if _LIGHTNING in checkpoint else _from_plain(old, checkpoint, prefix)
    if state is None:
        _check_needless(old, checkpoint)
        warnings.warn(
            f"{str(old)!r} holds no state of a loss scaler: a dynamic scale starts from the beginning.",
            TurboWarning,
            stacklevel=2,
        )
    else:
        result.pop(str(key), None)
        result.update(_to_mixed(state, growth_interval) if to == "mixed" else {OWN_KEY: state})
    dropped = [str(name) for name, value in checkpoint.items() if name not in (*taken, key) and value is not None]
    plain = {name: _plain(value, name, dropped) for name, value in result.items()}
    _warn_of_dropped(dropped, new)
    _write(plain, new)
    return new


def _check_needless(old: Path, checkpoint: dict[str, Any]) -> None:
    if _LIGHTNING in checkpoint or checkpoint.get("amp"):
        raise CheckpointError(
            f"{str(old)!r} lacks the state of a loss scaler; looked for {', '.join(KNOWN_KEYS)}. A run without one "
            "needs no conversion: Lightning 2 loads its checkpoints as they are."
        )


def _warn_of_dropped(dropped: list[str], new: Path) -> None:
    if dropped:
        warnings.warn(
            f"Left out of {str(new)!r}: {', '.join(sorted(dropped))}. Lightning has no entry for them there, or they "
            "are objects and no plain data. Take what you need of them from the old file.",
            TurboWarning,
            stacklevel=3,
        )


def _check_paths(old: Path, new: Path) -> None:
    if not old.is_file():
        raise FileNotFoundError(f"{str(old)!r} does not exist: expected an old checkpoint. Check the path.")
    if new.exists():
        raise FileExistsError(f"{str(new)!r} exists: expected a path that is free. Name another file.")
    if not new.parent.is_dir():
        raise FileNotFoundError(f"The folder {str(new.parent)!r} of the new file does not exist. Make it first.")


def _read(path: Path, trust: bool) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        objects = [line.strip() for line in str(error).splitlines() if re.search("GLOBAL|Unsupported class", line)]
        if not objects:
            raise _broken(path, error) from error
        raise CheckpointError(
            f"{str(path)!r} holds objects beside tensors and plain data. If you trust whoever wrote it, pass "
            f"trust=True (on the command line --trust), which runs the code in it. torch says: {objects[0]}"
        ) from error
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{str(path)!r} holds objects of {error.name!r}, which is not installed here. Load it where it is, "
            "and save the states of model, optimizer and amp again without them."
        ) from error
    except OSError:  # says itself what it is
        raise
    except Exception as error:  # a pickle that is damaged ends in any
        raise _broken(path, error) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(checkpoint).__name__}: expected a dict, {{'model', 'optimizer', 'amp'}} "
            "or a checkpoint of Lightning. Save the parts together."
        )
    return checkpoint


def _broken(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(
        f"{str(path)!r} cannot be read as a checkpoint: {type(error).__name__}: {reason}. "
        "Expected a complete file that torch.save wrote; copy it again if it was cut short."
    )


def _from_lightning(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], Collection[str]]:
    missing = [name for name in ("state_dict", "epoch", "global_step") if name not in checkpoint]
    if missing:
        raise CheckpointError(f"The Lightning checkpoint lacks {', '.join(map(repr, missing))}. Take the whole file.")
    result = {**checkpoint, "state_dict": float_state(checkpoint["state_dict"])}
    if "optimizer_states" in checkpoint:
        result["optimizer_states"] = [to_torch_adam(state) for state in checkpoint["optimizer_states"]]
    return result, checkpoint.keys()


def _from_plain(path: Path, checkpoint: dict[str, Any], prefix: str) -> tuple[dict[str, Any], Collection[str | None]]:
    taken = {
        part: next((name for name in names if checkpoint.get(name) is not None), None)
        for part, names in _PLAIN_NAMES.items()
    }
    parts: dict[str, Any] = {part: None if name is None else checkpoint[name] for part, name in taken.items()}
    _check_parts(path, checkpoint, parts)
    weights = parts["model"]
    wrapped = bool(weights) and all(str(name).startswith("module.") for name in weights)
    epoch, step = (_count(path, taken[part], parts[part]) for part in ("epoch", "step"))
    return {
        _LIGHTNING: _LIGHTNING_2,
        "epoch": epoch,
        "global_step": step,
        "loops": {"fit_loop": _progress(epoch, step)},
        "state_dict": float_state(weights, "module." if wrapped else "", prefix),
        "optimizer_states": [to_torch_adam(state) for state in _as_list(parts["optimizer"])],
        "lr_schedulers": [] if parts["lr_scheduler"] is None else _as_list(parts["lr_scheduler"]),
        "callbacks": {},
    }, {*taken.values(), "amp"}


def _check_parts(path: Path, checkpoint: dict[str, Any], parts: dict[str, Any]) -> None:
    missing = [part for part in ("model", "optimizer") if parts[part] is None]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} lacks {', '.join(map(repr, missing))}; it has {sorted(map(str, checkpoint))}. Expected "
            "{'model', 'optimizer', 'amp'} as in apex's documentation, or a checkpoint of Lightning."
        )
    if not isinstance(parts["model"], Mapping):
        raise CheckpointError(
            f"'model' in {str(path)!r} is a {type(parts['model']).__name__}: expected what model.state_dict() "
            "returned. Save that."
        )


def _count(path: Path, name: str | None, value: Any) -> int:
    try:
        return 0 if value is None else int(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{name!r} in {str(path)!r} is {value!r}: expected a whole number. Correct it and save the file again."
        ) from error


def _progress(epoch: int, step: int) -> dict[str, Any]:
    """Return what Lightning 2 saves of its training loop after ``epoch`` whole epochs and ``step`` optimizer steps."""

    def tracker(count: int, *more: str) -> dict[str, Any]:
        return {span: dict.fromkeys(("ready", "completed", *more), count) for span in ("total", "current")}

    return {
        "epoch_progress": tracker(epoch, "started", "processed"),
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": tracker(step), "zero_grad": tracker(step, "started")}
        },
        "epoch_loop.manual_optimization.optim_step_progress": tracker(step),
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _to_apex(state: Mapping[str, Any]) -> dict[str, Any] | None:
    if any(str(key).startswith("loss_scaler") for key in state):
        return {str(key): value for key, value in state.items()}
    if "scale" in state and "_growth_tracker" in state:  # torch's GradScaler
        return {"loss_scaler0": {"loss_scale": float(state["scale"]), "unskipped": int(state["_growth_tracker"])}}
    return None


def _to_mixed(state: Mapping[str, Any], growth_interval: int) -> dict[str, Any]:
    left = sorted(set(state) - {"loss_scaler0"})
    if left:
        warnings.warn(f"precision='16-mixed' has one loss scaler; left out: {left}.", TurboWarning, stacklevel=3)
    first = state["loss_scaler0"]
    return {
        "MixedPrecision": {
            "scale": float(first["loss_scale"]),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": growth_interval,
            "_growth_tracker": int(first["unskipped"]),
        }
    }


def _plain(value: Any, where: str, dropped: list[str]) -> Any:
    """Return ``value`` in types that ``torch.load(weights_only=True)`` reads; ``dropped`` gets names of the rest."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (bool, int, float, str)):
        return _plain_scalar(value)
    if value is None or isinstance(value, (Tensor, bytes, complex, torch.dtype, torch.device)):
        return value
    if isinstance(value, SimpleNamespace) or type(value).__name__ == "Namespace":
        value = vars(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, where, dropped)
    if isinstance(value, (list, tuple, set)):
        return _plain_items(value, where, dropped)
    item: Any = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # numpy's numbers
        return item()
    dropped.append(where)
    return _NOTHING


def _plain_scalar(value: Any) -> Any:
    """Return a number or text of a subclass, as numpy's, in Python's own type."""
    kind: Any = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
    return kind(value)


def _plain_items(items: Collection[Any], where: str, dropped: list[str]) -> Collection[Any]:
    parts = [_plain(item, f"{where}[{i}]", dropped) for i, item in enumerate(items)]
    kept = [part for part in parts if part is not _NOTHING]
    kind: Any = type(items)
    return kind(kept) if kind in (list, tuple, set) else kept


def _plain_mapping(mapping: Mapping[Any, Any], where: str, dropped: list[str]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    if isinstance(mapping, OrderedDict):  # a state_dict has its modules' versions as an attribute
        kept = OrderedDict()
        vars(kept).update(_plain_mapping(vars(mapping), where, dropped))
    for key, item in mapping.items():
        if key is None or isinstance(key, (str, int, float)):
            part = _plain(item, f"{where}.{key}", dropped)
            if part is not _NOTHING:
                kept[key] = part
        else:
            dropped.append(f"{where}.{getattr(key, '__name__', key)}")
    return kept


_NOTHING = object()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        try:
            torch.save(checkpoint, file)
            file.flush()
            file.seek(0)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
