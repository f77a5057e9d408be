"""The public names: sorted, importable, fast to import, and documented."""

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
TESTS = Path(__file__).parents[1]


def in_order(names):
    """Sort names as ruff does: constants, classes, then others, each alphabetically."""
    return sorted(names, key=lambda n: (0 if n.isupper() and len(n) > 1 else 1 if n[:1].isupper() else 2, n))


def test_all_is_sorted_and_importable():
    assert lightning_turbo.__all__ == in_order(lightning_turbo.__all__)
    for name in lightning_turbo.__all__:
        assert getattr(lightning_turbo, name) is not None, name


def test_every_module_has_all():
    for path in sorted(ROOT.rglob("*.py")):
        dotted = ".".join(("lightning_turbo", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        if path.name == "__main__.py":
            continue
        module = importlib.import_module(dotted)
        if path.parent.name == "rules" and not hasattr(module, "__all__"):
            continue  # it only registers rules
        names = getattr(module, "__all__", None)
        assert names is not None, f"{dotted} has no __all__: add one with its public names"
        assert names == in_order(names), f"{dotted}.__all__ is not sorted"
        assert [name for name in names if not isinstance(name, str) or not hasattr(module, name)] == [], dotted


def test_every_name_of_lightning_exists_and_is_used():
    others = " ".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "_lightning.py")
    for name in _lightning.names_of_lightning():
        assert re.search(rf"\b{name}\b", others), f"{name} is used by nobody"
    assert _lightning.bound_name() == "lightning.pytorch", "tests/test_lightning.py has the other"
    for name in _lightning.names_of_lightning():
        assert getattr(_lightning, name) is not None, name


def test_import_is_silent_light_and_touches_no_device():
    """Importing imports no other module after Lightning; names import no optional package."""
    code = """
        import json, sys, warnings
        import lightning.pytorch
        before = set(sys.modules)  # torchmetrics imports matplotlib if it is installed
        warnings.simplefilter("error")
        import lightning_turbo
        loaded = sorted(set(sys.modules) - before)
        for name in lightning_turbo.__all__:
            getattr(lightning_turbo, name)
        import torch
        heavy = [m for m in ("nvidia.dali", "matplotlib", "sklearn", "nilearn", "apex", "skimage", "PIL.Image")
                 if m in set(sys.modules) - before]
        cuda = torch.cuda.is_initialized()
        print(json.dumps({"loaded": loaded, "heavy": heavy, "cuda": cuda}))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lightning_turbo", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    loaded = ["lightning_turbo", "lightning_turbo._lightning", "lightning_turbo.errors"]
    assert json.loads(done.stdout) == {"loaded": loaded, "heavy": [], "cuda": False}


def test_type_checkers_are_shown_where_each_name_is():
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    shown = {
        alias.asname: getattr(importlib.import_module(node.module), alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == {name: getattr(lightning_turbo, name) for name in lightning_turbo.__all__}


def test_a_package_names_what_is_public_of_its_modules():
    homes = {name: home.split(".")[0] for names in lightning_turbo.PUBLIC.values() for name, home in names.items()}
    listing = ("callbacks", "datamodules", "nn", "optim", "plugins", "strategies")
    packages = {home: importlib.import_module(f"lightning_turbo.{home}").__all__ for home in listing}
    lacking = [
        f"{name} in {home}/__init__.py" for name, home in homes.items() if name not in packages.get(home, (name,))
    ]
    assert lacking == [], "import these there, and add them to its __all__"


# Public callbacks, plugins and strategies without a row in tests/registry.py, and their tests.
NOT_IN_THE_REGISTRY = {
    "ExactResume": "callbacks/test_exact_resume.py",
    "FusedOptimizers": "callbacks/test_fused_optimizers.py",
    "Preemption": "callbacks/test_preemption.py",
    "RealApexAMP": "plugins/test_real_apex.py",
    "lr_range": "callbacks/test_lr_range.py",
}


def test_every_technique_of_a_trainer_has_a_row_in_the_registry():
    """``tests/integration/test_pairs.py`` tests each pair of rows."""
    registry = (TESTS / "registry.py").read_text()
    homes = {name: home for names in lightning_turbo.PUBLIC.values() for name, home in names.items()}
    wanted = {name for name, home in homes.items() if home.startswith(("callbacks.", "plugins.", "strategies."))}
    lacking = {name for name in wanted if not re.search(rf"\blt\.{name}\b", registry)}
    assert lacking - {*NOT_IN_THE_REGISTRY} == set(), "add a row to TECHNIQUES in tests/registry.py"
    assert {*NOT_IN_THE_REGISTRY} <= lacking, "these have a row: remove them from NOT_IN_THE_REGISTRY"
    assert all((TESTS / path).exists() for path in NOT_IN_THE_REGISTRY.values())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        lightning_turbo.Nonsense


def test_each_name_is_offered_once_and_none_that_is_not_public():
    lightning_turbo.ApexGradScaler
    names = dir(lightning_turbo)
    assert len(names) == len(set(names))
    private = {name for name in names if not name.startswith("__") and name not in lightning_turbo.__all__}
    assert all((ROOT / name).is_dir() or (ROOT / f"{name}.py").exists() for name in private), private
