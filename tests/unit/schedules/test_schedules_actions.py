"""Actions and tables: what is written can be read back, and what can't be read is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import (
    COMPUTE,
    GATHER,
    INDEXED,
    NORM,
    PLAIN,
    REDUCE,
    SEND_F,
    Action,
    B,
    F,
    I,
    W,
    format_program,
    parse,
    parse_program,
)
from mpitrain.schedules.catalog import build
from mpitrain.schedules.table import make_table, read_table, write_table

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(INDEXED), NUMBERS, NUMBERS, st.none()),
    st.builds(Action, st.sampled_from((*COMPUTE, "REDUCE")), NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(PLAIN).map(Action),
)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (F(3, 1), "F3@1"),
        (B(7, 1, 0), "B7@1/0"),
        (W(2, 0), "W2@0"),
        (SEND_F(3, 1), "SEND_F3@1"),
        (F(3, 1, 0), "F3@1/0"),
        (I(3, 1, 2), "I3@1/2"),
        (GATHER(4, 1), "GATHER4@1"),
        (REDUCE(2, 1), "REDUCE2@1"),
        (REDUCE(2, 1, 5), "REDUCE2@1/5"),
        (NORM, "NORM"),
    ],
)
def test_text_form(action, text):
    assert str(action) == text
    assert parse(text) == action


@given(st.lists(ACTIONS), st.integers(20, 120))
def test_program_survives_a_round_trip_through_text(actions, width):
    text = format_program(actions, width)
    assert parse_program(text) == actions
    assert parse_program(text.replace("\n", " # a comment\n")) == actions


def test_lines_are_no_longer_than_width():
    text = format_program([F(m, 0) for m in range(100)], width=40)
    assert max(map(len, text.splitlines())) <= 40


INCOMPLETE = ["", "F", "F3", "F@1", "F3@", "B3@1/", "REDUCE2"]
MISSPELT = ["f3@1", "3F@1", "F-3@1", "F03@1", "F³@1", "F3@1,", "F3@1 F4@1"]
UNKNOWN = ["G3@1", "SEND3@1", "NORM3@1", "SEND_F3@1/0", "GATHER1@0/2", "NORM/0"]


@pytest.mark.parametrize("token", INCOMPLETE + MISSPELT + UNKNOWN)
def test_bad_tokens_are_refused_by_name(token):
    with pytest.raises(ScheduleError) as error:
        parse(token)
    assert repr(token) in str(error.value)


def test_bad_token_in_a_program_is_placed():
    with pytest.raises(ScheduleError, match="ScheduleError: line 2: 'F1' is no instruction"):
        parse_program("F0@0 # F9\nF1 B0@0")


# ---------------------------------------------------------------- tables


@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 6))
def test_table_survives_a_round_trip_through_text(name, half, more):
    table = build(name, 2 * half, 4 * half + 2 * more)  # sizes that every schedule is defined for
    assert read_table(write_table(table), name) == table


def test_placement_follows_from_the_actions():
    table = read_table("rank 0: F0@0 F0@3 B0@3 B0@0  # a V\n\nrank 1: F0@1 F0@2 B0@2 B0@1\n")
    assert (table.rank_of, table.num_stages, table.num_microbatches) == ((0, 1, 1, 0), 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no ranks"),
        ("rank 0: F0@0\nrank 2: F0@1", "line 2: found 'rank 2: F0@1', needed 'rank 1: '"),
        ("F0@0 B0@0", "line 1: found 'F0@0 B0@0', needed 'rank 0: '"),
        ("rank 0: F0@0\nrank 1: F0@1 X0@1", "line 2: 'X0@1'"),
        ("rank 0: F0@0 SEND_F0@0", "rank 0, position 1: found SEND_F0@0"),
        ("rank 0: F0@0 B0@0/0", "rank 0, position 1: found B0@0/0"),
        ("rank 0: F0@0/0 B0@0", "rank 0, position 0: found F0@0/0"),
        ("rank 0: F0@0\nrank 1: F1@0", "stage 0 is on ranks 0 and 1"),
        ("rank 0: F0@0 F0@2", "no rank computes stage 1"),
        ("rank 0: F0@0\nrank 1:", "rank 1 computes nothing"),
    ],
)
def test_bad_tables_are_refused(text, message):
    with pytest.raises(ScheduleError) as error:
        read_table(text)
    assert message in str(error.value)


def test_make_table_refuses_the_update():
    with pytest.raises(ScheduleError, match="found NORM"):
        make_table("mine", [[F(0, 0), NORM]])
