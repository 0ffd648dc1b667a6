"""The loggers of a run, on rank 0: a process each. Nothing here waits for one before the run's end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from mpitrain.cluster.rundir import RunDir
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import without_launcher
from mpitrain.inputs import shown
from mpitrain.report.loggers.logger_process import MOST_WORDS, LoggerTask

PATIENCE_S = 60  # of a run that is done, for what is still to be logged: libraries take 10 s to load
HURRIED_S = 5  # of one that leaves early
ONE_CORE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
WITHOUT = "the run continues without it, and metrics.jsonl has all lines"


class Loggers:
    """names: of run.loggers; none on ranks but the first."""

    def __init__(self, rundir: RunDir, names: Sequence[str], plugins: Collection[str]):
        self._rundir = rundir
        self._plugins = sorted(plugins)
        self._names = list(names)
        self._starting: threading.Thread | None = None
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._not_started: list[str] = []  # what is to be said of them

    def advance(self) -> str:
        """Start them after the first step; return what is to be said of one that has failed."""
        if names := self._names:
            self._names = []
            starting = threading.Thread(target=self._start, args=(names,), daemon=True)
            try:
                starting.start()
                self._starting = starting
            except RuntimeError:  # no thread can be started: this step waits until they are
                self._start(names)
        words = [self._not_started.pop() for _ in [*self._not_started]]
        for name, child in [*self._running.items()]:
            if child.poll() is not None:
                del self._running[name]
                words.append(f'logger "{shown(name)}" has stopped: {_why(child)}; {WITHOUT}')
        return "\n".join(words)

    def end(self, patience_s: float = PATIENCE_S) -> str:
        """Let them log the last lines, in patience_s at most; return what is to be said."""
        end = time.monotonic() + patience_s
        words = [self.advance()] if patience_s else []
        if self._starting is not None:
            self._starting.join(patience_s)
            words.append(self.advance())
        for child in self._running.values():
            with suppress(OSError):
                child.stdin.close()
        for name, child in [*self._running.items()] if patience_s else ():
            try:
                code = child.wait(max(0.0, end - time.monotonic()))
                why = _why(child) if code else ""
            except subprocess.TimeoutExpired:
                why = f"it was not done {patience_s:g} s after the end of the run"
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
            if why:
                words.append(f'logger "{shown(name)}": {why}; metrics.jsonl has all lines')
        self._running.clear()
        return "\n".join(filter(None, words))

    def _start(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._running[name] = self._started(name)
            except OSError as error:
                why = f"can't be started: {error.strerror}"
                self._not_started.append(f'logger "{shown(name)}" {why}; {WITHOUT}')

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        task = LoggerTask(name, str(self._rundir.path), self._plugins, PATIENCE_S)
        command = python("-m", "mpitrain.report.loggers.logger_process", msgspec.json.encode(task).decode())
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        env = without_launcher(os.environ) | ONE_CORE
        # no Ctrl-C for it, but the session of rank 0: Linux shares cores among sessions first
        # (autogroup), and niceness counts within one
        return subprocess.Popen(command, env=env, process_group=0, **pipes)


def _why(child: subprocess.Popen[bytes]) -> str:
    os.set_blocking(child.stdout.fileno(), False)
    words = (child.stdout.read(4 * MOST_WORDS) or b"").decode(errors="replace").strip()
    return shown(words) if words else f"its process ended with code {child.returncode}"
