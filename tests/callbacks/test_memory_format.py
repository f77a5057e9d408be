"""MemoryFormat in a Trainer."""

import pytest
import torch
from torch import nn

from lightning_turbo import MemoryFormat
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn import set_memory_format
from tests.convolutions import Net, fit


@pytest.mark.parametrize("make", [
    MemoryFormat, lambda: MemoryFormat(torch.channels_last),
], ids=["name", "torch's object"])  # fmt: skip
def test_the_memory_format_applies_to_the_trained_weights(make):
    fit(model := Net(lr=0.01), make(), max_epochs=1)
    assert model.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    fit(plain := Net(lr=0.01), MemoryFormat("contiguous"), max_epochs=1)
    assert plain.net[0].weight.is_contiguous()
    assert model.losses == pytest.approx(plain.losses, rel=1e-4)


def test_memory_format_warns_without_convolutions():
    class Flat(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 1))

    class Later(Flat):
        def configure_model(self):
            self.net = Net().net
            set_memory_format(self, "channels_last")

    with pytest.warns(NoEffectWarning, match="Flat has no 2D or 3D layers"):
        fit(Flat(), MemoryFormat("channels_last"), max_epochs=1)
    with pytest.warns(NoEffectWarning, match="Later creates its layers in configure_model, after setup. Call"):
        fit(model := Later(), MemoryFormat("channels_last"), max_epochs=1)
    assert model.net[0].weight.is_contiguous(memory_format=torch.channels_last)
