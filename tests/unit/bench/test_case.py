import pytest

from lightning_turbo.bench.case import SUITES, Aim, BenchError, Suite, load_suite


def nothing(meter):
    return {}


def test_a_name_is_given_once():
    suite = Suite("s", "about")
    suite.add("a", nothing)
    with pytest.raises(ValueError, match="suite 's' has a case 'a' already; give each case a name of its own"):
        suite.add("a", nothing)


def test_there_is_one_baseline():
    suite = Suite("s", "about")
    suite.add("a", nothing, baseline=True)
    with pytest.raises(ValueError, match="'b' cannot be the baseline, because 'a' is; keep one of them"):
        suite.add("b", nothing, baseline=True)


def test_a_suite_needs_a_baseline():
    suite = Suite("s", "about")
    suite.add("a", nothing)
    with pytest.raises(ValueError, match="suite 's' has no baseline; give one of its cases baseline=True"):
        suite.check()


@pytest.mark.parametrize("field", ["base", "against", "aim"])
def test_every_name_that_is_referred_to_exists(field):
    suite = Suite("s", "about")
    suite.add("a", nothing, baseline=True)
    if field == "aim":
        suite.aims.append(Aim("a", "z", 1.0))
    else:
        suite.add("b", nothing, **{field: "z" if field == "base" else ("z",)})
    with pytest.raises(ValueError, match=r"refers to 'z'; its cases are a"):
        suite.check()


def test_the_decorator_registers_and_returns_the_function():
    suite = Suite("s", "about")

    @suite.case("a", baseline=True, needs=("numpy",))
    def run(meter):
        return {"loss": 1.0}

    assert run(None) == {"loss": 1.0}
    assert suite.cases["a"].run is run
    assert suite.cases["a"].needs == ("numpy",)
    assert suite.baseline == "a"


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


@pytest.mark.parametrize("name", SUITES)
def test_quick_keeps_to_the_main_cases(name):
    # Each start costs seconds of imports, and `bench all --quick` has two minutes for all suites together.
    suite = load_suite(name)
    quick = [case for case in suite.cases.values() if case.quick and "cpu" in case.devices]
    assert 2 <= len(quick) <= 4
