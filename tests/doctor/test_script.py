"""The process of an examined script, and its other ranks."""

import json
import os
import sys

from lightning_turbo import Doctor
from lightning_turbo.doctor import script


def test_other_ranks_of_an_examined_script_have_a_doctor_with_the_same_steps(monkeypatch):
    assert script.make_callbacks() == []
    with monkeypatch.context() as patch:
        patch.setenv(script.RANKS, json.dumps({"warmup": 2, "timed": 3, "watched": 4}))
        assert script.make_callbacks() == [], "rank 0 has its own"
        patch.setenv("LOCAL_RANK", "1")
        (doctor,) = script.make_callbacks()
    assert type(doctor) is Doctor
    assert (doctor.plan.warmup, doctor.plan.timed, doctor.plan.watched) == (2, 3, 4)


def test_a_script_may_replace_sys_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = os.environ.get("PYTHONPATH")
    with script._add_callbacks(lambda: ["a callback"]):
        folder = sys.path[-1]
        assert folder in os.environ["PYTHONPATH"].split(os.pathsep)
        assert script.make_callbacks() == ["a callback"]
        sys.path = others = ["elsewhere"]
    assert sys.path is others == ["elsewhere"]
    assert (os.environ.get("PYTHONPATH"), script.make_callbacks()) == (before, [])
    assert not os.path.exists(folder)
