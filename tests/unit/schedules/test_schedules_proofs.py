"""Every schedule at every size is proved.

complete, in order, matched, and free of deadlock although no send is buffered.

A sample of sizes; MPITRAIN_EFFORT=all takes every p in 2..16 and m in 1..4p (some minutes).
"""

import pytest
from conftest import EVERY
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.proof.check import check

RANKS = range(2, 17) if EVERY else (2, 3, 4, 7, 16)


def sizes(p):
    """Return the numbers of microbatches to try.

    Around the ranks and their multiples, odd ones and even ones.
    """
    if EVERY:
        return range(1, 4 * p + 1)
    return sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p} - {0}) if p < 16 else (34,)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_proved_or_refused_with_a_reason(name, p):
    defined = 0
    refusals = []
    for m in sizes(p):
        try:
            table = build(name, p, m)
        except ScheduleError as error:
            refusals.append(str(error))
            continue
        defined += 1
        reduces = [Reduction(2, (0, 1))] * table.num_stages
        programs = lower(table, reduces)
        report = check(
            programs,
            table.num_stages,
            table.num_microbatches,
            copies=table.copies,
            segments=table.segments,
            reduces=reduces,
        )
        timeline = simulate(programs)
        peaks = [timeline.peak_in_flight(rank) for rank in range(p)]
        assert list(report.peak_in_flight) == peaks, (name, p, m)
    assert all("found" in text and "needed" in text for text in refusals), refusals
    assert defined or (name == "dualpipe" and p % 2), f"{name} is defined for no size at {p} ranks"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_blocking_sends_would_deadlock(name):
    """What makes the proof worth something.

    The same programs with sends that block end only under GPipe (4 ranks).
    """
    table = build(name, 4, 8)
    programs = lower(table, [Reduction(1, ())] * table.num_stages)
    facts = dict(copies=table.copies, segments=table.segments)
    with pytest.raises(ScheduleError, match="deadlock, each rank waits for the next"):
        check(programs, table.num_stages, table.num_microbatches, blocking_sends=True, **facts)
