"""Read a user's table from CSV: one row per rank, one cell per action, empty cells for bubbles.

    F0@0,F1@0,,,B0@0,B1@0          our tokens
    ,F0@1,B0@1,F1@1,B1@1,

    0F0,0F1,,,0B0,0B1              or PyTorch's, as its schedules' _dump_csv writes them: stage, letter, microbatch
    ,1F0,1B0,1F1,1B1,

    (0F2;3B1)OVERLAP_F_B           PyTorch's pair, our three cells PAIR,F2@0,B1@3

The letters mean the same in both. Bubbles are left out: when an action starts follows from what it waits for. Rows `copies,2` or
`segments,4` say what the lines of that name say in the text form.
"""

import csv
import re
from collections.abc import Iterator

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import PAIR, Action, parse
from mpitrain.schedules.check import check_table
from mpitrain.schedules.table import Table, add_head, make_table, read_table

_TORCH = re.compile("([0-9]{1,9})([FBIW])([0-9]{1,9})")
_TORCH_PAIR = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
_TORCH_OTHER = re.compile("[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_HEADS = ("copies", "segments")
_NUMBER = re.compile("[1-9][0-9]{0,3}")


def read_any(text: str, name: str = "user") -> Table:
    """Read a table in the text form (see table) or as CSV, whichever it is. Raises ScheduleError for a flaw in it."""
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    is_text = re.match(rf"rank\s|({'|'.join(_HEADS)})\s+[0-9]", first)
    table = read_table(text, name) if is_text else read_csv(text, name)
    check_table(table)
    return table


def read_csv(text: str, name: str = "user") -> Table:
    """Read a table from CSV. Raises ScheduleError naming row and column, counted from 1."""
    ranks: list[list[Action]] = []
    heads: dict[str, int] = {}
    for number, row in enumerate(_rows(text, name), start=1):
        where = f"{name}, row {number}"
        if row and row[0].strip() in _HEADS:
            add_head(heads, row[0].strip(), _head(where, row), where)
        elif row and not row[0].startswith("#"):
            ranks.append(_read_row(where, row))
    return make_table(name, ranks, **heads)


def _rows(text: str, name: str) -> Iterator[list[str]]:
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        yield from rows
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise ScheduleError(f"{name}, line {rows.line_num}: {error}; needed a cell for each action") from None


def _head(where: str, row: list[str]) -> int:
    numbers = [cell.strip() for cell in row[1:] if cell.strip()]
    if len(numbers) != 1 or not _NUMBER.fullmatch(numbers[0]):
        raise ScheduleError(f"{where}: found {','.join(row)[:100]}, needed a number as in {row[0].strip()},2")
    return int(numbers[0])


def _read_row(where: str, row: list[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row, start=1):
        try:
            actions += _read_cell(cell.strip())
        except ScheduleError as error:
            raise ScheduleError(f"{where}, column {column}: {error.args[0]}") from None
    return actions


def _read_cell(cell: str) -> list[Action]:
    if not cell:
        return []
    if pair := _TORCH_PAIR.fullmatch(cell):
        return [PAIR, *_read_cell(pair[1]), *_read_cell(pair[2])]
    if token := _TORCH.fullmatch(cell):
        stage, kind, m = token.groups()
        return [Action(kind, int(m), int(stage))]
    if _TORCH_OTHER.fullmatch(cell):
        raise ScheduleError(f"{cell[:100]!r} is not a computation; export the table with format compute_only, messages are added later")
    return [parse(cell)]
