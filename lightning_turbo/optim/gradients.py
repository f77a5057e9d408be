"""Gradients that live no longer than needed: released right after the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientRelease", "ReleaseState", "release_after_steps", "release_gradients"]


def release_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradient of every parameter to ``None``, so that its memory can be used again.

    Args:
        parameters: Parameters of any shape and device; those without a gradient are passed over.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> release_gradients([weight])
        >>> weight.grad is None
        True
    """
    for parameter in parameters:
        parameter.grad = None


class ReleaseState(Enum):
    """What a ``GradientRelease`` does at a step."""

    WATCHING = "watching"
    RELEASING = "releasing"
    OFF = "off"


class GradientRelease:
    """Release the gradients of an optimizer right after each of its steps.

    A loop that clears gradients just before backward holds them through the next forward pass, where they are of
    no use. The first step is only watched: where the loop does not replace the gradients before its second step, it
    may go on from the old ones on purpose, and nothing is released.

    Args:
        optimizer: The optimizer whose steps are followed.
        parameters: Whose gradients are released; ``None`` means the optimizer's own. Give the half-precision weights
            too where the optimizer holds float32 masters of them.

    Raises:
        TypeError: If ``optimizer`` is no optimizer.

    Note:
        The step hook reads and writes references only: no device work, no synchronisation.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> release = GradientRelease(optimizer)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> weight.grad is None
        True
        >>> release.remove()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={optimizer!r}: accepted is a torch.optim.Optimizer. Pass the optimizer itself.")
        self.optimizer = optimizer
        self.state = ReleaseState.WATCHING
        self._parameters = None if parameters is None else list(parameters)
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are released."""
        if self._parameters is not None:
            return self._parameters
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def watched(self) -> bool:
        """Whether the first step has been seen and the second has not."""
        return bool(self._seen)

    def holding(self) -> bool:
        """Tell whether any gradient is held now."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def remove(self) -> None:
        """Stop following the optimizer."""
        self.state, self._seen = ReleaseState.OFF, []
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.state is ReleaseState.WATCHING:
            if not self._seen:
                self._seen = [(p, p.grad) for p in self.parameters if p.grad is not None]
                return
            kept = any(parameter.grad is gradient for parameter, gradient in self._seen)
            self.state, self._seen = (ReleaseState.OFF if kept else ReleaseState.RELEASING), []
        if self.state is ReleaseState.RELEASING:
            release_gradients(self.parameters)


def release_after_steps(optimizers: Iterable[torch.optim.Optimizer]) -> list[GradientRelease]:
    """Release the gradients of several optimizers, each after its own step.

    A parameter that belongs to more than one of them is left alone: the others may not have made their step.

    Args:
        optimizers: The optimizers of a run.

    Returns:
        One release for each; call ``remove`` on them in the end.

    Example:
        >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> releases = release_after_steps([torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers])
        >>> len(releases)
        2
    """
    optimizers = list(optimizers)
    owned = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    owners = Counter(id(parameter) for parameters in owned for parameter in parameters)
    return [
        GradientRelease(optimizer, [parameter for parameter in parameters if owners[id(parameter)] == 1])
        for optimizer, parameters in zip(optimizers, owned, strict=True)
    ]
