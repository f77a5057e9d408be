"""Template of a new technique and its tests. Copy its four parts to the files named below, and replace the example.

It is complete: ``python -m pytest tests/_template_technique.py`` runs it. The example is decoupled weight decay, with a
function for any training loop and a callback that calls it. Every technique needs each of these tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_turbo._checks import expect
from lightning_turbo._lightning import Callback, LightningModule, check_binding
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows
from tests.integration.recording import Save
from tests.trainers import quiet_trainer
from tests.versions import unpickling

# lightning_turbo/optim/shrink.py: only needs torch, for any loop. It has a docstring and __all__ = ["shrink_weights"].


def shrink_weights(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply weights by a factor, in place.

    Args:
        parameters: The weights.
        factor: Factor, above 0 and at most 1.

    Raises:
        ValueError: If ``factor`` is out of range.
    """
    expect(0 < factor <= 1, "factor", factor, "a number above 0 and at most 1")
    with torch.no_grad():
        torch._foreach_mul_(list(parameters), factor)


# lightning_turbo/callbacks/shrink.py: __all__ = ["Shrink"], which is also listed in callbacks/__init__.py and PUBLIC.
# Import names of Lightning from ``_lightning``, which supports both packages of Lightning.


class Shrink(Callback):
    """Multiply the weights by a factor after each optimizer step.

    Args:
        factor: Factor, above 0 and at most 1.

    Raises:
        ValueError: If ``factor`` is out of range.

    Warns:
        NoEffectWarning: If ``factor`` is 1.
    """

    def __init__(self, factor: float) -> None:
        check_binding("Shrink")
        # Invalid arguments raise an error here, not during training.
        expect(0 < factor <= 1, "Shrink(factor)", factor, "a number above 0 and at most 1")
        self.factor = factor

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Warn if nothing changes."""
        if self.factor == 1:
            warnings.warn("Shrink(factor=1) changes no weight. Remove it.", NoEffectWarning, stacklevel=2)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Multiply the weights."""
        shrink_weights(pl_module.parameters(), self.factor)


# tests/optim/test_shrink.py: the function equals a naive loop.


def test_the_function_equals_a_naive_loop():
    parameters = [torch.randn(3, 2), torch.randn(5)]
    expected = [parameter * 0.9 for parameter in parameters]
    shrink_weights(parameters, 0.9)
    assert all(torch.equal(one, two) for one, two in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("factor", [0, -1, 1.5])
def test_impossible_factors_are_refused(factor):
    with pytest.raises(ValueError, match=r"factor.*: expected a number above 0 and at most 1, got"):
        shrink_weights([torch.ones(1)], factor)


# tests/callbacks/test_shrink.py: a run with the callback, also when it is stopped and resumed.


def row(index):
    return torch.full((4,), index / 8)


class Net(LightningModule):
    """A network that trains in milliseconds and records its batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*callbacks, path=None):
    net = Net()
    trainer = quiet_trainer(max_epochs=2, callbacks=list(callbacks))
    trainer.fit(net, DataLoader(Rows(8, row), 2), ckpt_path=path, **unpickling(True if path else None))
    return net


def test_a_trainer_with_the_callback_equals_a_plain_loop():
    net = Net()
    optimizer = net.configure_optimizers()
    for _ in range(2):
        for batch in DataLoader(Rows(8, row), 2):
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
            shrink_weights(net.parameters(), 0.9)
    assert torch.equal(fit(Shrink(0.9)).layer.weight, net.layer.weight)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = fit(Shrink(0.9), Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end"))
    rest = fit(Shrink(0.9), path=tmp_path / "at.ckpt")
    assert rest.seen == whole.seen[4:]
    assert torch.equal(rest.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("factor", [0, -1, 1.5])
def test_impossible_values_are_refused(factor):
    with pytest.raises(ValueError, match=r"Shrink.*factor.*: expected a number above 0 and at most 1, got"):
        Shrink(factor)


def test_a_factor_without_effect_warns():
    with pytest.warns(NoEffectWarning, match=r"changes no weight\. Remove it"):
        fit(Shrink(1))
