"""LARS and LAMB: optimizers for large batches that scale each layer's step by the norm of its weights."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_turbo._checks import expect
from lightning_turbo._optional import require

__all__ = ["lamb", "lars", "split_parameters"]

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # the first: batch and instance norm


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into weights, and biases and norms.

    Weight decay and trust ratio apply to weights only. The second list has the biases, the parameters of normalization
    layers, and every other parameter of fewer than two dimensions. A shared parameter appears once.

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
            # A norm over several axes has parameters of as many dimensions, and some biases have them to broadcast.
            is_weight = parameter.ndim >= 2 and name.rpartition(".")[2] != "bias" and id(parameter) not in in_norms
            split[0 if is_weight else 1].append(parameter)
    return split


def _parameters_of_norms(module: nn.Module) -> set[int]:
    norms = (part for part in module.modules() if isinstance(part, NORMS))
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


def lars(module: nn.Module, lr: float, *, weight_decay: float = 1e-4, **settings: Any) -> Optimizer:
    """Build LARS: SGD with momentum that scales each layer's step by the norm of its weights.

    A weight ``w`` with gradient ``g`` moves along ``trust_coefficient * |w| / (|g| + weight_decay * |w|)`` times
    ``g + weight_decay * w``. Biases and normalization layers get plain SGD, without weight decay and trust ratio.

    Args:
        module: Module with the parameters to optimize.
        lr: Learning rate, above 0.
        weight_decay: Weight decay of the weights, at least 0.
        **settings: Arguments of ``pytorch_optimizer.LARS``, such as ``momentum`` (0.9), ``trust_coefficient`` (1e-3)
            and ``nesterov`` (``False``).

    Returns:
        ``pytorch_optimizer.LARS`` with one group of weights and one of biases and norms.

    Raises:
        MissingExtraError: If the package pytorch_optimizer is absent.
        TypeError: If ``module`` is not a module.
        ValueError: If a number is out of range, the module has no trainable parameter, or a normalization layer has
            parameters of two or more dimensions, because the package would apply the trust ratio to them.

    Note:
        The step overwrites the gradients: read them before it.

    Example:
        >>> optimizer = lars(nn.Linear(4, 2), lr=1.0)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.0001, 0.0]

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.
    """
    groups = _make_groups(module, "lars", weight_decay)
    if thick := [tuple(p.shape) for p in split_parameters(module)[1] if p.ndim > 1]:
        raise ValueError(
            f"lars: expected biases and normalization layers with parameters of one dimension, got the shapes {thick}. "
            "Use lamb, or normalization without elementwise weights."
        )
    from pytorch_optimizer import LARS

    return LARS(groups, lr=lr, weight_decay=weight_decay, **settings)


def lamb(module: nn.Module, lr: float, *, weight_decay: float = 0.01, **settings: Any) -> Optimizer:
    """Build LAMB: Adam that scales each layer's step by the norm of its weights.

    With Adam's step ``u = m / (sqrt(v) + eps) + weight_decay * w``, a weight moves by ``lr * |w| / |u| * u``. Biases
    and normalization layers move by ``lr * u``, without weight decay and trust ratio.

    Args:
        module: Module with the parameters to optimize.
        lr: Learning rate, above 0.
        weight_decay: Weight decay of the weights, at least 0.
        **settings: Arguments of ``pytorch_optimizer.Lamb``, such as ``betas`` ((0.9, 0.999)) and ``eps`` (1e-6);
            ``pre_norm=True, max_grad_norm=1.0`` clips the gradients, for loops that do not.

    Returns:
        ``pytorch_optimizer.Lamb`` with one group of weights and one of biases and norms.

    Raises:
        MissingExtraError: If the package pytorch_optimizer is absent.
        TypeError: If ``module`` is not a module.
        ValueError: If a number is out of range, or the module has no trainable parameter.

    Example:
        >>> optimizer = lamb(nn.Linear(4, 2), lr=0.01)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.01, 0.0]

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020.
    """
    groups = _make_groups(module, "lamb", weight_decay)
    from pytorch_optimizer import Lamb

    # As in the paper, the trust ratio scales the decay too; without a correction, the first steps would be too long.
    paper = {"weight_decouple": False, "adam_debias": True}
    optimizer = Lamb(groups, lr=lr, weight_decay=weight_decay, **{**paper, **settings})
    optimizer.clamp = math.inf  # as in the authors' code: no limit of 10 on the norm of the weights
    return optimizer


def _make_groups(module: nn.Module, used_by: str, weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of weights and one of biases and norms, for an optimizer of pytorch_optimizer."""
    require("pytorch_optimizer", used_by)
    weights, rest = split_parameters(module)
    if not weights and not rest:
        raise ValueError(
            f"{used_by}: expected a module with trainable parameters, got {type(module).__name__} without. Set "
            "requires_grad=True on some."
        )
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    if used_by == "lamb":
        groups[0]["adam"], groups[1]["adam"] = False, True  # Adam: without a trust ratio
    return [group for group in groups if group["params"]]
