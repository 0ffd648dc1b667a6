"""How far a long search is, for whoever waits for it."""

from collections.abc import Callable

Notify = Callable[[int, int], None]  # what is done, of how much


class SearchProgress:
    """Counts the steps of a search and tells of them."""

    def __init__(self, notify: Notify | None):
        self._notify = notify
        self._done = 0
        self._total = 0

    def expect(self, steps: int) -> None:
        """So many steps more will come."""
        self._total += steps

    def step(self) -> None:
        self._done += 1
        if self._notify is not None:
            self._notify(self._done, self._total)
