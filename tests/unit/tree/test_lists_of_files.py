"""The list of files in a package's docstring has all that lie in its folder, and no other."""

import ast
import re
from pathlib import Path

import pytest
from folders import ROOT

FOLDERS = ("mpitrain", "comm", "schedules")
NAME = r"[a-z]\w*(?:\.py|/)?"
NAMES = re.compile(rf"{NAME}(?:, {NAME})*")


def listed(text: str) -> set[str]:
    """Return the names in a docstring's list: a line's first column, or one that holds a name alone.

    Columns are two spaces apart. Where there are fewer than three lines of two columns, there is no list.
    """
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    if sum(len(row) > 1 and bool(NAMES.fullmatch(row[0])) for row in rows) < 3:
        return set()
    cells = [row[0] for row in rows if row[0].count(" ") == row[0].count(", ")]
    cells += [cell for row in rows for cell in row[1:] if re.fullmatch(NAME, cell)]
    names = {name for cell in cells if NAMES.fullmatch(cell) for name in cell.split(", ")}
    return {name.removesuffix(".py").removesuffix("/") for name in names}


def labels(text: str) -> set[str]:
    """Return the names in the first column of rows of two."""
    rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    cells = [row[0] for row in rows if len(row) > 1 and NAMES.fullmatch(row[0])]
    return {name.removesuffix(".py").removesuffix("/") for cell in cells for name in cell.split(", ")}


def contents(folder: Path) -> set[str]:
    """Return the modules and packages in a folder, without what is another room's (a link)."""
    modules = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py") if not path.parent.is_symlink()}
    return (modules | packages) - {"__init__"}


def packages() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    found = [path for path in found if not any(part.is_symlink() for part in path.parents)]
    return sorted(path for path in found if listed(ast.get_docstring(ast.parse(path.read_text())) or ""))


@pytest.mark.parametrize("path", packages(), ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_list_has_what_the_folder_has(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    there = contents(path.parent)
    assert not there - listed(text), "not in the list of __init__.py"
    assert not labels(text) - there, "in the list of __init__.py, but not in the folder"


def test_lists_are_found():
    assert len(packages()) >= 25
    text = "What.\n\nshards     of a bucket\npool, arena  the memory\nzero/   all of it\n"
    assert listed(text) == labels(text) == {"shards", "pool", "arena", "zero"}
