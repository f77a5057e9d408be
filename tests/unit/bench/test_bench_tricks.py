"""The suite of the tricks where a package of one of its tasks is missing."""

import pytest

from lightning_turbo import _optional
from lightning_turbo.bench.meter import Meter
from lightning_turbo.bench.tricks import prepare, trick
from lightning_turbo.errors import MissingExtraError


@pytest.mark.parametrize(("absent", "prepared"), [({"nilearn"}, ["digits"]), ({"nilearn", "sklearn"}, [])])
def test_a_task_without_its_data_leaves_the_others_alone(absent, prepared, monkeypatch):
    there = _optional.installed
    monkeypatch.setattr(_optional, "installed", lambda module: module not in absent and there(module))
    meter = Meter(lambda event: {"order": "end"})
    assert {name.split()[0] for name in prepare(meter)} == set(prepared)
    with pytest.raises(MissingExtraError, match="needs the package nilearn"):
        trick(meter, task="mni")
