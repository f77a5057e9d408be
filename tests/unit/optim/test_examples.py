"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest

MODULES = """
optim.accumulation optim.cyclic optim.gradient_release optim.layerwise optim.lr_range optim.lr_scaling optim.preview
nn.bias nn.compile nn.memory_format
callbacks.drop_bias callbacks.effective_batch_size callbacks.exact_accumulation callbacks.grad_to_none
callbacks.memory_format
""".split()


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"lightning_turbo.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
