"""Pairs that are walked part with part.

Where their instructions stand, that they are proved, and that flaws are found.
"""

from collections import Counter

import pytest
from conftest import EVERY, WITH_LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import PAIR, Action, F, format_program, parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.needs import Needs
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.lowering.sums import MIRROR
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.proof.check import Proof, check
from mpitrain.schedules.proof.deadlock import play
from mpitrain.schedules.table import Table, make_table, read_table

PAIRED = ("dualpipe", "dualpipev")


def facts_of(
    table: Table,
    counts: list[int],
    *,
    fetch: bool,
    each: bool,
    ahead: int = 1,
    until: str = "use",
    mirrored: bool = False,
) -> dict:
    """Return what `lower` and `check` are told of stages with these numbers of parts, of which each
    has a bucket.
    """
    # copies are alike
    counts = [counts[stage % table.depth % len(counts)] for stage in range(table.num_stages)]
    reduces = [Reduction(n, tuple(range(n)), ((MIRROR,),) * n if mirrored else ()) for n in counts]
    residency = (
        Residency(tuple(tuple((part,) for part in range(n)) for n in counts), ahead, until) if fetch else None
    )
    return {"reduces": reduces, "residency": residency, "reduce_each": each}


def proved(table: Table, facts: dict, pairs: str = "parts") -> tuple[list[list[Action]], Proof]:
    programs = lower(table, **facts, pairs=pairs)
    return programs, check(
        programs,
        table.num_stages,
        table.num_microbatches,
        copies=table.copies,
        segments=table.segments,
        **facts,
    )


def members(program: list[Action]) -> list[tuple[Action, Action]]:
    return [group[1:] for group in grouped(program) if group[0] == PAIR]


# ---------------------------------------------------------------- where they stand

ONE_PAIR = read_table("rank 0: F0@0 F0@3 F1@0 B0@3 F1@3 B1@3 PAIR F2@0 B0@0 F2@3 B2@3 B1@0 B2@0\n"
                      "rank 1: F0@1 F0@2 B0@2 B0@1 F1@1 F1@2 B1@2 B1@1 F2@1 F2@2 B2@2 B2@1")  # fmt: skip


def around(program: list[Action]) -> str:
    """Write what stands from the first receive of the pair to the next computation that follows it."""
    text = format_program(program, 10_000)
    return text[text.index("RECV_B0@0") : text.index(" RECV_F2@3")]


def test_a_send_follows_the_last_part_of_its_computation_and_reductions_stand_between():
    for counts, text in (
        (
            (3, 2),
            "RECV_B0@0 PAIR F2@0/0 B0@0/0 REDUCE0@0/0 PAIR F2@0/1 B0@0/1 REDUCE1@0/0 PAIR F2@0/2 B0@0/2 "
            "SEND_F2@0 REDUCE2@0/0",
        ),
        ((1, 2), "RECV_B0@0 PAIR F2@0/0 B0@0/0 SEND_F2@0 REDUCE0@0/0"),
    ):
        programs, _ = proved(ONE_PAIR, facts_of(ONE_PAIR, counts, fetch=False, each=True))
        assert around(programs[0]) == text


def test_what_one_has_more_parts_than_the_other_stands_alone():
    table = build("dualpipe", 2, 4)
    facts = facts_of(table, [2, 3], fetch=False, each=True)
    text = format_program(lower(table, **facts, pairs="parts")[0], 10_000)
    assert "PAIR F1@3/0 B0@0/0 REDUCE0@0/0 PAIR F1@3/1 B0@0/1 REDUCE1@0/0 F1@3/2 B1@3/0 REDUCE0@3/1" in text
    shorter = facts_of(table, [3, 2], fetch=False, each=True)
    text = format_program(lower(table, **shorter, pairs="parts")[0], 10_000)
    assert "PAIR F1@3/0 B0@0/0 REDUCE0@0/0 PAIR F1@3/1 B0@0/1 REDUCE1@0/0 B0@0/2 REDUCE2@0/0 B1@3/0" in text


def test_buckets_of_both_are_there_during_a_pair_and_those_of_the_next_travel():
    programs, report = proved(ONE_PAIR, facts_of(ONE_PAIR, [2], fetch=True, each=False))
    assert around(programs[0]) == (
        "RECV_B0@0 PAIR F2@0/0 B0@0/0 GATHER1@3 PAIR F2@0/1 B0@0/1 RELEASE0@0 RELEASE1@0 SEND_F2@0 GATHER0@3"
    )
    assert report.peak_resident == (3, 2)


def test_without_parts_nothing_changes():
    table = build("dualpipev", 2, 6)
    facts = facts_of(table, [3], fetch=False, each=False)
    assert lower(table, **facts, pairs="parts") == lower(table, **facts)


@pytest.mark.parametrize("name", PAIRED)
def test_the_picture_is_that_of_whole_pairs(name):
    table = build(name, 2, 8)
    assert grid(lower(table, **facts_of(table, [3], fetch=True, each=True), pairs="parts")) == grid(table)


# ---------------------------------------------------------------- proved


# fetch, each, ahead, until
CHOICES = ((True, False, 0, "use"), (True, True, 1, "use"), (True, False, 1, "step"), (False, True, 1, "use"))


def same_but_for_fetches(programs: list[list[Action]]) -> list[Counter]:
    return [
        Counter(action for action in program if action.kind not in ("GATHER", "RELEASE", "PAIR"))
        for program in programs
    ]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8] if EVERY else [2, 3, 4])
@pytest.mark.parametrize("name", PAIRED)
def test_every_size_is_proved_and_runs_what_runs_alone(name, p):
    if name == "dualpipe" and p % 2:
        p += 1
    for m in (2 * p, 2 * p + 2):
        table = build(name, p, m)
        number = sum(map(len, map(members, table.ranks)))
        for counts in ([3], [2, 4], [5, 1, 2]):
            for fetch, each, ahead, until in CHOICES:
                facts = facts_of(
                    table,
                    counts,
                    fetch=fetch,
                    each=each,
                    ahead=ahead,
                    until=until,
                    mirrored=name == "dualpipe",
                )
                programs, report = proved(table, facts)
                alone, before = proved(table, facts, "whole")
                if fetch:
                    assert same_but_for_fetches(programs) == same_but_for_fetches(alone)
                assert (
                    report.num_messages == before.num_messages
                    and report.peak_in_flight == before.peak_in_flight
                )
                assert (
                    sum(map(len, map(members, alone))) == 0 < number <= sum(map(len, map(members, programs)))
                )
                if fetch and until == "use":
                    assert max(report.peak_resident) <= 2 * (ahead + 1)
                simulate(programs)


@st.composite
def paired_tables(draw) -> Table:
    """Draw a table in which some forwards run with the backward after them, if that doesn't wait
    for them.
    """
    half = draw(st.integers(1, 3))
    table = build(draw(st.sampled_from(NAMES)), 2 * half, 4 * half + 2)
    rows = []
    for actions in table.ranks:
        row: list[Action] = []
        for action, following in zip(actions, [*actions[1:], None]):
            fits = (
                action.kind == "F" and following is not None and following.kind == "B" and row[-1:] != [PAIR]
            )
            if fits and F(following.index, following.stage) != action and draw(st.booleans()):
                row.append(PAIR)
            row.append(action)
        rows.append(row)
    return make_table(table.name, rows, copies=table.copies, segments=table.segments)


@settings(max_examples=30 if WITH_LONG else 10, deadline=None)
@given(st.data(), paired_tables(), st.booleans(), st.integers(0, 3), st.sampled_from(("use", "step")))
def test_whatever_is_paired_is_proved_if_it_is_proved_alone(data, table, each, ahead, until):
    """A pair of whole ones can wait for what its forward lets others do; that deadlock is none of
    the parts'.
    """
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mirrored = table.copies == 2 and data.draw(st.booleans())
    for fetch in (True, False):
        facts = facts_of(
            table, counts, fetch=fetch, each=each or not fetch, ahead=ahead, until=until, mirrored=mirrored
        )
        programs = lower(table, **facts, pairs="parts")
        if ends(table, lower(table, facts["reduces"])):
            proved(table, facts)
        if fetch:
            assert same_but_for_fetches(programs) == same_but_for_fetches(lower(table, **facts))


def ends(table: Table, programs: list[list[Action]]) -> bool:
    """Tell whether all ranks reach their end, though some pairs were not the schedule's own."""
    cursors = play(Needs(programs, copies=table.copies, segments=table.segments))
    return cursors == list(map(len, programs))


# ---------------------------------------------------------------- flaws

P, M = 2, 5
TABLE = build("dualpipev", P, M)
FACTS = facts_of(TABLE, [3, 2], fetch=True, each=True)


def programs_of() -> list[list[Action]]:
    return lower(TABLE, **FACTS, pairs="parts")


def refusal(programs: list[list[Action]]) -> str:
    """Return the first line of what check says; empty if it finds no flaw."""
    try:
        check(programs, TABLE.num_stages, M, **FACTS)
    except ScheduleError as error:
        return str(error).splitlines()[0].removeprefix("ScheduleError: ")
    return ""


NEEDED = "needed a forward and a whole backward, or one part of each"


def in_pairs() -> list[tuple[int, int]]:
    """Return where the pairs of parts stand."""
    return [
        (rank, i)
        for rank, program in enumerate(programs_of())
        for i, action in enumerate(program)
        if action == PAIR
    ]


def test_any_dropped_instruction_but_pair_is_refused():
    assert refusal(programs_of()) == ""
    for rank, program in enumerate(programs_of()):
        for position, action in [*enumerate(program)][:: 1 if WITH_LONG else 4]:
            programs = programs_of()
            del programs[rank][position]
            assert refusal(programs) or action == PAIR, (rank, position, action)


def test_whatever_interrupts_a_pair_is_refused():
    for rank, position in in_pairs():
        for at, source in ((1, position - 1), (2, position + 3)):
            programs = programs_of()
            moved = programs[rank].pop(source)
            programs[rank].insert(position + at - (source < position), moved)
            assert "PAIR stands before" in refusal(programs), (rank, position, moved)


def test_members_that_change_places_or_turns_are_refused():
    turned = 0
    for rank, position in in_pairs():
        programs = programs_of()
        forward, backward = programs[rank][position + 1 : position + 3]
        programs[rank][position + 1 : position + 3] = [backward, forward]
        assert refusal(programs).endswith(f"PAIR stands before {backward} {forward}, {NEEDED}")
        for at, member in ((1, forward), (2, backward)):
            programs = programs_of()
            following = member._replace(part=member.part + 1)
            if following in programs[rank]:
                programs[rank][programs[rank].index(following)] = member
                programs[rank][position + at] = following
                assert "stands before" in refusal(programs)
                turned += 1
    assert turned > 10


def test_a_bucket_of_either_that_leaves_before_the_pair_or_comes_after_it_is_refused():
    for rank, position in in_pairs():
        for member in programs_of()[rank][position + 1 : position + 3]:
            ((stage, bucket),) = FACTS["residency"].needed(member)
            programs = programs_of()
            program = programs[rank]
            release = next(
                i for i in range(position, len(program)) if program[i] == Action("RELEASE", bucket, stage)
            )
            program.insert(position, program.pop(release))
            assert f"{member} needs bucket {bucket} of stage {stage}, which was released" in refusal(programs)
            programs = programs_of()
            program = programs[rank]
            gather = max(i for i in range(position) if program[i] == Action("GATHER", bucket, stage))
            program.insert(position + 2, program.pop(gather))
            assert "needs bucket" in refusal(programs)


def test_a_bucket_is_not_reduced_while_a_pair_still_adds_to_it():
    for rank, position in in_pairs():
        backward = programs_of()[rank][position + 2]
        reduce = Action("REDUCE", backward.part, backward.stage, backward.index)
        programs = programs_of()
        programs[rank].remove(reduce)
        programs[rank].insert(position, reduce)
        assert f"{reduce} starts before {backward}" in refusal(programs)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("F0@0 PAIR F1@0/0 B0@0 F1@0/1 B1@0", f"F1@0/0 B0@0, {NEEDED}"),
        ("F0@0 PAIR F1@0 B0@0/0 B0@0/1 B1@0", f"F1@0 B0@0/0, {NEEDED}"),
        ("PAIR F0@0 B0@0 F1@0 B1@0", "F0@0 B0@0, and B0@0 waits for F0@0: they can't run together"),
        (
            "F0@0/0 PAIR F0@0/1 B0@0/0 B0@0/1 F1@0 B1@0",
            "F0@0/1 B0@0/0, and B0@0/0 waits for F0@0/1: they can't run together",
        ),
        ("F0@0 I0@0 PAIR F1@0 W0@0 I1@0 W1@0", f"F1@0 W0@0, {NEEDED}"),
        ("F0@0 F1@0 B0@0 B1@0 PAIR", f"NORM UPDATE, {NEEDED}"),
    ],
)
def test_misfit_pairs_are_refused(text, flaw):
    with pytest.raises(ScheduleError) as error:
        check([parse_program(text + " NORM UPDATE")], 1, 2)
    assert f"PAIR stands before {flaw}" in str(error.value).splitlines()[0]
