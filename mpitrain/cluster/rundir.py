"""The run directory and its files (docs/reference/outputs.md); whether another start may resume it."""

import errno
import json
import os
import socket
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain.cluster.lock import NAME as LOCK
from mpitrain.cluster.lock import Lock, read_owner
from mpitrain.config import Config, LoadedConfig, plugins_of, resolved_with_origins, to_toml_with_derived
from mpitrain.config_hints import recognised
from mpitrain.errors import CheckpointError, ConfigError, counted
from mpitrain.inputs import append_lines, kind_of, names_in, open_regular, read_regular, replacing, shown
from mpitrain.origins import FILE, Origins
from mpitrain.plan.settings.identity import identity

FILES = (
    *("config.toml", "metrics.jsonl", "metrics.jsonl.damaged", "ends.jsonl", "evaluations.jsonl"),
    *("recovery.json", "unhealthy.jsonl", "summary.json", "trace.json", "profile.json", "loads.svg"),
    *("run.svg", "routing.npz", LOCK),
)
FOLDERS = ("data", "checkpoints", "logs", "loggers", "huggingface")
IMPORTED = "step-00000000"  # the step that `mpitrain import` makes
OF_A_MODEL = ("model", "attention", "experts")  # the tables that say what its weights are
# a link would be written through, too
ENTRIES = dict.fromkeys(FILES, "a file") | dict.fromkeys(FOLDERS, "a folder")
MOST_CONFIG_BYTES = 1 << 16  # a run writes 4 KB
GIVE = "give the run directory of `mpitrain run`"
MOST_DAMAGED = 1000  # lines
MOST_LINE_BYTES = 1 << 24  # the loads of 100 blocks of 512 experts take 1 MB


class RunDir:
    """The paths of a run. Only the rank that writes calls its methods."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.data = self.path / "data"
        self.tokenizer = self.data / "tokenizer.json"  # a copy, of runs that have one
        self.checkpoints = self.path / "checkpoints"
        self.came_along = self.path / "huggingface"
        self.logs = self.path / "logs"
        self.loggers = self.path / "loggers"
        self.ends = self.path / "ends.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.recovery = self.path / "recovery.json"  # names the folder of its copies in memory
        self.unhealthy = self.path / "unhealthy.jsonl"
        self.trace = self.path / "trace.json"
        self.profile = self.path / "profile.json"
        self.routing = self.path / "routing.npz"
        self.loads = self.path / "loads.svg"
        self.summary = self.path / "summary.json"  # what it knows at its end alone
        self.picture = self.path / "run.svg"  # its losses and its communication
        self._lock: Lock | None = None
        self._made: list[Path] = []  # directories, the innermost first
        self._fresh_data = False
        self._unwritten = b""  # lines of metrics.jsonl
        self._failing = False

    def take(
        self, lost: Callable[[str], object], still_waiting: Callable[[str], object], job: str = ""
    ) -> tuple[str, str]:
        """Make the directory and take its lock; return the lock's token, and a word on its last holder.

        lost, still_waiting, job: see Lock. Raises CheckpointError, and leaves nothing behind.
        """
        self._require_usable()
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self._fresh_data = not self.data.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path, lost, job)
            said = lock.take(still_waiting)
        except OSError as error:
            self.undo()
            raise CheckpointError(
                f"run.dir = {shown(self.path)} cannot be made: {error.strerror}; choose another run.dir"
            ) from None
        except CheckpointError:
            self.undo()
            raise
        self._lock = lock
        return lock.token, said

    def require_seen(self, token: str, patience_s: float) -> None:
        """Raise CheckpointError unless this rank sees the directory that the first rank has taken.

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
            f"run.dir = {shown(self.path)}: {shown(self.path.absolute())} on {socket.gethostname()} is not "
            "the directory that rank 0 has made; give the absolute path of a directory that all nodes share"
        )

    def undo(self, keep_data: bool = False) -> None:
        """Release the directory, and remove what take() and the preparation of tokens have made.

        keep_data: what is prepared of the tokens, and where it lies, stays for the next start.
        """
        # without the lock, or after it, the data are another run's
        if self._lock is not None and self._fresh_data and not keep_data:
            import shutil  # with compressors, which ranks do without

            shutil.rmtree(self.data, ignore_errors=True)
            if not self.config.exists():  # else it was imported, or an earlier start of this run kept it
                shutil.rmtree(self.came_along, ignore_errors=True)
        self.release()
        for path in (*([self.data] if self._fresh_data else []), *self._made):
            with suppress(OSError):  # another run that was refused here may be looking
                path.rmdir()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Release the directory after a good end; else the next run says that this one is gone."""
        if error is None or getattr(error, "everywhere", False):
            self.release()

    def release(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _require_usable(self) -> None:
        """Raise CheckpointError unless the directory, and what it has, can be written or made."""
        try:
            nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        except (OSError, ValueError) as error:  # too long, a null byte
            why = getattr(error, "strerror", None) or error
        else:
            why = "" if nearest.is_dir() else f"{shown(nearest)} is not a directory"
            if not why and not os.access(nearest, os.W_OK | os.X_OK):
                why = f"{shown(nearest)} is not writable"
        if why:
            raise CheckpointError(f"run.dir = {shown(self.path)}: {why}; choose another run.dir")
        require_own(self.path)

    def require_same_run(self, config: Config) -> Config | None:
        """Return the configuration of the run that the directory holds; None if it holds none.

        Raises ConfigError if that run computes something else, CheckpointError for a config.toml of
        no run.
        """
        begun = _is_begun(self.path)
        holds = f"run.dir = {shown(self.path)} holds a"
        if not self.config.exists():
            if begun:
                raise CheckpointError(f"{holds} run without its config.toml; choose another run.dir")
            return None
        if not begun and not self._is_of(config):
            holds = f"{holds} config.toml, but no run, which would replace it by its own"
            raise CheckpointError(f"{holds}; move the file away, or choose another run.dir")
        loaded = read_with_origins(self.config, plugins_of(config))
        before = loaded.config
        recorded = identity(before)
        wanted = identity(config)
        imported = self._only_imported()
        edited = _edited_tables(loaded.origins, self.config)
        for key, value in wanted.items():
            table = key.partition(".")[0]
            # what was imported is a model; how it is trained is open until it is
            is_open = (imported and table not in OF_A_MODEL) or (
                table in edited and not loaded.origins.is_given(key)
            )
            if recorded[key] != value and not is_open:
                what = f"{key} = {shown(repr(recorded[key]))}, this one has {shown(repr(value))}"
                raise ConfigError(
                    f"{holds} run with {what}; choose another run.dir, or resume with the settings of that "
                    f"run{_as_it_was(key, before)}"
                )
        return before

    def _only_imported(self) -> bool:
        """Return whether weights were imported, and nothing else was done."""
        try:
            steps = [name for name, _ in names_in(self.checkpoints) if name.startswith("step-")]
        except OSError:
            return False
        return steps == [IMPORTED] and not self.metrics.exists()

    def _is_of(self, config: Config) -> bool:
        """Return whether config.toml is what a run writes, and of a run like this one."""
        try:
            return identity(read_config(self.config, plugins_of(config))) == identity(config)
        except (ConfigError, CheckpointError):
            return False

    def begin(self, asked: LoadedConfig, resolved: LoadedConfig) -> None:
        """Write the configuration: from now on this is the run's folder. Raises CheckpointError."""
        try:
            with replacing(self.config) as file:
                file.write(to_toml_with_derived(asked, resolved).encode())
        except OSError as error:
            raise _unwritable(self.config, error) from None
        self._made = []
        self._fresh_data = False

    def append_to_metrics(self, line: str) -> str:
        """Append a line; return what is to be said.

        On a full disk lines are kept, and written later: weights may still be saved elsewhere.
        """
        self._unwritten += line.encode()
        try:
            descriptor = open_regular(self.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(descriptor, "ab", buffering=0) as file:
                whole = file.seek(0, os.SEEK_END)
                try:
                    if file.write(self._unwritten) < len(self._unwritten):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    with suppress(OSError):
                        os.truncate(file.fileno(), whole)
                    raise
        except OSError as error:
            why = f"can't be written: {error.strerror}; its lines are kept until they can be"
        else:
            self._unwritten = b""
            why = ""
        changed = self._failing != bool(why)
        self._failing = bool(why)
        return f"{shown(self.metrics)} {why or 'has all lines again'}" if changed else ""

    def append_evaluation(self, line: str) -> None:
        """Append the result of an evaluation. Raises OSError."""
        append_lines(self.evaluations, f"{line}\n".encode())

    def sync_metrics(self) -> None:
        """Bring lines to the disk: what comes before a checkpoint is never computed again."""
        # a step is saved for want of lines, too
        with suppress(OSError), open(open_regular(self.metrics), "rb") as file:
            os.fsync(file.fileno())

    def lost(self) -> str:
        """Return what is to be said at the end of lines that could not be written."""
        lines = counted(self._unwritten.count(10), "lines")
        said = f"{shown(self.metrics)} lacks the last {lines}, which could not be written"
        return said if self._unwritten else ""

    def truncate_metrics(self, step: int) -> str:
        """Drop the lines after `step`: they are written again, bit for bit; return what is to be said.

        A last line torn by a kill is dropped too. Others that can't be read are kept in
        metrics.jsonl.damaged. Raises CheckpointError.
        """
        kept = [line for line in self._unwritten.splitlines(keepends=True) if (step_in(line) or 0) <= step]
        self._unwritten = b"".join(kept)
        try:
            return self._cut(step) if kind_of(self.metrics) else ""
        except OSError as error:
            raise _unwritable(self.metrics, error) from None

    def _cut(self, step: int) -> str:
        """Leave the lines up to `step`, in place if nothing is between them: that takes no room."""
        survey = _survey(self.metrics, step)
        if survey.damaged:
            with replacing(self.metrics.with_name("metrics.jsonl.damaged")) as file:
                file.writelines(line for line, _ in lines_of(self.metrics))
        with open(open_regular(self.metrics, os.O_RDWR), "r+b") as file:
            # another name may be that of a file elsewhere
            in_place = survey.in_one_piece and os.fstat(file.fileno()).st_nlink == 1
            if in_place:
                file.truncate(survey.first_bytes)
        if not in_place:
            with replacing(self.metrics) as file:
                file.writelines(
                    line for line, known in lines_of(self.metrics) if known is not None and known <= step
                )
        return (
            f"{shown(self.metrics)}: line {survey.damaged} can't be read; the file is kept as "
            "metrics.jsonl.damaged" * bool(survey.damaged)
        )


def _is_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def run_that_has(path: Path) -> Path | None:
    """Return the directory of the run that keeps a file, None if none does. Raises OSError."""
    where = Path(os.path.realpath(path.parent), path.name)
    for folder in where.parents:
        is_entry = where.relative_to(folder).parts[0] in ENTRIES
        if is_entry and (folder / "config.toml").exists() and _is_begun(folder):
            return folder
    return None


def _edited_tables(origins: Origins, path: Path) -> set[str]:
    """Return those tables, with keys that decide others, of which config.toml was changed by hand.

    What was derived from it before says nothing then.
    """
    by_hand = {
        key.partition(".")[0] for key, origin in origins.by_key.items() if origin == (FILE, shown(path))
    }
    of_model = OF_A_MODEL if by_hand & {*OF_A_MODEL} else ()
    return {*of_model, *(by_hand & {"optimizer"})}


def _as_it_was(key: str, before: Config) -> str:
    """Return how to get the value of a key that the run derived; "" for one that its user gives."""
    if key == "model.vocab":
        return f" and its tokenizer, data.tokenizer = {shown(repr(before.data.tokenizer))} as it was then"
    # another number of ranks derives another one
    return f", --set {key}={before.batch.global_}" if key == "batch.global" else ""


class _Survey(NamedTuple):
    """What is in a metrics.jsonl.

    first_bytes: of its first lines, those up to a step. in_one_piece: there are no more of them.
    damaged: the first line that can't be read, from 1; 0: none, or the last one, torn by a kill.
    """

    first_bytes: int
    in_one_piece: bool
    damaged: int


def _survey(path: Path, step: int) -> _Survey:
    """Read a metrics.jsonl once. Raises OSError, and CheckpointError if most of it can't be read."""
    first_bytes = number = 0
    in_first = in_one_piece = True
    damaged = list[int]()
    for number, (line, known) in enumerate(lines_of(path), start=1):
        if known is None:
            damaged.append(number)
        if len(damaged) > MOST_DAMAGED:
            what = f"more than {MOST_DAMAGED:,} lines can't be read, the first is line {damaged[0]}"
            raise _to_move(path, what)
        kept = known is not None and known <= step
        in_first = in_first and kept
        in_one_piece = in_one_piece and (in_first or not kept)
        first_bytes += len(line) * in_first
    return _Survey(first_bytes, in_one_piece, next((line for line in damaged if line < number), 0))


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{shown(path)} cannot be written: {error.strerror}; free some space or choose another run.dir"
    )


def _to_move(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{shown(path)}: {what}; move the file away, or choose another run.dir")


def lines_of(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """Yield the lines of a metrics.jsonl, and the step that each tells of; None if it is torn or damaged.

    Raises OSError, and CheckpointError for a line longer than any run writes: it may exceed memory.
    """
    with open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), start=1):
            if len(line) > MOST_LINE_BYTES:
                what = f"has more than {MOST_LINE_BYTES:,} bytes, the most that are read of one"
                raise _to_move(path, f"line {number} {what}")
            yield line, step_in(line)


def step_in(line: bytes) -> int | None:
    """Return the step that a line of metrics.jsonl or ends.jsonl tells of; None if it is torn or damaged."""
    return number_in(line, "step")


def number_in(line: bytes, key: str) -> int | None:
    """Return an integer of a line of metrics.jsonl or ends.jsonl; None: it is torn, or has none."""
    try:
        number = json.loads(line)[key] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return number if type(number) is int else None


def read_config(path: Path, typed: Collection[str] = ()) -> Config:
    """Return the resolved configuration alone. Raises as read_with_origins() does."""
    return read_with_origins(path, typed).config


def read_with_origins(path: Path, typed: Collection[str] = ()) -> LoadedConfig:
    """Read the resolved configuration of a run directory, maybe a stranger's: no link is followed.

    typed: plug-ins that the user named in this command; another one is refused.
    """
    try:
        require_own(path.parent)
        tree = tomllib.loads(read_regular(path, MOST_CONFIG_BYTES).decode())
        return resolved_with_origins(tree, path, typed)
    except ConfigError as error:
        raise ConfigError(f"{shown(path)}: {shown(error.args[0])}") from None
    except (OSError, ValueError, RecursionError) as error:
        # no UTF-8, no TOML, an integer of 5000 digits; a thousand brackets
        why = error.strerror if isinstance(error, OSError) else shown(error)
    raise CheckpointError(f"{shown(path)}: {why}; the run directory is damaged, choose another run.dir")


def require_run(run: RunDir) -> None:
    """Raise CheckpointError unless a folder is a run's; say what it is instead."""
    try:
        kind = kind_of(run.config)
    except OSError as error:
        raise CheckpointError(f"{shown(run.path)}: {error.strerror}; {GIVE}") from error
    if kind is None:
        recognised_as = recognised(run.path, own=False)
        what = f"it is {recognised_as}" if recognised_as else "no config.toml"
        raise CheckpointError(f"{shown(run.path)}: {what}; {GIVE}")


def require_own(folder: Path) -> None:
    """Raise CheckpointError if what a run keeps in its directory is a link, or of another kind."""
    for name, needed in ENTRIES.items():
        kind = kind_of(folder / name)
        if kind not in (None, needed):
            what = f"{shown(folder / name)} is {kind}, needed {needed}"
            raise CheckpointError(
                f"{what}; move it away, set run.dir to the place itself, or choose another run.dir"
            )
