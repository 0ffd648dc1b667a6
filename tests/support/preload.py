"""Ranks whose libraries are loaded already.

To load torch is most of what a short run costs, and tests start hundreds.

    mpirun -n 2 python -S -E rank_proxy.py SOCKET mpitrain run ...  what mpirun starts: small, it
                                                                  stands for the rank
    python preload.py SOCKET                                      has loaded everything, and forks a
                                                                  rank when asked

The one that mpirun started sends its arguments, environment, folder and every descriptor it has,
the launcher's too. The fork takes them over and runs the program from its first line: MPI, the
guard and its watchdog are as ever. It hears of signals, and dies with the other; that one ends as
it ended, by a code or by a signal.

A test finds it by the name that it has, and may stop or kill it. MPICH's launcher knows a rank by a
descriptor, Open MPI's by what its environment says.
"""

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

# the variable by which launch.py knows the processes of a job, and reaper.py those of a pytest
MARK = "MPITRAIN_TEST_JOB"
SESSION_LENGTH = 12  # so many of its characters name the pytest, the others the job
LOADED = ["mpitrain.cli", "mpitrain.training.trainers", "numpy.ma", "numpy.random", "pytest"]
# the first backward loads it, and sympy with it
LOADED += ["torch.fx.experimental.symbolic_shapes"]
LOADED += ["torch._dynamo"]  # and the first operation on tensors without values
# what a run imports when it needs it
LOADED += ["mpitrain.planner.after_run", "mpitrain.plan.predict.step_time.advice", "mpitrain.actor.rehearsal"]
LOADED += ["mpitrain.planner.run_layout", "mpitrain.commands.inspect", "rich._emoji_codes"]
OF_A_RUN = ("mpitrain.data.sources", "mpitrain.model.families", "mpitrain.optim.optimizers")  # all in them
OF_OTHERS = [
    *(name for name in LOADED if not name.startswith("mpitrain")),
    "mpi4py.MPI",
    "h5py",
    "msgspec",
    "click",
    "hypothesis",
]
# of mpitrain nothing: it is another in each run of benchmarks/planted_bugs.py
WHAT = "MPITRAIN_PRELOAD"
RANK = ("PMI_RANK", "PMIX_RANK")  # of MPICH's launcher, and of Open MPI's
LIBRARIES = "libraries"
FIRST_FREE = 200  # descriptors below it may be the launcher's
MOST_BYTES = 1 << 17
MOST_DESCRIPTORS = 64


def name_of(mark: str) -> str:
    """Return what the names of a job's forks begin with, before their ranks; Linux keeps 15 characters.

    mark: of the job.
    """
    return mark[SESSION_LENGTH:][:10] + "."


# ---------------------------------------------------------------- the one that forks


def serve(address: str) -> None:
    """Fork for each that connects, until stdin is closed. Returns in the fork, with its program to run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(64)
    wakes, wake = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    forks: dict[int, socket.socket] = {}
    poll = select.poll()
    for each in (listener, sys.stdin, wakes):
        poll.register(each, select.POLLIN)
    print("ready", flush=True)
    closed = False
    while True:
        ready = dict(poll.poll())
        if wakes in ready:
            os.read(wakes, 4096)
            _report_ended(forks, poll)
        for pid in [
            pid for pid, connection in forks.items() if ready.get(connection.fileno(), 0) & select.POLLHUP
        ]:
            poll.unregister(forks[pid])
            os.kill(pid, signal.SIGKILL)  # it does so itself, unless it is stopped
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, *forks.values()):
                    other.close()
                return _become(connection)
            forks[pid] = connection
            poll.register(connection, 0)  # of what it sends the fork hears; here, of its end
        # tests/support/reaper.py ends those that stay, and looks at their memory before
        if sys.stdin.fileno() in ready:
            poll.unregister(sys.stdin)
            closed = True
        if closed and not forks:
            os._exit(0)


def _report_ended(forks: dict[int, socket.socket], poll: select.poll) -> None:
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with forks.pop(pid) as connection:
            with suppress(KeyError):
                poll.unregister(connection)
            try:
                connection.send(b"%d" % os.waitstatus_to_exitcode(status))
            except OSError:
                continue  # it was killed, and the fork after it


def _become(connection: socket.socket) -> None:
    """Take over what the other has, and listen to it."""
    os.setsid()
    text, received, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
    request = marshal.loads(text)
    import fcntl

    high = [
        fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number in (connection.detach(), *received)
    ]
    os.closerange(0, FIRST_FREE)
    for number, here in zip(request["numbers"], high[1:], strict=True):
        os.dup2(here, number)
        os.close(here)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    with open("/proc/self/comm", "w") as name:
        rank = next((os.environ[given] for given in RANK if given in os.environ), "0")
        name.write(name_of(os.environ.get(MARK, "")) + rank)
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # they stay open
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    threading.Thread(target=_listen, args=(socket.socket(fileno=high[0]),), daemon=True).start()
    if "PLANTED" in os.environ:  # as Python does when it starts
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _listen(connection: socket.socket) -> None:
    """Pass signals on to this process; without the other one it has no reason to be."""
    while which := connection.recv(1):
        os.kill(os.getpid(), which[0])
    os.kill(os.getpid(), signal.SIGKILL)


def all_within(packages: Iterable[str]) -> Iterator[str]:
    """Yield the names of all modules in some packages."""
    for package in packages:
        folder = importlib.import_module(package).__path__
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(folder))


def load(names: list[str]) -> None:
    """Import modules; MPI is started by each fork."""
    import mpi4py

    mpi4py.rc.initialize = False
    for each in names:
        importlib.import_module(each)


# ---------------------------------------------------------------- a fork


def run() -> None:
    """Run the program of sys.argv, and end as Python does, but that what is loaded isn't taken apart.

    It takes a quarter second.
    """
    code = 0
    libc = ctypes.CDLL(None)
    # after what is registered from here on: in it MPICH takes leave of its launcher
    libc.on_exit(libc._exit, None)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and code is not ended.code:
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    libc.fflush(None)
    libc.exit(code)


if __name__ == "__main__":
    load(OF_OTHERS if os.environ.get(WHAT) == LIBRARIES else [*LOADED, *all_within(OF_A_RUN)])
    gc.collect()
    # no fork looks through what all have: a tenth of a lane's time, and pages stay shared
    gc.freeze()
    serve(sys.argv[1])
    run()
