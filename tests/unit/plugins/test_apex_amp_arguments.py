"""What ApexAMP refuses at construction, in words."""

import math
import pickle

import pytest
import torch
from torch import nn

from lightning_turbo import ApexAMP
from lightning_turbo.errors import AmpUsageError


@pytest.mark.parametrize(("level", "settings", "error", "text"), [
    ("01", {}, ValueError, "opt_level: expected 'O0', 'O1', 'O2' or 'O3' (the letter O and a digit), got '01'."),
    (1, {}, RuntimeError, "opt_level: expected 'O0', 'O1', 'O2' or 'O3' (the letter O and a digit), got 1."),
    ("O1", {"loss_scale": "fast"}, ValueError, "loss_scale: expected 'dynamic' or a finite number"),
    ("O1", {"loss_scale": 0}, ValueError, "loss_scale: expected"),
    ("O1", {"loss_scale": math.nan}, ValueError, "also as text, got nan."),
    ("O1", {"loss_scale": math.inf}, ValueError, "also as text, got inf."),
    ("O1", {"loss_scale": True}, ValueError, "also as text, got True."),
    ("O2", {"keep_batchnorm_fp32": "maybe"}, AssertionError, "expected True or False, also as text, got 'maybe'"),
    ("O1", {"keep_batchnorm_fp32": True}, ValueError, "keep_batchnorm_fp32=True contradicts O1"),
    ("O1", {"keep_batchnorm_fp32": "False"}, ValueError, "keep_batchnorm_fp32='False' contradicts O1"),
    ("O1", {"master_weights": True}, ValueError, "master_weights=True contradicts O1"),
    ("O2", {"master_weights": 1}, ValueError, "master_weights: expected True or False, got 1."),
    ("O1", {"cast_model_type": torch.float16}, ValueError, "cast_model_type=torch.float16 contradicts O1"),
    ("O2", {"cast_model_type": "half"}, TypeError, "a torch dtype, as torch.float16, got 'half'"),
    ("O2", {"cast_model_type": torch.int64}, ValueError, "cast_model_type: expected a floating dtype"),
    ("O2", {"cast_model_type": torch.float16, "dtype": torch.bfloat16}, ValueError, "expected torch.bfloat16"),
    ("O1", {"dtype": torch.float32}, ValueError, "dtype: expected torch.float16 or torch.bfloat16"),
    ("O1", {"dtype": "fp16"}, TypeError, "dtype: expected a torch dtype"),
    ("O1", {"min_loss_scale": 0.0}, ValueError, "min_loss_scale: expected a finite number above zero, got 0.0."),
    ("O1", {"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "expected at most max_loss_scale=4.0, got 8.0."),
    ("O1", {"max_loss_scale": None}, ValueError, "max_loss_scale: expected a finite number above zero, got None."),
    ("O1", {"scale_window": 0}, ValueError, "scale_window: expected a whole number from 1 on, got 0."),
    ("O1", {"num_losses": 0}, ValueError, "num_losses: expected a whole number from 1 on, got 0."),
    ("O1", {"cast_lists": "mine"}, ValueError, "cast_lists: expected 'apex' (apex's lists of functions) or 'torch'"),
    ("O1", {"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips: expected a whole number"),
    ("O1", {"max_consecutive_skips": "many"}, ValueError, "from 1 on, got 'many'."),
    ("O2", {"exact_masters": None}, TypeError, "exact_masters=None"),
    ("O1", {"log_scale": 1, "backend": "apex"}, TypeError, "log_scale=1"),
])  # fmt: skip
def test_refused_in_words(level, settings, error, text):
    with pytest.raises(error) as caught:
        ApexAMP(level, **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize(("level", "settings", "scale"), [
    ("O1", {"dtype": torch.float16}, 65536.0),
    ("O1", {"dtype": torch.bfloat16}, 1.0),
    ("O1", {"dtype": torch.float16, "min_loss_scale": 0.25, "max_loss_scale": 0.5}, 0.5),
    ("O2", {"dtype": torch.bfloat16}, 1.0),
    ("O2", {"cast_model_type": torch.float16}, 65536.0),  # on any device
    ("O0", {}, 1.0),
    ("O2", {"keep_batchnorm_fp32": "False", "dtype": torch.float16, "max_loss_scale": 1024.0}, 1024.0),
])  # fmt: skip
def test_accepted(level, settings, scale):
    assert ApexAMP(level, **settings).loss_scale == scale


@pytest.mark.parametrize(("level", "settings"), [
    ("O0", {}), ("O1", {"dtype": torch.float16}), ("O1", {"cast_lists": "apex"}), ("O2", {}), ("O3", {}),
])  # fmt: skip
def test_a_pickled_plugin_is_another_that_does_the_same(level, settings):
    plugin = ApexAMP(level, cast_cache=True, **settings)
    other = pickle.loads(pickle.dumps(plugin))
    assert other.opt_level == level
    assert other.half_dtype is plugin.half_dtype
    dtypes = []
    for casts in (plugin.forward_context(), other.forward_context()):
        with casts:
            half = torch.ones(2, 2) @ torch.ones(2, 2)
            dtypes.append((half.dtype, torch.exp(half).dtype, nn.functional.gelu(half).dtype))
    assert dtypes[0] == dtypes[1]


def test_a_loop_without_a_trainer_is_sent_to_amp():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        AmpUsageError, match=r"expected a LightningModule that a Trainer trains, got a Linear.*lightning_turbo\.amp"
    ):
        ApexAMP("O1").backward(model(torch.ones(1, 2)).sum(), model, None)
