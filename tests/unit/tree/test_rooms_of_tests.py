"""A test lies in the room that says how it is started (docs/tests.md)."""

import ast
import re

import pytest
from folders import TESTS, files_of_tests

PROGRAMS = {"mpirun", "started", "several"}  # of tests/support/launch.py: they start ranks
ROOMS = {"unit", "ranks", "runs", "hardware", "mutation"}
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
    if room == "runs":
        assert not marked_mpi(path)


def test_names_of_files_are_unique():
    """pytest puts each folder on Python's path, where the second of a name would hide."""
    names = [path.name for path in TESTS.rglob("*.py") if "golden" not in path.parts]
    names = [name for name in names if name not in {"sitecustomize.py", "run.py"}]
    assert len(names) == len(set(names))
