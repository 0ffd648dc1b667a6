"""How often a run shows a step where nobody watches it: run.log_every, in steps or in seconds."""

import math
import re
from typing import NamedTuple

from mpitrain.config import Run
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


class LogPace(NamedTuple):
    """A step is shown if its number is a multiple of `steps`, or if so many seconds have passed
    since one was; inf, 0: not for that.
    """

    steps: int
    seconds: float

    def due(self, step: int, since_s: float) -> bool:
        return since_s >= self.seconds or bool(self.steps and step % self.steps == 0)


def log_pace(run: Run) -> LogPace:
    """Read run.log_every: a number of steps, or a text with seconds such as "30s". Raises ConfigError."""
    period = run.log_every
    if isinstance(period, int):
        return LogPace(period, math.inf)
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?(s|m|min|h)", period.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f'run.log_every = "{shown(period)}": needed steps, such as run.log_every = 10, or seconds, such '
            'as run.log_every = "30s"'
        )
    return LogPace(0, float(match[1]) * SECONDS[match[2]])
