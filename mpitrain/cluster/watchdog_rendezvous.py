"""How ranks find the watchdog of their node, long before MPI knows which ranks are there.

    connect_to_job()  at a socket named after what the ranks of one launcher on this node have in
                      common; who comes first starts it
    start(address)    at a name that its starter tells: where launchers say nothing of the kind,
                      or one host plays several nodes

The name of such a socket has no file: it needs no disk, and goes with the process.
"""

import ctypes
import hashlib
import os
import socket
import stat
import sys
import time
from pathlib import Path

from mpitrain.cluster.console import STDERR
from mpitrain.cluster.launch import (
    launched,
    launcher,
    launcher_above,
    num_ranks_here,
    on_one_node,
    pmi_server,
)
from mpitrain.cluster.processes import peer_of
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import OPEN_MPI, launch

TRIES = 200  # while another rank starts it
AGAIN_S = 0.01
BACKLOG = 4096  # ranks that it has not let in yet: it starts while they connect
PIDFD_GETFD = 438  # the number of the system call, Linux 5.6


def connect_to_job() -> socket.socket | None:
    """Return a connection to this launcher's watchdog on this node, or None. Raises OSError."""
    job = _job()
    if not job or not launched() or not sys.platform.startswith("linux"):  # it reads /proc
        return None
    address = f"\0mpitrain-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    for _ in range(TRIES):
        try:
            return connect(address)
        except ConnectionRefusedError:  # there is none, or not quite
            if not start(address):
                time.sleep(AGAIN_S)
    return None


def connect(address: str) -> socket.socket:
    """Connect to the watchdog at a name. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        if peer_of(connection).uid != os.getuid():
            raise PermissionError(f"process {peer_of(connection).pid} of another user has its name")
    except OSError:
        connection.close()
        raise
    return connection


def start(address: str) -> bool:
    """Start a watchdog at a name; return False if somebody has the name. Raises OSError."""
    import subprocess  # by one rank of a node

    code = "import sys; sys.path.append(sys.argv.pop(1)); from mpitrain.cluster.watchdog import main; main()"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return False
        listener.listen(BACKLOG)
        started = launch()
        # Open MPI asks ranks to end before it kills them
        sure = on_one_node() or (started is not None and started.name == OPEN_MPI)
        console = stderr_of_launcher()
        above = launcher_above()
        numbers = (
            int(sure),
            num_ranks_here(),
            os.getpid(),
            listener.fileno(),
            -1 if console is None else console,
            *above.to_arguments(),
        )
        given = [listener.fileno(), *([] if console is None else [console]), *above.descriptors]
        try:
            interpreter, *words = python("-S", "-s", "-c", code, str(Path(__file__).parents[2]))
            subprocess.Popen(
                ["mpitrain-watchdog", *words, *map(str, numbers)],
                executable=interpreter,
                env={**os.environ, "PYTHONHOME": f"{sys.base_prefix}:{sys.base_exec_prefix}"},
                # and no other: launchers learn from a closed socket of theirs that a rank died
                pass_fds=given,
                # and holds the rank's stdout and stderr: MPICH's launcher waits until they are closed
                stdin=subprocess.DEVNULL,
                # launchers kill the session of a rank; the watchdog has to say why
                start_new_session=True,
            )
        finally:
            above.close()
            if console is not None:
                os.close(console)
    return True


def _job() -> str:
    """Return what the ranks of one launcher on this node alone have in common; "": not known."""
    step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    known = os.environ.get("PMIX_NAMESPACE", ""), str(pmi_server() or ""), "-".join(step) if all(step) else ""
    return " ".join((os.readlink("/proc/self/ns/pid"), *known)) if any(known) else ""


# ---------------------------------------------------------- where a watchdog speaks (console.py)


def stderr_of_launcher() -> int | None:
    """Return a descriptor of the standard error of this rank's launcher; None: it can't be had.

    For a rank to call and to give on: the launcher of a single one has ended as soon as that has.
    """
    pid = launcher()
    try:
        return (_duplicate(pid) or _open_again(pid)) if pid and _inherited(pid) else None
    except OSError:
        return None


def _inherited(pid: int) -> bool:
    """Return whether a process has a standard error; else the number is of a file of its own."""
    flags = _flags(pid)
    return not flags & os.O_CLOEXEC and flags & os.O_ACCMODE != os.O_RDONLY


def _duplicate(pid: int) -> int | None:
    """Return the very descriptor of another process; None where the system can't, or forbids it."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
    try:
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, STDERR, 0)
    finally:
        os.close(process)
    return descriptor if descriptor >= 0 else None


def _open_again(pid: int) -> int | None:
    """Open what another process has; a file only to append, as each would write over the other."""
    path = f"/proc/{pid}/fd/{STDERR}"
    kind = os.stat(path).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or (stat.S_ISREG(kind) and _flags(pid) & os.O_APPEND):
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
    return None


def _flags(pid: int) -> int:
    with open(f"/proc/{pid}/fdinfo/{STDERR}", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("flags:")).split()[1], 8)
