"""Collectives under every transport, for numpy and torch, against the same operation written with
plain numpy.
"""

from functools import cache

import numpy as np
import pytest
from conftest import LONG, WITH_LONG, agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

TRANSPORTS = ["messages", "collectives", "shared", "auto"]
LENGTHS = [0, 1, 2, 3, 7, 64, 1000, 4099, 70_001, 1_500_007]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]


# communicators are slow to make on more ranks than cores
@pytest.fixture(params=TRANSPORTS, scope="module")
def axis(request):
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(COMM_WORLD, Grid({"dp": COMM_WORLD.size}), transport=request.param, timeout_s=60)
    yield mesh["dp"]
    mesh.free()


def lengths(axis):
    """The longest is for 1 and 2 ranks: each rank computes what every rank should have."""
    return LENGTHS if axis.size <= (4 if WITH_LONG else 2) else LENGTHS[:-1]


@cache
def numbers(rank, length):
    return np.random.default_rng([rank, length]).standard_normal(length)


@cache
def rounded(rank, length, dtype):
    import torch

    return torch.from_numpy(numbers(rank, length) * (50 if "int" in dtype else 1)).to(getattr(torch, dtype))


def values(rank, length, dtype, library="torch"):
    """Numbers that need rounding when added, different on every rank."""
    x = rounded(rank, length, dtype).clone()
    return x.numpy() if library == "numpy" else x


@cache  # every transport is asked for the same
def expected_sum(size, length, dtype):
    """Neighbours in pairs, then pairs of pairs, what is left over last; 16-bit floats in fp32,
    rounded once.
    """
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
    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import reduce_scatter

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length, dtype)
        shard = reduce_scatter(x, axis).wait()
        begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
        ok = same(shard, expected_sum(axis.size, length, dtype)[begin:end]) and same(
            x, values(axis.rank, length, dtype)
        )
        wrong += [] if ok else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
def test_all_gather_puts_every_shard_in_its_place(axis, dtype):
    import torch

    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import all_gather

    wrong = []
    for length in lengths(axis):
        whole = values(99, length, dtype)
        bounds = split(length, axis.size)
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


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "bfloat16",
        *(pytest.param(each, marks=LONG) for each in ("float32", "float16", "int64", "uint8")),
    ],
)
def test_reduce_gives_the_root_the_sum_and_keeps_the_input(axis, dtype):
    """The bits of all_reduce, on every root, in memory of its own or in the input."""
    import torch

    from mpitrain.comm.collectives import reduce

    wrong = []
    for root in range(axis.size):
        for length in lengths(axis):
            x = values(axis.rank, length, dtype)
            wanted = expected_sum(axis.size, length, dtype)
            found = reduce(x, axis, root).wait()
            ok = same(x, values(axis.rank, length, dtype))
            ok = ok and (same(found, wanted) if axis.rank == root else found is None)
            out = torch.zeros_like(x) if length % 2 else x
            reduce(x, axis, root, out if axis.rank == root else None).wait()
            ok = ok and (axis.rank != root or same(out, wanted))
            wrong += [] if ok else [(root, length)]
    agree(axis.comm, not wrong, f"wrong at (root, length) {wrong}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "float8_e4m3fn"])
def test_gather_and_scatter_are_inverse_from_every_root(axis, dtype):
    import torch

    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import gather, scatter

    wrong = []
    for root in range(axis.size):
        for length in lengths(axis):
            whole = values(99, length, dtype)
            begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
            part = torch.zeros_like(whole[begin:end])
            there = scatter(whole if axis.rank == root else None, axis, part, length, root).wait()
            ok = bits(there) == bits(part) == bits(whole[begin:end])
            found = gather(part, axis, length, root).wait()
            ok = ok and (found is None if axis.rank != root else bits(found) == bits(whole))
            if axis.rank == root:  # in place: the own part lies in the whole already
                here = whole.clone()
                again = whole.clone()
                again[:begin] = 0
                again[end:] = 0
            else:
                here, again = None, None
            own = part.clone() if here is None else here[begin:end]
            scatter(here, axis, own, length, root).wait()
            gather(own if again is None else again[begin:end], axis, length, root, again).wait()
            ok = ok and bits(own) == bits(part) and (again is None or bits(again) == bits(whole))
            wrong += [] if ok else [(root, length)]
    agree(axis.comm, not wrong, f"wrong at (root, length) {wrong}")


def bits(x):
    """Return the bytes of a tensor."""
    import torch

    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def test_reduce_gather_and_scatter_take_numpy_arrays_and_many_are_in_flight(axis):
    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import all_reduce, gather, reduce, scatter

    size = axis.size
    rank = axis.rank
    pending = []
    wrong = []
    for i in range(6):
        length = 3000 * i + 7
        root = i % size
        begin, end = split(length, size)[rank : rank + 2]
        whole = values(99, length, "float32", "numpy")
        at_root = rank == root
        pending.append(
            (
                reduce(values(rank, length, "float32", "numpy"), axis, root),
                expected_sum(size, length, "float32"),
                at_root,
            )
        )
        pending.append((gather(whole[begin:end].copy(), axis, length, root), whole, at_root))
        part = np.empty(end - begin, np.float32)
        pending.append(
            (scatter(whole.copy() if at_root else None, axis, part, length, root), whole[begin:end], True)
        )
        pending.append(
            (
                all_reduce(values(rank, length, "float32", "numpy"), axis),
                expected_sum(size, length, "float32"),
                True,
            )
        )
    for at in np.random.default_rng(rank).permutation(len(pending)):
        operation, wanted, here = pending[at]
        found = operation.wait()
        wrong += [] if (same(found, wanted) if here else found is None) else [int(at)]
    agree(axis.comm, not wrong, f"wrong: {sorted(wrong)}")


def test_all_to_all_is_its_own_inverse(axis):
    from mpitrain.comm.collectives import all_to_all

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length * axis.size, "float16")
        there = all_to_all(x, axis).wait()
        expected = [
            values(r, length * axis.size, "float16")[axis.rank * length : (axis.rank + 1) * length]
            for r in range(axis.size)
        ]
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
    expected = []
    at = 0
    for r in range(axis.size):
        begin = sum(count(r, t) for t in range(axis.rank))
        total = sum(count(r, t) for t in range(axis.size))
        expected.append(
            same(out[at : at + received[r]], values(r, total, "float32")[begin : begin + received[r]])
        )
        at += received[r]
    agree(axis.comm, all(expected), f"parts right: {expected}")


@pytest.mark.parametrize("distance", [1, -1, 3, 0])
def test_shift_takes_what_the_rank_so_far_behind_has(axis, distance):
    from mpitrain.comm.collectives import shift

    wrong = []
    for length in lengths(axis):
        x = values(axis.rank, length, "bfloat16")
        out = values(99, length, "bfloat16")
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

    x = values(axis.rank, 100_000, "float32")
    y = values(axis.rank, 70_001, "float32")
    pending = [shift(x, axis, 1), all_reduce(y, axis), shift(x, axis, -1), shift(x, axis, 1)]
    found = [p.wait() for p in reversed(pending)]
    right, left = (values((axis.rank + d) % axis.size, 100_000, "float32") for d in (1, -1))
    ok = (
        same(found[0], left)
        and same(found[1], right)
        and same(found[3], left)
        and same(y, expected_sum(axis.size, 70_001, "float32"))
    )
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
        same(
            x,
            expected_sum(axis.size, 1000 * i + 5, "float32")
            if i % 3
            else values(i % axis.size, 1000 * i + 5, "float32"),
        )
        for i, x in enumerate(xs)
    )
    agree(axis.comm, ok and (gathered == range(axis.size)).all())


def refused(size, rank, axis):
    """Return what DtypeError is raised for, by what is wrong."""
    import torch

    from mpitrain.comm import collectives as c
    from mpitrain.comm.base.grid import split

    x = np.arange(8.0)
    own = slice(*split(8, size)[rank : rank + 2])
    fixed = np.ones(8)
    part = np.ones(own.stop - own.start)
    fixed.flags.writeable = False
    narrow = torch.ones(8).to(torch.float8_e5m2)
    counts = [0] * size
    return {
        "a transposed tensor": lambda: c.all_reduce(torch.zeros(4, 4).t(), axis),
        "every other column": lambda: c.all_reduce(np.zeros((4, 4))[:, ::2], axis),
        "a list": lambda: c.all_reduce([1.0, 2.0], axis),
        "text": lambda: c.all_reduce(np.array(["a"]), axis),
        "no shard": lambda: c.reduce_scatter(torch.zeros(8), axis, out=torch.zeros(9)),
        "another dtype": lambda: c.reduce_scatter(torch.zeros(8), axis,
            out=torch.zeros(8 // size, dtype=torch.float64)),
        "another length": lambda: c.all_gather(np.zeros(3), axis, out=np.zeros(3 * size + 5 * size)),
        "too many counts": lambda: c.all_to_all_v(np.zeros(3), [3] * (size + 1), [3] * size, axis),
        "no root": lambda: c.broadcast(np.zeros(3), axis, root=size),
        "half a root": lambda: c.broadcast(np.zeros(3), axis, root=0.5),
        "a longer output": lambda: c.shift(torch.zeros(8), axis, out=torch.zeros(9)),
        "an output of integers": lambda: c.shift(torch.zeros(8), axis, out=torch.zeros(8, dtype=torch.int32)),
        "float8 summed": lambda: c.all_reduce(narrow, axis),
        "float8 summed on one rank": lambda: c.reduce(narrow, axis),
        "float8 summed in shards": lambda: c.reduce_scatter(narrow, axis),
        "a complex tensor": lambda: c.all_reduce(torch.ones(8, dtype=torch.complex64), axis),
        "complex numbers": lambda: c.broadcast(np.ones(8, complex), axis),
        "bool summed": lambda: c.all_reduce(torch.ones(8, dtype=torch.bool), axis),
        "bool of numpy summed": lambda: c.reduce(np.ones(8, bool), axis),
        "big-endian": lambda: c.all_reduce(np.ones(8, ">f2"), axis),
        "big-endian moved": lambda: c.shift(np.ones(8, ">i4"), axis),
        "a matrix": lambda: c.all_reduce(np.matrix(np.ones((2, 4))), axis),
        "a masked array": lambda: c.all_reduce(np.ma.masked_equal(np.arange(8.0), 3), axis),
        "a record array": lambda: c.broadcast(np.ones(8).view(np.recarray), axis),
        "read-only": lambda: c.all_reduce(fixed, axis),
        "read-only, broadcast": lambda: c.broadcast(fixed, axis),
        "read-only output": lambda: c.shift(x, axis, out=fixed),
        "read-only output of a gather": lambda: c.all_gather(part, axis, fixed),
        "read-only output of an exchange": lambda: c.all_to_all(np.ones(8 // size * size), axis,
            fixed[: 8 // size * size]),
        "read-only part": lambda: c.scatter(x if rank == 0 else None, axis, fixed[own], 8),
        "quantized": lambda: c.all_reduce(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8),
            axis),
        "sparse": lambda: c.all_reduce(torch.eye(4).to_sparse(), axis),
        "negated": lambda: c.shift(torch._neg_view(torch.arange(8.0)), axis),
        "a tensor of another class": lambda: c.all_reduce(_fake(), axis),
        "half a distance": lambda: c.shift(x, axis, 0.5),
        "counts of floats": lambda: c.all_to_all_v(np.ones(0), [0.0] * size, counts, axis),
        "a part for a whole": lambda: c.gather(np.ones(9), axis, 8),
        "half a length": lambda: c.gather(part, axis, 8.0),
        "an output that isn't on the root": lambda: c.reduce(x, axis, (rank + 1) % size if size > 1 else 7,
            np.ones(8)),
        "an input that isn't on the root": lambda: c.scatter(x if rank or size == 1 else None, axis, part, 8,
            0 if size > 1 else 7),
    } | ({} if size == 1 else {  # of one rank nothing is sent
        "a meta tensor": lambda: c.all_reduce(torch.ones(8, device="meta"), axis),
        "a meta tensor shifted": lambda: c.shift(torch.ones(8, device="meta"), axis),
    })  # fmt: skip


def _fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        import torch

        return torch.ones(8)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_wrong_buffers_are_refused_before_anything_is_sent(axis, library):
    """On all ranks; the operation that comes next meets its own."""
    import torch

    from mpitrain.comm.collectives import all_reduce
    from mpitrain.errors import DtypeError

    cases = refused(axis.size, axis.rank, axis)
    wrong = []
    for name, attempt in cases.items():
        try:
            attempt()
            wrong.append(f"{name}: taken")
        except DtypeError:
            pass
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        y = np.full(5, axis.rank + 1.0) if library == "numpy" else torch.full((20_000,), axis.rank + 1.0)
        all_reduce(y, axis).wait()
        wrong += [] if (y == axis.size * (axis.size + 1) / 2).all() else [f"the sum after {name}"]
    agree(axis.comm, not wrong, "; ".join(wrong))


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("length", [8 * 5, 70_000 * 8])
def test_outputs_that_share_memory_with_the_input_are_right(axis, length, allocated):
    """On some ranks it is the part that may be, on others another: what comes next must meet its own, too."""
    import torch

    from mpitrain.comm import collectives as c
    from mpitrain.comm.base.grid import split

    begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
    own = end - begin
    wrong = []
    summed = expected_sum(axis.size, length, "float32")
    mine = values(axis.rank, length, "float32")
    left = (axis.rank - 1) % axis.size
    memory = axis.allocate(4 * (length + 3)) if allocated else np.zeros(4 * (length + 3), np.uint8)
    whole = torch.from_numpy(memory).view(torch.float32)

    def fresh(whole):
        whole[:length].copy_(mine)
        return whole[:length]

    def check(what, found, wanted):
        wrong.extend([] if same(found, wanted) else [what])

    for at in (0, 2):  # of the part, or beside it
        x = fresh(whole)
        check("reduce_scatter", c.reduce_scatter(x, axis, whole[at : at + own]).wait(), summed[begin:end])
        x = fresh(whole)
        found = c.reduce(x, axis, 0, whole[at : at + length] if axis.rank == 0 else None).wait()
        check("reduce", summed if found is None else found, summed)
        x = fresh(whole)
        whole[at : at + own].copy_(mine[:own])
        parts = torch.cat(
            [values(r, length, "float32")[: e - b] for r, (b, e) in enumerate(_parts(length, axis.size))]
        )
        check("all_gather", c.all_gather(whole[at : at + own], axis, x).wait(), parts)
        x = fresh(whole)
        whole[at : at + own].copy_(mine[:own])
        found = c.gather(whole[at : at + own], axis, length, 0, x if axis.rank == 0 else None).wait()
        check("gather", parts if found is None else found, parts)
        x = fresh(whole)
        found = c.scatter(x if axis.rank == 0 else None, axis, whole[at : at + own], length).wait()
        check("scatter", found, values(0, length, "float32")[begin:end])
        x = fresh(whole)
        check("shift", c.shift(x, axis, 1, whole[at : at + length]).wait(), values(left, length, "float32"))
        x = fresh(whole)
        equal = length // axis.size
        swapped = torch.cat(
            [values(r, length, "float32")[axis.rank * equal :][:equal] for r in range(axis.size)]
        )
        check("all_to_all", c.all_to_all(x, axis, whole[at : at + length]).wait(), swapped)
    del whole, x, found, memory
    agree(axis.comm, not wrong, f"wrong: {wrong}")


def _parts(length, size):
    from mpitrain.comm.base.grid import split

    bounds = split(length, size)
    return list(zip(bounds, bounds[1:]))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers_are_summed_modulo_their_range(axis, dtype):
    import torch

    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import all_reduce, reduce, reduce_scatter

    wrong = []
    width = np.dtype(dtype).itemsize
    for length in (3, 4099, 70_001):
        each = [
            np.random.default_rng([rank, length]).integers(0, 256, length * width, np.uint8).view(dtype)
            for rank in range(axis.size)
        ]
        wanted = each[0].copy()
        for other in each[1:]:
            wanted += other
        begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
        for x in (torch.from_numpy(each[axis.rank].copy()), each[axis.rank].copy()):
            shard = reduce_scatter(x, axis).wait()
            whole = reduce(x, axis, axis.size - 1).wait()
            ok = (np.asarray(shard) == wanted[begin:end]).all() and shard.dtype == x.dtype
            ok = ok and (whole is None or ((np.asarray(whole) == wanted).all() and whole.dtype == x.dtype))
            all_reduce(x, axis).wait()
            wrong += [] if ok and (np.asarray(x) == wanted).all() else [length]
    agree(axis.comm, not wrong, f"wrong at lengths {wrong}")


def test_buffers_the_axis_allocated_give_the_same_bits(axis):
    import torch

    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter

    wrong = []
    for length in (1, 5, 4099, 300_001):
        for dtype in ("float32", "bfloat16"):
            x = values(axis.rank, length, dtype)
            width = getattr(torch, dtype).itemsize
            lent = torch.from_numpy(axis.allocate(length * width + 64)).view(getattr(torch, dtype))[
                3 : 3 + length
            ]
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
    """Whatever a rank has itself.

    Of an uneven exchange nobody knows the others' bytes, and the longest shard is the longest times
    all.
    """
    from mpitrain.comm.base.grid import Grid, split
    from mpitrain.comm.collectives import all_to_all_v, reduce_scatter
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.transports import mpi_collectives

    monkeypatch.setattr(mpi_collectives, "LIMIT", 999)
    mesh = Mesh(world, Grid({"dp": world.size}), transport="collectives", timeout_s=20)
    size = world.size
    rank = world.rank
    axis = mesh["dp"]
    sent = [750 * (rank == 0)] * size  # more than the limit from the first, nothing from the others
    got = all_to_all_v(np.full(sum(sent), 7, np.uint8), sent, [750] + [0] * (size - 1), axis).wait()
    ok = len(got) == 750 and (got == 7).all()
    wrong = []
    for length in (999 - 8 * size, 999 - size, 998, 999, 1000):
        shard = reduce_scatter(np.ones(length, np.uint8), axis).wait()
        begin, end = split(length, size)[rank : rank + 2]
        wrong += [] if len(shard) == end - begin and (shard == size).all() else [length]
    mesh.free()
    agree(world, ok and not wrong, f"got {len(got)}, wrong {wrong}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_sums_in_rounds_have_the_same_bits_and_take_no_more_memory(axis, monkeypatch, dtype):
    """A sum that is longer than a round, several of them at once.

    Whole and in rounds, the last of them short.
    """
    from mpitrain.comm.base import wire
    from mpitrain.comm.collectives import all_reduce, reduce_scatter

    found = []
    for size_of_round in (1 << 24, 1 << 14):
        monkeypatch.setattr(wire, "ROUND", size_of_round)
        monkeypatch.setattr(wire, "LEAST", 1 << 8)
        given = [values(axis.rank, length, dtype) for length in (70_001, 4099, 64, 70_001)]
        pending = [
            start(x, axis)
            for x in given
            for start in (reduce_scatter, lambda x, axis: all_reduce(x.clone(), axis))
        ]
        found.append([each.wait() for each in pending])
    agree(axis.comm, all(a.equal(b) for a, b in zip(*found, strict=True)), "other bits in rounds")


@pytest.mark.sizes(2)
def test_memory_of_a_sum_is_bounded():
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.base.mpi import MPI
    from mpitrain.comm.base.wire import ROOM
    from mpitrain.comm.collectives import reduce_scatter
    from mpitrain.comm.mesh import Mesh

    world = MPI.COMM_WORLD
    mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=60)
    x = np.ones(1 << 24, np.float32)  # 64 MiB, three times
    pending = [reduce_scatter(x, mesh["dp"]) for _ in range(3)]
    summed = [each.wait() for each in pending]
    most = mesh["dp"].scratch.most_bytes
    mesh.free()
    right = all((each == world.size).all() for each in summed)
    agree(world, right and most <= ROOM, f"{most} bytes for sums of {x.nbytes}")
