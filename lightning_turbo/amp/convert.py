"""Converts old checkpoints: the scaler states of apex and of every version of Lightning, as ApexAMP reads them."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect
from lightning_turbo._files import whole_file
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import TurboError, TurboWarning

__all__ = [
    "CheckpointError",
    "convert_checkpoint",
    "find_scaler_state",
    "to_torch_adam",
]

OWN_KEY = "ApexAMP"

# The names of the parts in checkpoints of plain scripts; those of apex's documentation first.
_PLAIN_NAMES = {
    "model": ("model", "state_dict", "model_state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict"),
    "lr_scheduler": ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict"),
    "epoch": ("epoch",),
    "step": ("global_step", "iteration", "step"),
}
_LIGHTNING = "pytorch-lightning_version"
_SHOWN = 8  # entries of a file listed in a message


class CheckpointError(TurboError, ValueError):
    """A file is no checkpoint or is incomplete, or its names cannot take the prefix."""


def find_scaler_state(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the scaler state of a checkpoint in apex's format, and its key.

    Any entry that looks like a scaler state counts: Lightning uses the class name of its plugin, older versions
    ``"amp_scaling_state"``, apex's documentation ``"amp"``, and scripts ``"scaler"``, ``"amp_state_dict"`` and more. If
    there are several, the last one counts.

    Args:
        checkpoint: A loaded checkpoint of Lightning or of a plain apex script.

    Returns:
        ``({"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}, key)``, or ``(None, None)``.
    """
    found = [(state, key) for key, value in checkpoint.items() if (state := _read_scalers(value)) is not None]
    return found[-1] if found else (None, None)


def _read_scalers(state: Any) -> dict[str, Any] | None:
    if not isinstance(state, Mapping):
        return None
    if {"scale", "_growth_tracker"} <= state.keys():  # torch's GradScaler
        return {"loss_scaler0": {"loss_scale": float(state["scale"]), "unskipped": int(state["_growth_tracker"])}}
    # apex's FP16_Optimizer also saves a "loss_scaler", but as an object.
    scalers = [value for name, value in state.items() if str(name).startswith("loss_scaler")]
    return dict(state) if any(isinstance(value, Mapping) and "loss_scale" in value for value in scalers) else None


def to_torch_adam(optimizer: Any) -> Any:
    """Convert the state of apex's FusedAdam to that of ``torch.optim.AdamW(fused=True)`` and ``Adam(fused=True)``.

    apex counts steps per group and torch per parameter, and torch marks fused groups. If apex's FP16_Optimizer wraps an
    optimizer's state, the inner state is used.

    Args:
        optimizer: A result of ``optimizer.state_dict()``, from apex or not. It is not modified.

    Returns:
        The state, with ``step`` next to the moments of each parameter. Other states are returned unchanged.

    Example:
        >>> moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        >>> group = {"lr": 0.1, "bias_correction": True, "step": 3, "params": [0]}
        >>> to_torch_adam({"state": {0: moments}, "param_groups": [group]})["state"][0]["step"]
        tensor(3.)
    """
    if isinstance(optimizer, Mapping) and "fp32_from_fp16" in optimizer:  # from FP16_Optimizer
        optimizer = optimizer["optimizer_state_dict"]
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        return optimizer
    state = dict(optimizer["state"])
    groups = list(optimizer["param_groups"])
    for index, group in enumerate(groups):
        # torch's groups have neither of the first two keys; those of apex's other optimizers have the third.
        if {"step", "bias_correction"} <= group.keys() and "grad_averaging" not in group:
            groups[index] = {**group, "fused": True}
            with_moments = [name for name in group["params"] if "exp_avg_sq" in state.get(name, ())]
            count = torch.tensor(float(group["step"]), dtype=torch.float32)
            state.update({name: {"step": count.clone(), **state[name]} for name in with_moments})
    return {**optimizer, "state": state, "param_groups": groups}


def convert_checkpoint(
    old: str | os.PathLike[str], new: str | os.PathLike[str], *, prefix: str | None = None, trust: bool = False
) -> Path:
    """Convert an old checkpoint to one that ``Trainer(plugins=[ApexAMP(...)])`` resumes, with its loss scale.

    It reads plain apex files, ``{"model": ..., "optimizer": ..., "amp": ...}`` as in apex's documentation or without
    ``"amp"`` as in its ImageNet example, and files of any version of Lightning. States of apex's FusedAdam are
    converted for ``torch.optim.AdamW``.

    Args:
        old: The file to read. It is not modified.
        new: The file to write. It must not exist.
        prefix: For plain files: the prefix of the weights' names in the LightningModule, such as ``"model."`` for a
            network in ``self.model``, or ``""`` for none. ``None`` adds no prefix and warns how the names begin.
            ``"module."`` from DistributedDataParallel is removed.
        trust: Unpickle arbitrary objects, which can run any code. Required for Lightning 1.x files that contain
            objects. The objects stay in the new file, which then needs ``weights_only=False`` to load.

    Returns:
        The path of the new file.

    Raises:
        CheckpointError: If the file is damaged, contains objects without ``trust``, or is incomplete, or if ``prefix``
            does not end with a dot.
        OSError: If ``old`` cannot be read, or ``new`` exists or cannot be written.

    Warns:
        TurboWarning: For entries that are dropped because Lightning has no place for them, for a file without a scaler
            state, and for a plain file without a scheduler state or a step count, which then start from 0.
    """
    dotted = not prefix or prefix.endswith(".")
    expect(dotted, "prefix", prefix, "a name that ends with a dot, such as 'model.'", CheckpointError)
    old, new = Path(old), Path(new)
    if new.exists():
        raise FileExistsError(f"{str(new)!r} exists: expected a new path. Name another file.")
    checkpoint = _read(old, trust)
    state, key = find_scaler_state(checkpoint)
    checkpoint.pop(str(key), None)
    if {_LIGHTNING, "state_dict"} <= checkpoint.keys():
        result = {**checkpoint, "state_dict": _float_state(checkpoint["state_dict"])}
    else:
        result = _from_plain(old, checkpoint, prefix)
    if "optimizer_states" in result:
        result["optimizer_states"] = [to_torch_adam(each) for each in result["optimizer_states"]]
    if state is None:
        _warn(f"{str(old)!r} has no loss scaler state: a dynamic scale restarts from its initial value.")
    else:
        result[OWN_KEY] = state
    with whole_file(new) as partial, partial.open("wb") as file:
        torch.save(result, file)
    return new


def _warn(text: str) -> None:
    warnings.warn(text, TurboWarning, stacklevel=3)


def _read(path: Path, trust: bool) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trust)
    except OSError:  # its message is clear as it is
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        said = " ".join(str(error).split())
        said = said[max(said.find("Unsupported"), 0) :][:200]  # torch names the object after a page of advice
        advice = "" if trust else " and, if it contains objects, trust=True (--trust), which can run any code"
        raise CheckpointError(
            f"{str(path)!r} cannot be read as a checkpoint: {type(error).__name__}: {said}. Expected a full file that "
            f"torch.save wrote{advice}."
        ) from error
    expect(isinstance(checkpoint, dict), str(path), type(checkpoint).__name__, "a dict of states", CheckpointError)
    return checkpoint


def _from_plain(path: Path, checkpoint: dict[str, Any], prefix: str | None) -> dict[str, Any]:
    """Return what Lightning 2 would have saved in place of a plain script's file."""
    parts = _find_parts(path, checkpoint)
    weights = parts["model"]
    epoch = int(parts["epoch"] or 0)
    step = int(parts["step"] or 0)
    _warn_of_zeros(path, epoch, step, parts["lr_scheduler"])
    wide = _float_state(weights, _wrapper(weights), prefix or "")
    if prefix is None:
        _warn(
            f"The names of weights begin with {_some(dict.fromkeys(name.partition('.')[0] for name in wide))}. A "
            "LightningModule that holds the network in self.model needs prefix='model.' (--prefix model.); prefix='' "
            "confirms the names."
        )
    return {
        _LIGHTNING: "2.0.0",
        "epoch": epoch,
        "global_step": step,
        "loops": {"fit_loop": _progress(epoch, step)},
        "state_dict": wide,
        "optimizer_states": _as_list(parts["optimizer"]),
        "lr_schedulers": _as_list(parts["lr_scheduler"]),
        "callbacks": {},
    }


def _find_parts(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a plain script's file, ``None`` for missing ones; warn about dropped entries."""
    given = {name: value for name, value in checkpoint.items() if value is not None and name != "amp"}
    taken = {part: next((name for name in names if name in given), "") for part, names in _PLAIN_NAMES.items()}
    parts = {part: given.get(name) for part, name in taken.items()}
    if not isinstance(parts["model"], Mapping) or parts["optimizer"] is None:
        raise CheckpointError(
            f"{str(path)!r} has {_some(checkpoint)}: expected a checkpoint of Lightning, or {{'model', 'optimizer', "
            "'amp'}} as in apex's documentation with what state_dict() returned. Save the parts together."
        )
    left = sorted(map(str, given.keys() - set(taken.values())))
    if left:
        _warn(f"Dropped, because Lightning has no entry for them: {', '.join(left)}.")
    return parts


def _warn_of_zeros(path: Path, epoch: int, step: int, schedule: Any) -> None:
    """Warn about what restarts from 0 in a resumed run: a plain file does not say how many steps an epoch had."""
    if epoch and not step:
        _warn(f"{str(path)!r} has no step count: global_step will start from 0 at epoch {epoch}.")
    if (epoch or step) and schedule is None:
        _warn(
            f"{str(path)!r} has no scheduler state: schedulers will start from 0. In on_train_start, "
            "self.lr_schedulers().last_epoch = self.current_epoch sets a scheduler that counts epochs."
        )


def _some(names: Mapping[str, Any]) -> str:
    """Return the first names and the number of further ones."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(str, list(names)[:_SHOWN]))}{more}"


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _wrapper(weights: Mapping[str, Any]) -> str:
    """Return the prefix that DistributedDataParallel has added to every name."""
    return "module." if weights and all(name.startswith("module.") for name in weights) else ""


def _float_state(weights: Mapping[str, Any], old: str = "", new: str = "") -> OrderedDict[str, Any]:
    """Return a ``state_dict`` with its half tensors in float32 and its prefix replaced."""
    wide = OrderedDict(
        (new + name.removeprefix(old), value.detach().float() if _is_half(value) else value)
        for name, value in weights.items()
    )
    vars(wide)["_metadata"] = {  # module versions by path; some modules need them to load
        (new + (path and f"{path}.").removeprefix(old)).removesuffix("."): versions
        for path, versions in getattr(weights, "_metadata", {}).items()
    }
    return wide


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF_DTYPES


def _progress(epoch: int, step: int) -> dict[str, Any]:
    """Return what Lightning 2 saves of its training loop after ``epoch`` full epochs and ``step`` optimizer steps."""

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
