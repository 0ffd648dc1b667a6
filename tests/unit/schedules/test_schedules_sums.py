"""Sums over other axes than the data axis: where they stand, and that every wrong place is refused.

`tp` stands for an axis whose ranks run the same program; MIRROR and TIED join two pipeline ranks.
"""

import itertools

import pytest
from conftest import EVERY, WITH_LONG
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action, format_program, parse, parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.needs import Needs
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.lowering.sums import MIRROR, TIED
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.proof.deadlock import play
from mpitrain.schedules.table import Table, read_table

Programs = list[list[Action]]


def one_stage(over: tuple[str, ...], **facts) -> list[Reduction]:
    """Three parts with a bucket each, of which the first is summed over other axes."""
    return [Reduction(3, (0, 1, 2), (over, (), ()), **facts)]


def reduces_of(table: Table, *, tree: bool = False) -> list[Reduction]:
    """Two parts with a bucket each, one of copies over tp, complete with both, and the tied one at the ends.

    Two copies are mirrored.
    """
    mirror = (MIRROR,) if table.copies == 2 else ()
    found = []
    for stage in range(table.num_stages):
        end = stage % table.depth in (0, table.depth - 1)
        ready = (0, 1, 1, *([0 if stage % table.depth else 1] if end else []))
        over = (mirror, mirror, ("tp", *mirror), *([() if tree else (TIED,)] if end else []))
        found.append(Reduction(2, ready, over, ((), (), (), *([(TIED,) if tree else ()] if end else []))))
    return found


def proved(table: Table, reduces: list[Reduction], **facts) -> Programs:
    programs = lower(table, reduces, **facts)
    check(
        programs,
        table.num_stages,
        table.num_microbatches,
        copies=table.copies,
        segments=table.segments,
        reduces=reduces,
        **facts,
    )
    return programs


def texts(programs: Programs) -> list[str]:
    return [format_program(program, width=10_000) for program in programs]


# ---------------------------------------------------------------- where they stand


@pytest.mark.parametrize(
    ("over", "end"),
    [
        (("tp",), "B1@0/0 SUM0@0 B1@0/1 REDUCE1@0 REDUCE0@0 B1@0/2 REDUCE2@0"),
        (("tp", "kv"), "B1@0/0 SUM0@0/0 B1@0/1 REDUCE1@0 SUM0@0/1 B1@0/2 REDUCE2@0 REDUCE0@0"),
        ((TIED,), "B1@0/0 SUM0@0 B1@0/1 REDUCE1@0 REDUCE0@0 B1@0/2 REDUCE2@0"),
    ],
)
def test_a_sum_stands_where_its_bucket_is_complete_and_what_waits_for_it_after_the_next_computation(
    over, end
):
    assert texts(proved(build("gpipe", 1, 2), one_stage(over))) == [f"F0@0 F1@0 B0@0 {end} NORM UPDATE"]


def test_with_nothing_left_to_compute_all_sums_start_before_any_is_waited_for():
    reduces = [Reduction(1, (0, 0, 0), (("tp",), (), ("kv",)))]
    assert texts(proved(build("gpipe", 1, 1), reduces)) == [
        "F0@0 B0@0/0 SUM0@0 REDUCE1@0 SUM2@0 REDUCE0@0 REDUCE2@0 NORM UPDATE"
    ]


def test_what_is_summed_over_other_axes_is_reduced_once_a_step():
    assert texts(proved(build("gpipe", 1, 2), one_stage(("tp",)), reduce_each=True)) == [
        "F0@0 F1@0 B0@0/0 B0@0/1 REDUCE1@0/0 B0@0/2 REDUCE2@0/0 "
        "B1@0/0 SUM0@0 B1@0/1 REDUCE1@0/1 REDUCE0@0 B1@0/2 REDUCE2@0/1 NORM UPDATE"
    ]


def test_parameters_come_and_go_around_sums():
    residency = Residency((((0,), (1,), (2,)),))
    assert texts(proved(build("gpipe", 1, 1), one_stage(("tp",)), residency=residency))[0].endswith(
        "B0@0/0 RELEASE0@0 GATHER2@0 SUM0@0 B0@0/1 RELEASE1@0 REDUCE1@0 REDUCE0@0 B0@0/2 RELEASE2@0 "
        "REDUCE2@0 NORM UPDATE"
    )


def test_a_tied_bucket_waits_for_the_other_end_when_all_is_sent():
    reduces = [Reduction(2, (0, 1, 1), ((), (), (TIED,))), Reduction(2, (0, 1, 0), ((), (), (TIED,)))]
    assert texts(proved(build("1f1b", 2, 1), reduces)) == [
        "F0@0 SEND_F0@0 RECV_B0@0 B0@0/0 REDUCE0@0 B0@0/1 REDUCE1@0 SUM2@0 REDUCE2@0 NORM UPDATE",
        "RECV_F0@1 F0@1 B0@1/0 REDUCE0@1 SUM2@1 B0@1/1 SEND_B0@1 REDUCE1@1 REDUCE2@1 NORM UPDATE",
    ]


V = "rank 0: F0@0 F0@3 B0@3 B0@0\nrank 1: F0@1 F0@2 B0@2 B0@1"
MIDDLE = Reduction(1, (0,))


def test_the_uses_of_tied_weights_on_one_rank_are_summed_once():
    """By the bucket of the first stage.

    With sums over microbatches and data ranks in a tree each is reduced before.
    """
    end = Reduction(1, (0, 0), ((), (TIED,)))
    assert texts(proved(read_table(V), [end, MIDDLE, MIDDLE, end]))[0].endswith(
        "B0@3/0 SEND_B0@3 REDUCE0@3 RECV_B0@0 B0@0/0 REDUCE0@0 SUM1@0 REDUCE1@0 NORM UPDATE"
    )
    end = Reduction(1, (0, 0), ((), ()), ((), (TIED,)))
    assert texts(proved(read_table(V), [end, MIDDLE, MIDDLE, end]))[0].endswith(
        "B0@3/0 SEND_B0@3 REDUCE0@3 REDUCE1@3 RECV_B0@0 B0@0/0 REDUCE0@0 REDUCE1@0 SUM1@0 NORM UPDATE"
    )


def test_mirrored_ranks_sum_in_one_order_though_they_complete_in_another():
    """Rank 0 is done with stage 0 first, rank 1 with the other copy's stage 0, which it has."""
    table = read_table("copies 2\nrank 0: F0@0 F0@3 B0@3 B0@0\nrank 1: F0@2 F0@1 B0@1 B0@2")
    reduces = [Reduction(1, (0,), ((MIRROR,),))] * 4
    for program in proved(table, reduces):
        assert [str(action) for action in program if action.kind in ("SUM", "REDUCE")][:2] in (
            ["SUM0@3", "SUM0@0"],
            ["SUM0@1", "SUM0@2"],
        )
    late = read_table(
        "copies 2\nrank 0: F0@0 F0@3 B0@3 B0@0 F1@0 F1@3 B1@3 B1@0\nrank 1: F0@2 F0@1 B0@1 F1@1 B1@1 B0@2 "
        "F1@2 B1@2"
    )
    orders = [
        [action.stage % 2 for action in program if action.kind == "SUM"] for program in proved(late, reduces)
    ]
    assert orders[0] == orders[1] == [1, 0]


def test_tied_weights_on_more_ranks_than_the_ends_are_refused():
    table = read_table("copies 2\nrank 0: F0@0 F0@1 B0@1 B0@0\nrank 1: F0@2 F0@3 B0@3 B0@2")
    with pytest.raises(
        ScheduleError, match="tied weights: found stage 0 on rank 0, stage 1 on rank 0, stage 2 on rank 1"
    ):
        lower(table, [Reduction(1, (0,), ((TIED,),))] * 4)


def test_both_copies_of_a_stage_on_one_rank_are_refused():
    with pytest.raises(
        ScheduleError, match="stage 1 and its copy, stage 4: found both on rank 1, needed two ranks"
    ):
        read_table(
            "copies 2\nrank 0: F0@0 B0@0 F0@5 B0@5\nrank 1: F0@1 B0@1 F0@4 B0@4\nrank 2: F0@2 B0@2 F0@3 B0@3"
        )


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_proved(name):
    sizes = (
        itertools.product((1, 2, 3, 4, 6), (1, 2, 3))
        if EVERY
        else ((1, 2), (2, 1), (4, 1), *(((2, 3), (4, 2)) if WITH_LONG else ()))
    )
    for p, more in sizes:
        try:
            table = build(name, p, more * 2 * p)
        except ScheduleError:
            continue
        for tree, each in itertools.product((False, True), repeat=2):
            programs = proved(table, reduces_of(table, tree=tree), reduce_each=each)
            parts = Residency((((0, 2, 3), (1, 2, 3)),) * table.num_stages) if table.copies == 1 else None
            proved(table, reduces_of(table, tree=tree), residency=parts, reduce_each=each)
            without = lower(table, [Reduction(2, (0, 1))] * table.num_stages, reduce_each=each)
            assert simulate(programs).makespan == simulate(without).makespan


# ---------------------------------------------------------------- what is refused

REDUCES = reduces_of(build("dualpipe", 2, 8))


def refusal(programs: Programs, reduces: list[Reduction] = REDUCES) -> str | None:
    """Return the first line of what check says, or None."""
    try:
        check(programs, 4, 4, copies=2, reduces=reduces)
    except ScheduleError as error:
        return str(error).splitlines()[0].removeprefix("ScheduleError: ")
    return None


def dualpipe() -> Programs:
    return lower(build("dualpipe", 2, 8), REDUCES)


PLACES = [
    (r, i)
    for r, program in enumerate(dualpipe())
    for i, action in enumerate(program)
    if action.kind in ("SUM", "REDUCE")
]


def test_any_dropped_sum_is_refused():
    assert refusal(dualpipe()) is None
    for rank, position in PLACES:
        programs = dualpipe()
        dropped = programs[rank].pop(position)
        assert str(dropped) in refusal(programs), dropped


def test_a_stage_that_is_never_computed_is_refused_as_that():
    for stage in range(4):
        programs = [[action for action in program if action.stage != stage] for program in dualpipe()]
        assert f"the program ends without B0@{stage}" in refusal(programs)


def test_any_sum_twice_or_on_the_other_rank_is_refused():
    for rank, position in PLACES:
        programs = dualpipe()
        action = programs[rank][position]
        programs[rank].insert(position, action)
        assert f"{action} again" in refusal(programs)
        programs[1 - rank].insert(len(programs[1 - rank]) - 2, programs[rank].pop(position))
        assert str(action) in refusal(programs)


def test_any_two_neighbouring_sums_swapped_on_one_rank_are_refused_if_both_join_ranks():
    chains = Needs(dualpipe(), copies=2, reduces=REDUCES).chains
    swapped = 0
    for rank, program in enumerate(dualpipe()):
        places = [
            i for i, action in enumerate(program) if chains.partner(action) and chains.axis(action) == MIRROR
        ]
        for one, other in itertools.pairwise(places):
            programs = dualpipe()
            programs[rank][one] = program[other]
            programs[rank][other] = program[one]
            text = refusal(programs)
            assert text and (" meets " in text or "starts before" in text or "stands before" in text), (
                program[one],
                program[other],
            )
            swapped += " meets " in text
    assert swapped


def test_any_sum_before_the_last_that_adds_to_it_is_refused():
    for rank, position in PLACES:
        program = dualpipe()[rank]
        action = program[position]
        last = max(i for i in range(position) if program[i].kind in "BW" and program[i].stage == action.stage)
        programs = dualpipe()
        programs[rank].insert(max(0, last - 3), programs[rank].pop(position))
        text = refusal(programs)
        assert text and ("starts before" in text or "stands before" in text or "PAIR" in text), (action, text)


TWO = [Reduction(1, (0,), ((TIED,),))] * 2


@pytest.mark.parametrize(
    ("first", "second", "flaw"),
    [
        (
            "SUM0@0 REDUCE0@0",
            "REDUCE0@1 SUM0@1",
            "rank 1, position 4: REDUCE0@1 stands before SUM0@1 (position 5), which it needs",
        ),
        ("SUM0@0 REDUCE0@0", "SUM0@1", "rank 1, position 7: the program ends without REDUCE0@1"),
        (
            "REDUCE0@0",
            "SUM0@1 REDUCE0@1",
            "rank 0, position 4: REDUCE0@0 waits for SUM0@0, which rank 0 never issues",
        ),
        (
            "SUM0@0 REDUCE0@0 REDUCE0@0/0",
            "SUM0@1 REDUCE0@1",
            "rank 0, position 6: REDUCE0@0/0: its bucket goes through SUM0@0 REDUCE0@0",
        ),
    ],
)
def test_flaws_are_placed(first, second, flaw):
    rows = (
        f"F0@0 SEND_F0@0 RECV_B0@0 B0@0/0 {first} NORM UPDATE",
        f"RECV_F0@1 F0@1 B0@1/0 SEND_B0@1 {second} NORM UPDATE",
    )
    with pytest.raises(ScheduleError) as error:
        check([parse_program(row) for row in rows], 2, 1, reduces=TWO)
    assert str(error.value).splitlines()[0] == f"ScheduleError: {flaw}"


def test_a_sum_of_a_bucket_that_is_added_to_another_is_refused():
    end = Reduction(1, (0,), ((TIED,),))
    programs = lower(read_table(V), [end, Reduction(1, ()), Reduction(1, ()), end])
    programs[0].insert(-2, parse("SUM0@3"))
    with pytest.raises(ScheduleError, match="SUM0@3: its bucket is added to bucket 0 of stage 0"):
        check(programs, 4, 1, reduces=[end, Reduction(1, ()), Reduction(1, ()), end])


def test_a_rank_that_waits_for_a_sum_before_it_has_sent_what_the_other_needs_is_a_deadlock():
    first = "F0@0 SEND_F0@0 RECV_B0@0 B0@0/0 SUM0@0 REDUCE0@0 NORM UPDATE"
    rows = (first, "RECV_F0@1 F0@1 B0@1/0 SUM0@1 REDUCE0@1 SEND_B0@1 NORM UPDATE")
    with pytest.raises(ScheduleError) as error:
        check([parse_program(row) for row in rows], 2, 1, reduces=TWO)
    assert str(error.value).splitlines()[:3] == [
        "ScheduleError: rank 0, position 2: deadlock, each rank waits for the next:",
        "  rank 0, position 2: RECV_B0@0 waits for SEND_B0@1 (rank 1, position 5)",
        "  rank 1, position 4: REDUCE0@1 waits for SUM0@0 (rank 0, position 4)",
    ]
    assert play(Needs([parse_program(row) for row in rows], reduces=TWO)) == [2, 4]
