"""Two loops that take turns."""

import threading

import pytest

from headrace.lightning.turns import Turns


def test_each_thing_gets_the_answer_that_follows():
    answers = []

    def function():
        answers.extend(turns.hand_over(number) for number in range(3))

    turns = Turns(function)
    assert turns.go_on() == 0
    assert [turns.go_on("a"), turns.go_on("b")] == [1, 2]
    assert turns.go_on("c") is None
    assert answers == ["a", "b", "c"]
    turns.close()


def test_an_error_of_the_function_is_the_caller_s():
    def function():
        turns.hand_over(1)
        raise ValueError("inside")

    turns = Turns(function)
    turns.go_on()
    with pytest.raises(ValueError, match="inside"):
        turns.go_on()
    turns.close()


@pytest.mark.parametrize("begun", [False, True])
def test_close_ends_the_function_with_its_cleaning_up(begun):
    cleaned, went_on = threading.Event(), threading.Event()

    def function():
        try:
            turns.hand_over(1)
            went_on.set()
        finally:
            cleaned.set()

    turns = Turns(function)
    if begun:
        turns.go_on()
    turns.close()
    assert cleaned.is_set() == begun
    assert not went_on.is_set()
    assert not [each for each in threading.enumerate() if each.name == "headrace"]


def test_a_function_that_works_is_asked_to_end():
    begun = threading.Event()

    def function():
        begun.set()
        while not turns.is_closed():
            pass

    turns = Turns(function)
    caller = threading.Thread(target=turns.go_on)
    caller.start()
    begun.wait()
    turns.close()
    caller.join()
    assert turns.is_closed()
