"""The graphs of a network in each way that it may be called, with nothing changed in it by the tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_turbo._random import same_random_numbers

__all__ = ["Tracer", "same_numbers", "traces_of"]


def traces_of(module: nn.Module) -> list[Tracer]:
    """Trace a module as it is and in evaluation mode, with optional arguments left out, and given where there are any.

    Args:
        module: Any module; it is left as it was.

    Raises:
        ValueError: If its own ``forward`` cannot be traced in one of these ways.
    """
    traces = [_trace(module), _trace(module, evaluate=True)]
    if traces[0].optional:
        traces += [_trace(module, given=True), _trace(module, evaluate=True, given=True)]
    return traces


class Tracer(fx.Tracer):
    """Traces through modules where it can and takes the others as one node."""

    def __init__(self, way: str, given: bool) -> None:
        super().__init__()
        self.way = way
        self.given = given
        self.optional = False
        self.traced: fx.GraphModule
        self.opaque: list[str] = []
        self.held: set[fx.Node] = set()  # values that a hook sees or a module stores
        self.reads_parameters = False  # as plain tensors, which the graph does not show

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function to trace and its arguments: the optional ones as they are by default, or as given."""
        function, arguments = super().create_args_for_root(*args, **kwargs)
        for index, argument in enumerate(arguments):
            if isinstance(argument, fx.Proxy) and argument.node.args:  # its default
                self.optional = True
                if not self.given:
                    arguments[index] = argument.node.args[0]
        return function, arguments

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace through a module, or take it as one node if that fails."""
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
        """Note the values that something beside the graph sees."""
        for value in tree_leaves(values):
            if isinstance(value, fx.Proxy):
                self.held.add(value.node)
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                self.reads_parameters = True


def _trace(module: nn.Module, *, evaluate: bool = False, given: bool = False) -> Tracer:
    """Trace a module, then put back everything that its forward has changed in it."""
    tracer = Tracer(("evaluation" if evaluate else "training") + " with optional arguments" * given, given)
    modes = [(part, part.training) for part in module.modules() if hasattr(part, "training")]  # not if frozen by jit
    held = (each for part in module.modules() for each in (vars(part), *vars(part).values()))
    holders: list[Any] = [each for each in held if isinstance(each, (dict, list))]
    copies = [each.copy() for each in holders]
    known = {id(value): value for value in tree_leaves(holders)}
    with same_numbers(module):
        try:
            for part, mode in modes:
                part.training = mode and not evaluate  # not by train(), which may do more
            tracer.traced = fx.GraphModule(module, tracer.trace(module))
        except Exception as error:
            how = " in evaluation mode" * evaluate
            how += f" with its optional arguments {'given' if given else 'left out'}" * tracer.optional
            raise ValueError(
                f"The forward of {type(module).__name__} cannot be traced{how}: {error}. "
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
def same_numbers(module: nn.Module, inputs: Sequence[Any] = ()) -> Iterator[None]:
    """Leave the buffers and the random generators as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not (is_lazy(buffer) or buffer.is_meta)]
    tensors = (t for t in (*module.parameters(), *module.buffers(), *inputs) if isinstance(t, torch.Tensor))
    with same_random_numbers({t.device for t in tensors if t.is_cuda}):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
