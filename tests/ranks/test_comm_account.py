"""What is counted of each operation.

Bytes equal to the formulas under every transport, and times that add up.
"""

import numpy as np
import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

TRANSPORTS = ["messages", "collectives", "shared"]
LENGTHS = [0, 1, 7, 1000, 4099, 131_073, 300_001]


@pytest.fixture(params=TRANSPORTS, scope="module")
def mesh(request):
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    every = range(COMM_WORLD.size)
    mesh = Mesh(
        COMM_WORLD,
        Grid({"dp": COMM_WORLD.size}),
        {"dp": every, "links": every},
        transport=request.param,
        timeout_s=60,
    )
    mesh.transport_name = request.param
    yield mesh
    mesh.free()


def operations(axis):
    """Return {operation: run it on a buffer of so many float32}, each leaving the bytes of the
    buffer that counts.
    """
    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        all_to_all_v,
        reduce_scatter,
        shift,
    )

    def gather(x):
        begin, end = split(len(x), axis.size)[axis.rank : axis.rank + 2]
        all_gather(x[begin:end].copy(), axis, x).wait()
        return x.nbytes

    def exchange(x):
        x = np.resize(x, len(x) // axis.size * axis.size)
        all_to_all(x, axis).wait()
        return x.nbytes

    def exchange_unequal(x):
        """Everything to the next rank but one element, which stays."""
        others = [(r - axis.rank) % axis.size == 1 for r in range(axis.size)]
        there = [len(x) * mine + (r == axis.rank) for r, mine in enumerate(others)]
        back = [len(x) * (((axis.rank - r) % axis.size) == 1) + (r == axis.rank) for r in range(axis.size)]
        all_to_all_v(np.ones(sum(there), np.float32), there, back, axis).wait()
        return x.nbytes if axis.size > 1 else 0

    def simple(operation, *more):
        return lambda x: operation(x, axis, *more).wait() is None or x.nbytes

    return {
        "all_reduce": simple(all_reduce),
        "reduce_scatter": simple(reduce_scatter),
        "shift": simple(shift, 1),
        "all_gather": gather,
        "all_to_all": exchange,
        "all_to_all_v": exchange_unequal,
    }


@pytest.mark.parametrize("limit", [1 << 30, 1 << 17])
def test_messages_and_bytes_are_those_of_the_formulas(mesh, monkeypatch, limit):
    """Where a message has at most `limit` bytes.

    Of 131,073 elements one shard is too long for as many as the others.
    """
    from mpitrain.comm.base import wire
    from mpitrain.comm.base.wire import sent_bytes, sent_messages

    monkeypatch.setattr(wire, "LIMIT", limit)
    axis = mesh["dp"]
    wrong = []
    for operation, run in operations(axis).items():
        for length in LENGTHS:
            if operation == "all_to_all_v" and 4 * length > limit:
                continue  # the formula is that of as much to each
            axis.account.log, before = [], axis.account.read()
            num_bytes = run(np.ones(length, np.float32))
            used = axis.account.read().minus(before)
            expected = sent_bytes(
                operation, num_bytes, axis.size, axis.rank, itemsize=4, transport=mesh.transport_name
            )
            messages = sent_messages(
                operation, num_bytes, axis.size, axis.rank, itemsize=4, transport=mesh.transport_name
            )
            if (
                axis.account.log != [(operation, num_bytes)]
                or used.calls != 1
                or (used.num_bytes, used.messages) != (expected, messages)
            ):
                wrong.append((operation, length, axis.account.log, used, expected))
    axis.account.log = None
    agree(axis.comm, not wrong, f"{wrong[:3]}")


def test_buffers_of_the_axis_are_counted_alike(mesh):
    """Gradient buckets lie in shared memory as a whole."""
    from mpitrain.comm.base.wire import sent_bytes
    from mpitrain.comm.collectives import all_reduce

    axis = mesh["dp"]
    x = axis.allocate(400_004).view(np.float32)
    before = axis.account.num_bytes
    all_reduce(x, axis).wait()
    expected = sent_bytes(
        "all_reduce", 400_004, axis.size, axis.rank, itemsize=4, transport=mesh.transport_name
    )
    agree(
        axis.comm,
        axis.account.num_bytes - before == expected,
        f"{axis.account.num_bytes - before} for {expected}",
    )


def test_shards_of_equal_size_are_the_textbooks():
    from mpitrain.comm.base.wire import sent_bytes, sent_messages

    n = 1 << 20
    size = 4
    assert [sent_messages("all_gather", num_bytes, size) for num_bytes in (0, size << 30, 11 << 30)] == [
        3,
        3,
        9,
    ]
    assert (
        sent_bytes("all_gather", n, size)
        == sent_bytes("reduce_scatter", n, size)
        == sent_bytes("all_to_all", n, size)
        == n * 3 // 4
    )
    assert (
        sent_bytes("all_reduce", n, size) == 2 * n * 3 // 4 and sent_bytes("all_reduce", 24, size) == 24 * 3
    )
    assert (
        sent_bytes("shift", n, size) == n and sent_bytes("shift", n, 1) == sent_bytes("all_reduce", n, 1) == 0
    )
    for transport in TRANSPORTS:
        ranks = [
            sent_bytes("all_reduce", 9000 * 4 + 4, size, rank, itemsize=4, transport=transport)
            for rank in range(size)
        ]
        assert sum(ranks) == 2 * 9001 * 4 * (size - 1)


def test_messages_are_counted_at_both_ends(mesh):
    from mpitrain.comm.links import Links

    axis = mesh["links"]
    links = Links(mesh["links"], mesh.size, 1)
    axis.account.log, before = [], axis.account.read()
    right = (mesh.rank + 1) % mesh.size
    left = (mesh.rank - 1) % mesh.size
    sent = links.send("F", right, 0, np.ones(100), right)
    links.receive("F", mesh.rank, 0, np.empty(100), left).wait()
    sent.wait()
    used = axis.account.read().minus(before)
    log = axis.account.log
    axis.account.log = None
    agree(axis.comm, log == [("send", 800), ("receive", 800)] and used[:2] == (2, 800), f"{log} {used}")


class SetClock:
    """Time that passes only when somebody says so; a nap in wait() takes a second."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += 1

    def operation(self, posting, arrives_at, adding):
        """An operation that takes the rank some seconds to start, and some when its message is there."""
        self.now += posting
        yield lambda: self.now >= arrives_at
        self.now += adding


@pytest.fixture
def clock(monkeypatch):
    from mpitrain.comm import progress
    from mpitrain.comm.meters import clocks

    clock = SetClock()
    monkeypatch.setattr(clocks, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "SPIN_S", 0)
    return clock


def test_computing_hides_and_waiting_does_not(clock):
    from mpitrain.comm.meters.account import Account, AxisUsage
    from mpitrain.comm.progress import Progress

    progress = Progress()
    account = Account()
    pending = progress.start(clock.operation(1, 6, 2), "it", account)
    clock.now += 3  # compute
    assert account.read() == AxisUsage(0, 0, blocked_s=1, in_flight_s=4)
    pending.wait()  # from 4 to 6, and the adding
    assert (
        account.read() == AxisUsage(0, 0, blocked_s=1 + 2 + 2, in_flight_s=8)
        and account.read().overlapped_s == 3
    )
    assert progress.waited_s == 4
    clock.now += 100
    pending.wait()
    assert account.read().in_flight_s == 8


def test_what_a_poll_copies_and_adds_is_not_hidden(clock):
    from mpitrain.comm.meters.account import Account
    from mpitrain.comm.progress import Progress

    progress = Progress()
    account = Account()
    progress.start(clock.operation(1, 6, 2), "it", account)
    for _ in range(10):
        clock.now += 1
        progress.poll()
    assert (account.read()[2:4], progress.waited_s) == ((3, 8), 0)


def test_side_by_side_counts_once_and_a_wait_belongs_to_what_is_waited_for(clock):
    from mpitrain.comm.meters.account import Account
    from mpitrain.comm.progress import Progress

    progress = Progress()
    one = Account()
    other = Account()
    first, second = (progress.start(clock.operation(0, at, 1), "it", one) for at in (5, 20))
    progress.start(clock.operation(0, 10, 1), "another", other)
    first.wait()  # 0 to 6
    clock.now += 2
    second.wait()  # 8 to 21; at 10 the other one arrived, and was added
    assert one.read()[2:4] == (6 + 13, 21)
    assert other.read()[2:4] == (0, 11)


def test_a_mesh_reports_axes_that_have_others(mesh):
    from mpi4py.MPI import COMM_WORLD

    usage = mesh.usage()
    expected = {"dp", "links"} if COMM_WORLD.size > 1 else set()
    agree(COMM_WORLD, set(usage) == expected, f"{usage}")
