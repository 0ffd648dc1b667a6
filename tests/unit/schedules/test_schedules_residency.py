"""Parameters come before they are needed and go afterwards, and gradients are reduced microbatch by
microbatch: all of it proved.
"""

from collections import Counter

import pytest
from conftest import EVERY, WITH_LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick_schedules import NAMES

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import GATHER, PAIR, SENDS, Action, format_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering import residency as residency_module
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.options import Options
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.proof.check import Proof, check
from mpitrain.schedules.table import Table, forwards


def block_by_block(num_stages: int, num_parts: int, **facts) -> Residency:
    """Say that each part needs a bucket of its own."""
    return Residency((tuple((part,) for part in range(num_parts)),) * num_stages, **facts)


def reduced(num_stages: int, num_parts: int) -> list[Reduction]:
    return [Reduction(num_parts, tuple(range(num_parts)))] * num_stages


def proved(
    table: Table, residency: Residency | None, *, reduce_each: bool = False, tail: int = 1, train: bool = True
) -> Proof:
    """Lower a table whose stages have as many buckets as parts, or one more if a bucket is used
    twice, and check it.
    """
    num_parts = 2 if residency is None else residency.num_parts(0)
    reduces = reduced(table.num_stages, num_parts)
    programs = lower(table, reduces, residency=residency, reduce_each=reduce_each, tail=tail, train=train)
    facts = dict(copies=table.copies, segments=table.segments, residency=residency, train=train)
    return check(
        programs, table.num_stages, table.num_microbatches, reduces=reduces, reduce_each=reduce_each, **facts
    )


def text(name: str, p: int, m: int, residency: Residency, **facts) -> list[str]:
    num_parts = residency.num_parts(0)
    return [
        format_program(program, 10_000)
        for program in lower(build(name, p, m), reduced(p, num_parts), residency=residency, **facts)
    ]


# ---------------------------------------------------------------- where they stand


def test_a_block_travels_while_the_one_before_computes_and_the_last_one_stays_for_the_backward():
    assert text("gpipe", 1, 1, block_by_block(1, 3)) == [
        "GATHER2@0 GATHER1@0 F0@0/0 RELEASE2@0 GATHER0@0 F0@0/1 RELEASE1@0 F0@0/2 GATHER1@0 B0@0/0 "
        "RELEASE0@0 GATHER2@0 REDUCE0@0 B0@0/1 RELEASE1@0 REDUCE1@0 B0@0/2 RELEASE2@0 REDUCE2@0 NORM UPDATE"
    ]


def test_sends_leave_first_and_a_receive_is_waited_for_with_the_next_parameters_on_their_way():
    assert text("1f1b", 2, 1, block_by_block(2, 3)) == [
        "GATHER2@0 GATHER1@0 F0@0/0 RELEASE2@0 GATHER0@0 F0@0/1 RELEASE1@0 F0@0/2 SEND_F0@0 GATHER1@0 "
        "RECV_B0@0 B0@0/0 RELEASE0@0 GATHER2@0 REDUCE0@0 B0@0/1 RELEASE1@0 REDUCE1@0 B0@0/2 RELEASE2@0 "
        "REDUCE2@0 NORM UPDATE",
        "GATHER2@1 GATHER1@1 RECV_F0@1 F0@1/0 RELEASE2@1 GATHER0@1 F0@1/1 RELEASE1@1 F0@1/2 GATHER1@1 B0@1/0 "
        "RELEASE0@1 GATHER2@1 REDUCE0@1 B0@1/1 RELEASE1@1 REDUCE1@1 B0@1/2 RELEASE2@1 SEND_B0@1 REDUCE2@1 "
        "NORM UPDATE",
    ]


def test_weight_gradients_need_no_parameters():
    (first,) = text("zb-h1", 1, 1, block_by_block(1, 2))
    assert first.endswith("I0@0/0 RELEASE0@0 I0@0/1 RELEASE1@0 W0@0/0 REDUCE0@0 W0@0/1 REDUCE1@0 NORM UPDATE")


def test_without_looking_ahead_one_bucket_is_held():
    assert proved(build("1f1b", 2, 4), block_by_block(2, 3, ahead=0)).peak_resident == (1, 1)
    (program,) = text("gpipe", 1, 1, block_by_block(1, 3, ahead=0))
    assert program.startswith(
        "GATHER2@0 F0@0/0 RELEASE2@0 GATHER1@0 F0@0/1 RELEASE1@0 GATHER0@0 F0@0/2 B0@0/0 RELEASE0@0 GATHER1@0"
    )


def test_until_the_step_ends_each_is_gathered_once():
    assert text("gpipe", 1, 2, block_by_block(1, 2, until="step")) == [
        "GATHER1@0 GATHER0@0 F0@0/0 F0@0/1 F1@0/0 F1@0/1 B0@0/0 B0@0/1 "
        "B1@0/0 RELEASE0@0 REDUCE0@0 B1@0/1 RELEASE1@0 REDUCE1@0 NORM UPDATE"
    ]


def test_evaluation_gathers_too():
    residency = block_by_block(2, 2)
    programs = lower(forwards(build("1f1b", 2, 1)), [], train=False, residency=residency)
    assert [format_program(program) for program in programs] == [
        "GATHER1@0 GATHER0@0 F0@0/0 RELEASE1@0 F0@0/1 RELEASE0@0 SEND_F0@0",
        "GATHER1@1 GATHER0@1 RECV_F0@1 F0@1/0 RELEASE1@1 F0@1/1 RELEASE0@1",
    ]
    assert check(programs, 2, 1, train=False, residency=residency).gathers == (2, 2)


def test_a_tail_gathers_each_bucket_once_for_its_backwards():
    residency = block_by_block(1, 3)
    (program,) = text("gpipe", 1, 4, residency, tail=2)
    assert program.endswith(
        "B2@0/0 GATHER1@0 B3@0/0 RELEASE0@0 REDUCE0@0 B2@0/1 GATHER2@0 B3@0/1 RELEASE1@0 REDUCE1@0 "
        "B2@0/2 B3@0/2 RELEASE2@0 REDUCE2@0 NORM UPDATE"
    )
    counts = [proved(build("gpipe", 1, 4), residency, tail=tail).gathers[0] for tail in (1, 2, 3, 4)]
    assert counts == [23, 20, 17, 14]


def test_a_head_gathers_each_bucket_once_for_its_forwards():
    residency = block_by_block(1, 3)
    (program,) = text("gpipe", 1, 3, residency, tail=3, head=3)
    assert program.startswith(
        "GATHER2@0 F0@0/0 F1@0/0 GATHER1@0 F2@0/0 RELEASE2@0 F0@0/1 F1@0/1 GATHER0@0 F2@0/1 RELEASE1@0 "
        "F0@0/2 F1@0/2 F2@0/2 B0@0/0"
    )


def test_a_bucket_of_two_parts_is_gathered_for_each():
    """A tied embedding: the first and the last block use it, and the forward's end and the
    backward's begin are one stay.
    """
    residency = Residency((((0, 3), (1,), (2, 3)),), ahead=0)
    reduces = [Reduction(3, (0, 1, 2, 2))]
    programs = lower(build("gpipe", 1, 1), reduces, residency=residency)
    assert format_program(programs[0], 1000) == (
        "GATHER2@0 GATHER3@0 F0@0/0 RELEASE2@0 RELEASE3@0 GATHER1@0 F0@0/1 RELEASE1@0 GATHER0@0 GATHER3@0 "
        "F0@0/2 B0@0/0 RELEASE0@0 RELEASE3@0 GATHER1@0 REDUCE0@0 B0@0/1 RELEASE1@0 GATHER2@0 GATHER3@0 "
        "REDUCE1@0 B0@0/2 RELEASE2@0 RELEASE3@0 REDUCE2@0 REDUCE3@0 NORM UPDATE"
    )
    assert check(programs, 1, 1, reduces=reduces, residency=residency).peak_resident == (2,)


def test_each_microbatch_is_reduced_and_its_gradient_leaves_first():
    programs = lower(build("1f1b", 2, 2), reduced(2, 2), reduce_each=True, tail=5)
    assert [format_program(program, 200) for program in programs] == [
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0/0 REDUCE0@0/0 B0@0/1 REDUCE1@0/0 "
        "RECV_B1@0 B1@0/0 REDUCE0@0/1 B1@0/1 REDUCE1@0/1 NORM UPDATE",
        "RECV_F0@1 F0@1 B0@1/0 REDUCE0@1/0 B0@1/1 SEND_B0@1 REDUCE1@1/0 "
        "RECV_F1@1 F1@1 B1@1/0 REDUCE0@1/1 B1@1/1 SEND_B1@1 REDUCE1@1/1 NORM UPDATE",
    ]


def test_the_picture_is_that_of_whole_computations():
    for name in ("1f1b", "zbv", "dualpipe"):
        table = build(name, 2, 4)
        alone = table._replace(
            ranks=[[action for action in actions if action != PAIR] for actions in table.ranks]
        )
        reduces = reduced(table.num_stages, 3)
        assert grid(
            lower(table, reduces, residency=block_by_block(table.num_stages, 3), reduce_each=True)
        ) == grid(alone)


@pytest.mark.parametrize(
    ("residency", "message"),
    [
        (block_by_block(1, 2), "found the uses of 1 stage, needed 2"),
        (block_by_block(2, 3), "stage 0: found what 3 parts use, needed 2"),
        (Residency(((), ())), "stage 0: found what 0 parts use, needed 2"),
        (block_by_block(2, 2, ahead=-1), "needed ahead of at least 0"),
        (block_by_block(2, 2, until="ever"), "until 'use' or 'step'"),
    ],
)
def test_misfits_are_refused(residency, message):
    with pytest.raises(ScheduleError, match=message):
        lower(build("1f1b", 2, 2), reduced(2, 2), residency=residency)


# ---------------------------------------------------------------- every family


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7] if EVERY else [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_proved(name, p):
    for m in sorted({1, 2, p + 1, 2 * p, 3 * p + 1} if EVERY or p < 4 else {p + 1}):
        try:
            table = build(name, p, m)
        except ScheduleError:
            continue
        for ahead, until in ((0, "use"), (1, "use"), (2, "use"), (1, "step")):
            residency = block_by_block(table.num_stages, 3, ahead=ahead, until=until)
            report = proved(table, residency, reduce_each=ahead < 2)
            held = (
                3 * max(map(len, table.chunks))
                if until == "step"
                else min(ahead + 1, 3 * max(map(len, table.chunks)))
            )
            assert max(report.peak_resident) <= held
            proved(forwards(table), residency, train=False)
        proved(table, None, reduce_each=True)


@st.composite
def residencies(draw, num_stages: int) -> Residency:
    """Draw what parts use at random: nothing, several, the same."""
    num_parts = draw(st.integers(1, 4))
    part = st.lists(st.integers(0, 4), max_size=3, unique=True).map(tuple)
    uses = st.tuples(*[st.tuples(*[part] * num_parts)] * num_stages)
    return Residency(draw(uses), draw(st.integers(0, 5)), draw(st.sampled_from(("use", "step"))))


@settings(max_examples=30 if WITH_LONG else 12, deadline=None)
@given(st.data(), st.sampled_from(NAMES), st.integers(1, 4), st.booleans())
def test_whatever_parts_use_it_is_there_and_nothing_else(data, name, half, each):
    table = build(name, 2 * half, 4 * half + 2)
    residency = data.draw(residencies(table.num_stages))
    proved(table, residency, reduce_each=each)
    for program in lower(
        table, reduced(table.num_stages, residency.num_parts(0)), residency=residency, reduce_each=each
    ):
        _gathered_just_in_time(program, residency)


def _gathered_just_in_time(program: list[Action], residency: Residency) -> None:
    """Demand that each bucket comes exactly `ahead` parts before its use, but for the first ones,
    and never before a send.
    """
    first_use: dict[Action, int] = {}  # of what was gathered and isn't used yet: the parts since
    begun = False
    for action, following in zip(program, [*program[1:], None]):
        if action.kind == "GATHER":
            assert action not in first_use and following.kind not in SENDS
            first_use[action] = 0 if begun else -1
        if keys := residency.needed(action):
            begun = True
            for gather in [GATHER(bucket, stage) for stage, bucket in keys]:
                assert first_use.pop(gather, None) in (None, -1, residency.ahead)
            for gather, since in first_use.items():
                first_use[gather] = since if since < 0 else since + 1
    assert not first_use


# ---------------------------------------------------------------- how often: closed forms
#
# n parts with a bucket each, `ahead` < n - 1. A computation gathers n buckets, less those that are
# still there: where a backward follows a forward of its stage, or the other way around, the last
# one walked, and for every two ahead one more.

SIZES = [(n, ahead) for n in (1, 2, 3, 5) for ahead in (0, 1, 2, 3) if ahead + 1 < n or n == 1 == ahead + 1]


def kept(n: int, ahead: int) -> int:
    return min(n, ahead // 2 + 1)


@pytest.mark.parametrize(("n", "ahead"), [(n, ahead) for n in (1, 2, 3, 5) for ahead in range(7)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_gathers_of_gpipe(m, n, ahead):
    """From n = ahead + 1 on nothing is released between two forwards, or two backwards."""
    again = n if ahead + 1 < n else 0
    for p in (1, 3):
        report = proved(build("gpipe", p, m), block_by_block(p, n, ahead=ahead))
        assert report.gathers == (2 * (n + (m - 1) * again) - kept(n, ahead),) * p
        assert report.peak_resident == (min(n, ahead + 1),) * p


@pytest.mark.parametrize(("n", "ahead"), [(3, 0), (2, 0), (3, 1), (4, 2), (6, 4)])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_gathers_of_1f1b(p, n, ahead):
    for m in (1, 2, p, 3 * p + 1):
        report = proved(build("1f1b", p, m), block_by_block(p, n, ahead=ahead))
        steady = [m - min(p - 1 - r, m) for r in range(p)]
        turns = [max(1, 2 * alternating - 1) for alternating in steady]
        assert report.gathers == tuple(2 * m * n - kept(n, ahead) * number for number in turns)


@pytest.mark.parametrize(("n", "ahead"), [(2, 0), (3, 1), (4, 2)])
@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 2), (4, 2), (3, 3), (2, 4)])
def test_gathers_of_interleaved(p, v, n, ahead):
    """A turn is kept where both are of one chunk.

    With two chunks these are, on the last rank in its steady phase, all turns to a backward, and
    all to a forward but those to the next group of p.
    """
    for m in (p, 2 * p, 4 * p):
        table = build("interleaved", p, m, Options(chunks=v))
        report = proved(table, block_by_block(p * v, n, ahead=ahead))
        for r in range(p):
            late = 2 * (p - 1 - r)  # forwards in warmup beyond those of (v - 1) p
            steady = range(m * v - min(late + (v - 1) * p, m * v))
            to_backward = sum(((i + late) // p + i // p) % v == 0 for i in steady)
            to_forward = sum(((i + 1 + late) // p + i // p) % v == 0 for i in steady[:-1])
            if not steady:
                # all forwards first: the last one and the first backward are of the last chunk
                to_backward = 1
            assert report.gathers[r] == 2 * m * v * n - kept(n, ahead) * (to_backward + to_forward), (m, r)
        if v == 2 and m > p:
            assert report.gathers[-1] == 4 * m * n - kept(n, ahead) * (
                (2 * m - p) + (2 * m - p - 1) - (2 * m - p - 1) // p
            )


@pytest.mark.parametrize(("n", "ahead"), [(2, 0), (3, 1), (4, 2), (6, 4)])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gathers_of_zbv(p, n, ahead):
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        report = proved(build("zbv", p, m), block_by_block(2 * p, n, ahead=ahead))
        assert report.gathers == tuple(4 * m * n - kept(n, ahead) * (2 * m - p - r) for r in range(p))


@pytest.mark.parametrize("name", NAMES)
def test_until_the_step_ends_there_is_one_gather_for_each_bucket(name):
    for p, m in ((2, 4), (4, 9), (4, 8)):
        try:
            table = build(name, p, m)
        except ScheduleError:
            continue
        report = proved(table, block_by_block(table.num_stages, 3, until="step"))
        assert report.gathers == tuple(3 * len(stages) for stages in table.chunks)


@pytest.mark.parametrize("name", NAMES)
def test_each_bucket_is_reduced_once_for_each_microbatch(name):
    table = build(name, 2, 4)
    programs = lower(table, reduced(table.num_stages, 2), reduce_each=True)
    counts = Counter(action for program in programs for action in program if action.kind == "REDUCE")
    stages = range(table.num_stages)
    microbatches = range(table.num_microbatches)
    assert counts == Counter(
        Action("REDUCE", bucket, stage, m) for bucket in (0, 1) for stage in stages for m in microbatches
    )


@pytest.mark.parametrize("name", NAMES)
def test_stashes_are_counted_by_whole_forwards(name):
    table = build(name, 4, 8)
    reduces = reduced(table.num_stages, 3)
    facts = dict(copies=table.copies, segments=table.segments, reduces=reduces)
    plain = check(lower(table, reduces), table.num_stages, table.num_microbatches, **facts)
    programs = lower(table, reduces, residency=block_by_block(table.num_stages, 3))
    report = check(programs, table.num_stages, table.num_microbatches, **facts)
    assert (
        report.peak_in_flight
        == plain.peak_in_flight
        == tuple(map(simulate(programs).peak_in_flight, range(4)))
    )


def test_the_work_for_what_is_kept_over_a_step_grows_as_the_program(monkeypatch):
    """Not as its square: 64 blocks and 256 microbatches took minutes."""
    looked_at = []
    merged = residency_module._merged

    def counted(lists):
        looked_at.extend(lists := list(lists))
        return merged(lists)

    monkeypatch.setattr(residency_module, "_merged", counted)
    counts = []
    for num_microbatches in (2, 16):
        looked_at.clear()
        lower(
            build("gpipe", 1, num_microbatches), reduced(1, 3), residency=block_by_block(1, 3, until="step")
        )
        counts.append(len(looked_at))
    assert 0 < counts[1] <= 10 * counts[0]
