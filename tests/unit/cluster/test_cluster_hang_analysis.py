"""Who is behind, of ranks whose places are known; and how the watchdogs of several nodes tell one another."""

import errno
import os
import resource
import select
import socket
import threading
import time
from dataclasses import replace

import pytest
from launch import patience
from watchdog_peer import PlayedRank, listener_at

from mpitrain.cluster import nodes, watchdog, watchdog_connections
from mpitrain.cluster.hang_analysis import Rank, at_fault, report
from mpitrain.cluster.limit import FIRST_S, LEAST_S, Limit
from mpitrain.cluster.nodes import Meeting, WatchdogNodes, addresses_here, unique_names
from mpitrain.cluster.status_board import (
    BUSY,
    HUNG,
    LEFT,
    SLOT,
    WAITING,
    WORKING,
    ExpectedInstruction,
    RankStatus,
    Where,
    read_slot,
)
from mpitrain.cluster.watchdog import WatchdogPhase
from mpitrain.cluster.watchdog_messages import GAVE_UP, READY


def rank(
    number: int,
    at: tuple[int, int],
    what: str,
    *,
    wait="",
    waiting_on=(),
    expected=("", -1),
    condition="S",
    state=WORKING,
    **more,
) -> Rank:
    """A rank at (step, position), which waits for the ranks `waiting_on` to run `expected`.

    Or for its own device, then `wait` says what for.
    """
    wait = f"a message of {expected[0]}" if waiting_on else wait
    where = Where(
        state,
        number,
        100 + number,
        0.0,
        5.0,
        *at,
        f"rank {number} (pp {number})",
        "step",
        what,
        wait,
        waiting_on,
        ExpectedInstruction(*expected),
    )
    return Rank(where, f"node{number // 2}", condition, "", 7.0, **more)


def pipeline(**first) -> list[Rank]:
    """Ranks 3, 2 and 1 each wait for the one before, and rank 0 for nobody."""
    behind = [
        rank(
            n,
            (7, 10),
            f"RECV_F1@{n}",
            waiting_on=(n - 1,),
            expected=(f"SEND_F1@{n - 1}", 8),
            gave_up=f"mpitrain: {n}",
        )
        for n in (1, 2, 3)
    ]
    return [rank(0, (7, 4), "F1@0", **first), *behind]


HOW = {"T": "stopped by a signal", "R": "it computes or is stuck", "D": "held in the kernel"}


@pytest.mark.parametrize(("condition", "how"), HOW.items())
def test_the_rank_that_waits_for_nobody_is_behind_and_what_it_owes_is_reported(condition, how):
    found = report(pipeline(condition=condition))
    (named,) = [line for line in found.text.splitlines() if "cause of the hang" in line]
    assert (
        found.behind == (0,)
        and "rank 0 (pp 0) at step 7, position 4, in phase step, F1@0, for 7 s" in named
        and how in named
    )
    assert "rank 0 owes SEND_F1@0, position 8 of its program, to rank 1" in found.text
    assert "ranks 1-3 wait for it in the end" in found.text


def test_a_stopped_rank_is_behind_though_it_had_been_waiting():
    """It was stopped while it waited for a message that came later.

    Its note is old, those who could continue say so.
    """
    ranks = [rank(0, (7, 6), "RECV_B0@0", waiting_on=(1,), expected=("SEND_B0@1", 5), condition="T")]
    ranks += [
        rank(
            1,
            (7, 9),
            "RECV_F1@1",
            waiting_on=(0,),
            expected=("SEND_F1@0", 8),
            state=HUNG,
            gave_up="mpitrain: 1",
        )
    ]
    found = report(ranks)
    assert found.behind == (0,) and "rank 0 owes SEND_F1@0" in found.text


def test_a_rank_that_waits_for_its_own_device_is_behind():
    """It gave up a wait as the others did, but nobody else could have ended it."""
    found = report(pipeline(wait="F0 for stage 1", state=HUNG, gave_up="mpitrain: 0"))
    assert found.behind == (0,) and "for 7 s: it waits for its own device: F0 for stage 1" in found.text
    assert "rank 0 owes SEND_F1@0" in found.text and "ranks 1-3 wait for it in the end" in found.text


def test_a_rank_that_nobody_waits_for_is_not_behind():
    free = rank(4, (7, 2), "F0@4")
    assert report([*pipeline(), free]).behind == (0,)


def test_a_message_that_was_sent_and_has_not_come_is_lost():
    waiting = rank(2, (7, 10), "RECV_F1@2", waiting_on=(1,), expected=("SEND_F1@1", 8), gave_up="mpitrain: 2")
    sender = rank(1, (7, 11), "RECV_B0@1", waiting_on=(2,), expected=("SEND_B0@2", 14), gave_up="mpitrain: 1")
    found = report([waiting, sender])
    assert (
        found.behind == ()
        and "rank 1 on node0 has run SEND_F1@1, and rank 2 on node1 waits for it" in found.text
    )
    assert "SEND_B0@2" not in found.text


def test_a_node_that_reports_nothing_is_named_and_no_rank_is_blamed_for_it():
    found = report(pipeline()[1:], silent=["node0"])
    assert "node node0 doesn't answer" in found.text and found.behind == ()


def test_ranks_that_all_wait_name_the_one_that_has_come_least_far():
    ranks = [rank(n, (7, 9 - n), "saving", state=WAITING, gave_up=f"mpitrain: {n}") for n in range(3)]
    assert "cause of the hang: rank 2" in report(ranks).text


def test_who_waits_for_a_rank_at_work_is_no_trouble_and_anything_else_is():
    waits = [
        rank(n, (0, 0), "for all ranks: saving", state=WAITING, gave_up="mpitrain: waits") for n in (0, 1)
    ]
    busy = rank(2, (0, 0), "writing a shard", state=BUSY, condition="D")
    assert not at_fault([*waits, busy]) and at_fault(waits)
    for changes in ({"late": True}, {"condition": "T"}, {"condition": ""}):
        assert at_fault([*waits, replace(busy, **changes)]), changes
    assert at_fault([*waits, busy, rank(3, (7, 1), "RECV_F1@1", state=HUNG)])


def test_a_rank_that_has_left_and_cannot_end_is_named():
    ends = rank(1, (0, 0), "leaving", state=LEFT, late=True)
    assert at_fault([ends, rank(0, (0, 0), "at work", state=BUSY)]) and "rank 1" in report([ends]).text
    assert not at_fault([replace(ends, late=False), rank(0, (0, 0), "at work", state=BUSY)])


def test_many_ranks_are_named_in_few_words():
    ranks = [rank(0, (7, 4), "F1@0", condition="T")]
    ranks += [
        rank(n, (7, 9), "NORM", waiting_on=(0,), expected=("NORM", -1), gave_up=f"mpitrain: {n}")
        for n in range(1, 500)
    ]
    found = report(ranks).text
    assert (
        len(found.splitlines()) < 12
        and "ranks 1-499 wait for it in the end" in found
        and "and 491 more" in found
    )


def test_a_rank_travels_between_nodes_as_it_is():
    before = pipeline()[2]
    assert Rank.from_json(before.to_json()) == before


def test_a_wait_that_lasts_is_on_the_board_and_does_not_move_the_rank():
    slot = memoryview(bytearray(SLOT))
    place = RankStatus(3, "rank 3", 5.0)
    place.take(slot)
    place.moved(2, 9, "RECV_F1@1")
    since = read_slot(slot).since
    place.waits_for("F1 for stage 1", [0], ("SEND_F1@0", 4))
    where = read_slot(slot)
    assert (where.since, where.waits_for, where.waiting_on, where.expected) == (
        since,
        "F1 for stage 1",
        (0,),
        ("SEND_F1@0", 4),
    )
    place.moved(2, 10, "F1@1")
    assert (read_slot(slot).waits_for, read_slot(slot).waiting_on) == ("", ())


def test_a_limit_follows_the_steps_unless_it_is_given():
    limit = Limit(None)
    given = Limit(3.0)
    for step_s, expected in ((50.0, FIRST_S), (1.0, LEAST_S), (20.0, 200.0), (2.0, 200.0), (100.0, FIRST_S)):
        for each in (limit, given):
            each.took(step_s)
        assert (limit.seconds, given.seconds) == (expected, 3.0)


# ---------------------------------------------------------------- links between nodes


@pytest.fixture
def hub():
    door = socket.create_server(("", 0))
    nodes = WatchdogNodes(Meeting(0, ("a", "b"), addresses_here(), door.getsockname()[1], "secret"), door)
    yield nodes
    door.close()


def connected(hub: WatchdogNodes, token: str) -> tuple[WatchdogNodes, int]:
    """Connect node 1, with a token; return it, and the hub's descriptor of the link."""
    spoke = WatchdogNodes(Meeting(1, hub.meeting.names, hub.meeting.addresses, hub.meeting.port, token))
    thread = threading.Thread(target=spoke.connect)
    thread.start()
    descriptor = hub.accept()
    hub.hear(descriptor)
    thread.join(patience(10))
    return spoke, descriptor


def test_watchdogs_of_two_nodes_talk(hub):
    spoke, at_hub = connected(hub, "secret")
    assert [link.node for link in (*hub.links.values(), *spoke.links.values())] == [1, 0]
    long = "x" * 300_000
    (at_spoke,) = spoke.links
    sending = threading.Thread(target=spoke.broadcast, args=({"say": "board", "ranks": [long]},))
    sending.start()
    heard = []
    while not heard:
        heard = hub.hear(at_hub)
    sending.join(patience(10))
    hub.broadcast({"say": "over"})
    assert heard == [(1, {"say": "board", "ranks": [long]})] and spoke.hear(at_spoke) == [
        (0, {"say": "over"})
    ]


def test_a_link_that_took_half_a_line_is_closed(hub, monkeypatch):
    """The next line would follow the half one."""
    monkeypatch.setattr(nodes, "SEND_S", 0.1)
    spoke, at_hub = connected(hub, "secret")
    hub.broadcast({"say": "board", "ranks": ["x" * 100_000_000]})
    poll = select.poll()
    poll.register(at_hub, select.POLLIN)
    assert poll.poll(0) and hub.hear(at_hub) is None and not hub.links
    (at_spoke,) = spoke.links
    spoke.links[at_spoke].socket.settimeout(10)
    while (heard := spoke.hear(at_spoke)) is not None:
        assert heard == []
    assert not spoke.links


def test_what_a_hub_says_with_its_welcome_is_heard(hub, monkeypatch):
    """Both came before the spoke has looked."""
    sent = threading.Event()
    send = nodes.WatchdogLink.send

    def send_and_wait(link, message):
        done = send(link, message)
        if "token" in message:
            assert sent.wait(patience(10))
        return done

    def answer():
        hub.hear(hub.accept())
        hub.broadcast({"say": "where"})
        sent.set()

    monkeypatch.setattr(nodes.WatchdogLink, "send", send_and_wait)
    thread = threading.Thread(target=answer)
    thread.start()
    spoke = WatchdogNodes(Meeting(1, hub.meeting.names, hub.meeting.addresses, hub.meeting.port, "secret"))
    spoke.connect()
    thread.join(patience(10))
    (at_spoke,) = spoke.links
    spoke.links[at_spoke].socket.settimeout(5)
    assert spoke.hear(at_spoke) == [(0, {"say": "where"})]


class Node:
    """The watchdog of a node in a thread, with one rank that is what the test says."""

    def __init__(self, nodes: WatchdogNodes, rank: int, state: int, limit_s: float):
        self.address = f"\0mpitrain-test-{os.urandom(8).hex()}"
        self.watchdog = watchdog.Watchdog(listener_at(self.address), nodes, WatchdogPhase.WATCHING)
        self.thread = threading.Thread(target=self.watchdog.run, daemon=True)
        self.thread.start()
        self.rank = self.joined_by(rank, state, limit_s)

    def joined_by(self, rank: int, state: int, limit_s: float) -> PlayedRank:
        """Let a rank be known to the watchdog, and return it."""
        played = PlayedRank(self.address, rank, limit_s)
        played.place.enter("save", f"at work for rank {rank}", state)
        assert played.connection.recv(16).startswith(READY)
        played.connection.settimeout(0.1)
        return played

    def leave(self) -> None:
        """Let the rank be gone, and nobody come after it; the watchdog ends."""
        self.watchdog.connections.close_listener()
        self.rank.die()
        self.thread.join(patience(10))

    def asked_to_end(self) -> bool:
        try:
            return bool(self.rank.connection.recv(16))
        except TimeoutError:
            return False


def test_ranks_that_wait_for_one_at_work_on_another_node_wait_on(hub, monkeypatch, capfd):
    """Its limit is over, or nobody's: only when nobody works are those that wait too long in trouble."""
    monkeypatch.setattr(watchdog_connections, "LOOK_S", 0.05)
    for name, seconds in {
        "GATHER_S": 0.1,
        "ASK_S": 0.5,
        "ELSEWHERE_S": 0.5,
        "AGAIN_S": 0.2,
        "FORWARD_S": 0.0,
    }.items():
        monkeypatch.setattr(watchdog, name, seconds)
    spoke, _ = connected(hub, "secret")
    nodes = [Node(hub, 0, WORKING, 60.0), Node(spoke, 1, WAITING, 0.2)]
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert not any(node.asked_to_end() for node in nodes)
    nodes[0].rank.place.enter("save", "for all ranks", WAITING)
    nodes[0].rank.place.name("rank 0", 0.2)
    until = time.monotonic() + patience(30)
    while not any(node.asked_to_end() for node in nodes):
        assert time.monotonic() < until
    for node in nodes:
        node.leave()
    assert "waits for" in capfd.readouterr().err


def test_a_rank_that_gave_up_a_wait_and_is_gone_is_not_the_trouble(monkeypatch, capfd):
    """It has said what it waited for: who is behind is told, not that its process is gone."""
    monkeypatch.setattr(watchdog_connections, "LOOK_S", 0.05)
    for name, seconds in {"GATHER_S": 0.1, "FORWARD_S": 0.0}.items():
        monkeypatch.setattr(watchdog, name, seconds)
    node = Node(WatchdogNodes(), 0, WAITING, 60.0)
    gone = node.joined_by(1, WAITING, 60.0)
    gone.connection.send(GAVE_UP + b"1 mpitrain: rank 1 waits for rank 0")
    gone.die()
    until = time.monotonic() + patience(30)
    while not node.asked_to_end():
        assert time.monotonic() < until
    node.leave()
    said = capfd.readouterr().err
    assert "cause of the hang: rank 0" in said and "is gone" not in said


@pytest.fixture
def no_more_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(2)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_spoke_that_can_have_no_more_descriptors_reports_for_itself(hub, no_more_descriptors):
    spoke = WatchdogNodes(Meeting(1, hub.meeting.names, hub.meeting.addresses, hub.meeting.port, "secret"))
    spoke.connect()
    assert not spoke.links


def test_a_hub_that_can_have_no_more_descriptors_continues(hub, monkeypatch):
    def accept():
        raise OSError(errno.EMFILE, "on purpose")

    monkeypatch.setattr(hub, "accept", accept)
    node = Node(hub, 0, WORKING, 60.0)
    spoke = WatchdogNodes(Meeting(1, hub.meeting.names, hub.meeting.addresses, hub.meeting.port, "secret"))
    spoke.connect()
    assert not spoke.links and node.thread.is_alive()
    node.leave()
    assert not node.thread.is_alive()


STRANGE = [
    b'{"token": "guessed", "node": 1}\n',
    b"[1]\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 5000,
    b"[" * 5000 + b"\n",
]


@pytest.mark.parametrize("sent", STRANGE)
def test_a_stranger_is_sent_away(hub, sent):
    stranger = socket.create_connection(("127.0.0.1", hub.meeting.port), 5)
    stranger.sendall(sent)
    assert hub.hear(hub.accept()) is None and not hub.links
    stranger.close()


def test_a_spoke_whose_token_is_wrong_reports_for_itself(hub):
    spoke, _ = connected(hub, "another")
    assert not spoke.links and not hub.links


def test_a_watchdog_learns_where_to_meet_however_many_nodes_there_are():
    meeting = Meeting(
        3, tuple(f"node{number}" for number in range(20_000)), ("10.0.0.1", "127.0.0.1"), 4242, "secret"
    )
    assert Meeting.read(meeting.written()) == meeting


def test_nodes_of_one_name_get_unique_names():
    assert unique_names(["a", "a", "b"]) == ("a#0", "a#1", "b")
