"""The run directory: what a run leaves behind, and whether another start of mpitrain may go on with it.

    run.lock         who is using it
    config.toml      the resolved configuration
    metrics.jsonl    one object per step
    data/            the tokens
    checkpoints/     one directory per saved step
    logs/            one file per rank (run.logs)
    ends.jsonl       how the run ended each time, as its jobs have noted (mpitrain job again)
    trace.json       when each instruction of each rank ran (run.trace)
    routing.npz      which experts tokens were sent to (run.routing)
    loads.svg        how evenly experts are used, if there are some
"""

import errno
import json
import os
import shutil
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mpitrain.cluster.lock import NAME as LOCK
from mpitrain.cluster.lock import Lock, read_owner
from mpitrain.config import Config, identity, parse, to_toml
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.inputs import kind_of, read_regular, replacing, shown

DRAWN = ("trace.json", "loads.svg", "routing.npz")
FILES = ("config.toml", "metrics.jsonl", "ends.jsonl", "metrics.jsonl.damaged", *DRAWN, LOCK)
FOLDERS = ("data", "checkpoints", "logs")
ENTRIES = dict.fromkeys(FILES, "a file") | dict.fromkeys(FOLDERS, "a folder")  # a link would be written through, too
MOST_CONFIG_BYTES = 1 << 16  # to_toml() writes 2 KB
MOST_LINE_BYTES = 1 << 24  # the loads of 100 blocks of 512 experts take 1 MB


class RunDir:
    """The paths of a run. Only the rank that writes calls anything but the properties."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: Lock | None = None
        self._made: list[Path] = []  # directories, the innermost first
        self._fresh_data = False
        self._unwritten, self._failing = b"", False  # of metrics.jsonl

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
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def ends(self) -> Path:
        return self.path / "ends.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def routing(self) -> Path:
        return self.path / "routing.npz"

    @property
    def loads(self) -> Path:
        return self.path / "loads.svg"

    def take(self, lost: Callable[[str], object], each: Callable[[str], object]) -> tuple[str, str]:
        """Make the directory, if need be, and take its lock; return the lock's token, and what is to be said of its last holder.

        lost, each: see Lock. Raises CheckpointError, and leaves nothing behind, if the directory can't be used or is in use.
        """
        self._require_usable()
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self._fresh_data = not self.data.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path, lost)
            said = lock.take(each)
        except OSError as error:
            self.undo()
            raise CheckpointError(f"run.dir = {self.path} cannot be made: {error.strerror}; choose another run.dir") from None
        except CheckpointError:
            self.undo()
            raise
        self._lock = lock
        return lock.token, said

    def require_seen(self, token: str, patience_s: float = 0.0) -> None:
        """Raise CheckpointError unless this rank sees the directory that the first rank has taken. Only reads.

        patience_s: a network file system may remember for some seconds that there was no such file.
        """
        end = time.monotonic() + patience_s
        while True:
            with suppress(OSError):
                owner = read_owner(self.path / LOCK)
                if owner is not None and owner.token == token:
                    return
            if time.monotonic() >= end:
                break
            time.sleep(0.2)
        raise CheckpointError(
            f"run.dir = {self.path}: {self.path.absolute()} on {socket.gethostname()} is not the directory that rank 0 has made; give the "
            "absolute path of a directory that all nodes share"
        )

    def undo(self) -> None:
        """Release the directory, and remove what take() and the preparation of tokens have made: nothing of the run was written yet."""
        if self._lock is not None and self._fresh_data:  # without the lock, or after it, the data are another run's
            shutil.rmtree(self.data, ignore_errors=True)
        self.release()
        for path in self._made:
            with suppress(OSError):  # another run that was refused here may be looking
                path.rmdir()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Release the directory when a run ends in good order; after a failure the next one says that this one is gone."""
        if error is None or getattr(error, "everywhere", False):
            self.release()

    def release(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _require_usable(self) -> None:
        """Raise CheckpointError unless the directory, and what a run keeps in it, is writable, or can be made. Writes nothing."""
        try:
            nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        except (OSError, ValueError) as error:  # too long, a null byte
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"run.dir = {self.path}: {why}; choose another run.dir") from None
        if not nearest.is_dir():
            raise CheckpointError(f"run.dir = {self.path}: {nearest} is not a directory; choose another run.dir")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise CheckpointError(f"run.dir = {self.path}: {nearest} is not writable; choose another run.dir")
        require_own(self.path)

    def require_same_run(self, config: Config) -> None:
        """Raise ConfigError if the directory holds a run that computes something else, CheckpointError for a config.toml of no run."""
        begun = any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints"))
        if not self.config.exists():
            if begun:
                raise CheckpointError(f"run.dir = {self.path} holds a run without its config.toml; choose another run.dir")
            return
        if not begun and not self._is_of(config):
            found = f"run.dir = {self.path} holds a config.toml, but no run, which would replace it by its own"
            raise CheckpointError(f"{found}; move the file away, or choose another run.dir")
        found, wanted = identity(read_config(self.config)), identity(config)
        for key, value in wanted.items():
            if found[key] != value:
                of_tokenizer = f" and its tokenizer, data.tokenizer = {found['data.tokenizer']!r} as it was then"
                raise ConfigError(
                    f"run.dir = {self.path} holds a run with {key} = {found[key]!r}, this one has {value!r}; "
                    f"choose another run.dir, or go on with the settings of that run{of_tokenizer if key == 'model.vocab' else ''}"
                )

    def _is_of(self, config: Config) -> bool:
        """Return whether config.toml is what a run writes, and of a run like this one."""
        try:
            return identity(read_config(self.config)) == identity(config)
        except (ConfigError, CheckpointError):
            return False

    def begin(self, config: Config) -> None:
        """Write the resolved configuration, when everything is checked: from here on this is the directory of this run.

        Raises CheckpointError.
        """
        try:
            with replacing(self.config) as file:
                file.write(to_toml(config).encode())
        except OSError as error:
            raise _unwritable(self.config, error) from None
        self._made, self._fresh_data = [], False

    def append_to_metrics(self, line: str) -> str:
        """Append a line; return what is to be said. On a disk that is full lines are kept, and written with the first that can be.

        A run whose weights can still be saved elsewhere, or later, doesn't end for want of a line.
        """
        self._unwritten += line.encode()
        try:
            with open(self.metrics, "ab", buffering=0) as file:
                whole = file.seek(0, os.SEEK_END)
                try:
                    if file.write(self._unwritten) < len(self._unwritten):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    with suppress(OSError):
                        os.truncate(file.fileno(), whole)
                    raise
        except OSError as error:
            told, self._failing = not self._failing, True
            return f"{self.metrics} can't be written: {error.strerror}; its lines are kept until they can be" if told else ""
        told, self._failing, self._unwritten = self._failing, False, b""
        return f"{self.metrics} has all lines again" if told else ""

    def sync_metrics(self) -> None:
        """Bring the lines that are written to the disk. What comes after a checkpoint is computed anew, what comes before it never."""
        with suppress(OSError), self.metrics.open("rb") as file:  # a step is saved for want of lines, too
            os.fsync(file.fileno())

    def lost(self) -> str:
        """Return what is to be said at the end of lines that could not be written."""
        return f"{self.metrics} lacks the last {self._unwritten.count(10)} lines, which could not be written" if self._unwritten else ""

    def truncate_metrics(self, step: int) -> str:
        """Drop the lines after `step`: they come again, bit for bit; return what is to be said.

        A last line torn by a kill is dropped too. Others that can't be read are kept in metrics.jsonl.damaged. Raises CheckpointError.
        """
        kept = [line for line in self._unwritten.splitlines(keepends=True) if (_step_in(line) or 0) <= step]
        self._unwritten = b"".join(kept)
        try:
            return self._cut(step) if self.metrics.exists() else ""
        except OSError as error:
            raise _unwritable(self.metrics, error) from None

    def _cut(self, step: int) -> str:
        """Leave the lines up to `step`: where they lie, which takes no room, if nothing is between them."""
        steps, sizes = list[int | None](), list[int]()
        for line in _lines(self.metrics):
            steps.append(_step_in(line))
            sizes.append(len(line))
        kept = [found is not None and found <= step for found in steps]
        damaged = [number for number, found in enumerate(steps[:-1], start=1) if found is None]
        if damaged:
            with replacing(self.metrics.with_name("metrics.jsonl.damaged")) as file:
                file.writelines(_lines(self.metrics))
        if all(kept[: sum(kept)]) and self.metrics.stat().st_nlink == 1:  # another name may be that of a file elsewhere
            os.truncate(self.metrics, sum(sizes[: sum(kept)]))
        else:
            with replacing(self.metrics) as file:
                file.writelines(line for line, keep in zip(_lines(self.metrics), kept) if keep)
        return f"{self.metrics}: line {damaged[0]} can't be read; the file is kept as metrics.jsonl.damaged" if damaged else ""


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written: {error.strerror}; free some space or choose another run.dir")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics.jsonl. Raises CheckpointError for one that no run has written: a file may be larger than all memory."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), start=1):
            if len(line) > MOST_LINE_BYTES:
                what = f"{path}: line {number} has more than {MOST_LINE_BYTES:,} bytes, the most that are read of one"
                raise CheckpointError(f"{what}; move the file away, or choose another run.dir")
            yield line


def _step_in(line: bytes) -> int | None:
    """Return the step that a line of metrics tells of; None if it is torn or damaged."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def read_config(path: Path) -> Config:
    """Read the resolved configuration of a run directory, which may be a stranger's: nothing in it may lead elsewhere."""
    try:
        require_own(path.parent)
        return parse(tomllib.loads(read_regular(path, MOST_CONFIG_BYTES).decode()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {shown(error.args[0])}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the run directory is damaged, choose another run.dir") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, an integer of 5000 digits; a thousand brackets
        raise CheckpointError(f"{path}: {shown(error)}; the run directory is damaged, choose another run.dir") from None


def require_own(folder: Path) -> None:
    """Raise CheckpointError if what a run keeps in its directory is a link, or anything else than it should be."""
    for name, needed in ENTRIES.items():
        found = kind_of(folder / name)
        if found not in (None, needed):
            what = f"{folder / name} is {found}, needed {needed}"
            raise CheckpointError(f"{what}; move it away, set run.dir to the place itself, or choose another run.dir")
