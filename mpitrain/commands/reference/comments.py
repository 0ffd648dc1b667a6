"""Comments beside fields and keys of a source file, which are the words of the reference.

A comment belongs to a field on whose line it stands, or else to the field below it. The source is
read as the package's loader finds it: a wheel has it, too. Nothing is imported but packages.
"""

import ast
import importlib.util
import io
import tokenize
from functools import cache
from typing import NamedTuple


class Comment(NamedTuple):
    """A comment. alone: nothing but it stands on its line."""

    text: str
    alone: bool


@cache
def source_of(module: str) -> str:
    """Return the source of a module of this package, without importing it."""
    return importlib.util.find_spec(module).loader.get_source(module)


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module of this package."""
    return ast.parse(source_of(module))


@cache
def _comments(module: str) -> dict[int, Comment]:
    return {
        token.start[0]: Comment(token.string.lstrip("# ").strip(), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source_of(module)).readline)
        if token.type == tokenize.COMMENT
    }


def words_at(module: str, first: int, last: int) -> str:
    """Return the comment beside the lines of a field, or else the lines of comment above it."""
    comments = _comments(module)
    on_lines = [comments[line].text for line in range(first, last + 1) if line in comments]
    if on_lines:
        return " ".join(on_lines)
    above = list[str]()
    line = first - 1
    while line in comments and comments[line].alone:
        above.insert(0, comments[line].text)
        line -= 1
    return " ".join(above)


def words_of_fields(module: str, owner: str) -> dict[str, str]:
    """Return the words beside each annotated field of a class."""
    fields = [field for field in named(module, owner).body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: words_at(module, field.lineno, field.end_lineno) for field in fields}


def named(module: str, name: str) -> ast.AST:
    """Return the class, function or field of a name in a module."""
    for node in ast.walk(tree_of(module)):
        if name in (getattr(node, "name", None), getattr(getattr(node, "target", None), "id", None)):
            return node
    raise AssertionError(f"{module} has no {name}")
