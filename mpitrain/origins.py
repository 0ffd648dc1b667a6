"""Where the value of a key comes from: a file, --set, preset, folder, the planner, or its default.

A key that a file or --set gives is given, also with the value of the default: ask Origins, never
compare with defaults. The config.toml of a run has all keys, so it also has a table of origins,
with their values; a key whose value differs was changed by hand: the file itself has given it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.inputs import is_one_line, shown

TABLE = "origin"  # of config.toml
DEFAULT, FILE, SET = "default", "file", "--set"
PRESET, FAMILY = "preset", "family"
FOLDER = "folder"  # of weights: that of `mpitrain import`, or of model.init
PLANNER, DERIVED = "planner", "derived"
KINDS = (DEFAULT, FILE, SET, PRESET, FAMILY, FOLDER, PLANNER, DERIVED)
GIVEN = (FILE, SET)  # by the user


class KeyOrigin(NamedTuple):
    """Who gave a value. where: the file, folder or preset."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


@dataclass(frozen=True)
class Origins:
    """The origins of keys such as "precision.compute". A key that isn't there has its default."""

    by_key: Mapping[str, KeyOrigin] = field(default_factory=dict)

    def of(self, key: str) -> KeyOrigin:
        return self.by_key.get(key, KeyOrigin(DEFAULT))

    def is_given(self, key: str) -> bool:
        """Return whether the user gave the key, in a file or by --set."""
        return self.of(key).kind in GIVEN

    def is_settled(self, key: str) -> bool:
        """Return whether somebody gave or chose the key: it is neither default nor derived."""
        return self.of(key).kind not in (DEFAULT, DERIVED)

    def updated(self, keys: Iterable[str], origin: KeyOrigin) -> "Origins":
        """Return the origins with another one of some keys."""
        return Origins({**self.by_key, **dict.fromkeys(keys, origin)})

    def to_table(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the keys that somebody gave or chose, with values, by their origins."""
        table: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            if self.is_settled(key) and value is not None:
                table.setdefault(str(self.of(key)), {})[key] = value
        return table


NONE = Origins()  # all keys have their defaults
Record = Mapping[str, tuple[KeyOrigin, Any]]  # of keys, each with the value that it is of


def recorded(
    record: Record, values: Mapping[str, Any], defaults: Mapping[str, Any], path: object
) -> dict[str, KeyOrigin]:
    """Return the origins of a config.toml's keys. record: of read_record().  values, path: of the file."""
    changed = changed_by_hand(record, values, defaults)
    unchanged = origins_in(record, values, KeyOrigin(DEFAULT))
    return unchanged | dict.fromkeys(changed, KeyOrigin(FILE, shown(path)))


def origins_in(record: Record, keys: Iterable[str], otherwise: KeyOrigin) -> dict[str, KeyOrigin]:
    """Return the recorded origins of keys; `otherwise` of one without."""
    return {key: record[key][0] if key in record else otherwise for key in keys}


def changed_by_hand(record: Record, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values are neither recorded nor defaults."""
    before = {key: record[key][1] if key in record else defaults.get(key) for key in values}
    in_toml = {key: list(old) if isinstance(old, tuple) else old for key, old in before.items()}
    return [key for key, value in values.items() if value != in_toml[key]]


def read_record(table: object, path: object) -> Record:
    """Return the origins of a config.toml's table. Raises ConfigError for a damaged one.

    table: what to_table() returned; None: an older version recorded none.
    """
    if table is None:
        return {}
    known = {}
    for name, keys in table.items() if isinstance(table, Mapping) else [("", None)]:
        kind, _, where = name.partition(" ")
        if kind not in KINDS or not isinstance(keys, Mapping) or not is_one_line(where):
            expected = "expected tables of keys by their origin; leave it out"
            raise ConfigError(f"{TABLE} in {shown(path)}: {expected}")
        known |= {key: (KeyOrigin(kind, where), value) for key, value in keys.items()}
    return known
