"""What comes next is made by a thread: the same items in the same order, and the same errors."""

import threading

import pytest

from mpitrain.weights import ahead as threads
from mpitrain.weights.ahead import ahead


def test_items_come_in_their_order_and_are_made_by_another_thread():
    made_by = []

    def items():
        for number in range(100):
            made_by.append(threading.get_ident())
            yield number

    assert list(ahead(items())) == list(range(100))
    assert set(made_by) and threading.get_ident() not in made_by


def test_one_is_made_while_another_is_used_and_no_more():
    made = []
    used = threading.Event()

    def items():
        for number in range(4):
            made.append(number)
            yield number
            if number == 0:
                assert used.wait(20)

    found = ahead(items())
    assert next(found) == 0
    used.set()  # else the second would never be made
    assert next(found) == 1 and len(made) <= 3
    assert [*found] == [2, 3]


def test_an_error_comes_where_its_item_would():
    def items():
        yield 1
        raise ValueError("of the second")

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="of the second"):
        next(found)


def test_nothing_is_left_of_one_that_is_given_up():
    before = threading.active_count()
    found = ahead(iter(range(1000)))
    assert next(found) == 0
    found.close()
    assert threading.active_count() == before


def test_without_a_thread_each_is_made_when_it_is_asked_for(monkeypatch):
    def refuse(*given):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", refuse)
    assert list(ahead(iter(range(5)))) == [0, 1, 2, 3, 4]
