"""Where the tensors of one step come from: made on the CPU, fetched to it, or put out by a layer with a bias."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

from lightning_turbo.doctor.facts import Site

__all__ = ["LAYERS", "Origins", "TensorTable", "tensors_in"]

LAYERS = {f"conv{transpose}{n}d" for transpose in ("", "_transpose") for n in (1, 2, 3)} | {"linear"}
"""Names of torch's functions that take input, weight and bias."""

T = TypeVar("T")


class TensorTable(Generic[T]):
    """Values by tensor, compared by identity; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def put(self, tensor: torch.Tensor, value: T) -> None:
        """Set a tensor's value."""
        self._rows[id(tensor)] = (weakref.ref(tensor), value)

    def get(self, tensor: Any) -> T | None:
        """Return a tensor's value, ``None`` if it has none."""
        reference, value = self._rows.get(id(tensor), (None, None))
        return value if reference is not None and reference() is tensor else None

    def drop(self, tensor: torch.Tensor) -> None:
        """Forget a tensor's value."""
        self._rows.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()


class Origins:
    """Follows the tensors of a step.

    Args:
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self._made: TensorTable[bool] = TensorTable()
        self._fetched: TensorTable[Site] = TensorTable()
        self._outputs: TensorTable[tuple[weakref.ref[torch.Tensor], Site | None]] = TensorTable()

    def clear(self) -> None:
        """Forget the step."""
        self._made.clear()
        self._fetched.clear()
        self._outputs.clear()

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the CPU in a run on a GPU, or would be there, being made in this step."""
        return not tensor.is_cuda if self.cuda else self._made.get(tensor) is not None

    def fetched(self, result: Any, site: Site | None) -> None:
        """Remember a tensor that ``.cpu()`` brought to the host."""
        if isinstance(result, torch.Tensor) and site is not None:
            self._fetched.put(result, site)

    def fetched_at(self, tensor: Any) -> Site | None:
        """Return where a tensor was brought to the host."""
        return self._fetched.get(tensor)

    def moved(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: list[torch.Tensor],
        result: torch.Tensor,
    ) -> str | None:
        """Follow a call from tensors to a tensor.

        Returns:
            ``"round trip"`` or ``"moved"`` if it moves a fetched or home-made tensor to the device, else ``None``.
        """
        if sources and (name == "cuda" or (name == "to" and _names_a_device(args[1:], kwargs))):
            fetched, made = self._fetched.get(sources[0]), self._made.get(sources[0])
            self._made.drop(result)
            return "round trip" if fetched else "moved" if made else None
        new = not sources and kwargs.get("device") is None and result.device.type == "cpu"
        derived = any(self._made.get(each) for each in sources) and all(self.on_host(each) for each in sources)
        if new or (derived and not result.is_cuda):
            self._made.put(result, True)
        return None

    def layer(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, site: Site | None) -> None:
        """Remember the output of a layer that has a bias."""
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if bias is not None:
            self._outputs.put(result, (weakref.ref(bias), site))

    def bias_before(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Site | None] | None:
        """Return the bias of the layer that put out ``tensor``, and where, if there is one."""
        reference, site = self._outputs.get(tensor) or (None, None)
        bias = reference() if reference is not None else None
        return (bias, site) if bias is not None else None


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, and in lists and tuples among them."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(each for each in value if isinstance(each, torch.Tensor))
    return found


def _names_a_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args, kwargs.get("device"), kwargs.get("other"))
    return any(isinstance(each, (torch.device, str, torch.Tensor)) or type(each) is int for each in given)
