"""16-bit computation follows fp32, steps that overflow are skipped on every rank, and ZeRO changes
no bits.
"""

import pytest
from conftest import LONG, agree
from training import resolved, train, trained

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]

LAYOUTS = {
    2: [
        ("parallel.dp=2",),
        ("parallel.pp=2", "parallel.dp=1", "pipeline.schedule=zbv"),
        ("parallel.tp=2",),
        ("parallel.cp=2",),
    ],
    4: [
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=1f1b"),
        ("parallel.tp=2", "parallel.dp=2", "model.tied=true"),
    ],
}


@pytest.mark.sizes(2)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "layout", [layout for found in LAYOUTS.values() for layout in found], ids=lambda layout: layout[0]
)
def test_16_bits_follow_fp32(world, layout, compute):
    lines, _ = trained(world, *layout)
    found = train(world, resolved(world, *layout, f"precision.compute={compute}"))
    errors = [abs(a - b) / abs(b) for one, other in zip(found[0], lines) for a, b in zip(one, other)]
    agree(world, 0 < max(errors) < 0.03, f"{found[0]} and {lines}")
    agree(world, all(w.dtype == "float32" for w in found[1].values()), "master weights are fp32")


def test_the_loss_scale_is_taken_out_of_gradients(world):
    """AdamW's weights are the same whatever all gradients are multiplied by: SGD tells."""
    keys = (f"parallel.dp={world.size}", "optimizer.name=sgd", "optimizer.clip=0")
    expected, found = (
        train(world, resolved(world, *keys, f"precision.compute={compute}"))[1]
        for compute in ("fp32", "fp16")
    )
    agree(world, all(abs(found[name] - x).max() < 1e-3 for name, x in expected.items()), "weights differ")


@pytest.mark.sizes(2)
@pytest.mark.parametrize("compute", [pytest.param("bf16", marks=LONG), "fp16"])
def test_16_bits_are_the_same_bits_for_every_stage_of_zero(world, compute):
    layout = (f"parallel.dp={world.size}", f"precision.compute={compute}", "precision.reduce=bf16")
    lines, weights = train(world, resolved(world, *layout, "parallel.reduce=step", "parallel.zero=0"))
    for zero in (1, 2, 3):
        found = train(world, resolved(world, *layout, "parallel.reduce=step", f"parallel.zero={zero}"))
        agree(world, found[0] == lines, f"zero={zero}: {found[0]} instead of {lines}")
        agree(
            world,
            all((weights[name] == found[1][name]).all() for name in weights),
            f"zero={zero}: weights differ",
        )


@pytest.mark.sizes(4)
@pytest.mark.parametrize("layout", [pytest.param("parallel.tp=2", marks=LONG), "parallel.pp=2"])
def test_gradients_that_are_sent_are_rounded(world, layout):
    """With one data rank, where nothing is sent, the key is refused (tests/unit/plan/test_config.py)."""
    if world.size == 2:
        pytest.skip("one data rank")
    layout = layout, f"parallel.dp={world.size // 2}", "model.kv_heads=2"
    exact, rounded = (
        train(world, resolved(world, *layout, f"precision.reduce={kind}")) for kind in ("same", "bf16")
    )
    agree(world, exact[0] != rounded[0], f"{exact[0]}, {rounded[0]}")


def test_an_overflow_on_one_rank_skips_the_step_on_all(world):
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.optim.loss_scale import START

    config = resolved(world, f"parallel.dp={world.size}", "precision.compute=fp16", "parallel.zero=1")
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(1)).chunk(world.size)[
        mesh["dp"].rank
    ]
    before = [piece.weight.clone() for piece in actor.gradients.pieces]
    reduce = actor._handlers["REDUCE"]

    def planted(action, work):
        if mesh["dp"].rank == world.size - 1:
            actor.stages[action.stage].state.buckets[action.index].gradients[0].whole[3:4] = torch.inf
        reduce(action, work)

    actor._handlers["REDUCE"] = planted
    result = actor.run_step(1, actor.cutter.cut(rows), 1e-2)
    scale = actor.loss_scale.value
    agree(world, result.skipped and scale == START / 2, f"{result}, scale {scale}")
    agree(
        world,
        all((a == b.weight).all() for a, b in zip(before, actor.gradients.pieces)),
        "weights changed in a skipped step",
    )
    actor._handlers["REDUCE"] = reduce
    result = actor.run_step(2, actor.cutter.cut(rows), 1e-2)
    agree(world, not result.skipped and actor.loss_scale.value == scale, f"{result}")
    agree(
        world,
        not all((a == b.weight).all() for a, b in zip(before, actor.gradients.pieces)),
        "training didn't continue",
    )
    mesh.free()
