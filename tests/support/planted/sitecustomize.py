"""Plants one fault in one rank: Python runs this file when it starts, if its folder is on PYTHONPATH.

PLANTED = {"rank": 1, "phase": "save", "call": 17, "fault": "stop"}: before the 17th call of a
function of mpitrain in that phase. With "fault": "count" nothing happens but that the number of
calls in each phase is written to "file".1; "rank": null counts on all ranks. With "blind" no
watchdog can be started, with "threadless" no thread. "phase": "saving" is what the thread that
saves does, whatever the rank itself does meanwhile.
"""

import atexit
import errno
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

PLANTED = json.loads(os.environ.get("PLANTED", "{}"))
RANK = int(
    next((os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), -1)
)


def fail() -> None:
    raise RuntimeError("planted")


def out_of_memory() -> None:
    raise MemoryError("planted")


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def full_disk() -> None:
    """Let no file grow any more, and fail the call that is being made as a full disk does."""
    fill_disk()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "planted")


def missing_file() -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "planted")


def no_threads() -> None:
    """Have the system refuse every further thread (EAGAIN), as under RLIMIT_NPROC, which root doesn't heed.

    No stack is that large.
    """
    threading.stack_size(1 << 46)


def no_threads_and_fail() -> None:
    no_threads()
    fail()


FAULTS = {
    "no threads": no_threads,
    "no threads and exception": no_threads_and_fail,
    "exception": fail,
    "memory": out_of_memory,
    "full disk": full_disk,
    "missing file": missing_file,
    "sys.exit": lambda: sys.exit(3),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(100),
    "asked": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


class Plant:
    """A profile function of the main thread, and of the one that saves.

    It finds the rank's place where that is made, and so knows the phase.
    """

    def __init__(self, phase: str, call: int, fault: str, file: str = "", **_):
        self.phase = phase
        self.call = call
        self.fault = fault
        self.place = None
        self.counts = {}
        if fault == "count":
            atexit.register(lambda: Path(f"{file}.{RANK}").write_text(json.dumps(self.counts)))

    def __call__(self, frame, event: str, _) -> None:
        if event != "call" or sys is None or sys.is_finalizing():  # Python ends: modules are gone
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR or "mpitrain" not in (
            frame.f_globals.get("__name__") or ""
        ):
            return
        if self.place is None:
            if frame.f_code.co_qualname == "RankStatus.enter":
                self.place = frame.f_locals["self"]
            return
        if frame.f_globals["__name__"] == "mpitrain.cluster.status_board":
            return  # between two phases: the place is being written
        phase = self.place.phase if threading.current_thread() is threading.main_thread() else SAVING
        self.counts[phase] = self.counts.get(phase, 0) + 1
        if phase == self.phase and self.counts[phase] == self.call and self.fault in FAULTS:
            sys.setprofile(None)
            sys.stderr.write(f"planted {self.fault} at {time.time():.1f} in {frame.f_code.co_qualname}\n")
            sys.stderr.flush()
            # What HDF5 calls to write fails by the system's calls in it, and these are caught; it
            # doesn't raise by itself.
            (
                fill_disk
                if self.fault == "full disk" and "PatientFile." in frame.f_code.co_qualname
                else FAULTS[self.fault]
            )()


SAVING = "saving"


def no_more_files(*_) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


if PLANTED.get("blind"):
    os.memfd_create = no_more_files
if PLANTED.get("threadless"):
    no_threads()
if PLANTED and PLANTED["rank"] in (RANK, None):
    plant = Plant(**PLANTED)
    sys.setprofile(plant)
    threading.setprofile(
        lambda *event: plant(*event) if threading.current_thread().name == "mpitrain-save" else None
    )
