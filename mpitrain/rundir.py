"""The run directory: what a run leaves behind, and whether another start of mpitrain may go on with it.

    config.toml      the resolved configuration
    metrics.jsonl    one object per step
    data/            the tokens
    checkpoints/     one directory per saved step
    trace.json       when each instruction of each rank ran (run.trace)
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpitrain.config import Config, identity, parse, to_toml
from mpitrain.errors import CheckpointError, ConfigError, InputError
from mpitrain.regular_file import kind_of, printable, read_regular

FILES, FOLDERS = ("config.toml", "metrics.jsonl", "trace.json", "config.toml.new", "metrics.jsonl.new"), ("data", "checkpoints", "hang")
ENTRIES = dict.fromkeys(FILES, "a file") | dict.fromkeys(FOLDERS, "a folder")  # a link would be written through, too
MOST_CONFIG_BYTES = 1 << 16  # to_toml() writes 2 KB


class RunDir:
    """The paths of a run. Only the rank that writes calls anything but the properties."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def hang(self) -> Path:
        """Notes of ranks that waited too long; those of an earlier start are removed by creating()."""
        return self.path / "hang"

    def require_writable(self) -> None:
        """Raise CheckpointError unless the directory exists and is writable, or can be made. Writes nothing."""
        try:
            nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        except (OSError, ValueError) as error:  # too long, a null byte
            raise CheckpointError(f"run.dir = {self.path}: {error}; choose another run.dir") from None
        if not nearest.is_dir():
            raise CheckpointError(f"run.dir = {self.path}: {nearest} is not a directory; choose another run.dir")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise CheckpointError(f"run.dir = {self.path}: {nearest} is not writable; choose another run.dir")

    def require_same_run(self, config: Config) -> None:
        """Raise ConfigError if the directory holds a run that computes something else."""
        if not self.config.exists():
            if any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
                raise CheckpointError(f"run.dir = {self.path} holds a run without its config.toml; choose another run.dir")
            return
        found, wanted = identity(read_config(self.config)), identity(config)
        for key, value in wanted.items():
            if found[key] != value:
                raise ConfigError(
                    f"run.dir = {self.path} holds a run with {key} = {found[key]!r}, this one has {value!r}; "
                    "choose another run.dir, or go on with the settings of that run"
                )

    @contextmanager
    def creating(self, config: Config) -> Iterator[None]:
        """Make the directory for what is prepared inside the block, then write the resolved configuration, in one rename.

        An InputError leaves nothing behind: what was made here is removed.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        fresh_data = not self.data.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except InputError:
            if fresh_data:
                shutil.rmtree(self.data, ignore_errors=True)
            for path in made:
                path.rmdir()
            raise
        shutil.rmtree(self.hang, ignore_errors=True)
        replace(self.config, to_toml(config))

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after `step`: they come again, bit for bit. A line torn by a kill is dropped too."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
            except (json.JSONDecodeError, KeyError, TypeError):
                break
        replace(self.metrics, "".join(kept))


def read_config(path: Path) -> Config:
    """Read the resolved configuration of a run directory, which may be a stranger's: nothing in it may lead elsewhere."""
    try:
        for name, needed in ENTRIES.items():
            if (found := kind_of(path.with_name(name))) not in (None, needed):
                what = f"{path.with_name(name)} is {found}, needed {needed}"
                raise CheckpointError(f"{what}; set run.dir to the place itself, or choose another run.dir")
        return parse(tomllib.loads(read_regular(path, MOST_CONFIG_BYTES).decode()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {printable(error.args[0])}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the run directory is damaged, choose another run.dir") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, an integer of 5000 digits; a thousand brackets
        raise CheckpointError(f"{path}: {printable(error)}; the run directory is damaged, choose another run.dir") from None


def replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves either the old or the new content."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
