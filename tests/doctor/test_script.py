"""The process of an examined script."""

import os
import sys

from lightning_turbo.doctor import script


def test_a_script_may_replace_sys_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with script._add_callbacks(lambda: ["a callback"]):
        folder = sys.path[-1]
        assert script.make_callbacks() == ["a callback"]
        sys.path = others = ["elsewhere"]
    assert sys.path is others == ["elsewhere"]
    assert script.make_callbacks() == []
    assert not os.path.exists(folder)
