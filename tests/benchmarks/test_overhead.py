"""The callbacks of the overhead suite do their work in the measured steps."""

import warnings

import pytest

from benchmarks.overhead import EPOCH
from benchmarks.suite import CaseTimer, load_suite
from lightning_turbo.errors import NoEffectWarning

STEPS = 2 * EPOCH + 4


@pytest.mark.parametrize("name", ["GradToNone", "Doctor", "ExactAccumulation, uneven batches", "EffectiveBatchSize"])
def test_no_callback_warns_that_it_has_no_effect(name):
    orders = iter([{"order": "round", "lead": 0, "steps": STEPS - 4}, {"order": "end"}])
    case = load_suite("overhead").known[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "filterwarnings", lambda *args, **options: None)
            assert case.run(CaseTimer(lambda event: next(orders), warmup=4), **case.config)["loss"] > 0
