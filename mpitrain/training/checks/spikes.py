"""Loss spikes: which step is one, and what was done about them so far. All ranks find the same.

    median, deviation  of the last `spikes.window` losses that were none; deviation: 1.4826 times
                       the median distance from the median, which is that of a normal distribution,
                       and at least LEAST of the median
    a spike            a loss of more than median + `spikes.threshold` deviations, once half a
                       window is known

Losses and skipped batches are part of a checkpoint: a run that resumes decides as one that never
stopped. After a rollback from a spike at step s, the next step reads the batch after that of s.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from mpitrain.config import SpikesTable as Settings

NORMAL = 1.4826
LEAST = 0.01
# of checkpoints that are older than this
NONE_YET = {"losses": [], "batches_skipped": 0, "rollbacks": 0}


class Spikes:
    """What a run knows of its losses. batches_skipped: that were read before, and are not read again."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.state = NONE_YET

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        counts = {"batches_skipped": self.batches_skipped, "rollbacks": self.rollbacks}
        return {"losses": list(self._losses), **counts}

    @state.setter
    def state(self, saved: dict[str, Any]) -> None:
        self._losses = deque(saved["losses"], maxlen=self.settings.window)
        self.batches_skipped = saved["batches_skipped"]
        self.rollbacks = saved["rollbacks"]

    @property
    def limit(self) -> float:
        """The loss from which on a step is a spike; infinite while too little is known."""
        if self.settings.do == "nothing" or 2 * len(self._losses) < self.settings.window:
            return math.inf
        middle = median(self._losses)
        deviation = NORMAL * median(abs(loss - middle) for loss in self._losses)
        return middle + self.settings.threshold * max(deviation, LEAST * abs(middle))

    def skip_update(self, loss: float) -> bool:
        """Tell whether the update of a step with this loss is left out."""
        return self.settings.do in ("skip", "rollback") and loss > self.limit

    def observe(self, step: int, loss: float) -> str:
        """Take note of the loss of a step; return what is to be said of it."""
        limit = self.limit
        if loss > limit:
            done = "the step was counted only" if self.settings.do == "count" else "its update was left out"
            what = f"step {step} is a spike: its loss is {loss:.4f}, more than {limit:.4f}"
            return f"{what}; {done} (spikes.do)"
        if math.isfinite(loss):
            self._losses.append(loss)
        return ""

    def rolled_back(self, spike: int, to: int, before: dict[str, Any]) -> None:
        """Continue after step `to` with the batch after `spike`. before: the state at the spike."""
        self.rollbacks = before["rollbacks"] + 1
        self.batches_skipped = before["batches_skipped"] + spike - to
