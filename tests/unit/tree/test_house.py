"""The shape of the code stays what benchmarks/house.py prints of it."""

import ast
import re
import sys

import pytest
from folders import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # behind: tests/support has a training.py, too

import house


@pytest.fixture(scope="module")
def shape():
    return house.measure(ROOT, house.CODE)


def test_lines_are_short(shape):
    assert shape.too_long_lines == []
    assert len(shape.long_lines) < 0.04 * shape.num_lines


def test_functions_are_short_and_simple(shape):
    assert {n: c for n, c in shape.lengths.items() if c > house.LONGEST_FUNCTION} == {}
    assert {n: c for n, c in shape.complexity.items() if c > house.MOST_COMPLEX} == {}


def test_a_class_name_means_one_thing(shape):
    assert house.two_meanings(shape) == {}


def test_few_statements_assign_several_values_at_once(shape):
    assert len(shape.tuples) < 0.01 * shape.num_statements


def test_two_files_of_one_name_are_explained():
    assert house.twins(ROOT, house.CODE).keys() == house.TWINS.keys()


OLD_WORDS = {"told", "beside", "owed", "owing", "sick", "wish", "wishes", "poker", "foretell"}


def names_in(path):
    """Yield the names that a file gives to something, or uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        for attribute in ("id", "arg", "name", "attr"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name


@pytest.mark.parametrize("folder", ["mpitrain", "comm", "schedules", "tests", "benchmarks", "docs"])
def test_names_are_of_the_fields_words(folder):
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in names_in(path)
        if OLD_WORDS & {word.lower() for word in re.split("_|(?<=[a-z])(?=[A-Z])", name)}
    }
    assert found == set()
