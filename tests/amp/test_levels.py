"""The properties of each level, and its overrides."""

import math

import pytest
import torch

from lightning_turbo.amp.levels import LEVELS, half_dtype_for, resolve

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize(("level", "weights", "patches", "norms", "masters", "scale"), [
    ("O0", torch.float32, False, None, False, 1.0), ("O1", None, True, None, None, "dynamic"),
    ("O2", "half", False, True, True, "dynamic"), ("O3", "half", False, False, False, 1.0),
])  # fmt: skip
def test_the_properties_of_a_level(level, weights, patches, norms, masters, scale, dtype):
    found = resolve(level, dtype=dtype)
    assert found.cast_model_type is (dtype if weights == "half" else weights)
    assert found.casts_to_half is (weights == "half")
    assert (found.patch_torch_functions, found.keep_batchnorm_fp32, found.master_weights) == (patches, norms, masters)
    assert found.loss_scale == (1.0 if dtype is BRAIN else scale)
    assert found == resolve(level, dtype=dtype, **dict.fromkeys(("loss_scale", "master_weights", "cast_model_type")))


@pytest.mark.parametrize(("level", "override", "name", "value"), [
    ("O2", {"loss_scale": "128.0"}, "loss_scale", 128.0), ("O1", {"loss_scale": 8}, "loss_scale", 8.0),
    ("O3", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
    ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
    ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
    ("O2", {"master_weights": False}, "master_weights", False),
    ("O1", {"patch_torch_functions": False}, "patch_torch_functions", False),
    ("O2", {"cast_model_outputs": HALF}, "cast_model_outputs", HALF),
    ("O2", {"cast_model_type": torch.float32}, "cast_model_type", torch.float32),
])  # fmt: skip
def test_an_override_of_a_level_is_accepted(level, override, name, value):
    assert getattr(resolve(level, dtype=HALF, **override), name) == value


@pytest.mark.parametrize(("level", "override", "error", "text"), [
    ("01", {}, ValueError, "opt_level: expected 'O0', 'O1', 'O2' or 'O3' (the letter O and a digit), got '01'."),
    ([], {}, ValueError, "opt_level: expected"),
    ("O1", {"loss_scale": "fast"}, ValueError, "loss_scale: expected 'dynamic' or a finite number"),
    ("O1", {"loss_scale": 0}, ValueError, "loss_scale: expected"),
    ("O1", {"loss_scale": math.nan}, ValueError, "also as a string, got nan."),
    ("O2", {"keep_batchnorm_fp32": "maybe"}, AssertionError, "expected True or False, also as a string, or no value"),
    ("O2", {"keep_batchnorm_fp32": "None"}, AssertionError, "or no value for the level's default, got 'None'."),
    ("O1", {"keep_batchnorm_fp32": True}, ValueError, "keep_batchnorm_fp32=True contradicts O1"),
    ("O1", {"master_weights": True}, ValueError, "master_weights=True contradicts O1"),
    ("O2", {"master_weights": 1}, ValueError, "master_weights: expected True or False, got 1."),
    ("O1", {"cast_model_type": HALF}, ValueError, "contradicts O1: its weights stay float32"),
    ("O2", {"cast_model_type": BRAIN}, ValueError, "as requested by dtype="),
    ("O2", {"cast_model_type": torch.int8}, ValueError, "expected a floating-point dtype"),
    ("O2", {"cast_model_outputs": "fp7"}, TypeError, "cast_model_outputs: expected a torch dtype"),
    ("O3", {"patch_torch_functions": True}, ValueError, "only O1 casts around functions"),
])  # fmt: skip
def test_an_invalid_override_is_refused_with_an_explanation(level, override, error, text):
    with pytest.raises(error) as caught:
        resolve(level, dtype=HALF, **override)
    assert text in str(caught.value)


def test_the_half_dtype_is_float16_only_on_cuda():
    assert [half_dtype_for(device) for device in ("cuda", "cpu", "mps")] == [HALF, BRAIN, BRAIN]
    assert [*LEVELS] == ["O0", "O1", "O2", "O3"]
