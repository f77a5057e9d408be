"""Finds attributes that hold tensors with their graph after the step is over."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_turbo._lightning import Metric
from lightning_turbo.doctor.facts import Part
from lightning_turbo.doctor.source import Sources

__all__ = ["Retention"]

LIMIT = 2000
"""Number of last elements of a container that are examined."""
NODES = 200_000
"""Counting the graphs of an attribute stops at this many nodes, after about a second."""


class Retention:
    """Records what holds a graph after each watched step, by the owner's path (or class name) and the attribute.

    A ``Session`` calls ``measure`` after each watched step. It stores sizes, never tensors.

    Args:
        module: The LightningModule; its submodules from outside ``torch.nn`` are examined too.
        others: Further objects to examine: the user's callbacks.
    """

    def __init__(self, module: nn.Module, others: Iterable[object] = ()) -> None:
        self.module = module
        self.others = list(others)
        self._history: list[dict[tuple[str, str], int]] = []  # number of graph nodes after each step

    def measure(self) -> None:
        """Count the graph nodes that are held now."""
        sizes = {}
        for path, owner in _owners(self.module, self.others).items():
            for name, value in _attributes(owner).items():
                sizes[path, name] = _count_nodes(value)
        self._history.append({key: size for key, size in sizes.items() if size})

    def find(self, sources: Sources) -> tuple[Part, ...]:
        """Return what held a graph after each of the last two steps."""
        owners = _owners(self.module, self.others)
        # A graph seen once may belong to this step's own output; what two consecutive steps leave behind is kept.
        before, now = self._history[-2:] if len(self._history) > 1 else ({}, {})
        return tuple(
            Part(
                name=f"{path or 'self'}.{name}",
                growing=self._grows((path, name)),
                site=sources.change(type(owners[path]), name),
            )
            for path, name in filter(before.__contains__, now)
        )

    def _grows(self, key: tuple[str, str]) -> bool:
        """Return whether more was held after every step: the size of a single step's graph may go up and down."""
        return all(before.get(key, 0) < now.get(key, 0) for before, now in pairwise(self._history))


def _owners(module: nn.Module, others: Iterable[object]) -> dict[str, object]:
    parts = {path: each for path, each in module.named_modules() if not type(each).__module__.startswith("torch.")}
    return {**parts, **{type(each).__name__: each for each in others}}


def _attributes(owner: object) -> dict[str, Any]:
    own = dict(vars(owner))
    if isinstance(owner, Metric):
        # Its latest results, as torchmetrics keeps them: with a graph where the metric is the loss.
        own = {name: value for name, value in own.items() if name not in ("_forward_cache", "_computed")}
    own.pop("_modules", None)
    own |= own.pop("_buffers", {})
    for name in own.pop("_parameters", {}):
        # Old-style weight and spectral norm compute the weight from these in each forward pass.
        own.pop(re.sub("_(orig|g)$", "", name), None)
    return own


def _count_nodes(value: Any) -> int:
    """Count the distinct nodes of the graphs that ``value`` holds, up to a limit."""
    seen: set[Any] = set()
    waiting = _roots(value) - {None}
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        seen.add(node)
        waiting |= {each for each, _ in node.next_functions} - seen - {None}
    return len(seen)


def _roots(value: Any, depth: int = 0) -> set[Any]:
    """Return the last node of each graph that ``value`` holds, directly or in nested containers."""
    if isinstance(value, torch.Tensor):
        return {value.grad_fn}
    items = list(value.values()) if isinstance(value, dict) else value
    # Lists of lists of losses are deep enough, and the limit ends the search in a container that contains itself.
    if depth == 3 or not isinstance(items, (list, tuple, set, deque)):
        return set()
    return set().union(*(_roots(each, depth + 1) for each in list(items)[-LIMIT:]))
