"""When a run leaves before its last step: because a signal asks it to, or because its time is nearly over.

The totals of each step carry how urgent it is for the most urgent rank (actor/step_totals.py), so
all leave after the same step. The clock counts on rank 0 only.

    left  | rest of this step | a whole step | a validation | a save, twice its time | run.time_margin_s |
          ^ asked here: if there isn't time for all of that, this step is the last one

Where only the save and the margin are left, the run hurries. Before the first step
cluster/listening_thread.py has ranks leave.
"""

import math
import time
from collections import deque

from mpitrain.cluster.leave_requests import LeaveRequests

# HURRY: without the validation that is due, and without what is printed at the end
STAY, LEAVE, HURRY = range(3)
REMEMBERED = 64  # steps
ASSUMED_BYTES_S = 100e6  # of a rank, until a save was measured


class Leaving:
    """Of one rank.

    requests: know the time that there is, on one rank.
    saved_bytes: the most that a rank writes.
    reason: why the run itself asks its ranks to leave; "" if it doesn't.
    """

    def __init__(self, requests: LeaveRequests, saved_bytes: float):
        self._requests = requests
        self._time = requests.time
        self._steps = deque[float](maxlen=REMEMBERED)
        self._assumed_s = saved_bytes / ASSUMED_BYTES_S
        self._longest_save_s = 0.0
        self._late = False
        self._began = time.monotonic()
        self._validation_s = 0.0
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Have the ranks leave after the next step. On any rank."""
        self.reason = reason

    def urgency(self) -> int:
        """Return how urgently this rank has to leave."""
        left_s = self._time.end.left_s if self._time else math.inf
        self._late = self._late or left_s < self.needed_s
        late = HURRY if left_s < self._to_save_s else LEAVE if self._late or self.reason else STAY
        return max(min(self._requests.num_asked, HURRY), late)

    def hurries(self) -> bool:
        """Return whether this rank has to leave at once."""
        return self.urgency() == HURRY

    @property
    def needed_s(self) -> float:
        """The time before the end from which on a further step is too much."""
        return 2 * max(self._steps, default=0.0) + self._validation_s + self._to_save_s

    @property
    def _to_save_s(self) -> float:
        """The time before the end that a save needs, and no more than that."""
        return 2 * self.save_s + (self._time.margin_s if self._time else 0.0)

    @property
    def save_s(self) -> float:
        """How long a save takes: the longest so far."""
        return self._longest_save_s or self._assumed_s

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def validated(self, took_s: float) -> None:
        """Note how long a validation took: the longest counts, as they are far apart."""
        self._validation_s = max(self._validation_s, took_s)

    def end_step(self, save_s: float) -> None:
        """Note how long the step took with its validation. save_s: the last save, to its commit."""
        self._steps.append(time.monotonic() - self._began)
        self._longest_save_s = max(self._longest_save_s, save_s)

    def announced(self) -> str:
        """Return what is said at the start of the time there is."""
        if self._time is None:
            return ""
        margin = f"{self._time.margin_s:.0f} s before that or earlier"
        return f"time: until {self._time.end}; leaves {margin}, with a checkpoint"

    def describe(self, step: int) -> str:
        """Return why the run has left after `step`."""
        why = f", {self._time.end.distance()}" if self._late and self._time else ""
        why += f", {self.reason}" if self.reason else ""
        return f"stopped after step {step} with a checkpoint{why}; run the same command to resume"
