"""Communicators that are revoked together when a rank has died (ULFM: Open MPI 5, --with-ft ulfm).

A death while a communicator is made can raise an error on some of its ranks alone. They revoke what
they have; the others have one more, and may wait there for ever. So a thread of each rank looks
whether the first of them is revoked, and then revokes the rest.

To import it loads MPI: only runs with spare ranks do.
"""

import threading
from typing import cast

from mpitrain.comm.base.mpi import MPI
from mpitrain.errors import MeshError

LOOK_S = 0.5


class RevokedTogether:
    """A communicator, and those made of it and of those, but for what is freed."""

    def __init__(self, first: "RevocableComm"):
        self._first = first
        self._members = [first]
        self._lock = threading.Lock()  # nothing is freed while it is revoked
        self._is_revoked_here = threading.Event()

    def watch(self) -> None:
        """Have a thread revoke the rest once another rank has revoked the first, until this one does.

        Raises MeshError if no thread can be started.
        """
        try:
            threading.Thread(target=self._watch, name="mpitrain-revoke", daemon=True).start()
        except RuntimeError:
            raise MeshError("spare ranks: no thread can be started to see deaths; raise ulimit -u") from None

    def add(self, comm: "RevocableComm") -> None:
        with self._lock:
            self._members.append(comm)

    def remove(self, comm: "RevocableComm") -> None:
        with self._lock:
            self._members[:] = [member for member in self._members if member is not comm]

    def revoke(self) -> None:
        """End every wait on them, here and on all their ranks, with an error of class ERR_REVOKED."""
        self._is_revoked_here.set()
        self._revoke()

    def _revoke(self) -> None:
        with self._lock:
            for comm in self._members:
                if not comm.Is_revoked():
                    comm.Revoke()

    def _watch(self) -> None:
        while not self._is_revoked_here.wait(LOOK_S):
            if self._first.Is_revoked():
                self._revoke()


class RevocableComm(MPI.Intracomm):
    """A communicator that knows all that was made of it."""

    together: RevokedTogether

    @classmethod
    def first(cls, comm: MPI.Comm) -> "RevocableComm":
        """Return a communicator as the first of those that are revoked together."""
        first = cls(comm)
        first.together = RevokedTogether(first)
        return first

    def Split(self, color: int = 0, key: int = 0) -> "RevocableComm":
        """Split it; the new one is revoked with it."""
        return self._member(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "RevocableComm":
        """Split it by what ranks share; the new one is revoked with it."""
        return self._member(super().Split_type(split_type, key, info))

    def Dup(self, info: MPI.Info | None = None) -> "RevocableComm":
        """Duplicate it; the new one is revoked with it."""
        return self._member(super().Dup(info))

    def Free(self) -> None:
        """Free it. It is revoked no more."""
        self.together.remove(self)
        super().Free()

    def _member(self, comm: MPI.Comm) -> "RevocableComm":
        if comm == MPI.COMM_NULL:
            return cast("RevocableComm", comm)
        member = RevocableComm(comm)
        member.together = self.together
        self.together.add(member)
        return member
