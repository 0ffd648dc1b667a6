"""Numbers and tables as text."""

import math
from collections.abc import Sequence
from typing import Any


def finite(value: Any) -> Any:
    """Return what JSON can hold: numbers that aren't finite are None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def megabytes(num_bytes: float) -> str:
    """Return bytes in units of 10**6, with three digits at least."""
    return f"{num_bytes / 1e6:.3g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines, names to the left and numbers to the right."""
    columns = list(zip(*rows))
    named = [column[-1].lstrip("_(")[:1].isalpha() for column in columns]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(c.ljust(w) if name else c.rjust(w) for c, w, name in zip(row, widths, named))
        for row in rows
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
