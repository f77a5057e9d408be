"""Methods of single objects that are replaced for a while."""

import pytest

from lightning_turbo._replaced import ReplacedMethod


class Speaker:
    def say(self, word):
        return word


def replaced(speaker, mark):
    return ReplacedMethod(speaker, "say", lambda method, word: f"{mark}{method(word)}{mark}")


def test_a_replacement_that_is_put_back_under_another_one_calls_the_original():
    speaker = Speaker()
    lower, upper = replaced(speaker, "-"), replaced(speaker, "+")
    assert speaker.say("a") == "+-a-+"
    lower.put_back()
    assert speaker.say("a") == "+a+"
    upper.put_back()
    assert speaker.say("a") == "a"
    assert vars(speaker) == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_a_method_of_the_object_itself_is_there_again_in_whatever_order_replacements_go(order):
    speaker = Speaker()
    speaker.say = own = str.upper
    layers = [replaced(speaker, mark) for mark in "123"]
    left = {"1", "2", "3"}
    for number in order:
        layers[number].put_back()
        left.remove("123"[number])
        said = "".join(sorted(left, reverse=True))
        assert speaker.say("a") == f"{said}A{said[::-1]}"
    assert speaker.say is own
