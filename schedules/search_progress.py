"""How far a long search is, for whoever waits for it."""

from collections.abc import Callable

Told = Callable[[int, int], None]  # what is done, of how much


class SearchProgress:
    """Counts the steps of a search and tells of them."""

    def __init__(self, told: Told | None):
        self._told = told
        self._done = 0
        self._total = 0

    def expect(self, steps: int) -> None:
        """So many steps more will come."""
        self._total += steps

    def step(self) -> None:
        self._done += 1
        if self._told is not None:
            self._told(self._done, self._total)
