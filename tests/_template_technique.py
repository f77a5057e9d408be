"""A new technique's test: copy this to ``tests/optim/test_NAME.py`` or where its module stands, and replace the toy.

It is complete as it is: ``python -m pytest tests/_template_technique.py`` runs it. Each of the five tests is one that a
technique has to have; the toy is decoupled weight decay, a function for any loop and a callback that wires it.
"""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows
from tests.integration.noting import Save
from tests.trainers import quiet_trainer
from tests.versions import unpickling

# The technique: in lightning_turbo, the function in `optim` (torch alone), the callback in `callbacks` (wires it).


def shrink(parameters, factor):
    """Multiply parameters by ``factor`` in place."""
    if not 0 < factor <= 1:
        raise ValueError(f"factor: expected a number above 0 and at most 1, got {factor!r}.")
    with torch.no_grad():
        torch._foreach_mul_(list(parameters), factor)


class Shrink(Callback):
    """Shrinks the weights after each optimizer step."""

    def __init__(self, factor):
        shrink([torch.zeros(1)], factor)  # refuses what it could not do, where it is made and not in the run
        self.factor = factor

    def on_train_start(self, trainer, pl_module):
        if self.factor == 1:
            warnings.warn("Shrink changes nothing with factor=1. Remove it.", NoEffectWarning, stacklevel=2)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shrink(pl_module.parameters(), self.factor)


# What every technique is tested for.


def row(index):
    return torch.full((4,), index / 8)


class Net(LightningModule):
    """Small enough that a fit takes milliseconds; notes its batches."""

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


def test_the_function_does_what_a_naive_loop_does():
    parameters = [torch.randn(3, 2), torch.randn(5)]
    expected = [parameter * 0.9 for parameter in parameters]
    shrink(parameters, 0.9)
    assert all(torch.equal(one, two) for one, two in zip(parameters, expected, strict=True))


def test_a_trainer_with_the_callback_does_what_a_plain_loop_does():
    net = Net()
    optimizer = net.configure_optimizers()
    for _ in range(2):
        for batch in DataLoader(Rows(8, row), 2):
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
            shrink(net.parameters(), 0.9)
    assert torch.equal(fit(Shrink(0.9)).layer.weight, net.layer.weight)


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    whole = fit(Shrink(0.9), Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end"))
    rest = fit(Shrink(0.9), path=tmp_path / "at.ckpt")
    assert rest.seen == whole.seen[4:]
    assert torch.equal(rest.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("factor", [0, -1, 1.5])
def test_impossible_values_are_refused(factor):
    with pytest.raises(ValueError, match="factor: expected a number above 0 and at most 1, got"):
        Shrink(factor)


def test_what_changes_nothing_says_so():
    with pytest.warns(NoEffectWarning, match="Shrink changes nothing with factor=1. Remove it."):
        fit(Shrink(1))
