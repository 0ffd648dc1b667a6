"""Parameters and gradients that travel while a rank computes, and messages.

What of it is waited for, in closed forms.

Letters: n parts with a bucket each, g the time to gather one, d to reduce one; a stage's F takes n
and its B 2n, so that the parts of a forward take 1 each and those of a backward 2.
"""

from fractions import Fraction

import pytest
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.play.simulate import Link, simulate
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.play.transfers import Transfers
from mpitrain.schedules.table import forwards


def played(name: str, p: int, m: int, n: int, times: dict, *, ahead: int = 1, each: bool = False) -> Timeline:
    table = build(name, p, m)
    residency = Residency((tuple((part,) for part in range(n)),) * table.num_stages, ahead)
    programs = lower(
        table, [Reduction(n, tuple(range(n)))] * table.num_stages, residency=residency, reduce_each=each
    )
    whole = Fraction(n)  # as a fraction, so that parts have exact times
    return simulate(
        programs, {"F": whole, "B": 2 * whole, "I": whole, "W": whole}, transfers=Transfers(times, residency)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("g", [Fraction(1, 3), 1])
def test_one_ahead_hides_all_but_the_first_gather_if_none_takes_longer_than_a_part(name, g):
    for p, m in ((1, 3), (2, 4), (4, 8), (4, 9)):
        try:
            at_once = played(name, p, m, 3, {})
        except ScheduleError:
            continue
        timeline = played(name, p, m, 3, {"GATHER": g})
        assert timeline.makespan == at_once.makespan + g
        assert max(timeline.exposed_transfers) == g
        assert at_once.exposed_transfers == [0] * p


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (5, 4)])
def test_without_looking_ahead_every_gather_is_waited_for(n, m):
    for name, gathers in (("gpipe", 2 * m * n - 1), ("1f1b", 2 * m * n - (2 * m - 1))):
        timeline = played(name, 1, m, n, {"GATHER": Fraction(1, 2)}, ahead=0)
        assert timeline.exposed_transfers == [Fraction(gathers, 2)]
        assert timeline.makespan == 3 * m * n + Fraction(gathers, 2)


@pytest.mark.parametrize("ahead", [1, 2])
def test_gathers_that_take_longer_than_the_parts_follow_one_another(ahead):
    """A forward whose gathers take 10 for each part of 1: the last part starts when the last gather ends."""
    residency = Residency((tuple((part,) for part in range(4)),), ahead)
    programs = lower(forwards(build("gpipe", 1, 1)), [], train=False, residency=residency)
    timeline = simulate(programs, {"F": 4}, transfers=Transfers({"GATHER": 10}, residency))
    assert timeline.makespan == 4 * 10 + 1
    assert timeline.idle(0) == timeline.exposed_transfers[0] == 37


def test_the_norm_waits_for_the_last_reduction():
    """With several microbatches each part is reduced while the next computes, as long as that takes
    no longer.
    """
    for m in (1, 3):
        for d in (Fraction(1, 2), 2):
            for each in (False, True):
                timeline = played("gpipe", 1, m, 3, {"REDUCE": d}, each=each)
                assert timeline.makespan == 9 * m + d
                assert timeline.exposed_transfers == [d]


def test_reductions_and_gathers_share_the_way():
    """B0/1 waits for its bucket, which is gathered after a reduction."""
    program = parse_program(
        "F0@0/0 F0@0/1 B0@0/0 REDUCE0@0 GATHER1@0 B0@0/1 RELEASE1@0 REDUCE1@0 NORM UPDATE"
    )
    residency = Residency((((), (1,)),))
    timeline = simulate(
        [program], {"F": 2, "B": 2}, transfers=Transfers({"GATHER": 3, "REDUCE": 5}, residency)
    )
    assert [start for _, start, _ in timeline.computations(0)] == [0, 1, 2, 3 + 5 + 3]
    assert timeline.makespan == 3 + 5 + 3 + 1 + 5


def test_a_bucket_can_have_its_own_time():
    times = Transfers(lambda action: action.index, Residency((((3,), (5,)),)))
    programs = lower(forwards(build("gpipe", 1, 1)), [], train=False, residency=times.residency)
    assert simulate(programs, {"F": 2}, transfers=times).makespan == 5 + 3 + 1


def test_messages_of_one_sender_leave_one_after_the_other():
    programs = map(parse_program, ["RECV_B0@0 B0@0", "F0@1 SEND_F0@1 SEND_B0@1", "RECV_F0@2 F0@2"])
    timeline = simulate(list(programs), {"F": 1}, Link(latency=5, transfer=3))
    assert timeline.starts[2][1] == 1 + 5 + 3 and timeline.starts[0][1] == 1 + 3 + 5 + 3
