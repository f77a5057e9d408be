"""Which attributes hold tensors with their graph after the step is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_turbo.doctor.facts import Part
from lightning_turbo.doctor.source import Sources

__all__ = ["find_retained", "measure_graphs"]

LIMIT = 2000
"""Elements of a container, and nodes of a graph, at which counting stops."""


def measure_graphs(module: nn.Module, others: Iterable[object] = ()) -> dict[tuple[str, str], int]:
    """Measure what is held with its graph, now.

    Args:
        module: The LightningModule; its submodules outside of ``torch.nn`` are looked at, too.
        others: Further objects whose attributes are looked at: the user's callbacks.

    Returns:
        Graph nodes by the owner's path (or class name, for ``others``) and the attribute's name; only those that
        hold any.
    """
    return {(path, name): size for path, owner in _owners(module, others) for name, size in _sizes(owner)}


def find_retained(
    history: list[dict[tuple[str, str], int]], module: nn.Module, others: Iterable[object], sources: Sources
) -> tuple[Part, ...]:
    """Return what was held with its graph after each of the last two steps or more."""
    owners = dict(_owners(module, others))
    found = []
    for path, name in history[-1] if len(history) > 1 else ():
        before, now = history[-2].get((path, name), 0), history[-1][path, name]
        if before:
            site = sources.change(type(owners[path]), name)
            found.append(Part(name=f"{path or 'self'}.{name}", growing=now > before or now >= LIMIT, site=site))
    return tuple(found)


def _count_nodes(value: Any, depth: int = 0) -> int:
    """Count the nodes of the graphs that ``value`` holds, up to a limit, in itself and in containers within it."""
    if isinstance(value, torch.Tensor):
        return _walk(value.grad_fn) if value.grad_fn is not None else 0
    items = list(value.values()) if isinstance(value, dict) else value
    if depth < 3 and isinstance(items, (list, tuple, set, deque)):
        return sum(_count_nodes(each, depth + 1) for each in list(items)[-LIMIT:])
    return 0


def _walk(root: Any) -> int:
    seen, waiting = {root}, [root]
    while waiting and len(seen) < LIMIT:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def _owners(module: nn.Module, others: Iterable[object]) -> Iterator[tuple[str, object]]:
    for path, each in module.named_modules():
        if not type(each).__module__.startswith("torch."):
            yield path, each
    for other in others:
        yield type(other).__name__, other


def _sizes(owner: object) -> Iterator[tuple[str, int]]:
    own = dict(vars(owner))
    buffers, parameters = own.pop("_buffers", {}), own.pop("_parameters", {})
    for name, value in {**own, **buffers}.items():
        if name == "_modules" or f"{name}_orig" in parameters or f"{name}_g" in parameters:
            continue  # weights made in each forward by old-style weight or spectral norm
        size = _count_nodes(value)
        if size:
            yield name, size
