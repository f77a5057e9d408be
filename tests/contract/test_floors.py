"""Layers: packages import only lower layers, and each module has a test of its name."""

import ast
import fnmatch
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

from radon.complexity import cc_visit
from radon.visitors import Class

import lightning_turbo

ROOT = Path(lightning_turbo.__file__).parent
# Foundation; techniques for any training loop; everything that depends on Lightning.
FLOORS = (
    (
        *("errors", "_checks", "_distributed", "_files", "_host_copy", "_lightning", "_machine"),
        *("_optional", "_plain", "_pytree", "_random", "_replaced", "_trainer"),
    ),
    ("amp", "data", "measure", "nn", "optim"),
    (
        *("__init__", "__main__", "callbacks", "cli", "datamodules"),
        *("doctor", "plugins", "ray", "strategies", "testing", "tune"),
    ),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WORST_COMPLEXITY = 12  # of each function and method
# Classes that set attributes by updating __dict__: SeededDataset forwards assignments to its dataset, and DataLoader
# does not allow assignments to some attributes that a copy has to set.
PUT_IN_BY_UPDATE = {
    ("data/sample_seeds.py", "SeededDataset"), ("data/loading/loader.py", "PrefetchLoader"),
    ("data/loading/threads.py", "ThreadedDataset"),
}  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path):
    """Yield all modules that a file imports, also inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(path):
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_imports_go_downward():
    for path in FILES:
        own = home(path)
        for module in imports(path):
            top, _, rest = module.partition(".")
            if top == "lightning_turbo":
                other = rest.split(".")[0]
                if other not in FLOOR_OF or other == own:
                    continue
                below = FLOOR_OF[other] < FLOOR_OF[own]
                beside = FLOOR_OF[other] == FLOOR_OF[own] != 1  # techniques do not import each other
                assert below or beside, f"{path} (floor {FLOOR_OF[own]}) imports {module}"
                if other in ("_lightning", "_trainer"):
                    assert FLOOR_OF[own] != 1, f"{path} (floor 1) depends on Lightning"
            elif top in ("lightning", "pytorch_lightning", "lightning_fabric"):
                assert own in ("_lightning", "doctor"), f"{path}: import {module} through _lightning"


def test_functions_are_simple():
    worst = {
        f"{path.relative_to(ROOT)}:{block.lineno} {block.name}": block.complexity
        for path in FILES
        for block in cc_visit(path.read_text())
        if not isinstance(block, Class) and block.complexity > WORST_COMPLEXITY
    }
    assert worst == {}


def test_no_blanket_ignores():
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"# (type: ignore|pyright: ignore|noqa)\s*$", line), f"{path}:{number}: {line}"


def test_every_folder_has_a_floor():
    for path in FILES:
        assert home(path) in FLOOR_OF, f"{path} has no floor"


def modules_below(path, known):
    """Yield the modules of this package that a file imports; for ``from package import module``, only the module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in (each if each in known else node.module for each in inner) if name in known)


def module_name(path):
    return ".".join(("lightning_turbo", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_no_circular_imports_of_packages_or_modules():
    # The root package imports public modules lazily.
    known = {module_name(path): path for path in FILES}
    modules = {name: set(modules_below(path, known)) for name, path in known.items() if name != "lightning_turbo"}
    packages = {}
    for name, others in modules.items():
        own, tops = name.split(".")[1], {other.split(".")[1] for other in others if other != "lightning_turbo"}
        packages.setdefault(own, set()).update(top for top in tops - {own} if (ROOT / top).is_dir())
        if FLOOR_OF[own] < 2:
            assert "lightning_turbo" not in others, f"{name} imports the root package, which is on floor 2"
    for graph in (modules, packages):
        TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def classes():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(ROOT).as_posix(), node


def test_attributes_are_assigned_by_name():
    updates = ("vars(self).update", "self.__dict__.update")
    hidden = {
        (path, cls.name)
        for path, cls in classes()
        for node in ast.walk(cls)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in updates
    }
    assert hidden <= PUT_IN_BY_UPDATE


TESTS = Path(__file__).parents[1]
MOST_LINES = 10  # of the table of modules whose tests have other names


def lines_of_the_readme():
    """Yield the modules and the test files of each line of the table in tests/README.md."""
    table = re.search(r"\| Behavior \|.*?\n\n", (TESTS / "README.md").read_text() + "\n\n", re.DOTALL).group()
    for line in table.strip().splitlines()[2:]:
        _, modules, files = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
        yield modules, files


def test_every_module_has_a_test_of_its_name():
    """``amp/scaler.py`` has ``tests/amp/test_scaler.py``, or is in the table of tests/README.md."""
    modules = {path.relative_to(ROOT).with_suffix("").as_posix() for path in FILES if "__" not in path.name}
    without = {
        name for name in modules
        if not (TESTS / name).with_name(f"test_{Path(name).name.removeprefix('_')}.py").exists()
    }  # fmt: skip
    lines = [*lines_of_the_readme()]
    assert 0 < len(lines) <= MOST_LINES
    named = {
        name for names, _ in lines for pattern in names
        for name in fnmatch.filter(modules, pattern) or [f"{pattern}, which does not exist"]
    }  # fmt: skip
    assert named <= without, "modules in tests/README.md that do not exist or have a test of their name"
    assert all((TESTS / file).exists() for _, files in lines for file in files), lines
    assert without == named, "write tests/X/test_y.py for X/y.py, or add the module to tests/README.md"
