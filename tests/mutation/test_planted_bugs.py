"""Every bug of benchmarks/planted_bugs.toml can still be planted: what it replaces is in its file, once."""

import ast
import re
import sys

import pytest
from folders import ROOT, files_of_tests

sys.path.append(str(ROOT / "benchmarks"))  # after: tests/support has a training.py, too

from planted_bugs import BUGS, FOUND, finders, place_of


@pytest.mark.parametrize(
    ("file", "old", "new"), BUGS, ids=[f"{number}-{file}" for number, (file, _, _) in enumerate(BUGS)]
)
def test_there_is_one_place_for_it(file, old, new):
    text = (ROOT / file).read_text(encoding="utf-8")
    begins, ends = place_of(old, text)
    assert new != old
    ast.parse(text[:begins] + new + text[ends:])


def test_each_has_a_test_that_found_it():
    """benchmarks/planted_bugs.txt is what the study printed.

    A new bug is to be asked about, and what is gone has no line.
    """
    found = finders(FOUND)
    assert found.keys() == {(file, " ".join(new.split())) for file, _, new in BUGS}
    there = {path.name for path in files_of_tests()}
    assert not {test for test in found.values() if re.match(r"\w+\.py", test)[0] not in there}
