"""What adapters read from a Trainer; open accumulation windows: integration/test_resume_steps.py."""

import math
from types import SimpleNamespace

import pytest

from lightning_turbo._trainer import batch_limit


@pytest.mark.parametrize(("function", "status", "loader", "limit"), [
    ("fit", "running", "train", 3), ("fit", "running", "val", 2), ("test", "running", "test", 4),
    ("fit", "running", "test", math.inf), ("fit", "running", "somebody's", math.inf),
    ("fit", "finished", "train", math.inf),
])  # fmt: skip
def test_a_limit_is_that_of_the_loops_that_run(function, status, loader, limit):
    def loop(*limits, **others):
        names = list(others.pop("loaders"))
        return SimpleNamespace(_combined_loader=SimpleNamespace(flattened=names, limits=list(limits)), **others)

    val = loop(2, loaders=["val"])
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn=SimpleNamespace(value=function), status=SimpleNamespace(value=status)),
        fit_loop=loop(3, loaders=["train"], epoch_loop=SimpleNamespace(val_loop=val)),
        validate_loop=SimpleNamespace(_combined_loader=None),
        test_loop=loop(4, loaders=["test"]),
        predict_loop=loop(loaders=[]),
    )
    assert batch_limit(trainer, loader) == limit
