"""What the demo refuses, before anything heavy is imported."""

import pytest

from lightning_turbo.demo import DemoError, DemoSettings
from lightning_turbo.demo.settings import EPOCHS, LEVELS
from lightning_turbo.errors import TurboError


def test_defaults_ask_for_nothing_in_particular():
    settings = DemoSettings()
    assert settings.levels is settings.epochs is settings.data is settings.seed is None
    assert settings.device == "auto"
    assert str(settings.out) == "runs/demo"
    assert settings.resume is False
    assert LEVELS == ("O0", "O1", "O2", "O3")
    assert set(EPOCHS) == {"digits", "mni"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"levels": ("01",)}, r"levels: expected some of O0, O1, O2, O3 \(letter O, not zero\), .* got '01'"),
        ({"levels": ("O1", "O4")}, "levels: expected some of O0, O1, O2, O3, each at most once.* got 'O1,O4'"),
        ({"levels": ("O1", "O1")}, "levels: .* each at most once"),
        ({"levels": ()}, "levels: .* got ''"),
        ({"epochs": 0}, "epochs: expected an integer from 1 to 1000000, got 0"),
        ({"seed": -1}, "seed: expected an integer from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed: .* got 4294967296"),
        ({"data": "cifar"}, "data: expected digits or mni, got 'cifar'"),
        ({"device": "cuda:x"}, "device: expected auto, cpu, cuda or cuda:<index>, got 'cuda:x'"),
    ],
)
def test_wrong_values_are_refused_in_words(wrong, message):
    with pytest.raises(DemoError, match=message) as caught:
        DemoSettings(**wrong)
    assert isinstance(caught.value, (TurboError, ValueError))


@pytest.mark.parametrize("wrong", [{"epochs": 2.0}, {"epochs": True}, {"seed": "1"}])
def test_wrong_types_are_type_errors(wrong):
    with pytest.raises(TypeError, match="expected an integer"):
        DemoSettings(**wrong)
