"""Every family of schedules: its table is the one its docstring draws, complete, ascending, and runs to the end at every size."""

import re

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.schedules import dualpipe, gpipe, interleaved, one_f_one_b, zb_auto, zbv, zero_bubble
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.catalog import NAMES, build
from mpitrain.schedules.options import DEFAULTS, Options
from mpitrain.schedules.simulate import simulate_table
from mpitrain.schedules.table import Table

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
    "zbv": zbv.zbv,
    "dualpipe": dualpipe.dualpipe,
    "dualpipev": dualpipe.dualpipev,
}

# ---------------------------------------------------------------- docstrings


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_a_docstring_draws_the_table(name):
    text = FUNCTIONS[name].__doc__
    p, m = map(int, re.search(r"[Ff]or (\d+) (?:stages|ranks), (\d+) microbatches", text).groups())
    drawn = {int(rank): row.split() for rank, row in re.findall(r"^ *(?:rank|stage) (\d+): +(.*)$", text, re.MULTILINE)}
    table = build(name, p, m)
    assert sorted(drawn) == list(range(p))
    for rank, row in drawn.items():
        in_full = any("@" in word for word in row)
        assert row == [str(action) if in_full else str(action).partition("@")[0] for action in table.ranks[rank]]


# ---------------------------------------------------------------- complete and ascending


def ascends(table: Table) -> bool:
    """Tell whether what adds to a stage's gradients ascends in microbatches, and descends in segments within one."""
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
    return sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p} - {0})


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 12, 16])
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


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_any_chunks_and_any_groups_of_at_least_a_microbatch_per_rank(name, chunks):
    for p in (1, 2, 3, 5):
        for m in sizes(p):
            for group in (None, *range(min(p, m), m + 2)):
                table = build(name, p, m, Options(chunks=chunks, group=group))
                assert is_complete(table) and ascends(table)
                simulate_table(table)


def test_too_small_groups_are_refused():
    with pytest.raises(ScheduleError, match="interleaved: found groups of 3 microbatches, needed at least 4, one per rank; raise group"):
        build("interleaved", 4, 8, Options(group=3))


def test_an_option_without_effect_is_refused():
    with pytest.raises(ScheduleError, match="zbv: chunks has no effect on it; it takes no options"):
        build("zbv", 4, 8, Options(chunks=2))
    assert build("zbv", 4, 8, DEFAULTS).name == "zbv"
