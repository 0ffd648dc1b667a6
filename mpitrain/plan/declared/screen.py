"""Text laid out for the width of the user's terminal; in a file or a pipe lines stay as they are.

The width is that of COLUMNS, which `cluster/std_streams.py` sets where the launcher has the terminal, else of
the terminal itself.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

LEAST = 40  # columns: below, words have no room
USUAL = 80  # of a terminal that doesn't say
INDENT = 2  # of a line's continuation
GAP = re.compile(r"\s{2,}")
# a title and two spaces or more, or none; then a command, and what a shell takes for a comment
COMMAND = re.compile(
    r"(?P<title>\s*(?:\S(?:\S| (?! ))*\s{2,})?)"
    r"(?P<command>(?:[A-Z_]+=\S+ )*(?:mpitrain|mpirun|mpiexec|srun|cp|find|python[\d.]*) .*?)"
    r"(?P<comment>  # .*)?"
)
QUANTITY = re.compile(r"(\d) (?=(?:%|ms|s|GB|MB|GB/s|GFLOP/s)(?![\w/]))")  # a number stays with its unit
WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"(?:\\.|[^"\\])*"|['"])+""")


def columns(stream: TextIO | None = None) -> int:
    """Return the columns that lines printed to a stream, or standard output, have; 0: no terminal."""
    if asked := os.environ.get("COLUMNS", ""):
        return max(int(asked), LEAST) if asked.isdecimal() else 0
    stream = stream or sys.stdout
    try:
        if not stream.isatty():
            return 0
        return max(os.get_terminal_size(stream.fileno()).columns or USUAL, LEAST)
    except (OSError, ValueError):
        return USUAL


def folded(text: str, width: int) -> str:
    """Break lines that are longer than `width` columns between words.

    A continuation is indented to where its text begins; commands continue after a backslash. A word
    that is longer stays whole, and JSON as it is. width: 0 for lines of any length.
    """
    if not width or text.startswith(("{", "[\n")) or all(len(line) <= width for line in text.split("\n")):
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded_line(line, width))


def filled(fields: Sequence[str], width: int, gap: str = "  ") -> str:
    """Join the first fields that fit into a line; the first one whole, however long it is."""
    line = fields[0]
    for field in fields[1:]:
        if width and len(line) + len(gap) + len(field) > width:
            break
        line += gap + field
    return line


def _folded_line(line: str, width: int) -> Iterator[str]:
    if len(line) <= width or line.startswith("{"):
        yield line
    elif command := COMMAND.fullmatch(line):
        yield from _folded_command(command, width)
    else:
        yield from _folded_fields(line, width)


def _folded_command(match: re.Match[str], width: int) -> Iterator[str]:
    title = match["title"]
    comment = (match["comment"] or "").strip()
    units = _units(match["command"])
    if len(title) + len(match["command"]) > width and title.strip():
        yield title.rstrip()
        title = " " * (INDENT + len(title) - len(title.lstrip()))
    below = " " * (len(title) + INDENT)
    if comment:
        yield from textwrap.wrap(
            comment, width, initial_indent=title, subsequent_indent=f"{' ' * len(title)}# ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        title = " " * len(title)
    line = title + units[0]
    for unit in units[1:]:
        if len(line) + 1 + len(unit) + 2 > width:
            yield f"{line} \\"
            line = below[: max(0, width - len(unit) - 2)] + unit
        else:
            line += f" {unit}"
    yield line


def _units(command: str) -> list[str]:
    """Return the words of a command, quoted ones whole, each option with its value."""
    units: list[str] = []
    for word in WORD.findall(command):
        takes = units and units[-1].startswith("--") and " " not in units[-1] and "=" not in units[-1]
        if takes and not word.startswith("-"):
            units[-1] += f" {word}"
        else:
            units.append(word)
    return units


def _folded_fields(line: str, width: int) -> Iterator[str]:
    """Yield a line in pieces; of fields with two spaces between them each stays whole, if it can."""
    start = len(line) - len(line.lstrip())
    if line.startswith("#"):  # a comment of a program stays one
        yield from _wrapped(line, width, "# " + " " * INDENT)
        return
    fields = GAP.split(line.strip())
    gaps = GAP.findall(line.strip())
    below = " " * (start + INDENT)
    if len(fields) == 2 and start + len(fields[0] + gaps[0]) <= width // 2:  # a title, and its text
        below = " " * (start + len(fields[0] + gaps[0]))
        fields, gaps = [line.strip()], []
    held = " " * start + fields[0]
    for gap, field in zip(gaps, fields[1:]):
        if len(held) + len(gap) + len(field) > width:
            yield from _wrapped(held, width, below)
            held = below + field
        else:
            held += gap + field
    yield from _wrapped(held, width, below)


def _wrapped(line: str, width: int, below: str) -> list[str]:
    lines = textwrap.wrap(
        QUANTITY.sub("\\1\N{NO-BREAK SPACE}", line), width, subsequent_indent=below,
        break_long_words=False, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
    return [_fitted(part.replace("\N{NO-BREAK SPACE}", " "), width) for part in lines] or [line]


def _fitted(line: str, width: int) -> str:
    """Indent a line less, if it is a long word that fits then."""
    text = line.lstrip()
    return " " * (width - len(text)) + text if len(text) <= width < len(line) else line
