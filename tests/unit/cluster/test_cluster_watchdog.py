"""Which rank a watchdog calls the first that is gone, in whatever state its own work was just then."""

import os
import re
import resource
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from launch import finished, patience
from watchdog_peer import PlayedRank, listener_at

from mpitrain.cluster import console
from mpitrain.cluster.nodes import Meeting, WatchdogNodes
from mpitrain.cluster.watchdog import Watchdog
from mpitrain.cluster.watchdog_messages import ASKED, BYE, FAILED, MEET, READY, REFUSED
from mpitrain.cluster.watchdog_rendezvous import connect


class Held(Watchdog):
    """A watchdog that is held up when it knows its ranks, until `meanwhile` has happened."""

    def _meet(self):
        super()._meet()
        if self.met:
            self.meanwhile()

    def _end(self, found, code=1, first=None, hides=False):
        self.reports.append(found.text)


@pytest.fixture
def watched():
    """A watchdog, and two ranks that have greeted it; rank 0 has told it that these are all."""
    address = f"\0mpitrain-test-{os.urandom(8).hex()}"
    dog = Held(listener_at(address))
    ranks = [PlayedRank(address, number) for number in range(2)]
    meeting_fd = Meeting(names=("here",)).written()
    stderr = os.dup(2)
    socket.send_fds(ranks[0].connection, [MEET + b"2"], [stderr, meeting_fd])
    os.close(meeting_fd)
    os.close(stderr)
    dog.reports = []
    return dog, ranks


@pytest.mark.parametrize("first", range(2))
def test_the_first_that_is_gone_is_named_first_whoever_spoke_last(watched, first):
    """A launcher kills the others milliseconds later.

    A watchdog that gets no processor meanwhile finds all of them gone.
    """
    dog, ranks = watched

    def meanwhile():
        ranks[first].die()
        ranks[1 - first].die()

    dog.meanwhile = meanwhile
    dog.run()
    assert [report.split(" in phase")[0] for report in dog.reports] == [
        f"mpitrain: rank {first}",
        f"mpitrain: rank {1 - first}",
    ]


@pytest.mark.parametrize(("reaped", "how"), [(False, ["(SIGKILL)"]), (True, [])])
def test_a_rank_that_ended_by_itself_is_named_before_one_that_was_killed(watched, reaped, how):
    """It closes what the launcher reads first, and gets no processor before its lifeline's turn."""
    dog, ranks = watched
    ends = [subprocess.Popen(["sh", "-c", line]) for line in ("kill -KILL $$", "exit 3")]
    for rank, process in zip(ranks, ends, strict=True):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        rank.place._pid = process.pid
        rank.place.moved(0, 0, "at work")
    if reaped:
        ends[0].wait()

    def meanwhile():
        for rank in ranks:
            rank.die()

    dog.meanwhile = meanwhile
    dog.run()
    for process in ends:
        process.wait()
    assert [re.findall(r"rank \d|\(.*\)", report) for report in dog.reports] == [
        ["rank 1", "(exit code 3)"],
        ["rank 0", *how],
    ]


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


class Events:
    """A poll that tells what it is given to tell, a batch at a time."""

    def __init__(self, batches):
        self._batches = batches

    def poll(self, timeout):
        return next(self._batches)

    def register(self, *which):
        """It is told what it tells."""

    unregister = register


def test_a_number_that_is_anothers_by_now_is_not_taken_for_its_first_owner(monkeypatch):
    """One batch tells that a rank leaves, that another comes, which gets a number of the first, and
    of the first once more.
    """
    address = f"\0mpitrain-test-{os.urandom(8).hex()}"
    door = listener_at(address)
    first = PlayedRank(address, 0)
    others = []
    there = []
    filled = []
    first.connection.send(BYE)

    def batches():
        connections = dog.connections
        listener = door.fileno()
        yield [(listener, 1)]
        (number,) = connections.connected
        yield [(number, 1)]
        (life,) = connections.lives
        others.append(connect(address))
        while not filled or filled[-1] < max(number, life):  # leave no lower number free
            filled.append(os.dup(2))
        yield [(number, 1), (listener, 1), (number, 1), (life, 16)]
        there.extend(connections.connected)
        assert set(there) <= {number, life}
        others[0].send(BYE)
        yield [(there[0], 1)]

    monkeypatch.setattr("mpitrain.cluster.watchdog_connections.select.epoll", lambda: Events(batches()))
    dog = Held(door)
    dog.run()
    for descriptor in filled:
        os.close(descriptor)
    assert len(there) == 1


def started_with(ulimit: str, address: str) -> None:
    script = f"from mpitrain.cluster.watchdog_rendezvous import start; start({address!r})"
    finished(
        ["bash", "-c", f'ulimit {ulimit}; exec "$0" -c "$1"', sys.executable, script], check=True, timeout=60
    )


@pytest.mark.parametrize("num_ranks", [60])
def test_there_may_be_more_ranks_than_a_shell_allows_descriptors(num_ranks):
    address = f"\0mpitrain-test-{os.urandom(8).hex()}"
    started_with("-Sn 64", address)
    ranks = [PlayedRank(address, number) for number in range(num_ranks)]
    for rank in ranks:
        rank.connection.settimeout(20)
        assert rank.connection.recv(16).startswith(READY)
    for rank in ranks:
        rank.connection.send(BYE)
        rank.die()


@pytest.mark.parametrize("most", [40, 41, 42])
def test_a_watchdog_that_can_have_no_more_descriptors_turns_away_and_continues(most):
    """A rank takes three: the first that it lacks is that of a connection, of a slot, or of a lifeline."""
    address = f"\0mpitrain-test-{os.urandom(8).hex()}"
    known = []
    started_with(f"-n {most}", address)
    for number in range(20):
        with suppress(OSError):  # closed at the other end
            rank = PlayedRank(address, number)
            rank.connection.settimeout(20)
            known += [rank] if rank.connection.recv(16).startswith(READY) else []
    meeting_fd = Meeting(names=("here", "there")).written()
    door = socket.create_server(("", 0))
    socket.send_fds(known[0].connection, [MEET + b"%d" % len(known)], [2, meeting_fd, door.fileno()])
    assert 5 < len(known) < 15 and known[0].connection.recv(16) in (READY, REFUSED)
    os.close(meeting_fd)
    door.close()
    for rank in known:
        rank.connection.send(BYE)
        rank.die()


@pytest.fixture
def beyond_select():
    """As many descriptors as hundreds of ranks have: select() takes no number above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2048:
        pytest.skip("may have no 2048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    held = [os.dup(2) for _ in range(1100)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nodes_meet_whatever_numbers_their_links_have(beyond_select):
    door = socket.create_server(("", 0))
    meeting = {
        "names": ("a", "b"),
        "addresses": ("127.0.0.1",),
        "port": door.getsockname()[1],
        "token": "secret",
    }
    hub = WatchdogNodes(Meeting(0, **meeting), door)
    spoke = WatchdogNodes(Meeting(1, **meeting))
    answers = threading.Thread(target=lambda: hub.hear(hub.accept()))
    answers.start()
    spoke.connect()
    answers.join(patience(10))
    assert {link.node for link in spoke.links.values()} == {0} and min(spoke.links) > 1023
    for each in (hub, spoke):
        for link in each.links.values():
            link.socket.close()
    door.close()


def test_lines_are_written_to_whatever_number(beyond_select):
    reads, writes = os.pipe()
    console.write(writes, "why")
    assert os.read(reads, 9) == b"why\n" and writes > 1023
    os.close(reads)
    os.close(writes)


STUCK = """
import os, time
[os.dup(2) for _ in range(1100)]
from mpitrain.cluster.guard import Guard
guard = Guard()
guard.place.name("rank 0", 0.1)
time.sleep(60)
"""


def test_a_rank_watches_its_limit_whatever_numbers_it_has(beyond_select):
    """Where no watchdog does."""
    done = finished([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "rank 0 in phase start, starting: is stuck" in done.stderr
