"""Collectives over axes that span nodes.

The bits of one level, each byte across once for each node, counted as predicted.
"""

import itertools

import numpy as np
import pytest
from conftest import EVERY, LONG, agree, but_for

from mpitrain.comm.base import wire

LENGTHS = [0, 1, 7, 64, 1000, 4096, 40_000]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int32"]
BUFFERS = [
    case
    for case in itertools.product(DTYPES, LENGTHS)
    if EVERY or case[0] == "float32" or case[1] in (7, 4096)
]
MAPS = {  # the node of each rank
    2: [[0, 1]],
    4: [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]],
    8: [
        [0] * 4 + [1] * 4,
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [0, 1] * 4,
        [0] * 3 + [1] * 3 + [2] * 2,
    ],
}
TRANSPORTS = ["messages", "collectives", "shared", "auto"]
LEAST_ROUND = 1000  # bytes: many rounds


def test_only_as_many_neighbours_on_each_node_make_levels():
    from mpitrain.comm.base.nodes import nodes_of

    assert nodes_of([5, 5, 9, 9, 2, 2]) == (2, 3)
    assert nodes_of([0, 0, 0, 1, 1, 1]) == (3, 2) and not nodes_of([0, 0, 0, 1, 1, 1]).sums
    for other in ([0], [0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 0, 0]):
        assert nodes_of(other) is None


@pytest.mark.parametrize(("m", "k"), [(2, 2), (4, 2), (2, 3), (8, 16)])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_node_sends_each_byte_across_once_to_each_other_node(m, k, operation):
    """By the formulas; in one level m times as often, but for what is gathered, of which each rank
    sends its own.
    """
    from mpitrain.comm.base.wire import phases, sent_bytes

    num_bytes = 4 * m * k * 4096
    across = 0
    for place, node in itertools.product(range(m), [0]):
        for far, each, length, width, _ in phases(
            operation, num_bytes, (place, m), (node, k), itemsize=4, narrow=False
        ):
            across += sent_bytes(each, length, k, node, itemsize=width) if far else 0
    times = 2 if operation == "all_reduce" else 1
    assert across == times * num_bytes * (k - 1) // k


def test_the_traffic_of_a_layout_knows_its_nodes():
    """A sum over 4 ranks: 2 N 3/4 in one level; on 2 nodes N inside and, of half the buffer, N/2 across.

    What can't goes in one.
    """
    from mpitrain.comm.base.wire import sent_over_nodes

    num_bytes = 1 << 20
    assert [sent_over_nodes("all_reduce", num_bytes, (2, 2), rank) for rank in range(4)] == [
        num_bytes + num_bytes // 2
    ] * 4
    assert sent_over_nodes("shift", num_bytes, (2, 2), 1) == num_bytes
    assert sent_over_nodes("reduce_scatter", num_bytes, (4, 2), 7) == num_bytes * 3 // 4 + num_bytes // 8


# ---------------------------------------------------------------- several ranks


def build(world, numbers, transport, levels=True):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    return Mesh(
        world, Grid({"dp": world.size}), transport=transport, timeout_s=60, nodes=numbers, levels=levels
    )


def values(rank, length, dtype):
    import torch

    x = np.random.default_rng([rank, length]).standard_normal(length) * (50 if "int" in dtype else 1)
    return torch.from_numpy(x).to(getattr(torch, dtype))


def results(axis, length, dtype):
    """Yield (operation, result on this rank, bytes of its buffer, that buffer) of every collective."""
    import torch

    from mpitrain.comm import collectives
    from mpitrain.comm.base.grid import split

    x = values(axis.rank, length, dtype)
    begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
    yield "all_reduce", collectives.all_reduce(x.clone(), axis).wait(), x
    out = torch.empty(end - begin, dtype=x.dtype)
    yield "reduce_scatter", collectives.reduce_scatter(x, axis, out).wait(), x
    whole = torch.zeros(length, dtype=x.dtype)
    yield "all_gather", collectives.all_gather(x[begin:end].clone(), axis, whole).wait(), x
    equal = x[: length // axis.size * axis.size].clone()
    yield "all_to_all", collectives.all_to_all(equal, axis).wait(), equal
    for root in (0, axis.size - 1):
        sent = x.clone()
        collectives.broadcast(sent, axis, root).wait()
        yield f"broadcast from {root}", sent, x
    last = axis.size - 1
    for root in (0, last):
        whole = collectives.reduce(x, axis, root).wait()
        yield f"reduce to {root}", x[:0] if whole is None else whole, x
        whole = collectives.gather(x[begin:end], axis, length, root).wait()
        yield f"gather to {root}", x[:0] if whole is None else whole, x
        out = torch.empty(end - begin, dtype=x.dtype)
        yield (
            f"scatter from {root}",
            collectives.scatter(x if axis.rank == root else None, axis, out, length, root).wait(),
            x,
        )
    counts = [[(a * b + length) % 5 for b in range(axis.size)] for a in range(axis.size)]
    there = counts[axis.rank]
    back = [row[axis.rank] for row in counts]
    yield (
        "all_to_all_v",
        collectives.all_to_all_v(values(axis.rank, sum(there), dtype), there, back, axis).wait(),
        None,
    )
    yield "shift", collectives.shift(x, axis).wait(), x


def bits(x):
    return bytes((x.float() if str(x.dtype) == "torch.bfloat16" else x).view(-1).numpy(force=True).tobytes())


@pytest.fixture(scope="module")
def in_one_level():
    """What each collective gives in one level: (operation, bits) for each of BUFFERS."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    mesh = build(comm, [0] * comm.size, "messages", levels=False)
    all_expected = [
        [(operation, bits(found)) for operation, found, _ in results(mesh["dp"], length, dtype)]
        for dtype, length in BUFFERS
    ]
    mesh.free()
    comm.Free()
    return all_expected


@pytest.mark.few_cases(4)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("transport", "limit", "round_"),
    [
        *((transport, 1 << 30, wire.ROUND) for transport in TRANSPORTS),
        ("messages", 4099, wire.ROUND),
        ("auto", 1 << 30, 4096),
        pytest.param("messages", 1 << 30, LEAST_ROUND, marks=LONG),
    ],
)
@pytest.mark.parametrize("number", range(5 if EVERY else 3))
def test_two_levels_give_the_bits_of_one(world, monkeypatch, in_one_level, number, transport, limit, round_):
    """In messages of at most `limit` bytes, sorted in rounds of `round_` bytes."""
    from mpitrain.comm.prediction import predicted

    monkeypatch.setattr(wire, "LIMIT", limit)
    monkeypatch.setattr(wire, "ROUND", round_)
    if round_ < wire.LEAST:
        monkeypatch.setattr(wire, "LEAST", 64)
    maps = MAPS.get(world.size, [])
    if number >= len(maps):
        pytest.skip("no such node map on so many ranks")
    if world.size == 8 and round_ == LEAST_ROUND and not EVERY:
        pytest.skip("MPITRAIN_EFFORT=all takes it on 8 ranks, too")
    if world.size == 8 and number < len(MAPS[4]) and (number + TRANSPORTS.index(transport)) % 2 and not EVERY:
        pytest.skip("MPITRAIN_EFFORT=all takes each map with each transport")
    mesh = build(world, maps[number], transport)
    wrong = []
    axis = mesh["dp"]
    for (dtype, length), all_expected in zip(BUFFERS, in_one_level, strict=True):
        ours = results(axis, length, dtype)
        for expected in all_expected:
            before = mesh.usage()["dp"]
            operation, found, x = next(ours)
            used = mesh.usage()["dp"].minus(before)
            if (operation, bits(found)) != expected:
                wrong.append(f"{operation} of {length} {dtype}: other bits")
            if x is not None:
                name, _, root = operation.partition(" ")
                sent = predicted(name, x.nbytes, axis, x, int(root.split()[-1]) if root else 0)
                if (used.messages, used.num_bytes) != sent:
                    wrong.append(
                        f"{operation} of {length} {dtype}: {used.messages, used.num_bytes} sent, {sent} "
                        "predicted"
                    )
    mesh.free()
    agree(world, not wrong, f"{len(wrong)}: {wrong[:3]}")


@pytest.mark.mpi(min_size=4)
def test_what_crosses_is_counted_apart(world):
    from mpitrain.comm.collectives import all_reduce, broadcast

    if world.size not in (4, 8):
        pytest.skip("two nodes of 2 or 4 ranks")
    mesh = build(world, [rank * 2 // world.size for rank in range(world.size)], "messages")
    axis = mesh["dp"]
    x = np.ones(1 << 16, np.float32)
    all_reduce(x, axis).wait()
    across = sum(world.allgather(axis.far.account.num_bytes))
    broadcast(x, axis, world.size - 1).wait()
    more = sum(world.allgather(axis.far.account.num_bytes)) - across
    own = axis.near.account.num_bytes + axis.far.account.num_bytes
    total = mesh.usage()["dp"].num_bytes
    mesh.free()
    agree(
        world,
        (across, more, own) == (2 * x.nbytes, x.nbytes, total),
        f"{across}, {more} across, {own} of {total}, {x.nbytes} of buffer",
    )


@pytest.mark.mpi(min_size=4)
def test_many_operations_at_once_meet_their_own(world):
    """Started in one order, waited for in another: each has two or four phases, on two axes."""
    from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter

    if world.size not in (4, 8):
        pytest.skip("two nodes of 2 or 4 ranks")
    wrong = []
    for transport in TRANSPORTS:
        mesh = build(world, [rank * 2 // world.size for rank in range(world.size)], transport)
        axis = mesh["dp"]
        pending = []
        for i in range(1, 9):
            x = np.full(i * 8192, float(i + axis.rank))
            share = i * 8192 // axis.size
            whole = np.zeros(i * 8192)
            total = sum(i + rank for rank in range(axis.size))
            pending.append((all_reduce(x.copy(), axis), np.full_like(x, total)))
            pending.append((reduce_scatter(x, axis), np.full(share, total)))
            gathered = np.repeat([float(i + rank) for rank in range(axis.size)], share)
            pending.append((all_gather(x[:share], axis, whole), gathered))
        for at, (operation, expected) in reversed(list(enumerate(pending))):
            wrong += [] if np.array_equal(operation.wait(), expected) else [f"{transport} {at}"]
        mesh.free()
    agree(world, not wrong, wrong)


@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
def test_memory_in_which_data_is_sorted_does_not_grow(world, monkeypatch, dtype):
    """With the length of a buffer, or the number of operations under way; it is what the plan counts."""
    import torch

    from mpitrain.comm.base.nodes import nodes_of
    from mpitrain.comm.collectives import all_gather, reduce_scatter

    if world.size not in (4, 8):
        pytest.skip("two nodes of 2 or 4 ranks")
    monkeypatch.setattr(wire, "ROUND", 1 << 14)
    monkeypatch.setattr(wire, "LEAST", 64)
    numbers = [rank * 2 // world.size for rank in range(world.size)]
    mesh = build(world, numbers, "messages")
    axis = mesh["dp"]
    held = []
    for share in (1 << 13, 1 << 15):
        x = torch.ones(share * world.size, dtype=getattr(torch, dtype))
        pending = [reduce_scatter(x, axis) for _ in range(5)]
        pending += [all_gather(x[:share], axis, x.clone()) for _ in range(5)]
        for each in reversed(pending):
            each.wait()
        held.append(axis.sorting.num_bytes)
    narrow = dtype == "bfloat16"
    each = wire.sorting_bytes(1 << 15, nodes_of(numbers), x.itemsize, narrow=narrow, sums=True)
    mesh.free()
    agree(world, held == [2 * each] * 2, f"{held}, {each}")


LAYOUTS = {
    4: [
        "dp=4 zero=1",
        "dp=4 zero=3",
        "cp=4 context=ulysses heads=4",
        "dp=4 zero=2 transport=collectives",
        "dp=4 zero=0 precision=bf16",
    ],
    8: [
        "dp=8 zero=1",
        "dp=8 zero=3 dp_shard=4",
        "dp=8 zero=2 transport=collectives",
        "dp=8 zero=0 precision=bf16",
    ],
}
WORDS = {"precision": "precision.compute", "heads": "model.heads", "transport": "comm.transport"}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("number", range(5) if EVERY else but_for(range(3), [0, 2]))
def test_training_over_nodes_has_the_bits_of_one_node(world, number):
    """Losses, norms, weights; and comm.levels says whether there are levels."""
    from training import resolved, same, trained

    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    if number >= len(LAYOUTS.get(world.size, [])):
        pytest.skip("no such layout on so many ranks")
    if world.size == 8 and number % 2 == 0 and not EVERY:
        pytest.skip("MPITRAIN_EFFORT=all takes each of them on 8 ranks, too")
    words = [word.split("=") for word in LAYOUTS[world.size][number].split()]
    settings = tuple(f"{WORDS.get(key, f'parallel.{key}')}={value}" for key, value in words)
    over = (*settings, f"comm.node_ranks={world.size // 2}")
    wrong = [] if same(trained(world, *over), trained(world, *settings)) else ["other bits"]
    for levels, expected in (("auto", True), ("one", False)):
        mesh = build_mesh(plan_of(resolved(world, *over, f"comm.levels={levels}")), world)
        found = any(axis.nodes is not None for axis in mesh.axes.values())
        wrong += [f"comm.levels = {levels}: {found}"] if found != expected else []
        mesh.free()
    agree(world, not wrong, wrong)
