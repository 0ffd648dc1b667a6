"""A logger's process: it follows metrics.jsonl until its parent, rank 0, closes its stdin or is gone.

It runs at the lowest priority. Its last word, why it failed, goes to the pipe that was its stdout;
what the logger's library prints is dropped.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from mpitrain.cluster.rundir import MOST_LINE_BYTES, RunDir, read_config, step_in
from mpitrain.config import flatten
from mpitrain.errors import FAILED, InputError
from mpitrain.inputs import kind_of, open_regular, read_regular, replacing, shown
from mpitrain.report.loggers.catalog import LoggedRun, Logger, load_logger
from mpitrain.report.loggers.value_names import values_of

EVERY_S = 1.0
FLUSHED_LINES = 1000  # at most, of many that are there: a logger may be killed over them
NICENESS = 19  # a core that the ranks leave, and 1.5 % of one that they need
MOST_WORDS = 2000  # characters of a last word


class LoggerTask(msgspec.Struct):
    """What a logger's process is given. plugins: checked ones. patience_s: after the run's end."""

    name: str
    run: str
    plugins: list[str]
    patience_s: int


class FollowedFile:
    """metrics.jsonl while it is written. offset, last: how far it was read, and the line before."""

    def __init__(self, path: Path, offset: int = 0, last: bytes = b""):
        self._path = path
        self._offset = offset
        self._last = last
        self._kept = offset  # of keep_place()

    def is_cut(self) -> bool:
        """Return whether lines that were read are gone, as after a rollback."""
        try:
            with open(open_regular(self._path), "rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except FileNotFoundError:
            return bool(self._offset)

    def keep_place(self, file: Path) -> None:
        """Write how far it was read, if that is further than before."""
        if self._offset != self._kept:
            self._kept = self._offset
            with replacing(file) as out:
                out.write(b"%d\n%b" % (self._offset, self._last))

    @classmethod
    def from_place(cls, path: Path, file: Path) -> "FollowedFile | None":
        """Return it from where it was read before, None where that is unknown or was cut."""
        with suppress(OSError, ValueError):
            offset, last = read_regular(file, MOST_LINE_BYTES + 32).split(b"\n", 1)
            followed = cls(path, int(offset), last)
            return None if int(offset) < len(last) or followed.is_cut() else followed
        return None

    def new_lines(self) -> Iterator[bytes]:
        """Yield the lines that are whole and were not read yet."""
        try:
            descriptor = open_regular(self._path)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            file.seek(self._offset)
            while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                self._offset += len(line)
                self._last = line
                yield line


def follow(
    metrics: Path, begin: Callable[[bool], Logger], over: threading.Event, place: Path | None = None
) -> None:
    """Give all lines to a logger until `over`; begin another one when the file was cut.

    begin: takes whether lines of an earlier start aren't given again.
    place: file of a logger that resumes: how far it has come; None: it gets all lines.
    """
    resumed = FollowedFile.from_place(metrics, place) if place else None
    followed = resumed or FollowedFile(metrics)
    logger = begin(resumed is not None)
    ends = False

    def flush() -> None:
        logger.flush()
        if place:
            followed.keep_place(place)

    while not ends:
        ends = over.is_set()  # before reading: what was written until then is read
        if followed.is_cut():
            logger.end()
            if ends:  # another start of the run cuts it, whose logger takes over
                return
            logger = begin(False)
            followed = FollowedFile(metrics)
        for count, line in enumerate(followed.new_lines(), start=1):
            if (step := step_in(line)) is not None:
                numbers = json.loads(line)
                logger.log(step, values_of(numbers), numbers.get("time") or time.time())
            if count % FLUSHED_LINES == 0:
                flush()
        flush()
        over.wait(0 if ends else EVERY_S)
    logger.end()


def _wait_for_end(over: threading.Event, patience_s: int) -> None:
    while os.read(0, 1):
        pass
    signal.alarm(patience_s)  # which ends this process, whatever a library is at
    over.set()


def _run(task: LoggerTask, over: threading.Event) -> None:
    rundir = RunDir(task.run)
    folder = rundir.loggers / task.name.replace(":", ".")
    folder.mkdir(parents=True, exist_ok=True)
    for path in (rundir.loggers, folder):
        if kind_of(path) != "a folder":
            raise InputError(f"{shown(path)} is {kind_of(path)}, needed a folder; move it away")
    most = max(1, shutil.disk_usage(folder).free // 2)  # no file grows beyond: the rest is the run's
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lock = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)  # the logger of an earlier start may still be at its end
    config = flatten(read_config(rundir.config, task.plugins))
    run = LoggedRun(rundir.path.resolve().name, folder, config)
    logger_class = load_logger(task.name)
    place = folder / "place"

    def begin(resumed: bool) -> Logger:
        return logger_class(run._replace(resumed=resumed))

    resumes = getattr(logger_class, "resumes", None)
    if resumes and (FollowedFile.from_place(rundir.metrics, place) is None or not resumes(run)):
        place.unlink(missing_ok=True)
    follow(rundir.metrics, begin, over, place if resumes else None)


def main() -> None:
    """Log a run until its end."""
    task = msgspec.json.decode(sys.argv[1], type=LoggerTask)
    words = os.dup(1)
    os.dup2(2, 1)  # stderr leads nowhere
    os.nice(NICENESS)
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over, task.patience_s), daemon=True).start()
    code = 0
    try:
        _run(task, over)
    except BaseException as error:
        why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        os.write(words, " ".join(why[:MOST_WORDS].split()).encode(errors="backslashreplace"))
        code = FAILED
    os._exit(code)  # threads of a library may not end


if __name__ == "__main__":
    main()
