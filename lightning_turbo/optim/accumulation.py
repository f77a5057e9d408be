"""Gradient accumulation that equals one large batch, for any window length and any batch sizes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_turbo._checks import check_count, expect, is_number

__all__ = [
    "AccumulationWindow",
    "checked_weight",
    "scale_gradients",
]


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of parameters by a factor, in place.

    Each product is rounded once, to the gradient's dtype. The factor is used in that dtype, or in float32 if that is
    half precision.

    Args:
        parameters: Parameters of any shape; those without a gradient are skipped.
        factor: Dimensionless factor, a number or a 0-dimensional tensor, which is not read on the host.

    Raises:
        ValueError: If ``factor`` is neither a tensor nor a finite number.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> scale_gradients([weight], 0.5)
        >>> weight.grad.tolist()
        [0.5, 0.5]
    """
    valid = isinstance(factor, Tensor) or is_number(factor)
    expect(valid, "factor", factor, "a finite number or a tensor, such as window.factor(...)")
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        groups: Any = _group_tensors_by_device_and_dtype([gradients])
        for (device, dtype), ((alike,), _) in groups.items():
            _scale_alike(alike, factor, device, dtype)


def _scale_alike(gradients: list[Tensor], factor: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Multiply gradients of one device and dtype."""
    if dtype in (torch.float16, torch.bfloat16):  # torch would also round the factor to this dtype
        wide = torch.as_tensor(factor, dtype=torch.float32, device=device)
        for gradient in gradients:
            held = gradient._values() if gradient.is_sparse else gradient
            torch.mul(held, wide.expand_as(held), out=held)
    else:  # on CUDA, one kernel for many gradients if dtypes agree
        torch._foreach_mul_(gradients, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)


class AccumulationWindow:
    """Counts what goes into one window of gradient accumulation, and computes how to correct its gradients.

    Each loss is divided by ``N`` before backward, as loops do. A window of ``n`` batches must then be multiplied by ``N
    / n``. With weights ``w``, each loss is multiplied by ``w / reference_weight`` in the backward pass, and the window
    by ``N * reference_weight / sum(w)``, which gives the mean over all samples or tokens.

    Args:
        reference_weight: A typical weight. It keeps the scaled losses in range; batches with this weight are not
            scaled.

    Raises:
        ValueError: If ``reference_weight`` is not a finite number above zero.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> window = AccumulationWindow()
        >>> for batch in (torch.tensor([1.0, 3.0]), torch.tensor([8.0])):
        ...     loss = (weight * batch).mean() / 4
        ...     window.add(loss, weight=len(batch))
        ...     loss.backward()
        >>> scale_gradients([weight], window.factor(divisor=4))
        >>> weight.grad.item()
        4.0
    """

    def __init__(self, reference_weight: float = 1.0) -> None:
        valid = is_number(reference_weight) and reference_weight > 0
        what = "a finite number above 0"
        expect(valid, "reference_weight", reference_weight, f"{what}, a typical weight")
        self.reference_weight = float(reference_weight)
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self.count = 0
        self.total: float | Tensor | None = None

    def add(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Add a batch to the window; call it before backward.

        Args:
            loss: The divided loss, before its backward pass, possibly multiplied by a loss scale.
            weight: Number of samples or tokens behind ``loss``, not negative, for all batches of a window or for none.
                A tensor is not read on the host.

        Raises:
            TypeError: If ``loss`` is not a tensor or ``weight`` not a number.
            ValueError: If ``weight`` is negative, not finite, or a tensor with several elements.
        """
        expect(isinstance(loss, Tensor), "loss", loss, "the tensor that backward is called on", TypeError)
        self.count += 1
        if weight is not None:
            weight = checked_weight(weight)
            self.total = weight if self.total is None else self.total + weight
            _scale_backward(loss, weight / self.reference_weight)

    def factor(self, divisor: int, total: float | Tensor | None = None, ranks: int = 1) -> float | Tensor:
        """Return the factor by which the window's gradients must be multiplied.

        Args:
            divisor: The divisor of every loss, which is the usual length of a window; at least 1.
            total: Sum of the weights over all ranks, as in ``add``; ``None`` uses this rank's own sum.
            ranks: Number of ranks over which gradients are averaged, at least 1.

        Returns:
            The factor: 1.0 for a full window without weights, 0 if all weights are 0, NaN for a NaN tensor.

        Raises:
            TypeError: If ``total`` is not a number, or another argument not an integer.
            ValueError: If a number is out of range, or ``total`` is a tensor with several elements.
        """
        check_count("divisor", divisor)
        check_count("ranks", ranks)
        total = self.total if total is None else checked_weight(total, "total")
        if total is None:
            return divisor / self.count if self.count else 1.0
        # Ranks average their gradients, but the total is a sum over ranks.
        whole = divisor * ranks * self.reference_weight
        # A tensor stays on its device: reading its value would synchronize.
        if isinstance(total, Tensor):
            return torch.where(total == 0, 0.0, whole / total)
        return whole / total if total > 0 else 0.0


def _scale_backward(loss: Tensor, share: float | Tensor) -> None:
    """Multiply the gradient of a loss in the backward pass, unless the factor is 1."""
    # Not the loss itself, which a script may log.
    if loss.requires_grad and (isinstance(share, Tensor) or share != 1.0):
        loss.register_hook(lambda gradient: (gradient * share).to(gradient.dtype))


def checked_weight(weight: Any, name: str = "weight") -> float | Tensor:
    """Return a weight as a Python number or a 0-dimensional tensor, whose value is not read."""
    if isinstance(weight, Tensor):
        shape = tuple(weight.shape)
        expect(weight.numel() == 1, f"shape of {name}", shape, "one number per batch, for example mask.sum()")
        return weight.detach().reshape(()).to(torch.float32 if weight.device.type == "mps" else torch.float64)
    expect(isinstance(weight, numbers.Real), name, weight, "a number or a tensor with one element", TypeError)
    expect(math.isfinite(weight) and weight >= 0, name, weight, "a finite number of 0 or more")
    return float(weight)
