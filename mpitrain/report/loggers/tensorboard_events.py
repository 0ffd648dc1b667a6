"""TensorBoard's event files: scalars, float32 there, and the configuration as a text."""

import os
import socket
import time as clock
from collections.abc import Mapping

import xxhash
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from mpitrain.inputs import open_regular
from mpitrain.report.loggers.catalog import LoggedRun


class TensorBoardLogger:
    """An event file. Those of earlier starts are removed, unless their steps aren't given again.

    The digest of the configuration is part of the name: with other keys all is written anew.
    """

    def __init__(self, run: LoggedRun):
        now = clock.time()
        self._resumes = run.resumed
        for path in [] if run.resumed else run.folder.glob("events.out.tfevents.*"):
            path.unlink()
        rows = _rows(run)
        path = run.folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{_digest(rows)}"
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._file = os.fdopen(descriptor, "wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if not run.resumed:
            text = text_pb("config", f"| key | value |\n|---|---|\n{rows}")
            self._write(Event(wall_time=now, step=0, summary=text))

    @classmethod
    def resumes(cls, run: LoggedRun) -> bool:
        """Return whether an earlier start has left a file with these keys."""
        return any(run.folder.glob(f"events.out.tfevents.*.{_digest(_rows(run))}"))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Write the scalars of a step."""
        if self._resumes:  # TensorBoard drops what a logger that was killed has of later steps
            self._resumes = False
            session = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time, step=step, session_log=session))
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time, step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Bring events to the disk: a start that resumes isn't given them again."""
        self._records.flush()
        os.fsync(self._file.fileno())

    def end(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _rows(run: LoggedRun) -> str:
    return "".join(f"| {key} | `{value}` |\n" for key, value in run.config.items())


def _digest(rows: str) -> str:
    return xxhash.xxh3_64_hexdigest(rows.encode())
