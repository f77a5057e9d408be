"""Biases that a following norm cancels: found in the traced graph and removed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from lightning_turbo._checks import expect
from lightning_turbo._random import same_random_numbers
from lightning_turbo.errors import NoEffectWarning

__all__ = ["BiasReport", "drop_bias_before_norm"]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True, slots=True)
class BiasReport:
    """The result of ``drop_bias_before_norm``."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Convolution that lost its bias -> the norm that cancelled it."""
    kept: dict[str, str] = field(default_factory=dict)
    """Convolution directly before a norm that kept its bias -> the reason."""
    parameters: int = 0
    """Number of parameters removed."""

    def __str__(self) -> str:
        lines = [f"{len(self.dropped)} biases dropped, {self.parameters} parameters:"]
        lines += [f"  {layer} (before {norm})" for layer, norm in self.dropped.items()]
        lines += [f"  {layer} kept: {reason}" for layer, reason in self.kept.items()]
        return "\n".join(lines)


def drop_bias_before_norm(module: nn.Module, *, within: nn.Module | None = None) -> BiasReport:
    """Remove the biases of convolutions that a batch or instance norm directly behind them cancels.

    Such a norm subtracts the mean of each channel, and with it any bias: in training the bias does nothing but cost
    memory, time and bytes between ranks. A running mean is lowered by the bias, so that evaluation gives the same
    numbers. The module is changed in place; call this before the optimizer is made.

    Args:
        module: The network, in training mode. A copy that shares its parameters is traced with ``torch.fx``, with
            optional arguments of ``forward`` at their defaults; submodules that cannot be traced keep their biases.
        within: A module that holds ``module``, for example beside an average of it; ``None`` is ``module`` itself.
            Parts of it with the same class and parameters stay alike: if one keeps a bias, so do the others.

    Returns:
        The biases that were dropped, and those that were kept, with the reason.

    Raises:
        TypeError: If ``module`` or ``within`` is not a module.
        ValueError: If the module's own ``forward`` cannot be traced, or ``within`` does not hold it.

    Warns:
        NoEffectWarning: If there was nothing to drop.

    Note:
        Training losses are the same to rounding, and so is evaluation with plain SGD. With weight decay or Adam,
        evaluation after training differs: these move the useless bias, which the running mean follows late.

        Checkpoints with the biases can be loaded: a running mean takes them over. A checkpoint without them holds
        zeros in their place, so that the network as it was written can load it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> drop_bias_before_norm(net).dropped
        {'0': '1'}

    Source: Ioffe and Szegedy, Batch Normalization, 2015, section 3.2.
    """
    within = module if within is None else within
    _check_modules(module, within)
    tracer = _trace(module)
    pairs, kept = _sort(module, tracer)
    kept |= _unlike_their_copies(within, module, pairs)
    dropped = {layer: norm for layer, norm in pairs.items() if layer not in kept}
    if not dropped:
        _warn_of_no_effect(module, kept, tracer.opaque)
    return BiasReport(dropped, kept, sum(_drop(module, layer, norm) for layer, norm in dropped.items()))


def _check_modules(module: Any, within: Any) -> None:
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)
    expect(isinstance(within, nn.Module), "within", within, "a torch.nn.Module", TypeError)
    holds = any(part is module for part in within.modules())
    expect(holds, "within", type(within).__name__, f"a module that holds module={type(module).__name__}")


class _Tracer(fx.Tracer):
    """Traces through modules where it can and takes the others as one node."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: list[str] = []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # any error that a forward raises which needs values
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            self.opaque.append(self.path_of_module(m))
            return self.create_proxy("call_module", self.opaque[-1], args, kwargs)


def _trace(module: nn.Module) -> _Tracer:
    """Trace a copy that shares the parameters, because tracing runs what ``forward`` stores and draws."""
    tracer = _Tracer()
    try:
        with same_random_numbers():
            twin = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
            parameters = inspect.signature(twin.forward).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            tracer.graph = tracer.trace(twin, concrete_args=defaults)
    except Exception as error:
        raise ValueError(
            f"The forward of {type(module).__name__} cannot be traced: {error}. Call drop_bias_before_norm on the "
            "submodule that holds the layers, whose own forward does not branch on values."
        ) from error
    return tracer


def _sort(module: nn.Module, tracer: _Tracer) -> tuple[dict[str, str], dict[str, str]]:
    """Return the convolutions with the norm that cancels their bias, and those that keep it with the reason."""
    shared = _shared_parts(module, tracer)
    read = {str(node.target) for node in tracer.graph.nodes if node.op == "get_attr"}
    pairs, kept = {}, {}
    for node, norm_node in _adjacent(module, tracer.graph):
        layer, norm = str(node.target), str(norm_node.target)
        reason = _reason_to_keep(module.get_submodule(layer), module.get_submodule(norm), shared)
        if len(node.users) != 1:
            reason = "its output is also used elsewhere"
        if f"{layer}.bias" in read:
            reason = "its bias is also used elsewhere"
        if reason is None:
            pairs[layer] = norm
        else:
            kept[layer] = reason
    return pairs, kept


def _adjacent(module: nn.Module, graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the calls of each convolution with a bias and of a norm that takes its output."""
    for node in graph.nodes:
        norms = [user for user in node.users if type(_called(module, user)) in NORMS]
        if norms and _has_bias(_called(module, node)):
            yield node, norms[0]


def _has_bias(layer: Any) -> bool:
    return type(layer) in LAYERS and layer.bias is not None


def _called(module: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, if it calls one."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _reason_to_keep(layer: Any, norm: Any, shared: set[int]) -> str | None:
    """Return why a norm does not cancel the bias of a convolution before it for certain, or None."""
    reasons = {
        "it or its norm is used more than once": not shared.isdisjoint((id(layer), id(norm))),
        "its bias is also used elsewhere": id(layer.bias) in shared,
        "its norm has another number of channels": layer.out_channels != norm.num_features,
        "its norm is in evaluation mode, where nothing is cancelled": _uses_running_mean(norm),
        "it or its norm has a hook, or another forward": _is_hooked(layer) or _is_hooked(norm),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _shared_parts(module: nn.Module, tracer: _Tracer) -> set[int]:
    """Return the ids of modules and biases with two owners, and of modules called twice or where no trace leads."""
    names = dict(module.named_modules(remove_duplicate=False))
    biases = [getattr(part, "bias", None) for part in module.modules()]
    calls = [names.get(str(node.target)) for node in tracer.graph.nodes]
    shared = _repeated([*names.values()]) | _repeated(biases) | _repeated(calls)
    for name in tracer.opaque:
        shared.update(map(id, names[name].modules()))
    return shared - {id(None)}


def _repeated(parts: Sequence[object]) -> set[int]:
    return {key for key, times in Counter(map(id, parts)).items() if times > 1}


def _uses_running_mean(norm: Any) -> bool:
    return not norm.training and norm.running_mean is not None


def _is_hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))


def _unlike_their_copies(within: nn.Module, module: nn.Module, pairs: dict[str, str]) -> dict[str, str]:
    """Return the layers that keep their bias because a copy of the part that they are in keeps it.

    A network and an average of it are paired parameter by parameter, which works while both have the same ones.
    """
    parts = {_dotted(name): part for name, part in within.named_modules()}
    prefix = next(path for path, part in parts.items() if part is module)
    losing = {prefix + layer for layer in pairs}
    kept = {}
    for layer, norm in pairs.items():
        holder = _holder(layer, norm)
        inside = layer.removeprefix(holder)
        unlike = [path for path in _copies(parts, prefix + holder) if path + inside not in losing]
        if unlike:
            kept[layer] = f"its copy in {unlike[0].rstrip('.')}, which has the same parameters, keeps its bias"
    return kept


def _copies(parts: dict[str, nn.Module], path: str) -> list[str]:
    make = _make(parts[path])
    return [other for other, part in parts.items() if _make(part) == make]


def _make(part: nn.Module) -> list[Any]:
    return [type(part), *((name, None if is_lazy(p) else p.shape) for name, p in part.named_parameters())]


def _dotted(name: str) -> str:
    return f"{name}." if name else ""


def _holder(layer: str, norm: str) -> str:
    """Return the path of the nearest module that holds both, with a dot at its end unless it is the root."""
    above = zip(layer.split(".")[:-1], norm.split(".")[:-1], strict=False)
    shared = takewhile(lambda names: names[0] == names[1], above)
    return "".join(f"{name}." for name, _ in shared)


@torch.no_grad()
def _drop(module: nn.Module, layer_name: str, norm_name: str) -> int:
    layer: Any = module.get_submodule(layer_name)
    norm: Any = module.get_submodule(norm_name)
    bias, mean = layer.bias, norm.running_mean
    if mean is not None:
        mean.copy_(mean.float() - bias.to(mean.device, torch.float32))
    layer.register_parameter("bias", None)
    # This module sees every state in which the two come together.
    path = _holder(layer_name, norm_name)
    holder = module.get_submodule(path.rstrip("."))
    paths = layer_name.removeprefix(path), norm_name.removeprefix(path)
    holder.register_load_state_dict_pre_hook(_TakeBias(*paths))
    holder.register_state_dict_post_hook(_WriteZeros(*paths))
    return bias.numel()


@dataclass
class _Dropped:
    """A layer whose bias was dropped and its norm, by their paths in the module with the hook."""

    layer: str
    norm: str

    def still_dropped(self, module: nn.Module) -> bool:
        """Tell whether both are there and without a bias: either may have been replaced, or the two fused."""
        names = dict(module.named_modules())
        layer = names.get(self.layer)
        return isinstance(layer, LAYERS) and layer.bias is None and isinstance(names.get(self.norm), NORMS)


class _TakeBias(_Dropped):
    """Moves the bias of a state that was saved with it into the running mean that is loaded with it."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if not self.still_dropped(module):
            return
        bias = state_dict.pop(f"{prefix}{self.layer}.bias", None)
        mean = state_dict.get(f"{prefix}{self.norm}.running_mean")
        if bias is not None and mean is not None:
            shifted = mean.float() - bias.to(mean.device, torch.float32)
            state_dict[f"{prefix}{self.norm}.running_mean"] = shifted.to(mean.dtype)


class _WriteZeros(_Dropped):
    """Writes zeros for the bias into a state, so that the network with the bias can load it: the mean has taken it."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}{self.layer}.weight")
        if weight is not None and self.still_dropped(module):
            channels: Any = module.get_submodule(self.layer).out_channels
            state_dict.setdefault(f"{prefix}{self.layer}.bias", weight.new_zeros(channels))


def _warn_of_no_effect(module: nn.Module, kept: dict[str, str], opaque: list[str]) -> None:
    why = [f"{layer}: {reason}" for layer, reason in kept.items()]
    why += [f"{name} cannot be traced: call it on the parts in there, uncompiled" for name in opaque]
    why = why or ["no convolution with a bias is directly followed by a batch or instance norm"]
    warnings.warn(
        f"drop_bias_before_norm found no bias to drop in {type(module).__name__}: {'; '.join(why)}.",
        NoEffectWarning,
        stacklevel=3,
    )
