"""The machine's file that `mpitrain run --calibrate` writes: whose it may be, and what it was before.

Comments on top say each earlier value with the day it was replaced, the newest last. Other comments
that have a line of their own are kept there, too.
"""

import os
from datetime import date
from pathlib import Path
from typing import NamedTuple

import msgspec

from mpitrain.errors import ConfigError
from mpitrain.inputs import os_errors_as, read_text, replacing, shown
from mpitrain.plan.predict.step_time.machine import CALIBRATED, LINKS, MOST_BYTES, Figure, MachineFile

MOST_NAME = 150  # characters of a machine's name that are kept
MOST_COMMENTS = 200  # lines that are kept, the newest


def require_name(path: str) -> None:
    """Raise ConfigError for a name that no machine's file has."""
    if not path.endswith(".toml"):
        raise ConfigError(f"--calibrate {shown(path)}: found another name; needed one that ends with .toml")


class CalibrationFile(NamedTuple):
    """A file that a run may write at its end."""

    path: str
    exists: bool

    @staticmethod
    def require(path: str, machine: str) -> "CalibrationFile":
        """Return the file; machine: run.machine. Raises ConfigError for one that a run must not write."""
        name = f"--calibrate {shown(path)}"
        require_name(path)
        file = Path(path)
        with os_errors_as(ConfigError, name, "give another file"):
            found = file.stat() if file.exists() else None
            folder = file.resolve().parent
            is_there, may_write = folder.is_dir(), os.access(folder, os.W_OK)
            same = found is not None and machine.endswith(".toml") and file.samefile(machine)
        if found is None:
            if not is_there or not may_write:
                raise ConfigError(f"{name}: its folder can't be written; give a file in one that can")
            return CalibrationFile(path, False)
        if not file.is_file() or found.st_uid != os.geteuid():
            raise ConfigError(f"{name}: found no file of your own; give another name")
        if not found.st_mode & 0o200 or not may_write:
            raise ConfigError(f"{name}: found a file that is read-only; make it writable, or give another")
        if not same:
            raise ConfigError(
                f"{name}: the file is there, and doesn't predict this run; set run.machine to it, "
                "or give a new name"
            )
        return CalibrationFile(path, True)

    @property
    def shown(self) -> str:
        return shown(self.path)

    def write(self, machine: MachineFile, before: MachineFile, day: date, run: str) -> str:
        """Write the machine in one piece; return what went wrong, "" for nothing.

        before, day, run: what it was until it was calibrated, when that is, and by which run.
        """
        old, when = _values(before), f"{day.isoformat()}, {run}"
        changed = {key: value for key, value in _values(machine).items() if value != old[key]}
        log = [f"# {when}: {key} was {old[key]:.6g}{_source(before, key)}" for key in changed]
        machine = _sourced(machine, changed, f"{CALIBRATED} {when}")
        if not self.exists:
            name = f"{machine.name[:MOST_NAME]}, calibrated"
            machine = msgspec.structs.replace(machine, name=name, aliases=[])
        try:
            comments = [*self._comments(), *log][-MOST_COMMENTS:]
            text = "\n".join([*comments, machine.to_toml()])
            with replacing(Path(self.path)) as file:
                file.write(text.encode())
        except OSError as error:
            return f"{self.shown} wasn't written: {error.strerror}"
        return ""

    def _comments(self) -> list[str]:
        if not self.exists:
            return []
        lines = read_text(self.path, MOST_BYTES).splitlines()
        return [line for line in lines if line.startswith("#")]


def _values(machine: MachineFile) -> dict[str, float]:
    found = {f"{key}.sustained": figure.sustained for key, figure in machine.figures()}
    found["launch_s"] = machine.launch_s
    for link in LINKS:
        if (latency_s := getattr(machine.links, f"{link}_latency_s")) is not None:
            found[f"links.{link}_latency_s"] = latency_s
    return found


def _source(machine: MachineFile, key: str) -> str:
    figure = dict(machine.figures()).get(key.removesuffix(".sustained"))
    return f" ({shown(figure.sustained_source)})" if figure else ""


def _sourced(machine: MachineFile, changed: dict[str, float], source: str) -> MachineFile:
    def of(key: str, figure: Figure) -> Figure:
        if f"{key}.sustained" not in changed:
            return figure
        before = figure.sustained_source.partition(CALIBRATED)[0]
        return msgspec.structs.replace(figure, sustained_source=before + source)

    return machine.with_figures(of)
