"""Differences between the supported versions of Lightning."""

import inspect

import pytest
from lightning.pytorch import Trainer

KNOWS_WEIGHTS_ONLY = "weights_only" in inspect.signature(Trainer.fit).parameters

# Before 2.6, the steps of the learning rate finder shorten the run.
FINDS_RATES = pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning's learning rate finder shortens the run")

# Before 2.6, the epoch after an end-of-epoch checkpoint starts twice, which advances a generator of the loader.
BEGINS_ONCE = pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning starts the epoch twice")


# A candidate of tune that uses the turbo strategy.
TURBO_CANDIDATE = "lean" if KNOWS_WEIGHTS_ONLY else "device-prefetch"


def unpickling(weights_only):
    """Return ``weights_only`` as an argument of ``Trainer.fit``, which has it since 2.6."""
    return {"weights_only": weights_only} if KNOWS_WEIGHTS_ONLY else {}
