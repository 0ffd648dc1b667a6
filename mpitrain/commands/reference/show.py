"""`mpitrain config`: the reference of the configuration, on a terminal; values and origins of a run."""

import difflib
import json
import os
import textwrap

from mpitrain import config as settings
from mpitrain import config_hints
from mpitrain.commands.reference.keys import Key, every_key, meaning_of_table, tables
from mpitrain.commands.reference.refusals import refusals_of
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.plan.declared.family import presets
from mpitrain.plan.declared.screen import columns
from mpitrain.plan.settings.identity import identity
from mpitrain.schedules.catalog import NAMES

COLUMNS = 100
MOST_NEAR = 3


def explain(name: str | None) -> str:
    """Return what mpitrain config prints of a key, of a table, or of all. Raises ConfigError for another."""
    if not name:
        return "\n\n".join(map(_table, tables()))
    if name in tables():
        return _table(name)
    if name in every_key():
        return whole(every_key()[name])
    raise _unknown(name)


def origins_of(path: str, name: str | None) -> str:
    """Return a line for each key of a run directory, or of a configuration file, that has a value.

    name: of a key or a table; None: all. Raises InputError.
    """
    from mpitrain.cluster.rundir import RunDir, read_with_origins, require_run

    if name and name not in tables() and name not in every_key():
        raise _unknown(name)
    keys = [key for key in every_key() if not name or key == name or key.startswith(f"{name}.")]
    if os.path.isdir(path):
        require_run(run := RunDir(path))
        given = read_with_origins(run.config)
    else:
        given = settings.read(path)
    values = settings.flatten(given.config)
    lines = {key: f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in keys}
    width = max(len(line) for line in lines.values())
    lines_shown = {key: line for key, line in lines.items() if values[key] is not None or name}
    return "\n".join(f"{line:{min(width, 48)}}  {given.origins.of(key)}" for key, line in lines_shown.items())


def _unknown(name: str) -> ConfigError:
    hint = config_hints.hint_for_alias(name)
    near = difflib.get_close_matches(name, [*every_key(), *tables()], MOST_NEAR)
    near += [key for key in every_key() if key.partition(".")[2] == name and key not in near]
    instead = hint or (f"did you mean {', '.join(near)}?" if near else f"tables: {', '.join(tables())}")
    return ConfigError(f"unknown key {shown(name)}; {instead}")


def _table(table: str) -> str:
    words = meaning_of_table(table)
    lines = [f"[{table}]" + f"  {words}" * bool(words)]
    for key in every_key().values():
        if key.name.startswith(f"{table}."):
            lines.append(f"{key.name} = {key.default}")
            lines += _folded(key.meaning, "    ")
    return "\n".join(lines)


def whole(key: Key) -> str:
    """Return all that is known of a key."""
    lines = [key.name, *_folded(key.meaning, "  ")]
    lines += [f"  type     {key.kind}", f"  default  {key.default}"]
    if names := names_for(key.name):
        lines.append(f"  names    {', '.join(names)}")
    if key.uses:
        lines.append("  of       " + ", ".join(f"{name} ({value})" for name, value in key.uses.items()))
    if is_fixed(key.name):
        lines.append("  fixed    a resumed run must have the same value")
    if messages := refusals_of(key.name):
        lines.append("  refused")
        lines += [line for message in messages for line in _folded(message, "    ")]
    return "\n".join(lines)


def names_for(key: str) -> list[str]:
    """Return the built-in names that a key takes; none for a key without a catalogue."""
    from mpitrain.data.source import SOURCES
    from mpitrain.plan.declared.family import FAMILIES
    from mpitrain.plan.declared.optimizers import OPTIMIZERS

    if key == "pipeline.schedule":
        return list(NAMES)
    if key == "model.preset":
        return list(presets())
    catalogs = {catalog.key: catalog for catalog in (FAMILIES, OPTIMIZERS, SOURCES)}
    return list(catalogs[key].built_in()) if key in catalogs else []


def is_fixed(key: str) -> bool:
    """Return whether a resumed run needs the value that it began with."""
    return key in identity(Config())


def _folded(text: str, indent: str) -> list[str]:
    width = min(columns() or COLUMNS, COLUMNS)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}  ")
