"""`mpitrain config --of RUN`: the values of a run's keys, and where each comes from."""

import json
import os

from mpitrain import config as settings
from mpitrain.cluster.rundir import RunDir, read_with_origins, require_run
from mpitrain.commands.reference.show import keys_named
from mpitrain.config import LoadedConfig


def origins_of(path: str, name: str | None) -> str:
    """Return a line for each key of a run directory, or of a configuration file, that has a value.

    name: of a key or a table; None: all. Raises InputError.
    """
    keys = keys_named(name)
    given = _of_run(RunDir(path)) if os.path.isdir(path) else settings.read(path)
    values = settings.flatten(given.config)
    lines = {key: f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in keys}
    width = max(len(line) for line in lines.values())
    shown = {key: line for key, line in lines.items() if values[key] is not None or name}
    return "\n".join(f"{line:{min(width, 48)}}  {given.origins.of(key)}" for key, line in shown.items())


def _of_run(run: RunDir) -> LoadedConfig:
    require_run(run)
    return read_with_origins(run.config)
