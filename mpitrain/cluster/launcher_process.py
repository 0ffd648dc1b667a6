"""The launcher above a node's ranks, for their watchdog: whether it lives, and that it ends.

    mpirun -- hydra_pmi_proxy -- ranks  MPICH: a stopped one of the two outlives its ranks
    prterun -- ranks                    Open MPI

Processes are held by descriptors (pidfd, Linux 5.3): numbers are reused.

Standard library only, and nothing of comm/: the watchdog starts without site-packages.
"""

import os
import select
import signal
import time
from contextlib import suppress

from mpitrain.cluster.processes import condition, name_of

PROXY = "hydra_pmi_proxy"
END_S = 0.05  # for a launcher that has closed its sockets to end


class LauncherProcess:
    """pids: of the launcher, then of what it has between it and the ranks.  descriptors: of the same."""

    def __init__(self, pids: list[int], descriptors: list[int]):
        self._pids = pids
        self.descriptors = descriptors
        # readable when the launcher has ended
        self.descriptor = descriptors[0] if descriptors else None
        self._names = [name_of(pid) for pid in pids]

    def __str__(self) -> str:
        return f"{self._names[0]}, process {self._pids[0]}"

    def is_gone(self) -> bool:
        """Return whether the launcher has ended, or does within END_S."""
        if self.descriptor is None:
            return False
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(1000 * END_S))

    def go_on(self) -> bool:
        """Continue those that are stopped: nobody else ends them. Return whether there were any."""
        processes = zip(self._pids, self.descriptors)
        stopped = [descriptor for pid, descriptor in processes if condition(pid) == "T"]
        for descriptor in stopped:
            with suppress(OSError):  # it has ended meanwhile
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        return bool(stopped)

    def fail(self, forward_s: float) -> None:
        """Have MPICH's launcher end with another code than 0: SIGHUP, under nohup SIGUSR2.

        It takes the end of a rank with 0 for success, be it before MPI_Finalize.
        forward_s: for the proxy, where it is all that is here, to forward what was said.
        """
        if PROXY not in self._names:
            return
        if self._names[0] == PROXY:
            time.sleep(forward_s)
        for number in (signal.SIGHUP, signal.SIGUSR2):
            with suppress(OSError):  # it has ended meanwhile
                signal.pidfd_send_signal(self.descriptors[0], number)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def to_arguments(self) -> list[int]:
        """Return numbers for the command line of a process that inherits the descriptors."""
        return [number for pair in zip(self._pids, self.descriptors) for number in pair]

    @staticmethod
    def from_arguments(numbers: list[int]) -> "LauncherProcess":
        return LauncherProcess(numbers[::2], numbers[1::2])
