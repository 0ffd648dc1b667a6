"""The shape of the code stays what benchmarks/house.py prints of it."""

import ast
import re
import sys

import pytest
from folders import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # after: tests/support has a training.py, too

import house

from mpitrain.commands.reference.keys import every_key
from mpitrain.schedules.catalog import NAMES


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


OLD_WORDS = {
    "told",
    "anew",
    "practise",
    "beside",
    "owed",
    "owing",
    "sick",
    "wish",
    "wishes",
    "poker",
    "foretell",
}


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


# of what users read: a private dialect stood where the field has a term
OLD_PHRASES = re.compile(
    r"\b(if absent|when absent|go(es)? on (with|from|after)|going on (with|from|after)|start again to"
    r"|com(es|ing|e) (again|back)|behind|mend(s|ed)?|kin|fullest|tells?|telling|told|at most\."
    r"|says of|every so (often|many)|holds? least|anew|whoever|gone on with)\b"
)
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALLS = re.compile(r"\.fullest\b")  # of a computed figure


def docstrings_of(tree):
    """Return the documentation of a module's code."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def printed_texts(path):
    """Yield (line, text) of the sentences that a module prints; docstrings of commands are their help."""
    tree = ast.parse(path.read_text())
    unprinted = set() if path.name == "cli.py" else docstrings_of(tree)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in unprinted and len(node.value.split()) > 2:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", ["mpitrain", "comm", "schedules"])
def test_what_is_printed_has_the_fields_terms(folder):
    printed = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in (ROOT / folder).rglob("*.py")
        for line, text in printed_texts(path)
        if OLD_PHRASES.search(text)
    ]
    assert printed == []


def test_comments_of_keys_have_the_fields_terms():
    assert [key.name for key in every_key().values() if OLD_PHRASES.search(key.meaning)] == []


def test_pages_have_the_fields_terms():
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in READ
        if "generated" not in path.parts and path.name != "changes.md"
        for number, line in enumerate(CALLS.sub("", path.read_text()).splitlines(), 1)
        if OLD_PHRASES.search(line)
    ]
    assert lines == []


def test_a_schedules_name_stands_in_its_familys_file():
    elsewhere = {
        (str(path.relative_to(ROOT)), node.value)
        for room in ("mpitrain", "schedules", "comm")
        for path in (ROOT / room).rglob("*.py")
        if path.parent.name != "families"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in NAMES
    }
    others = {("mpitrain/config.py", "1f1b")}  # the default of a key
    others |= {
        (path, "dualpipe") for path in ("mpitrain/commands/requests.py", "schedules/formats/other_formats.py")
    }  # a form
    assert elsewhere - others == {("schedules/catalog.py", name) for name in NAMES}  # LISTED
