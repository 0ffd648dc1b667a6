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
    """Read the resolved configuration of a run directory."""
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CheckpointError(f"{path}: {error}; the run directory is damaged, choose another run.dir") from None


def replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves either the old or the new content."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
