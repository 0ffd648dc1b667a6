"""A rank as far as the watchdog of its node knows it, played by the process of a test."""

import os
import socket

from mpitrain.cluster.status_board import RankStatus, shared_slot
from mpitrain.cluster.watchdog_messages import GREETING
from mpitrain.cluster.watchdog_rendezvous import connect


class PlayedRank:
    """A rank that has greeted the watchdog behind an address. `die` is what the others see of its end."""

    def __init__(self, address: str, rank: int, limit_s: float = 60.0):
        lifeline, self._alive = os.pipe()
        slot, memory = shared_slot()
        self.place = RankStatus(rank, f"rank {rank}", limit_s)
        self.place.take(memory)
        self.connection = connect(address)
        socket.send_fds(self.connection, [GREETING], [slot, lifeline])
        os.close(slot)
        os.close(lifeline)

    def die(self) -> None:
        """Close what a process has open, in the order of the numbers, as the system does."""
        os.close(self._alive)
        self.connection.close()


def listener_at(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(2)
    return listener
