"""Two cases in one process, in turns."""

import pytest

from lightning_turbo.bench.case import Suite
from lightning_turbo.bench.meter import Meter
from lightning_turbo.bench.turns import add_turns


@pytest.fixture
def toy():
    """A suite of two cases that write down each of their steps."""
    suite, written = Suite("toy", "Toys."), []

    def write(meter, *, letter, steps=10**6):
        for _ in range(steps):
            written.append(letter)
            if not meter.step():
                break
        written.append(f"end of {letter}")
        return {}

    suite.add("a", write, config={"letter": "a"}, baseline=True)
    suite.add("b", write, config={"letter": "b"})
    suite.add("short", write, config={"letter": "s", "steps": 8})
    return suite, written


def run(suite, name, orders):
    """Run a case under a runner that gives these orders."""
    case, orders = suite.cases[name], iter(orders)
    meter = Meter(lambda event: next(orders), warmup=6)
    return case.run(meter, **case.config)


ROUND, END = {"order": "round", "lead": 0, "steps": 15}, {"order": "end"}


def test_blocks_alternate_and_each_is_of_one_case(toy):
    suite, written = toy
    add_turns(suite, "b", "a", 1.05, steps=3, lead=2)
    numbers = run(suite, "b in turns with a", [ROUND, END])
    ends = written.index("end of b")
    steps = "".join(written[:ends])
    # Each has a block to warm up; the step after a block is taken when the next block is asked for.
    assert steps.count("a") == steps.count("b") == 5 + 5 * numbers["pairs"]
    blocks = [steps[at : at + 5] for at in range(0, len(steps), 5)]
    assert all(len(set(block)) == 1 for block in blocks), blocks
    order = "".join(block[0] for block in blocks)
    assert order == "ba" + ("abba" * 4)[: len(order) - 2]
    assert written[ends:] == ["end of b", "end of a"]


def test_there_are_as_many_pairs_as_the_runner_asks_for_and_six_at_least(toy):
    suite, _ = toy
    add_turns(suite, "b", "a", 1.05, steps=3)
    numbers = run(suite, "b in turns with a", [ROUND, ROUND, END])
    assert numbers["pairs"] == (6 + 15 + 15) / 3
    assert numbers["ratio_low"] <= numbers["ratio"] <= numbers["ratio_high"]
    assert run(suite, "b in turns with a", [END])["pairs"] == 6


def test_what_a_case_raises_is_raised(toy):
    suite, _ = toy

    def fail(meter):
        meter.step()
        raise OSError("no more")

    suite.add("fails", fail)
    add_turns(suite, "fails", "a", 1.05, steps=3)
    with pytest.raises(OSError, match="no more"):
        run(suite, "fails in turns with a", [ROUND, END])


def test_a_case_that_ends_by_itself_is_no_result(toy):
    suite, _ = toy
    add_turns(suite, "short", "a", 1.05, steps=3)
    with pytest.raises(RuntimeError, match="case short ended by itself"):
        run(suite, "short in turns with a", [ROUND, END])


def test_the_limit_is_held_against_the_upper_end(toy):
    suite, _ = toy
    add_turns(suite, "b", "a", 1.05, steps=3, condition="a quiet machine")
    suite.check()
    (aim,) = suite.aims
    assert (aim.case, aim.against, aim.at_most) == ("b in turns with a", "", 1.05)
    assert (aim.quantity, aim.condition) == ("ratio_high", "a quiet machine")
