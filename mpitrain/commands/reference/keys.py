"""Every key of the configuration: its type, default and meaning, and who uses it.

The words are the comments beside the fields of config.py; families and optimisers declare which of
their tables' keys they have.
"""

import json
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from mpitrain import config as settings
from mpitrain.commands.reference.comments import words_of_fields
from mpitrain.plan.declared.family import FAMILIES, OF_SOME
from mpitrain.plan.declared.optimizers import OPEN, OPTIMIZERS

SHOWN_BELOW = 2**31 - 1  # a larger limit is no limit to a user
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
NAMES = {int: "integer", float: "number", bool: "true or false", str: "text"}


class Key(NamedTuple):
    """A key of the configuration.

    name: table and key, as --set takes them.
    default: as TOML; "unset" where the table has none.
    uses: who has it, of keys that only some families or optimisers have, with their defaults.
    """

    name: str
    kind: str
    default: str
    meaning: str
    uses: dict[str, str]


@cache
def every_key() -> dict[str, Key]:
    """Return all keys by their names, in the order of config.py."""
    return {key.name: key for table in tables() for key in _keys_of(table)}


def tables() -> list[str]:
    """Return the names of the tables."""
    return [field.encode_name for field in msgspec.structs.fields(settings.Config)]


def meaning_of_table(table: str) -> str:
    """Return what the class of a table says it is, without the end of the sentence; "" if nothing."""
    own = _kind_of(table).__doc__ or ""
    return "" if own == settings.ConfigTable.__doc__ else " ".join(own.split())


def _kind_of(table: str) -> type[msgspec.Struct]:
    fields = msgspec.structs.fields(settings.Config)
    return next(field.type for field in fields if field.encode_name == table)


def _keys_of(table: str) -> Iterator[Key]:
    kind = _kind_of(table)
    words = words_of_fields(settings.__name__, kind.__name__)
    for field in msgspec.structs.fields(kind):
        name = f"{table}.{field.encode_name}"
        default = "unset" if field.default is None else as_toml(field.default)
        yield Key(name, in_words(field.type), default, words[field.name], _uses(table, field))


def _uses(table: str, field: msgspec.structs.FieldInfo) -> dict[str, str]:
    """Return the families or optimisers that have a key, each with its default."""
    key = field.encode_name
    uses = dict[str, Any]()
    if table == "optimizer" and key in OPEN:
        uses = {name: kind.keys[key] for name, kind in OPTIMIZERS.built_in().items() if key in kind.keys}
    elif table in ("attention", "experts") or (table == "model" and key in OF_SOME):
        for name, family in FAMILIES.built_in().items():
            own = getattr(family, table) or {}
            if family.uses(table, key):
                uses[name] = own.get(key, field.default)
    return {name: as_toml(value) for name, value in uses.items()}


def as_toml(value: Any) -> str:
    """Return a value as TOML writes it; "derived" for none."""
    if value is None:
        return "derived"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value)


def in_words(kind: Any) -> str:
    """Return a type of config.py in words, with its limits."""
    origin = get_origin(kind)
    if origin is Annotated:
        base, meta = get_args(kind)
        return ", ".join([in_words(base), *_limits(meta)])
    if origin is Literal:
        return "one of " + ", ".join(as_toml(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(item) for item in get_args(kind) if item is not type(None))
    if origin in (list, tuple):
        items = [item for item in get_args(kind) if item is not Ellipsis]
        several = f"{len(items)} of: " if len(items) > 1 else ""
        return f"list of {several}{in_words(items[0])}"
    if issubclass(kind, settings.ConfigTable):
        return f"tables of {', '.join(kind.__struct_fields__)}"
    return NAMES[kind]


def _limits(meta: msgspec.Meta) -> Iterator[str]:
    for name, words in LIMITS.items():
        limit = getattr(meta, name)
        if limit is not None and limit < SHOWN_BELOW:
            yield f"{words} {limit:g}"
    if meta.min_length is not None:
        yield f"{meta.min_length} entries"
