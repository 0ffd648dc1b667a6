"""How reliable a run was, from its ends (ends.jsonl) and the seconds of its steps."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np

from mpitrain.errors import DONE, STOPPED_EARLY
from mpitrain.report.recorded_run import RunEnd

TIME = "%Y-%m-%d %H:%M:%S %z"


class Reliability(NamedTuple):
    """share_trained: steps that count, of the time since the first start. NaN: it isn't known."""

    num_failures: int
    hours_between_failures: float  # of running
    steps_lost: int
    share_trained: float


class EndsOfClass(NamedTuple):
    """hours_between: of running, from one to the next in the mean; NaN where that isn't known."""

    count: int
    hours_between: float
    steps_lost: int


def by_class(ends: Sequence[RunEnd], class_of: Callable[[RunEnd], str]) -> dict[str, EndsOfClass]:
    """Return the ends of each class, the most frequent first."""
    up_s = _running_s(ends)
    names = Counter(map(class_of, ends))
    lost = Counter[str]()
    for end in ends:
        lost[class_of(end)] += end.lost or 0
    return {
        name: EndsOfClass(count, up_s / 3600 / count if up_s else np.nan, lost[name])
        for name, count in names.most_common()
    }


def reliability(
    ends: Sequence[RunEnd], step_s: np.ndarray | None, newest_s: float = np.nan
) -> Reliability | None:
    """Return it, or None of a run without ends.

    step_s: seconds of all steps that count. newest_s: when the last of them was over, since 1970:
    the run may have been started again since its last end.
    """
    if not ends:
        return None
    failures = [end for end in ends if end.code not in (DONE, STOPPED_EARLY)]
    spans = _spans(ends)
    up_s = _running_s(ends)
    last_s = [spans[-1][1].timestamp(), newest_s] if spans else []
    whole_s = np.nanmax(last_s) - spans[0][0].timestamp() if spans else 0.0
    trained_s = float(np.nansum(step_s)) if step_s is not None else 0.0
    return Reliability(
        len(failures),
        up_s / 3600 / len(failures) if failures and up_s else np.nan,
        sum(end.lost or 0 for end in ends),
        min(1.0, trained_s / whole_s) if whole_s > 0 else np.nan,
    )


def _spans(ends: Sequence[RunEnd]) -> list[tuple[datetime, datetime]]:
    return [(began, ended) for end in ends if (began := _time(end.began)) and (ended := _time(end.time))]


def _running_s(ends: Sequence[RunEnd]) -> float:
    return sum(max(0.0, (ended - began).total_seconds()) for began, ended in _spans(ends))


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, TIME)
    except ValueError:
        return None
