"""Whether a rank is at work: as its watchdog sees it, and without one a thread of its own.

A rank imports this and watchdog_messages.py, and not the watchdog, which takes half a megabyte.
"""

from dataclasses import dataclass

from mpitrain.cluster.processes import used
from mpitrain.cluster.status_board import BUSY, LEFT, Where

STEPPING = ("step", "validation")
STEP_GRACE_S = 3.0  # in a step the ranks that wait speak first: they know for what
SHARE = 0.05  # of a core, that tells work from waiting: there may be many more ranks than cores


@dataclass
class Activity:
    """Whether a rank does anything. worked: when it was last seen to.  used: of the machine."""

    worked: float = 0.0
    looked: float = 0.0
    used: tuple[int, float] = (0, 0.0)

    def idle_s(self, where: Where, now: float) -> float:
        """Return for how long it is where it is; while BUSY, for how long it has done nothing."""
        if where.phase in STEPPING:
            return now - where.since - STEP_GRACE_S
        if where.state not in (BUSY, LEFT):
            return now - where.since
        if now - self.looked > 1:
            usage = used(where.pid)
            if usage[0] > self.used[0] or usage[1] - self.used[1] > SHARE * (now - self.looked):
                self.worked = now
            self.looked = now
            self.used = usage
        return now - max(where.since, self.worked)
