"""Device buffers on a machine without a device.

Their contents are there when a seeded clock says so, on each rank at another time.

A late tensor lies in host memory and tells comm/ that it lies on a device. Whatever is done with it
(copies to and from pinned memory, sums) is queued on a stream, as a GPU does it, and until it has
happened there is garbage. An event lets a little happen whenever it is asked. MPI is handed the
memory itself and sees what is there at that moment. So what is posted, matched, added or returned
too early, or in another order than it was started in, is a wrong number.

    MPITRAIN_EFFORT=all mpirun -n 4 python -m pytest --only-mpi -p
        no:cacheprovider tests/hardware/test_comm_device.py

Without MPITRAIN_EFFORT they run on 2 ranks only.
"""

from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import agree
from effort import cases

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.few_ranks]

SEEDS = cases(10, 500)
# the last goes through the window under `auto`, and by messages in two phases
LENGTHS = [1, 30, 4099, 40_000]
DTYPES = ["float32", "bfloat16", "int64"]  # sums of small integers are exact in all
MOST = 15  # operations in flight
GARBAGE = 113


# ---------------------------------------------------------------- the device


class Stream:
    """What is queued, in its order, and how much of it has happened. A held stream stands still."""

    def __init__(self):
        self.queue = []
        self.happened = 0
        self.held = False

    def run(self, number: int | None = None) -> None:
        for place in range(self.happened, len(self.queue))[:number]:
            self.queue[place]()
            self.queue[place] = None  # its buffers may go
            self.happened += 1


class CopiedEvent:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        self.stream = stream
        self.place = len(stream.queue)

    def query(self):
        self.device.tick()
        return self.stream.happened >= self.place


class CopiedDevice:
    """Some streams and a clock. `current` is what torch calls the current stream."""

    def __init__(self, monkeypatch, num_streams):
        import torch

        self.streams = [Stream() for _ in range(num_streams)]
        self.current, self.tensor = self.streams[0], late_tensor(self)
        self.carried = {"to the host": 0, "back": 0}  # elements
        self.seed(0)
        monkeypatch.setattr(torch.cuda, "Event", lambda: CopiedEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)

    def seed(self, *numbers):
        self.random = np.random.default_rng(numbers)
        # how often something has happened since the last look
        self.speed = self.random.choice([0.1, 0.4, 1])

    def tick(self):
        stream = self.streams[self.random.integers(len(self.streams))]
        if not stream.held and self.random.random() < self.speed:
            stream.run(self.random.integers(1, 4))

    @contextmanager
    def stream(self, number):
        self.current = self.streams[number]
        yield self.current
        self.current = self.streams[0]

    def put(self, values):
        """Return a tensor on this device that will hold `values`."""
        return garbage(values.clone()).as_subclass(self.tensor).copy_(values, non_blocking=True)

    def get(self, x):
        """Return what the next kernel of the current stream finds in `x`."""
        found = x.clone()
        self.current.run()
        return host(found)


def garbage(x):
    return x.fill_(GARBAGE)


def host(x):
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


# reshape: of what is contiguous
VIEWS = {"detach", "as_strided", "view", "reshape", "swapaxes", "__getitem__"}
FACTS = {
    "__len__",
    "__get__",
    "data_ptr",
    "is_contiguous",
    "is_neg",
    "stride",
    "numel",
    "__dlpack__",
    "__dlpack_device__",
}
IN_PLACE = {"copy_", "add", "add_"}  # torch.add(out=...)
MADE = {"clone", "float"}


def late_tensor(device):
    """Return the class of the tensors of `device`."""
    import torch

    class Late(torch.Tensor):
        is_cuda = True

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = function.__name__

            def run():
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)

            if name == "empty_like":  # pinned memory, which torch makes beside a device only
                assert kwargs == {"device": "cpu", "pin_memory": True}
                return garbage(torch.empty_like(host(args[0])))
            assert name in {*VIEWS, *FACTS, *IN_PLACE, *MADE, "new_empty"}, (
                f"{name} has no counterpart on this device"
            )
            if name == "copy_" and not all(isinstance(x, cls) for x in args):
                assert kwargs == {"non_blocking": True}, "the rank would wait for this copy"
                device.carried["back" if isinstance(args[0], cls) else "to the host"] += args[0].numel()
            if name in IN_PLACE:
                device.current.queue.append(run)
                return kwargs.get("out", args[0])
            found = run()
            if name in MADE:
                device.current.queue.append(lambda: found.copy_(run()))
            if name in {*MADE, "new_empty"}:
                garbage(found)
            return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found

    return Late


# ---------------------------------------------------------------- what every operation has to give


class DeviceExchange:
    """The n-th operation of a round.

    The same kind, length and numbers on all ranks, and which rank gave what.
    """

    def __init__(self, setting, random, n):
        import torch

        self.axis = setting.mesh["dp"]
        self.links = setting.links
        self.device = setting.device
        self.n = n
        self.me, self.size = self.axis.rank, self.axis.size
        self.random = random
        self.length = int(random.choice(LENGTHS))
        self.dtype = getattr(torch, random.choice(DTYPES))
        self.key = int(random.integers(1 << 30))
        self.on_host = False
        self.allocated = setting.mesh.allocated
        self.num_buffers = -1

    def values(self, rank, length=None):
        import torch

        numbers = np.random.default_rng([self.key, rank]).integers(
            0, 16, self.length if length is None else length
        )
        return torch.from_numpy(numbers).to(self.dtype)

    def buffer(self, values):
        """Return a buffer on the device, or on the host and then, if there is room, in memory which
        the axis allocated.
        """
        if not self.on_host:
            return self.device.put(values)
        self.num_buffers += 1
        room = self.allocated[self.n, self.num_buffers][: values.nbytes].view(values.dtype)
        return room.copy_(values) if len(room) == len(values) else values.clone()

    def out(self, length):
        return self.buffer(garbage(self.values(0, length)))

    def total(self):
        return sum(self.values(rank) for rank in range(self.size))

    def shard(self, x):
        from mpitrain.comm.base.grid import split

        return x[slice(*split(len(x), self.size)[self.me : self.me + 2])]


def all_reduce(case):
    from mpitrain.comm.collectives import all_reduce

    x = case.buffer(case.values(case.me))
    return [(all_reduce(x, case.axis), x, case.total())]


def reduce_scatter(case):
    from mpitrain.comm.collectives import reduce_scatter

    x = case.buffer(case.values(case.me))
    expected = case.shard(case.total())
    pending = reduce_scatter(x, case.axis, case.out(len(expected)) if case.random.random() < 0.5 else None)
    return [(pending, None, expected), (pending, x, case.values(case.me))]


def reduce_scatter_in_place(case):
    from mpitrain.comm.collectives import reduce_scatter

    expected = case.values(case.me)
    case.shard(expected).copy_(case.shard(case.total()))
    x = case.buffer(case.values(case.me))
    return [(reduce_scatter(x, case.axis, case.shard(x)), x, expected)]


def reduce(case):
    from mpitrain.comm.collectives import reduce

    root = int(case.random.integers(case.size))
    x = case.buffer(case.values(case.me))
    given = case.random.random() < 0.5  # drawn alike on all ranks
    pending = reduce(x, case.axis, root, case.out(case.length) if given and case.me == root else None)
    summed = [(pending, None, case.total())] if case.me == root else []
    return [*summed, (pending, x, case.values(case.me))]


def reduce_in_place(case):
    from mpitrain.comm.collectives import reduce

    root = int(case.random.integers(case.size))
    x = case.buffer(case.values(case.me))
    is_root = case.me == root
    return [
        (
            reduce(x, case.axis, root, x if is_root else None),
            x,
            case.total() if is_root else case.values(case.me),
        )
    ]


def gather(case):
    from mpitrain.comm.collectives import gather

    root = int(case.random.integers(case.size))
    shard = case.buffer(case.shard(case.values(0)))
    pending = gather(shard, case.axis, case.length, root)
    whole = [(pending, None, case.values(0))] if case.me == root else []
    return [*whole, (pending, shard, case.shard(case.values(0)))]


def scatter(case):
    from mpitrain.comm.collectives import scatter

    root = int(case.random.integers(case.size))
    expected = case.shard(case.values(0))
    x = case.buffer(case.values(0)) if case.me == root else None
    return [(scatter(x, case.axis, case.out(len(expected)), case.length, root), None, expected)]


def all_gather(case):
    from mpitrain.comm.collectives import all_gather

    shard = case.buffer(case.shard(case.values(0)))
    return [(all_gather(shard, case.axis, case.out(case.length)), None, case.values(0))]


def broadcast(case):
    from mpitrain.comm.collectives import broadcast

    root = int(case.random.integers(case.size))
    x = case.buffer(case.values(case.me))
    return [(broadcast(x, case.axis, root), x, case.values(root))]


def all_to_all(case):
    from mpitrain.comm.collectives import all_to_all

    x = case.buffer(case.values(case.me, case.length * case.size))
    pending = all_to_all(x, case.axis)
    expected = [
        case.values(r, case.length * case.size)[case.me * case.length :][: case.length]
        for r in range(case.size)
    ]
    return [(pending, None, joined(expected)), (pending, x, case.values(case.me, len(x)))]


def all_to_all_v(case):
    from mpitrain.comm.collectives import all_to_all_v

    counts = case.random.integers(0, case.length + 1, (case.size, case.size)) * (
        case.random.random((case.size, case.size)) < 0.7
    )
    sent = counts[case.me].tolist()
    received = counts[:, case.me].tolist()
    x = case.buffer(case.values(case.me, sum(sent)))
    pending = all_to_all_v(x, sent, received, case.axis, case.out(sum(received)))
    expected = [
        case.values(r, sum(counts[r]))[sum(counts[r, : case.me]) :][: received[r]] for r in range(case.size)
    ]
    return [(pending, None, joined(expected)), (pending, x, case.values(case.me, sum(sent)))]


def shift(case):
    from mpitrain.comm.collectives import shift

    distance = int(case.random.integers(-1, 3))
    x = case.buffer(case.values(case.me))
    pending = shift(x, case.axis, distance, case.out(case.length))
    return [
        (pending, None, case.values((case.me - distance) % case.size)),
        (pending, x, case.values(case.me)),
    ]


def link(case):
    """To the right, and from the left."""
    right = (case.me + 1) % case.size
    left = (case.me - 1) % case.size
    x = case.buffer(case.values(case.me))
    sent = case.links.send("F", right, case.n, x, right)
    received = case.links.receive("F", case.me, case.n, case.out(case.length), left)
    return [(sent, x, case.values(case.me)), (received, None, case.values(left))]


def barrier(case):
    from mpitrain.comm.collectives import barrier

    x = case.values(case.me)
    return [(barrier(case.axis), x, x)]


OPERATIONS = [
    all_reduce, reduce, reduce_in_place, reduce_scatter, reduce_scatter_in_place, all_gather, gather,
    scatter, broadcast, all_to_all,
    all_to_all_v, shift, link, barrier,
]  # fmt: skip


def joined(parts):
    import torch

    return torch.cat(list(parts))


# ---------------------------------------------------------------- the tests


@pytest.fixture(params=["messages", "collectives", "shared", "auto", "direct"], scope="module")
def mesh(request):
    """Staged by each transport, under `auto` with a progress thread.

    And direct, as under a CUDA-aware MPI, by messages always.
    """
    import torch
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    way = request.param
    transport = "auto" if way == "direct" else way
    progress = "thread" if way == "auto" else "poll"
    grid = Grid({"dp": COMM_WORLD.size})
    axes = {name: range(COMM_WORLD.size) for name in ("dp", "links", "other")}
    axes["alone"] = [COMM_WORLD.rank]
    mesh = Mesh(COMM_WORLD, grid, axes, transport=transport, timeout_s=30, progress=progress)
    for name in ("dp", "links", "other"):
        mesh[name].device_aware = way == "direct"
    mesh.allocated = torch.from_numpy(mesh["dp"].allocate(2 * MOST << 19)).view(MOST, 2, 1 << 19)
    yield mesh
    del mesh.allocated
    mesh.free()


@pytest.fixture
def setting(mesh, monkeypatch):
    from mpitrain.comm.links import Links

    # direct buffers are added on the stream of the moment
    device = CopiedDevice(monkeypatch, 1 if mesh["dp"].device_aware else 3)
    # ranks that share cores wait for one another
    seeds = range(SEEDS if mesh.size <= 4 else SEEDS // 4)
    return SimpleNamespace(mesh=mesh, device=device, links=Links(mesh["links"], mesh.size, MOST), seeds=seeds)


def play(setting, operations, seed, number=5, sometimes_host=False):
    """Start a number of operations, look at them now and then, wait for them in any order.

    Return what went wrong.
    """
    import torch

    device = setting.device
    mesh = setting.mesh
    alike = np.random.default_rng(seed)
    own = np.random.default_rng([seed, mesh.rank])
    device.seed(seed, mesh.rank)
    started = []
    for n in range(number):
        case = DeviceExchange(setting, alike, n)
        case.on_host = sometimes_host and alike.random() < 0.4
        operation = operations[alike.integers(len(operations))]
        with device.stream(own.integers(len(device.streams))):
            started += [
                (f"{n} {operation.__name__} of {case.length} {case.dtype}", *check)
                for check in operation(case)
            ]
        for _ in range(own.integers(3)):
            mesh.progress.poll()
    wrong = []
    for i in own.permutation(len(started)):
        what, pending, x, expected = started[i]
        result = pending.wait()
        x = result if x is None else x
        with device.stream(own.integers(len(device.streams))):
            found = device.get(x) if isinstance(x, device.tensor) else x
        if not torch.equal(found, expected):
            wrong.append(f"seed {seed}: {what}: {found[:4].tolist()} for {expected[:4].tolist()}")
    mesh.progress.drain()
    return wrong


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_several_of_one_kind_give_what_they_should_whenever_their_data_is_there(setting, operation):
    wrong = [found for seed in setting.seeds for found in play(setting, [operation], seed)]
    agree(setting.mesh["dp"].comm, not wrong, f"{len(wrong)} wrong: {wrong[:3]}")


def test_all_kinds_in_flight_together_give_what_they_should(setting):
    wrong = [
        found
        for seed in setting.seeds
        for found in play(setting, OPERATIONS, seed, number=MOST, sometimes_host=True)
    ]
    agree(setting.mesh["dp"].comm, not wrong, f"{len(wrong)} wrong: {wrong[:3]}")


def test_only_what_is_read_is_carried_to_the_host_and_only_what_is_written_back(setting):
    import torch

    from mpitrain.comm import collectives

    n = 40_000
    device = setting.device
    axis = setting.mesh["dp"]
    shard, x, out, part = (
        device.put(torch.ones(length)) for length in (n // axis.size, n, n, n // axis.size)
    )
    right = (axis.rank + 1) % axis.size
    left = (axis.rank - 1) % axis.size
    starts = {  # with what is carried there and back
        "all_reduce": (lambda: collectives.all_reduce(x, axis), n, n),
        "reduce_scatter": (lambda: collectives.reduce_scatter(x, axis, part), n, n // axis.size),
        "all_gather": (lambda: collectives.all_gather(shard, axis, out), n // axis.size, n),
        "reduce": (
            lambda: collectives.reduce(x, axis, 1, out if axis.rank == 1 else None),
            n,
            n if axis.rank == 1 else 0,
        ),
        "gather": (
            lambda: collectives.gather(shard, axis, n, 1, out if axis.rank == 1 else None),
            len(shard),
            n * (axis.rank == 1),
        ),
        "scatter": (
            lambda: collectives.scatter(x if axis.rank == 1 else None, axis, part, n, 1),
            n * (axis.rank == 1),
            len(part),
        ),
        "broadcast": (lambda: collectives.broadcast(x, axis, 1), n if axis.rank == 1 else 0, n),
        "all_to_all": (lambda: collectives.all_to_all(x, axis, out), n, n),
        "shift": (lambda: collectives.shift(x, axis, 1, out), n, n),
        "send": (lambda: setting.links.send("F", right, 0, x, right), n, 0),
        "receive": (lambda: setting.links.receive("F", axis.rank, 0, out, left), 0, n),
    }
    wrong = []
    pending = []
    for name, (start, there, back) in starts.items():
        device.carried.update({"to the host": 0, "back": 0})
        pending.append(start())
        if name != "send":  # it may end only when all have come to `receive`
            pending[-1].wait()
            expected = (
                {"to the host": 0, "back": 0} if axis.device_aware else {"to the host": there, "back": back}
            )
            wrong += [] if device.carried == expected else [f"{name}: {device.carried} for {expected}"]
    pending[-2].wait()
    agree(axis.comm, not wrong, f"{wrong}")


def test_what_a_rank_sends_to_itself_is_handed_to_mpi_as_what_it_sends_to_others(setting):
    """Collectives of one rank hand nothing over, and leave a device's memory to the device."""
    import torch

    from mpitrain.comm.links import Links

    device = setting.device
    axis = setting.mesh["alone"]
    if direct := setting.mesh["dp"].device_aware:
        axis.device_aware = True
    links = Links(axis, 1, 1)
    wrong = []
    for seed in setting.seeds:
        device.seed(seed, setting.mesh.rank)
        x, out = (device.put(torch.full((4099,), value)) for value in (float(seed + 1), 0.0))
        device.carried.update({"to the host": 0, "back": 0})
        sent = links.send("F", 0, 0, x, 0)
        links.receive("F", 0, 0, out, 0).wait()
        sent.wait()
        straight = device.carried == {"to the host": 0, "back": 0}
        found = device.get(out)
        if straight != direct or not (found == seed + 1).all():
            wrong.append(f"seed {seed}: {device.carried}, {found[:4].tolist()}")
    agree(setting.mesh["dp"].comm, not wrong, f"{len(wrong)} wrong: {wrong[:3]}")


def test_sums_are_matched_in_the_order_of_their_start_when_one_rank_has_the_first_late(setting):
    import torch

    from mpitrain.comm.collectives import all_reduce

    device = setting.device
    axis = setting.mesh["dp"]
    started = []
    device.speed = 1
    device.streams[0].held = axis.rank == 0
    for stream, value in ((0, 1.0), (-1, 100.0)):
        with device.stream(stream):
            started.append(all_reduce(device.put(torch.full((4099,), value)), axis))
        for _ in range(100):
            axis.progress.poll()
    device.streams[0].held = False
    found = [device.get(pending.wait())[0].item() for pending in started]
    agree(axis.comm, found == [axis.size, 100.0 * axis.size], f"{found}")


def test_an_axis_of_one_rank_carries_nothing_to_the_host_and_has_nobody_wait_for_the_device(setting):
    import torch

    from mpitrain.comm import collectives

    device = setting.device
    axis = setting.mesh["alone"]
    wrong = []
    x = device.put(torch.arange(40_000.0))
    out = device.put(torch.zeros(40_000))
    device.carried.update({"to the host": 0, "back": 0})
    device.streams[0].held = True
    for name, start in {
        "all_reduce": lambda: collectives.all_reduce(x, axis),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, axis, out),
        "all_gather": lambda: collectives.all_gather(x, axis, out),
        "reduce": lambda: collectives.reduce(x, axis, 0, out),
        "gather": lambda: collectives.gather(x, axis, 40_000, 0, out),
        "scatter": lambda: collectives.scatter(x, axis, out, 40_000),
        "broadcast": lambda: collectives.broadcast(x, axis),
        "all_to_all": lambda: collectives.all_to_all(x, axis, out),
        "all_to_all_v": lambda: collectives.all_to_all_v(x, [40_000], [40_000], axis, out),
        "shift": lambda: collectives.shift(x, axis, 1, out),
    }.items():
        wrong += [] if start().done else [f"{name} waits"]
    device.streams[0].held = False
    wrong += [] if torch.equal(device.get(out), torch.arange(40_000.0)) else ["the result"]
    agree(
        setting.mesh["dp"].comm, not wrong and not any(device.carried.values()), f"{wrong} {device.carried}"
    )


def test_an_axis_does_not_wait_for_another_whose_data_is_late(setting):
    import torch

    from mpitrain.comm.collectives import all_reduce

    device = setting.device
    mesh = setting.mesh
    device.streams[0].held = True
    late = all_reduce(device.put(torch.ones(40_000)), mesh["dp"])
    ready = all_reduce(torch.ones(40_000), mesh["other"]).wait()
    waiting = not late.done
    device.streams[0].held = False
    found = device.get(late.wait())
    agree(
        mesh["other"].comm,
        waiting and (ready == mesh.size).all() and (found == mesh.size).all(),
        f"{waiting} {ready} {found}",
    )


def test_who_waits_for_its_own_device_blames_nobody_and_is_behind(setting, monkeypatch):
    """Not with the operation that is late, and not with one that has to wait for its turn after it."""
    import torch

    from mpitrain.cluster.hang_analysis import Rank, report
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.errors import HangError

    device = setting.device
    axis = setting.mesh["dp"]
    progress = setting.mesh.progress
    place = RankStatus(axis.rank, f"rank {axis.rank}")
    late = axis.rank == 0
    for name, value in {"place": place, "timeout_s": 0.5}.items():
        monkeypatch.setattr(progress, name, value)
    before = progress.waited_for()
    places = []
    device.speed = 1
    device.streams[0].held = late
    first = all_reduce(device.put(torch.ones(4099)), axis)
    # the others overtake
    with device.stream(-1 if setting.mesh.transport in ("collectives", "shared") else 0):
        second = all_reduce(device.put(torch.ones(4099)), axis)
    for pending in (second, first):
        for _ in range(20):  # at first rank 1, too, has a device to wait for
            with suppress(HangError):
                pending.wait()
            if place.read().waits_for and (late or place.read().waiting_on):
                break
        places.append(place.read())
        place.waits_no_more()
    wrong = [] if {where.waiting_on for where in places} == ({()} if late else {(0,)}) else [f"{places}"]
    wrong += [] if late == (progress.waited_for() == before) else [f"{before} {progress.waited_for()}"]
    every = axis.comm.allgather(places)
    device.streams[0].held = False
    progress.timeout_s = 30
    wrong += (
        [] if all(device.get(pending.wait())[0] == axis.size for pending in (first, second)) else ["the sums"]
    )
    for each in zip(*every):
        found = report([Rank(where, "here", "S", "", 1.0) for where in each])
        wrong += (
            []
            if found.behind == (0,) and "its own device: all_reduce of 16396 bytes on dp" in found.text
            else [found.text]
        )
    agree(axis.comm, not wrong, f"{wrong}")


def test_a_barrier_waits_for_every_rank_and_for_no_data(setting):
    import torch

    from mpitrain.comm.collectives import all_reduce, barrier

    device = setting.device
    axis = setting.mesh["dp"]
    device.streams[0].held = True
    late = all_reduce(device.put(torch.ones(4099)), axis)
    last = axis.rank == axis.size - 1
    started = None if last else barrier(axis)
    early = sum(started.test() for _ in range(200)) if started else 0
    axis.comm.Barrier()  # the others have looked
    (started or barrier(axis)).wait()
    device.streams[0].held = False
    found = device.get(late.wait())
    agree(axis.comm, not early and (found == axis.size).all(), f"{early} {found}")


def test_a_refused_operation_leaves_no_gap_in_the_order(setting, monkeypatch):
    import torch

    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.transports import mpi_collectives
    from mpitrain.errors import DtypeError

    axis = setting.mesh["dp"]
    whole = [100] * (setting.mesh.size + 1)
    with monkeypatch.context() as patch:
        patch.setattr(mpi_collectives, "LIMIT", 99)
        with pytest.raises(DtypeError):
            mpi_collectives.exchange(torch.ones(100), whole, torch.ones(100), whole, axis)
    found = all_reduce(torch.ones(30), axis).wait()
    agree(axis.comm, (found == axis.size).all(), f"{found}")


def test_what_matches_an_operation_is_taken_by_a_plain_call():
    """A generator would take it when its data is there."""
    import inspect

    from mpitrain.comm.transports import messages, mpi_collectives, shared

    names = (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "exchange",
        "shift",
        "reduce",
        "gather",
        "scatter",
    )
    late = [
        (m.__name__, name)
        for m in (messages, mpi_collectives, shared)
        for name in names
        if inspect.isgeneratorfunction(getattr(m, name))
    ]
    assert not late


@pytest.mark.sizes(4)
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_over_two_nodes_all_kinds_give_what_they_should(direct, monkeypatch):
    """In two levels there is memory of the device between them, which MPI writes and the device
    reads, and the other way round.
    """
    import torch
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.links import Links
    from mpitrain.comm.mesh import Mesh

    grid = Grid({"dp": COMM_WORLD.size})
    axes = {name: range(COMM_WORLD.size) for name in ("dp", "links")}
    mesh = Mesh(COMM_WORLD, grid, axes, timeout_s=30, nodes=[rank // 2 for rank in range(COMM_WORLD.size)])
    for axis in mesh.axes.values():
        for level in filter(None, (axis, axis.near, axis.far)):
            level.device_aware = direct
    assert mesh["dp"].near is not None
    mesh.allocated = torch.from_numpy(mesh["dp"].allocate(2 * MOST << 19)).view(MOST, 2, 1 << 19)
    device = CopiedDevice(monkeypatch, 1 if direct else 3)
    links = Links(mesh["links"], mesh.size, MOST)
    setting = SimpleNamespace(mesh=mesh, device=device, links=links)
    wrong = [
        found
        for seed in range(SEEDS)
        for found in play(setting, OPERATIONS, seed, number=MOST, sometimes_host=True)
    ]
    agree(mesh["dp"].comm, not wrong, f"{len(wrong)} wrong: {wrong[:3]}")
    del mesh.allocated
    mesh.free()
