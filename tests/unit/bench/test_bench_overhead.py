"""The callbacks of the suite of overheads do their work in the steps that are measured."""

import warnings
from unittest.mock import MagicMock

import pytest

from lightning_turbo import PrefetchLoader
from lightning_turbo.bench.case import load_suite
from lightning_turbo.bench.meter import Meter
from lightning_turbo.bench.overhead import EPOCH, WINDOW
from lightning_turbo.callbacks import exact_accumulation
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.optim import LearningRateScaling

STEPS = 2 * EPOCH + 4


def measured(name):
    """Run a case for some steps; fail if a part of ours says that it changes nothing."""
    orders = iter([{"order": "round", "lead": 0, "steps": STEPS - 4}, {"order": "end"}])
    case = load_suite("overhead").cases[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "filterwarnings", lambda *args, **options: None)
            return case.run(Meter(lambda event: next(orders), warmup=4), **case.config)


@pytest.mark.parametrize(
    "name", ["GradToNone", "Doctor", "ExactAccumulation", "EffectiveBatchSize", "PrefetchNextEpoch"]
)
def test_no_callback_says_that_it_changes_nothing(name):
    assert measured(name)["loss"] > 0


def test_the_gradients_of_every_window_are_corrected(monkeypatch):
    corrected = MagicMock()
    monkeypatch.setattr(exact_accumulation, "scale_gradients", corrected)
    measured("ExactAccumulation, uneven batches")
    assert corrected.call_count == STEPS // WINDOW
    assert all(call.args[1] != 1.0 for call in corrected.call_args_list)


def test_the_warm_up_of_the_effective_batch_size_goes_on(monkeypatch):
    warmups = []
    init = LearningRateScaling.__init__

    def keep(self, *args, **options):
        warmups.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(LearningRateScaling, "__init__", keep)
    measured("EffectiveBatchSize")
    assert [warmup.done for warmup in warmups] == [STEPS // WINDOW]


def test_each_next_epoch_is_begun_early(monkeypatch):
    begun = []
    start = PrefetchLoader.start_next_epoch

    def count(self, *stages):
        begun.append(start(self, *stages))
        return begun[-1]

    monkeypatch.setattr(PrefetchLoader, "start_next_epoch", count)
    measured("PrefetchNextEpoch")
    assert begun == [True] * (STEPS // EPOCH)
