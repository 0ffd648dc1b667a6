"""The order in which operations of one axis pass, the same on all its ranks."""

from mpitrain.comm.progress import Ready


class Turnstile:
    """Lets operations pass in the order in which they were started, alike on all ranks of an axis.

    Nobody waits for ever: what the foremost waits for comes without the others. Its data is written
    by what this rank has queued on its device before; other ranks' parts are foremost there in
    their turn. Each axis has turnstiles of its own. A ticket has to be used: raise errors before.
    """

    def __init__(self) -> None:
        self._taken = self._passed = 0

    def take(self) -> Ready:
        """Take a ticket for an operation; return a function that says whether its turn has come."""
        ticket = self._taken
        self._taken = self._taken + 1
        return lambda: self._passed == ticket

    def pass_on(self) -> None:
        """Let the next one pass."""
        self._passed += 1
