"""A run that skips every step ends with an error."""

import pytest
import torch

from lightning_turbo import ApexAMP, ApexGradScaler
from lightning_turbo.plugins import nonfinite
from lightning_turbo.plugins.nonfinite import NonFiniteError
from tests.plugins.classifier import Net, batches, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def fused(params):
    return torch.optim.SGD(params, lr=0.1, fused=True)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [None, fused], ids=["plain", "fused"])
def test_a_run_that_skips_every_step_ends_with_an_error(level, optimizer, monkeypatch):
    monkeypatch.setattr(nonfinite, "CHECK_EVERY", 4)
    module = Net(optimizer, poison=range(3, 8))  # of 8 steps in an epoch
    plugin = ApexAMP(level, dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0))
    said = r"The last 4 optimizer steps.* at global_step 7; the loss scale fell to 32\. .*detect_anomaly=True"
    with pytest.raises(NonFiniteError, match=said):
        trainer(plugin, max_epochs=2).fit(module, batches())


@pytest.mark.parametrize("poison", [[], [0, 1, 2], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
def test_a_run_with_a_step_in_each_interval_goes_on(poison, monkeypatch):
    monkeypatch.setattr(nonfinite, "CHECK_EVERY", 4)
    module = Net(poison=poison)
    plugin = ApexAMP("O1", dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0))
    trainer(plugin).fit(module, batches())
    assert len(module.losses) == 8
    assert plugin.scaler.skipped_steps == len(poison)
