"""What a layout is said to send is what it sends.

Operations in order on every axis, buffers to the byte, and bytes on the wire.

MPITRAIN_EFFORT=all takes every layout on up to 8 ranks, not a few.
"""

import itertools

import pytest
from conftest import EVERY, agree, but_for
from training import recorded

pytestmark = pytest.mark.mpi

HEADS = 4
SETTINGS = (
    "model.preset=quickstart",
    "model.width=32",
    f"model.heads={HEADS}",
    "model.kv_heads=2",
    "model.ffn=48",
    "model.vocab=259",
    "data.sequence=16",
    f"batch.global={16 if EVERY else 8}",
    "batch.micro=2",
    "comm.bucket_mb=0.02",
    "comm.timeout_s=200",
)
FEW = [
    "pp=2 transport=shared",
    "tp=2 transport=collectives",
    "cp=2 context=ulysses tied=false",
    "dp=2 zero=3 precision=fp64",
    "dp=2 zero=1 transport=collectives",
    "dp=2 zero=2 optimizer.name=muon transport=shared",
    "tp=2 memory.recompute=full",
    "cp=2 context=gather memory.recompute=selective",
    "tp=2 sequence=false pp=2 schedule=zbv",
    "tp=2 async_tp=true cp=2 context=zigzag transport=shared",
    "tp=4 pp=1 transport=messages precision=fp64",
    "pp=4 schedule=zbv tied=false transport=collectives",
    "pp=2 tp=2 schedule=dualpipe",
    "pp=2 tp=2 schedule=dualpipe memory.recompute=full",
    "pp=2 tp=2 cp=2 schedule=dualpipe context=zigzag",
    "pp=2 dp=2 schedule=dualpipev zero=3 pairs=parts batch.global=16",
    "pp=2 tp=2 schedule=dualpipe reduce=microbatch pairs=parts",
    "dp=2 cp=2 context=gather zero=2 transport=shared",
    "dp=4 dp_shard=2 zero=3",
    "tp=2 dp=2 zero=1 optimizer.name=muon transport=messages",
    "pp=2 schedule=seq1f1b dp=2",
    "pp=2 tp=2 schedule=zbv memory.recompute=every-k memory.every=2",
    "tp=2 pp=2 schedule=zbv memory.recompute=full",
    "tp=2 cp=2 context=ring memory.recompute=every-k transport=shared",
    "tp=2 dp=2 pp=2 zero=3 transport=collectives",
    "tp=4 async_tp=true pp=2 tied=false transport=shared",
    "tp=2 regather=true memory.recompute=selective",
    "tp=2 cp=2 regather=true context=ring",
    "pp=2 tp=2 schedule=zb-h1 regather=true",
]
LONGER = [
    "pp=2 tp=2 schedule=dualpipe reduce=microbatch pairs=parts",
    "tp=4 pp=1 transport=messages precision=fp64",
    "pp=2 tp=2 schedule=zbv memory.recompute=every-k memory.every=2",
    "pp=2 tp=2 schedule=zb-h1 regather=true",
    "pp=4 schedule=zbv tied=false transport=collectives",
    "tp=2 cp=2 regather=true context=ring",
    "pp=2 tp=2 schedule=dualpipe memory.recompute=full",
    "cp=2 context=ulysses tied=false",
    "tp=2 async_tp=true cp=2 context=zigzag transport=shared",
    "pp=2 schedule=seq1f1b dp=2",
]
MORE = ["pp=2 tp=2 cp=2 schedule=dualpipe context=gather"]
PARALLEL = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}


def every():
    """Yield every layout, with transports and ZeRO stages in turns."""
    transports = itertools.cycle(("messages", "collectives", "shared"))
    stages = itertools.cycle(range(4))
    for tp, cp, dp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        divided = ("sequence=true", "sequence=false", "sequence=true async_tp=true") if tp > 1 else ("",)
        spread = (
            ("ring", "zigzag", "gather", "ulysses")[: 4 if cp * tp <= HEADS else 3] if cp > 1 else ("zigzag",)
        )
        schedules = ("1f1b", "zbv") if pp > 1 else ("1f1b",)
        for how, context, schedule, tied in itertools.product(divided, spread, schedules, ("true", "false")):
            if tp * cp * dp * pp <= 8 and HEADS % tp == 0:
                zero = next(stages) if dp * cp > 1 else 0
                layout = f"tp={tp} cp={cp} dp={dp} pp={pp} context={context} schedule={schedule} zero={zero}"
                yield f"{layout} tied={tied} transport={next(transports)} {how}".strip()


def resolved(layout, world):
    """Return the configuration of a layout, and its transport if all sizes use one."""
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    chosen = PARALLEL | dict(word.split("=") for word in layout.split())
    needed = 1
    for axis in PARALLEL:
        needed *= int(chosen[axis])
    if needed != world.size:
        pytest.skip(f"runs on {needed} ranks")
    tables = {"schedule": "pipeline", "pairs": "pipeline", "tied": "model", "transport": "comm"}
    precision = chosen.pop("precision", "fp32")
    words = [
        f"{key if '.' in key else tables.get(key, 'parallel') + '.' + key}={value}"
        for key, value in chosen.items()
    ]
    layers = 1 + 2 * int(chosen["pp"])  # two stages a rank, and not all alike
    config = settings.load(
        None, (*SETTINGS, *words, f"precision.compute={precision}", f"model.layers={layers}")
    )
    return resolve(config, world.size, 256), chosen.get("transport")


def differences(axes, found, posted, declared, transport):
    """Return what differs, in words."""
    from mpitrain.comm.base.wire import sent_bytes

    wrong = [f"axes {sorted(found)}, declared {sorted(declared)}"] if set(found) != set(declared) else []
    for name in sorted(set(found) & set(declared)):
        pairs = itertools.zip_longest(found[name], declared[name])
        first = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)
        wrong += [f"{name}: operation {first[0]} is {first[1]}, declared {first[2]}"] if first else []
    for name, num_bytes in posted.items() if transport else ():
        axis = axes[name]
        # only small fp64 vectors don't divide by the ranks of their axis
        wire = sum(
            sent_bytes(*each, axis.size, axis.rank, itemsize=8, transport=transport)
            for each in declared.get(name, [])
        )
        wrong += [f"{name}: {num_bytes} bytes posted, {wire} by the formulas"] if wire != num_bytes else []
    return wrong


@pytest.mark.few_cases(5)
@pytest.mark.parametrize("layout", [*every(), *MORE] if EVERY else but_for(FEW, LONGER))
def test_what_is_started_is_what_was_declared(world, layout):
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.model.families.catalog import plan_of

    config, transport = resolved(layout, world)
    rehearsal = Rehearsal(plan_of(config), world.rank)
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    wrong = []
    generator = torch.Generator().manual_seed(mesh["dp"].rank)
    rows = torch.randint(
        0, 256, (config.batch.global_ // config.parallel.dp, config.data.sequence + 1), generator=generator
    )
    for what, run, declared in (
        ("step 1", lambda: actor.run_step(1, actor.cutter.cut(rows), 1e-2), rehearsal.training()),
        ("step 2", lambda: actor.run_step(2, actor.cutter.cut(rows), 1e-2), rehearsal.training()),
        ("evaluation", lambda: actor.evaluate(2, actor.cutter.cut(rows)), rehearsal.evaluation()),
    ):
        found, posted = recorded(mesh, run)
        wrong += [f"{what}: {text}" for text in differences(mesh.axes, found, posted, declared, transport)]
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:4]}")


EXPERTS = [
    "dp=2 ep=2",
    "dp=2 ep=2 comm.node_ranks=1 experts.wire=bf16",
    "dp=2 etp=2 experts.wire=fp8",
    "tp=2 dp=2 ep=4 comm.node_ranks=2 experts.wire=fp8",
    "dp=4 ep=2 etp=2 comm.node_ranks=2 experts.groups=4 experts.groups_active=2",
    "cp=2 pp=2 ep=2 comm.node_ranks=1 precision=fp64",
]
EXPERTS_LONGER = [
    "tp=2 dp=2 ep=4 comm.node_ranks=2 experts.wire=fp8",
    "cp=2 pp=2 ep=2 comm.node_ranks=1 precision=fp64",
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("layout", but_for(EXPERTS, EXPERTS_LONGER))
def test_rows_to_experts_are_declared_as_if_tokens_chose_evenly(world, layout):
    """All but their number, which differs from step to step, is exact.

    Operations and their order, counts, everything else.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.model.families.catalog import plan_of

    config, _ = resolved(
        f"{layout} model.family=mixtral experts.count=16 experts.active=2 experts.buffer=16 batch.global=16",
        world,
    )
    declared = Rehearsal(plan_of(config), world.rank).training()
    mesh = build_mesh(plan_of(config), world)
    actor = Actor(plan_of(config), mesh, torch.device("cpu"))
    rows = torch.randint(0, 256, (config.batch.global_ // config.parallel.dp, config.data.sequence + 1))
    found, _ = recorded(mesh, lambda: actor.run_step(1, actor.cutter.cut(rows), 1e-2))
    wrong = []
    there = [name for name in found if name.startswith("experts")]
    sums = [
        {name: sum(n for what, n in log[name] if what == "all_to_all_v") for name in there}
        for log in (found, declared)
    ]
    every = [{name: sum(rank[name] for rank in world.allgather(each)) for name in there} for each in sums]
    for name in there:
        bytes_ = every[0][name]
        expected = every[1][name]
        wrong += (
            [f"{name}: {bytes_} bytes, declared {expected}"]
            if abs(bytes_ - expected) > 0.15 * expected
            else []
        )
    for log in (found, declared):
        log |= {name: [(what, 0 if what == "all_to_all_v" else n) for what, n in log[name]] for name in there}
    wrong += differences(mesh.axes, found, {}, declared, None)
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:4]}")
