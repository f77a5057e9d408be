"""``apex.fp16_utils`` under the name of this package: each of its names raises an error with the replacement."""

import pytest

import lightning_turbo.fp16_utils


@pytest.mark.parametrize(("name", "replacement"), [
    ("FP16_Optimizer", r"lightning_turbo\.amp\.initialize"), ("network_to_half", "opt_level='O2'"),
    ("DynamicLossScaler", "ApexGradScaler"), ("to_python_float", r"tensor\.item\(\)"), ("other", "migration.md"),
])  # fmt: skip
def test_a_name_of_apex_fp16_utils_raises_an_error_with_its_replacement(name, replacement):
    with pytest.raises(ImportError, match=rf"apex\.fp16_utils\.{name} is not part of this package\. .*{replacement}"):
        getattr(lightning_turbo.fp16_utils, name)
    with pytest.raises(ImportError, match=replacement):
        exec(f"from lightning_turbo.fp16_utils import {name}")
