"""A machine as data: a TOML file, each figure with its source, peak and sustained apart.

Those of jobs/machines/ are found by name or alias; any other by its path.
"""

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from mpitrain.errors import ConfigError
from mpitrain.inputs import read_text, shown

MOST_BYTES = 1 << 16  # of a machine's file


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a data sheet says and what is reached, a second; and who says so."""

    peak: float
    sustained: float
    peak_source: str
    sustained_source: str


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links of one rank in one direction, bytes/s: inside a node, and between nodes.

    contention: the share that is left of `between` on `contended_nodes` nodes and more.
    """

    inside: Figure
    inside_latency_s: float
    between: Figure
    between_latency_s: float
    contention: float = 1.0
    contended_nodes: int = 64


class MachineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine's file.

    products: FLOP/s by type of number. attention: FLOP/s, forward and backward.
    """

    name: str
    memory_bytes: int
    ranks_per_node: int
    launch_s: float
    products: dict[str, Figure]
    attention: dict[str, Figure]
    memory: dict[str, Figure]
    links: LinkTable
    aliases: list[str] = []


class MachineRates(NamedTuple):
    """What predictions need of a machine: rates of one rank a second, from sheet or measurement.

    peak: FLOP/s of bf16 products on the data sheet, which MFU is a share of.
    """

    name: str
    products: Mapping[str, float]
    attention_forward: float
    attention_backward: float
    memory_bandwidth: float
    memory_bytes: int
    ranks_per_node: int
    launch_s: float
    inside: float
    inside_latency_s: float
    between: float
    between_latency_s: float
    contention: float
    contended_nodes: int
    peaks: Mapping[str, float]


def machine_of(found: MachineFile, sheet: bool = False) -> MachineRates:
    """Return the rates of a machine. sheet: those of the data sheet, not the sustained ones."""
    kind = "peak" if sheet else "sustained"
    links = found.links
    return MachineRates(
        name=found.name,
        products={dtype: getattr(figure, kind) for dtype, figure in found.products.items()},
        attention_forward=getattr(found.attention["forward"], kind),
        attention_backward=getattr(found.attention["backward"], kind),
        memory_bandwidth=getattr(found.memory["bandwidth"], kind),
        memory_bytes=found.memory_bytes,
        ranks_per_node=found.ranks_per_node,
        launch_s=found.launch_s,
        inside=getattr(links.inside, kind),
        inside_latency_s=links.inside_latency_s,
        between=getattr(links.between, kind),
        between_latency_s=links.between_latency_s,
        contention=1.0 if sheet else links.contention,
        contended_nodes=links.contended_nodes,
        peaks={dtype: figure.peak for dtype, figure in found.products.items()},
    )


@cache
def known() -> dict[str, MachineFile]:
    """Return the machines of jobs/machines/ by their file's name."""
    folder = resources.files("mpitrain.jobs") / "machines"
    paths = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name
    )
    return {each.name.removesuffix(".toml"): read_machine(str(each)) for each in paths}


def find_machine(name: str) -> MachineFile:
    """Return a machine by the name of its file, by an alias, or by a path.

    Raises ConfigError for one that isn't known, with the nearest.
    """
    if name.endswith(".toml"):
        return read_machine(name)
    found = _by_letters().get(_letters(name)) or _by_letters().get(_letters(name.split(",")[0]))
    if found is not None:
        return found
    near = get_close_matches(_letters(name), _by_letters(), n=1)
    hint = f"did you mean {_by_letters()[near[0]].name}? " if near else ""
    raise ConfigError(
        f"machine {shown(name)}: found no such machine; {hint}needed one of {', '.join(known())}, "
        "or the path of a file like those of jobs/machines/"
    )


@cache
def _by_letters() -> dict[str, MachineFile]:
    names = [(key, found) for key, found in known().items()]
    names += [(alias, found) for found in known().values() for alias in (found.name, *found.aliases)]
    return {_letters(name): found for name, found in names}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_machine(path: str) -> MachineFile:
    """Read a machine's file.

    Raises ConfigError for a figure that is missing, unknown or not positive.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(read_text(path, MOST_BYTES))
        found = msgspec.convert(tree, MachineFile)
    except OSError as error:
        raise ConfigError(f"machine {shown(path)}: {error.strerror}; give the path of a TOML file") from None
    except ValueError as error:
        raise ConfigError(
            f"machine {shown(path)}: {shown(error)}; needed the keys of jobs/machines/h100-80gb.toml"
        ) from None
    _require_figures(path, found)
    return found


def _require_figures(path: str, found: MachineFile) -> None:
    needed = (("attention", "forward"), ("attention", "backward"), ("memory", "bandwidth"))
    for table, key in needed:
        if key not in getattr(found, table):
            raise ConfigError(
                f"machine {shown(path)}: found no {table}.{key}; needed peak and sustained of it"
            )
    figures = [*found.products.values(), *found.attention.values(), *found.memory.values()]
    numbers = [number for each in figures for number in (each.peak, each.sustained)]
    links = (found.links.inside, found.links.between)
    numbers += [number for each in links for number in (each.peak, each.sustained)]
    if not found.products or not all(0 < number < 1e24 for number in numbers):
        raise ConfigError(f"machine {shown(path)}: found a rate that is not positive; needed rates a second")
    if found.ranks_per_node < 1 or found.memory_bytes < 1 or not 0 < found.links.contention <= 1:
        raise ConfigError(
            f"machine {shown(path)}: found ranks_per_node = {found.ranks_per_node}, memory_bytes = "
            f"{found.memory_bytes}, contention = {found.links.contention}; needed 1 at least, a "
            f"share"
        )
