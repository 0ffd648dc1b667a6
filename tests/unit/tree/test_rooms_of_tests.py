"""A test lies in the room that says how it is started (docs/tests.md)."""

import ast
import fnmatch
import re

import pytest
from folders import DOCS, TESTS, files_of_tests

PROGRAMS = {"mpirun", "started", "several"}  # of tests/support/launch.py: they start ranks
COMMANDS = {"runs", "pages", "harness"}
ROOMS = {"unit", "ranks", "hardware", "mutation", *COMMANDS}
FILES = files_of_tests("*")


def imported(path):
    """Return the names that a file takes from tests/support/launch.py."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "launch"]
    return {alias.name for node in found for alias in node.names}


def marked_mpi(path):
    return re.search(r"^(pytestmark\b.*|@)pytest\.mark\.mpi\b", path.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_lies_where_what_it_starts_belongs(path):
    room = path.relative_to(TESTS).parts[0]
    assert room in ROOMS
    if room == "unit":
        assert not marked_mpi(path) and not imported(path) & PROGRAMS
    if room == "ranks":
        assert marked_mpi(path)
    if room in COMMANDS:
        assert not marked_mpi(path)


def test_names_of_files_are_unique():
    """pytest puts each folder on Python's path, where the second of a name would hide."""
    names = [path.name for path in TESTS.rglob("*.py") if "golden" not in path.parts]
    names = [name for name in names if name not in {"sitecustomize.py", "run.py"}]
    assert len(names) == len(set(names))


def test_each_file_stands_on_the_page_of_tests():
    """The table of subjects says where something is tested."""
    page = (DOCS / "tests.md").read_text(encoding="utf-8")
    rooms = "|".join(ROOMS)
    table = page.partition("## What is tested where")[2].partition("\n## ")[0]
    patterns = re.findall(rf"`((?:{rooms})/[\w/*]+)`", table)
    files = {path.relative_to(TESTS).as_posix().replace("/test_", "/") for path in FILES}
    matched = {pattern: set(fnmatch.filter(files, f"{pattern}.py")) for pattern in patterns}
    assert [pattern for pattern, found in matched.items() if not found] == []
    assert files - set().union(*matched.values()) == set()
