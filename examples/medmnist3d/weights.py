"""Pretrained weights: what of a file fits a network, loaded and reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightsReport", "load_weights"]

WRAPPERS = ("state_dict", "model", "net")  # keys under which files keep the state itself
PREFIXES = ("module.", "net.", "model.", "_orig_mod.")  # what DataParallel, Lightning and compile put in front


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What ``load_weights`` found."""

    matched: tuple[str, ...]
    """Loaded."""
    missing: tuple[str, ...]
    """In the network, not in the file: these keep their initial values."""
    unexpected: tuple[str, ...]
    """In the file, not in the network: not used."""
    differing: tuple[str, ...]
    """In both, with another shape: not used."""

    def __str__(self) -> str:
        rows = ((name, getattr(self, name)) for name in ("matched", "missing", "unexpected", "differing"))
        return "\n".join(f"{len(keys)} {name}{': ' if keys else ''}{_few(keys)}" for name, keys in rows)


def load_weights(network: nn.Module, path: str | Path) -> WeightsReport:
    """Load what fits from a file of weights, such as MedicalNet's, whatever its prefixes.

    Args:
        network: Changed in place.
        path: A file of ``torch.save``: a ``state_dict``, alone or under ``"state_dict"``. Only tensors are unpickled.

    Returns:
        Which keys matched, were missing, unexpected, or differed in shape.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If it holds no ``state_dict``, or no weight of a layer in it fits the network.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"weights={str(path)!r} is not there. Give the path of a file of torch.save.")
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
    if not any(value.dim() > 1 for value in matched.values()):  # a bias of one number fits everywhere
        raise ValueError(
            f"weights={str(path)!r} match nothing in {type(network).__name__}: the file has {_few(tuple(found))}, the "
            f"network has {_few(tuple(own))}. Choose the depth and width that the file was made for."
        )
    network.load_state_dict(matched, strict=False)
    return report


def _state(path: Path) -> Mapping[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no pickle ends in errors of any kind
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"weights={str(path)!r} cannot be read ({reason}); expected a file of torch.save that holds tensors "
            "only. Save network.state_dict()."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"weights={str(path)!r} holds no state_dict. Save network.state_dict() with torch.save.")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _plain(name: str, own: Mapping[str, Any]) -> str:
    """The name without what wrappers put in front of it."""
    while name not in own and (prefix := next((p for p in PREFIXES if name.startswith(p)), None)):
        name = name.removeprefix(prefix)
    return name


def _few(names: tuple[str, ...], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
