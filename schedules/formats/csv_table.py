"""Read a user's table from CSV, and write one: a row per rank, a cell per action.

    F0@0,F1@0,,,B0@0,B1@0          our tokens
    ,F0@1,B0@1,F1@1,B1@1,

    0F0,0F1,,,0B0,0B1              or PyTorch's, as its schedules' _dump_csv writes them: stage,
                                   letter, microbatch
    ,1F0,1B0,1F1,1B1,

    (0F2;3B1)OVERLAP_F_B           PyTorch's pair, our three cells PAIR,F2@0,B1@3

Bubbles are left out: when an action starts follows from what it waits for. Rows `copies,2` or
`segments,4` say what the lines of that name say in the text form, and a row whose first cell begins
with # is a comment.
"""

import re
from collections.abc import Iterator

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action
from mpitrain.schedules.formats.table_tokens import read_token
from mpitrain.schedules.table import HEADS, Rows, Table, add_head, comment_of, heads_of

_NUMBER = re.compile("[1-9][0-9]{0,3}")


def read_csv_rows(text: str, name: str = "user", separator: str = ",") -> tuple[Rows, dict[str, int]]:
    """Read each rank's cells, and the heads. Raises ScheduleError naming row and column, from 1."""
    ranks: Rows = []
    heads: dict[str, int] = {}
    for number, row in enumerate(_rows(text, name, separator), start=1):
        where = f"{name}, row {number}"
        if row and row[0].strip() in HEADS:
            _add_head(heads, where, row)
        elif row and not row[0].startswith("#"):
            ranks.append(_read_row(where, row))
    return ranks, heads


def write_csv(table: Table) -> str:
    """Write a table as CSV that is read back exactly."""
    heads = [f"{what},{number}" for what, number in heads_of(table)]
    rows = [",".join(map(str, actions)) for actions in table.ranks]
    return "\n".join([comment_of(table), *heads, *rows, ""])


def _rows(text: str, name: str, separator: str) -> Iterator[list[str]]:
    import csv  # which no rank needs without such a table

    rows = csv.reader(text.splitlines(), delimiter=separator, skipinitialspace=True)
    try:
        yield from rows
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise ScheduleError(f"{name}, line {rows.line_num}: {error}; needed a cell for each action") from None


def _add_head(heads: dict[str, int], where: str, row: list[str]) -> None:
    what = row[0].strip()
    numbers = [cell.strip() for cell in row[1:] if cell.strip()]
    if len(numbers) != 1 or not _NUMBER.fullmatch(numbers[0]):
        raise ScheduleError(f"{where}: found {','.join(row)[:100]}, needed a number as in {what},2")
    try:
        add_head(heads, what, int(numbers[0]))
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error.args[0]}") from None


def _read_row(where: str, row: list[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row, start=1):
        try:
            actions += read_token(cell.strip())
        except ScheduleError as error:
            raise ScheduleError(f"{where}, column {column}: {error.args[0]}") from None
    return actions
