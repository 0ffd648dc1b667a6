"""Users' own tables: our text, CSV, PyTorch's exported schedules, near misses, and what is wrong where."""

import pytest
from support.quick_schedules import NAMES
from torch_tables import FORMATS, tables, torch_table

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import PAIR, B, F, I, W, format_program
from mpitrain.schedules.catalog import build
from mpitrain.schedules.formats.csv_table import write_csv
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.options import Options
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.table import Table, heads_of, make_table, write_table


def plain(table: Table, name: str) -> Table:
    """Return a table without what reading it noted, under another name."""
    return table._replace(name=name, notes=())


def test_our_tokens_and_bubbles():
    table = read_any("F0@0,F1@0,,,B0@0,B1@0\n,F0@1,B0@1,F1@1,B1@1,\n")
    assert table.ranks == ((F(0, 0), F(1, 0), B(0, 0), B(1, 0)), (F(0, 1), B(0, 1), F(1, 1), B(1, 1)))
    assert (table.num_microbatches, table.rank_of, table.notes) == (2, (0, 1), ())


def test_torchs_tokens_are_stage_letter_microbatch():
    table = read_any("0F0, 0F1,,0I0,0W0,0B1\n\n# the last stage\n,1F0,1I0,1W0,1F1,1B1\n")
    assert table.ranks[0] == (F(0, 0), F(1, 0), I(0, 0), W(0, 0), B(1, 0))
    assert table.ranks[1] == (F(0, 1), I(0, 1), W(0, 1), F(1, 1), B(1, 1))


def test_pairs_of_both_forms():
    row = "0F0,{},0B1"
    wanted = (F(0, 0), PAIR, F(1, 0), B(0, 0), B(1, 0))
    assert read_any(row.format("(0F1;0B0)OVERLAP_F_B")).ranks == (wanted,)
    assert read_any(row.format("PAIR,F1@0,B0@0")).ranks == (wanted,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (1, 3)])
def test_every_schedule_is_written_and_read_back_as_it_is(name, p, m):
    try:
        table = build(name, p, m)
    except ScheduleError:
        assert name in ("dualpipe",) and p == 1
        return
    for text in (write_table(table), write_csv(table), "# mine\r\n" + write_csv(table).replace("\n", "\r\n")):
        assert read_any(text, name) == table


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "dualpipev", "seq1f1b", "interleaved-zb"])
def test_lowered_programs_are_read_back_as_their_table(name):
    """With messages, reductions, gathers and parts, and the lines that `mpitrain program` breaks."""
    table = build(name, 2, 4)
    residency = Residency((((0,), (1,)),) * table.num_stages)
    heads = [f"{what} {number}" for what, number in heads_of(table)]
    for more in ({}, {"residency": residency}, {"residency": residency, "reduce_each": True}):
        for pairs in ("whole", "parts"):
            programs = lower(table, [Reduction(2, (0, 1))] * table.num_stages, pairs=pairs, **more)
            text = "\n\n".join(
                [*heads, *(format_program(row, first=f"rank {rank}: ") for rank, row in enumerate(programs))]
            )
            singly = [[action for action in row if action != PAIR] for row in table.ranks]
            taken_apart = make_table(name, singly, copies=table.copies, segments=table.segments)
            assert plain(read_any(text), name) == (table if "PAIR" in text else taken_apart)


# ---------------------------------------------------------------- PyTorch's

OURS = {
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zb",
}
OURS |= {"GPipe": "gpipe", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev"}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("p", [2, 4])
def test_what_torch_writes_is_our_schedule_of_that_name(p, form):
    for key, text in tables(p, 2 * p, form).items():
        name, _, chunks = key.partition(" of ")
        ours = OURS[name]
        looped = ours in ("interleaved", "looped-bfs", "interleaved-zb")
        wanted = build(ours, p, 2 * p, Options(chunks=int(chunks)) if looped else Options())
        found = read_any(text, ours)
        # torch's forwards ascend and its backwards descend; numbered by their backwards, it is the
        # reverse
        if ours == "looped-bfs":
            row = [[a for a in actions if a.kind == "B"] for actions in wanted.ranks]
            assert [[a for a in actions if a.kind == "B"] for actions in found.ranks] == row
            assert any(
                note.startswith("microbatches are numbered in the order of their backwards")
                for note in found.notes
            )
        else:
            assert plain(found, ours) == wanted, key
        left_out = [
            note for note in found.notes if note.startswith("left out what is added to every table: ")
        ]
        assert len(left_out) == (form == "compute_comms"), found.notes


@pytest.mark.parametrize(("more", "notes"), [("", 1), ("comms", 2)])
def test_torchs_older_letters(more, notes):
    """The two CSVs of its own test folder: B for inputs beside W; and BW where a rank's two were joined."""
    ours = build("interleaved-zb", 2, 8, Options(chunks=2))
    text = torch_table("InterleavedZeroBubble", 2, 8, 2, "compute_comms" if more else "compute_only").replace(
        "I", "B"
    )
    if more:
        first, second = text.splitlines()
        cells = [cell for cell in first.split(",") if not cell[1:].startswith("W")]
        first = ",".join(cell[0] + "BW" + cell[2:] if cell[1] == "B" else cell for cell in cells)
        text = f"{first}\n{second}\n"
        joined = [
            [B(a.index, a.stage) if a.kind == "I" else a for a in actions if a.kind != "W"]
            for actions in ours.ranks[:1]
        ]
        ours = make_table("mine", [*joined, ours.ranks[1]])
    found = read_any(text, "mine")
    assert found.ranks == ours.ranks
    assert len(found.notes) == notes
    assert found.notes[
        -1
    ] == "B is read as I, the backward for inputs, as W stands beside it" + ", and BW as B" * bool(more)


def test_a_wrong_table_of_torchs_is_refused_with_its_place():
    """In 2.13 the last rank's forwards are one microbatch too far."""
    with pytest.raises(
        ScheduleError, match=r"ends without B4@0; of microbatch 4 there is F4@3 \(rank 3, position 6\)"
    ):
        read_any(torch_table("1F1B", 4, 4), "mine")


# ---------------------------------------------------------------- near misses

TWO = "rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 B0@1 F1@1 B1@1\n"
NEAR = {
    "stages left out": "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1",
    "ranks and stages left out": "F0 F1 B0 B1\nF0 B0 F1 B1",
    "no colon": "rank 0 F0@0 F1@0 B0@0 B1@0\nrank 1 F0@1 B0@1 F1@1 B1@1",
    "ranks left out": "F0@0 F1@0 B0@0 B1@0\nF0@1 B0@1 F1@1 B1@1",
    "commas in the text": "rank 0: F0@0, F1@0, B0@0, B1@0\nrank 1: F0@1, B0@1, F1@1, B1@1",
    "bubbles as dots": "rank 0: F0 F1 . . B0 . B1\nrank 1: . F0 B0 F1 B1",
    "torch's tokens as text": "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1",
    "CSV with tabs": "0F0\t0F1\t\t\t0B0\t0B1\n\t1F0\t1B0\t1F1\t1B1\t",
    "text with tabs": "F0@0\tF1@0 B0@0\tB1@0\nF0@1\tB0@1 F1@1\n\tB1@1",
    "CSV with semicolons": "0F0;0F1;;;0B0;0B1\n;1F0;1B0;1F1;1B1;",
    "stages left out of CSV": "F0,F1,,,B0,B1\n,F0,B0,F1,B1",
    "lines that continue": "rank 0: F0@0 F1@0\n   B0@0\n\tB1@0\nrank 1: F0@1\n  B0@1 F1@1 B1@1",
    "BW of the papers": "F0 F1 BW0 BW1\nF0 BW0 F1 BW1",
}


@pytest.mark.parametrize("case", NEAR)
def test_near_misses_are_read(case):
    table = read_any(NEAR[case], "mine")
    assert table.ranks == read_any(TWO, "mine").ranks
    assert len(table.notes) == (
        "stages left out" in case or "dots" in case or "BW" in case or case.startswith("ranks and")
    )


def test_the_papers_b_is_for_inputs_where_there_is_a_w():
    table = read_any("F0 F1 B0 W0 B1 W1", "mine")
    assert table.ranks == ((F(0, 0), F(1, 0), I(0, 0), W(0, 0), I(1, 0), W(1, 0)),)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            grid(build("1f1b", 2, 2)),
            "line 1: found a drawing, in which stages are not named; write the table with `mpitrain schedule",
        ),
        ("zbv: 2 ranks, 4 microbatches\n\n" + grid(build("zbv", 2, 4)), "line 3: found a drawing"),
        ('{"schedule": "1f1b"}', "line 1: found JSON; write the table with"),
        (
            "         Rank 0  Rank 1\nStep 00  0F0\nStep 01  0F1  1F0",
            "line 2: found the grid that PyTorch prints",
        ),
        ("rank 0: F0@0 F1\n", "rank 0: 'F1' names no stage, 'F0@0' does; write F1@STAGE everywhere"),
    ],
)
def test_other_forms_are_refused_with_the_right_one(text, found):
    with pytest.raises(ScheduleError) as caught:
        read_any(text, "mine.txt")
    assert "mine.txt" in str(caught.value) and found in str(caught.value), str(caught.value)


# ---------------------------------------------------------------- flaws


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0@0,B0@0\nF0@1,B0\n", "mine: rank 1: 'B0' names no stage, 'F0@1' does; write B0@STAGE everywhere"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", "mine: rank 0, position 1: PAIR is followed by"),
        ("0F0,nonsense\n", "mine, row 1, column 2: 'nonsense' is no instruction; write for example F3@1"),
        ("0F0,0RECV\n", "mine, row 1, column 2: '0RECV' is no instruction"),
        ("copies,two\n0F0,0B0\n", "mine, row 1: found copies,two, needed a number as in copies,2"),
        ("", "mine: found no ranks"),
        (",,\n0F0,0B0\n", "mine: rank 0 computes nothing"),
        ("0F0,0B0\n1RECV_F0,1SEND_B0\n", "mine: rank 1 computes nothing"),
        ("0F0,0I0,0W0,0F1,0BW1", "mine: found I and BW"),
        (
            "rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 B0@1 F1@1",
            "mine: rank 1, position 3: the program ends without B1@1",
        ),
        (
            "rank 0: F0@0 B0@0 B0@0\nrank 1: F0@1 B0@1",
            "mine: rank 0, position 2: B0@0 again; it already stands at rank 0, position 1",
        ),
        ("rank 0: F0@0 B0@0\nrank 1: B0@1 F0@1", "mine: rank 1, position 0: B0@1 stands before F0@1"),
        (
            "rank 0: F0@0 F1@0 B1@0 B0@0\nrank 1: F0@1 F1@1 B0@1 B1@1",
            "mine: rank 0, position 3: B0@0 adds to the .* after B1@0",
        ),
        ("rank 0: F0@0 I0@0", "mine: rank 0, position 2: the program ends without W0@0"),
        (
            "copies 2\nrank 0: F0@0 B0@0 F0@1 B0@1",
            "mine: stage 0 and its copy, stage 1: found both on rank 0, needed two ranks",
        ),
        ("segments 2\nsegments 3\nrank 0: F0@0 B0@0", "mine, line 2: segments again"),
        ("copies,2\ncopies,1\nF0@0,B0@0", "mine, row 2: copies again"),
        ("rank 1: F0@0", "mine, line 1: found 'rank 1: F0@0', needed 'rank 0: ' and its actions"),
        ("rank 0: F01@0", "mine, line 1: 'F01@0' is no instruction; write for example F3@1 or B3@1$"),
    ],
)
def test_flaws_of_a_table_are_reported_in_its_own_words(text, message):
    """Not in those of the programs that are made of it, with their messages and positions."""
    with pytest.raises(ScheduleError, match=message):
        read_any(text, "mine")


PLAYED = {
    "gradients out of order": ("rank 0: F0@0 F1@0 B1@0 B0@0\nrank 1: F0@1 F1@1 B0@1 B1@1", True),
    "weights out of order": ("rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 F1@1 I0@1 I1@1 W1@1 W0@1", True),
    "twice": ("rank 0: F0@0 B0@0\nrank 1: F0@1 B0@1 I0@1 W0@1", True),
    "a message twice": ("rank 0: F0@0 B0@0 B0@0\nrank 1: F0@1 B0@1", False),
    "no weights": ("rank 0: F0@0 I0@0\nrank 1: F0@1 B0@1", True),
    "a backward too early": ("rank 0: F0@0 B0@0\nrank 1: B0@1 F0@1", False),
    "no backward": ("rank 0: F0@0 B0@0\nrank 1: F0@1", False),
}


@pytest.mark.parametrize("case", PLAYED)
def test_a_table_that_plays_to_its_end_is_drawn_so(case):
    text, plays = PLAYED[case]
    with pytest.raises(ScheduleError) as caught:
        read_any(text, "mine")
    assert ("drawn without waits" in str(caught.value)) != plays, str(caught.value)
    assert ("bubble" in str(caught.value)) == plays and "tick" in str(caught.value), str(caught.value)


def test_a_flaw_among_many_ranks_is_drawn_with_the_ranks_near_it():
    rows = [f"F0@{rank} B0@{rank}" for rank in range(300)]
    rows[200] = "B0@200 F0@200"
    with pytest.raises(ScheduleError) as caught:
        read_any("\n".join(rows), "mine")
    drawn = [line.split()[1] for line in str(caught.value).splitlines() if line.startswith("rank ")]
    assert drawn == [str(rank) for rank in range(192, 208)] and len(str(caught.value)) < 4000
