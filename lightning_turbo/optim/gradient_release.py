"""Gradients that live no longer than needed: released right after the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_turbo._checks import expect

__all__ = ["GradientRelease", "ReleaseState", "release_after_steps", "release_gradients"]


def release_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradient of every parameter to ``None``, so that its memory can be used again.

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
    """Whether a ``GradientRelease`` still watches the first steps, releases at each step, or does nothing any more."""

    WATCHING = "watching"
    RELEASING = "releasing"
    OFF = "off"


class GradientRelease:
    """Release the gradients of an optimizer right after each of its steps.

    A loop that clears gradients just before backward holds them through the next forward pass, where they are of
    no use. The first step is only watched: where the loop does not replace the gradients before its second step, it
    may continue from the old ones on purpose, and nothing is released.

    Args:
        optimizer: The optimizer whose gradients are released, those of groups added later included.
        leave: Parameters of the optimizer that keep their gradients.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer.

    Note:
        The step hook reads and writes references only: no device work, no synchronisation.

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
        """Whether the first step has been seen and the second has not."""
        return bool(self._seen)

    def holding(self) -> bool:
        """Tell whether any gradient is held now."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def remove(self) -> None:
        """Stop following the optimizer."""
        self.state, self._seen = ReleaseState.OFF, []
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.state is ReleaseState.WATCHING:
            self._watch()
        if self.state is ReleaseState.RELEASING:
            release_gradients(self.parameters)

    def _watch(self) -> None:
        """Decide at the second step by whether its gradients are those of the first."""
        if not self._seen:
            # Weak references, so that the first step's gradients are freed when the loop lets go of them.
            self._seen = [(p, TensorWeakRef(p.grad)) for p in self.parameters if p.grad is not None]
            return
        kept = any(_same(parameter.grad, seen()) for parameter, seen in self._seen)
        self.state, self._seen = (ReleaseState.OFF if kept else ReleaseState.RELEASING), []


def _same(gradient: Tensor | None, seen: Tensor | None) -> bool:
    return gradient is not None and gradient is seen


def release_after_steps(optimizers: Iterable[Optimizer]) -> list[GradientRelease]:
    """Release the gradients of several optimizers, each after its own step.

    A parameter that belongs to more than one of them keeps its gradient: the others may not have made their step.

    Args:
        optimizers: The optimizers of a run.

    Returns:
        One release for each; call ``remove`` on them in the end.

    Example:
        >>> import torch
        >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> releases = release_after_steps([torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers])
        >>> len(releases)
        2
    """
    optimizers = list(optimizers)
    owned = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    owners = Counter(map(id, owned))
    shared = [parameter for parameter in owned if owners[id(parameter)] > 1]
    return [GradientRelease(optimizer, leave=shared) for optimizer in optimizers]


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
