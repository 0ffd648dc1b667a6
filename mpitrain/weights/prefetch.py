"""Reading ahead: a thread makes what is needed next while this one is at work on what is there."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

DEPTH = 4  # items that are made ahead
T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yield what an iterator yields, in its order; one thread takes DEPTH items ahead.

    Nobody else may take any. What the iterator raises, is raised where its item would come.
    """
    end = object()
    ahead: deque[Future] = deque()
    with ThreadPoolExecutor(1, "mpitrain-prefetch") as pool:
        try:
            for _ in range(DEPTH):
                ahead.append(pool.submit(next, items, end))
            while (item := ahead.popleft().result()) is not end:
                ahead.append(pool.submit(next, items, end))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)
