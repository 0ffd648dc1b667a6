"""Collectives under every transport, for numpy and torch, against the same operation written with plain numpy."""

from functools import cache

import numpy as np
import pytest
from conftest import agree

pytestmark = pytest.mark.mpi

TRANSPORTS = ["messages", "collectives", "shared", "auto"]
LENGTHS = [0, 1, 2, 3, 7, 64, 1000, 4099, 70_001, 1_500_007]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]


@pytest.fixture(params=TRANSPORTS, scope="module")  # communicators are slow to make on more ranks than cores
def axis(request):
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(COMM_WORLD, Grid({"dp": COMM_WORLD.size}), transport=request.param, timeout_s=60)
    yield mesh["dp"]
    mesh.free()


def lengths(axis):
    """The longest is for 1 to 4 ranks: each rank computes what every rank should have."""
    return LENGTHS if axis.size <= 4 else LENGTHS[:-1]


@cache
def numbers(rank, length):
    return np.random.default_rng([rank, length]).standard_normal(length)


def values(rank, length, dtype, library="torch"):
    """Numbers that need rounding when added, different on every rank."""
    import torch

    x = torch.from_numpy(numbers(rank, length) * (50 if "int" in dtype else 1)).to(getattr(torch, dtype))
    return x.numpy() if library == "numpy" else x


@cache  # every transport is asked for the same
def expected_sum(size, length, dtype):
    """Neighbours in pairs, then pairs of pairs, what is left over last; 16-bit floats in fp32, rounded once."""
    import torch

    wide = torch.float32 if dtype in ("float16", "bfloat16") else getattr(torch, dtype)
    sums = [values(rank, length, dtype).to(wide) for rank in range(size)]
    while len(sums) > 1:
        sums = [sum(sums[i + 1 : i + 2], sums[i]) for i in range(0, len(sums), 2)]
    return sums[0].to(getattr(torch, dtype))


def same(a, b):
    import torch

    return torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_is_the_sum_of_neighbours_in_pairs(axis, dtype):
    from mpitrain.comm.collectives import all_reduce

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length, dtype)
        all_reduce(x, axis).wait()
        if not same(x, expected_sum(axis.size, length, dtype)):
            wrong.append(length)
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
def test_all_reduce_takes_numpy_arrays(axis, dtype):
    from mpitrain.comm.collectives import all_reduce

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length, dtype, "numpy")
        all_reduce(x, axis).wait()
        if not same(x, expected_sum(axis.size, length, dtype)):
            wrong.append(length)
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_reduce_scatter_gives_each_rank_its_shard_and_keeps_the_input(axis, dtype):
    from mpitrain.comm.collectives import reduce_scatter
    from mpitrain.comm.grid import split

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length, dtype)
        shard = reduce_scatter(x, axis).wait()
        begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
        ok = same(shard, expected_sum(axis.size, length, dtype)[begin:end]) and same(x, values(axis.rank, length, dtype))
        wrong += [] if ok else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
def test_all_gather_puts_every_shard_in_its_place(axis, dtype):
    import torch

    from mpitrain.comm.collectives import all_gather
    from mpitrain.comm.grid import split

    wrong = []
    for length in lengths(axis):
        whole, bounds = values(99, length, dtype), split(length, axis.size)
        out = torch.zeros_like(whole)
        all_gather(whole[bounds[axis.rank] : bounds[axis.rank + 1]], axis, out).wait()
        wrong += [] if same(out, whole) else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


def test_broadcast_from_every_root(axis):
    from mpitrain.comm.collectives import broadcast

    wrong = []
    for root in range(axis.size):
        for length in lengths(axis):
            x = values(axis.rank, length, "float32")
            broadcast(x, axis, root).wait()
            wrong += [] if same(x, values(root, length, "float32")) else [(root, length)]
    agree(axis.comm, not wrong, f"wrong at (root, length) {wrong}")


def test_all_to_all_is_its_own_inverse(axis):
    from mpitrain.comm.collectives import all_to_all

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length * axis.size, "float16")
        there = all_to_all(x, axis).wait()
        expected = [values(r, length * axis.size, "float16")[axis.rank * length : (axis.rank + 1) * length] for r in range(axis.size)]
        came = all(same(there[r * length : (r + 1) * length], expected[r]) for r in range(axis.size))
        wrong += [] if came and same(all_to_all(there, axis).wait(), x) else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


def test_all_to_all_v_with_counts_of_zero_and_of_many(axis):
    from mpitrain.comm.collectives import all_to_all_v

    def count(source, target):
        return (source * 7 + target * 3) % 5 * 40_000

    sent = [count(axis.rank, r) for r in range(axis.size)]
    received = [count(r, axis.rank) for r in range(axis.size)]
    out = all_to_all_v(values(axis.rank, sum(sent), "float32"), sent, received, axis).wait()
    expected, at = [], 0
    for r in range(axis.size):
        begin = sum(count(r, t) for t in range(axis.rank))
        total = sum(count(r, t) for t in range(axis.size))
        expected.append(same(out[at : at + received[r]], values(r, total, "float32")[begin : begin + received[r]]))
        at += received[r]
    agree(axis.comm, all(expected), f"parts right: {expected}")


@pytest.mark.parametrize("distance", [1, -1, 3, 0])
def test_shift_takes_what_the_rank_so_far_behind_has(axis, distance):
    from mpitrain.comm.collectives import shift

    wrong = []
    for length in lengths(axis):
        x, out = values(axis.rank, length, "bfloat16"), values(99, length, "bfloat16")
        came = shift(x, axis, distance, out).wait()
        ok = same(came, values((axis.rank - distance) % axis.size, length, "bfloat16")) and same(came, out)
        wrong += [] if ok and same(x, values(axis.rank, length, "bfloat16")) else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


@pytest.mark.parametrize("distance", [1, 2])
def test_shift_and_the_shift_back_are_adjoint(axis, distance):
    """<S x, z> = <x, S* z>, summed over the ranks."""
    from mpitrain.comm.collectives import shift

    x, z = (values(rank, 1000, "float64", "numpy") for rank in (axis.rank, axis.rank + 50))
    left = axis.comm.allreduce(float(shift(x, axis, distance).wait() @ z))
    right = axis.comm.allreduce(float(x @ shift(z, axis, -distance).wait()))
    agree(axis.comm, abs(left - right) < 1e-9 * (1 + abs(left)), f"{left} and {right}")


def test_shifts_both_ways_and_sums_are_in_flight_together(axis):
    from mpitrain.comm.collectives import all_reduce, shift

    x, y = values(axis.rank, 100_000, "float32"), values(axis.rank, 70_001, "float32")
    pending = [shift(x, axis, 1), all_reduce(y, axis), shift(x, axis, -1), shift(x, axis, 1)]
    found = [p.wait() for p in reversed(pending)]
    right, left = (values((axis.rank + d) % axis.size, 100_000, "float32") for d in (1, -1))
    ok = same(found[0], left) and same(found[1], right) and same(found[3], left) and same(y, expected_sum(axis.size, 70_001, "float32"))
    agree(axis.comm, ok)


def test_many_operations_in_flight_finish_in_any_order(axis):
    """Waited for in another order on every rank: each wait has to advance the operations of all."""
    from mpitrain.comm.collectives import all_gather, all_reduce, barrier, broadcast

    xs = [values(axis.rank, 1000 * i + 5, "float32") for i in range(12)]
    pending = []
    for i, x in enumerate(xs):
        pending.append(all_reduce(x, axis) if i % 3 else broadcast(x, axis, i % axis.size))
    gathered = np.zeros(axis.size)
    pending.append(all_gather(np.array([float(axis.rank)]), axis, gathered))
    pending.append(barrier(axis))
    for i in np.random.default_rng(axis.rank).permutation(len(pending)):
        pending[i].wait()
    ok = all(
        same(x, expected_sum(axis.size, 1000 * i + 5, "float32") if i % 3 else values(i % axis.size, 1000 * i + 5, "float32"))
        for i, x in enumerate(xs)
    )
    agree(axis.comm, ok and (gathered == range(axis.size)).all())


def test_wrong_buffers_are_refused_before_anything_is_sent(axis):
    import torch

    from mpitrain.comm.collectives import all_gather, all_reduce, all_to_all_v, broadcast, reduce_scatter, shift
    from mpitrain.errors import DtypeError

    attempts = [
        lambda: all_reduce(torch.zeros(4, 4).t(), axis),
        lambda: all_reduce(np.zeros((4, 4))[:, ::2], axis),
        lambda: all_reduce([1.0, 2.0], axis),
        lambda: all_reduce(np.array(["a"]), axis),
        lambda: reduce_scatter(torch.zeros(8), axis, out=torch.zeros(9)),
        lambda: reduce_scatter(torch.zeros(8), axis, out=torch.zeros(8 // axis.size, dtype=torch.float64)),
        lambda: all_gather(np.zeros(3), axis, out=np.zeros(3 * axis.size + 5 * axis.size)),
        lambda: all_to_all_v(np.zeros(3), [3] * (axis.size + 1), [3] * axis.size, axis),
        lambda: broadcast(np.zeros(3), axis, root=axis.size),
        lambda: shift(torch.zeros(8), axis, out=torch.zeros(9)),
        lambda: shift(torch.zeros(8), axis, out=torch.zeros(8, dtype=torch.int32)),
    ]
    refused = 0
    for attempt in attempts:
        try:
            attempt()
        except DtypeError:
            refused += 1
    agree(axis.comm, refused == len(attempts), f"{refused} of {len(attempts)} refused")


def test_buffers_the_axis_allocated_give_the_same_bits(axis):
    import torch

    from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter
    from mpitrain.comm.grid import split

    wrong = []
    for length in (1, 5, 4099, 300_001):
        for dtype in ("float32", "bfloat16"):
            x, width = values(axis.rank, length, dtype), getattr(torch, dtype).itemsize
            lent = torch.from_numpy(axis.allocate(length * width + 64)).view(getattr(torch, dtype))[3 : 3 + length]
            lent.copy_(x)
            begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
            shard = reduce_scatter(lent, axis).wait()
            ok = same(shard, expected_sum(axis.size, length, dtype)[begin:end]) and same(lent, x)
            all_reduce(lent, axis).wait()
            ok = ok and same(lent, expected_sum(axis.size, length, dtype))
            lent.zero_()
            all_gather(shard, axis, lent).wait()
            wrong += [] if ok and same(lent, expected_sum(axis.size, length, dtype)) else [(length, dtype)]
            del lent
    agree(axis.comm, not wrong, f"wrong: {wrong}")


def test_more_than_mpi_addresses_goes_by_messages_on_every_rank(world, monkeypatch):
    """Whatever a rank has itself: of an uneven exchange nobody knows the others' bytes, and the longest shard is the longest times all."""
    from mpitrain.comm import native
    from mpitrain.comm.collectives import all_to_all_v, reduce_scatter
    from mpitrain.comm.grid import Grid, split
    from mpitrain.comm.mesh import Mesh

    monkeypatch.setattr(native, "LIMIT", 999)
    mesh = Mesh(world, Grid({"dp": world.size}), transport="collectives", timeout_s=20)
    size, rank, axis = world.size, world.rank, mesh["dp"]
    sent = [750 * (rank == 0)] * size  # more than the limit from the first, nothing from the others
    got = all_to_all_v(np.full(sum(sent), 7, np.uint8), sent, [750] + [0] * (size - 1), axis).wait()
    ok, wrong = len(got) == 750 and (got == 7).all(), []
    for length in (999 - 8 * size, 999 - size, 998, 999, 1000):
        shard = reduce_scatter(np.ones(length, np.uint8), axis).wait()
        begin, end = split(length, size)[rank : rank + 2]
        wrong += [] if len(shard) == end - begin and (shard == size).all() else [length]
    mesh.free()
    agree(world, ok and not wrong, f"got {len(got)}, wrong {wrong}")
