"""Errors about arguments say what was expected, what was given, and the intended name."""

import pytest

from lightning_turbo._checks import check_choice, check_count, check_switches, suggest


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: check_count("depth", 0), ValueError, "depth: expected an integer of 1 or more, got 0"),
    (lambda: check_count("depth", True), TypeError, "depth: expected an integer of 1 or more, got True"),
    (lambda: check_switches(lean=1), TypeError, "lean=1: expected True or False"),
    (lambda: check_choice("level", "O4", ("O0", "O1")), ValueError, "level: expected 'O0' or 'O1', got 'O4'"),
])  # fmt: skip
def test_what_is_wrong_with_a_value(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_near_miss_of_a_name_gets_a_suggestion():
    assert "threads" in suggest("thread", ["threads", "depth"])
    assert not suggest("xyz", ["threads", "depth"])
