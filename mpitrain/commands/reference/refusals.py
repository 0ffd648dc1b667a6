"""The messages that refuse a key: of the table of rules, and those that the source raises elsewhere.

The latter stand in the source as templates. What a run fills in is shown as `...`; text that was
put together in the same function is filled in here.
"""

import ast
import pkgutil
import re
from collections import Counter
from functools import cache

import mpitrain
from mpitrain.commands.reference.comments import source_of, tree_of
from mpitrain.errors import InputError
from mpitrain.plan.settings.rule_table import RULES

RAISED = {kind.__name__ for kind in InputError.__subclasses__()}
HOLE = "..."
ADJACENT = re.compile(r"(?<!\.)(?:\.{3}){2,}(?!\.)")  # holes
LEAST = 20  # characters of a message that say something


def refusals_of(key: str) -> list[str]:
    """Return the messages that name a key in front of what is to be changed."""
    named = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])(?!\.\w)")
    raised = (message for name in _raising() if key in source_of(name) for message in _messages_in(name))
    messages = (*(rule.template() for rule in RULES), *raised)
    return list(dict.fromkeys(message for message in messages if named.search(message.partition(";")[0])))


@cache
def _raising() -> list[str]:
    modules = [module.name for module in pkgutil.walk_packages(mpitrain.__path__, "mpitrain.")]
    return [name for name in modules if any(error in source_of(name) for error in RAISED)]


@cache
def _messages_in(module: str) -> list[str]:
    found = []
    for function in ast.walk(tree_of(module)):
        if isinstance(function, ast.FunctionDef):
            texts = _texts(function)
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in RAISED and call.args:
                    message = " ".join(_template(call.args[0], texts).split())
                    found.append(ADJACENT.sub(HOLE, message))
    return [message for message in found if len(message.replace(HOLE, "")) > LEAST]


def _texts(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the texts that a function gives names to, once each."""
    assigned = [
        (node.targets[0].id, node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    names = Counter(name for name, _ in assigned)
    texts = {name: value for name, value in assigned if isinstance(value, ast.JoinedStr | ast.Constant)}
    return {name: value for name, value in texts.items() if names[name] == 1}


def _template(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """Return a text of the source with holes where a run fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _template(node.value, texts)
    if isinstance(node, ast.Name) and node.id in texts:
        return _template(texts[node.id], {name: text for name, text in texts.items() if name != node.id})
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "counted":
        return f"{HOLE} {_template(node.args[1], texts)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left, texts) + _template(node.right, texts)
    return HOLE
