"""`auto`, time against memory, and times of stages that differ."""

import json
import random

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import RECEIVES, SENDS
from mpitrain.schedules.auto_choice import fastest
from mpitrain.schedules.catalog import build
from mpitrain.schedules.options import Options, StageTimes, Times
from mpitrain.schedules.play.measured import Costs, predict, read_trace
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.play.stage_work import LEAST_ERROR, MOST_ERROR, StageWork, stage_work
from mpitrain.schedules.played import played
from mpitrain.schedules.search import problem
from mpitrain.schedules.time_and_memory import StepSize, frontier

TIMES = Times(10, 20, 10, 3)
SAME_BITS = [
    name for name, family in catalog.FAMILIES.items() if family.copies == 1 and "segments" not in family.takes
]


def alone(name, num_ranks, num_microbatches, limit):
    """Play a schedule, planned with TIMES and a limit if it takes them; None: undefined, or above it."""
    plans = {"times": TIMES, "memory_limit": limit, "weight_memory": 1}
    takes = catalog.FAMILIES[name].takes
    options = Options(**{key: value for key, value in plans.items() if key in takes})
    try:
        table = build(name, num_ranks, num_microbatches, options)
        one = played(table, Options(times=TIMES, memory_limit=limit), most_proved=0)
    except ScheduleError:
        return None
    return None if one.above_limit else one


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "limit"), [(3, 7, 3), (3, 7, 2), (4, 5, 6), (1, 3, 1), (2, 2, 4)]
)
def test_auto_is_the_shortest_of_the_catalogue(num_ranks, num_microbatches, limit):
    choice = fastest(num_ranks, num_microbatches, Options(times=TIMES, memory_limit=limit))
    every = [alone(name, num_ranks, num_microbatches, limit) for name in SAME_BITS]
    makespans = [one.timeline.makespan for one in every if one is not None]
    assert choice.played.timeline.makespan == pytest.approx(min(makespans))
    assert max(choice.played.peak_stashes) <= limit
    again = build(choice.name, num_ranks, num_microbatches, choice.options)
    assert again.ranks == choice.table.ranks
    assert choice.table.notes[0].startswith(f"auto: {choice.name} is the shortest of ")


def test_auto_searches_no_large_steps_unless_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(problem, "LARGE", 100)
    searched = {"plain-auto", "interleaved-auto", "v-auto"}
    assert not searched & fastest(3, 6, Options(times=TIMES)).makespans.keys()
    assert searched & fastest(3, 6, Options(times=TIMES, chunks=3, memory_limit=1)).makespans.keys()


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_large_step_is_searched_on_any_number_of_ranks(monkeypatch, num_ranks):
    monkeypatch.setattr(problem, "LARGE", 10)
    assert len(build("interleaved-auto", num_ranks, 11).ranks) == num_ranks


def test_auto_chooses_the_simplest_of_those_that_take_as_long():
    assert fastest(1, 8, Options()).name == "1f1b"


@pytest.mark.parametrize(("chunks", "placements"), [(1, {"plain"}), (2, {"looped", "v"}), (3, {"looped"})])
def test_auto_keeps_the_stages_a_rank_that_are_asked_for(chunks, placements):
    choice = fastest(3, 6, Options(chunks=chunks, times=TIMES))
    assert {catalog.FAMILIES[name].placed for name in choice.makespans} <= placements
    assert len(choice.table.rank_of) == 3 * chunks


@pytest.mark.parametrize("error", [0.02, 0.15, 0.6])
def test_of_makespans_within_the_error_the_one_with_fewest_messages_and_stashes_is_taken(error):
    options = Options(times=TIMES, memory_limit=6)
    shortest, choice = fastest(3, 6, options), fastest(3, 6, options, error=error)
    assert choice.makespans == shortest.makespans
    most = min(choice.makespans.values()) * (1 + error)
    near = [alone(name, 3, 6, 6) for name, makespan in choice.makespans.items() if makespan <= most]

    def costs(one):
        return max(one.messages), max(one.peak_stashes), one.timeline.makespan

    assert choice.played.timeline.makespan <= most
    assert costs(choice.played) == min(map(costs, near)) <= costs(shortest.played)
    assert f"the times' error of {error:.1%}" in choice.table.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(memory_limit=0.5), "auto: found a memory limit of 0.5 stashes, needed at least 1"),
        (Options(group=2), "auto: group has no effect on it"),
        (Options(times=Times(0, 1, 1, 0)), "auto: found times 0, 1, 1, 0, needed"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, message):
    with pytest.raises(ScheduleError, match=message):
        fastest(4, 8, options)
    with pytest.raises(ScheduleError, match="found no schedule within 4 stashes on 4 ranks with 7 chunks"):
        fastest(4, 8, Options(chunks=7), most_stages=10)


# ---------------------------------------------------------------- stages that differ

HEAVY_HEAD = (*[StageTimes(1, 1, 1)] * 3, StageTimes(4, 4, 4))


def test_a_table_is_played_with_the_times_of_each_stage():
    table = build("gpipe", 2, 3)
    timeline = simulate_table(table, Times(message=1), [StageTimes(1, 2, 3), StageTimes(5, 7, 11)])
    # F on rank 0, a message, three of each on rank 1, a message, then B on rank 0
    assert timeline.makespan == 1 + 1 + 3 * 5 + 3 * 18 + 1 + 5
    with pytest.raises(ScheduleError, match="gpipe: found times of 1 stage, needed 2"):
        simulate_table(table, Times(), [StageTimes(1, 1, 1)])


def test_a_search_knows_that_stages_differ():
    known = Options(stage_times=HEAVY_HEAD, memory_limit=4)
    spans = [
        simulate_table(build("plain-auto", 4, 8, options), Times(), HEAVY_HEAD).makespan
        for options in (known, known._replace(stage_times=None))
    ]
    assert spans[0] <= min(spans)
    fixed = [simulate_table(build(name, 4, 8), Times(), HEAVY_HEAD).makespan for name in ("1f1b", "zb-h1")]
    assert spans[0] <= min(fixed)
    with pytest.raises(ScheduleError, match="v-auto: found times of 4 stages, needed 8: 2 a rank"):
        build("v-auto", 4, 8, known)


def content_of(name, work, works, jitter=0, **other):
    """Return the text of a run's trace, of exact times, or of computations up to a share longer."""
    table = build(name, len(works) // (2 if catalog.FAMILIES[name].placed == "v" else 1), 6)
    chance = random.Random(0)
    stages = work._replace(send=0, receive=0).stage_times(works, table.rank_of)
    plain = simulate_table(table, stage_times=stages)
    calls = dict.fromkeys(SENDS, work.send) | dict.fromkeys(RECEIVES, work.receive)
    times = {
        action: calls.get(action.kind, (end - start) * (1 + chance.uniform(0, jitter)))
        for row in zip(plain.programs, plain.starts, plain.ends)
        for action, start, end in zip(*row)
    }
    lead = (0.0,) * len(plain.programs)
    timeline = predict(plain, Costs(times, work.message, 0, lead))
    events = [
        {
            "ph": "X", "name": str(action), "pid": 0, "tid": rank, "ts": 1000 * start,
            "dur": 1000 * (end - start), "args": {"step": 2},
        }
        for rank, program in enumerate(timeline.programs)
        for action, start, end in zip(program, timeline.starts[rank], timeline.ends[rank])
    ]  # fmt: skip
    about = {"schedule": name, "copies": 1, "segments": 1, "works": works, **other}
    return json.dumps({"traceEvents": events, "otherData": about})


WORK = StageWork(StageTimes(2, 3, 1), StageTimes(0.5, 0.25, 0.125), StageTimes(1, 2, 4), 0.5)
CALLS = WORK._replace(send=0.25, receive=0.375)


@pytest.mark.parametrize(
    ("name", "works"), [("zb-h1", [2.0, 3.0, 4.0]), ("zbv", [1.0, 1.0, 2.0, 1.0, 1.0, 1.5])]
)
def test_a_trace_says_what_blocks_and_ends_take(name, works):
    found = stage_work(read_trace(content_of(name, WORK, works)))
    for part, wanted in zip(found._replace(error=0), WORK):
        assert part == pytest.approx(wanted)
    others = [1.0, 0.5, 3.0, 2.0]
    last = StageTimes(2 * 2 + 1, 2 * 3 + 2, 2 * 1 + 4)
    assert found.stage_times(others, range(4))[3] == pytest.approx(last)


@pytest.mark.parametrize(
    ("name", "works"), [("zb-h1", [2.0, 3.0, 4.0]), ("zbv", [1.0, 1.0, 2.0, 1.0, 1.0, 1.5])]
)
def test_what_a_message_takes_of_its_ranks_counts_where_a_stage_has_one(name, works):
    found = stage_work(read_trace(content_of(name, CALLS, works)))
    for part, wanted in zip(found._replace(error=0), CALLS):
        assert part == pytest.approx(wanted, abs=0.02)
    first, turn, *_ = found.stage_times([1.0] * 4, (0, 1, 1, 0))  # no message in the turn
    assert first == pytest.approx((2 + 0.5 + 0.25, 3 + 0.25 + 0.375, 1 + 0.125), abs=0.02)
    assert turn == pytest.approx((2 + 0.375, 3 + 0.25, 1), abs=0.02)


def test_a_trace_says_how_far_its_times_miss_its_own_makespan():
    for jitter, least, most in (
        (0, LEAST_ERROR, LEAST_ERROR),
        (3, 0.03, 0.049),
        (30, MOST_ERROR, MOST_ERROR),
    ):
        assert least <= stage_work(read_trace(content_of("zb-h1", CALLS, [1.0] * 3, jitter))).error <= most


def test_a_whole_backward_counts_half_for_inputs():
    found = stage_work(read_trace(content_of("1f1b", WORK, [2.0, 3.0, 4.0])))
    assert found.block == pytest.approx(StageTimes(2, 2, 2))


@pytest.mark.parametrize("works", [[1, 2], [1, 2, "3"], [1, 2, 0], 7, [1, 2, float("nan")]])
def test_damaged_works_are_refused(works):
    content = content_of("zb-h1", WORK, [2.0, 3.0, 4.0]).replace("[2.0, 3.0, 4.0]", json.dumps(works))
    with pytest.raises(ScheduleError, match="otherData has works"):
        read_trace(content)


# ---------------------------------------------------------------- time against memory


def test_nothing_is_as_short_as_the_front_with_as_little_memory():
    found = frontier(StepSize(3, 4, Options(times=TIMES)))
    peaks = [point.peak for point in found.front]
    makespans = [point.makespan for point in found.front]
    assert peaks == sorted(set(peaks)) and makespans == sorted(set(makespans), reverse=True)
    for point in found.others:
        table = point.played.table
        if table.copies * table.segments == 1:
            better = [one for one in found.front if one.peak <= point.peak]
            assert min(one.makespan for one in better) <= point.makespan * (1 + 1e-9)
    names = {point.played.table.name for point in (*found.front, *found.others)}
    assert {"1f1b", "zbv", "seq1f1b"} <= names
    for point in (*found.front, *found.others):
        assert point.bound <= point.makespan * (1 + 1e-9)
        limit = point.limit or point.peak
        assert point.peak <= limit * (1 + 1e-9)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_no_makespan_is_below_its_bound(name):
    stages = None
    for times in (Times(), TIMES, Times(3, 5, 2, 1)):
        one = played(build(name, 4, 8), Options(times=times, stage_times=stages))
        assert one.timeline.makespan >= one.bound * (1 - 1e-9) > 0
