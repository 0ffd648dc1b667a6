"""ZeRO: however the state is divided, the run is the same, bit for bit.

And a rank holds no more than its share.

MPITRAIN_EFFORT=all tries every layout instead of a few.
"""

import itertools
import os
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import EVERY, LONG, agree, but_for
from training import alone, resolved, train, trained

pytestmark = pytest.mark.mpi(min_size=2)

# What is trained beside data parallelism; {half} of the ranks are left for it.
LAYOUTS = {
    2: [
        ("parallel.dp=2",),
        ("parallel.dp=2", "model.tied=false", "batch.micro=4"),
        ("parallel.dp=2", "pipeline.tail=8"),
    ],
    4: [
        ("parallel.dp=4", "parallel.dp_shard=2"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=zbv"),
        ("parallel.dp=2", "parallel.tp=2"),
        ("parallel.dp=2", "parallel.cp=2"),
        ("parallel.dp=4", "comm.transport=messages"),
    ],
    8: [("parallel.dp=4", "parallel.dp_shard=2", "parallel.pp=2", "pipeline.schedule=1f1b")],
}
MORE = {
    4: [
        ("parallel.dp=4",),
        ("parallel.dp=4", "comm.transport=collectives"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=1f1b", "model.tied=false"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=interleaved"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=dualpipe"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=seq1f1b"),
        ("parallel.cp=4", "parallel.context=ulysses", "model.heads=4"),
    ],
    8: [
        ("parallel.dp=2", "parallel.pp=2", "parallel.tp=2", "pipeline.schedule=zbv"),
        ("parallel.dp=8", "parallel.dp_shard=4"),
    ],
}
CHOSEN = [
    (layout, reduce)
    for size in LAYOUTS
    for layout in LAYOUTS[size] + (MORE.get(size, []) if EVERY else [])
    for reduce in ("step", "microbatch")
    # a tail is there to reduce once
    if reduce == "step" or not any("pipeline.tail" in s for s in layout)
]


@pytest.mark.parametrize(
    ("layout", "reduce"),
    but_for(
        CHOSEN,
        [
            (("parallel.dp=2", "parallel.tp=2"), "step"),
            (("parallel.dp=2", "parallel.cp=2"), "step"),
            (("parallel.dp=4", "comm.transport=messages"), "step"),
            (("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=zbv"), "step"),
        ],
    ),
    ids=lambda each: each if isinstance(each, str) else ",".join(s.split(".")[-1] for s in each),
)
def test_the_run_is_the_same_for_every_stage_of_zero(world, layout, reduce):
    """With equal parallel.reduce.

    Sums after each microbatch go over all data ranks without shards, and over those of a shard with
    them.
    """
    whole = tuple(s for s in layout if not s.startswith("parallel.dp_shard"))
    first = 1 if reduce == "microbatch" and whole != layout else 0
    how = f"parallel.reduce={reduce}"
    lines, weights = train(
        world, resolved(world, *(layout if first else whole), how, f"parallel.zero={first}")
    )
    for zero in range(first + 1, 4):
        found = train(world, resolved(world, *layout, how, f"parallel.zero={zero}"))
        agree(world, found[0] == lines, f"zero={zero}: {found[0]} instead of {lines}")
        different = [name for name in weights if not (weights[name] == found[1][name]).all()]
        agree(world, found[1].keys() == weights.keys() and not different, f"zero={zero}: {different[:3]}")


CHOICES = [
    ("parallel.zero=3", "parallel.gather=step"),
    ("parallel.zero=3", "parallel.ahead=3"),
    ("parallel.zero=2", "parallel.reduce=microbatch"),
    ("parallel.zero=3", "parallel.reduce=microbatch", "model.tied=false"),
]


CHOOSING = [
    ("parallel.dp={all}",),
    ("parallel.dp=2", "parallel.pp={rest}", "pipeline.schedule=zbv"),
    ("parallel.dp=2", "parallel.pp={rest}", "pipeline.schedule=seq1f1b"),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("layout", "choice"),
    but_for(
        [
            each
            for number, each in enumerate(itertools.product(CHOOSING, CHOICES))
            if EVERY or number < 4 or number % 2
        ],
        [(CHOOSING[0], CHOICES[0]), (CHOOSING[2], CHOICES[1])],
    ),
    ids=lambda each: each[-1].split(".")[1],
)
def test_choices_of_when_to_fetch_and_reduce_agree(world, layout, choice):
    """Sums over ranks before sums over microbatches have other roundings: equal in fp64 to 1e-12."""
    if (world.size == 2 and len(layout) > 1) or world.size > 4:
        pytest.skip("dp=2 on 2 ranks, dp=2 x pp=2 and dp=4 on 4 tell")
    tied = tuple(s for s in choice if "tied" in s)
    layout = (*(s.format(rest=world.size // 2, all=world.size) for s in layout), "precision.compute=fp64")
    lines, weights = trained(world, *layout, *tied)
    found = train(world, resolved(world, *layout, *choice))
    errors = [abs(a - b) / abs(b) for one, other in zip(found[0], lines) for a, b in zip(one, other)]
    agree(world, max(errors) < 1e-12, f"{found[0]} instead of {lines}")
    worst = max(abs(weights[name] - found[1][name]).max() for name in weights)
    agree(world, worst < 1e-12, f"weights differ by {worst}")


def test_a_rank_keeps_its_share_of_the_state(world):
    """Elements of weights, gradients and moments that stay between steps, without the buffers that
    are lent.
    """
    if world.size != 4:
        pytest.skip("4 ranks tell")
    kept = {}

    def look(zero, actor):
        buckets = [bucket for stage in actor.stages.values() for bucket in stage.state.buckets]
        weights = sum(
            len(b.weights.shard if b.weights.whole is None else b.weights.whole) for b in buckets if b.owned
        )
        grads = sum(len(g.shard if g.whole is None else g.whole) for b in buckets for g in b.gradients)
        moments = sum(len(x) for piece in actor.gradients.pieces for _, x in actor.optimizer.moments(piece))
        kept[zero] = (weights, grads, moments)

    for zero in (0, 1, 2, 3):
        settings = f"parallel.dp={world.size}", "model.tied=false", f"parallel.zero={zero}"
        train(world, resolved(world, *settings), partial(look, zero))
    share, (weights, grads, _) = world.size, kept[1]
    count = kept[0][2]  # a shard can hold more of the padding than another
    sums = [sum(each) for each in zip(*world.allgather([kept[zero][2] for zero in (1, 2, 3)]))]
    agree(world, sums == [count] * 3, f"moments: {sums} over all ranks, {count} on one")
    expected = [(weights, grads), (weights, grads // share), (weights // share, grads // share)]
    agree(world, [kept[zero][:2] for zero in (1, 2, 3)] == expected, f"{kept}, expected {expected}")


TELLING = (16, 0), (24, 3)
SLOTS = [(slots, zero) for slots in (16, 24) for zero in range(4) if EVERY or (slots, zero) in TELLING]


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("slots", "zero"), but_for(SLOTS, [(24, 3)]))
def test_sums_in_a_tree_have_the_same_bits_for_every_dp(world, zero, slots):
    """Against one rank; 24 slots are groups of 3.

    Split backwards put weight gradients off, so groups overlap.
    """
    if world.size == 8 and slots > 16:
        pytest.skip("2 and 4 ranks tell")
    common = ("numerics.reproducible=layout", f"batch.global={slots}", "batch.micro=1")
    lines, weights = alone(world, *common, "parallel.dp=1")
    layouts = [(f"parallel.dp={world.size}",)]
    if world.size == 4:
        layouts.append(("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=zbv"))
    for layout in layouts if EVERY else [layouts[zero // 2 % len(layouts)]]:
        found = train(world, resolved(world, *common, *layout, f"parallel.zero={zero}"))
        agree(world, found[0] == lines, f"{layout}: {found[0]} instead of {lines}")
        agree(
            world,
            all((weights[name] == found[1][name]).all() for name in weights),
            f"{layout}: weights differ",
        )


UNEQUAL = [
    (8, ("parallel.dp=3", "parallel.zero=1")),
    (12, ("parallel.dp=3", "parallel.zero=2", "memory.recompute=full")),  # 4 groups of 3
    (16, ("parallel.dp=3", "parallel.zero=3")),
    (32, ("parallel.dp=3", "parallel.zero=3", "parallel.gather=step")),
    (8, ("parallel.dp=3", "model.family=mixtral", "experts.count=4", "experts.balance=bias")),
]


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("slots", "layout"), but_for(UNEQUAL, [UNEQUAL[3]]), ids=str)
def test_unequal_numbers_of_microbatches_have_the_same_bits(world, slots, layout):
    """Against one rank; data ranks have 3, 3 and 2 of 8, and one of them an empty one."""
    if world.size != 4:
        pytest.skip("3 of 4 ranks tell")
    model = tuple(key for key in layout if key.startswith(("model.", "experts.")))
    common = ("numerics.reproducible=layout", f"batch.global={slots}", "batch.micro=1", *model)
    lines, weights = alone(world, *common, "parallel.dp=1")
    some = world.Split(world.rank // 3, world.rank)
    found, right = [None], True
    if world.rank < 3:
        found = train(some, resolved(some, *common, *layout))
        right = found[0] == lines and all((weights[name] == found[1][name]).all() for name in weights)
    agree(world, right, f"{layout}: {found[0]} instead of {lines}")
    some.Free()


FLAT = [("parallel.zero=3", "parallel.dp={all}"), ("parallel.pp=2", "parallel.dp={half}", "parallel.zero=2")]


@LONG
@pytest.mark.sizes(2)
@pytest.mark.parametrize("layout", FLAT if EVERY else FLAT[:1])
def test_resident_memory_stays_flat(world, layout):
    """Buffers of communication are allocated once.

    The first steps fill pools, caches and the allocator's arenas.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    settings = (s.format(all=world.size, half=world.size // 2) for s in layout)
    config = resolved(world, *settings, "model.layers=2", "batch.global=4", "data.sequence=64")
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(1)).chunk(
        config.parallel.dp
    )[mesh["dp"].rank]
    first, last = (50, 200) if EVERY else (40, 120)
    sizes = {}
    for step in range(1, last + 1):
        actor.run_step(step, actor.cutter.cut(rows), 1e-3)
        sizes[step] = resident_bytes() if step in (first, last) else 0
    mesh.free()
    agree(
        world,
        sizes[last] - sizes[first] < 14_000 * (last - first),
        f"bytes after so many steps: {sizes[first]}, {sizes[last]}",
    )


def resident_bytes():
    """Return what this process has in memory, without what it shares."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
def test_the_sum_of_shards_starts_with_the_next_instruction_and_not_only_with_the_next_bucket(world):
    """Here everything that is under way is over between instructions, so that it is known what
    could start.
    """
    program = []
    started = []

    def listen(actor, microbatches):
        progress = actor.progress
        poll = actor.progress.poll

        def poll_until_over():
            for pending in () if progress._waiting else tuple(progress.active):
                pending.wait()
            poll()

        progress.poll = poll_until_over
        program.extend(map(str, actor.training))
        for name in ("shard", "replicate"):
            actor.mesh[name].place = actor.place
        actor.mesh.listen(
            SimpleNamespace(given=lambda which, parts: started.append(which), came=lambda which, parts: None)
        )

    layout = (
        "parallel.dp=4",
        "parallel.dp_shard=2",
        "parallel.zero=2",
        "parallel.reduce=step",
        "pipeline.schedule=interleaved",
    )
    train(world, resolved(world, *layout), before=listen)
    scattered = next(which.instruction for which in started if which.operation == "reduce_scatter")
    summed = next(which.instruction for which in started if which.axis == "replicate")
    following = program[program.index(scattered) + 1]
    soon = summed in (scattered, following)  # at once, on a rank that comes last
    agree(world, soon and following[0] == "B", f"{scattered}, {summed}: {program}")
