"""Whose line it is, and which line sets what."""

import importlib.util
import linecache
import sys
import textwrap

import pytest
import torch
from torch import nn

from lightning_turbo.doctor.source import Sources, kind_of

CODE = """
import sys

import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)


class Net(Base):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, 2)]
        self.net = nn.Sequential(
            nn.Linear(2, 2),
            nn.ReLU(),
            nn.Sequential(nn.Linear(2, 2)),
        )
        self.starred = nn.Sequential(*layers)
        self.kept = []

    def forward(self, x):
        self.kept.append(x)
        self.a, self.b = x, x
        self.table[0] = x
        return sys._getframe()

    def configure_optimizers(self):
        rate = 0.1
        return torch.optim.SGD(self.parameters(), lr=rate)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "own_code.py"
    path.write_text(textwrap.dedent(CODE))
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location("own_code", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_code", module)
    spec.loader.exec_module(module)
    return module


def line(site):
    return linecache.getline(site.file, site.line).strip()


def test_files_are_told_apart(module):
    assert kind_of(module.__file__) == "own"
    assert kind_of(textwrap.__file__) == "library"
    assert kind_of(pytest.__file__) == "library"
    assert kind_of(nn.__file__) == "library"
    assert kind_of(torch.optim.__file__) == "machinery"
    assert kind_of("/venv/lib/site-packages/x.py") == "own", "an unknown folder is the user's"
    assert kind_of("<string>") == "library"


def test_lightning_is_machinery_and_this_package_a_library():
    import lightning.pytorch

    import lightning_turbo.amp

    assert kind_of(lightning.pytorch.__file__) == "machinery"
    assert kind_of(lightning_turbo.amp.__file__) == "library"


def test_the_innermost_own_line_is_found(module):
    sources = Sources([module.Net()])
    module.Net.table = {}
    frame = module.Net()(1)
    site = sources.site(frame)
    assert (site.file, site.function) == (module.__file__, "forward")


def test_layers_are_found_where_they_are_made(module):
    net = module.Net()
    sources = Sources([net])
    for path in ("net.0", "net.2.0", "net.0.weight"):
        assert line(sources.layer(net, path)) == "self.net = nn.Sequential("
    assert line(sources.layer(net, "starred.0")) == "self.starred = nn.Sequential(*layers)"
    assert line(sources.layer(net, "stem.bias")) == "self.stem = nn.Linear(2, 2)"
    assert sources.layer(nn.Sequential(nn.Linear(1, 1)), "0") is None


def test_changes_of_an_attribute_are_found(module):
    sources = Sources([module.Net()])
    assert line(sources.change(module.Net, "kept")) == "self.kept.append(x)"
    assert line(sources.change(module.Net, "b")) == "self.a, self.b = x, x"
    assert line(sources.change(module.Net, "table")) == "self.table[0] = x"
    assert sources.change(module.Net, "net") is None
    assert sources.change(nn.Linear, "weight") is None


def test_an_object_may_have_any_name_in_its_methods(tmp_path, monkeypatch):
    (tmp_path / "named.py").write_text(
        textwrap.dedent("""
        from torch import nn

        class Net(nn.Module):
            def __init__(net):
                super().__init__()
                net.layer = nn.Linear(2, 2)
                net.kept = []

            def forward(this, /, x, *, self=None):
                self.kept = x
                this.kept.append(x)

            @staticmethod
            def helper(thing):
                thing.other = 1
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = importlib.import_module("named")
    sources = Sources([named.Net()])
    assert line(sources.layer(named.Net(), "layer.weight")) == "net.layer = nn.Linear(2, 2)"
    assert line(sources.change(named.Net, "kept")) == "this.kept.append(x)"
    assert sources.change(named.Net, "other") is None
    monkeypatch.delitem(sys.modules, "named")


def test_code_that_is_in_no_file_has_no_lines(module):
    names = {}
    exec("class Keep:\n    def keep(self):\n        self.kept = 1", names)
    sources = Sources([module.Net(), names["Keep"]()])
    assert sources.change(names["Keep"], "kept") is None
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1)))
    assert not sources.owns(type(traced)), "its code is made by torch"


def test_calls_are_found(module):
    sources = Sources([module.Net()])
    found = sources.call(module.Net, "configure_optimizers", "SGD")
    assert line(found) == "return torch.optim.SGD(self.parameters(), lr=rate)"
    assert line(sources.call(module.Net, "configure_optimizers", "Adam")) == "def configure_optimizers(self):"
    assert sources.call(module.Net, "train_dataloader", "DataLoader") is None
    assert sources.call(module.Net, "configure_optimizers_later", "SGD") is None
