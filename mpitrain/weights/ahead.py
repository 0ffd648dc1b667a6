"""An iterator that a thread runs while what it has yielded is used."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
END = object()


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield what an iterator yields; a thread makes the next one while one is used.

    An error comes when its item is asked for. Without a thread, each is made when it is asked for.
    """
    with ThreadPoolExecutor(1, "mpitrain-ahead") as pool:
        try:
            later = pool.submit(next, items, END)
        except RuntimeError:
            yield from items
            return
        while (item := later.result()) is not END:
            later = pool.submit(next, items, END)
            yield item
