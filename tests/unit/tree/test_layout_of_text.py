"""No line-wrapper broke a table: of cases in tests, or in a docstring."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from folders import ROOT

FOLDERS = ("mpitrain", "comm", "schedules", "tests")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)
BESIDES_CODE = {tokenize.NL, tokenize.COMMENT}


def split_literals(source: str) -> Iterator[int]:
    """Yield lines that continue a string which began after another element of its line.

    What is an element of a tuple, or a value of a dict, continues below itself there: one word a line, far
    to the right. Only code that is kept from the formatter can have that: it says `# fmt:`.
    """
    if "# fmt:" not in source:
        return
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type not in BESIDES_CODE]
    for before, first, second in zip(found, found[1:], found[2:], strict=False):
        if first.type != tokenize.STRING or second.type != tokenize.STRING:
            continue
        one_line = before.end[0] == first.start[0] and before.string in (",", ":")
        if one_line and second.start[0] > first.end[0] and second.start[1] == first.start[1]:
            yield second.start[0]


def docstrings(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every docstring as the number of its first line, and its lines."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    blocks = ast.stmt | ast.excepthandler | ast.match_case  # no expression has any
    lines = source.splitlines()
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield text.lineno, lines[text.lineno - 1 : text.end_lineno]
        nodes += (child for child in ast.iter_child_nodes(node) if isinstance(child, blocks))


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def staircases(lines: list[str]) -> Iterator[int]:
    """Yield lines of prose that begin to the right of the line that they continue, where no column is.

    That line is itself a continuation: deeper than its paragraph. A column is where a word stands after
    two spaces, in any line above of the paragraph. Code, after a colon, and what lies in a folder are
    indented as they like.
    """
    paragraph = list[str]()
    for at, line in enumerate(lines):
        if not line.strip():
            paragraph = []
            continue
        columns = {m.end() for above in paragraph for m in re.finditer(r"(?:^ *|  +)(?=\S)", above)}
        if (
            paragraph
            and re.match(r" *[a-z]", line)
            and min(map(indent, paragraph[at == 1 :] or [line])) < indent(paragraph[-1]) < indent(line)
            and indent(line) not in columns
            and not paragraph[-1].endswith((":", "/"))
        ):
            yield at
        paragraph.append(line)


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_text_stands_where_it_belongs(path):
    source = path.read_text(encoding="utf-8")
    assert not list(split_literals(source)), "a string continues below itself: write the cases one a line"
    broken = [first + at for first, lines in docstrings(source) for at in staircases(lines)]
    assert not broken, "a line stands under no column of its table"


BROKEN = '''CASES = ("tp=2", "pp=2 "
                 "schedule=zbv", "dp=2")  # fmt: skip


def f():
    """Do.

    slow  a rank, if in three of four steps it was busy
          in the middle: of its stage, or
               that alone
    """
'''


def test_it_finds_what_it_is_for():
    assert list(split_literals(BROKEN)) == [2]
    assert [first + at for first, lines in docstrings(BROKEN) for at in staircases(lines)] == [10]
