"""Changes to the user's source, as diffs to read: nothing here writes a file."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import linecache
from collections.abc import Callable, Iterator

from lightning_turbo.doctor.advice import Finding
from lightning_turbo.doctor.facts import Site
from lightning_turbo.doctor.report import place

__all__ = ["diff_for", "with_diffs"]

_Edit = tuple[ast.AST, str]
"""A stretch of the source, given by a node, and the text that takes its place."""


def with_diffs(findings: list[Finding]) -> list[Finding]:
    """Return the findings, each with a diff of its line where a change can be proposed."""
    return [dataclasses.replace(each, diff=diff_for(each.rule, each.site) if each.site else "") for each in findings]


def diff_for(rule: str, site: Site) -> str:
    """Propose a change to a line.

    Args:
        rule: The name of the rule that found it.
        site: Where.

    Returns:
        A unified diff, or an empty string if there is no simple change.
    """
    propose = _PROPOSALS.get(rule)
    lines = linecache.getlines(site.file)
    if propose is None or not lines:
        return ""
    source = "".join(lines)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, site.line)]
    if not statements:
        return ""
    # The shortest statements on that line, the last one first: `if x: f()` is two, `f(); g()` as well.
    lines_of = {id(node): (node.end_lineno or node.lineno) - node.lineno for node in statements}
    shortest = [node for node in statements if lines_of[id(node)] == min(lines_of.values())]
    for statement in sorted(shortest, key=lambda node: -node.col_offset):
        edits = [each for each in propose(statement, source) if _spans(each[0], site.line)]
        if len(edits) == 1 or (edits and rule not in _ONE_EACH):
            edit = edits[0]
            break
    else:
        return ""
    node, text = edit
    if not text and _needed(statement, tree):
        text = "pass"
    changed = _replaced(source, node, text)
    name = place(site).rpartition(":")[0]
    after = changed.splitlines(keepends=True)
    return "".join(difflib.unified_diff(lines, after, name, name, n=1)).rstrip("\n")


def _spans(node: ast.AST, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno  # type: ignore[attr-defined]


def _needed(statement: ast.stmt, tree: ast.Module) -> bool:
    """Whether a statement is alone in its block, or shares a line with another one."""
    blocks = [block for node in ast.walk(tree) for _, block in ast.iter_fields(node) if isinstance(block, list)]
    block = next(block for block in blocks if any(each is statement for each in block))
    return len(block) == 1 or any(each is not statement and each.lineno == statement.lineno for each in block)


def _replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with a node's text replaced; a whole statement replaced by nothing takes its lines along."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    if not text:
        return b"".join(lines[:first] + lines[last + 1 :]).decode()
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    return b"".join([*lines[:first], head + text.encode() + tail, *lines[last + 1 :]]).decode()


def _calls(statement: ast.stmt, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if not names or name in names:
                yield node


def _without_keyword(keyword: str) -> Callable[[ast.stmt, str], Iterator[_Edit]]:
    def propose(statement: ast.stmt, source: str) -> Iterator[_Edit]:
        for call in _calls(statement):
            if any(each.arg == keyword for each in call.keywords):
                call_text = _Rewrite(source).call(call, drop=keyword)
                yield call, call_text

    return propose


class _Rewrite:
    """Writes calls anew from their parts' own text."""

    def __init__(self, source: str) -> None:
        self.source = source

    def text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ast.unparse(node)

    def call(self, call: ast.Call, *, drop: str = "", add: str = "", function: str = "") -> str:
        parts = [self.text(each) for each in call.args]
        for keyword in call.keywords:
            if keyword.arg is None:
                parts.append(f"**{self.text(keyword.value)}")
            elif keyword.arg != drop:
                parts.append(f"{keyword.arg}={self.text(keyword.value)}")
        return f"{function or self.text(call.func)}({', '.join([*parts, add] if add else parts)})"


def _deleted(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield statement, ""


def _as_tensor(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    for call in _calls(statement, "tensor"):
        if isinstance(call.func, ast.Attribute) and not any(each.arg == "requires_grad" for each in call.keywords):
            rewrite = _Rewrite(source)
            yield call, rewrite.call(call, function=f"{rewrite.text(call.func.value)}.as_tensor")


def _detached(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    text = _Rewrite(source).text
    several = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(statement, (ast.AugAssign, ast.Assign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not any(isinstance(each, several) for each in (*targets, statement.value)):
            yield statement.value, f"{_grouped(statement.value, text(statement.value))}.detach()"
    elif isinstance(statement, ast.Expr):
        for call in _calls(statement, "append", "appendleft", "add"):
            if len(call.args) == 1 and not isinstance(call.args[0], (*several, ast.Starred)):
                yield call.args[0], f"{_grouped(call.args[0], text(call.args[0]))}.detach()"


def _grouped(node: ast.AST, text: str) -> str:
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if simple else f"({text})"


def _logged_tensor(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    for log in _calls(statement, "log", "log_dict"):
        for argument in [*log.args, *(keyword.value for keyword in log.keywords)]:
            for call in argument.values if isinstance(argument, ast.Dict) else [argument]:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "item":
                    yield call, _Rewrite(source).text(call.func.value)
                elif isinstance(call, ast.Call) and getattr(call.func, "id", "") == "float" and len(call.args) == 1:
                    yield call, _Rewrite(source).text(call.args[0])


def _made_there(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    rewrite = _Rewrite(source)
    for move in _calls(statement, "to", "cuda"):
        made = move.func.value if isinstance(move.func, ast.Attribute) else None
        if isinstance(made, ast.Call) and not any(each.arg == "device" for each in made.keywords):
            targets = [*move.args, *(each.value for each in move.keywords)]
            device = rewrite.text(targets[0]) if targets else '"cuda"'
            one = len(targets) < 2 and (not targets or _is_device(targets[0]))
            if one and isinstance(made.func, ast.Attribute) and ast.unparse(made.func) in _FACTORIES:
                yield move, rewrite.call(made, add=f"device={device}")


def _is_device(node: ast.expr) -> bool:
    named = isinstance(node, (ast.Attribute, ast.Name)) and "device" in ast.unparse(node).rpartition(".")[2]
    return named or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _without_bias(statement: ast.stmt, source: str) -> Iterator[_Edit]:
    for call in _calls(statement):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        layer = name.startswith(("Conv", "LazyConv")) or name in ("Linear", "LazyLinear")
        given = any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) >= (
            3 if "Linear" in name else 7
        )
        if (
            layer
            and not given
            and not any(each.arg == "bias" and ast.unparse(each.value) == "False" for each in call.keywords)
        ):
            yield call, _Rewrite(source).call(call, drop="bias", add="bias=False")


_FACTORIES = frozenset(
    f"torch.{name}"
    for name in (
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    )
)
"""What makes a tensor and takes ``device``."""

_ONE_EACH = ("bias-before-norm",)
"""Rules whose finding is one of the calls on its line, so that it must be the only one there."""

_PROPOSALS: dict[str, Callable[[ast.stmt, str], Iterator[_Edit]]] = {
    "array-copy": _as_tensor,
    "bias-before-norm": _without_bias,
    "gradcheck": _deleted,
    "gradients-kept": _without_keyword("set_to_none"),
    "host-sync": _logged_tensor,
    "housekeeping": _deleted,
    "made-on-host": _made_there,
    "retain-graph": _without_keyword("retain_graph"),
    "retained-graph": _detached,
}
