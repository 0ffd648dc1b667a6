"""Orders of other projects are read as tables, and tables written as theirs: chunks, not stages."""

import csv

import pytest
from support.quick_schedules import NAMES

from mpitrain.cli import cli
from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import PAIR, B, F
from mpitrain.schedules.catalog import build
from mpitrain.schedules.formats.chunk_orders import names_chunks
from mpitrain.schedules.formats.notation import LETTERS
from mpitrain.schedules.formats.other_formats import FORMS, write_as
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.table import Table, make_table


def without_notes(table: Table) -> Table:
    return table._replace(notes=())


# What a form can't say: of all schedules and sizes below, which are refused.
REFUSED = {
    "papers": (),
    "torch": ("dualpipe", "seq1f1b"),
    "torch-messages": ("dualpipe", "seq1f1b"),
    "megatron": ("zb", "v-half", "v-min", "dualpipe", "seq1f1b", "auto"),
    "sail": ("dualpipe",),
    "dualpipe": ("zb", "v-half", "v-min", "seq1f1b", "auto"),  # where a W isn't the oldest
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_read_back_as_it_is_or_refused(name, form):
    for p, m in ((2, 4), (4, 8), (3, 7)):
        try:
            table = build(name, p, m)
        except ScheduleError:
            continue
        try:
            text = write_as(form, table)
        except ScheduleError:
            assert any(part in name for part in REFUSED[form])
        else:
            assert without_notes(read_any(text, name)) == table


@pytest.mark.parametrize("name", ["interleaved", "zbv", "zb-h1", "interleaved-zb"])
def test_pytorch_runs_the_messages_that_are_written(name):
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

    table = build(name, 4, 8)
    rows = csv.reader(write_as("torch-messages", table).splitlines())
    order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    played = _simulate_comms_compute(order, lambda stage: table.rank_of[stage], table.num_stages)
    assert {rank: sum(action is not None for action in row) for rank, row in played.items()} == {
        rank: len(row) for rank, row in order.items()
    }


def printed_by_sail(table: Table) -> str:
    """What passes.print_schedule prints: a whole backward as b, as that for inputs; messages as sf, rf."""
    rows = []
    for actions, stages in zip(table.ranks, table.chunks):
        words = []
        for action in actions:
            kind, upper = LETTERS[action.kind].replace("BW", "B"), stages.index(action.stage) > 0
            for word in (f"{kind}{action.index}", f"S{kind}{action.index}")[: 1 + (kind != "W")]:
                words.append(word if upper else word.lower())
        rows.append(" ".join(words))
    return "\n".join(rows)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv", "v-half"])
def test_what_sail_prints_is_read(name):
    table = build(name, 4, 9 if name != "interleaved" else 8)
    found = read_any(printed_by_sail(table), name)
    assert without_notes(found) == table
    assert any("messages" in note for note in found.notes)


def test_megatrons_order_as_it_is_printed():
    """Chunks of its own example, PP2 N3 M5 with VP2, from the documentation of the function."""
    text = "\n".join(
        [
            "Rank 0: ORDER [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]",
            "Rank 1: ORDER [1, 1, 1, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 2, -1, 2, -2, -2, -1, -1]",
        ]
    )
    found = read_any(text)
    assert (found.num_stages, found.num_microbatches, found.rank_of) == (4, 5, (0, 1, 0, 1))
    assert found.ranks[1][:6] == (F(0, 1), F(1, 1), F(2, 1), F(0, 3), B(0, 3), F(1, 3))


def test_the_upper_half_of_dualpipes_ranks_calls_the_second_copy_0():
    """Its step() exchanges the two on these ranks."""
    table = build("dualpipe", 4, 8)
    lines = write_as("dualpipe", table).splitlines()
    swap = str.maketrans("01", "10")
    steps = [*lines[:4], *(line.translate(swap) for line in lines[4:])]
    found = read_any("\n".join(steps), "dualpipe")
    assert without_notes(found) == table
    assert any("upper half" in note for note in found.notes)


def test_a_line_decides_which_stages_chunks_are():
    order = "\n".join(["F0.0 F0.1 BW0.1 BW0.0"] * 2)
    assert read_any(f"placed v\n{order}").rank_of == (0, 1, 1, 0)
    assert read_any(f"placed looped\n{order}").rank_of == (0, 1, 0, 1)
    with pytest.raises(ScheduleError, match="needed 'placed looped' or 'placed v'"):
        read_any(f"placed w\n{order}")


def test_nodes_that_name_their_stage_stand_wherever_they_are():
    """On no placement that has a name."""
    table = make_table("mine", [[F(0, 0), F(0, 3), B(0, 3), B(0, 0)], [F(0, 1), F(0, 2), B(0, 2), B(0, 1)]])
    text = write_as("sail", table)
    assert without_notes(read_any(text, "mine")) == table
    odd = make_table("mine", [[F(0, 0), F(0, 1), B(0, 1), B(0, 0)], [F(0, 2), F(0, 3), B(0, 3), B(0, 2)]])
    assert without_notes(read_any(write_as("sail", odd), "mine")) == odd
    with pytest.raises(ScheduleError, match="would be read as another order"):
        write_as("papers", odd)


def test_the_command_line_has_the_forms_that_there_are():
    (form,) = (option for option in cli.commands["schedule"].params if option.name == "form")
    assert list(form.type.choices) == list(FORMS)


def test_a_pair_of_one_stage():
    assert read_any("F0.0 [F1.0|BW0.0] BW1.0").ranks == ((F(0, 0), PAIR, F(1, 0), B(0, 0), B(1, 0)),)


def test_own_tables_name_no_chunks():
    for text in ("F0 F1 B0 B1", "rank 0: F0@0 B0@0", "0F0,0B0", "copies 2\nrank 0: F0@0 B0@0", "# f0\nF0 B0"):
        assert not names_chunks(text)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("f0 x3 b0", "line 1: 'x3' is no step of an order of chunks"),
        ("W F0.0 BW0.0", "rank 0: a W stands before"),
        ("rank 1: f0 b0", "found 'rank 1', needed 'rank 0: '"),
        ("ScheduledNode(type=F, stage=3, microbatch=0)", "stages in order from 0"),
        ("ScheduledNode(type=F, stage=0, microbatch=0, chunk=-1)", "nothing below 0"),
        ("ScheduledNode(type=F, stage=zero, microbatch=0)", "needed type, stage and microbatch"),
        ("ScheduledNode(type=S, stage=0, microbatch=0)", "needed F, B, W, BW or R"),
        ("copies x\nF0.0 BW0.0", "line 1: 'copies' is no step"),
        ("1 1 -1", "ends without B1@0"),
        ("f0 f1 b1 b0 f2", "ends without"),
        ("999999999F0 f999999999 b0", "is no step"),
    ],
)
def test_a_flaw_is_named(text, refusal):
    with pytest.raises(ScheduleError, match=refusal):
        read_any(text)


def test_an_order_that_a_form_counts_otherwise_is_refused():
    """Megatron's numbers say no microbatch: a forward before an earlier one can't be said."""
    table = make_table("mine", [[F(1, 0), F(0, 0), B(0, 0), B(1, 0)]])
    with pytest.raises(ScheduleError, match="would be read as another order"):
        write_as("megatron", table)
    assert without_notes(read_any(write_as("papers", table), "mine")) == table
