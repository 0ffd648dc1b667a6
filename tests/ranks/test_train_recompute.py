"""Activation memory: whatever is computed again or moved to the host, the run is the same, bit for bit.

MPITRAIN_EFFORT=all tries every layout instead of a few.
"""

import pytest
from conftest import EVERY, LONG, agree
from training import resolved, train

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

SMALL = ("model.layers=6", "batch.global=8", *(() if EVERY else ("batch.micro=2",)))
MODES = [
    ("memory.recompute=full",),
    ("memory.recompute=every-k", "memory.every=2"),
    ("memory.recompute=selective",),
    ("memory.offload=activations",),
    ("memory.recompute=selective", "memory.offload=activations"),
    ("memory.recompute=every-k", "memory.offload=activations"),
]
ZBV = ("parallel.pp=2", "pipeline.schedule=zbv")
LAYOUTS = {
    1: [("model.tied=false",), ("data.documents=separate",)],
    2: [
        ZBV,
        ("parallel.pp=2", "pipeline.schedule=seq1f1b", "data.documents=separate"),
        ("parallel.tp=2",),
        ("parallel.tp=2", "parallel.async_tp=true"),
        ("parallel.cp=2",),
        ("parallel.dp=2", "parallel.zero=3"),
    ],
    4: [("parallel.tp=2", "parallel.async_tp=true", *ZBV), ("parallel.dp=2", *ZBV, "parallel.zero=3")],
}
MORE = {
    1: [("pipeline.tail=4",), ("precision.compute=fp64",)],
    2: [
        ("parallel.pp=2", "pipeline.schedule=1f1b"),
        ("parallel.pp=2", "pipeline.schedule=zb-h1", "pipeline.stages=[2.5,3.5]"),
        ("parallel.pp=2", "pipeline.schedule=dualpipe"),
        ("parallel.tp=2", "parallel.sequence=false"),
        ("parallel.cp=2", "parallel.context=ring", "data.documents=separate"),
        ("parallel.cp=2", "parallel.context=gather"),
        ("parallel.dp=2", "parallel.zero=2", "parallel.reduce=microbatch"),
        ("parallel.dp=2", "parallel.zero=1", "pipeline.tail=4"),
        ("parallel.dp=2", "parallel.zero=3", "parallel.gather=step"),
    ],
    4: [
        ("parallel.tp=2", "parallel.pp=2", "pipeline.schedule=dualpipe"),
        ("parallel.tp=2", *ZBV),
        ("parallel.tp=2", "parallel.async_tp=true", "parallel.cp=2", "data.documents=separate"),
        ("parallel.tp=2", "parallel.async_tp=true", *ZBV, "data.documents=separate"),
        ("parallel.cp=2", *ZBV),
        ("parallel.tp=2", "parallel.dp=2", "parallel.zero=3"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=seq1f1b", "parallel.zero=3"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=interleaved", "parallel.zero=2"),
    ],
}
CHOSEN = [layout for size in LAYOUTS for layout in LAYOUTS[size] + (MORE[size] if EVERY else [])]
LONGER = LAYOUTS[4][:1]


def name_of(settings):
    return ",".join(s.split(".")[-1] for s in settings)


@pytest.mark.sizes(1, 4)
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[LONG] * (each in LONGER)) for each in CHOSEN], ids=name_of
)
def test_the_run_is_the_same_for_every_mode(world, layout):
    lines, weights = train(world, resolved(world, *SMALL, *layout))
    number = CHOSEN.index(layout)
    few = MODES[:2] if world.size == 1 else MODES[number % 2 : number % 2 + 1]
    few += MODES[2 + number % 2 :: 2][: 4 // world.size]
    for mode in MODES if EVERY else few:
        if "parallel.zero=3" in layout and "memory.recompute=every-k" in mode:
            continue  # refused: weights come block by block
        found = train(world, resolved(world, *SMALL, *layout, *mode))
        agree(world, found[0] == lines, f"{name_of(mode)}: {found[0]} instead of {lines}")
        different = [name for name in weights if not (weights[name] == found[1][name]).all()]
        agree(world, found[1].keys() == weights.keys() and not different, f"{name_of(mode)}: {different[:3]}")


def held(plan, mesh):
    """Return the bytes that one microbatch leaves in memory."""
    import torch

    from mpitrain.actor.memory_meter import Watch
    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    site = BuildContext(plan, torch.device("cpu"), mesh["tp"], mesh["cp"])
    stage = Stage(plan.stages[0], site)
    tokens = torch.zeros(plan.config.batch.micro, len(plan.positions(mesh["cp"].rank)), dtype=torch.int64)
    watch = Watch([stage], site.constants())
    with watch.watching():
        run(stage.forward(0, None, Microbatch(tokens, tokens)), mesh.progress.poll)
    watch.look()
    return watch.peak


SPREAD = [
    "",
    "parallel.tp=2",
    "parallel.tp=2 parallel.sequence=false",
    "parallel.tp=2 parallel.async_tp=true",
    "parallel.cp=2",
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("layout", SPREAD)
def test_less_is_kept_in_each_mode_and_as_much_as_computed(world, layout, compute):
    import torch

    from mpitrain.actor.communicators import build_mesh
    from mpitrain.kernels.processor import multiplied_as
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.activations.kept import Activations

    large = (
        "model.width=64",
        "model.heads=4",
        "model.kv_heads=2",
        "data.sequence=64",
        "batch.micro=2",
        f"precision.compute={compute}",
    )
    modes = ("none", "selective", "every-k memory.every=2", "full", "full memory.offload=activations")
    found = []
    wrong = []
    for mode in modes:
        config = resolved(world, *large, *layout.split(), *f"memory.recompute={mode}".split())
        plan = plan_of(config)
        mesh = build_mesh(plan, world)
        found.append(held(plan, mesh))
        mesh.free()
        probabilities = 0
        # attends as bf16 does, but keeps no probabilities
        if compute == "fp16" and multiplied_as(torch.float16) != torch.float16:
            plan = plan_of(
                resolved(
                    world,
                    *large,
                    "precision.compute=bf16",
                    *layout.split(),
                    *f"memory.recompute={mode}".split(),
                )
            )
            probabilities = (
                config.model.layers * plan.sizes.probabilities(4 // config.parallel.tp, 16) * (mode == "none")
            )
        computed = Activations(plan.stages[0], plan.sizes).kept() - probabilities
        # targets, which are the tokens here
        if not 0 <= computed - found[-1] <= 8 * config.batch.micro * config.data.sequence:
            wrong.append(f"{mode}: {found[-1]} bytes, {computed} computed")
    agree(world, not wrong, f"{wrong}")
    # full keeps one input per block, every-k one per group: the more blocks in a group, the less,
    # and the more at once in the backward (tests/ranks/test_memory_transients.py)
    none, selective, every_k, full, offloaded = found
    agree(world, none > selective > full > every_k > offloaded, f"{found}")
