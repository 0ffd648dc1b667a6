"""docs/concepts/where-is.md leads to files and names that are there."""

import ast
import re

import pytest
from folders import ROOT

PAGE = ROOT / "docs/concepts/where-is.md"
PLACES = sorted(set(re.findall(r"`([\w/.-]+\.py(?:::[\w.]+)?)`", PAGE.read_text())))


def defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return what a module or a class defines, by name."""
    found = dict[str, ast.AST]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    return found


def test_it_has_questions_enough():
    assert PAGE.read_text().count("\n- ") >= 40


@pytest.mark.parametrize("place", PLACES)
def test_an_answer_is_there(place):
    file, _, name = place.partition("::")
    names = defined(ast.parse((ROOT / file).read_text()).body)
    for part in filter(None, name.split(".")):
        assert part in names, f"{file} has no {name}"
        names = defined(getattr(names[part], "body", []))
