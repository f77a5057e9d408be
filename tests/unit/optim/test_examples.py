"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    *(f"optim.{name}" for name in ("accumulation", "cyclic", "gradient_release", "layerwise", "lr_range")),
    *("optim.lr_scaling", "optim.preview", "nn.bias", "nn.memory_format"),
    *(f"callbacks.{name}" for name in ("drop_bias", "effective_batch_size", "exact_accumulation")),
    *("callbacks.grad_to_none", "callbacks.memory_format"),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"lightning_turbo.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
