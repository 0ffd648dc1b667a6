"""The tables of GPipe and 1F1B, as the docstrings and the papers draw them."""

import pytest
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.catalog import build
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.table import Table, forwards


def rows(table: Table) -> list[str]:
    """Write each rank's row without stages, as docstrings do."""
    return [" ".join(f"{action.kind}{action.index}" for action in actions) for actions in table.ranks]


def test_1f1b_is_its_docstrings_table():
    assert rows(build("1f1b", 4, 6)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_1f1b_is_megatrons_table():
    """As Megatron-LM's forward_backward_pipelining_without_interleaving orders 4 stages, 8 microbatches."""
    assert rows(build("1f1b", 4, 8)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert rows(build("1f1b", 4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_gpipe_and_forward_are_their_docstrings_tables():
    assert rows(build("gpipe", 3, 4)) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3
    assert rows(forwards(build("gpipe", 3, 4))) == ["F0 F1 F2 F3"] * 3


def test_stage_s_is_on_rank_s():
    assert build("1f1b", 4, 2).rank_of == (0, 1, 2, 3)


@pytest.mark.parametrize(("asked", "meant"), [("1f1", "1f1b"), ("GPipe", "gpipe"), ("gpip", "gpipe")])
def test_unknown_name_gets_a_suggestion(asked, meant):
    with pytest.raises(ScheduleError, match=f"unknown schedule '{asked}'; did you mean '{meant}'") as error:
        build(asked, 2, 2)
    assert all(name in str(error.value) for name in NAMES)


def test_evaluation_keeps_a_schedules_forwards():
    table = forwards(build("zbv", 2, 3))
    assert all(action.kind == "F" for row in table.ranks for action in row)
    assert (table.rank_of, table.num_microbatches) == ((0, 1, 1, 0), 3)


@pytest.mark.parametrize(("sizes", "reason"), [((0, 4), "found 0 stages"), ((4, 0), "found 0 microbatches")])
def test_undefined_sizes_are_refused(sizes, reason):
    with pytest.raises(ScheduleError, match=reason):
        build("gpipe", *sizes)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_bubble_in_unit_time(name, p):
    for m in range(1, 4 * p + 1, max(1, p // 4)):
        table = build(name, p, m)
        timeline = simulate(table)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert timeline.makespan == 3 * (m + p - 1)


def test_each_forward_starts_when_the_stage_before_is_done():
    assert [row[-1] for row in simulate(forwards(build("gpipe", 3, 2)), {"F": 5}).ends] == [10, 15, 20]


# ---------------------------------------------------------------- pictures


def test_grid_of_1f1b():
    assert grid(build("1f1b", 3, 3)).splitlines() == [
        "tick   0              5              10",
        "rank 0 F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---",
        "rank 1 .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .",
        "rank 2 .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .",
        "bubble 40.0% of 15 ticks",
    ]


def test_grid_marks_a_cell():
    assert grid(build("gpipe", 2, 2), mark=(1, 2)).splitlines() == [
        "tick   0              5",
        "rank 0 F0 F1 .  .  .  B0--- B1---",
        "rank 1 .  F0 F1 B0!-- B1--- .  .",
        "bubble 33.3% of 9 ticks",
    ]


def test_large_grid_is_cut_into_bands_that_fit():
    lines = grid(build("1f1b", 16, 64), width=120).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "bubble 19.0% of 237 ticks"
    assert (len(lines) - 1) % 17 == 0
    row = "".join(line.removeprefix("rank 15 ").ljust(100) for line in lines if line.startswith("rank 15"))
    assert row.split()[15:19] == ["F0", "B0-----", "F1", "B1-----"] and "B63----" in row


def test_grid_names_stages_where_a_rank_has_several():
    table = Table("mine", 1, (build("gpipe", 1, 1).ranks[0],), (0,))
    assert "F0 B0" in grid(table)
    both = build("gpipe", 2, 1).ranks
    assert "F0 f0 b0--- B0---" in grid([[both[0][0], *both[1], both[0][1]]])
    assert "F0@0 F0@1 B0@1!---- B0@0-----" in grid([[both[0][0], *both[1], both[0][1]]], mark=(0, 2))


def test_grid_of_what_cannot_run_says_so():
    assert "can't be played to their end: 6 ticks" in grid(
        [[*reversed(build("gpipe", 1, 2).ranks[0])]], waits=False
    )
