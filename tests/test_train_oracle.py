"""Loss, every gradient and updated weights of a parallel step equal a plain torch loop in fp64, for every layout that fits the world.

MPITRAIN_LAYOUTS=all takes every layout of tp and cp on 8 ranks, not a few.
"""

import itertools
import os

import numpy as np
import pytest
from conftest import agree
from oracle import adamw, loss_and_grads

pytestmark = pytest.mark.mpi
LAYERS, HEADS, KV_HEADS = 5, 4, 2
EVERY = os.environ.get("MPITRAIN_LAYOUTS") == "all"
SETTINGS = (
    "model.preset=quickstart",
    f"model.layers={LAYERS}",
    "model.width=32",
    f"model.heads={HEADS}",
    f"model.kv_heads={KV_HEADS}",
    "model.ffn=48",
    "precision.compute=fp64",
    "data.sequence=12",
    "batch.global=16",
    "batch.micro=2",
    "optimizer.clip=0.5",
    "comm.bucket_mb=0.02",
    "comm.timeout_s=60",
)
STAGES = {1: [None], 2: [None, [4, 1]], 4: [None, [1, 1, 1, 2]]}
LAYOUTS = [
    (dp, pp, stages, tied)
    for dp, pp in itertools.product((1, 2, 4), (1, 2, 4))
    if dp * pp <= 8
    for stages in STAGES[pp]
    for tied in ("true", "false")
]
DIVIDED = [
    (tp, dp, pp, schedule)
    for tp, dp, pp in itertools.product((2, 4), (1, 2), (1, 2))
    for schedule in (("1f1b",) if pp == 1 else ("1f1b", "zbv") if EVERY else ("zbv",))
    if tp * dp * pp <= 4 or (tp * dp * pp == 8 and (EVERY or tp == 2))
]
SPREAD = [
    (kind, cp, tp, dp, pp, "zbv" if pp > 1 else "1f1b")
    for cp, tp, dp, pp in itertools.product((2, 4), (1, 2), (1, 2), (1, 2))
    for kind in ("ring", "zigzag", "gather", "ulysses")
    if cp * tp * dp * pp <= 4 or (cp * tp * dp * pp == 8 and (EVERY or (kind, cp, tp, pp) == ("zigzag", 2, 2, 2)))
    if kind != "ulysses" or cp * tp <= HEADS
]


def rows_of(step, sequence):
    """Return the batch of a step, [16, sequence + 1]: the same on every rank."""
    import torch

    return torch.randint(0, 256, (16, sequence + 1), generator=torch.Generator().manual_seed(step))


def microbatches_of(rows, actor, dp, mesh):
    """Cut this data rank's microbatches out of the global batch, as the trainer does."""
    from mpitrain.stage import Microbatch

    local = rows.chunk(dp)[mesh["dp"].rank].split(2)
    here = actor.positions
    return [Microbatch(r[:, here] if actor.first else None, r[:, here + 1] if actor.last else None) for r in local]


def initial_weights(config):
    import torch

    from mpitrain.model.init import normal
    from mpitrain.slicing import parameters_of

    specs = {spec.name: spec for spec in parameters_of(config)}
    make = {name: normal(1, name, 0, s.numel, s.std).view(s.shape) if s.std else None for name, s in specs.items()}
    return {name: torch.ones(specs[name].shape, dtype=torch.float64) if w is None else w for name, w in make.items()}


@pytest.mark.parametrize(("dp", "pp", "stages", "tied"), LAYOUTS)
@pytest.mark.parametrize(("schedule", "tail"), [("1f1b", 1), ("gpipe", 3)])
def test_three_steps_equal_a_plain_torch_loop(world, dp, pp, stages, tied, schedule, tail):
    extra = (f"pipeline.tail={tail}",) + ((f"pipeline.stages={stages}",) if stages else ())
    compare_with_plain_torch(world, dp, pp, tied, schedule, *extra)


@pytest.mark.parametrize(("tp", "dp", "pp", "schedule"), DIVIDED)
@pytest.mark.parametrize(("sequence", "tied", "kv_heads"), [("true", "true", 2), ("false", "false", 4)])
def test_divided_layers_equal_a_plain_torch_loop(world, tp, dp, pp, schedule, sequence, tied, kv_heads):
    """The model's vocabulary of 259 divides by none of these; 2 key-value heads are repeated for tp = 4."""
    divided = (f"parallel.tp={tp}", f"parallel.sequence={sequence}", "model.vocab=259", f"model.kv_heads={kv_heads}")
    compare_with_plain_torch(world, dp, pp, tied, schedule, *divided)


@pytest.mark.parametrize(("kind", "cp", "tp", "dp", "pp", "schedule"), SPREAD)
def test_spread_sequences_equal_a_plain_torch_loop(world, kind, cp, tp, dp, pp, schedule):
    tied = "true" if kind in ("ring", "gather") else "false"
    spread = (f"parallel.cp={cp}", f"parallel.tp={tp}", f"parallel.context={kind}", "data.sequence=16", "model.vocab=259")
    compare_with_plain_torch(world, dp, pp, tied, schedule, *spread)


def box(tensors, parameter):
    """Return the part of a whole tensor that this rank's parameter is."""
    spec = parameter.spec
    return tensors[parameter.name][tuple(slice(begin, begin + length) for begin, length in zip(spec.offset, spec.shape))]


def compare_with_plain_torch(world, dp, pp, tied, schedule, *extra):
    """Train three steps in this layout and on one process; losses, norms, gradients and weights agree to 1e-10."""
    import torch

    from mpitrain import config as settings
    from mpitrain.actor import Actor
    from mpitrain.train import build_mesh

    layout = (f"parallel.dp={dp}", f"parallel.pp={pp}", f"model.tied={tied}", f"pipeline.schedule={schedule}")
    parsed = settings.load(None, (*SETTINGS, *layout, *extra))
    needed = dp * pp * parsed.parallel.tp * parsed.parallel.cp
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    config = settings.resolve(parsed, world.size, 256)
    assert config.model.tied == (tied == "true")
    mesh = build_mesh(config, world)
    actor = Actor(config, mesh, torch.device("cpu"))
    weights, moments, wrong = initial_weights(config), {}, []

    def compare(what, found, expected):
        error = abs(found - expected).max() / (abs(expected).max() + 1e-300)
        wrong.extend([f"{what}: relative error {error:.1e}"] if error > 1e-10 else [])

    for step in (1, 2, 3):
        rows = rows_of(step, config.data.sequence)
        loss, grads = loss_and_grads(weights, rows, LAYERS, HEADS, config.model.kv_heads)
        result = actor.run_step(step, microbatches_of(rows, actor, dp, mesh), 1e-2)
        clipped = min(1.0, 0.5 / result.grad_norm)  # run_step leaves the gradients as the optimiser got them
        for parameter in actor.optimizer.parameters:
            compare(f"step {step} gradient of {parameter.name}", parameter.grad / clipped, box(grads, parameter))
        norm = adamw(weights, grads, moments, step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=0.5)
        compare(f"step {step} loss", np.array(result.loss), np.array(loss))
        compare(f"step {step} norm", np.array(result.grad_norm), np.array(norm))
        for parameter in actor.optimizer.parameters:
            compare(f"step {step} weight {parameter.name}", parameter.data, box(weights, parameter))
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:3]}")
