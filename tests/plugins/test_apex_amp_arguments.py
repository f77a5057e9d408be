"""Arguments that ApexAMP refuses at construction, with an explanation."""

import pytest
import torch

from lightning_turbo import ApexAMP, ApexGradScaler
from lightning_turbo.errors import AmpUsageError


@pytest.mark.parametrize(("level", "settings", "error", "text"), [
    ("O1", {"dtype": torch.float32}, ValueError, "dtype: expected torch.float16 or torch.bfloat16"),
    ("O1", {"dtype": "fp7"}, TypeError, "dtype: expected a torch dtype or its name, such as 'bfloat16', got 'fp7'."),
    ("O1", {"dtype": 16}, TypeError, "dtype: expected a torch dtype"),
    ("O2", {"cast_model_outputs": "fp7"}, TypeError, "cast_model_outputs: expected a torch dtype or its name"),
    ("O1", {"scaler": torch.amp.GradScaler("cpu")}, TypeError, "scaler: expected an ApexGradScaler or None, got"),
    ("O1", {"scaler": ApexGradScaler(), "loss_scale": 8.0}, ValueError, "expected None beside a scaler, got 8.0."),
    ("O1", {"keep_fp32_modules": ["net"]}, ValueError, "contradicts O1, which casts no module"),
])  # fmt: skip
def test_invalid_apex_amp_arguments_are_refused_with_an_explanation(level, settings, error, text):
    with pytest.raises(error) as caught:
        ApexAMP(level, **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize(("level", "settings", "scale"), [
    ("O1", {"dtype": torch.float16}, 65536.0),
    ("O1", {"dtype": torch.bfloat16}, 1.0),
    ("O1", {"dtype": "float16"}, 65536.0),
    ("O1", {"dtype": "bf16"}, 1.0),
    ("O2", {"dtype": "torch.float16", "loss_scale": "128.0"}, 128.0),
    ("O1", {"dtype": "fp16", "scaler": ApexGradScaler(min_scale=0.25, max_scale=0.5)}, 0.5),
    ("O1", {"dtype": "bf16", "scaler": ApexGradScaler(8.0)}, 8.0),
    ("O2", {"dtype": torch.bfloat16}, 1.0),
    ("O0", {}, 1.0),
])  # fmt: skip
def test_valid_apex_amp_arguments_are_accepted(level, settings, scale):
    assert ApexAMP(level, **settings).loss_scale == scale


def test_using_apex_amp_without_a_trainer_points_to_amp():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        AmpUsageError, match=r"expected a LightningModule under a Trainer, got a Linear.*lightning_turbo\.amp"
    ):
        ApexAMP("O1").backward(model(torch.ones(1, 2)).sum(), model, None)


@pytest.mark.parametrize(("settings", "said"), [
    ({"min_scale": 0.0}, "min_scale: expected a finite number above zero, got 0.0."),
    ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale: expected at most max_scale=4.0, got 8.0."),
    ({"max_scale": None}, "max_scale: expected a finite number above zero, got None."),
    ({"growth_interval": 0}, "growth_interval: expected an integer of 1 or more, got 0."),
    ({"loss_scale": -1.0}, "loss_scale: expected a finite number above zero, got -1.0."),
])  # fmt: skip
def test_invalid_loss_scale_limits_are_refused_with_an_explanation(settings, said):
    with pytest.raises(AmpUsageError) as caught:
        ApexGradScaler(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("scaler", [None, ApexGradScaler(4.0)], ids=["made", "given"])
def test_a_scaler_of_the_user_is_kept_on_any_device(scaler):
    plugin = ApexAMP("O1", dtype=torch.float16, **({} if scaler is None else {"scaler": scaler}))
    plugin._casts.device_type = "cuda"  # as if created on a machine with a device
    before = plugin.scaler
    plugin.convert_module(torch.nn.Linear(2, 2))
    assert plugin._casts.device_type == "cpu"
    assert (plugin.scaler is before) is (scaler is not None)


def test_validation_loads_no_scaler_state(monkeypatch):
    plugin = ApexAMP("O1", dtype=torch.float16)
    monkeypatch.setattr(plugin, "load_state_dict", None)  # not called
    network = torch.nn.Linear(2, 2)
    try:
        assert plugin.connect(network, [], []) == (network, [], [])
    finally:
        plugin.teardown()
