"""How far a long search is, for whoever waits for it."""

from collections.abc import Callable

Notify = Callable[[int, int], None]  # what is done, of how much
REMEMBERED = 8  # orders of a kind that aren't searched for again


class Listener:
    """Who hears how far a search is, which is no part of what is searched for and remembered."""

    def __init__(self, notify: Notify | None):
        self.notify = notify

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listener)

    def __hash__(self) -> int:
        return 0


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
