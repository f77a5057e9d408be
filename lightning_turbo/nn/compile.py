"""In-place compilation of a network for one run, without changes to the keys of checkpoints."""

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
    """Counts of torch's compilations.

    Attributes:
        graphs: Number of graphs.
        recompilations: Function and reason of a recompilation -> count.
        breaks: Line and reason of a graph break -> count.
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
    """Check the argument ``how`` of ``compiled_in_place``; ``None`` is valid too.

    Raises:
        TypeError: If it is not ``None``, a string or a dict.
        ValueError: If the string, or ``"what"`` in the dict, is not ``"network"`` or ``"blocks"``.
    """
    if how is not None and not isinstance(how, (str, dict)):
        raise TypeError(
            f"compile={how!r}: expected None, 'network', 'blocks' or a dict of arguments for torch.compile."
        )
<<<<<<< HEAD
    if how is not None and _split(how)[0] not in _WHAT:
        raise ValueError(
            f"compile={how!r}: expected 'network' or 'blocks' as what is compiled, got {_split(how)[0]!r}."
        )
=======
    what, _ = _split_options(how)
    if what not in (None, *_WHAT):
        raise ValueError(f"compile={how!r}: expected 'network' or 'blocks', got {what!r}.")


def _split_options(how: str | dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Return ``"network"`` or ``"blocks"``, and the arguments for ``torch.compile``."""
    options = dict(how) if isinstance(how, dict) else {"what": how}
    return options.pop("what", "network"), options
>>>>>>> w-optim


@contextmanager
def compiled_in_place(
    module: nn.Module, how: str | dict[str, Any], say: Callable[[str], None] | None = None
) -> Iterator[list[nn.Module]]:
    """Compile the networks in a module in place, and undo it at the end of the context.

    Parameters, names and classes do not change, so that checkpoints are the same as without compilation.

    Args:
        module: The module that contains the networks, for example a LightningModule. It is not compiled itself, because
            Lightning calls its ``training_step`` and not its ``forward``.
        how: ``"network"`` compiles each child with parameters. ``"blocks"`` compiles repeated blocks, for example the
            layers of a transformer: torch compiles them once for all, which starts faster. A dict has arguments for
            ``torch.compile``, and one of the two under ``"what"``.
        say: Function that is called at the end with a report of recompilations and graph breaks, with their reasons.

    Yields:
        The compiled modules. A module that was compiled before is not among them and does not change.

    Raises:
        ValueError: If the module has no network or no repeated block to compile.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with compiled_in_place(model, {"backend": "eager"}):
        ...     out = model(torch.ones(1, 2))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
<<<<<<< HEAD
    what, options = _split(how)
    parts = [part for part in _find(module, what) if part._compiled_call_impl is None]
=======
    what, options = _split_options(how)
    parts = _find_parts(module, what, how)
    before = compile_counts()
>>>>>>> w-optim
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
            say(f"compile={what!r}: {_subtract(compile_counts(), before)}.")


def _find_parts(module: nn.Module, what: str, how: Any) -> list[nn.Module]:
    parts = repeated_blocks(module) if what == "blocks" else _find_networks(module)
    if not parts:
        missing = "repeated block" if what == "blocks" else "child with parameters"
        raise ValueError(f"compile={how!r}: {type(module).__name__} has no {missing}. Leave compile out.")
    return [part for part in parts if part._compiled_call_impl is None]


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
    """Compile a module as ``nn.Module.compile`` does, including classes of torch.

    ``nn.Sequential.compile`` and that of other classes of torch compile nothing (seen with 2.13), because torch skips
    frames of its own files unless a frame of another file calls them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    # torch stores at most eight compilations with the code object of a function. Blocks of a class share one code
    # object, so that they are compiled once; each network has its own.
    call.__code__ = codes.setdefault(key, call.__code__.replace())
    part._compiled_call_impl = torch.compile(call, **options)


def _find_networks(module: nn.Module) -> list[nn.Module]:
    """Return the children with parameters. A list or dict of modules is never called: its children are returned."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _find_networks(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a class that occurs more than once. Containers and single layers do not count."""
    counts = Counter(type(each) for each in module.modules() if _is_block(each))
    return list(dict.fromkeys(_find_outermost(module, {kind for kind, count in counts.items() if count > 1})))


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(module.children())


def _find_outermost(module: nn.Module, kinds: set[type]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in kinds:
            yield child
        else:
            yield from _find_outermost(child, kinds)


def compile_counts() -> CompileReport:
    """Return the counts of torch's compilations in this process.

    torch keeps the reasons of about the last thousand recompilations only.
    """
    from torch._dynamo import utils  # the import takes a second

<<<<<<< HEAD
    again = Counter(_describe(each) for each in utils.get_compilation_metrics() if _is_recompilation(each))
    breaks: Counter[str] = Counter()
    for each in utils.graph_break_reasons:
        line = f"{each.user_stack[-1].filename}:{each.user_stack[-1].lineno}: " if each.user_stack else ""
        breaks[line + each.reason.partition("\n")[0]] += 1
=======
    again = Counter(map(_describe_recompilation, filter(_is_recompilation, utils.get_compilation_metrics())))
    breaks = Counter(map(_describe_break, utils.graph_break_reasons))
>>>>>>> w-optim
    return CompileReport(utils.counters["stats"]["unique_graphs"], dict(again), dict(breaks))


def _is_recompilation(metrics: Any) -> bool:
<<<<<<< HEAD
    """Whether torch compiled a function again: it numbers its compilations of one as 3/0, 3/1, 3/2."""
    _, _, number = str(metrics.compile_id).partition("/")
    return number not in ("", "0")


def _describe(metrics: Any) -> str:
    reason = getattr(metrics, "recompile_reason", None) or "torch gives no reason"
    return f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}: {reason}"


def _difference(now: CompileReport, before: CompileReport) -> CompileReport:
=======
    _, _, attempt = str(getattr(metrics, "compile_id", None) or "").partition("/")
    return attempt not in ("", "0")


def _describe_recompilation(metrics: Any) -> str:
    reason = getattr(metrics, "recompile_reason", None) or "torch gives no reason"  # torch before 2.7 has none
    return f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}: {reason}"


def _describe_break(graph_break: Any) -> str:
    line = ""
    if graph_break.user_stack:
        frame = graph_break.user_stack[-1]
        line = f"{frame.filename}:{frame.lineno}: "
    return line + graph_break.reason.partition("\n")[0]


def _subtract(now: CompileReport, before: CompileReport) -> CompileReport:
>>>>>>> w-optim
    parts = [Counter(one) - Counter(other) for one, other in zip(now[1:], before[1:], strict=True)]
    return CompileReport(now.graphs - before.graphs, *map(dict, parts))
