"""Which MPI this is, and what started this process: what `mpitrain doctor` tells, and errors name."""

import ctypes
import os
from collections.abc import Mapping

from mpitrain.comm.base import launchers
from mpitrain.comm.base.mpi import MPI

LEVELS = ("single", "funneled", "serialized", "multiple")
READS_OTHERS = "MPIR_CVAR_CH4_CMA_ENABLE"  # MPICH: whether it reads messages where they lie (CMA)


def vendor() -> str:
    """Return who made this MPI, for example MPICH or Open MPI."""
    return MPI.get_vendor()[0]


def versions() -> str:
    """Return the versions of this MPI, of the standard it follows and of mpi4py."""
    import mpi4py

    version = ".".join(map(str, MPI.get_vendor()[1]))
    return f"{vendor()} {version}, standard {MPI.VERSION}.{MPI.SUBVERSION}, mpi4py {mpi4py.__version__}"


def name() -> str:
    """Return what the library calls itself, in one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].rstrip("\0").split())


def host() -> str:
    """Return what MPI calls this node."""
    return MPI.Get_processor_name()


def threads() -> str:
    """Return how far threads may enter MPI. Needs MPI to be initialised."""
    level = MPI.Query_thread()
    return next(name for name in LEVELS if getattr(MPI, f"THREAD_{name.upper()}") == level)


class _Symbol(ctypes.Structure):
    """What dladdr() fills in: the file, its place in memory, the nearest name before an address."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def loaded() -> ctypes.CDLL:
    """Return the library that mpi4py has loaded, as it is in memory; its `_name` is its path.

    It is the file that MPI_Init_thread lies in, as mpi4py's extension sees it. CDLL(None) doesn't
    see the libraries of wheels (mpi4py opens them with RTLD_LOCAL), but a tool that wraps MPI.
    """
    extension = ctypes.CDLL(MPI.__file__)
    found = _Symbol()
    begin = ctypes.cast(extension.MPI_Init_thread, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(begin, ctypes.byref(found)) or not found.file:
        return extension  # it finds what its own libraries have, too
    return ctypes.CDLL(os.fsdecode(found.file), mode=os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0))


class _Extent(ctypes.Structure):
    """What process_vm_readv(2) takes: where, and how many bytes."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def may_read_others() -> bool:
    """Return whether a process may read another one's memory: some containers forbid it.

    MPICH does so with messages of 8 KB and more (process_vm_readv, CMA). It is tried on this
    process's own memory, which such a container refuses, too; ptrace_scope MPICH looks at itself.
    """
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if read is None:  # no Linux, and no MPI that would call it
        return True
    here, there = (ctypes.create_string_buffer(1) for _ in range(2))
    to, of = (ctypes.byref(_Extent(ctypes.addressof(each), 1)) for each in (here, there))
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return bool(read(os.getpid(), to, one, of, one, no_flags) == 1)


def launcher() -> str | None:
    """Return what started this process, or None if nothing says so."""
    found = launchers.launch()
    if launchers.torchrun() and MPI.COMM_WORLD.size == 1:
        return "torchrun, which starts copies that MPI doesn't connect"
    return found.name if found else None


def contradiction(
    num_ranks: int, started: launchers.Launch | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Return variable and number of a launcher that started other ranks than MPI sees; else "", 0.

    A launcher leaves the variables of another one, whose shell it was started in: connected ranks
    need one that agrees. A rank alone may be one of N singletons: only the launcher that started it
    counts.
    """
    if num_ranks == 1:
        return (
            ("", 0)
            if started is None or not started.variable or started.size == 1
            else (started.variable, started.size)
        )
    said = [
        (name, int(environment[name])) for name in launchers.SIZES if environment.get(name, "").isdecimal()
    ]
    return ("", 0) if not said or num_ranks in dict(said).values() else said[0]
