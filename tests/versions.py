"""What the supported versions of Lightning are called with in different ways."""

import inspect

import pytest
from lightning.pytorch import Trainer

KNOWS_WEIGHTS_ONLY = "weights_only" in inspect.signature(Trainer.fit).parameters

# Before 2.6 a run is shorter by the steps that the learning rate finder tried.
FINDS_RATES = pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning's learning rate finder shortens the run")

# Before 2.6 the epoch after a checkpoint of a whole one begins twice, and a generator of the loader's own moves on.
BEGINS_ONCE = pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning begins that epoch twice")


# A candidate of tune that takes the turbo strategy.
TURBO_CANDIDATE = "lean" if KNOWS_WEIGHTS_ONLY else "device-prefetch"


def unpickling(weights_only):
    """Arguments of ``Trainer.fit`` that say what a checkpoint may hold; before 2.6, anything, and there are none."""
    return {"weights_only": weights_only} if KNOWS_WEIGHTS_ONLY else {}
