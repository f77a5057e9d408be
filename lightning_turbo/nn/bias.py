"""Removes biases that a following norm cancels, based on a traced graph."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from lightning_turbo._checks import expect
from lightning_turbo._random import same_random_numbers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["LAYERS", "NORMS", "BiasReport", "drop_bias_before_norm"]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True, slots=True)
class BiasReport:
    """The result of ``drop_bias_before_norm``."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Convolution whose bias was removed -> the norm that cancels it."""
    kept: dict[str, str] = field(default_factory=dict)
    """Convolution directly before a norm that keeps its bias -> the reason."""
    parameters: int = 0
    """Number of parameters removed."""

    def __str__(self) -> str:
        lines = [f"{len(self.dropped)} biases dropped, {self.parameters} parameters:"]
        lines += [f"  {layer} (before {norm})" for layer, norm in self.dropped.items()]
        lines += [f"  {layer} kept: {reason}" for layer, reason in self.kept.items()]
        return "\n".join(lines)


def drop_bias_before_norm(module: nn.Module) -> BiasReport:
    """Remove the bias of each convolution directly before a batch or instance norm that cancels it.

    The norm subtracts the mean of each channel, and with it any bias. In training such a bias only costs memory, time
    and communication. This function subtracts the bias from the norm's running mean, so that evaluation gives the same
    results. It changes the module in place: call it before creating the optimizer.

    Args:
        module: The network, in training mode. ``torch.fx`` traces a copy that shares its parameters, with the optional
            arguments of ``forward`` at their defaults. Submodules that cannot be traced keep their biases.

    Returns:
        The removed biases, and the biases that are kept with the reasons.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the ``forward`` of ``module`` itself cannot be traced.

    Warns:
        NoEffectWarning: If there is no bias to remove.

    Note:
        Training losses are the same up to rounding, and with plain SGD so is evaluation. With weight decay or Adam,
        evaluation after training differs, because these move the useless bias and the running mean follows with a lag.

        A copy of the network, such as a momentum encoder, is not changed: call this before making the copy.

        Load a checkpoint that contains the biases before this call: the running means absorb them. Loading it
        afterwards is an error. Checkpoints of the changed network contain zeros for the biases, so that both the
        original and the changed network can load them.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> drop_bias_before_norm(net).dropped
        {'0': '1'}

    Source: Ioffe and Szegedy, Batch Normalization, 2015, section 3.2.
    """
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)
    # Trace the whole network before removing the first bias, so that an error leaves the network unchanged.
    tracer = _trace(module)
    dropped, kept = _find_pairs(module, tracer)
    if not dropped:
        _warn_of_no_effect(module, kept, tracer.opaque)
    return BiasReport(dropped, kept, sum(_drop(module, layer, norm) for layer, norm in dropped.items()))


class _Tracer(fx.Tracer):
    """Trace into every module that can be traced, and record each other module as one node."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: list[str] = []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # a forward that reads values can raise any exception
            # Remove what was recorded inside the module before it failed; one node stands for the module instead.
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            self.opaque.append(self.path_of_module(m))
            return self.create_proxy("call_module", self.opaque[-1], args, kwargs)


def _trace(module: nn.Module) -> _Tracer:
    """Trace a copy that shares the parameters, because tracing has the side effects of ``forward``."""
    tracer = _Tracer()
    try:
        with same_random_numbers():
            twin = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
            parameters = inspect.signature(twin.forward).parameters.values()
            # A proxy for an optional argument would take branches that no caller takes.
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            tracer.graph = tracer.trace(twin, concrete_args=defaults)
    except Exception as error:
        raise ValueError(
            f"module: expected a forward that torch.fx can trace, got that of {type(module).__name__}: {error}. Pass "
            "the submodule with the layers, whose forward does not branch on values."
        ) from error
    return tracer


def _find_pairs(module: nn.Module, tracer: _Tracer) -> tuple[dict[str, str], dict[str, str]]:
    """Return convolution -> norm that cancels its bias, and convolution -> reason to keep its bias."""
    shared = _shared_parts(module, tracer)
    read = {str(node.target) for node in tracer.graph.nodes if node.op == "get_attr"}
    pairs, kept = {}, {}
    for node in filter(partial(_has_bias, module), tracer.graph.nodes):
        norm = _find_norm(module, node)
        if norm is None:
            continue
        reason = _reason_to_keep(module, node, norm, shared, read)
        if reason is None:
            pairs[str(node.target)] = str(norm.target)
        else:
            kept[str(node.target)] = reason
    return pairs, kept


def _find_norm(module: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the call of the first norm that uses the output of a node."""
    return next((user for user in node.users if type(_called_module(module, user)) in NORMS), None)


def _has_bias(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a node calls a convolution with a bias."""
    layer: Any = _called_module(module, node)
    return type(layer) in LAYERS and layer.bias is not None


def _called_module(module: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, or None for any other operation."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _reason_to_keep(
    module: nn.Module, node: fx.Node, norm_node: fx.Node, shared: set[int], read: set[str]
) -> str | None:
    """Return the reason why the norm may not cancel the bias of the convolution, or None if it does."""
    layer: Any = _called_module(module, node)
    norm: Any = _called_module(module, norm_node)
    if len(node.users) != 1:
        return "its output is also used elsewhere"
    if not shared.isdisjoint((id(layer), id(norm))):
        return "it or its norm is used more than once"
    if f"{node.target}.bias" in read or id(layer.bias) in shared:
        return "its bias is also used elsewhere"
    if not norm.training and norm.running_mean is not None:
        return "its norm is in evaluation mode, where it cancels nothing"
    if _is_hooked(layer) or _is_hooked(norm):
        return "it or its norm has a hook, or another forward"
    return None


def _shared_parts(module: nn.Module, tracer: _Tracer) -> set[int]:
    """Return ids of modules and biases with two owners, and of modules called twice or by an untraced module."""
    # Including all names of a module that has several, because fx may use any of them.
    names = dict(module.named_modules(remove_duplicate=False))
    biases = [getattr(part, "bias", None) for part in module.modules()]
    calls = [names.get(str(node.target)) for node in tracer.graph.nodes]
    shared = _repeated([*names.values()]) | _repeated(biases) | _repeated(calls)
    for name in tracer.opaque:
        shared.update(map(id, names[name].modules()))
    return shared - {id(None)}


def _repeated(parts: Sequence[object]) -> set[int]:
    return {key for key, times in Counter(map(id, parts)).items() if times > 1}


def _is_hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))


@torch.no_grad()
def _drop(module: nn.Module, layer_name: str, norm_name: str) -> int:
    layer: Any = module.get_submodule(layer_name)
    norm: Any = module.get_submodule(norm_name)
    bias = layer.bias
    mean = norm.running_mean
    if mean is not None:
        # Evaluation subtracts the running mean, which included the bias in every activation.
        mean.copy_(mean.float() - bias.to(mean.device, torch.float32))
    # With hooks instead of a new class, the layer keeps its type, which other code checks, and copies keep the hooks.
    layer.register_parameter("bias", None)
    layer.register_state_dict_post_hook(_write_zeros)
    layer.register_load_state_dict_pre_hook(_take_zeros)
    return bias.numel()


def _take_zeros(
    layer: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any,
    errors: list[str],
) -> None:  # fmt: skip
    """Accept the zeros written by ``_write_zeros``, and reject the biases of a network that still has them."""
    if layer.bias is not None:  # from another layer that was fused with the norm
        return
    bias = state.pop(f"{prefix}bias", None)
    if bias is not None and bias.any():
        errors.append(
            f"{prefix}bias: expected zeros, because the network no longer has this bias, got other values. Load the "
            "checkpoint before drop_bias_before_norm, which moves its biases into the running means."
        )


def _write_zeros(layer: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Write zeros for the bias into a state, so that the original network can load it."""
    weight = state.get(f"{prefix}weight")
    if weight is not None:
        state.setdefault(f"{prefix}bias", weight.new_zeros(layer.out_channels))


def _warn_of_no_effect(module: nn.Module, kept: dict[str, str], opaque: list[str]) -> None:
    why = [f"{layer}: {reason}" for layer, reason in kept.items()]
    why += [f"{name} cannot be traced: pass its submodules, not compiled" for name in opaque]
    why = why or ["no convolution with a bias is directly followed by a batch or instance norm"]
    warnings.warn(
        f"drop_bias_before_norm found no bias to drop in {type(module).__name__}: {'; '.join(why)}.",
        NoEffectWarning,
        stacklevel=3,
    )
