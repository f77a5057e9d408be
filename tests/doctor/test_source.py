"""Who owns a line, and which line creates, changes or sets something."""

import sys
import types

import pytest
import torch
from torch import nn

from lightning_turbo.doctor.facts import Site
from lightning_turbo.doctor.source import Sources, _find_setting

INSTALLED = "/environment/site-packages/some_package/model.py"
OWN = "/nowhere/train.py"


def defined(file, source, **given):
    """Return the names that this source defines, as if it were in the file."""
    names = {"__name__": "of_test", **given}
    exec(compile(source, file, "exec"), names)
    return names


def test_a_line_of_the_library_that_defines_the_model_counts_without_a_user_line_on_the_stack():
    inner = defined(INSTALLED, "class Model:\n  def step(self):\n    return frame()\n", frame=sys._getframe)
    model = inner["Model"]()
    frame = model.step()
    frame = types.SimpleNamespace(f_code=frame.f_code, f_lineno=3, f_back=None)
    site = Sources([model]).site(frame)
    assert (site.file, site.line, site.function) == (INSTALLED, 3, "step")
    assert Sources([]).site(frame) is None, "a line of another library is not reported"
    own = types.SimpleNamespace(f_code=compile("", OWN, "exec"), f_lineno=7, f_back=None)
    frame.f_back = own
    assert Sources([model]).site(frame).file == OWN, "the user can change it"


def test_a_stack_with_only_library_frames_belongs_to_the_library():
    code = compile("", torch.distributions.normal.__file__, "exec")
    frame = types.SimpleNamespace(f_code=code, f_globals={"__name__": "torch.distributions.normal"}, f_back=None)
    assert Sources([]).library(frame) == "torch.distributions"
    assert Sources([]).library(None) == ""


@pytest.mark.parametrize(("source", "line"), [
    ("x = 1\nTrainer(option=True)", 2),
    ("x = 1\nTrainer(**{'option': flag})", 2),
    ("torch.autograd.set_option(True)", 1),
    ("x = 1\n\nwith set_option(mode=on):\n    pass", 3),
    ("Trainer(option=False)\nset_option(False)\nTrainer(option=1)", 3),
    ("Trainer(option=False)", 0),
    ("# Trainer(option=True)", 0),
    ("def train(option: bool = False):\n    return Trainer(option=option)", 2),
    ("from torch.autograd import set_option\nset_option(True)", 2),
])  # fmt: skip
def test_the_line_that_sets_an_option_is_found(source, line):
    assert _find_setting(source, "(set_)?option") == line


def test_an_option_that_no_user_file_sets_has_no_line():
    assert Sources([]).setting("no_argument_" + "of_anything") is None


def test_an_option_that_several_files_set_has_a_line_only_where_one_of_them_calls_fit(tmp_path, monkeypatch):
    option = "an_option_" + "of_mine"
    files = [tmp_path / f"{name}.py" for name in "ab"]
    for file in files:
        file.write_text(f"{option} = True\n")
        monkeypatch.setitem(sys.modules, f"program_{file.stem}", types.SimpleNamespace(__file__=str(file)))
    fit = Site(file=str(files[1]), line=7)
    assert Sources([]).setting(option) is None
    assert Sources([]).setting(option, fit) == Site(file=fit.file, line=1)
    monkeypatch.delitem(sys.modules, "program_b")
    assert Sources([]).setting(option).file == str(files[0])


def test_code_without_a_file_has_no_line():
    made = defined(OWN, "class Net(Module):\n  def __init__(self):\n    super().__init__()\n    self.kept = []\n"
                   "  def forward(self, x):\n    self.kept.append(x)\n", Module=nn.Module)  # fmt: skip
    cls = made["Net"]
    sources = Sources([])
    assert sources.owns(cls)
    assert sources.change(cls, "kept") is None
    assert sources.layer(cls(), "kept") is None
    assert sources.call(cls, "forward", "append") is None
