"""LARS and LAMB: optimizers for large batches that scale each layer's step by the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_turbo._checks import expect, is_number
from lightning_turbo._optional import require

__all__ = ["lamb", "lars", "split_parameters"]

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase covers batch and instance norm


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into weights on the one hand, and biases and norms on the other.

    Weight decay and trust ratio only apply to weights. The second list contains the biases, the parameters of
    normalization layers, and every other parameter with fewer than two dimensions. A shared parameter appears once.

    Args:
        module: Any module.

    Returns:
        The list of weights, and the list of biases and norms.

    Raises:
        TypeError: If ``module`` is not a module.

    Example:
        >>> weights, rest = split_parameters(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
        >>> len(weights), len(rest)
        (1, 3)
    """
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)
    in_norms = _parameters_of_norms(module)
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # Norms over several axes have multi-dimensional parameters, and some biases have extra axes for
            # broadcasting.
            is_weight = parameter.ndim >= 2 and name.rpartition(".")[2] != "bias" and id(parameter) not in in_norms
            split[0 if is_weight else 1].append(parameter)
    return split


def _parameters_of_norms(module: nn.Module) -> set[int]:
    norms = (part for part in module.modules() if isinstance(part, NORMS))
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


def lars(module: nn.Module, lr: float, *, weight_decay: float = 1e-4, **settings: Any) -> Optimizer:
    """Build LARS: SGD with momentum that scales each layer's step by the norm of its weights.

    A weight ``w`` with gradient ``g`` moves along ``trust_coefficient * |w| / (|g| + weight_decay * |w|)`` times ``g +
    weight_decay * w``. Biases and normalization layers use plain SGD, without weight decay and trust ratio.

    Args:
        module: Module with the parameters to optimize.
        lr: Learning rate, above 0.
        weight_decay: Weight decay of the weights, at least 0.
        **settings: Arguments of ``pytorch_optimizer.LARS``, such as ``momentum`` (0.9), ``trust_coefficient`` (1e-3)
            and ``nesterov`` (``False``).

    Returns:
        ``pytorch_optimizer.LARS`` with a group of weights and a group of biases and norms.

    Raises:
        MissingExtraError: If the package pytorch_optimizer is not installed.
        TypeError: If ``module`` is not a module.
        ValueError: If a number is out of range, the module has no trainable parameters, or a normalization layer has
            parameters with two or more dimensions, because the package would apply the trust ratio to them.

    Note:
        The step overwrites the gradients: read them first.

    Example:
        >>> optimizer = lars(nn.Linear(4, 2), lr=1.0)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.0001, 0.0]

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.
    """
    require("pytorch_optimizer", "lars")
    groups = [group for group in _make_groups(module, "lars", weight_decay) if group["params"]]
    if thick := [tuple(p.shape) for p in split_parameters(module)[1] if p.ndim > 1]:
        raise ValueError(
            f"lars: expected biases and normalization layers with one-dimensional parameters, got shapes {thick}. "
            "Use lamb, or normalization without elementwise weights."
        )
    from pytorch_optimizer import LARS

    return LARS(groups, lr=lr, weight_decay=weight_decay, **settings)


def lamb(
    module: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    max_grad_norm: float | None = None,
) -> Optimizer:
    """Build LAMB: Adam that scales each layer's step by the norm of its weights.

    With Adam's step ``u = m / (sqrt(v) + eps) + weight_decay * w``, whose moments are bias-corrected, a weight moves by
    ``lr * |w| / |u| * u``. Biases and normalization layers move by ``lr * u``, without weight decay and trust ratio.

    Args:
        module: Module with the parameters to optimize.
        lr: Learning rate, above 0.
        weight_decay: Weight decay of the weights, at least 0.
        betas: Decay rates of the averages of gradients and of their squares, each at least 0 and below 1.
        eps: Added to the square root of the second average, above 0.
        max_grad_norm: Clips the norm of all gradients, for loops that do not clip; ``None`` disables it.

    Returns:
        An optimizer with a group of weights and a group of biases and norms.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If a number is out of range, or the module has no trainable parameters.

    Example:
        >>> optimizer = lamb(nn.Linear(4, 2), lr=0.01)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.01, 0.0]

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020, Algorithm 2.
    """
    expect(is_number(lr) and lr > 0, "lr", lr, "a number above 0")
    expect(is_number(weight_decay) and weight_decay >= 0, "weight_decay", weight_decay, "a number of 0 or more")
    expect(all(is_number(beta) and 0 <= beta < 1 for beta in betas), "betas", betas, "two numbers in [0, 1)")
    expect(is_number(eps) and eps > 0, "eps", eps, "a number above 0")
    clips = max_grad_norm is not None
    expect(not clips or max_grad_norm > 0, "max_grad_norm", max_grad_norm, "a number above 0, or None")
    weights, rest = _make_groups(module, "lamb", weight_decay)
    settings = {"lr": lr, "betas": betas, "eps": eps, "trust_ratio": True, "weight_decay": weight_decay}
    groups = [{**weights, "trust_ratio": True}, {**rest, "trust_ratio": False}]
    return _Lamb([group for group in groups if group["params"]], settings, max_grad_norm)


class _Lamb(Optimizer):
    """LAMB with the state of Adam for each parameter: ``step``, ``exp_avg`` and ``exp_avg_sq``."""

    def __init__(self, groups: list[dict[str, Any]], settings: dict[str, Any], max_grad_norm: float | None) -> None:
        super().__init__(groups, settings)
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step and return the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = self._clip_factor()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                grads = [param.grad for param in params]
                self._step_group(group, params, grads if factor is None else [grad * factor for grad in grads])
        return loss

    def _clip_factor(self) -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self.state[param] for param in params]
        for state, param in zip(states, params, strict=True):
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
        first, second = group["betas"]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(averages, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - second)
        # Both averages start at zero; without the bias correction, a step could be up to 6 times as large as Adam's.
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - second ** state["step"]) for state in states])
        torch._foreach_add_(roots, group["eps"])
        updates = [*torch._foreach_div(averages, [1 - first ** state["step"] for state in states])]
        torch._foreach_div_(updates, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["trust_ratio"]:
            torch._foreach_mul_(updates, _trust_ratios(params, updates))
        torch._foreach_add_(params, updates, alpha=-group["lr"])


def _trust_ratios(params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """Return the ratio of each weight's norm to its update's, or 1 if either is zero."""
    norms = zip(torch._foreach_norm(params), torch._foreach_norm(updates), strict=True)
    return [torch.where((weight > 0) & (update > 0), weight / update, 1.0) for weight, update in norms]


def _make_groups(module: nn.Module, used_by: str, weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of weights and a group of biases and norms; either may be empty."""
    weights, rest = split_parameters(module)
    if not weights and not rest:
        raise ValueError(
            f"{used_by}: expected a module with trainable parameters, got {type(module).__name__} without any. Set "
            "requires_grad=True on some."
        )
    return [{"params": weights, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
