"""What the supported versions of Lightning are called with in different ways."""

import inspect

from lightning.pytorch import Trainer

KNOWS_WEIGHTS_ONLY = "weights_only" in inspect.signature(Trainer.fit).parameters

LEAN_STEP = {"lean_step": True} if KNOWS_WEIGHTS_ONLY else {}  # both came with 2.6


def unpickling(weights_only):
    """Arguments of ``Trainer.fit`` that say what a checkpoint may hold; before 2.6, anything, and there are none."""
    return {"weights_only": weights_only} if KNOWS_WEIGHTS_ONLY else {}
