"""The check accepts every program we write, and refuses every program that someone broke, at the
right place.
"""

import pytest
from conftest import EVERY

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import NORM, REDUCE, UPDATE, B, F, parse, parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.lowering.needs import Needs
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.proof.deadlock import play
from mpitrain.schedules.table import forwards

REDUCES = [Reduction(2, (0, 1))] * 3
RANKS = range(1, 17) if EVERY else range(1, 9)


def microbatches(p):
    return range(1, 4 * p + 1) if EVERY else (*range(1, 2 * p + 2), 4 * p)


def programs_of(name="1f1b", num_stages=3, num_microbatches=4):
    return lower(build(name, num_stages, num_microbatches), [Reduction(2, (0, 1))] * num_stages)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_is_correct_and_keeps_p_minus_r_in_flight(p):
    for m in microbatches(p):
        report = check(programs_of("1f1b", p, m), p, m, reduces=[Reduction(2, (0, 1))] * p)
        assert report.peak_in_flight == tuple(min(p - r, m) for r in range(p))
        assert report.num_messages == 2 * (p - 1) * m


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_is_correct_and_keeps_all_in_flight(p):
    for m in microbatches(p):
        assert check(programs_of("gpipe", p, m), p, m).peak_in_flight == (m,) * p


@pytest.mark.parametrize("p", [1, 2, 5, 16])
def test_evaluation_is_correct(p):
    check(lower(forwards(build("gpipe", p, 7)), [], train=False), p, 7, train=False)


# ---------------------------------------------------------------- deadlock


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_blocking_sends_deadlock_1f1b_but_not_gpipe(p):
    check(programs_of("gpipe", p, 2 * p), p, 2 * p, blocking_sends=True)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(programs_of("1f1b", p, 2 * p), p, 2 * p, blocking_sends=True)


def test_a_deadlock_names_each_rank_of_the_cycle():
    with pytest.raises(ScheduleError) as error:
        check(programs_of("1f1b", 2, 4), 2, 4, blocking_sends=True)
    assert str(error.value).splitlines()[:3] == [
        "ScheduleError: rank 0, position 3: deadlock, each rank waits for the next:",
        "  rank 0, position 3: SEND_F1@0 waits for RECV_F1@1 (rank 1, position 4)",
        "  rank 1, position 3: SEND_B0@1 waits for RECV_B0@0 (rank 0, position 4)",
    ]
    assert "B0!" in str(error.value)


def test_a_rank_is_asked_again_only_when_what_it_waits_for_is_there(monkeypatch):
    """A step of many ranks and few microbatches is proved in time that grows with its instructions,
    and not with ranks squared.
    """
    asked = []
    programs = programs_of("gpipe", 100, 1)
    needs = Needs(programs)
    of = Needs.of
    monkeypatch.setattr(Needs, "of", lambda self, action: asked.append(action) or of(self, action))
    assert play(needs) == list(map(len, programs))
    assert len(asked) < 2 * sum(map(len, programs))


def test_receives_in_the_wrong_order_deadlock():
    """Rank 0 asks for the gradient of microbatch 0 before it sends the forward that rank 1 needs first."""
    programs = [
        parse_program("F0@0 RECV_B0@0 SEND_F0@0 B0@0 NORM UPDATE"),
        parse_program("RECV_F0@1 F0@1 B0@1 SEND_B0@1 NORM UPDATE"),
    ]
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 1: RECV_B0@0 waits for SEND_B0@1 \(rank 1, position 3\)"
    ):
        check(programs, 2, 1)


# ---------------------------------------------------------------- mutations


def refusal(programs, **facts) -> str:
    """Return the first line of what check says."""
    with pytest.raises(ScheduleError) as error:
        check(programs, 3, 4, reduces=REDUCES, **facts)
    return str(error.value).splitlines()[0].removeprefix("ScheduleError: ")


EVERY_PLACE = [
    (rank, position) for rank, program in enumerate(programs_of()) for position in range(len(program))
]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_any_dropped_action_is_refused(name):
    for rank, position in EVERY_PLACE:
        programs = programs_of(name)
        dropped = programs[rank].pop(position)
        text = refusal(programs)
        assert str(dropped) in text or f"{dropped.kind[-1]}{dropped.index}@{dropped.stage}" in text, (
            dropped,
            text,
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_any_action_issued_twice_is_refused(name):
    for rank, position in EVERY_PLACE:
        programs = programs_of(name)
        action = programs[rank][position]
        programs[rank].insert(position, action)
        again = (
            f"rank {rank}, position {position + 1}: {action} again; it already stands at rank {rank}, "
            f"position {position}"
        )
        text = refusal(programs)
        assert (
            text == again
            if action.stage is not None
            else text.startswith(f"rank {rank}, ") and "out of place" in text
        )


@pytest.mark.parametrize(
    ("dropped", "text"),
    [
        ("SEND_B0@2", "rank 1, position 6: RECV_B0@1 waits for SEND_B0@2, which rank 2 never issues"),
        ("RECV_F2@1", "rank 1, position 9: F2@1 needs F2@0 of rank 0, but no receive brings it to rank 1"),
        ("RECV_B1@0", "rank 0, position 10: B1@0 needs B1@1 of rank 1, but no receive brings it to rank 0"),
        ("F2@1", "rank 1, position 28: the program ends without F2@1"),
        ("B2@1", "rank 1, position 28: the program ends without B2@1"),
        ("REDUCE1@2", "rank 2, position 20: the program ends without REDUCE1@2"),
        ("B3@2/0", "rank 2, position 15: B3@2 is there in parts: 1; needed 0 to 1"),
        ("B3@2/1", "rank 2, position 14: B3@2 is there in parts: 0; needed 0 to 1"),
    ],
)
def test_dropped_actions_are_placed(dropped, text):
    programs = [[action for action in program if action != parse(dropped)] for program in programs_of()]
    assert refusal(programs) == text


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (
            ("F1@0", "SEND_F1@0"),
            "rank 0, position 2: SEND_F1@0 stands before F1@0 (position 3), which it needs",
        ),
        (
            ("RECV_F1@1", "F1@1"),
            "rank 1, position 3: F1@1 stands before RECV_F1@1 (position 4), which it needs",
        ),
        (("F0@2", "B0@2"), "rank 2, position 1: B0@2 stands before F0@2 (position 2), which it needs"),
        (
            ("B3@2/0", "B3@2/1"),
            "rank 2, position 14: B3@2/1 stands before B3@2/0 (position 16), which it needs",
        ),
        (
            ("B3@0/1", "REDUCE1@0"),
            "rank 0, position 17: REDUCE1@0 starts before B3@0/1 at rank 0, position 18 has added to its "
            "bucket",
        ),
        (
            ("NORM", "REDUCE1@0"),
            "rank 0, position 18: NORM stands out of place: needed NORM UPDATE [SPREAD] at the end",
        ),
    ],
)
def test_swapped_actions_are_placed(pair, text):
    programs = programs_of()
    one, other = map(parse, pair)
    row = next(program for program in programs if other in program)
    here = row.index(one)
    there = row.index(other)
    row[here] = other
    row[there] = one
    assert refusal(programs) == text


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (
            "F0@0 F1@0 B1@0 B0@0",
            "rank 0, position 3: B0@0 adds to the gradients of stage 0 after B1@0; the order must ascend",
        ),
        (
            "F0@0 F1@0 B0@0/0 B1@0/1 B1@0/0 B0@0/1",
            "rank 0, position 3: B1@0/1 stands before B1@0/0 (position 4), which it needs",
        ),
        (
            "F0@0 F1@0 B1@0/0 B0@0/0 B0@0/1 B1@0/1",
            "rank 0, position 3: B0@0/0 adds to the gradients of stage 0 after B1@0/0",
        ),
        (
            "F0@0 F1@0 B1@0/0 B0@0 B1@0/1",
            "rank 0, position 3: B0@0 adds to the gradients of stage 0 after B1@0/0",
        ),
        (
            "F0@0 F1@0 B0@0/0 B0@0 B1@0",
            "rank 0, position 3: B0@0 is there in parts: 0, the whole; needed 0 to 0",
        ),
        (
            "F0@0 F1@0 B0@0 I0@0 W0@0 B1@0",
            "rank 0, position 2: B0@0 is too much: needed only F I W of this microbatch",
        ),
        (
            "F0@0 F1@0 W0@0 I0@0 B1@0",
            "rank 0, position 2: W0@0 stands before I0@0 (position 3), which it needs",
        ),
        ("F0@0 F1@0 I0@0 B1@0", "rank 0, position 6: the program ends without W0@0"),
        ("F0@0 F1@0 B0@0 B1@0 F2@0", "rank 0, position 4: F2@0: there is no microbatch 2, the step has 2"),
        ("F0@0 F1@0 B0@0 B1@0 F0@1", "rank 0, position 4: F0@1: there is no stage 1, the pipeline has 1"),
        (
            "RECV_F0@0 F0@0 F1@0 B0@0 B1@0",
            "rank 0, position 0: RECV_F0@0 waits for SEND_F0@-1, which no rank issues",
        ),
        (
            "F0@0 SEND_F0@0 F1@0 B0@0 B1@0",
            "rank 0, position 1: SEND_F0@0 has no receiver: RECV_F0@1 is nowhere",
        ),
    ],
)
def test_wrong_programs_of_one_stage_are_placed(text, flaw):
    with pytest.raises(ScheduleError) as error:
        check([parse_program(text + " NORM UPDATE")], 1, 2)
    assert str(error.value).startswith(f"ScheduleError: {flaw}")


def test_split_backwards_in_ascending_order_are_correct():
    check([parse_program("F0@0 F1@0 B0@0/0 B1@0/0 B0@0/1 B1@0/1 NORM UPDATE")], 1, 2)
    check([parse_program("F0@0 F1@0 I0@0 I1@0 W0@0 W1@0 NORM UPDATE SPREAD")], 1, 2)


def test_a_message_on_the_wrong_rank_is_placed():
    programs = programs_of()
    programs[2].insert(0, programs[1].pop(3))
    assert (
        refusal(programs)
        == "rank 1, position 3: F1@1 needs RECV_F1@1 of rank 2, but no receive brings it to rank 1"
    )


def test_a_reduction_on_the_wrong_rank_is_placed():
    """However late it stands there: what it reduces is on another rank."""
    programs = programs_of()
    programs[2].remove(REDUCE(0, 2))
    programs[0].insert(-2, REDUCE(0, 2))
    assert (
        refusal(programs)
        == "rank 0, position 19: REDUCE0@2 starts before B0@2 at rank 2, position 2 has added to its bucket"
    )


def test_a_wrong_message_is_placed():
    programs = programs_of()
    programs[0][3] = parse("SEND_F2@0")
    assert refusal(programs) == "rank 0, position 5: SEND_F2@0 again; it already stands at rank 0, position 3"


def test_a_training_program_needs_its_update_and_evaluation_has_none():
    programs = lower(forwards(build("gpipe", 1, 1)), [], train=False)
    with pytest.raises(ScheduleError, match="rank 0, position 1: the program ends without B0@0"):
        check(programs, 1, 1)
    with pytest.raises(ScheduleError, match="rank 0, position 1: NORM stands out of place: needed none"):
        check([[F(0, 0), NORM]], 1, 1, train=False)
    with pytest.raises(ScheduleError, match="rank 0, position 2: the program ends without NORM UPDATE"):
        check([[F(0, 0), B(0, 0)]], 1, 1)


def test_buckets_that_do_not_exist_are_placed():
    with pytest.raises(ScheduleError, match="rank 0, position 2: REDUCE0@0: stage 0 has 0 buckets"):
        check([[F(0, 0), B(0, 0), REDUCE(0, 0), NORM, UPDATE]], 1, 1, reduces=[Reduction(1, ())])
