"""``apex.fp16_utils`` under this package's name: each name of it is an error that says what to take."""

import pytest

import lightning_turbo.fp16_utils


@pytest.mark.parametrize(("name", "said"), [
    ("FP16_Optimizer", r"lightning_turbo\.amp\.initialize"), ("network_to_half", "opt_level='O2'"),
    ("DynamicLossScaler", "ApexGradScaler"), ("to_python_float", r"tensor\.item\(\)"), ("other", "migration.md"),
])  # fmt: skip
def test_a_name_of_apex_fp16_utils_says_what_to_take(name, said):
    with pytest.raises(ImportError, match=rf"apex\.fp16_utils\.{name} is not part of this package\. .*{said}"):
        getattr(lightning_turbo.fp16_utils, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from lightning_turbo.fp16_utils import {name}")
