"""Every family of schedules.

Its table is the one its docstring draws, complete, ascending, and runs to the end at every size.
"""

import re
import time
from fractions import Fraction

import published_orders as others
import pytest
from conftest import EVERY, LONG, WITH_LONG
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules import limits
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.catalog import build
from mpitrain.schedules.families import (
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    seq1f1b,
    v_1f1b,
    v_half,
    zb_auto,
    zbv,
    zbv_auto,
    zero_bubble,
)
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.options import DEFAULTS, Options, Times
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.table import Table

SOME_RANKS = (1, 2, 3, 5) if WITH_LONG else (1, 2, 3)
FUNCTIONS = {
    "gpipe": gpipe.gpipe,
    "1f1b": one_f_one_b.one_f_one_b,
    "eager-1f1b": one_f_one_b.eager_1f1b,
    "interleaved": interleaved.interleaved,
    "looped-bfs": interleaved.looped_bfs,
    "zb-h1": zero_bubble.zb_h1,
    "zb-h2": zero_bubble.zb_h2,
    "zb-auto": zb_auto.zb_auto,
    "interleaved-zb": interleaved.interleaved_zb,
    "1f1b-v": v_1f1b.v_1f1b,
    "zbv": zbv.zbv,
    "zbv-auto": zbv_auto.zbv_auto,
    "v-half": v_half.v_half,
    "v-min": v_half.v_min,
    "dualpipe": dualpipe.dualpipe,
    "dualpipev": dualpipe.dualpipev,
    "seq1f1b": seq1f1b.seq1f1b,
}

# ---------------------------------------------------------------- docstrings


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_a_docstring_draws_the_table(name):
    text = FUNCTIONS[name].__doc__
    p, m = map(int, re.search(r"[Ff]or (\d+) (?:stages|ranks), (\d+) microbatches", text).groups())
    drawn = {
        int(rank): row.split()
        for rank, row in re.findall(r"^ *(?:rank|stage) (\d+): +(.*(?:\n {12,}\S.*)*)", text, re.MULTILINE)
    }
    table = build(name, p, m)
    assert sorted(drawn) == list(range(p))
    for rank, row in drawn.items():
        in_full = any("@" in word for word in row)
        assert row == [
            str(action) if in_full else str(action).partition("@")[0] for action in table.ranks[rank]
        ]


# ---------------------------------------------------------------- complete and ascending


def ascends(table: Table) -> bool:
    """Tell whether what adds to a stage's gradients ascends in microbatches, and descends in
    segments within one.
    """
    latest: dict[tuple[int, str], tuple[int, int]] = {}
    for actions in table.ranks:
        for kind, index, stage, _ in (action for action in actions if action.kind in ("B", "I", "W")):
            m, segment = divmod(index, table.segments)
            for half in {"B": "IW"}.get(kind, kind):
                if latest.get((stage, half), (-1, 0)) >= (m, -segment):
                    return False
                latest[stage, half] = (m, -segment)
    return True


def is_complete(table: Table) -> bool:
    """Tell whether every stage has F and B, or F, I and W, of every microbatch, each once."""
    found = sorted(action for actions in table.ranks for action in actions if action != PAIR)
    split = {action[1:3] for action in found if action.kind == "I"}
    cells = [(m, stage) for m in range(table.num_microbatches) for stage in range(table.num_stages)]
    wanted = [(kind, *cell, None) for cell in cells for kind in ("FIW" if cell in split else "FB")]
    return found == sorted(wanted)


def sizes(p: int) -> list[int]:
    """Sample microbatches from 1 to 4p: few, around p, around 2p, many."""
    if p > 8 and not EVERY:
        return [p - 1, 2 * p + 2]
    return sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p} - {0})


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_complete_and_ascending_and_runs_to_the_end(name, p):
    for m in sizes(p):
        if name.startswith("dualpipe") and (m < 2 * p or (name == "dualpipe" and (p % 2 or m % 2))):
            with pytest.raises(ScheduleError, match=f"{name}: found .*, needed .*; "):
                build(name, p, m)
            continue
        table = build(name, p, m)
        assert is_complete(table), f"m = {m}"
        assert ascends(table), f"m = {m}"
        simulate_table(table)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_any_chunks_and_any_groups_of_at_least_a_microbatch_per_rank(name, chunks):
    for p in SOME_RANKS:
        for m in sizes(p):
            least = interleaved.smallest_group(p) if name == "interleaved" else p
            for group in (None, *range(min(least, m), m + 2)):
                table = build(name, p, m, Options(chunks=chunks, group=group))
                assert is_complete(table) and ascends(table)
                check(
                    lower(table, [Reduction(1, ())] * table.num_stages),
                    table.num_stages,
                    table.num_microbatches,
                )


@pytest.mark.parametrize(("group", "makespan", "stashes"), [(7, 1566, 15), (5, 1608, 13), (4, 1707, 12)])
def test_groups_below_a_microbatch_a_rank_hold_less(group, makespan, stashes):
    """As sail-sg's group_interleaved_1f1b.py has them."""
    times = Times(10, 20, 10, 3)
    timeline = simulate_table(build("interleaved", 8, 32, Options(group=group)), times)
    assert timeline.makespan == makespan
    assert max(map(timeline.peak_in_flight, range(8))) == stashes


def test_1f1b_v_is_sail_sgs_op_for_op():
    for p in range(2, 8):
        for m in sizes(p):
            rows = build("1f1b-v", p, m).ranks
            assert [[(a.kind, a.stage, a.index) for a in row] for row in rows] == others.v_1f1b(p, m), (p, m)


def test_too_small_groups_are_refused():
    with pytest.raises(
        ScheduleError,
        match="interleaved: found groups of 1 microbatch, needed at least 2, half as many as ranks; raise",
    ):
        build("interleaved", 4, 8, Options(group=1))


def test_an_option_without_effect_is_refused():
    with pytest.raises(ScheduleError, match="zbv: chunks has no effect on it; it takes no options"):
        build("zbv", 4, 8, Options(chunks=2))
    assert build("zbv", 4, 8, DEFAULTS).name == "zbv"


def test_numbers_below_one_are_refused():
    for name, options in (
        ("interleaved", Options(chunks=0)),
        ("interleaved-zb", Options(group=0)),
        ("seq1f1b", Options(segments=-1)),
    ):
        with pytest.raises(ScheduleError, match=f"{name}: found [a-z]+ = (0|-1), needed at least 1"):
            build(name, 2, 4, options)


def test_more_forwards_than_fit_in_memory_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MOST_FORWARDS", 8)
    assert build("gpipe", 2, 4).num_microbatches == 4
    with pytest.raises(
        ScheduleError, match="gpipe: found 3 ranks x 3 microbatches = 9 forwards, at most 8 fit in memory"
    ):
        build("gpipe", 3, 3)


# ---------------------------------------------------------------- the automatic schedulers


AUTOS = ["zb-auto", "zbv-auto"]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", AUTOS)
@pytest.mark.parametrize(
    "times", [Times(3, 2, 1, 0), Times(0.7, 1.1, 0.4, 0.25), Times(Fraction(2, 3), 1, Fraction(1, 7), 2)]
)
def test_automatic_tables_hold_no_more_than_the_limit(name, times):
    for p in SOME_RANKS:
        for m in sizes(p):
            for limit in (p, 1.5 * p, 2 * p, Fraction(7 * p, 3)):
                table = build(name, p, m, Options(times=times, memory_limit=limit, weight_memory=1))
                timeline = simulate_table(table, times)
                assert is_complete(table) and ascends(table)
                assert max(map(timeline.peak_in_flight, range(p))) <= limit * table.num_stages / p


def test_a_smaller_limit_than_1f1bs_is_met_by_zb_auto():
    times = Times(2, 3, 1, 0.5)
    for limit in (1, 2, 3.5):
        timeline = simulate_table(
            build("zb-auto", 5, 12, Options(times=times, memory_limit=limit, weight_memory=1)), times
        )
        assert max(map(timeline.peak_in_flight, range(5))) <= limit


def test_with_equal_times_zb_auto_counts_whole_stashes():
    for p in (2, 4, 6):
        for limit in (p, 2 * p):
            strict, free = (
                build("zb-auto", p, 3 * p, Options(memory_limit=limit, weight_memory=share))
                for share in (1, None)
            )
            assert strict.ranks == free.ranks


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "zb-auto",
            Options(memory_limit=0.5),
            "zb-auto: found a memory limit of 0.5 stashes, needed at least 1",
        ),
        (
            "zbv-auto",
            Options(memory_limit=0.5),
            "zbv-auto: found a memory limit of 0.5 stashes, needed at least 1",
        ),
        (
            "zb-auto",
            Options(times=Times(1, 0, 1, 0)),
            "zb-auto: found times 1, 0, 1, 0, needed F, I, W above 0",
        ),
        (
            "zbv-auto",
            Options(times=Times(1, 1, 1, -1)),
            "zbv-auto: found times 1, 1, 1, -1, needed .* messages of at least 0",
        ),
        ("zb-auto", Options(times=Times(1, float("nan"), 1, 0)), "zb-auto: found times 1, nan"),
        (
            "zb-auto",
            Options(weight_memory=2),
            "zb-auto: found 2 of a stash held between I and W, needed 0 to 1",
        ),
    ],
)
def test_automatic_schedulers_refuse_what_cannot_be(name, options, message):
    with pytest.raises(ScheduleError, match=message):
        build(name, 4, 8, options)


def test_zbv_auto_needs_no_more_than_all_microbatches():
    assert (
        max(map(simulate_table(build("zbv-auto", 8, 3, Options(memory_limit=3))).peak_in_flight, range(8)))
        <= 2 * 3
    )


@pytest.mark.parametrize(
    ("times", "limit", "least"),
    # the four tables: 0, 1, 0.5, 1 and 16, 15, 16, 15
    [(Times(3, 2, 2, 0), 4, 0), (Times(2, 4, 4, 3), 2, 15)],
)
def test_zbv_auto_takes_the_table_whose_longest_wait_is_shortest(times, limit, least):
    timeline = simulate_table(build("zbv-auto", 2, 7, Options(times=times, memory_limit=limit)), times)
    assert timeline.span - 7 * sum(times[:3]) == least


@pytest.mark.parametrize("name", ["zbv-auto", "v-half", "v-min"])
def test_a_long_search_notifies_of_each_step(name):
    heard = []
    build(name, 2, 4, Options(notify=lambda done, total: heard.append((done, total))))
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1))
    assert all(done <= total for done, total in heard)


@LONG
def test_the_automatic_schedulers_are_quick():
    started = time.process_time()
    for name in AUTOS:
        build(name, 32, 128, Options(times=Times(10.4, 10.2, 7.7, 0.4), memory_limit=64))
    assert time.process_time() - started < 20
