"""The gradient noise scale (run.noise_scale) is that of two norms that plain torch computes in fp64."""

import pytest
from conftest import agree
from oracle import loss_and_grads
from training import initial_weights, once, recorded, resolved

pytestmark = pytest.mark.mpi
SETTINGS = (
    "model.kv_heads=2",
    "model.tied=false",
    "precision.compute=fp64",
    "batch.micro=2",
    "run.noise_scale=true",
)
HAS = dict(layers=4, heads=2, kv_heads=2)
ROWS, LENGTH = 8, 16
LAYOUTS = [  # the layout, and the rows of a shard of the batch
    (("parallel.reduce=microbatch",), 2),
    (("parallel.pp=2", "pipeline.schedule=zb-h1", "parallel.reduce=microbatch"), 2),
    (("parallel.dp=2",), 4),
    (("parallel.dp=2", "parallel.zero=1", "model.tied=true"), 4),
    (("parallel.dp=2", "parallel.zero=3"), 2),
    (("parallel.dp=2", "parallel.zero=2", "model.tied=true"), 2),
    (("parallel.dp=2", "parallel.tp=2"), 4),
    (("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=dualpipe", "parallel.reduce=step",
      "batch.micro=1"), 4),
    (("parallel.dp=4", "parallel.dp_shard=2", "parallel.zero=2", "parallel.reduce=step"), 2),
]  # fmt: skip


def rows_of_step():
    import torch

    return torch.randint(0, 256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def expected(weights, rows_each, uncompared):
    """Return |G|^2 and S of appendix A.1, of B_big = all tokens and B_small = those of a shard."""

    def square(rows):
        _, grads = loss_and_grads(weights, rows, **HAS)
        return sum(float(grad.square().sum()) for name, grad in grads.items() if name not in uncompared)

    rows = rows_of_step()
    shards = rows.split(rows_each)
    big, small = square(rows), sum(map(square, shards)) / len(shards)
    b_big, b_small = ROWS * LENGTH, rows_each * LENGTH
    signal = (b_big * big - b_small * small) / (b_big - b_small)
    return signal, (small - big) / (1 / b_small - 1 / b_big)


def walked(world, config):
    """Run a step; return its result, and the operations and bytes of each axis."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    local = rows_of_step().chunk(config.parallel.dp)[mesh["dp"].rank]
    results = []
    log, posted = recorded(mesh, lambda: results.append(actor.run_step(1, actor.cutter.cut(local), 1e-2)))
    mesh.free()
    return results[0], {name: len(operations) for name, operations in log.items()}, posted


@pytest.mark.parametrize(("layout", "rows_each"), LAYOUTS)
def test_the_estimates_are_those_of_two_norms(world, layout, rows_each):
    config = resolved(world, *SETTINGS, *layout)
    found, with_noise, more = walked(world, config)
    weights = initial_weights(config)
    # uses of a tied embedding that are reduced apart, after each microbatch, are left out
    uncompared = ("embedding.weight",) if {"parallel.zero=2", "model.tied=true"} <= {*layout} else ()
    signal, noise = once(world, (layout, "noise"), lambda: expected(weights, rows_each, uncompared))
    wrong = [
        f"{name} is {found.noise[name]!r}, not {value!r}"
        for name, value in (("grad_signal", signal), ("grad_noise", noise))
        if found.noise[name] != pytest.approx(value, rel=1e-9)
    ]
    off = resolved(world, *SETTINGS, *layout, "run.noise_scale=false")
    without, calls, posted = walked(world, off)
    wrong += [f"{with_noise} operations, not {calls}"] * (with_noise != calls)
    wrong += [f"{more} bytes"] * any(more[name] - posted[name] > 8192 for name in posted)
    wrong += ["other gradients"] * (without.grad_norm != found.grad_norm or bool(without.noise))
    agree(world, not wrong, f"{layout}: {wrong}")


REFUSED = {
    ("parallel.dp=1",): "nothing is summed over shards",
    ("parallel.cp=2",): "parts of the same sequences",
    ("parallel.pp=2", "pipeline.schedule=seq1f1b", "parallel.reduce=microbatch"): "aren't microbatches",
}


@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_without_shards_of_the_batch_is_refused(world, layout):
    from mpitrain.errors import ConfigError

    size = 1 if layout == ("parallel.dp=1",) else 2
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    with pytest.raises(ConfigError, match=REFUSED[layout]):
        resolved(world, *SETTINGS, *layout)
