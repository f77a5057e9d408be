"""What "turbo_ddp" has beyond "turbo"; two ranks are in tests/integration/test_ranks.py and test_preemption.py."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_turbo import ExactResume, Preemption, TurboDDPStrategy
from lightning_turbo.callbacks.preemption import attach_preemption
from tests.registry import make_model


def net():
    return make_model(pl)


def connected(strategy, **settings):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, **settings)
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(net())
    trainer.lightning_module.trainer = trainer
    return trainer


@pytest.mark.parametrize("own", [[], [Preemption(time_limit=60)]])
def test_preemption_is_added_for_sigterm_unless_present(own):
    trainer = connected(TurboDDPStrategy(), callbacks=list(own))
    attach_preemption(trainer)
    (found,) = [callback for callback in trainer.callbacks if isinstance(callback, Preemption)]
    assert found is own[0] if own else found._signals == [15]


def test_preemption_can_be_disabled():
    with pytest.raises(TypeError, match="preemption=1: expected True or False"):
        TurboDDPStrategy(preemption=1)
    assert TurboDDPStrategy(preemption=False).preemption is False


@pytest.mark.parametrize("preemption", [True, False])
def test_a_strategy_adds_its_callbacks_as_it_sets_up_the_ranks(preemption, monkeypatch):
    monkeypatch.setattr(pl.strategies.DDPStrategy, "setup_environment", lambda self: None)  # no ranks are needed
    trainer = connected(TurboDDPStrategy(preemption=preemption))
    trainer.strategy.setup_environment()
    kinds = [type(callback) for callback in trainer.callbacks]
    assert ExactResume in kinds
    assert (Preemption in kinds) is preemption
