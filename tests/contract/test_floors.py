"""Imports go downward, packages of one floor do not import one another, and each module has its test at its place."""

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
# Base; techniques, for any loop of torch; everything that speaks of Lightning.
FLOORS = (
    (
        *("errors", "_checks", "_distributed", "_files", "_host_copy", "_lightning", "_machine"),
        *("_optional", "_pytree", "_random", "_replaced", "_trainer"),
    ),
    ("amp", "data", "fp16_utils", "measure", "nn", "optim", "parallel"),
    (
        *("__init__", "__main__", "callbacks", "cli", "datamodules"),
        *("doctor", "plugins", "strategies", "testing", "tune"),
    ),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WORST_COMPLEXITY = 12  # of each function and method
# Where attributes are put in that no editor finds: those that are set on SeededDataset are set on the dataset inside,
# and torch lets nobody set some of a loader's, as a copy has to.
PUT_IN_BY_UPDATE = {("data/sample_seeds.py", "SeededDataset"), ("data/loading/loader.py", "PrefetchLoader")}
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path):
    """Every module that a file imports, at its top or inside a function."""
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
                beside = FLOOR_OF[other] == FLOOR_OF[own] != 1  # techniques do not know of one another
                assert below or beside, f"{path} (floor {FLOOR_OF[own]}) imports {module}"
                if other in ("_lightning", "_trainer"):
                    assert FLOOR_OF[own] != 1, f"{path} (floor 1) knows of Lightning"
            elif top in ("lightning", "pytorch_lightning", "lightning_fabric"):
                assert own in ("_lightning", "doctor"), f"{path}: take {module} through _lightning"


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
        assert home(path) in FLOOR_OF, f"{path} stands on no floor"


def modules_below(path, known):
    """The modules of this package that a file imports; of ``from package import module``, the module alone."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in (each if each in known else node.module for each in inner) if name in known)


def module_name(path):
    return ".".join(("lightning_turbo", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_neither_packages_nor_modules_import_one_another_in_circles():
    # The root names the public modules, and loads each at its first use.
    known = {module_name(path): path for path in FILES}
    modules = {name: set(modules_below(path, known)) for name, path in known.items() if name != "lightning_turbo"}
    packages = {}
    for name, others in modules.items():
        own, tops = name.split(".")[1], {other.split(".")[1] for other in others if other != "lightning_turbo"}
        packages.setdefault(own, set()).update(top for top in tops - {own} if (ROOT / top).is_dir())
        if FLOOR_OF[own] < 2:
            assert "lightning_turbo" not in others, f"{name} imports the root, which is on the third floor"
    for graph in (modules, packages):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


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


# The fields of a loader's state, and the keys of earlier snapshots.
KEYS_OF_STATES = {
    *("consumed", "length", "ended", "whole", "order", "own", "left", "before", "held", "iter", "first", "at"),
    *("samples", "over", "generators", "shards", "stream", "rng_before_latest", "rng_before_next", "first_rng"),
}


def strings_asked_for(path):
    """The constant strings by which a file reads something: ``each["key"]`` and ``each.get("key")``."""
    for node in nodes(path):
        asked = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            asked = node.args[0] if node.args else None
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            yield asked.value


def test_the_state_of_an_epoch_is_read_by_its_class_alone():
    folders = ("data/loading", "data/orders", "callbacks/resume")
    files = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    for path in [*files, ROOT / "callbacks/exact_resume.py"]:
        if path.name != "epoch_state.py":
            assert not KEYS_OF_STATES & {*strings_asked_for(path)}, path


TESTS = Path(__file__).parents[1]
MOST_LINES = 10  # of modules whose test has another name


def lines_of_the_readme():
    """The lines of tests/README.md: the modules of each, and the files that test them."""
    table = re.search(r"\| Behavior \|.*?\n\n", (TESTS / "README.md").read_text() + "\n\n", re.DOTALL).group()
    for line in table.strip().splitlines()[2:]:
        _, modules, files = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
        yield modules, files


def test_every_module_has_a_test_of_its_name():
    """``amp/scaler.py`` has ``tests/amp/test_scaler.py``, or stands in the table of tests/README.md."""
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
    assert named <= without, "modules of tests/README.md that are gone or have a test of their name"
    assert all((TESTS / file).exists() for _, files in lines for file in files), lines
    assert without == named, "write tests/X/test_y.py for X/y.py, or name the module in tests/README.md"
