"""Load the pretrained weights in a file that match a network, and report the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightsReport", "load_weights"]

WRAPPERS = ("state_dict", "model", "net")  # keys of the state dict in a file
PREFIXES = ("module.", "net.", "model.", "_orig_mod.")  # added by DataParallel, Lightning and torch.compile


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Result of ``load_weights``: names of weights."""

    matched: tuple[str, ...]
    """Loaded."""
    missing: tuple[str, ...]
    """In the network but not in the file: keep their initial values."""
    unexpected: tuple[str, ...]
    """In the file but not in the network: ignored."""
    differing: tuple[str, ...]
    """In both, with different shapes: ignored."""

    def __str__(self) -> str:
        rows = ((name, getattr(self, name)) for name in ("matched", "missing", "unexpected", "differing"))
        return "\n".join(f"{len(keys)} {name}{': ' if keys else ''}{_few(keys)}" for name, keys in rows)


def load_weights(network: nn.Module, path: str | Path) -> WeightsReport:
    """Load the weights in a file, for example MedicalNet's, that match a network, regardless of prefixes.

    Args:
        network: The network, which is changed in place.
        path: A file written by ``torch.save``: a state dict, or a dict with one under ``"state_dict"``, ``"model"`` or
            ``"net"``. Only tensors are unpickled.

    Returns:
        The names that matched, were missing, were unexpected, or differed in shape.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file has no state dict, or none of its weights with two or more dimensions matches.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"weights: expected a file written by torch.save, got {str(path)!r}, which does not exist."
        )
    own = network.state_dict()
    found = {_plain(name, own): value for name, value in _state(path).items()}
    matched = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
    report = WeightsReport(
        matched=tuple(matched),
        missing=tuple(name for name in own if name not in found),
        unexpected=tuple(name for name in found if name not in own),
        differing=tuple(
            f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
            for name, value in found.items()
            if name in own and name not in matched
        ),
    )
    if not any(value.dim() > 1 for value in matched.values()):  # a bias with one element matches by accident
        raise ValueError(
            f"weights={str(path)!r} match nothing in {type(network).__name__}: the file has {_few(tuple(found))}, the "
            f"network has {_few(tuple(own))}. Choose the depth and width of the network in the file."
        )
    network.load_state_dict(matched, strict=False)
    return report


def _state(path: Path) -> Mapping[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is not a pickle can raise any exception
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"weights: expected a file written by torch.save with tensors only, got {str(path)!r}, which cannot be "
            f"read ({reason}). Save network.state_dict()."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"weights: expected a file with a state dict, got {str(path)!r}. Save network.state_dict() with torch.save."
        )
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _plain(name: str, own: Mapping[str, Any]) -> str:
    """Return the name without the prefixes of wrappers."""
    while name not in own and (prefix := next((p for p in PREFIXES if name.startswith(p)), None)):
        name = name.removeprefix(prefix)
    return name


def _few(names: tuple[str, ...], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
