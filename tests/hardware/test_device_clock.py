"""Times on a GPU are the device's, not those of launches; and nobody waits for it within a step.

On a device that is late.
"""

import json

import pytest
from conftest import agree
from late_device import Device

SEEDS = range(20)


@pytest.fixture(params=SEEDS)
def device(request):
    return Device(request.param)


@pytest.fixture
def clock(device):
    from mpitrain.parallel.device_clock import DeviceClock

    return DeviceClock(device.timed)


def test_a_mark_comes_when_what_was_queued_is_over(device, clock):
    marks = [clock.mark()]
    for seconds in (3, 0, 5):
        device.busy(seconds)
        marks.append(clock.mark())
    assert device.num_waits == 0
    assert [clock.seconds(*pair) for pair in zip(marks, marks[1:])] == [3, 0, 5]


def test_a_trace_has_the_times_of_the_device(device, clock):
    from mpitrain.actor.trace import Recorder
    from mpitrain.schedules.actions import parse

    recorder = Recorder(range(2, 3), clock)
    for step in (1, 2, 3):
        recorder.begin(step)
        waits = device.num_waits
        for text, seconds in (("F0@0", 3), ("F1@0", 4), ("B0@0", 6)):
            begin = recorder.mark()
            device.busy(seconds)
            recorder.add(parse(text), begin, recorder.mark())
        begin = recorder.mark()
        device.busy(9)
        recorder.add_pair(*map(parse, ("PAIR", "F2@0", "B1@0")), begin, recorder.mark())
        assert device.num_waits == waits
        recorder.end()
    zero = recorder.events[0][2]
    found = [
        (step, name, round(begin - zero, 6), round(end - zero, 6))
        for step, name, begin, end in recorder.events
    ]
    assert found == [
        (2, "F0@0", 0, 3), (2, "F1@0", 3, 7), (2, "B0@0", 7, 13), (2, "PAIR", 13, 13), (2, "F2@0", 13, 16),
        (2, "B1@0", 16, 22)
    ]  # fmt: skip


def test_time_begins_with_the_first_event_of_any_rank(tmp_path):
    from mpitrain.actor.trace import write_trace
    from mpitrain.schedules.catalog import build

    write_trace(
        tmp_path / "trace.json",
        [(0, 1, [(1, "F0@1", 503.0, 2.0, {})]), (0, 0, [(1, "F0@0", 500.0, 3.0, {})])],
        build("1f1b", 2, 1),
        1,
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("F0@1", 3e6, 2e6),
        ("F0@0", 0, 3e6),
    ]


def operation(arrives):
    """A message that has come when arrives() says so."""
    yield arrives


def test_a_wait_costs_what_the_device_stands_still_for(device, clock):
    """Of 4 s that the host waits, the device computes for 3: it is blocked for 1, and 3 are hidden.

    Nothing is waited for meanwhile.
    """
    from mpitrain.comm.meters.account import Account
    from mpitrain.comm.progress import Progress

    progress = Progress()
    account = Account()
    polls = []
    account.clock = clock

    def arrives():
        if not polls:
            polls.append("started")
            return False
        # the host waits for longer than the device computes ...
        device.compute.record().synchronize()
        device.num_waits -= 1
        device.idle(1)  # ... and this long it has nothing to do
        return True

    pending = progress.start(operation(arrives), "it", account)
    device.busy(3)
    pending.wait()
    device.busy(5)
    assert device.num_waits == 0
    used = account.read()
    assert (used.blocked_s, used.in_flight_s, used.overlapped_s) == pytest.approx((1, 4, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_the_ledger_of_a_mesh_has_the_times_of_the_device(world):
    """While a sum travels the device computes for 5 s, of which the host knows nothing."""
    import numpy as np

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh
    from mpitrain.parallel.device_clock import DeviceClock
    from mpitrain.training.checks.comm_report import Ledger

    device = Device(1)
    mesh = Mesh(world, Grid({"dp": world.size}), timeout_s=60)
    mesh.keep_time(DeviceClock(device.timed))
    ledger = Ledger(mesh)
    ledger.begin()
    pending = all_reduce(np.ones(300_000), mesh["dp"])
    travels = not pending.done  # of who comes last it may be over at once
    device.busy(5)
    pending.wait()
    waits = device.num_waits
    account = ledger.end()["dp"]
    mesh.free()
    agree(
        world,
        waits == 0 and (account["blocked_s"], account["overlapped_s"]) == (0, 5 * travels),
        f"{waits} waits, {account}",
    )


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_the_events_of_a_step_are_gone_when_it_has_been_read(world):
    """An axis of one rank makes none: its times aren't read."""
    from weakref import WeakSet

    import numpy as np

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh
    from mpitrain.parallel.device_clock import DeviceClock

    device = Device(1)
    events = WeakSet()

    def made():
        event = device.timed()
        events.add(event)
        return event

    mesh = Mesh(world, Grid({"dp": world.size, "alone": 1}), timeout_s=60)
    held = []
    mesh.keep_time(DeviceClock(made))
    for axis in ["alone"] * 3 + ["dp"] * 3:
        for _ in range(20):
            all_reduce(np.ones(4), mesh[axis]).wait()
        mesh.usage(), mesh.progress.waited_s
        device.finish()
        held.append(len(events))
    mesh.free()
    agree(world, held[:3] == [0, 0, 0] and max(held[3:]) < 5, f"{held}")
