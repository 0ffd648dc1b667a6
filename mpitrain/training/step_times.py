"""The seconds of a run's steps."""

from collections import deque
from statistics import median

REMEMBERED = 1000  # steps, the last ones


class StepTimes:
    """The seconds of the last steps, without the first of a start, which is never typical."""

    def __init__(self) -> None:
        self._took = deque[float](maxlen=REMEMBERED)
        self._begun = False

    def add(self, step_s: float) -> None:
        if self._begun:
            self._took.append(step_s)
        self._begun = True

    def __len__(self) -> int:
        return len(self._took)

    @property
    def median_s(self) -> float:
        return median(self._took)
