"""The gradient noise scale (run.noise_scale) is that of two norms that plain torch computes in fp64."""

import pytest
from conftest import agree
from oracle import logits
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


def scored_of_step(equally):
    """Return which targets carry loss: all, or 0 to 15 of the 16 of a row."""
    import torch

    most = (
        torch.full((ROWS, 1), LENGTH) if equally else torch.tensor([[3], [0], [15], [7], [1], [2], [9], [4]])
    )
    return torch.arange(LENGTH) < most


def square_of_gradient(weights, uncompared, rows, scored):
    """Return the square of the norm of the gradient of the summed loss, and the number of targets."""
    import torch

    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    targets = rows[:, 1:].masked_fill(~scored, -100)
    out = logits(w, rows[:, :-1], *HAS.values())
    torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    squares = [value.grad.square().sum().item() for name, value in w.items() if name not in uncompared]
    return sum(squares), int(scored.sum())


def expected(weights, rows_each, equally, uncompared):
    """Return |G|^2 and S that fit both norms: E |g_i|^2 = n_i^2 |G|^2 + n_i S, solved as linear equations."""
    import numpy as np

    rows, scored = rows_of_step(), scored_of_step(equally)
    big, n = square_of_gradient(weights, uncompared, rows, scored)
    shards = [
        square_of_gradient(weights, uncompared, *shard)
        for shard in zip(rows.split(rows_each), scored.split(rows_each))
    ]
    of_shards = [sum(square for square, _ in shards), sum(n_i**2 for _, n_i in shards)]
    signal, noise = np.linalg.solve([[n**2, n], [of_shards[1], n]], [big, of_shards[0]])
    if equally:  # as in appendix A.1, of mean losses
        b_small = n / len(shards)
        g_big, g_small = big / n**2, of_shards[0] / len(shards) / b_small**2
        assert signal == pytest.approx((n * g_big - b_small * g_small) / (n - b_small), rel=1e-9)
        assert noise == pytest.approx((g_small - g_big) / (1 / b_small - 1 / n), rel=1e-9)
    return signal, noise


def walked(world, config, equally):
    """Run a step; return its result, and the operations and bytes of each axis."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    local, scored = (
        each.chunk(config.parallel.dp)[mesh["dp"].rank] for each in (rows_of_step(), scored_of_step(equally))
    )
    microbatches = actor.cutter.cut(local, None, scored)
    results = []
    log, posted = recorded(mesh, lambda: results.append(actor.run_step(1, microbatches, 1e-2)))
    mesh.free()
    return results[0], {name: len(operations) for name, operations in log.items()}, posted


@pytest.mark.parametrize("equally", [True, False])
@pytest.mark.parametrize(("layout", "rows_each"), LAYOUTS)
def test_the_estimates_are_those_of_two_norms(world, layout, rows_each, equally):
    config = resolved(world, *SETTINGS, *layout)
    found, with_noise, more = walked(world, config, equally)
    weights = initial_weights(config)
    # uses of a tied embedding that are reduced apart, after each microbatch, are left out
    uncompared = ("embedding.weight",) if {"parallel.zero=2", "model.tied=true"} <= {*layout} else ()
    signal, noise = once(
        world, (layout, equally, "noise"), lambda: expected(weights, rows_each, equally, uncompared)
    )
    wrong = [
        f"{name} is {found.noise[name]!r}, not {value!r}"
        for name, value in (("grad_signal", signal), ("grad_noise", noise))
        if found.noise[name] != pytest.approx(value, rel=1e-9)
    ]
    off = resolved(world, *SETTINGS, *layout, "run.noise_scale=false")
    without, calls, posted = walked(world, off, equally)
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
