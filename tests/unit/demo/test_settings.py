"""What the demo refuses, before anything heavy is imported."""

import pytest

from lightning_turbo.demo import DemoError, DemoSettings


def test_defaults():
    settings = DemoSettings()
    assert settings.levels is settings.epochs is settings.data is settings.seed is None
    assert (settings.device, str(settings.out), settings.resume) == ("auto", "runs/demo", False)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"levels": ("01",)}, r"levels: expected some of O0, O1, O2, O3 \(letter O, not zero\), .* got '01'"),
    ({"levels": ("O1", "O4")}, "levels: expected some of O0, O1, O2, O3, each at most once.* got 'O1,O4'"),
    ({"levels": ("O1", "O1")}, "levels: .* each at most once"),
    ({"levels": ()}, "levels: .* got ''"),
    ({"epochs": 0}, "epochs: expected an integer from 1 to 1000000, got 0"),
    ({"seed": -1}, "seed: expected an integer from 0 to 4294967295, got -1"),
    ({"seed": 2**32}, "seed: .* got 4294967296"),
    ({"data": "cifar"}, "data: expected digits or mni, got 'cifar'"),
    ({"device": "cuda:x"}, "device: expected auto, cpu, cuda or cuda:<index>, got 'cuda:x'"),
])  # fmt: skip
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(DemoError, match=message):
        DemoSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"epochs": 2.0}, {"epochs": True}, {"seed": "1"}])
def test_wrong_types_are_type_errors(wrong):
    with pytest.raises(TypeError, match="expected an integer"):
        DemoSettings(**wrong)
