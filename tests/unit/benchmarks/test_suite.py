import pytest

from benchmarks.settings import QUICK_SECONDS, BenchSettings
from benchmarks.suite import SUITES, Aim, BenchError, Suite, load_suite


def nothing(meter):
    return {}


def test_names_and_baselines_are_unique():
    suite = Suite("s", "about")
    suite.add("a", nothing)
    with pytest.raises(ValueError, match="suite 's' has no baseline; give one of its cases baseline=True"):
        suite.check()
    suite.add("base", nothing, baseline=True)
    with pytest.raises(ValueError, match="suite 's' has a case 'a' already; give each case a name of its own"):
        suite.add("a", nothing)
    with pytest.raises(ValueError, match="'b' cannot be the baseline, because 'base' is; keep one of them"):
        suite.add("b", nothing, baseline=True)


@pytest.mark.parametrize("refer", [
    lambda suite: suite.add("b", nothing, base="z"), lambda suite: suite.add("b", nothing, against=("z",)),
    lambda suite: suite.aims.append(Aim("a", "z", 1.0)),
])  # fmt: skip
def test_every_name_that_is_referred_to_exists(refer):
    suite = Suite("s", "about")
    suite.add("a", nothing, baseline=True)
    refer(suite)
    with pytest.raises(ValueError, match=r"refers to 'z'; its cases are a"):
        suite.check()


def test_an_unknown_suite_is_refused():
    with pytest.raises(BenchError, match=r"unknown suite 'nonsense'; the suites are .*precision.*, and 'all'"):
        load_suite("nonsense")


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_whole(name):
    suite = load_suite(name)
    assert suite.name == name
    assert suite.lead >= 1, "what a case gave back while it was held is taken again before the clock starts"
    for case in suite.cases.values():
        assert set(case.devices) <= {"cpu", "cuda"}
        other = suite.cases[case.base or suite.baseline]
        assert (other.base or suite.baseline) == other.name, f"{other.name} is a base, and divided by another case"
        assert set(case.devices) <= set(other.devices), f"{case.name} runs where its base {other.name} does not"
        assert other.quick or not case.quick, f"--quick runs {case.name} without its base {other.name}"
    # Each start costs seconds of imports, and --quick has two minutes for all suites together.
    assert 2 <= sum(case.quick and "cpu" in case.devices for case in suite.cases.values()) <= 4


@pytest.mark.parametrize(("options", "chosen"), [
    ({}, ["base", "O1, bf16", "other base", "O2, bf16"]),
    ({"quick": True}, ["base", "O1, bf16"]),
    ({"only": ("o1*",)}, ["base", "O1, bf16"]),
    ({"only": ("O2*",), "quick": True}, ["other base", "O2, bf16"]),
    ({"only": ("on a GPU",)}, []),
])  # fmt: skip
def test_settings_choose_cases_and_what_these_are_divided_by(options, chosen):
    suite = Suite("s", "about")
    suite.add("base", nothing, baseline=True)
    suite.add("O1, bf16", nothing)
    suite.add("other base", nothing, base="other base", quick=False)
    suite.add("O2, bf16", nothing, base="other base", quick=False)
    suite.add("on a GPU", nothing, devices=("cuda",))
    assert BenchSettings(device="cpu", **options).chosen(suite) == chosen


@pytest.mark.parametrize(("options", "message"), [
    ({"suite": "fast"}, r"suite='fast': expected one of 'precision', .*, 'all'\."),
    ({"device": "tpu"}, "device='tpu': expected one of 'auto', 'cpu', 'cuda'."),
    ({"device": "cuda"}, r"device='cuda', but torch sees no CUDA device: expected 'cpu' here."),
    ({"threads": 0}, "threads=0: expected a whole number from 1 on, or None. Raise it."),
    ({"rounds": -1}, "rounds=-1: expected a whole number from 1 on, or None. Raise it."),
    ({"processes": 0}, r"processes=0: expected a whole number from 1 on\. Raise it."),
    ({"minutes": 0.0}, "minutes=0.0: expected a number above 0, or None. Raise it."),
    ({"minutes": float("nan")}, "minutes=nan: expected a number above 0, or None. Raise it."),
    ({"seed": -1}, r"seed=-1: expected a whole number from 0 to 2\*\*32 - 1"),
    ({"seed": 2**32}, r"seed=4294967296: expected a whole number from 0 to 2\*\*32 - 1"),
    ({"out": "file"}, r"is a file: expected a folder. Name another one."),
])  # fmt: skip
def test_impossible_settings_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "file").write_text("mine")
    if "out" in options:
        options = {"out": tmp_path / "file"}
    with pytest.raises(BenchError, match=message):
        BenchSettings(**{"device": "cpu", **options})
    assert BenchSettings(device="auto").device == "cpu"


@pytest.mark.parametrize(("options", "seconds"), [
    ({}, float("inf")), ({"minutes": 9}, 540),
    ({"quick": True, "minutes": 9}, QUICK_SECONDS), ({"quick": True, "minutes": 0.5}, 30),
])  # fmt: skip
def test_the_shorter_of_two_limits_holds(options, seconds):
    assert BenchSettings(device="cpu", **options).seconds == seconds
