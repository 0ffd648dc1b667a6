"""mpi4py's module MPI, loaded when it is first used; MeshError where that can't be.

from mpitrain.comm.base.mpi import MPI
"""

import os
from typing import TYPE_CHECKING, Any

from mpitrain.errors import MeshError

NOT_THERE = "cannot open shared object file: No such file or directory"
GET_ONE = (
    "on a cluster load its MPI (module avail lists them, then module load ...), on a laptop pip install mpich"
)
FROM_SOURCE = "pip install --force-reinstall --no-binary mpi4py mpi4py"
CHOOSE = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")  # variables by which mpi4py's wheels choose


class _Library:
    """Has what the module MPI has; the first use loads it. Raises MeshError then."""

    def __getattr__(self, name: str) -> Any:
        if "COMM_WORLD" in self.__dict__:
            raise AttributeError(f"mpi4py.MPI has no {name}")
        vars(self).update(vars(_load()))
        return getattr(self, name)


if TYPE_CHECKING:
    from mpi4py import MPI as MPI  # others import it from here
else:
    MPI = _Library()


def _load() -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # comm.base.world.connect() starts MPI, when the rank is guarded
        from mpi4py import MPI as found
    except (ImportError, RuntimeError) as error:
        raise MeshError(f"on {os.uname().nodename} {explain(error)}") from None
    return found


def explain(error: ImportError | RuntimeError) -> str:
    """Return why mpi4py can't be used, and what to do."""
    reasons = str(error).splitlines()
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        return "mpi4py is not installed; pip install mpi4py"
    if "cannot import name" in reasons[0] and CHOOSE[1] in os.environ:
        return f"mpi4py knows no {CHOOSE[1]}={os.environ[CHOOSE[1]]}; unset it, or set it to mpich or openmpi"
    chosen = "".join(f"; {name} is set to {os.environ[name]}" for name in CHOOSE if name in os.environ)
    if isinstance(error, RuntimeError):  # of the search of a wheel: a line for each name and folder
        faults = [line for line in reasons[1:] if not _tried(line)]
        if not faults:
            tried = ", ".join(dict.fromkeys(os.path.basename(line.partition(":")[0]) for line in reasons[1:]))
            return f"no MPI library is found (tried {tried}){chosen}; {_remedy(GET_ONE)}"
        return f"an MPI library is there but can't be loaded: {'; '.join(faults)}{chosen}; {_remedy(GET_ONE)}"
    if NOT_THERE in str(error):  # mpi4py was built for it, or MPI4PY_MPIABI says so
        return (
            f"the MPI library that mpi4py needs is not found: {reasons[-1]}{chosen}; {_remedy(GET_ONE)}, or "
            f"build mpi4py: {FROM_SOURCE}"
        )
    remedy = _remedy(f"load the MPI that mpi4py was built for, or build it for this one: {FROM_SOURCE}")
    return f"mpi4py and the MPI library don't match: {'; '.join(reasons)}{chosen}; {remedy}"


def _tried(reason: str) -> bool:
    """Return whether a file that was looked for isn't there; one that it needs has a plain name."""
    file, _, why = reason.partition(": ")
    return why == NOT_THERE and ("libmpi" in file or os.sep in file)


def _remedy(usual: str) -> str:
    chosen = [name for name in CHOOSE if name in os.environ]
    return (
        f"unset {' '.join(chosen)}, or {usual}"
        if chosen
        else f"{usual}; a library elsewhere: MPI4PY_LIBMPI=FILE"
    )
