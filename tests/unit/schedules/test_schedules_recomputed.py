"""Recomputation and offloading as choices of a schedule: which stashes, and at what price."""

import random
from itertools import combinations

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import fastest
from mpitrain.schedules.catalog import build
from mpitrain.schedules.formats.other_formats import FORMS, write_as
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.played import played
from mpitrain.schedules.search.problem import AGAIN, DROPPED, FETCHED, SENT, Problem, stage_costs
from mpitrain.schedules.search.recomputation import recomputed
from mpitrain.schedules.search.timed_order import OrderedPlay, order_of
from mpitrain.schedules.table import read_table, write_table
from mpitrain.schedules.time_and_memory import StepSize, frontier

TIMES = Times(10, 20, 10, 3)
KEPT = 0.05
SEARCHED = ("plain-auto", "interleaved-auto", "v-auto")


def held_at_most(order, freed, late=1.0, sent=False):
    """Return the peak of one rank's order if some of its stashes are dropped and made again before I.

    sent: they are offloaded between F and I instead.
    """
    held = peak = 0.0
    for kind, stage, m in order:
        is_freed = (stage, m) in freed
        if kind == 0:
            peak = max(peak, held + (sent or not is_freed or KEPT))
            held += (0 if sent else KEPT) if is_freed else 1
        elif kind == 1:
            held += (1 if sent else 1 - KEPT) if is_freed else 0
            peak = max(peak, held)
            held += late - 1
        else:
            held -= late
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_fewer_stashes_can_be_freed(seed, sent):
    """Every set of them is tried, for one rank's order."""
    chance = random.Random(seed)
    p, m, rank = chance.randint(2, 4), chance.randint(2, 5), 0
    limit, late = chance.choice((1, 2, 2.5, 3)), chance.choice((1, 0.5))
    table = build(chance.choice(("gpipe", "1f1b", "zb-h1", "zb-h2")), p, m)
    costs = stage_costs(table.rank_of, TIMES)
    problem = Problem(costs, m, limit, late, *((None, 5) if sent else (KEPT, None)))
    order = order_of(table.ranks)
    row = order[rank]
    found = recomputed(problem, order)
    stashes = [step[1:] for step in row if step[0] == 0]
    fitting = (
        number
        for number in range(len(stashes) + 1)
        if any(
            held_at_most(row, set(some), late, sent) <= limit + 1e-9 for some in combinations(stashes, number)
        )
    )
    least = next(fitting, None)
    if found is None:  # another rank may be the reason
        assert least is None or recomputed(problem, [row]) is not None
        return
    before, after = (SENT, FETCHED) if sent else (DROPPED, AGAIN)
    freed = {step[1:] for step in found[rank] if step[0] == before}
    assert freed == {step[1:] for step in found[rank] if step[0] == after}
    assert held_at_most(row, freed, late, sent) <= limit + 1e-9
    assert len(freed) == least


@pytest.mark.parametrize(
    "given", [{"recompute": KEPT}, {"offload": 7.0}, {"recompute": KEPT, "offload": 4.0}]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_may_free_stashes_keeps_the_limit_and_is_no_longer(seed, given):
    chance = random.Random(seed)
    p, name = chance.randint(2, 4), SEARCHED[seed % 3]
    m, limit = chance.randint(2, 2 * p), chance.choice((1, 1.5, 2, p))
    times = Times(*(chance.randint(1, 9) for _ in range(3)), chance.choice((0, 1)))
    asked = Options(times=times, memory_limit=limit, weight_memory=chance.choice((1, 0.5)))
    freed = asked._replace(**given)
    kept, again = played(build(name, p, m, asked), asked), played(build(name, p, m, freed), freed)
    assert again.proof is not None and not again.above_limit
    assert again.timeline.makespan <= kept.timeline.makespan * (1 + 1e-9)
    assert again.bound <= again.timeline.makespan * (1 + 1e-9)
    assert not kept.recomputed and not kept.offloaded
    chunks = len(again.chunks[0])
    costs, copy = stage_costs(again.table.rank_of, times), given.get("offload", 0) / chunks
    problem = Problem(costs, m, limit * chunks, asked.weight_memory, KEPT, copy)
    plan = OrderedPlay(problem, order_of(again.table.ranks, split=False)).play()
    assert plan is not None and plan.makespan == pytest.approx(again.timeline.makespan)
    assert plan.peak(problem) / chunks == pytest.approx(max(again.peak_stashes))


def test_more_memory_costs_no_time_where_stashes_are_recomputed():
    spans = []
    for limit in (1, 2, 3):
        options = Options(times=TIMES, memory_limit=limit, weight_memory=1, recompute=KEPT)
        spans.append(fastest(3, 4, options).played.timeline.makespan)
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("kept", [0.0, 0.3])
def test_the_fastest_schedule_is_played_with_the_share_that_was_given(kept):
    options = Options(times=TIMES, memory_limit=1, weight_memory=1, recompute=kept)
    assert fastest(3, 4, options).played.recompute == kept


@pytest.mark.parametrize("given", [{"recompute": KEPT}, {"offload": 10.0}])
def test_the_front_is_nowhere_longer_where_stashes_are_freed(given):
    plain, again = (frontier(StepSize(3, 3, Options(times=TIMES, **more))) for more in ({}, given))
    assert any(point.played.recomputed or point.played.offloaded for point in again.front)
    for point in plain.front:
        assert min(one.makespan for one in again.front if one.peak <= point.peak + 1e-9) <= point.makespan
    for point in (*again.front, *again.others):
        assert point.bound <= point.makespan * (1 + 1e-9)


def test_a_table_says_what_is_recomputed():
    text = "rank 0: F0@0 F1@0 R0@0 B0@0 B1@0\n"
    table = read_any(text)
    assert read_table(write_table(table), "user") == table
    one = played(table, Options(times=Times(3, 5, 7), recompute=0.25))
    assert one.recomputed == {(0, 0)}
    assert one.timeline.makespan == 2 * 15 + 3
    assert max(one.peak_stashes) == 2  # R0 while 1 is held
    assert one.proof.peak_in_flight == (2,)
    require_papers_alone(table)


def require_papers_alone(table):
    """Only the papers' notation has words for what is recomputed or offloaded."""
    assert read_any(write_as("papers", table))._replace(notes=()) == table
    for form in FORMS.keys() - {"papers"}:
        with pytest.raises(ScheduleError, match=f"{form}'s form has no recomputation"):
            write_as(form, table)


def test_a_table_says_what_is_offloaded():
    text = "rank 0: O0@0 F0@0 F1@0 B0@0 B1@0\n"
    table = read_any(text)
    require_papers_alone(table)
    assert read_table(write_table(table), "user") == table
    # F beside a copy of 4, and B, which is longer than it
    one = played(table, Options(times=Times(3, 5, 7), offload=4))
    assert one.offloaded == {(0, 0)} and one.timeline.makespan == 2 * 15 + 1
    assert one.memory(0)[1:] == [(0, 1), (4, 0), (4, 1), (7, 2), (19, 1), (31, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: R0@0 F0@0 B0@0", "R0@0 stands before F0@0"),
        ("rank 0: F0@0 B0@0 R0@0", "B0@0 stands before R0@0"),
        ("rank 0: F0@0 R0@0 R0@0 B0@0", "R0@0 again"),
        ("segments 2\nrank 0: F0@0 F1@0 R1@0 B1@0 B0@0", "found R with 2 segments"),
        ("rank 0: F0@0 O0@0 B0@0", "F0@0 stands before O0@0"),
        ("rank 0: O0@0 F0@0 R0@0 B0@0", "found O0@0 and R0@0; needed one of them"),
    ],
)
def test_a_recomputation_out_of_place_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        read_any(text)


def resolved(*overrides):
    return resolve(settings.load(None, ["parallel.pp=2", "batch.global=4", *overrides]), 2, 256)


def test_what_recomputes_twice_is_refused(tmp_path):
    (tmp_path / "again.txt").write_text("rank 0: F0@0 R0@0 B0@0\nrank 1: F0@1 B0@1\n")
    keys = f"pipeline.schedule={tmp_path / 'again.txt'}", "batch.global=1"
    assert plan_of(resolved(*keys, "memory.recompute=selective")).training
    with pytest.raises(ConfigError, match=r'memory.recompute = "full" with .*again.txt, which recomputes 1'):
        _ = plan_of(resolved(*keys, "memory.recompute=full")).training
    (tmp_path / "again.txt").write_text("rank 0: O0@0 F0@0 B0@0\nrank 1: F0@1 B0@1\n")
    with pytest.raises(ConfigError, match=r'memory.offload = "all" with .*again.txt, which offloads 1'):
        _ = plan_of(resolved(*keys, "memory.offload=all")).training


@pytest.mark.parametrize("name", [name for name in catalog.NAMES if name not in SEARCHED])
def test_only_searches_recompute(name):
    with pytest.raises(ScheduleError, match="recompute has no effect on it"):
        _ = plan_of(resolved(f"pipeline.schedule={name}", "pipeline.recompute=0.05", "batch.global=8")).table


def test_evaluation_recomputes_nothing():
    keys = "pipeline.schedule=v-auto", "pipeline.memory_limit=1", "pipeline.recompute=0.05"
    plan = plan_of(resolved(*keys, "pipeline.times=[1,2,1,0.3]"))
    assert any(action.kind == "R" for program in plan.training.ranks for action in program)
    assert not any(action.kind == "R" for program in plan.evaluation.ranks for action in program)
