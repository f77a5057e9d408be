"""Gradients that live no longer than needed: released right after the optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_turbo._checks import check_functions

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
        parameters: Whose gradients are released; ``None`` means the optimizer's own, those of groups added later too.
            Give the half-precision weights too where the optimizer holds float32 masters of them.
        leave: Parameters of the optimizer that are left alone.
        unless: Asked after each step; where it says ``True`` the gradients stay.

    Raises:
        TypeError: If ``optimizer`` is no optimizer, or ``unless`` cannot be called.

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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[Tensor] | None = None,
        *,
        leave: Iterable[Tensor] = (),
        unless: Callable[[], bool] | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={optimizer!r}: accepted is a torch.optim.Optimizer. Pass the optimizer itself.")
        check_functions(unless=unless)
        self.optimizer = optimizer
        self.state = ReleaseState.WATCHING
        self._given = parameters is not None
        self._parameters = [] if parameters is None else list(parameters)
        self._leave = {id(parameter) for parameter in leave}
        self._unless = unless
        self._groups = 0
        self._seen: list[tuple[Tensor, TensorWeakRef]] = []
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are released."""
        groups = self.optimizer.param_groups
        if not self._given and len(groups) != self._groups:
            owned = [parameter for group in groups for parameter in group["params"]]
            self._parameters = [parameter for parameter in owned if id(parameter) not in self._leave]
            self._groups = len(groups)
        return self._parameters

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
                # Weakly: what the loop lets go of is not to lie beside the second step's gradients.
                self._seen = [(p, TensorWeakRef(p.grad)) for p in self.parameters if p.grad is not None]
                return
            kept = any(parameter.grad is not None and parameter.grad is seen() for parameter, seen in self._seen)
            self.state, self._seen = (ReleaseState.OFF if kept else ReleaseState.RELEASING), []
        if self.state is ReleaseState.RELEASING and not (self._unless is not None and self._unless()):
            release_gradients(self.parameters)


def release_after_steps(
    optimizers: Iterable[torch.optim.Optimizer], unless: Callable[[], bool] | None = None
) -> list[GradientRelease]:
    """Release the gradients of several optimizers, each after its own step.

    A parameter that belongs to more than one of them is left alone: the others may not have made their step.

    Args:
        optimizers: The optimizers of a run.
        unless: See ``GradientRelease``.

    Returns:
        One release for each; call ``remove`` on them in the end.

    Example:
        >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> releases = release_after_steps([torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers])
        >>> len(releases)
        2
    """
    optimizers = list(optimizers)
    owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    owners = Counter(id(parameter) for parameter in owned)
    shared = [parameter for parameter in owned if owners[id(parameter)] > 1]
    return [GradientRelease(optimizer, leave=shared, unless=unless) for optimizer in optimizers]
