"""When a run leaves before its last step: because a signal asks it to, or because its time is nearly over.

Each rank says at the end of each step, when its gradients are there, how urgent it is for it; the totals of the step carry the most
urgent of all ranks (actor/step_totals.py), so all leave after the same step. The clock counts on rank 0 only.

    before the end   | rest of this step | a whole step | a validation | a save, twice its time | run.time_margin_s |
                     ^ asked here: if there isn't time for all of that, this step is the last one
"""

import time
from collections import deque

from mpitrain.cluster.allocation import End
from mpitrain.cluster.guard import Guard

STAY, LEAVE, HURRY = range(3)  # HURRY: without the validation that is due, and without what is told at the end
REMEMBERED = 64  # steps
ASSUMED_BYTES_S = 100e6  # of a rank, until a save was measured


class Leaving:
    """Of one rank. end: of its time, None where nobody said, and on all ranks but the first.  saved_bytes: the most that a rank writes."""

    def __init__(self, guard: Guard, end: End | None, margin_s: float, saved_bytes: float):
        self._guard, self._end, self._margin_s = guard, end, margin_s
        self._steps, self._assumed_s, self._longest_save_s = deque[float](maxlen=REMEMBERED), saved_bytes / ASSUMED_BYTES_S, 0.0
        self._late, self._began, self._validation_s = False, time.monotonic(), 0.0

    def urgency(self) -> int:
        """Return how urgently this rank has to leave."""
        self._late = self._late or (self._end is not None and self._end.left_s < self.needed_s)
        return max(min(self._guard.num_asked, HURRY), LEAVE if self._late else STAY)

    @property
    def needed_s(self) -> float:
        """The time before the end from which on a further step is too much."""
        return 2 * max(self._steps, default=0.0) + self._validation_s + 2 * self.save_s + self._margin_s

    @property
    def save_s(self) -> float:
        """How long a save takes: the longest so far."""
        return self._longest_save_s or self._assumed_s

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def validated(self, took_s: float) -> None:
        """Note how long a validation took. The longest counts for ever: they can be further apart than the steps that are remembered."""
        self._validation_s = max(self._validation_s, took_s)

    def end_step(self, save_s: float) -> None:
        """Note how long the step took, its validation included and its save not; and how long the last save took until it was committed."""
        self._steps.append(time.monotonic() - self._began)
        self._longest_save_s = max(self._longest_save_s, save_s)

    def announced(self) -> str:
        """Return what is said at the start of the time there is."""
        if self._end is None:
            return ""
        return f"time: until {self._end}; leaves with a checkpoint before that (run.time_margin_s = {self._margin_s:g})"

    def told(self, step: int) -> str:
        """Return why the run has left after `step`."""
        late = f", {self._end.left_s:.0f} s before {self._end}" if self._late and self._end else ""
        return f"stopped after step {step} with a checkpoint{late}; start the same command again to go on"
