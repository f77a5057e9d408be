"""Biases that a following batch norm cancels: found in the traced graph, removed without a change of numbers."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn.trace import Tracer, same_numbers, traces_of

__all__ = ["BiasReport", "drop_bias_before_norm"]

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
LAYERS = (*CONVOLUTIONS, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True)
class BiasReport:
    """What ``drop_bias_before_norm`` did."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Layer that lost its bias -> the batch norm that cancelled it."""
    kept: dict[str, str] = field(default_factory=dict)
    """Layer directly before a batch norm that kept its bias -> the reason."""
    parameters: int = 0
    """Number of parameters removed."""

    def __str__(self) -> str:
        lines = [f"{len(self.dropped)} biases dropped, {self.parameters} parameters:"]
        lines += [f"  {layer} (before {norm})" for layer, norm in self.dropped.items()]
        lines += [f"  {layer} kept: {reason}" for layer, reason in self.kept.items()]
        return "\n".join(lines)


def drop_bias_before_norm(
    module: nn.Module, example_inputs: Sequence[Any] | dict[str, Any] | None = None, *, within: nn.Module | None = None
) -> BiasReport:
    """Remove the biases of convolutions and linear layers that a following batch norm cancels.

    Batch norm subtracts the mean of the batch, and with it any bias: in training such a bias does nothing but cost
    memory, time and bytes between ranks. The running mean is lowered by the bias, so evaluation gives the same
    numbers. The module is changed in place; call this before the optimizer is made.

    Args:
        module: The network, in training mode. It is traced with ``torch.fx``, as it is and in evaluation mode, with the
            optional arguments of its ``forward`` left out and given, and is left as it was; submodules that cannot be
            traced are taken as they are.
        example_inputs: Positional inputs of ``module``, or a dictionary of named ones, with which linear layers are
            seen to give ``(batch, features)``. Without them, a linear layer is only treated where the graph shows that.
        within: A module that holds ``module``, for example beside an average of it; ``None`` is ``module`` itself.
            Parts of it with the same class and parameters stay alike: if one keeps a bias, so does the other.

    Returns:
        Which biases were dropped and which were kept, and why.

    Raises:
        TypeError: If ``module`` or ``within`` is no module, or ``example_inputs`` no tuple or dictionary.
        ValueError: If the module's own ``forward`` cannot be traced in some mode, or ``within`` does not hold it.

    Warns:
        NoEffectWarning: If there was nothing to drop.

    Note:
        Checkpoints saved with the biases can still be loaded: a bias in them goes into the running mean. What is saved
        without them holds zeros in their place, so that the network as it was written can load it. Where layer or norm
        is replaced or fused later, neither happens. Convolutions are taken to see batches, as batch norm does. With
        weight decay, the biases would have decayed towards 0; without them nothing does, and the training loss is the
        same.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> drop_bias_before_norm(net).dropped
        {'0': '1'}

    Source: Ioffe and Szegedy, Batch Normalization, 2015, section 3.2.
    """
    within = module if within is None else within
    for name, part in (("module", module), ("within", within)):
        if not isinstance(part, nn.Module):
            raise TypeError(f"{name}={part!r}; accepted is a torch.nn.Module. Pass the network.")
    if example_inputs is not None and not isinstance(example_inputs, (tuple, list, dict)):
        raise TypeError(
            f"example_inputs is a {type(example_inputs).__name__}; accepted is a tuple of positional inputs, or "
            "a dictionary of named ones. Pass (batch,)."
        )
    if all(part is not module for part in within.modules()):
        raise ValueError(
            f"within={type(within).__name__} does not hold module={type(module).__name__}. Pass its owner."
        )
    traces = traces_of(module)
    trace = traces[0]
    shapes = _dimensions(module, trace.traced, example_inputs) if example_inputs is not None else {}
    report = BiasReport()
    names = dict(module.named_modules(remove_duplicate=False))
    aliases = Counter(id(part) for part in names.values())
    calls = Counter(id(_called(node, names)) for node in trace.graph.nodes)
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    read = {node.target for each in traces for node in each.graph.nodes if node.op == "get_attr"}
    opaque = list(dict.fromkeys(name for each in traces for name in each.opaque))
    hidden = {id(part) for name in opaque if name in names for part in names[name].modules()}
    cancelled: dict[str, str] = {}
    for node in trace.graph.nodes:
        layer: Any = _called(node, names)
        if type(layer) not in LAYERS or layer.bias is None or (norm_node := _norm_after(node, names)) is None:
            continue
        norm: Any = _called(norm_node, names)
        name, norm_name = str(node.target), str(norm_node.target)
        reason = _not_cancelled(layer, norm) or _read_elsewhere(node, norm_node, trace.held)
        if any(calls[id(part)] > 1 or aliases[id(part)] > 1 or id(part) in hidden for part in (layer, norm)):
            reason = "it or its batch norm is used more than once"
        elif owners[id(layer.bias)] > 1 or f"{name}.bias" in read or any(each.reads_parameters for each in traces):
            reason = "its bias is also used elsewhere"
        elif not reason and (others := [t for t in traces if not _alone_together(layer, norm, t, names)]):
            reason = f"{others[0].way} goes another way"
        if reason := reason or _features_unknown(node, layer, names, shapes):
            report.kept[name] = reason
        else:
            cancelled[name] = norm_name
    report.kept.update(_out_of_step(within, module, cancelled))
    removed = 0
    for name, norm_name in cancelled.items():
        if name not in report.kept:
            removed += _drop(module, name, norm_name)
            report.dropped[name] = norm_name
    if not report.dropped:
        why = "; ".join(f"{layer}: {reason}" for layer, reason in report.kept.items())
        if opaque:
            why += f" What happens in {', '.join(opaque)} cannot be traced: call it on the parts in there, uncompiled."
        warnings.warn(
            f"drop_bias_before_norm found no bias to drop in {type(module).__name__}. "
            f"{why.strip() or 'No convolution or linear layer with a bias stands directly before a batch norm.'}",
            NoEffectWarning,
            stacklevel=2,
        )
    return BiasReport(report.dropped, report.kept, removed)


def _norm_after(node: fx.Node, names: dict[str, nn.Module]) -> fx.Node | None:
    """Return the batch norm that takes the output, through nothing but ``nn.Identity``, if any does."""
    for user in node.users:
        if type(part := _called(user, names)) in NORMS:
            return user
        if type(part) is nn.Identity and "forward" not in vars(part) and (found := _norm_after(user, names)):
            return found
    return None


def _called(node: fx.Node, names: dict[str, nn.Module]) -> nn.Module | None:
    """Return the module that a node calls, if it calls one."""
    return names.get(str(node.target)) if node.op == "call_module" else None


def _alone_together(layer: Any, norm: Any, trace: Tracer, names: dict[str, nn.Module]) -> bool:
    """Tell whether the layer goes only into the norm, and the norm takes nothing else, or neither is called."""
    calls = [node for node in trace.graph.nodes if _called(node, names) in (layer, norm)]
    if len(calls) != 2:
        return not calls
    first, last = calls
    return _norm_after(first, names) is last and not _read_elsewhere(first, last, trace.held)


def _read_elsewhere(node: fx.Node, norm_node: fx.Node, held: set[fx.Node]) -> str | None:
    while node is not norm_node:
        if len(node.users) != 1 or node in held:
            return "its output is also used elsewhere"
        node = next(iter(node.users))
    return None


def _not_cancelled(layer: Any, norm: Any) -> str | None:
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if channels != norm.num_features:
        return "its batch norm runs over another dimension"
    if not norm.training:
        return "its batch norm is in evaluation mode, where nothing is cancelled"
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in (layer, norm)):
        return "a hook looks at what goes through it, or a forward was replaced"
    return None


def _features_unknown(
    node: fx.Node, layer: nn.Module, names: dict[str, nn.Module], shapes: dict[str, int]
) -> str | None:
    """Batch norm runs over dimension 1, which is a linear layer's last one only if there are two."""
    if not isinstance(layer, nn.Linear):
        return None
    if (known := shapes.get(node.name)) is not None:
        return None if known == 2 else f"its output has {known} dimensions"
    return None if _flat(node, names) else "its output may have more than two dimensions; give example_inputs"


def _flat(node: fx.Node, names: dict[str, nn.Module]) -> bool:
    """Tell whether the graph shows that a linear layer's input was flattened to ``(batch, features)``."""
    while node.args and isinstance(source := node.args[0], fx.Node):
        if source.op == "call_module":
            part = _called(source, names)
            if isinstance(part, nn.Flatten):
                return part.start_dim == 1 and part.end_dim == -1
            if not isinstance(part, (nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.GELU, nn.SiLU, nn.Dropout, nn.Identity)):
                return False
        elif source.target in (torch.flatten, "flatten"):
            return (source.args[1:], dict(source.kwargs)) in [((1,), {}), ((), {"start_dim": 1})]
        elif source.op != "call_function" or source.target not in (torch.relu, nn.functional.relu):
            return False
        node = source
    return False


def _dimensions(module: nn.Module, traced: fx.GraphModule, inputs: Any) -> dict[str, int]:
    """Run the graph once and return each output's number of dimensions."""
    found: dict[str, int] = {}
    interpreter = fx.Interpreter(traced)
    named, interpreter.args_iter = (inputs, iter(())) if isinstance(inputs, dict) else ({}, iter(inputs))
    with torch.no_grad(), same_numbers(module, tree_leaves(inputs)):
        # Node by node, because Interpreter.run would start the thread of a progress bar.
        for node in traced.graph.nodes:
            given = node.op == "placeholder" and node.target in named
            interpreter.env[node] = result = named[node.target] if given else interpreter.run_node(node)
            if isinstance(result, torch.Tensor):
                found[node.name] = result.ndim
    return found


def _out_of_step(whole: nn.Module, module: nn.Module, cancelled: dict[str, str]) -> dict[str, str]:
    """Find the layers whose counterpart, in another part of the same make, keeps its bias, and say so.

    A network and an average of it are paired parameter by parameter, which works while both have the same ones.
    """
    where = {part: name for name, part in whole.named_modules()}
    make = {
        name: (type(part), tuple((n, None if is_lazy(p) else p.shape) for n, p in part.named_parameters()))
        for part, name in where.items()
    }
    alike: dict[Any, list[str]] = defaultdict(list)
    for name in make:
        alike[make[name]].append(name)
    names: dict[str, str] = {}
    partners: dict[str, dict[str, str]] = {}  # layer -> its counterparts, and the part that each is in
    for name, norm_name in cancelled.items():
        layer, norm = (where[module.get_submodule(each)] for each in (name, norm_name))
        names[layer], partners[layer] = name, {}
        part = _holder(layer, norm)
        while part:
            partners[layer].update({o + layer[len(part) :]: o for o in alike[make[part]] if o != part})
            part = part.rpartition(".")[0]
    kept: dict[str, str] = {}
    while found := {
        layer: f"its counterpart in {other}, which has the same parameters, keeps its bias"
        for layer in partners.keys() - kept.keys()
        for path, other in partners[layer].items()
        if path not in partners or path in kept
    }:
        kept.update(found)
    return {names[layer]: kept[layer] for layer in names if layer in kept}


def _holder(layer: str, norm: str) -> str:
    """Return the path of the nearest module that holds both."""
    a, b = layer.split("."), norm.split(".")
    shared = 0
    while shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    return ".".join(a[:shared])


@torch.no_grad()
def _drop(module: nn.Module, layer_name: str, norm_name: str) -> int:
    layer: Any = module.get_submodule(layer_name)
    norm: Any = module.get_submodule(norm_name)
    bias, mean = layer.bias, norm.running_mean
    if mean is not None:  # None without running statistics
        mean.copy_(mean.float() - bias.to(mean.device, torch.float32))
    layer.register_parameter("bias", None)
    # This module sees every state in which the two come together.
    path = _holder(layer_name, norm_name)
    inside = layer_name.removeprefix(f"{path}."), norm_name.removeprefix(f"{path}.")
    holder = module.get_submodule(path)
    holder.register_load_state_dict_pre_hook(_OldBias(*inside))
    holder.register_state_dict_post_hook(_ZeroBias(*inside))
    return bias.numel()


@dataclass
class _Dropped:
    """A layer whose bias was dropped and its batch norm, by their paths in the module with the hook."""

    layer: str
    norm: str

    def channels(self, module: nn.Module) -> int | None:
        """Return how many numbers the bias would have, or None where layer or norm were replaced or fused since."""
        try:
            layer, norm = module.get_submodule(self.layer), module.get_submodule(self.norm)
        except AttributeError:
            return None
        if not isinstance(layer, LAYERS) or layer.bias is not None or not hasattr(norm, "running_mean"):
            return None
        return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


class _OldBias(_Dropped):
    """Moves the bias of a state saved with it into the running mean that is loaded with it."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.channels(module) is None:
            return
        bias = state_dict.pop(f"{prefix}{self.layer}.bias", None)
        mean = state_dict.get(f"{prefix}{self.norm}.running_mean")
        if bias is not None and mean is not None:
            shifted = mean.float() - bias.to(mean.device, torch.float32)
            state_dict[f"{prefix}{self.norm}.running_mean"] = shifted.to(mean.dtype)


class _ZeroBias(_Dropped):
    """Puts zeros for the bias into a state, so that the network with the bias can load it: the mean has taken it."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight, channels = state_dict.get(f"{prefix}{self.layer}.weight"), self.channels(module)
        if weight is not None and channels is not None:
            zeros = torch.zeros(channels, dtype=weight.dtype, device=weight.device)
            state_dict.setdefault(f"{prefix}{self.layer}.bias", zeros)
