"""TensorBoard's event files: scalars, float32 there, and the configuration as a text."""

import os
import socket
import time as clock
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from mpitrain.inputs import open_regular
from mpitrain.report.loggers.catalog import LoggedRun


class TensorBoardLogger:
    """One event file; that of an earlier start, whose steps it has too, is removed."""

    def __init__(self, run: LoggedRun):
        for path in run.folder.glob("events.out.tfevents.*"):
            path.unlink()
        now = clock.time()
        path = run.folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._records = RecordWriter(os.fdopen(descriptor, "wb"))
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        rows = "".join(f"| {key} | `{value}` |\n" for key, value in run.config.items())
        text = text_pb("config", f"| key | value |\n|---|---|\n{rows}")
        self._write(Event(wall_time=now, step=0, summary=text))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Write the scalars of a step."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time, step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Bring events to the file."""
        self._records.flush()

    def end(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
