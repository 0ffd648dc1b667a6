"""Numbers and tables as text."""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mpitrain.plan.declared.screen import columns

GAP = "  "
LEAST_TEXT = 12  # columns of a text in a table


def finite(value: Any) -> Any:
    """Return what JSON can hold: numbers that aren't finite are None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(tree: Any, indent: int | None = 1) -> str:
    """Return JSON in which numbers that aren't finite are null."""
    return json.dumps(finite(tree), indent=indent, allow_nan=False)


def megabytes(num_bytes: float) -> str:
    """Return bytes in units of 10**6, with three digits at least."""
    return f"{num_bytes / 1e6:.3g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


class Column(NamedTuple):
    """A column of a printed table. key: a row's attribute, as in JSON and CSV. form: writes its value."""

    title: str
    key: str
    form: Callable[[Any], str] = str


def tabled(columns: Sequence[Column], rows: Iterable[object]) -> str:
    """Return rows as lines below the titles of their columns, as aligned() has them."""
    lines = (tuple(column.form(getattr(row, column.key)) for column in columns) for row in rows)
    return aligned([tuple(column.title for column in columns), *lines])


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def aligned(rows: Sequence[tuple[str, ...]], width: int | None = None) -> str:
    """Return rows as lines, names to the left and numbers to the right.

    width: columns that there are; None: those of the user's terminal, 0: any. What is wider becomes
    several tables, which all have the first column; a last column of texts is wrapped.
    """
    room = columns() if width is None else width
    lengths = [max(map(len, column)) for column in zip(*rows)]
    if not room or _total(lengths) <= room:
        return _lines(rows)
    last = _total(lengths[:-1]) + len(GAP)
    if len(lengths) > 2 and _is_named(rows[-1][-1]) and room - last >= LEAST_TEXT:
        return _lines(list(_with_folded_texts(rows, room - last)))
    return "\n".join(_lines(table) for table in _divided(rows, room))


def _total(lengths: Sequence[int]) -> int:
    return len(GAP) * len(lengths) + sum(lengths)


def _is_named(cell: str) -> bool:
    return cell.lstrip("_(")[:1].isalpha()


def _lines(rows: Sequence[tuple[str, ...]]) -> str:
    columns_of = list(zip(*rows))
    named = [_is_named(column[-1]) for column in columns_of]
    widths = [max(map(len, column)) for column in columns_of]
    lines = [
        GAP.join(c.ljust(w) if name else c.rjust(w) for c, w, name in zip(row, widths, named)) for row in rows
    ]
    return "\n".join(f"{GAP}{line.rstrip()}" for line in lines)


def _with_folded_texts(rows: Sequence[tuple[str, ...]], room: int) -> Iterator[tuple[str, ...]]:
    for row in rows:
        first, *others = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        yield (*row[:-1], first)
        yield from ((*[""] * (len(row) - 1), text) for text in others)


def _divided(rows: Sequence[tuple[str, ...]], room: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield tables that fit, each with the first column, whose remarks in brackets only the first one has."""
    lengths = [max(map(len, column)) for column in zip(*rows)]
    names = [row[0] for row in rows]
    begin = 1
    while begin < len(lengths):
        end = begin + 1
        while end < len(lengths) and _total([max(map(len, names)), *lengths[begin : end + 1]]) <= room:
            end += 1
        yield [(name, *row[begin:end]) for name, row in zip(names, rows)]
        names = [name.partition(" (")[0] for name in names]
        begin = end
