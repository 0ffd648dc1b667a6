"""What the papers say in a formula holds exactly.

makespan, span, stashes and messages, over sizes and times drawn at random.

Letters: p ranks, m microbatches, v chunks a rank, k segments; F, I, W times of a rank's whole share
of layers and c of a message, as fractions, so that nothing is rounded. A formula is tested where it
holds, and where a page or paper says more than that, the test's docstring tells what was found.
"""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.schedules.actions import COMPUTE, B, F, parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.families.one_f_one_b import alternate
from mpitrain.schedules.lowering.messages import with_messages
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.play.simulate import Link, Timeline, simulate, simulate_table
from mpitrain.schedules.table import make_table

exact = settings(max_examples=30, deadline=None)
ranks = st.integers(1, 6)
more = st.integers(0, 10)  # microbatches above the least
time = st.integers(1, 12).map(Fraction)
share = st.integers(0, 10).map(lambda tenths: Fraction(tenths, 10))
any_times = st.tuples(time, time, time)
# W <= F <= I
ordered_times = st.lists(time, min_size=3, max_size=3).map(
    lambda times: (sorted(times)[1], max(times), min(times))
)


def played(name: str, p: int, m: int, times: tuple, message: Fraction = Fraction(0), **options) -> Timeline:
    return simulate_table(build(name, p, m, Options(**options)), Times(*times, message))


def peaks(timeline: Timeline) -> list[int]:
    return [timeline.peak_in_flight(rank) for rank in range(len(timeline.programs))]


# ---------------------------------------------------------------- whole backwards


@exact
@given(ranks, st.integers(1, 20), any_times, time)
def test_gpipe(p, m, times, c):
    timeline = played("gpipe", p, m, times, c)
    assert timeline.makespan == (m + p - 1) * sum(times) + 2 * (p - 1) * c
    assert peaks(timeline) == [m] * p


@exact
@given(st.integers(2, 6), st.integers(1, 4), any_times, share)
def test_1f1b_waits_for_messages_all_the_time(p, groups, times, c):
    m = p * groups
    c = 3 * c * sum(times)
    timeline = played("1f1b", p, m, times, c)
    assert timeline.makespan == (m + p - 1) * sum(times) + (Fraction(2 * (p - 1) * m, p) + 2 * p - 4) * c
    assert peaks(timeline) == [min(p - r, m) for r in range(p)]


@exact
@given(ranks, st.integers(1, 24), any_times, share)
def test_eager_1f1b_hides_messages_of_up_to_half_a_turn(p, m, times, c):
    c *= Fraction(sum(times), 2)
    timeline = played("eager-1f1b", p, m, times, c)
    assert timeline.makespan == (m + p - 1) * sum(times) + 2 * (p - 1) * c
    assert peaks(timeline) == [min(2 * (p - r) - 1, m) for r in range(p)]


def test_one_more_microbatch_in_flight_is_not_enough_to_hide_messages():
    """Little's law asks for no more than p + 1 in flight.

    But where warmups of neighbours differ by one, a forward and a backward on each and two messages
    are a cycle of two turns. With one more forward on all stages but the last, those wait as 1F1B
    does.
    """

    def makespan(m: int) -> Fraction:
        orders = [
            alternate(
                [F(i, r) for i in range(m)], [B(i, r) for i in range(m)], warmup=p - r if r < p - 1 else 0
            )
            for r in range(p)
        ]
        return simulate_table(make_table("one more", orders), Times(1, 1, 1, c)).makespan

    p = 4
    c = Fraction(1, 10)
    assert makespan(60) - makespan(30) == 30 * (3 + Fraction(2 * (p - 2), p - 1) * c)


@exact
@given(ranks, st.integers(1, 4), st.integers(1, 4), any_times, share)
def test_interleaved(p, v, groups, times, c):
    m = p * groups
    c = c * min(times[0], times[1] + times[2]) / v
    timeline = played("interleaved", p, m, times, c, chunks=v)
    if p > 1:
        assert timeline.makespan == (m + Fraction(p - 1, v)) * sum(times) + (2 * p * v - 2) * c
    assert peaks(timeline) == [min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) for r in range(p)]


@exact
@given(ranks, st.integers(1, 4), more, any_times)
def test_interleaved_and_looped_bfs_with_any_number_of_microbatches_from_p_on(p, v, above, times):
    m = p + above
    for name in ("interleaved", "looped-bfs"):
        assert played(name, p, m, times, chunks=v).makespan == (m + Fraction(p - 1, v)) * sum(times)


@exact
@given(ranks, st.integers(1, 4), more, any_times, share)
def test_looped_bfs(p, v, above, times, c):
    m = 2 * p + above
    c = c * min(times[0], times[1] + times[2]) / v
    timeline = played("looped-bfs", p, m, times, c, chunks=v)
    assert timeline.makespan == (m + Fraction(p - 1, v)) * sum(times) + 2 * (p - 1) * c
    assert peaks(timeline) == [m * v] * p


@exact
@given(ranks, st.integers(1, 4), st.integers(1, 12), any_times)
def test_seq1f1b(p, k, m, times):
    timeline = played("seq1f1b", p, m, times, segments=k)
    assert timeline.makespan == (m + Fraction(p - 1, k)) * sum(times)
    assert peaks(timeline) == [min(p - r + k - 1, m * k) for r in range(p)]


# ---------------------------------------------------------------- split backwards


@exact
@given(st.integers(2, 6), more, ordered_times, share)
def test_zb_h1(p, above, times, c):
    (forward, grad, weight), m = times, 2 * p + above
    c *= weight / (4 * p)
    timeline = played("zb-h1", p, m, times, c)
    assert timeline.makespan == m * sum(times) + (p - 1) * (forward + grad - weight) + 4 * (p - 1) * c
    assert peaks(timeline) == [p] * p


@exact
@given(st.integers(2, 6), more, ordered_times, share)
def test_zb_h2_has_a_short_span_and_the_makespan_of_zb_h1(p, above, times, c):
    (forward, grad, weight), m = times, 2 * p - 1 + above
    timeline = played("zb-h2", p, m, times, c * weight)
    assert (
        timeline.span == m * sum(times) + (p - 1) * (forward + grad - 2 * weight) + 2 * (p - 1) * c * weight
    )
    timeline = played("zb-h2", p, m, times)
    assert timeline.makespan == m * sum(times) + (p - 1) * max(forward, forward + grad - 2 * weight)
    assert peaks(timeline) == [2 * p - 1] * p


@exact
@given(st.integers(2, 6), st.integers(1, 4), more, ordered_times)
def test_interleaved_zb(p, v, above, times):
    (forward, grad, weight), m = times, p + above
    assert (
        played("interleaved-zb", p, m, times, chunks=v).makespan
        == m * sum(times) + (p - 1) * (forward + grad - weight) / v
    )


@exact
@given(st.integers(2, 6), st.integers(2, 4), ordered_times, share)
def test_interleaved_zb_with_two_chunks(p, groups, times, c):
    """The exposed messages are given as 16c for p = 4 and 36c for p = 8: (5p - 4)c."""
    (forward, grad, weight), m = times, p * groups
    c *= weight / (8 * p)
    timeline = played("interleaved-zb", p, m, times, c, chunks=2)
    assert timeline.makespan == m * sum(times) + (p - 1) * (forward + grad - weight) / 2 + (5 * p - 4) * c
    assert peaks(timeline) == [2 * p] * p  # of half a rank's layers


@exact
@given(st.integers(2, 6), more, time, share)
def test_zbv_with_equal_times(p, above, unit, c):
    """The exposed messages are given as 13c for p = 4 and 33c for p = 8: (5p - 7)c."""
    m = 2 * p + above
    c = c * unit / (8 * p)
    assert played("zbv", p, m, (unit, unit, unit)).span == 3 * m * unit
    timeline = played("zbv", p, m, (unit, unit, unit), c)
    assert timeline.makespan == 3 * m * unit + (p - 1) * unit / 2 + (5 * p - 7) * c
    assert peaks(timeline) == [2 * p] * p


@pytest.mark.parametrize("p", range(3, 13))
def test_v_half_and_v_min_with_equal_times(p):
    """Of V-Half two bubbles are given, 2.5 for p = 4 and 8.5 for p = 8.

    Those of 3p/2 - 7/2 for p rounded up to an even number.
    """
    bubble = {4: Fraction(11, 2), 8: Fraction(27, 2)}
    for m in (2 * p, 3 * p + 1):
        half = played("v-half", p, m, (1, 1, 1))
        least = played("v-min", p, m, (1, 1, 1))
        assert half.makespan == 3 * m + Fraction(3 * (p + p % 2) - 7, 2)
        assert max(peaks(half)) == 2 * ((p + 2) // 2)
        assert p not in bubble or least.makespan == 3 * m + bubble[p]
        assert max(peaks(least)) == 2 * ((p + 4) // 3)


# ---------------------------------------------------------------- pairs, one after the other


@exact
@given(st.integers(1, 3), more, ordered_times)
def test_dualpipe_where_w_is_least_and_f_most(half, above, times):
    """(p/2 - 1) (2F + I - W) is found to hold for W <= I <= F only.

    With p = 6, m = 16, F = 5, I = 8, W = 5 the bubble is 27, not 26.
    """
    forward = times[1]
    grad = times[0]
    weight = times[2]
    p = 2 * half
    m = 4 * half + 2 * above
    timeline = played("dualpipe", p, m, (forward, grad, weight))
    assert timeline.makespan == m * sum(times) + (half - 1) * (2 * forward + grad - weight)
    assert peaks(timeline) == [p + 1] * p
    timeline = played("dualpipev", half, m, (forward, grad, weight))
    assert timeline.makespan == m * sum(times) + (half - 1) * (2 * forward + grad - weight) / 2
    assert peaks(timeline) == [p + 1] * half


def test_dualpipe_where_the_formula_does_not_hold():
    assert played("dualpipe", 6, 16, (5, 8, 5)).makespan - 16 * 18 == 27


# ---------------------------------------------------------------- messages

MESSAGES = {  # of an interior rank, per microbatch
    "gpipe": 2,
    "1f1b": 2,
    "eager-1f1b": 2,
    "interleaved": 4,
    "looped-bfs": 4,
    "zb-h1": 2,
    "zb-h2": 2,
    "zb-auto": 2,
    "interleaved-zb": 4,
    "zbv": 4,
    "zbv-auto": 4,
    "v-half": 4,
    "v-min": 4,
    "dualpipe": 2,
    "dualpipev": 4,
    "seq1f1b": 4,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_an_interior_rank(name):
    for p, m in ((4, 8), (6, 12)):
        programs = with_messages(build(name, p, m))
        for program in programs[1:-1]:
            assert sum(action.kind in ("SEND_F", "SEND_B") for action in program) == MESSAGES[name] * m


def test_messages_of_one_sender_leave_one_after_the_other():
    programs = map(parse_program, ["RECV_B0@0 B0@0", "F0@1 SEND_F0@1 SEND_B0@1", "RECV_F0@2 F0@2"])
    timeline = simulate(list(programs), {"F": 1}, Link(latency=5, transfer=3))
    assert timeline.starts[2][1] == 1 + 5 + 3 and timeline.starts[0][1] == 1 + 3 + 5 + 3


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv"])
def test_a_shorter_computation_makes_no_step_longer(name):
    """Two neighbours' messages came in another order then, and one waited for the other."""
    rng = random.Random(name)
    programs = with_messages(build(name, 4, 8))
    actions = sorted({action for program in programs for action in program if action.kind in COMPUTE})
    for _ in range(40):
        times = {action: rng.randint(10, 40) for action in actions}
        shorter = {action: time - rng.choice([0, 0, 1, 5]) for action, time in times.items()}
        link = Link(latency=rng.randint(0, 5), transfer=rng.randint(5, 30))
        before, after = (
            simulate(programs, lambda action, costs=costs: costs.get(action, 0), link).makespan
            for costs in (times, shorter)
        )
        assert after <= before
