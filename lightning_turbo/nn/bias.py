"""Biases that a following batch norm cancels: found in the traced graph, removed without a change of numbers."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_turbo.errors import NoEffectWarning

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
        module: The network, in training mode. It is traced with ``torch.fx``, as it is and in evaluation mode, and is
            left as it was; submodules that cannot be traced are taken as they are.
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
        without them holds zeros in their place, so that the network as it was written can load it. Convolutions are
        taken to see batches, as batch norm does. With weight decay, the biases would have decayed towards 0; without
        them nothing does, and the training loss is the same.

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
    traces = trace, evaluation = _trace(module), _trace(module, evaluate=True)
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
        elif not reason and not _alone_together(layer, norm, evaluation, names):
            reason = "evaluation goes another way"
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


class _Tracer(fx.Tracer):
    """Traces through modules where it can and takes the others as one node."""

    def __init__(self) -> None:
        super().__init__()
        self.traced: fx.GraphModule
        self.opaque: list[str] = []
        self.held: set[fx.Node] = set()  # values that a hook sees or a module stores
        self.reads_parameters = False  # as plain tensors, which the graph does not show

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = len(self.graph.nodes)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:  # whatever a forward that depends on values raises when it is given none
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            name = self.path_of_module(m)
            self.opaque.append(name)
            result = self.create_proxy("call_module", name, args, kwargs)
        if m._forward_hooks or m._forward_pre_hooks:
            self.hold((args, kwargs, result if m._forward_hooks else None))
        return result

    def hold(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, fx.Proxy):
                self.held.add(value.node)
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                self.reads_parameters = True


def _trace(module: nn.Module, *, evaluate: bool = False) -> _Tracer:
    """Trace a module, then put back everything that its forward has changed in it."""
    tracer = _Tracer()
    modes = [(part, part.training) for part in module.modules() if hasattr(part, "training")]  # not if frozen by jit
    held = (each for part in module.modules() for each in (vars(part), *vars(part).values()))
    holders: list[Any] = [each for each in held if isinstance(each, (dict, list))]
    copies = [each.copy() for each in holders]
    known = {id(value): value for value in tree_leaves(holders)}
    with _same_numbers(module):
        try:
            for part, mode in modes:
                part.training = mode and not evaluate  # not by train(), which may do more
            tracer.traced = fx.GraphModule(module, tracer.trace(module))
        except Exception as error:
            raise ValueError(
                f"The forward of {type(module).__name__} cannot be traced{' in evaluation mode' * evaluate}: {error}. "
                "Accepted is a module whose own forward does not branch on values; call drop_bias_before_norm on the "
                "submodule that holds the layers."
            ) from error
        finally:
            tracer.hold([value for value in tree_leaves(holders) if id(value) not in known])
            for holder, copy in zip(holders, copies, strict=True):
                holder.clear()
                (holder.extend if isinstance(holder, list) else holder.update)(copy)
            for part, mode in modes:
                part.training = mode
    return tracer


@contextmanager
def _same_numbers(module: nn.Module, inputs: Sequence[Any] = ()) -> Iterator[None]:
    """Leave the buffers and the random generators as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not (is_lazy(buffer) or buffer.is_meta)]
    tensors = (t for t in (*module.parameters(), *module.buffers(), *inputs) if isinstance(t, torch.Tensor))
    with torch.random.fork_rng(devices={t.device for t in tensors if t.is_cuda}):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


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


def _alone_together(layer: Any, norm: Any, trace: _Tracer, names: dict[str, nn.Module]) -> bool:
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
    with torch.no_grad(), _same_numbers(module, tree_leaves(inputs)):
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
    holder.register_state_dict_post_hook(_ZeroBias(inside[0], bias.numel()))
    return bias.numel()


@dataclass(frozen=True, slots=True)
class _OldBias:
    """Moves the bias of a state saved with it into the running mean that is loaded with it."""

    layer: str
    norm: str

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        bias = state_dict.pop(f"{prefix}{self.layer}.bias", None)
        mean = state_dict.get(f"{prefix}{self.norm}.running_mean")
        if bias is not None and mean is not None:
            shifted = mean.float() - bias.to(mean.device, torch.float32)
            state_dict[f"{prefix}{self.norm}.running_mean"] = shifted.to(mean.dtype)


@dataclass
class _ZeroBias:
    """Puts zeros for the bias into a state, so that the network with the bias can load it: the mean has taken it."""

    layer: str
    size: int

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}{self.layer}.weight")
        if weight is not None:
            zeros = torch.zeros(self.size, dtype=weight.dtype, device=weight.device)
            state_dict.setdefault(f"{prefix}{self.layer}.bias", zeros)
