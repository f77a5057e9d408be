"""DropBiasBeforeNorm in a Trainer: before the optimizer is created, and with checkpoints."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_turbo import DropBiasBeforeNorm
from tests.convolutions import Net, fit
from tests.trainers import quiet_trainer


def test_biases_are_dropped_before_the_optimizer_is_created_and_the_checkpoint_loads_into_the_original(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.callbacks.drop_bias.rank_zero_info", said.append)
    callback = DropBiasBeforeNorm()
    trainer = fit(dropped := Net(lr=0.01), callback, max_epochs=1)
    fit(whole := Net(lr=0.01), max_epochs=1)
    trainer.test(dropped, verbose=False)  # this sets up the callback again
    assert callback.report.dropped == {"net.0": "net.1"}
    assert said == [f"DropBiasBeforeNorm: {callback.report}"]
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == 5
    # The bias shifts all activations before the norm, which changes the rounding.
    assert dropped.losses == pytest.approx(whole.losses, rel=1e-4)
    trainer.save_checkpoint("small.ckpt")
    original, x = Net.load_from_checkpoint("small.ckpt", weights_only=True).eval(), torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(original(x), dropped.eval()(x), rtol=1e-5, atol=1e-6)
    fit(again := Net(lr=0.01), DropBiasBeforeNorm(), path="small.ckpt", max_epochs=2)
    assert again.net[0].bias is None


def test_a_checkpoint_with_biases_is_loaded_before_they_are_dropped():
    trainer = fit(old := Net(), max_epochs=1)
    trainer.save_checkpoint("old.ckpt")
    expected = trainer.test(old, verbose=False)[0]["loss"]
    for callback in (DropBiasBeforeNorm(), DropBiasBeforeNorm("net")):
        with pytest.raises(RuntimeError, match="Load the checkpoint before drop_bias_before_norm"):
            quiet_trainer(callbacks=[DropBiasBeforeNorm()]).test(Net(), ckpt_path="old.ckpt", verbose=False)
        model = Net.load_from_checkpoint("old.ckpt", weights_only=True)
        got = quiet_trainer(callbacks=[callback]).test(model, verbose=False)[0]["loss"]
        assert model.net[0].bias is None
        assert got == pytest.approx(expected, rel=1e-4)


class Calls(LightningModule):
    """Has no forward, because the training step calls the network. It has several networks and one without norms."""

    def __init__(self, networks=1):
        super().__init__()
        self.head = nn.Linear(4, 2)
        for number in range(networks):
            setattr(self, f"net{number}", nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))


def test_drop_bias_traces_the_only_network_of_a_module_without_forward():
    callback = DropBiasBeforeNorm()
    callback.setup(quiet_trainer(), module := Calls(), "fit")
    assert module.net0[0].bias is None
    for networks, named in ((2, r"\['net0', 'net1'\]"), (0, r"\['head'\]")):
        with pytest.raises(
            ValueError, match=f"expected the name of a child, for example one of {named}, because Calls"
        ):
            DropBiasBeforeNorm().setup(quiet_trainer(), Calls(networks), "fit")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: DropBiasBeforeNorm(3), r"DropBiasBeforeNorm\(network\): expected a path .* got 3"),
    (lambda: DropBiasBeforeNorm("nets").setup(quiet_trainer(), Net(), "fit"), r"one of \['net'\], got 'nets'"),
])  # fmt: skip
def test_impossible_values_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
