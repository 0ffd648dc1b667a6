"""Why a rank has to leave: signals that ask it to, or the end of its job's time.

Steps end with a checkpoint first (training/early_exit.py); a second request where there is nothing
to save, a second Ctrl-C, and a third request anywhere end the job at once.
"""

import signal
import time

from mpitrain.cluster.allocation import Allotted
from mpitrain.cluster.launch import launched

ASKS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a rank to leave
ECHO_S = 2.0  # one request comes from the scheduler, from the job's shell, and through mpirun
KEY_S = 0.3  # without a launcher a key comes once, and a shell's request perhaps twice at once
BEFORE_STEPS = ("start", "tokens", "build", "resume", "repair")  # there is nothing to save in them
WITHOUT_STEPS = ("spare", "end")  # a rank waits for those that take steps, or leaves
IN_ORDER_S = 5.0  # for all to leave together where there is nothing to save; then the job is ended


class LeaveRequests:
    """num_asked: how many times a signal asked this rank.  asked_by: the last of these signals.

    time: that the job has, on the rank that knows it.
    is_unsaved: the newest step is in memory alone (recovery.every), and the run is being opened: it
    leaves after its next step, which it saves, and not before. Alike on all ranks.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.asked_by = ""
        self.time: Allotted | None = None
        self.is_unsaved = False
        self._steps = False
        self._leave_by = float("inf")
        self._asked_at = -ECHO_S

    def begin_steps(self) -> None:
        """Have steps leave with a checkpoint from now on; before, there is nothing to save."""
        self._steps = True
        self.is_unsaved = False

    def saves_nothing(self, phase: str) -> bool:
        nothing = phase in BEFORE_STEPS if self._steps else phase not in WITHOUT_STEPS
        return nothing and not self.is_unsaved

    def why(self) -> str:
        """Return why this rank has to leave before it takes a step, in words; "" if it hasn't."""
        if self.is_unsaved:
            return ""
        if self.num_asked:
            return "it was asked to leave"
        is_over = self.time is not None and self.time.is_over
        return f"its time limit is near, {self.time.end.distance()}" if is_over else ""

    def describe(self) -> str:
        """Return the same as the verb of a report."""
        return " was asked to leave" if self.num_asked else f" is out of time, {self.time.end.distance()},"

    def count(self, asked: list[int], phase: str) -> bool:
        """Count a request to leave, by these signals; return whether it ends the job at once."""
        now = time.monotonic()
        counts = now - self._asked_at > (ECHO_S if launched() else KEY_S)
        if counts:
            self.num_asked += 1
            self._asked_at = now
            self.asked_by = signal.Signals(asked[0]).name
        again = counts and self.num_asked > 1
        return self.num_asked > 2 or (again and (signal.SIGINT in asked or self.saves_nothing(phase)))

    def is_overdue(self, phase: str) -> bool:
        """Return whether the rank should have left, with nothing to save: another is held up."""
        now = time.monotonic()
        if not (self.saves_nothing(phase) and self.why()):
            self._leave_by = float("inf")
        elif self._leave_by == float("inf"):
            self._leave_by = now + (IN_ORDER_S if self.num_asked else min(IN_ORDER_S, self.time.margin_s / 2))
        return now >= self._leave_by

    def due_s(self, look_s: float, most_s: float) -> float:
        """Return for how long nothing is due, at most `most_s`: a sleeping machine stops poll()."""
        if self._leave_by < float("inf"):
            return max(0.0, min(most_s, self._leave_by - time.monotonic()))
        if self.time is None:
            return look_s if self.num_asked else most_s
        return min(most_s, max(look_s, self.time.end.left_s - self.time.margin_s))
