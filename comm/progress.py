"""Started operations, and the one place that moves them forward.

An operation is a generator: it posts messages, yields a function that says whether they have arrived, adds what came, posts the
next ones, and returns its result. MPI doesn't advance by itself, and an operation of several phases even less: so every wait for
one operation advances all of them. Otherwise rank 0 could wait for A while rank 1 waits for the second phase of B, for ever.
"""

import time
from collections.abc import Callable, Generator
from os import sched_yield
from typing import Any

from mpi4py import MPI

from mpitrain.errors import HangError

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]

SPIN_S = 0.0002  # poll this long, then sleep between polls: with more ranks than cores the others need the core
NAP_S = 0.00005


def arrived(requests: list[MPI.Request]) -> Ready:
    """Return a function that tells whether all `requests` are complete."""
    return lambda: MPI.Request.Testall(requests)


class Pending:
    """A started operation. It owns its buffers until wait() returns; `result` is None before that."""

    def __init__(self, steps: Steps, progress: "Progress", what: str):
        self.what, self.done, self.result = what, False, None
        self._steps, self._progress = steps, progress
        self._ready: Ready | None = None

    def test(self) -> bool:
        """Advance as far as possible without waiting; return whether the operation is complete."""
        while not self.done:
            if self._ready is not None and not self._ready():
                return False
            try:
                self._ready = next(self._steps)
            except StopIteration as end:
                self.result, self.done = end.value, True
        return True

    def wait(self) -> Any:
        """Wait until the operation is complete and return its result. Raises HangError after the time limit."""
        self._progress.wait(self)
        return self.result


class Progress:
    """All operations in flight on this rank. `timeout_s` None waits for ever; `waited_s` adds up the time spent in wait()."""

    def __init__(self, timeout_s: float | None = None):
        self.timeout_s, self.waited_s = timeout_s, 0.0
        self.active: list[Pending] = []

    def start(self, steps: Steps, what: str) -> Pending:
        """Run the first phase of an operation now and return its Pending; `what` names it in a hang report."""
        pending = Pending(steps, self, what)
        if not pending.test():
            self.active.append(pending)
        return pending

    def poll(self) -> None:
        """Advance everything in flight, oldest first, without waiting."""
        if self.active:
            self.active = [pending for pending in self.active if not pending.test()]

    def wait(self, pending: Pending) -> None:
        """Advance everything until `pending` is complete."""
        if pending.done:
            return
        begin = time.perf_counter()
        while True:
            self.poll()
            if pending.test():
                break
            waited_s = time.perf_counter() - begin
            if self.timeout_s is not None and waited_s > self.timeout_s:
                raise HangError(f"waited {waited_s:.0f} s for {pending.what}")
            if waited_s < SPIN_S:
                sched_yield()
            else:
                time.sleep(NAP_S)
        self.waited_s += time.perf_counter() - begin

    def drain(self) -> None:
        """Wait for everything in flight."""
        while self.active:
            self.wait(self.active[0])
            self.poll()
