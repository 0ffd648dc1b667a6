"""Jinja's sandbox for chat templates, as transformers 5.24 has it, without huge products.

A template gets texts, and no way from them to Python's own attributes, files or modules.
"""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.exceptions import SecurityError, TemplateError

from mpitrain.errors import DataError

LEAST_VERSION = (3, 1, 6)  # before it, ways out of the sandbox are known
MOST_REPEATED = 1 << 24  # characters or items of one product
MOST_POWER = 1000  # of base and exponent
WIDTH = re.compile(r"%[^a-zA-Z%]*[0-9*]")  # "%9d", "%*d"


def new_environment() -> jinja2.Environment:
    """Return an environment for templates of strangers. Raises DataError for an old Jinja."""
    found = jinja2.__version__
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise DataError(f"--chat needs jinja2 {least} or newer, found {found}; update it with pip")
    environment = ChatSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        namespace=PlainNamespace,
        dict=PlainDict(),
    )
    return environment


class ChatSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Refuses what takes a machine's memory in one operation."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        require_small(operator, left, right)
        return super().call_binop(context, operator, left, right)


class GenerationBlocks(ext.Extension):
    """Marks of what an assistant says, which training asks for: read, and of no effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(jinja2.utils.Namespace):
    """A namespace without names that Python keeps to itself."""

    def __init__(*args: Any, **named: Any):  # one of a template's names may be `self`
        self, *given = args
        found = dict(*given, **named)
        for name in found:
            require_plain(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        require_plain(name)
        super().__setitem__(name, value)


class PlainDict:
    """What `dict` is in a template: no type, whose attributes lead on."""

    def __call__(self, *args: Any, **named: Any) -> dict:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def raise_exception(message: str) -> None:
    """Refuse messages, in a template's own words."""
    raise TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter writes < and > in another way."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(layout: str) -> str:
    """Return the date and time of now, local."""
    return datetime.now().strftime(layout)


def require_plain(name: Any) -> None:
    """Raise SecurityError for a name that Python keeps to itself."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have the name {name!r}")


def require_small(operator: str, left: Any, right: Any) -> None:
    """Raise OverflowError for a product, a power or a filled pattern that may be huge."""
    if operator == "%":
        small = not (isinstance(left, str) and WIDTH.search(left))
    elif operator == "**":
        small = all(isinstance(each, float) or abs(each) <= MOST_POWER for each in (left, right))
    else:
        small = abs(_size(left) * _size(right)) <= MOST_REPEATED or not _repeats(left, right)
    if not small:
        raise OverflowError(f"a result of {operator} that is too large")


def _repeats(left: Any, right: Any) -> bool:
    """Return whether a product is a text or a list several times, or of integers that few have."""
    numbers = (int, float)
    if not isinstance(left, numbers) or not isinstance(right, numbers):
        return True
    return any(isinstance(each, int) and each.bit_length() > 64 for each in (left, right))


def _size(value: Any) -> Any:
    return len(value) if isinstance(value, (str, list, tuple)) else value
