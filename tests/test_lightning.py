"""Both packages of Lightning are supported in any order of imports, and a mismatch raises an explanatory error."""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types

import pytest

import lightning_turbo
from lightning_turbo import ApexAMP, _lightning

FIT = """
from lightning_turbo import _lightning

trainer = pl.Trainer(accelerator="cpu", plugins=[lightning_turbo.ApexAMP("O2")], strategy="turbo", max_epochs=1,
                     callbacks=[lightning_turbo.GradToNone()], logger=False, limit_train_batches=3,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(BoringModel())
print("trained under", type(trainer).__module__.split(".trainer")[0], type(trainer.strategy).__name__)
print("names", len([getattr(_lightning, each) for each in _lightning.names_of_lightning()]))
"""
MISMATCH = """
import lightning_turbo
from lightning_turbo import ApexAMP
import pytorch_lightning
for call in (ApexAMP, lambda: lightning_turbo.bind_lightning("lightning"),
             lambda: lightning_turbo.bind_lightning("pytorch_lightning")):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(error)
"""


def run(code, *words, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120,
        env={**{k: v for k, v in os.environ.items() if k != "LIGHTNING_TURBO_LIGHTNING"}, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


# Each script of the short form runs in a fork of an interpreter that has imported what Lightning imports, which takes
# most of the time.
IN_FORKS = """
import gc, json, os, sys, tempfile
import torch, torch._dynamo, torch.utils.tensorboard, torchmetrics

gc.freeze()
children = []
for code in json.loads(sys.argv[1]):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        break
    children.append((child, out, err))
else:
    for child, *files in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([status, *(os.pread(file.fileno(), 2**20, 0).decode() for file in files)]))
    sys.exit()
exec(code, {"__name__": "__main__"})
"""


@functools.cache
def short_form():
    """Return the exit status and the output of each script of the short form."""
    scripts = {"comes second": served("pytorch_lightning"), "fails": probing("an import that fails"), "mixed": MIXED}
    status, out, err = run(IN_FORKS, json.dumps([*scripts.values()]))
    assert status == 0, err
    return dict(zip(scripts, map(json.loads, out.splitlines()), strict=True))


def served(name):
    """Return a script that trains with one package of Lightning."""
    first = "import lightning_turbo\n" if name == "pytorch_lightning" else ""
    imports = f"import {name} as pl\nfrom {name}.demos.boring_classes import BoringModel\nimport lightning_turbo"
    return first + imports + FIT


@pytest.mark.parametrize("name", [pytest.param("lightning.pytorch", marks=pytest.mark.slow), "pytorch_lightning"])
def test_both_packages_are_supported_in_any_order(name):
    status, out, err = short_form()["comes second"] if name == "pytorch_lightning" else run(served(name))
    assert status == 0, err
    assert f"trained under {name} TurboStrategy" in out
    assert f"names {len(_lightning.names_of_lightning())}" in out


def check_mismatch(refused, unknown, bound):
    assert "ApexAMP is built on lightning.pytorch, because no Lightning was imported before it" in refused
    assert "this program uses pytorch_lightning" in refused
    assert "lightning_turbo.bind_lightning('pytorch_lightning')" in refused
    assert "expected 'lightning.pytorch' or 'pytorch_lightning', got 'lightning'." in unknown
    assert "lightning_turbo is already bound to lightning.pytorch, because no Lightning was" in bound


def test_a_mismatch_is_explained(monkeypatch):
    """A program imports this package first, which binds one Lightning, and then imports the other one."""
    for name, value in (("_bound", None), ("_reason", ""), ("_guessed", False)):
        monkeypatch.setattr(_lightning, name, value)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "lightning.pytorch")
        patch.delenv(_lightning.VARIABLE, raising=False)
        assert _lightning.bound_name() == "lightning.pytorch"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", types.ModuleType("pytorch_lightning"))
    with pytest.raises(TypeError) as refused:
        ApexAMP()
    with pytest.raises(ValueError, match="expected") as unknown:
        lightning_turbo.bind_lightning("lightning")
    with pytest.raises(TypeError) as bound:
        lightning_turbo.bind_lightning("pytorch_lightning")
    check_mismatch(*(str(error.value) for error in (refused, unknown, bound)))


@pytest.mark.slow
def test_a_mismatch_of_two_copies_is_explained():
    status, out, err = run(MISMATCH)
    assert status == 0, err
    check_mismatch(*out.splitlines())


@pytest.mark.slow
def test_a_binding_by_hand_or_by_the_environment_ends_a_mismatch():
    code = "import lightning_turbo\n{}\nfrom lightning_turbo import ApexAMP\nprint(ApexAMP.__mro__[1].__module__)"
    call = "lightning_turbo.bind_lightning('pytorch_lightning')"
    for line, environment in ((call, {}), ("", {"LIGHTNING_TURBO_LIGHTNING": "pytorch_lightning"})):
        _, out, err = run(code.format(line), **environment)
        assert "pytorch_lightning.plugins.precision.precision" in out, err


PROBES = {
    "an import that fails": (
        "try:\n    import pytorch_lightning as pl\nexcept ImportError:\n    import lightning.pytorch as pl"
    ),
    "a look for it": (
        "import importlib.util\nimportlib.util.find_spec('pytorch_lightning')\nimport lightning.pytorch as pl"
    ),
}
HIDE = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] == "pytorch_lightning" else find(name, *more)
"""


def probing(name):
    hide = HIDE if name == "an import that fails" else ""
    make = "print(type(pl.Trainer(accelerator='cpu', strategy='turbo', logger=False).strategy).__module__)"
    return f"{hide}\nimport lightning_turbo\n{PROBES[name]}\n{make}"


@pytest.mark.parametrize("name", [pytest.param("a look for it", marks=pytest.mark.slow), "an import that fails"])
def test_strategies_are_registered_after_any_successful_import(name):
    status, out, err = run(probing(name)) if name == "a look for it" else short_form()["fails"]
    assert (status, out) == (0, "lightning_turbo.strategies.turbo\n"), err


MIXED = """
from lightning.pytorch.callbacks import ModelCheckpoint
import pytorch_lightning as pl
from lightning_turbo import ApexAMP, AtomicCheckpointIO, TurboStrategy
for settings in ({"plugins": [ApexAMP("O1")]}, {"plugins": AtomicCheckpointIO()}, {"strategy": "turbo"},
                 {"strategy": TurboStrategy()}):
    try:
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)
    except Exception as error:
        print(repr(error))
"""


def test_a_script_that_mixes_both_packages_gets_an_error_that_names_both():
    status, out, err = short_form()["mixed"]
    assert status == 0, err
    assert len(out.splitlines()) == 4
    for line in out.splitlines():
        assert "is built on lightning.pytorch, because the program imported it first" in line
        assert "LIGHTNING_TURBO_LIGHTNING=pytorch_lightning" in line


def test_the_package_whose_trainer_requests_a_strategy_is_bound(monkeypatch):
    for name, value in (("_bound", None), ("_reason", "")):
        monkeypatch.setattr(_lightning, name, value)
    monkeypatch.delenv(_lightning.VARIABLE, raising=False)
    assert _lightning._make_for("pytorch_lightning", "turbo", lambda: _lightning.bound_name()) == "pytorch_lightning"
    with pytest.raises(
        _lightning.LightningMismatchError, match=r"strategy='turbo' is built on pytorch_lightning, because its"
    ):
        _lightning._make_for("lightning.pytorch", "turbo", lambda: None)


def find_no_spec(name, *more):
    return None


@contextlib.contextmanager
def unbound(variable):
    """As in a program that has bound no copy yet, with this value of the environment variable."""
    with pytest.MonkeyPatch.context() as patch:
        for attribute, value in (("_bound", None), ("_reason", ""), ("_guessed", False)):
            patch.setattr(_lightning, attribute, value)
        patch.delenv(_lightning.VARIABLE, raising=False)
        if variable is not None:
            patch.setenv(_lightning.VARIABLE, variable)
        yield patch


@pytest.mark.parametrize(("variable", "bind", "installed", "name", "reason"), [
    ("pytorch_lightning", None, True, "pytorch_lightning", "LIGHTNING_TURBO_LIGHTNING says so"),
    (None, None, False, "pytorch_lightning", "it is the only one installed"),
    (None, None, True, "lightning.pytorch", "no Lightning was imported before it"),
    (None, "pytorch_lightning", True, "pytorch_lightning", "bind_lightning was called"),
    ("lightning.pytorch", "pytorch_lightning", True, "pytorch_lightning", "bind_lightning was called"),
], ids=["variable", "only one", "neither", "by hand", "by hand against the variable"])  # fmt: skip
def test_what_binds_a_copy_before_one_is_imported(variable, bind, installed, name, reason):
    with unbound(variable) as patch:
        patch.setattr(_lightning, "_loaded", list)
        if not installed:
            patch.setattr("importlib.util.find_spec", find_no_spec)
        if bind is not None:
            lightning_turbo.bind_lightning(bind)
        assert _lightning.bound_name() == name
        assert reason in _lightning._reason
        assert _lightning._guessed is (reason == "no Lightning was imported before it")


RAYS = "ray.train.lightning._lightning_utils"


@pytest.mark.parametrize(("imported", "name", "is_guess"), [
    ((RAYS, "lightning.pytorch", "pytorch_lightning"), "pytorch_lightning", False),
    (("pytorch_lightning", RAYS, "lightning.pytorch"), "pytorch_lightning", False),
    ((RAYS, "lightning.pytorch"), "lightning.pytorch", True),
    (("lightning.pytorch", RAYS), "lightning.pytorch", False),
    (("lightning.pytorch", RAYS, "pytorch_lightning"), "lightning.pytorch", False),
])  # fmt: skip
def test_what_ray_imports_binds_no_copy(imported, name, is_guess):
    """``ray.train.lightning`` imports lightning.pytorch wherever it is installed (ray issue 47089)."""
    with unbound(None) as patch:
        patch.setattr(_lightning, "sys", types.SimpleNamespace(modules=dict.fromkeys(imported)))
        assert _lightning.bound_name() == name
        assert _lightning._guessed is is_guess


def test_a_misspelt_variable_is_refused():
    with unbound("lightning"), pytest.raises(ValueError, match=r"or 'pytorch_lightning', got 'lightning'\."):
        _lightning.bound_name()


def test_each_copy_is_heard_of_when_its_trainer_is_imported(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(_lightning, "_loaded", lambda: ["lightning.pytorch"])
    _lightning.when_lightning_is_imported(calls.append)
    assert calls == ["lightning.pytorch"]
    for name in ("pytorch_lightning", "another._graveyard", "json"):
        importlib.util.find_spec(name) if name == "json" else sys.meta_path[0].find_spec(name)
    assert calls == ["lightning.pytorch"]
    assert sys.meta_path[0].find_spec("pytorch_lightning._graveyard") is None
    assert calls == ["lightning.pytorch", "pytorch_lightning"]
