"""Every two techniques together, at O0 to O3: they run, and those that promise the same bits keep them."""

import functools
import itertools
import math

import lightning.pytorch as pl
import pytest

from tests.registry import BY_NAME, TECHNIQUES, run

LEVELS = ("O0", "O1", "O2", "O3")
PAIRS = list(itertools.combinations(BY_NAME, 2))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.TurboWarning"),
]


@functools.cache
def losses(level, names):
    """The losses of two epochs' batches, and what was logged of the second."""
    trainer, model = run(pl, level, [BY_NAME[name] for name in names])
    return [*model.losses, float(trainer.callback_metrics["loss"])]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_two_techniques_run_together(pair, capsys):
    changing = tuple(name for name in pair if not BY_NAME[name].same_bits)
    for level in LEVELS:
        together = losses(level, pair)
        assert len(together) == 11
        assert all(math.isfinite(loss) for loss in together)
        assert together[-1] < together[0], level
        # What promises the same bits keeps them, next to whatever else.
        assert together == losses(level, changing), level


def test_all_techniques_run_together(capsys):
    for level in LEVELS:
        _, model = run(pl, level, TECHNIQUES)
        assert len(model.losses) == 10
        assert all(math.isfinite(loss) for loss in model.losses)
