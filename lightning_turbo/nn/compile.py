"""Compiles networks in place for one run, without changing any key of a checkpoint."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_turbo._checks import expect

__all__ = ["CompileReport", "check_compile", "compile_counts", "compiled_in_place", "repeated_blocks"]

_WHAT = ("network", "blocks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class CompileReport(NamedTuple):
    """What torch has compiled in this process."""

    graphs: int
    recompilations: dict[str, int]
    """Function and reason of each recompilation -> count."""
    breaks: dict[str, int]
    """Line and reason of each graph break -> count."""

    def since(self, before: CompileReport) -> CompileReport:
        """Return what was compiled since an earlier report."""
        parts = [Counter(now) - Counter(then) for now, then in zip(self[1:], before[1:], strict=True)]
        return CompileReport(self.graphs - before.graphs, *map(dict, parts))

    def __str__(self) -> str:
        parts = [f"{self.graphs} graphs"]
        for name, found in (("recompilations", self.recompilations), ("graph breaks", self.breaks)):
            parts.append(f"{sum(found.values())} {name}" + "".join(f"\n  {n} x {why}" for why, n in found.items()))
        return ", ".join(parts)


def check_compile(how: Any) -> None:
    """Raise an error for a value other than ``None`` that ``compiled_in_place`` does not accept."""
    if how is None:
        return
    options = "None, 'network', 'blocks' or a dict of arguments for torch.compile"
    expect(isinstance(how, (str, dict)), "compile", how, options, TypeError)
    expect(_split(how)[0] in _WHAT, "compile", how, f"{options}, which may have 'what'")


@contextmanager
def compiled_in_place(
    module: nn.Module, how: str | dict[str, Any], say: Callable[[str], None] | None = None
) -> Iterator[list[nn.Module]]:
    """Compile the networks in a module in place, and undo it at the end.

    Parameters, names and classes do not change, so checkpoints equal those of an uncompiled module.

    Args:
        module: The module that contains the networks, such as a LightningModule. It is not compiled itself, because
            Lightning calls its ``training_step``, not its ``forward``.
        how: ``"network"`` compiles each child with parameters. ``"blocks"`` compiles repeated blocks, such as the
            layers of a transformer, once for all of them, which starts faster. A dict holds arguments for
            ``torch.compile``, and optionally ``"what"`` for one of the two.
        say: Called at the end with a text that counts recompilations and graph breaks, with lines and reasons.

    Yields:
        The modules compiled here; modules that are already compiled stay as they are.

    Raises:
        ValueError: If there is nothing to compile.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with compiled_in_place(model, {"backend": "eager"}):
        ...     out = model(torch.ones(1, 2))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    what, options = _split(how)
    # Skip modules that were compiled by other code, because the end of the block would undo that.
    parts = [part for part in _find(module, what) if part._compiled_call_impl is None]
    codes: dict[Any, CodeType] = {}
    before = compile_counts()
    try:
        for part in parts:
            _compile(part, codes, type(part) if what == "blocks" else part, options)
        yield parts
    finally:
        for part in parts:
            # torch has no public method to undo compilation.
            part._compiled_call_impl = None
        if say is not None:
            say(f"compile={what!r}: {compile_counts().since(before)}.")


def _split(how: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what to compile, and the arguments for ``torch.compile``."""
    options = dict(how) if isinstance(how, dict) else {"what": how}
    return options.pop("what", "network"), options


def _find(module: nn.Module, what: str) -> list[nn.Module]:
    parts = repeated_blocks(module) if what == "blocks" else _networks(module)
    if not parts:
        wanted = "two blocks of one class" if what == "blocks" else "a child with parameters"
        raise ValueError(
            f"compile={what!r}: expected {wanted}, got none in {type(module).__name__}. Leave compile out."
        )
    return parts


def _compile(part: nn.Module, codes: dict[Any, CodeType], key: Any, options: dict[str, Any]) -> None:
    """Do what ``nn.Module.compile`` does, for torch's own classes too.

    That method has no effect on ``nn.Sequential`` and other torch classes (observed with torch 2.13), because torch
    skips frames of its own files unless a frame of another file calls them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    # One code object per class of blocks, or per network. torch stores compilations by code object: blocks of one class
    # must share one to be compiled once, and networks must not share one, because it holds at most eight.
    call.__code__ = codes.setdefault(key, call.__code__.replace())
    part._compiled_call_impl = torch.compile(call, **options)


def _networks(module: nn.Module) -> list[nn.Module]:
    """Return the children with parameters, replacing a ModuleList or ModuleDict with its children."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _networks(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost non-container modules that have children and whose class occurs more than once."""
    counts = Counter(map(type, filter(_is_block, module.modules())))
    return list(dict.fromkeys(_outermost(module, {kind for kind, count in counts.items() if count > 1})))


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(module.children())


def _outermost(module: nn.Module, kinds: set[type]) -> Iterator[nn.Module]:
    for child in module.children():
        # Do not descend into a compiled block, because its inner blocks are part of its graph.
        if type(child) in kinds:
            yield child
        else:
            yield from _outermost(child, kinds)


def compile_counts() -> CompileReport:
    """Return what torch has compiled in this process so far; torch keeps about the last thousand reasons."""
    utils: Any = sys.modules.get("torch._dynamo.utils")  # imported when torch compiles; importing takes a second
    if utils is None:
        return CompileReport(0, {}, {})
    again = Counter(map(_describe, filter(_is_recompilation, utils.get_compilation_metrics())))
    breaks = Counter(map(_describe_break, utils.graph_break_reasons))
    return CompileReport(utils.counters["stats"]["unique_graphs"], dict(again), dict(breaks))


def _describe_break(reason: Any) -> str:
    line = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}: " if reason.user_stack else ""
    return line + reason.reason.partition("\n")[0]


def _is_recompilation(metrics: Any) -> bool:
    """Return whether this is not a function's first compilation; torch numbers them 3/0, 3/1, 3/2."""
    _, _, number = str(metrics.compile_id).partition("/")
    return number not in ("", "0")


def _describe(metrics: Any) -> str:
    reason = getattr(metrics, "recompile_reason", None) or "torch gives no reason"
    return f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}: {reason}"
