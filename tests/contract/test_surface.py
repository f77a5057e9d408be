"""The public surface: sorted, importable, light to import, and the same as the documents say."""

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_turbo
from lightning_turbo import _lightning

ROOT = Path(lightning_turbo.__file__).parent


def in_order(names):
    """Constants, then classes, then the rest, each by the alphabet, as ruff sorts them."""
    return sorted(names, key=lambda n: (0 if n.isupper() and len(n) > 1 else 1 if n[:1].isupper() else 2, n))


def run(code):
    """Runs code in a fresh interpreter and returns what it printed."""
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lightning_turbo", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip


def test_all_is_sorted_and_importable():
    assert lightning_turbo.__all__ == in_order(lightning_turbo.__all__)
    for name in lightning_turbo.__all__:
        assert getattr(lightning_turbo, name) is not None, name


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_states_its_names(path):
    if path.name == "__main__.py":
        return
    dotted = ".".join(("lightning_turbo", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    if path.parent.name == "rules" and not hasattr(module, "__all__"):
        return  # it only registers its rules
    names = module.__all__
    assert names == in_order(names), f"{dotted}.__all__ is not sorted"
    for name in names:
        assert isinstance(name, str)
        assert hasattr(module, name), f"{dotted} has no {name}"


def test_lightnings_names_are_the_same_for_type_checkers_and_at_run_time():
    """Each stands in both lists, with the module that has it, and is used."""
    source = (ROOT / "_lightning.py").read_text()
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    packages = {"lightning.pytorch": "{pytorch}", "lightning.fabric": "{fabric}"}
    declared = {}
    for node in block.body:
        whole = ".".join(node.module.split(".")[:2])
        module = node.module.replace(whole, packages.get(whole, whole))
        declared.update({alias.asname or alias.name: f"{module}:{alias.name}" for alias in node.names})
    assert declared == _lightning._HOMES
    others = " ".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "_lightning.py")
    for name in declared:
        assert re.search(rf"\b{name}\b", others) or source.count(f'"{name}"') > 1, f"{name} is used by nobody"


@pytest.mark.parametrize("name", _lightning.NAMES)
def test_lightning_has_each_name_under_both_import_names(name):
    """In a process of its own, because a copy of Lightning that is imported here would count as the program's."""
    code = f"""
        import lightning_turbo
        from lightning_turbo import _lightning
        lightning_turbo.bind_lightning({name!r})
        print(len([getattr(_lightning, each) for each in _lightning._HOMES]))
    """
    assert int(run(code)) == len(_lightning._HOMES)


def test_import_is_silent_light_and_touches_no_device():
    out = run(
        """
        import json, sys, warnings
        import lightning.pytorch
        before = set(sys.modules)  # torchmetrics brings matplotlib along where it is installed
        warnings.simplefilter("error")
        import lightning_turbo
        for name in lightning_turbo.__all__:
            getattr(lightning_turbo, name)
        import torch
        heavy = [m for m in ("nvidia.dali", "matplotlib", "sklearn", "nilearn", "apex", "skimage", "PIL.Image")
                 if m in set(sys.modules) - before]
        print(json.dumps({"heavy": heavy, "cuda": torch.cuda.is_initialized()}))
        """
    )
    assert json.loads(out) == {"heavy": [], "cuda": False}


def test_import_costs_at_most_50_ms_beyond_lightning():
    code = """
        import time
        import lightning.pytorch
        start = time.perf_counter()
        import lightning_turbo
        print(time.perf_counter() - start)
        """
    assert any(float(run(code)) < 0.05 for _ in range(3))  # the machine may be busy once


def test_type_checkers_are_shown_the_names_of_the_table():
    """They read the imports under TYPE_CHECKING, and no table."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (shown,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {alias.asname: (node.module, alias.name) for node in shown.body for alias in node.names}
    homes = {name: home for names in lightning_turbo.PUBLIC.values() for name, home in names.items()}
    wanted = {name: (f"lightning_turbo.{home}", name) for name, home in homes.items()}
    modules = {"amp": ("lightning_turbo", "amp"), "augment": ("lightning_turbo.data", "augment")}
    assert found == {**wanted, **modules}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        lightning_turbo.Nonsense
