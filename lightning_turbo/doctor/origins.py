"""Where the tensors of one step come from: made on the CPU, fetched to it, or put out by a layer with a bias."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_turbo.doctor.facts import Site

__all__ = ["LAYERS", "Origins", "find_tensors"]

LAYERS = {f"conv{transpose}{n}d" for transpose in ("", "_transpose") for n in (1, 2, 3)} | {"linear"}
"""Names of torch's functions that take input, weight and bias."""


class Origins:
    """Follows the tensors of one step.

    Args:
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.made = WeakIdKeyDictionary()  # in this step, on the CPU
        self.fetched = WeakIdKeyDictionary()  # by .cpu(), and where
        self._outputs = WeakIdKeyDictionary()

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the CPU in a run on a GPU, or would be there, being made in this step."""
        return not tensor.is_cuda if self.cuda else tensor in self.made

    def follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> str | None:
        """Follow a call of torch's function ``name`` from ``tensors`` to the tensor ``result``.

        Returns:
            ``"round trip"`` or ``"moved"`` if it moves a fetched or home-made tensor to the device, else ``None``.
        """
        if tensors and self._moves(name, args, kwargs):
            kind = "round trip" if tensors[0] in self.fetched else "moved" if tensors[0] in self.made else None
            self.made.pop(result, None)
            return kind
        if self._made_on_host(kwargs, tensors, result):
            self.made[result] = True
        return None

    def _moves(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "type_as":
            return not self.on_host(args[1] if len(args) > 1 else kwargs["other"])
        targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
        return name == "cuda" or (
            name == "to"
            and any(isinstance(each, (torch.device, str, torch.Tensor)) or type(each) is int for each in targets)
        )

    def _made_on_host(self, kwargs: dict[str, Any], tensors: list[torch.Tensor], result: torch.Tensor) -> bool:
        if not tensors:
            return kwargs.get("device") is None and result.device.type == "cpu"
        derived = any(each in self.made for each in tensors) and all(map(self.on_host, tensors))
        return derived and not result.is_cuda

    def put_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, site: Site | None) -> None:
        """Remember the output of a layer that has a bias."""
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if bias is not None:
            self._outputs[result] = (weakref.ref(bias), site)

    def bias_before(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Site | None] | None:
        """Return the bias of the layer that put out ``tensor``, and where, if there is one."""
        reference, site = self._outputs.get(tensor) or (None, None)
        bias = reference() if reference is not None else None
        return (bias, site) if bias is not None else None


def find_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, and in lists and tuples among them."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in flat if isinstance(each, torch.Tensor)]
