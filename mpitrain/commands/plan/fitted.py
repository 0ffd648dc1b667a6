"""Constants of a system, fitted to few published steps: never more than one for each four rows.

    1 compute   every second of a step, a factor: the median of measured over predicted
    2 network   seconds that wait for messages, another factor
    3 overhead  seconds of a microbatch's blocks that no work explains: launches, stragglers

Each begins from those of the GPU type, which come from other systems' rows.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

ROWS_EACH = 4
NETWORKS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
OVERHEADS = (0.0, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3)  # s of a block and microbatch
# what a further constant must gain of the mean error, for a factor of 2 from where it began
HELD = 0.02


class Constants(NamedTuple):
    compute: float = 1.0
    network: float = 1.0
    overhead: float = 0.0
    num_rows: int = 0

    @property
    def number(self) -> int:
        return int(self.compute != 1.0) + int(self.network != 1.0) + int(self.overhead != 0.0)


class Sample(NamedTuple):
    """A step: predicted seconds that compute and that wait for messages; blocks walked; what was measured."""

    computing: float
    sending: float
    walks: float
    measured: float

    def at(self, constants: Constants) -> float:
        explained = self.computing + constants.overhead * self.walks
        return constants.compute * (explained + constants.network * self.sending)


NOTHING = Constants()


def fit(samples: Sequence[Sample], start: Constants = NOTHING) -> Constants:
    """Return the constants of some steps, as many as their number allows; `start` where there are too few."""
    allowed = len(samples) // ROWS_EACH
    if not allowed:
        return start
    networks = NETWORKS if allowed > 1 else (1.0,)
    overheads = OVERHEADS if allowed > 2 else (start.overhead / max(start.compute, 1e-9),)
    best, least = start, math.inf
    for factor in networks:
        for overhead in overheads:
            tried = start._replace(network=start.network * factor, overhead=overhead, compute=1.0)
            ratios = [math.log(each.measured / each.at(tried)) for each in samples]
            middle = statistics.median(ratios)
            error = statistics.mean(abs(ratio - middle) for ratio in ratios)
            error += HELD * abs(math.log2(factor)) + HELD * (overhead > 0)
            if error < least - 1e-12:
                best = tried._replace(compute=math.exp(middle), num_rows=len(samples))
                least = error
    return best


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, between neighbours by their distance; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation, ties sharing their ranks; nan where one doesn't vary."""
    a, b = _ranks(one), _ranks(other)
    mean = (len(a) - 1) / 2
    across = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return across / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        (sum(other < value for other in values) + sum(other <= value for other in values) - 1) / 2
        for value in values
    ]
