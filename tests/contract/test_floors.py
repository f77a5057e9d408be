"""Imports go downward only, and packages of one floor never import one another."""

import ast
import re
from pathlib import Path

import pytest

import lightning_turbo

ROOT = Path(lightning_turbo.__file__).parent
FLOOR_OF = {
    "errors": 0, "_checks": 0, "_files": 0, "_optional": 0, "_random": 0, "_compat": 0, "_loops": 0, "_ranks": 0,
    "amp": 1, "data": 1, "optim": 1, "nn": 1,
    "plugins": 2, "datamodules": 2, "callbacks": 2,
    "strategies": 2.5,  # they put the other adapters together
    "doctor": 3, "demo": 3,
    "bench": 3.5,  # it measures on the tasks of the demo
    "__init__": 4, "__main__": 4, "cli": 4,
}  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def imports(path):
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(path):
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path):
    own = home(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "lightning_turbo":
            other = rest.split(".")[0]
            both_at_the_top = not (ROOT / other).is_dir() and not (ROOT / own).is_dir()
            if other not in FLOOR_OF or other == own or (both_at_the_top and FLOOR_OF[other] == FLOOR_OF[own]):
                continue
            assert FLOOR_OF[other] < FLOOR_OF[own], f"{own} (floor {FLOOR_OF[own]}) imports {module}"
            if other in ("_compat", "_loops"):
                assert FLOOR_OF[own] >= 2, f"{own} (floor 1) knows of Lightning"
        elif top in ("lightning", "pytorch_lightning", "lightning_fabric"):
            assert own in ("_compat", "doctor", "bench", "demo"), f"{path}: take {module} through _compat"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_outgrows_a_reader(path):
    lines = path.read_text().count("\n")
    assert lines <= 400, f"{path} has {lines} lines"


def test_no_blanket_ignores():
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"# (type: ignore|pyright: ignore|noqa)\s*$", line), f"{path}:{number}: {line}"


def test_every_folder_has_a_floor():
    for path in FILES:
        assert home(path) in FLOOR_OF, f"{path} stands on no floor"
