"""Training with fp8 linears follows bf16.

Its bits are those of one rank for every pipeline, stage of ZeRO and way to save memory.
"""

import pytest
from conftest import LONG, agree, but_for
from training import alone, resolved, same, train

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

FP8 = "precision.compute=fp8"
SINGLE = "batch.micro=1"  # the same microbatches on one rank as on several
MODES = [
    ("memory.recompute=full",),
    ("memory.recompute=selective",),
    ("memory.recompute=every-k", "memory.every=2"),
    ("memory.offload=activations",),
]
SAME = {
    2: [
        ("parallel.pp=2",),
        ("parallel.pp=2", "pipeline.schedule=zbv"),
        ("parallel.pp=2", "pipeline.schedule=zb-h1", "memory.recompute=full"),
        ("parallel.pp=2", "pipeline.schedule=interleaved", "memory.recompute=selective"),
    ],
    4: [("parallel.pp=4",), ("parallel.pp=2", "pipeline.schedule=zbv", "parallel.dp=2", "parallel.zero=3")],
}
SAME_LONGER = [(2, SAME[2][1]), (2, SAME[2][3]), (4, ("parallel.pp=4",))]
CLOSE = {
    2: [
        ("parallel.tp=2",),
        ("parallel.tp=2", "parallel.sequence=false", "memory.recompute=full"),
        ("parallel.tp=2", "parallel.async_tp=true"),
        ("parallel.cp=2",),
        ("parallel.pp=2", "pipeline.schedule=seq1f1b"),
    ],
    4: [
        ("parallel.tp=2", "parallel.pp=2", "pipeline.schedule=zbv"),
        ("parallel.tp=2", "parallel.async_tp=true", "parallel.cp=2"),
    ],
}


def every(layouts):
    return [(size, layout) for size, found in layouts.items() for layout in found]


def name_of(value):
    return ",".join(s.split(".")[-1] for s in value) if isinstance(value, tuple) else str(value)


ONE = ("parallel.dp=1", FP8, SINGLE)


# a pipeline's case recomputes all
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[LONG] * (mode in (MODES[0], MODES[2]))) for mode in MODES], ids=name_of
)
def test_the_bits_are_the_same_however_memory_is_saved(world, mode):
    if world.size > 1:
        pytest.skip("one rank tells")
    expected = alone(world, *ONE, "model.tied=false")
    found = train(world, resolved(world, *ONE, "model.tied=false", *mode))
    agree(world, same(found, expected), f"{found[0]} instead of {expected[0]}")


@pytest.mark.few_cases(2)
@pytest.mark.sizes(2)
@pytest.mark.parametrize(("size", "layout"), but_for(every(SAME), SAME_LONGER), ids=name_of)
def test_the_bits_are_those_of_one_rank_for_every_pipeline(world, size, layout):
    """With dp, of dp alone: sums over ranks come in another order than on one."""
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    dp = any("parallel.dp=" in s for s in layout)
    tree = ("numerics.reproducible=layout",) if dp else ("parallel.dp=1",)
    found = train(world, resolved(world, FP8, SINGLE, *tree, *layout))
    expected = alone(world, *ONE, *(tree if dp else ()))
    agree(world, same(found, expected), f"{found[0]} instead of {expected[0]}")


@LONG  # a pipeline's case has ZeRO-3
def test_the_bits_are_the_same_for_every_stage_of_zero(world):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    layout = (FP8, SINGLE, f"parallel.dp={world.size}", "parallel.reduce=microbatch")
    expected = train(world, resolved(world, *layout))
    for zero in (1, 2, 3):
        found = train(world, resolved(world, *layout, f"parallel.zero={zero}"))
        agree(world, same(found, expected), f"zero={zero}: {found[0]} instead of {expected[0]}")
    agree(world, all(weight.dtype == "float32" for weight in expected[1].values()), "master weights are fp32")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("size", "layout"), but_for(every(CLOSE), [(4, layout) for layout in CLOSE[4]]), ids=name_of
)
def test_layouts_that_divide_tensors_stay_close_to_one_rank(world, size, layout):
    """They scale parts of tensors, and round partial sums to bf16: losses and norms within 1%.

    Not under AdamW: its first steps are as large for a gradient of next to nothing as for any
    other.
    """
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    common = ("batch.global=16", "batch.micro=8", "optimizer.name=sgd")
    found, _ = train(world, resolved(world, FP8, SINGLE, "parallel.dp=1", *common, *layout))
    expected, _ = alone(world, *ONE, *common)
    errors = [abs(a - b) / abs(b) for one, other in zip(found, expected) for a, b in zip(one, other)]
    agree(world, max(errors) < 0.01, f"{max(errors)}: {found} instead of {expected}")


@LONG
def test_fifty_steps_follow_bf16(world):
    """From 5.3 to below 3.3: not the same, but never 0.03 apart, 0.01 over the last twenty steps
    (0.013 and 0.005 when it was written).
    """
    if world.size != 2:
        pytest.skip("2 ranks tell")
    losses = {compute: losses_of(world, compute) for compute in ("bf16", "fp8")}
    apart = [b - a for a, b in zip(*losses.values())]
    most = max(map(abs, apart))
    late = sum(apart[-20:]) / 20
    end = sum(losses["fp8"][-20:]) / 20
    agree(
        world,
        0 < most < 0.03 and abs(late) < 0.01 and end < 3.3,
        f"{most} apart, {late} late, {end} at the end",
    )


def losses_of(world, compute):
    """Return the losses of fifty steps on the source of a module that every Python has."""
    import shutil
    from pathlib import Path

    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    settings = ("model.layers=2", "model.width=64", "data.sequence=64", "batch.global=16", "batch.micro=8")
    config = resolved(world, "parallel.dp=1", "parallel.pp=2", f"precision.compute={compute}", *settings)
    text = torch.frombuffer(bytearray(Path(shutil.__file__).read_bytes()), dtype=torch.uint8).long()
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    losses = []
    for step in range(50):
        starts = torch.randint(0, len(text) - 65, (16,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + 65] for start in starts])
        losses.append(actor.run_step(step + 1, actor.cutter.cut(rows), 1e-3).loss)
    mesh.free()
    return losses


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_an_infinity_before_the_cast_skips_the_step_on_all_ranks(world, monkeypatch, name):
    """In an activation or a weight, and in a gradient, on the last rank only.

    A cast to e4m3 would make it 448.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.kernels import fp8
    from mpitrain.model.families.catalog import plan_of

    if world.size not in (1, 2):
        pytest.skip("1 and 2 ranks tell")
    config = resolved(world, f"parallel.dp={world.size}", FP8, "parallel.zero=1")
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(1)).chunk(world.size)[
        mesh["dp"].rank
    ]
    before = [piece.weight.clone() for piece in actor.gradients.pieces]
    quantise = fp8.quantise
    planted = []

    def planting(x, dtype):
        if dtype == getattr(torch, name) and not planted and mesh["dp"].rank == world.size - 1:
            planted.append(name)
            x = x.detach().clone()
            x[0, 3] = torch.inf
        return quantise(x, dtype)

    monkeypatch.setattr(fp8, "quantise", planting)
    result = actor.run_step(1, actor.cutter.cut(rows), 1e-2)
    agree(world, result.skipped and (planted or mesh["dp"].rank < world.size - 1), f"{result}")
    agree(
        world,
        all((a == b.weight).all() for a, b in zip(before, actor.gradients.pieces)),
        "weights changed in a skipped step",
    )
    monkeypatch.setattr(fp8, "quantise", quantise)
    agree(world, not actor.run_step(2, actor.cutter.cut(rows), 1e-2).skipped, "training didn't continue")
    mesh.free()
