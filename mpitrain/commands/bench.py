"""`mpitrain bench machine`: rank 0 prints and writes what all ranks measured."""

from collections.abc import Callable

import msgspec

from mpitrain.cluster.allocation import age_s
from mpitrain.cluster.guard import Guard
from mpitrain.commands.output_file import require_file, write
from mpitrain.config import Config, load
from mpitrain.errors import DONE, FAILED, ConfigError
from mpitrain.inputs import as_argument, listed, shown
from mpitrain.measuring.measured_machine import MeasuredMachine, measured_machine
from mpitrain.measuring.storage import require_folder
from mpitrain.plan.declared.formatting import aligned

KEYS = ("run.device", "run.threads", "comm.device")  # that a measurement depends on


def bench(
    out: str,
    like: str | None,
    storage: str | None,
    overrides: tuple[str, ...],
    guard: Guard,
    say: Callable[[str], None],
) -> int:
    """Measure the machine that these ranks are on, print its figures and write its file.

    Collective over all ranks; the exit code is 1 if it was disturbed. Raises ConfigError.
    """
    world = guard.connect(may_be_alone=True)
    start_s = max(world.all_gather("how long they took to start", age_s()))
    world.on_first_rank("looking at --out", lambda: require_file("--out", out, (".toml",)))
    if storage is not None:
        world.on_every_rank("looking at --storage", lambda: require_folder(storage))
    config = world.on_every_rank("checking the configuration", lambda: _settings_of(overrides))
    measured = measured_machine(world, guard.place, config, like, storage)
    made = msgspec.structs.replace(measured.made, start_s=round(start_s, 2))
    world.on_first_rank("writing its file", lambda: write("--out", out, made.to_toml().encode()))
    if world.rank == 0:
        say(_table(measured._replace(made=made), out))
    return FAILED if made.disturbed else DONE


def _settings_of(words: tuple[str, ...]) -> Config:
    """Raise ConfigError for a setting that changes nothing here."""
    for word in words:
        key = word.partition("=")[0].strip()
        if key not in KEYS:
            some = ", ".join(KEYS)
            raise ConfigError(
                f"--set {shown(key)} does nothing for bench machine; needed one of {some}; leave it out"
            )
    return load(None, words)


def _table(measured: MeasuredMachine, out: str) -> str:
    made, base, figures = measured
    rows = [("", "median", "spread")]
    rows += [(name, _shown(name, figure.median), f"{figure.spread:.1%}") for name, figure in figures.items()]
    lacking = [name for name in ("inside", "between") if f"links.{name}" not in figures]
    text = f"{made.name}\n{aligned(rows)}"
    if lacking:
        text += f"\nlinks {' and '.join(lacking)}: no two ranks have such a link; taken from {base.name}"
    text += f"\nstart-up took {made.start_s:.2f} s, until all ranks had met"
    text += f"\n{shown(out)} is written: mpitrain plan --machine {as_argument(out)}"
    if made.disturbed:
        text += f"\nit can't be trusted: {listed(made.disturbed)}; measure again while nothing else runs"
    return text


def _shown(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{value * 1e6:,.2f} us"
    if name == "host.update":
        return f"{value / 1e9:,.3f} G numbers/s"
    unit = "GB/s" if name.startswith(("memory", "links", "host", "storage")) else "GFLOP/s"
    return f"{value / 1e9:,.1f} {unit}"
