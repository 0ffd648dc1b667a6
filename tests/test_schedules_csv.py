"""Users' tables from CSV: our tokens, PyTorch's exported form, bubbles, pairs, and what is wrong where."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import PAIR, B, F, I, W
from mpitrain.schedules.catalog import build
from mpitrain.schedules.csv_table import read_any, read_csv
from mpitrain.schedules.table import write_table


def test_our_tokens_and_bubbles():
    table = read_csv("F0@0,F1@0,,,B0@0,B1@0\n,F0@1,B0@1,F1@1,B1@1,\n")
    assert table.ranks == ((F(0, 0), F(1, 0), B(0, 0), B(1, 0)), (F(0, 1), B(0, 1), F(1, 1), B(1, 1)))
    assert (table.num_microbatches, table.rank_of) == (2, (0, 1))


def test_torchs_tokens_are_stage_letter_microbatch():
    table = read_csv("0F0, 0F1,,0I0,0W0,0B1\n\n# the last stage\n,1F0,1I0,1W0,1F1,1B1\n")
    assert table.ranks[0] == (F(0, 0), F(1, 0), I(0, 0), W(0, 0), B(1, 0))
    assert table.ranks[1] == (F(0, 1), I(0, 1), W(0, 1), F(1, 1), B(1, 1))


def test_pairs_of_both_forms():
    row = "0F0,{},0B1"
    wanted = (F(0, 0), PAIR, F(1, 0), B(0, 0), B(1, 0))
    assert read_csv(row.format("(0F1;0B0)OVERLAP_F_B")).ranks == (wanted,)
    assert read_csv(row.format("PAIR,F1@0,B0@0")).ranks == (wanted,)


@pytest.mark.parametrize(("name", "schedule"), [("dualpipev", "ScheduleDualPipeV"), ("zbv", "ScheduleZBVZeroBubble")])
def test_what_torch_writes_can_be_read(tmp_path, name, schedule):
    p, m = 4, 8
    made = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    generate = getattr(torch_schedules, schedule)._calculate_single_rank_operations
    made.pipeline_order = {rank: generate(made, rank) for rank in range(p)}
    torch_schedules.PipelineScheduleMulti._dump_csv(made, tmp_path / "table.csv")
    assert read_any((tmp_path / "table.csv").read_text(), name) == build(name, p, m)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "seq1f1b"])
def test_a_table_can_be_given_as_text_or_as_csv(name):
    table = build(name, 4, 8)
    assert read_any(write_table(table), name) == table
    heads = "".join(f"{what},{number}\n" for what, number in (("copies", table.copies), ("segments", table.segments)) if number > 1)
    rows = "".join(",".join(map(str, actions)) + "\n" for actions in table.ranks)
    assert read_any("# mine\n" + heads + rows, name) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0@0,B0@0\nF0@1,B0\n", "mine, row 2, column 2: 'B0' is no instruction; write for example F3@1"),
        ("0F0,0SEND_F0\n", "mine, row 1, column 2: '0SEND_F0' is not a computation; export .*compute_only"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", "mine: rank 0, position 1: PAIR is followed by"),
        ("0F0,nonsense\n", "mine, row 1, column 2: 'nonsense' is no instruction"),
        ("copies,two\n0F0,0B0\n", "mine, row 1: found copies,two, needed a number as in copies,2"),
        ("", "mine: found no ranks"),
        (",,\n0F0,0B0\n", "mine: rank 0 computes nothing"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        read_csv(text, "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 B0@1 F1@1", "mine: rank 1, position 3: the program ends without B1@1"),
        ("rank 0: F0@0 B0@0 B0@0\nrank 1: F0@1 B0@1", "mine: rank 0, position 2: B0@0 again; it already stands at rank 0, position 1"),
        ("rank 0: F0@0 B0@0\nrank 1: B0@1 F0@1", "mine: rank 1, position 0: B0@1 stands before F0@1"),
        ("rank 0: F0@0 F1@0 B1@0 B0@0", "mine: rank 0, position 3: B0@0 adds to the gradients of stage 0 after B1@0"),
        ("rank 0: F0@0 I0@0", "mine: rank 0, position 2: the program ends without W0@0"),
        ("copies 2\nrank 0: F0@0 B0@0 F0@1 B0@1", "mine: stage 0 and its copy, stage 1: found both on rank 0, needed two ranks"),
        ("segments 2\nsegments 3\nrank 0: F0@0 B0@0", "mine, line 2: segments again"),
        ("copies,2\ncopies,1\nF0@0,B0@0", "mine, row 2: copies again"),
        ("rank 0: F0", "mine, line 1: 'F0' is no instruction; write for example F3@1 or B3@1$"),
    ],
)
def test_flaws_of_a_table_are_told_in_its_own_words(text, message):
    """Not in those of the programs that are made of it, with their messages and positions."""
    with pytest.raises(ScheduleError, match=message):
        read_any(text, "mine")
