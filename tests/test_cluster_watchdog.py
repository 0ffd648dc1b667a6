"""Which rank a watchdog calls the first that is gone, in whatever state its own work was just then."""

import os
import socket

import pytest
from watched import Played, listener_at

from mpitrain.cluster.nodes import Meeting
from mpitrain.cluster.watchdog import ASKED, FAILED, MEET, READY, Watchdog


class Held(Watchdog):
    """A watchdog that is held up after its answer to a message, until `meanwhile` has happened."""

    def _send(self, rank, message):
        super()._send(rank, message)
        if message == READY and self.met:
            self.meanwhile()

    def _end(self, found, code=1, first=None):
        self.reports.append(found.text)


@pytest.fixture
def watched():
    """A watchdog, and two ranks that have greeted it; rank 0 has told it that these are all."""
    address = f"\0mpitrain-test-{os.urandom(8).hex()}"
    dog = Held(listener_at(address))
    ranks = [Played(address, number) for number in range(2)]
    told, stderr = Meeting(names=("here",)).written(), os.dup(2)
    socket.send_fds(ranks[0].connection, [MEET + b"2"], [stderr, told])
    os.close(told)
    os.close(stderr)
    dog.reports = []
    return dog, ranks


@pytest.mark.parametrize("first", range(2))
def test_the_first_that_is_gone_is_named_first_whoever_spoke_last(watched, first):
    """A launcher kills the others milliseconds later: a watchdog that gets no processor meanwhile finds all of them gone."""
    dog, ranks = watched

    def meanwhile():
        ranks[first].die()
        ranks[1 - first].die()

    dog.meanwhile = meanwhile
    dog.run()
    assert [report.split(" in phase")[0] for report in dog.reports] == [f"mpitrain: rank {first}", f"mpitrain: rank {1 - first}"]


def test_what_a_rank_said_before_it_was_gone_counts(watched):
    dog, ranks = watched

    def meanwhile():
        ranks[1].connection.send(ASKED)
        ranks[1].connection.send(FAILED + b"1 mpitrain: rank 1: why")
        ranks[1].die()
        ranks[0].die()

    dog.meanwhile = meanwhile
    dog.run()
    assert dog.reports[0] == "mpitrain: rank 1: why"
