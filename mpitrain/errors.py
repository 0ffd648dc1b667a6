"""Every error a user can cause: what was found, what was needed, what to change, and its exit code.

This module is the bottom of the package: it imports nothing of ours.
"""

import sys
from collections.abc import Iterable

DONE = 0  # done
FAILED = 1  # failed, or the answer of a checking command is no; what was saved is whole
BAD_INPUT = 2  # refused: what was given can't work; a message says what to change
# left early with a checkpoint: start the same command again. EX_TEMPFAIL: batch schedulers requeue
STOPPED_EARLY = 75


class MpitrainError(Exception):
    """Something could not be done. everywhere: all ranks raise it, and one tells it."""

    exit_code = FAILED
    everywhere = False

    def __str__(self) -> str:
        return f"{type(self).__name__}: {super().__str__()}"


class InputError(MpitrainError):
    """The user gave something that cannot work. Reported once, before anything is written."""

    exit_code = BAD_INPUT


class ConfigError(InputError):
    """A configuration file, a --set option or a combination of settings."""


class MeshError(InputError):
    """A layout that does not fit the ranks that were started."""


class LibraryError(InputError):
    """A library of others that isn't installed, or that can't be loaded."""


class ScheduleError(InputError):
    """A pipeline schedule that is undefined, incomplete or would deadlock."""


class DataError(InputError):
    """A corpus or a tokenizer that cannot be read or is too small."""


class CheckpointError(InputError):
    """A run directory or a checkpoint that cannot be used."""


class WeightsError(InputError):
    """A folder of weights that another program wrote, or will read, that cannot be used."""


class StorageError(InputError):
    """A file that the system refuses to read or write."""


class StoppedEarly(MpitrainError):
    """A rank has to leave where there is nothing to save: in phase `where`, for this reason.
    kept: what isn't lost.
    """

    exit_code = STOPPED_EARLY

    def __init__(self, where: str, why: str, kept: str = "no step was made"):
        super().__init__(where, why, kept)
        self.where = where
        self.why = why
        self.kept = kept

    def __str__(self) -> str:
        leaves = f"the run leaves in phase {self.where}: {self.why}; {self.kept}"
        return f"mpitrain: {leaves}; run the same command to resume"


class DtypeError(MpitrainError):
    """A buffer that a collective cannot take: its dtype, length or layout. Nothing is sent."""


class MessageError(MpitrainError):
    """A message that isn't the one that was due: of another length, or of another operation."""


class DeliveryError(MpitrainError):
    """A message that MPI failed to deliver. A rank that has ended may be the reason."""


class RankLostError(MpitrainError):
    """Ranks that have died, and that no spare rank can replace."""


class HangError(MpitrainError):
    """A message that did not come within comm.timeout_s."""


def on_all_ranks(error: MpitrainError) -> MpitrainError:
    """Mark an error as one that all ranks raise; return it."""
    error.everywhere = True
    return error


def storage_fault(error: OSError) -> StorageError:
    """Return what to report of an error of the system that nothing else has reported."""
    where = " ".join(str(error.filename).splitlines())[:300] + ": " if error.filename else ""
    why = error.strerror or type(error).__name__
    return StorageError(f"{where}{why}; check the file system, then run the command again")


def library_fault(error: BaseException) -> LibraryError | None:
    """Return what to report of a failed import; None for another error, or one of our own code."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else "mpitrain"
    if name == "mpitrain":
        return None
    if isinstance(error, ModuleNotFoundError) and name:
        package = name.replace("_", "-")
        install = f"pip install {package}, or mpitrain again, which needs it"
        return LibraryError(f"{package} is not installed for {sys.executable}; {install}")
    reinstall = "reinstall it, or load the modules that it was built with"
    return LibraryError(f"a library can't be loaded: {error}; {reinstall}")


def counted(number: int, nouns: str, form: str = "") -> str:
    """Return a number with its noun: 1 microbatch, 12 microbatches. form: of it, for format()."""
    if number == 1 and nouns.endswith("ies"):
        nouns = nouns[:-3] + "y"
    elif number == 1:
        nouns = nouns[: -2 if nouns.endswith(("ches", "shes", "sses", "xes")) else -1]
    return f"{number:{form}} {nouns}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like what was typed, for a hint; "" if none is."""
    from difflib import get_close_matches  # ranks whose names are right do without: 0.2 MB each

    return next(iter(get_close_matches(name, [*known], 1)), "")


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint for a message: the nearest known name, or `otherwise`."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise
