"""Communicators that are revoked together, when a rank has died (ULFM: Open MPI 5, mpirun --with-ft ulfm).

To import it loads MPI: only runs with spare ranks do.
"""

from typing import cast

from mpitrain.comm.base.mpi import MPI


class RevocableComm(MPI.Intracomm):
    """A communicator that knows all that was made of it.

    family: it, and the communicators made of it and of those, but for what is freed.
    """

    family: list["RevocableComm"]

    @classmethod
    def first(cls, comm: MPI.Comm) -> "RevocableComm":
        """Return a communicator as the first of its family."""
        first = cls(comm)
        first.family = [first]
        return first

    def Split(self, color: int = 0, key: int = 0) -> "RevocableComm":
        """Split it; the new one belongs to the family."""
        return self._member(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "RevocableComm":
        """Split it by what ranks share; the new one belongs to the family."""
        return self._member(super().Split_type(split_type, key, info))

    def Dup(self, info: MPI.Info | None = None) -> "RevocableComm":
        """Duplicate it; the new one belongs to the family."""
        return self._member(super().Dup(info))

    def Free(self) -> None:
        """Free it. The family has it no more."""
        self.family[:] = [comm for comm in self.family if comm is not self]
        super().Free()

    def revoke_all(self) -> None:
        """End every wait on the family, here and on all its ranks, with an error of class ERR_REVOKED."""
        for comm in self.family:
            comm.Revoke()

    def _member(self, comm: MPI.Comm) -> "RevocableComm":
        if comm == MPI.COMM_NULL:
            return cast("RevocableComm", comm)
        member = RevocableComm(comm)
        member.family = self.family
        self.family.append(member)
        return member
