"""Have a child process hand device buffers to MPI: if MPI can't take them, the child crashes.

It is an MPI process of its own, alone in its world, with the same libraries and settings, and sends
to itself. comm/ doesn't know a device's memory: the child is given the name of a function, and its
argument, that returns two more,

    put(bytes) -> buffer  copies numpy bytes to a new buffer of the device, and waits until they are
                          there
    get(buffer) -> bytes  copies them back

Not tried: a path between nodes, and one between two devices.
"""

import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import numpy as np

from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import without_launcher

# bytes: a short message, and some that are taken where they lie
SIZES = (1 << 6, 1 << 14, 1 << 20, 1 << 24)
LIMIT_S = 120.0  # to import torch, on a node where all ranks do, and to start a device
PR_SET_PDEATHSIG = 1  # of prctl(2)
DONE = "mpitrain: all came as it was sent"


def attempt(factory: str, argument: str, limit_s: float = LIMIT_S) -> str:
    """Run the child; return how it failed, as in "a child that ...", or "" if all came back as sent.

    factory: "module:function", found in the child as here; called as function(argument) after MPI
    starts.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from mpitrain.comm.device.gpu_probe import main; main()"
    # no pipes: what it leaves behind could hold them open
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                python("-c", code, factory, argument),
                # a child that heard a launcher would claim to be one of its ranks
                env=without_launcher(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:  # of processes there can be no more
            return f"could not be started: {error.strerror}"
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"did not end within {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                # and what it has started: Open MPI 4 gives a lone process a daemon
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return (
            ""
            if child.returncode == 0 and DONE in _text(output)
            else _failure(child.returncode, _text(errors))
        )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _failure(code: int, errors: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "and printed nothing")
    return f"ended with exit code {code}: {last.strip()[:200]}"


# ---------------------------------------------------------------- the child


def main() -> None:
    """Send buffers of some sizes to this process itself, and look at what came."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    # stopped, it would stay when its rank is killed
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from mpitrain.comm.base.world import finalize, start

    start()
    module, _, name = sys.argv[1].partition(":")
    put, get = getattr(importlib.import_module(module), name)(sys.argv[2])
    for num_bytes in SIZES:
        _send(num_bytes, put, get)
    print(DONE, flush=True)
    finalize()


def _send(num_bytes: int, put: Callable[..., Any], get: Callable[..., Any]) -> None:
    from mpitrain.comm.base.buffers import raw
    from mpitrain.comm.base.mpi import MPI

    sent = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    source = put(sent)
    target = put(~sent)
    requests = [
        MPI.COMM_SELF.Irecv([raw(target), MPI.BYTE], 0, 0),
        MPI.COMM_SELF.Isend([raw(source), MPI.BYTE], 0, 0),
    ]
    MPI.Request.Waitall(requests)
    wrong = int((np.asarray(get(target)) != sent).sum())
    if wrong:
        sys.exit(f"{wrong:,} of {num_bytes:,} bytes arrived wrong")
