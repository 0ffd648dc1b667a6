"""The reference as Markdown (MyST), for docs/: what mpitrain config prints, with links."""

from collections.abc import Iterator

from building.outputs import FILES, exit_codes, fields_of

from mpitrain.commands.reference.keys import Key, every_key, meaning_of_table, tables
from mpitrain.commands.reference.refusals import refusals_of
from mpitrain.commands.reference.show import is_fixed, names_for


def configuration() -> str:
    """Return all keys, table by table."""
    return "\n".join(line for table in tables() for line in _table(table))


def _table(table: str) -> Iterator[str]:
    yield f"(table-{table})="
    yield f"## {table}\n"
    if words := meaning_of_table(table):
        yield f"{escaped(words)}\n"
    for key in every_key().values():
        if key.name.startswith(f"{table}."):
            yield from _key(key)


def _key(key: Key) -> Iterator[str]:
    yield f"(key-{key.name})="
    yield f"`{key.name}` = `{key.default}`"
    yield f": {escaped(key.meaning[:1].upper() + key.meaning[1:])}."
    yield f"\n  **Type:** {escaped(key.kind)}."
    if names := names_for(key.name):
        yield "  **Names:** " + ", ".join(f"`{name}`" for name in names) + "."
    if key.uses:
        yield "  **Has it:** " + ", ".join(f"{name} (`{value}`)" for name, value in key.uses.items()) + "."
    if is_fixed(key.name):
        yield "  **Fixed:** a resumed run must have the same value."
    if messages := refusals_of(key.name):
        yield "\n  **Refused:**"
        yield from (f"  - `{message}`" for message in messages)
    yield ""


def outputs() -> str:
    """Return the fields of all files that a run writes."""
    lines = []
    for file in FILES:
        lines += [f"## {file}\n", "| field | |", "|---|---|"]
        lines += [f"| `{field}` | {escaped(words)} |" for field, words in fields_of(file).items()]
        lines.append("")
    return "\n".join(lines)


def codes() -> str:
    """Return the exit codes as a table."""
    rows = [f"| {code} | {escaped(words)} |" for code, words in exit_codes().items()]
    return "\n".join(["| exit code | |", "|---|---|", *rows, ""])


def escaped(text: str) -> str:
    """Return text whose characters mean nothing to Markdown."""
    for character in "\\`*_|<>[]":
        text = text.replace(character, f"\\{character}")
    return text
