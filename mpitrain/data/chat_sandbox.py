"""Jinja's sandbox for chat templates, as transformers 5.24 has it; it runs in a child (limited.py).

A template gets texts, and no way from them to Python's own attributes, files or modules.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.exceptions import SecurityError, TemplateError

from mpitrain.data.limited import serve
from mpitrain.errors import LibraryError

LEAST_VERSION = (3, 1, 6)  # before it, ways out of the sandbox are known
MOST_ERROR = 500
MOST_TEXT = 1 << 24  # characters that a template may make
# of texts to train on, so that tokens are the same on every day: Llama 3's template has it by default
DAY = datetime(2024, 7, 26)


def new_environment(now: datetime) -> jinja2.Environment:
    """Return an environment in which strftime_now writes `now`. Raises LibraryError for an old Jinja."""
    found = jinja2.__version__
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise LibraryError(f"--chat needs jinja2 {least} or newer, found {found}; update it with pip")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=now.strftime, namespace=PlainNamespace, dict=PlainDict()
    )
    return environment


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


def require_plain(name: Any) -> None:
    """Raise SecurityError for a name that Python keeps to itself."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have the name {name!r}")


def reply(given: bytes) -> Iterator[bytes]:
    """Yield the text of each conversation as JSON; or an object that says what is wrong.

    given: lines of JSON: the template; names, and whether it is today; and of each conversation its
    messages and its stops (chat_template.py), a text each.
    """
    lines = given.splitlines()
    special, today = json.loads(lines[1])
    template = new_environment(datetime.now() if today else DAY).from_string(json.loads(lines[0]))
    for line in lines[2:]:
        messages, stops = json.loads(line)
        for stop in stops:
            asked = messages[:stop], stop is not None
            try:
                answer = _text(template, *asked, special)
            except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
                answer = {"error": (str(error) or type(error).__name__)[:MOST_ERROR]}
            yield json.dumps(answer).encode()


def _text(template: jinja2.Template, messages: list[dict], answered: bool, special: dict[str, str]) -> str:
    given = dict(messages=messages, tools=None, documents=None, add_generation_prompt=answered)
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**given, **special):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise OverflowError(f"it makes more than {MOST_TEXT:,} characters")
    return "".join(pieces)


if __name__ == "__main__":
    serve(reply)
