"""A network that is compiled in place for one run, so that no key of a checkpoint changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["CompileReport", "check_compile", "compile_counts", "compiled_in_place", "repeated_blocks"]

_WHAT = ("network", "blocks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class CompileReport(NamedTuple):
    """What torch compiled within a time.

    Attributes:
        graphs: Number of graphs.
        recompilations: Where torch compiled a function again, and why -> how many times.
        breaks: Why torch left a graph, with the line where it says so -> how many times.
    """

    graphs: int
    recompilations: dict[str, int]
    breaks: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{self.graphs} graphs"]
        for name, found in (("recompilations", self.recompilations), ("graph breaks", self.breaks)):
            parts.append(f"{sum(found.values())} {name}" + "".join(f"\n  {n} x {why}" for why, n in found.items()))
        return ", ".join(parts)


def check_compile(how: Any) -> None:
    """Refuse what ``compiled_in_place`` does not take.

    Raises:
        TypeError: If it is neither ``None``, a string nor a dict.
        ValueError: If it is another string, or a dict with another ``"what"``.
    """
    if how is not None and not isinstance(how, (str, dict)):
        raise TypeError(
            f"compile={how!r}: expected None, 'network', 'blocks' or a dict of arguments for torch.compile."
        )
    if how is not None and _split(how)[0] not in _WHAT:
        raise ValueError(
            f"compile={how!r}: expected 'network' or 'blocks' as what is compiled, got {_split(how)[0]!r}."
        )


@contextmanager
def compiled_in_place(
    module: nn.Module, how: str | dict[str, Any], say: Callable[[str], None] | None = None
) -> Iterator[list[nn.Module]]:
    """Compile the networks in a module, in place, and take it off again at the end.

    Parameters, names and classes stay as they are, so checkpoints are those of a module that was never compiled.

    Args:
        module: Holds the networks: a LightningModule, or any module. It is not compiled itself, because Lightning calls
            its ``training_step`` and not its ``forward``.
        how: ``"network"`` compiles each child with parameters; ``"blocks"`` compiles those blocks that are there more
            than once, for example the layers of a transformer, which torch compiles once for all; it starts faster. A
            dict has arguments for ``torch.compile``, and ``"what"`` for one of the two.
        say: Called at the end with one text: how often torch compiled again or left a graph, where and why.

    Yields:
        The modules that are compiled. One that somebody else has compiled is left alone.

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
    parts = [part for part in _find(module, what) if part._compiled_call_impl is None]
    codes: dict[Any, CodeType] = {}
    before = compile_counts()
    try:
        for part in parts:
            _compile(part, codes, type(part) if what == "blocks" else part, options)
        yield parts
    finally:
        for part in parts:
            part._compiled_call_impl = None
        if say is not None:
            say(f"compile={what!r}: {_difference(compile_counts(), before)}.")


def _split(how: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what is compiled, and the arguments for ``torch.compile``."""
    options = dict(how) if isinstance(how, dict) else {"what": how}
    return options.pop("what", "network"), options


def _find(module: nn.Module, what: str) -> list[nn.Module]:
    parts = repeated_blocks(module) if what == "blocks" else _networks(module)
    if not parts:
        found = "no block that is there twice" if what == "blocks" else "no child with parameters"
        raise ValueError(f"compile={what!r}: {type(module).__name__} has {found}. Leave compile out.")
    return parts


def _compile(part: nn.Module, codes: dict[Any, CodeType], key: Any, options: dict[str, Any]) -> None:
    """Do what ``nn.Module.compile`` does, for classes of torch too.

    That method compiles nothing of an ``nn.Sequential`` or another class of torch (seen with 2.13): torch leaves frames
    of its own files out, unless they are called from one that is not.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    # torch keeps what it compiled with the code of a function, and no more than eight times. Blocks of a class share
    # theirs, so that they are compiled once; networks have their own.
    call.__code__ = codes.setdefault(key, call.__code__.replace())
    part._compiled_call_impl = torch.compile(call, **options)


def _networks(module: nn.Module) -> list[nn.Module]:
    """Return the children with parameters; those of a list or dict of modules, which is not called itself."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _networks(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose class is there more than once: blocks of several modules, no containers."""
    blocks = [each for each in module.modules() if not isinstance(each, _CONTAINERS) and any(each.children())]
    often = {kind for kind, count in Counter(map(type, blocks)).items() if count > 1}

    def outermost(part: nn.Module) -> Iterator[nn.Module]:
        for child in part.children():
            if type(child) in often:
                yield child
            else:
                yield from outermost(child)

    return list(dict.fromkeys(outermost(module)))


def compile_counts() -> CompileReport:
    """Return what torch has compiled in this process so far.

    Reasons of recompilations are there as far as torch keeps them: the last thousand or so.
    """
    from torch._dynamo import utils  # it takes a second to import

    again = Counter(_describe(each) for each in utils.get_compilation_metrics() if _is_recompilation(each))
    breaks: Counter[str] = Counter()
    for each in utils.graph_break_reasons:
        line = f"{each.user_stack[-1].filename}:{each.user_stack[-1].lineno}: " if each.user_stack else ""
        breaks[line + each.reason.partition("\n")[0]] += 1
    return CompileReport(utils.counters["stats"]["unique_graphs"], dict(again), dict(breaks))


def _is_recompilation(metrics: Any) -> bool:
    """Whether torch compiled a function again: it numbers its compilations of one as 3/0, 3/1, 3/2."""
    _, _, number = str(metrics.compile_id).partition("/")
    return number not in ("", "0")


def _describe(metrics: Any) -> str:
    reason = getattr(metrics, "recompile_reason", None) or "torch gives no reason"
    return f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}: {reason}"


def _difference(now: CompileReport, before: CompileReport) -> CompileReport:
    parts = [Counter(one) - Counter(other) for one, other in zip(now[1:], before[1:], strict=True)]
    return CompileReport(now.graphs - before.graphs, *map(dict, parts))
