import pytest

from lightning_turbo.bench.case import Suite
from lightning_turbo.bench.settings import QUICK_SECONDS, BenchSettings


def nothing(meter):
    return {}


@pytest.fixture
def suite():
    suite = Suite("s", "about")
    suite.add("base", nothing, baseline=True)
    suite.add("O1, bf16", nothing)
    suite.add("other base", nothing, base="other base", quick=False)
    suite.add("O2, bf16", nothing, base="other base", quick=False)
    suite.add("on a GPU", nothing, devices=("cuda",))
    return suite


def test_all_cases_of_the_device(suite):
    assert BenchSettings(device="cpu").chosen(suite) == ["base", "O1, bf16", "other base", "O2, bf16"]


def test_quick_leaves_cases_out(suite):
    assert BenchSettings(device="cpu", quick=True).chosen(suite) == ["base", "O1, bf16"]


def test_only_keeps_what_the_chosen_are_divided_by(suite):
    assert BenchSettings(device="cpu", only=("o1*",)).chosen(suite) == ["base", "O1, bf16"]
    assert BenchSettings(device="cpu", only=("O2*",), quick=True).chosen(suite) == ["other base", "O2, bf16"]
    assert BenchSettings(device="cpu", only=("on a GPU",)).chosen(suite) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "fast"}, r"suite='fast'; accepted are 'precision', .* and 'all'. Choose one of them."),
        ({"device": "tpu"}, "device='tpu'; accepted are 'auto', 'cpu' and 'cuda'. Choose one of them."),
        ({"threads": 0}, "threads=0; accepted are whole numbers from 1 on, or None. Raise it."),
        ({"rounds": -1}, "rounds=-1; accepted are whole numbers from 1 on, or None. Raise it."),
        ({"minutes": 0.0}, "minutes=0.0; accepted are numbers above 0, or None. Raise it."),
        ({"minutes": float("nan")}, "minutes=nan; accepted are numbers above 0, or None. Raise it."),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BenchSettings(**{"device": "cpu", **options})


def test_the_shorter_of_two_limits_holds():
    assert BenchSettings(device="cpu").seconds == float("inf")
    assert BenchSettings(device="cpu", minutes=9).seconds == 540
    assert BenchSettings(device="cpu", quick=True).seconds == QUICK_SECONDS
    assert BenchSettings(device="cpu", quick=True, minutes=9).seconds == QUICK_SECONDS
    assert BenchSettings(device="cpu", quick=True, minutes=0.5).seconds == 30


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    file = tmp_path / "results"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"is a file; accepted is a folder. Name another place."):
        BenchSettings(device="cpu", out=file)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda', but torch sees no CUDA device; accepted here is 'cpu'."):
        BenchSettings(device="cuda")
    assert BenchSettings(device="auto").device == "cpu"
