"""What the demo refuses, before anything heavy is imported."""

import pytest

from lightning_turbo.demo import DemoError, DemoSettings


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"levels": ("01",)}, DemoError, r"levels: expected some of O0, O1, O2, O3 \(letter O, not zero\), .* got '01'"),
    ({"levels": ("O1", "O4")}, DemoError, "levels: expected some of O0, O1, O2, O3, each at most once.* got 'O1,O4'"),
    ({"levels": ("O1", "O1")}, DemoError, "levels: .* each at most once"),
    ({"levels": ()}, DemoError, "levels: .* got ''"),
    ({"epochs": 0}, DemoError, "epochs: expected an integer from 1 to 1000000, got 0"),
    ({"seed": 2**32}, DemoError, "seed: expected an integer from 0 to 4294967295, got 4294967296"),
    ({"tune_seconds": -1}, DemoError, "tune_seconds: expected a number from 0 on, got -1"),
    ({"device": "cuda:x"}, DemoError, "device: expected auto, cpu, cuda or cuda:<index>, got 'cuda:x'"),
    ({"epochs": True}, TypeError, "epochs: expected an integer"),
    ({"seed": "1"}, TypeError, "seed: expected an integer"),
    ({"tune_seconds": "1"}, TypeError, "tune_seconds: expected a number"),
])  # fmt: skip
def test_wrong_values_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        DemoSettings(**wrong)
