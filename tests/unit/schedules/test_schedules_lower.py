"""Lowering: where messages, parts, reductions and the update go."""

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import format_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.table import forwards, read_table

WHOLE = Reduction(1, ())


def texts(programs):
    return [format_program(program, width=10_000) for program in programs]


def test_a_receive_stands_before_its_consumer_and_a_send_after_its_producer():
    assert texts(lower(build("1f1b", 2, 2), [WHOLE] * 2)) == [
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0 NORM UPDATE",
        "RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1 NORM UPDATE",
    ]


def test_evaluation_has_messages_only():
    programs = lower(forwards(build("gpipe", 2, 1)), [], train=False)
    assert texts(programs) == ["F0@0 SEND_F0@0", "RECV_F0@1 F0@1"]
    assert check(programs, 2, 1, train=False).peak_in_flight == (0, 0)


def test_stages_of_one_rank_hand_over_without_a_message():
    table = read_table("rank 0: F0@0 F0@3 B0@3 B0@0\nrank 1: F0@1 F0@2 B0@2 B0@1")
    programs = lower(table, [WHOLE] * 4)
    assert texts(programs) == [
        "F0@0 SEND_F0@0 RECV_F0@3 F0@3 B0@3 SEND_B0@3 RECV_B0@0 B0@0 NORM UPDATE",
        "RECV_F0@1 F0@1 F0@2 SEND_F0@2 RECV_B0@2 B0@2 B0@1 SEND_B0@1 NORM UPDATE",
    ]
    assert check(programs, 4, 1).num_messages == 4


# ---------------------------------------------------------------- reductions


def test_reductions_start_between_the_parts_of_the_last_backward():
    """Uneven: parts 0 and 3 complete no bucket of stage 1, part 2 completes two."""
    programs = lower(build("gpipe", 2, 2), [WHOLE, Reduction(4, (1, 2, 2))])
    assert texts(programs)[1].endswith(
        "B0@1 SEND_B0@1 B1@1/0 B1@1/1 REDUCE0@1 B1@1/2 REDUCE1@1 REDUCE2@1 B1@1/3 SEND_B1@1 NORM UPDATE"
    )
    assert texts(programs)[0].endswith("B0@0 RECV_B1@0 B1@0 NORM UPDATE")
    check(programs, 2, 2, reduces=[WHOLE, Reduction(4, (1, 2, 2))])


@pytest.mark.parametrize(
    ("reduction", "end"),
    [(Reduction(1, (0,)), "B1@0/0 REDUCE0@0"), (Reduction(1, ()), "B1@0"), (Reduction(3, ()), "B1@0")],
)
def test_a_backward_is_split_only_for_buckets(reduction, end):
    assert texts(lower(build("1f1b", 1, 2), [reduction])) == [f"F0@0 B0@0 F1@0 {end} NORM UPDATE"]


def test_of_a_split_backward_the_last_weight_half_is_walked_in_parts():
    table = read_table("rank 0: F0@0 F1@0 I0@0 W0@0 I1@0 W1@0\nrank 1: F0@1 I0@1 F1@1 I1@1 W0@1 W1@1")
    reduces = [Reduction(2, (0, 1))] * 2
    programs = lower(table, reduces)
    assert texts(programs)[1] == (
        "RECV_F0@1 F0@1 I0@1 SEND_B0@1 RECV_F1@1 F1@1 I1@1 SEND_B1@1 W0@1 W1@1/0 REDUCE0@1 W1@1/1 REDUCE1@1 "
        "NORM UPDATE"
    )
    assert check(programs, 2, 2, reduces=reduces).peak_in_flight == (2, 2)


# ---------------------------------------------------------------- tail

TWO = [Reduction(2, (0, 1))]


def test_tail_walks_the_last_backwards_together():
    assert texts(lower(build("gpipe", 1, 4), TWO, tail=2)) == [
        "F0@0 F1@0 F2@0 F3@0 B0@0 B1@0 B2@0/0 B3@0/0 REDUCE0@0 B2@0/1 B3@0/1 REDUCE1@0 NORM UPDATE"
    ]


def test_tail_moves_the_forwards_of_1f1b_to_the_front():
    programs = lower(build("1f1b", 1, 4), TWO, tail=2)
    assert texts(programs) == [
        "F0@0 B0@0 F1@0 B1@0 F2@0 F3@0 B2@0/0 B3@0/0 REDUCE0@0 B2@0/1 B3@0/1 REDUCE1@0 NORM UPDATE"
    ]
    assert check(programs, 1, 4, reduces=TWO).peak_in_flight == (2,)


@pytest.mark.parametrize("tail", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_tail_is_correct_and_costs_no_time(name, tail):
    programs = lower(build(name, 1, 5), TWO, tail=tail)
    report = check(programs, 1, 5, reduces=TWO)
    assert report.peak_in_flight == ((5,) if name == "gpipe" else (min(tail, 5),))
    assert simulate(programs).makespan == 15


def test_head_walks_the_first_forwards_together():
    assert texts(lower(build("1f1b", 1, 3), TWO, tail=2, head=2)) == [
        "F0@0/0 F1@0/0 F0@0/1 F1@0/1 B0@0 F2@0 B1@0/0 B2@0/0 REDUCE0@0 B1@0/1 B2@0/1 REDUCE1@0 NORM UPDATE"
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_every_head_is_correct_costs_no_time_and_no_memory_that_a_tail_does_not(name, count):
    table = build(name, 1, 5)
    tail, both = (lower(table, TWO, tail=count, **head) for head in ({}, {"head": count}))
    facts = [check(programs, 1, 5, reduces=TWO).peak_in_flight for programs in (tail, both)]
    assert facts[0] == facts[1] and simulate(tail).makespan == simulate(both).makespan
    assert sum(str(action).startswith("F") for action in both[0]) == (5 if count == 1 else 5 + min(count, 5))


def test_tail_and_head_are_ignored_with_more_stages_and_where_each_microbatch_is_reduced():
    table = build("1f1b", 2, 4)
    assert lower(table, TWO * 2, tail=3, head=3) == lower(table, TWO * 2)
    cut = build("seq1f1b", 1, 4)
    assert lower(cut, TWO, tail=3, head=3) == lower(cut, TWO)
    assert lower(build("1f1b", 1, 4), TWO, tail=3, head=3, reduce_each=True) == lower(
        build("1f1b", 1, 4), TWO, reduce_each=True
    )


@pytest.mark.parametrize(
    ("reduces", "facts", "message"),
    [
        (TWO, {}, "reductions of 1 stage, needed 2"),
        (TWO * 2, {"tail": 0}, "tail of 0"),
        (TWO * 2, {"head": 0}, "head of 0"),
        ([WHOLE, Reduction(2, (0, 2))], {}, "stage 1: bucket 1 is complete after part 2"),
    ],
)
def test_misfits_are_refused(reduces, facts, message):
    with pytest.raises(ScheduleError, match=message):
        lower(build("1f1b", 2, 2), reduces, **facts)


def test_the_last_gradient_leaves_before_the_last_reduction_starts():
    programs = lower(build("1f1b", 2, 2), [Reduction(2, (0, 1)), Reduction(2, (0, 1))])
    end = " ".join(map(str, programs[1]))
    assert end.endswith("B1@1/0 REDUCE0@1 B1@1/1 SEND_B1@1 REDUCE1@1 NORM UPDATE")
