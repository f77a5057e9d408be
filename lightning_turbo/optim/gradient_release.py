"""Release of gradients right after the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_turbo._checks import expect

__all__ = ["GradientRelease", "release_after_steps"]


class GradientRelease:
    """Release the gradients of an optimizer right after each of its steps.

    A loop that clears gradients just before backward keeps them in memory during the next forward pass, which does not
    read them. The first step is only watched. If the gradients at the second step are the same tensors, the loop may
    reuse them on purpose, and this object releases nothing.

    Args:
        optimizer: The optimizer. Groups that are added later are included.
        leave: Parameters that keep their gradients.

    Attributes:
        releases: Whether gradients are released; ``None`` before the second step.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer.

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
        self.releases: bool | None = None
        self._leave = {id(parameter) for parameter in leave}
        self._seen: list[tuple[Tensor, TensorWeakRef]] | None = None  # in the first step
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def why_idle(self) -> str:
        """Return why releasing has no effect, or an empty text; for the time between two steps."""
        if self.releases is False:
            return "the training loop keeps the same gradients from one step to the next"
        if self.releases is None and self._seen is not None and not self._is_holding():
            return "the training loop clears the gradients before the next batch"
        return ""

    def _is_holding(self) -> bool:
        return any(parameter.grad is not None for parameter in self._find_parameters())

    def remove(self) -> None:
        """Stop observing the optimizer."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = self._find_parameters()
        if self.releases is None:
            self.releases = self._decide(parameters)
        if self.releases:
            for parameter in parameters:
                parameter.grad = None

    def _find_parameters(self) -> list[Tensor]:
        return [parameter for parameter in _parameters_of(self.optimizer) if id(parameter) not in self._leave]

    def _decide(self, parameters: list[Tensor]) -> bool | None:
        """Return whether the loop let go of the gradients since the last step; ``None`` at the first."""
        if self._seen is not None:
            return not any(_is_same_gradient(parameter, seen()) for parameter, seen in self._seen)
        # Weak references, so that the gradients of the first step are freed when the loop drops them.
        self._seen = [(p, TensorWeakRef(p.grad)) for p in parameters if p.grad is not None]
        return None


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
