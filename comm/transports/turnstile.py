"""The order in which operations of one axis pass, the same on all its ranks."""

from mpitrain.comm.progress import Ready


class Turnstile:
    """Lets operations pass in the order in which they were started, which is the same on all ranks
    of an axis.

    Nobody waits for ever: what the foremost operation waits for comes without the others. Its data
    is written by what this rank has queued on its device before; what other ranks have to do for
    it, they do in the same order, being foremost there in their turn. Each axis has turnstiles of
    its own, so operations of different axes don't meet. A ticket has to be used: raise errors
    before.
    """

    def __init__(self) -> None:
        self._taken = self._passed = 0

    def take(self) -> Ready:
        """Take a ticket, when an operation is called.

        Return the function that says whether its turn has come.
        """
        ticket = self._taken
        self._taken = self._taken + 1
        return lambda: self._passed == ticket

    def pass_on(self) -> None:
        """Let the next one pass."""
        self._passed += 1
