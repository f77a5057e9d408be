"""The examples in the docstrings run and print the shown output."""

import doctest
import importlib

import pytest

OPTIM = ("accumulation", "cyclic", "layerwise", "lr_range", "lr_scaling", "param_groups")
CALLBACKS = ("drop_bias", "effective_batch_size", "exact_accumulation", "grad_to_none", "memory_format")
MODULES = [
    *(f"optim.{name}" for name in OPTIM), *(f"callbacks.{name}" for name in CALLBACKS),
    *("nn.bias", "nn.compile", "nn.memory_format"),
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"lightning_turbo.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
