"""Programs in which parameters or gradients come too early, too late or not at all are refused, at
the place of the flaw.
"""

import re

import pytest

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action, parse, parse_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.proof.check import check

Programs = list[list[Action]]
# stages, microbatches, parts
P = 2
M = 3
N = 3
RESIDENCY = Residency((((0,), (1,), (2,)),) * P)
STEP = RESIDENCY._replace(until="step")
REDUCES = [Reduction(N, (0, 1, 2))] * P


def programs_of(name: str = "1f1b", residency: Residency = RESIDENCY) -> Programs:
    return lower(build(name, P, M), REDUCES, residency=residency, reduce_each=True)


def refusal(programs: Programs, residency: Residency = RESIDENCY) -> str | None:
    """Return the first line of what check says, or None if it finds no flaw."""
    try:
        check(programs, P, M, reduces=REDUCES, residency=residency, reduce_each=True)
    except ScheduleError as error:
        return str(error).splitlines()[0].removeprefix("ScheduleError: ")
    return None


def places(*kinds: str, name: str = "1f1b", residency: Residency = RESIDENCY) -> list[tuple[int, int]]:
    programs = programs_of(name, residency)
    return [
        (rank, i)
        for rank, program in enumerate(programs)
        for i, action in enumerate(program)
        if action.kind in kinds
    ]


# ---------------------------------------------------------------- every place


@pytest.mark.parametrize("residency", [RESIDENCY, STEP], ids=lambda residency: residency.until)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_dropped_gather_release_reduction_or_part_is_refused(name, residency):
    assert refusal(programs_of(name, residency), residency) is None
    for rank, position in places(
        "GATHER", "RELEASE", "REDUCE", "F", "I", "B", "W", name=name, residency=residency
    ):
        programs = programs_of(name, residency)
        dropped = programs[rank].pop(position)
        text = refusal(programs, residency)
        assert text and re.search(rf"\D{dropped.index}(@| of stage ){dropped.stage}\b", text), (dropped, text)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_gather_or_release_twice_is_refused(name):
    for rank, position in places("GATHER", "RELEASE", name=name):
        programs = programs_of(name)
        action = programs[rank][position]
        programs[rank].insert(position, action)
        again = "again; what" if action.kind == "GATHER" else "the bucket is not held"
        assert f"rank {rank}, position {position + 1}: {action}" in refusal(programs)
        assert again in refusal(programs)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_release_before_its_part_or_after_the_next_is_refused(name):
    for rank, position in places("RELEASE", name=name):
        program = programs_of(name)[rank]
        used = [i for i, action in enumerate(program) if RESIDENCY.needed(action)]
        before = max(i for i in used if i < position)
        assert "was released at" in moved(name, rank, position, before)
        if position < used[-1]:
            assert "is in the way" in moved(name, rank, position, min(i for i in used if i > position))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_gather_a_part_too_early_or_after_its_part_is_refused(name):
    for rank, position in places("GATHER", name=name):
        program = programs_of(name)[rank]
        key = (program[position].stage, program[position].index)
        used = [i for i, action in enumerate(program) if RESIDENCY.needed(action)]
        if position > used[0]:
            early = moved(name, rank, position, max(i for i in used if i < position))
            assert "is in the way" in early or "again; what" in early
        late = moved(
            name, rank, position, min(i for i in used if i > position and key in RESIDENCY.needed(program[i]))
        )
        assert f"needs bucket {key[1]} of stage {key[0]}, which" in late


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_reduction_before_its_part_or_after_the_next_microbatchs_is_refused(name):
    for rank, position in places("REDUCE", name=name):
        program = programs_of(name)[rank]
        _, bucket, stage, m = program[position]
        adding = [
            i for i, action in enumerate(program) if action.kind in "BW" and action[2:] == (stage, bucket)
        ]
        assert f"{program[position]} starts before" in moved(name, rank, position, adding[m])
        if m + 1 < M:
            assert f"adds to bucket {bucket} of stage {stage} before that of" in moved(
                name, rank, position, adding[m + 1]
            )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_part_before_the_one_before_it_is_refused(name):
    for rank, position in places("F", "I", "B", "W", name=name):
        program = programs_of(name)[rank]
        action = program[position]
        if action.part:
            before = action._replace(part=action.part - 1)
            text = moved(name, rank, position, program.index(before))
            assert f"{action} stands before {before}" in text


def moved(name: str, rank: int, position: int, to: int) -> str:
    """Say what check says of the programs with one action moved to another position."""
    programs = programs_of(name)
    programs[rank].insert(to, programs[rank].pop(position))
    return refusal(programs) or "nothing"


# ---------------------------------------------------------------- what is said

RIGHT = (
    "GATHER1@0 GATHER0@0 F0@0/0 RELEASE1@0 F0@0/1 GATHER1@0 B0@0/0 RELEASE0@0 B0@0/1 RELEASE1@0 NORM UPDATE"
)
TWO = Residency((((0,), (1,)),))


def said(text: str, residency: Residency | None = TWO, num_microbatches: int = 1, **facts) -> str:
    with pytest.raises(ScheduleError) as error:
        check([parse_program(text)], 1, num_microbatches, residency=residency, **facts)
    return str(error.value).splitlines()[0].removeprefix("ScheduleError: rank 0, ")


AGAIN = "again; what rank 0, position 0 has gathered was not released"


@pytest.mark.parametrize(
    ("old", "new", "flaw"),
    [
        (
            "GATHER1@0 GATHER0@0",
            "GATHER0@0",
            "1: F0@0/0 needs bucket 1 of stage 0, which no GATHER has fetched",
        ),
        ("GATHER0@0", "", "3: F0@0/1 needs bucket 0 of stage 0, which no GATHER has fetched"),
        (
            "GATHER1@0 B0@0/0",
            "B0@0/0",
            "7: B0@0/1 needs bucket 1 of stage 0, which was released at rank 0, position 3",
        ),
        (
            "F0@0/0 RELEASE1@0",
            "RELEASE1@0 F0@0/0",
            "3: F0@0/0 needs bucket 1 of stage 0, which was released at rank 0, position 2",
        ),
        (
            "F0@0/0 RELEASE1@0",
            "F0@0/0",
            "3: F0@0/1: bucket 1@0, gathered at rank 0, position 0, is in the way; wanted here: 0@0",
        ),
        ("F0@0/0 RELEASE1@0", "F0@0/0 GATHER1@0", f"3: GATHER1@0 {AGAIN}"),
        (
            "F0@0/1 GATHER1@0",
            "GATHER1@0 F0@0/1",
            "4: GATHER1@0: bucket 1@0, gathered at rank 0, position 4, is in the way; wanted",
        ),
        ("F0@0/0 RELEASE1@0", "F0@0/0 RELEASE1@0 RELEASE1@0", "4: RELEASE1@0: the bucket is not held"),
        (
            "B0@0/1 RELEASE1@0",
            "B0@0/1",
            "11: the program ends without RELEASE1@0 of what rank 0, position 5 has gathered",
        ),
        (
            "GATHER0@0",
            "GATHER0@0 GATHER2@0 RELEASE2@0",
            "2: GATHER2@0: bucket 2@0, gathered at rank 0, position 2, is in the way",
        ),
        ("GATHER0@0", "GATHER0@0 GATHER1@1", "2: GATHER1@1: there is no stage 1, the pipeline has 1"),
        ("F0@0/1", "F0@0/1 F0@0/2", "5: F0@0 is there in parts: 0, 1, 2; needed 0 to 1"),
        ("F0@0/1", "", "2: F0@0 is there in parts: 0; needed 0 to 1"),
        ("B0@0/0", "B0@0/2", "6: B0@0 is there in parts: 2, 1; needed 0 to 1"),
        ("NORM UPDATE", "NORM UPDATE GATHER0@0 RELEASE0@0", "10: NORM stands out of place"),
    ],
)
def test_flaws_of_parameters_are_placed(old, new, flaw):
    check([parse_program(RIGHT)], 1, 1, residency=TWO)
    assert said(RIGHT.replace(old, new, 1)).startswith(f"position {flaw}")


def test_with_until_step_a_second_gather_is_refused():
    wanted = "position 5: GATHER1@0 again, after its release at rank 0, position 3; needed once a step"
    assert said(RIGHT, TWO._replace(until="step")) == wanted


def test_a_whole_computation_needs_all_buckets():
    text = "GATHER1@0 GATHER0@0 F0@0 B0@0 RELEASE1@0 RELEASE0@0 NORM UPDATE"
    assert check([parse_program(text)], 1, 1, residency=TWO).peak_resident == (2,)
    assert said(text.replace("F0@0 ", "RELEASE0@0 F0@0 ")).startswith(
        "position 3: F0@0 needs bucket 0 of stage 0, which was released"
    )


def test_without_a_residency_gathers_and_releases_still_go_in_turn():
    check([parse_program(RIGHT)], 1, 1)
    text = said(RIGHT.replace("RELEASE0@0", "", 1), None)
    assert text == "position 11: the program ends without RELEASE0@0 of what rank 0, position 1 has gathered"


def test_a_gather_on_another_stages_rank_is_refused():
    programs = programs_of()
    programs[1].insert(0, parse("GATHER2@0"))
    assert refusal(programs) == "rank 1, position 0: GATHER2@0: stage 0 is on rank 0"


ONE = [Reduction(1, (0,))]


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (
            "B0@0/0 REDUCE0@0/1 B1@0/0 REDUCE0@0/0",
            "3: REDUCE0@0/1 starts before B1@0/0 at rank 0, position 4 has added to its bucket",
        ),
        (
            "B0@0/0 B1@0/0 REDUCE0@0/0 REDUCE0@0/1",
            "3: B1@0/0 adds to bucket 0 of stage 0 before that of B0@0/0 is reduced",
        ),
        ("B0@0/0 REDUCE0@0/0 B1@0/0", "7: the program ends without REDUCE0@0/1"),
        ("B0@0/0 B1@0/0 REDUCE0@0", "7: the program ends without REDUCE0@0/0"),
        (
            "B0@0/0 REDUCE0@0/0 B1@0/0 REDUCE0@0/1 REDUCE0@0",
            "6: REDUCE0@0: stage 0 has 1 buckets, reduced for every microbatch",
        ),
        (
            "B0@0/0 REDUCE0@0/0 B1@0/0 REDUCE0@0/1 REDUCE0@0/2",
            "6: REDUCE0@0/2: there is no microbatch 2, the step has 2",
        ),
    ],
)
def test_flaws_of_reductions_of_every_microbatch_are_placed(text, flaw):
    assert said(f"F0@0 F1@0 {text} NORM UPDATE", None, 2, reduces=ONE, reduce_each=True) == f"position {flaw}"


def test_reductions_of_microbatches_are_refused_where_there_is_one_a_step():
    assert said("F0@0 B0@0/0 REDUCE0@0 REDUCE0@0/0 NORM UPDATE", None, reduces=ONE) == (
        "position 3: REDUCE0@0/0: stage 0 has 1 buckets, reduced once"
    )


ONE_RANK = "F0@0 B0@0 NORM UPDATE"


@pytest.mark.parametrize(
    ("programs", "flaw"),
    [
        ([f"COPY {ONE_RANK}"], ""),
        (["F0@0 COPY B0@0 NORM UPDATE"], "rank 0, position 0: the program doesn't begin with COPY"),
        ([f"COPY COPY {ONE_RANK}"], "rank 0, position 1: COPY stands out of place"),
        ([f"{ONE_RANK} COPY"], "rank 0, position 0: the program doesn't begin with COPY"),
    ],
)
def test_copies_are_sent_from_the_beginning_of_a_step(programs, flaw):
    parsed = [parse_program(program) for program in programs]
    if not flaw:
        check(parsed, 1, 1)
        return
    with pytest.raises(ScheduleError, match=flaw):
        check(parsed, 1, 1)
