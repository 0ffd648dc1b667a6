"""Work a formula out: numbers in the place of its letters, its result, and what mpitrain prints."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from measuring.report import Report

LETTERS = re.compile(r"[A-Za-z]\w*")
KNOWN = {"sqrt": math.sqrt, "max": max, "min": min}


class Worked(NamedTuple):
    """One row.

    quantity: with its unit.  formula: an expression of Python with the letters of `values`.
    printed: by mpitrain, or None.
    """

    quantity: str
    formula: str
    values: Mapping[str, float]
    printed: float | None = None

    @property
    def result(self) -> float:
        """Return the formula's value."""
        return float(eval(self.formula, {"__builtins__": {}}, {**KNOWN, **self.values}))

    @property
    def arithmetic(self) -> str:
        """Return the formula with numbers, as it is written by hand."""

        def number(letter: re.Match) -> str:
            value = self.values.get(letter[0])
            if value is None:
                return letter[0]
            return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+", "e")

        written = LETTERS.sub(number, self.formula).replace("**", "^")
        return re.sub(r" ?\* ?", " x ", written)


def figure(pattern: str, printed: str) -> float:
    """Return the number in the first group of a pattern. Raises ValueError if it isn't printed."""
    found = re.search(pattern, printed, re.MULTILINE)
    if found is None:
        raise ValueError(f"{pattern!r} isn't in\n{printed}")
    return float(found[1].replace(",", ""))


def parameters(printed: str) -> int:
    """Return the parameters of a model, of what `mpitrain memory` prints."""
    return int(figure(r"^([\d,]+) parameters", printed))


def sent(printed: str, axis: str, *operations: str) -> float:
    """Return the MB that a rank sends over an axis, of what `mpitrain program --traffic` prints."""
    rows = re.findall(r"^#   (\w+) +\d+ +(\w+) +\d+ +[\d.e-]+ +([\d.e-]+)$", printed, re.MULTILINE)
    return sum(float(mb) for name, operation, mb in rows if name == axis and operation in operations)


def table(report: Report, rows: Sequence[Worked], note: str = "") -> None:
    """Write the fragment `worked.md`: each formula with its numbers."""
    cells = [
        [
            row.quantity,
            row.arithmetic,
            f"{row.result:,.4g}" if abs(row.result) < 1000 else f"{row.result:,.0f}",
            "" if row.printed is None else f"{row.printed:,.10g}",
        ]
        for row in rows
    ]
    head = ["quantity", "numbers in the formula", "result", "mpitrain prints"]
    report.table(head, cells, name="worked", note=note, computed=True)
