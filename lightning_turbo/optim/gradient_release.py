"""Release of gradients right after the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_turbo._checks import expect

__all__ = ["GradientRelease", "ReleaseState", "release_after_steps", "release_gradients"]


def release_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradient of every parameter to ``None``, so that its memory is free.

    Args:
        parameters: Parameters of any shape and device.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> release_gradients([weight])
        >>> weight.grad is None
        True
    """
    for parameter in parameters:
        parameter.grad = None


class ReleaseState(Enum):
    """State of a ``GradientRelease``: it watches the first two steps, releases after each step, or is off."""

    WATCHING = "watching"
    RELEASING = "releasing"
    OFF = "off"


class GradientRelease:
    """Release the gradients of an optimizer right after each of its steps.

    A loop that clears gradients just before backward keeps them in memory during the next forward pass, which does not
    read them. The first step is only watched. If the gradients at the second step are the same tensors, the loop may
    reuse them on purpose, and this object releases nothing.

    Args:
        optimizer: The optimizer. Groups that are added later are included.
        leave: Parameters that keep their gradients.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer.

    Note:
        The step hook only drops references. It starts no device work and does not synchronise.

    Example:
        >>> import torch
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

    def __init__(self, optimizer: Optimizer, *, leave: Iterable[Tensor] = ()) -> None:
        expect(isinstance(optimizer, Optimizer), "optimizer", optimizer, "a torch.optim.Optimizer", TypeError)
        self.optimizer = optimizer
        self.state = ReleaseState.WATCHING
        self._leave = {id(parameter) for parameter in leave}
        self._seen: list[tuple[Tensor, TensorWeakRef]] = []
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are released."""
        return [parameter for parameter in _parameters_of(self.optimizer) if id(parameter) not in self._leave]

    @property
    def watched(self) -> bool:
        """Whether exactly one step was observed."""
        return bool(self._seen)

    def holding(self) -> bool:
        """Return whether any parameter has a gradient now."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def remove(self) -> None:
        """Stop observing the optimizer."""
        self.state, self._seen = ReleaseState.OFF, []
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.state is ReleaseState.WATCHING:
            self._watch()
        if self.state is ReleaseState.RELEASING:
            release_gradients(self.parameters)

    def _watch(self) -> None:
        """Decide at the second step: release unless its gradients are the tensors of the first step."""
        if not self._seen:
            # Weak references, so that the gradients of the first step are freed when the loop drops them.
            self._seen = [(p, TensorWeakRef(p.grad)) for p in self.parameters if p.grad is not None]
            return
        kept = any(_is_same_gradient(parameter, seen()) for parameter, seen in self._seen)
        self.state, self._seen = (ReleaseState.OFF if kept else ReleaseState.RELEASING), []


def release_after_steps(optimizers: Iterable[Optimizer]) -> list[GradientRelease]:
    """Release the gradients of several optimizers, each after its own step.

    A parameter of several optimizers keeps its gradient, because the other optimizers may not have made their step.

    Args:
        optimizers: The optimizers of a run.

    Returns:
        One release for each optimizer. Call ``remove`` on each at the end.

    Example:
        >>> import torch
        >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> releases = release_after_steps([torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers])
        >>> len(releases)
        2
    """
    optimizers = list(optimizers)
    owned = list(chain.from_iterable(map(_parameters_of, optimizers)))
    owners = Counter(map(id, owned))
    shared = [parameter for parameter in owned if owners[id(parameter)] > 1]
    return [GradientRelease(optimizer, leave=shared) for optimizer in optimizers]


def _is_same_gradient(parameter: Tensor, seen: Tensor | None) -> bool:
    return parameter.grad is not None and parameter.grad is seen


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
