"""Errors of MPI, with the operation that they came to."""

from collections.abc import Iterator, Sequence

from mpitrain.comm.base.mpi import MPI
from mpitrain.errors import DeliveryError, MessageError


def error_in_status(error: "MPI.Exception", statuses: "Sequence[MPI.Status]") -> "MPI.Exception":
    """Return the error of the first message that has one, where MPI says that one of several has.

    statuses: as the call that failed has left them, one a message.
    """
    if error.Get_error_class() != MPI.ERR_IN_STATUS:
        return error
    codes = [status.Get_error() for status in statuses]
    failed = [code for code in codes if MPI.Get_error_class(code) not in (MPI.SUCCESS, MPI.ERR_PENDING)]
    return MPI.Exception(failed[0]) if failed else error


def is_of_lost_rank(error: BaseException) -> bool:
    """Return whether an error or its cause says that a rank has died, to this rank or to another.

    That one has revoked a communicator (ULFM).
    """
    lost = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return tells_of_deaths() and any(
        isinstance(cause, MPI.Exception) and cause.Get_error_class() in lost for cause in _causes(error)
    )


def tells_of_deaths() -> bool:
    """Return whether this MPI has ULFM, by its error classes: every mpi4py 4.1 has the methods."""
    return MPI.ERR_PROC_FAILED != MPI.ERR_REVOKED


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def error_of_operation(what: object, error: "MPI.Exception") -> MessageError | DeliveryError:
    """Return what to raise for an error of MPI. what: the operation, or the agreement, that it came to."""
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return MessageError(
            f"{what}: received a longer message than expected ({error}); "
            "all ranks need the same configuration and code"
        )
    text = " ".join(str(error).split())  # MPICH's has a line for each function
    return DeliveryError(f"{what}: {text}; another rank has ended, or MPI can't read what it sends")
