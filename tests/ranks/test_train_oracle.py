"""Loss, every gradient and updated weights of a parallel step equal a plain torch loop in fp64, for
every layout that fits the world.

MPITRAIN_EFFORT=all takes the whole product of degrees, divisions, kinds of context parallelism,
schedules and ties, not a few.
"""

import itertools
import math

import numpy as np
import pytest
from conftest import EVERY, agree, but_for
from oracle import adamw, loss_and_grads
from pairwise_cases import pairwise_cases
from training import initial_weights, once, part

pytestmark = pytest.mark.mpi
LAYERS = 5
HEADS = 4
KV_HEADS = 2
STEPS = 3 if EVERY else 2
FIRST = STEPS if EVERY else 1  # how a sequence is divided is the same in every step
SETTINGS = (
    "model.preset=quickstart",
    f"model.layers={LAYERS}",
    "model.width=32",
    f"model.heads={HEADS}",
    f"model.kv_heads={KV_HEADS}",
    "model.ffn=48",
    "precision.compute=fp64",
    "data.sequence=12",
    "batch.global=8",
    "batch.micro=2",
    "optimizer.clip=0.5",
    "comm.bucket_mb=0.02",
    "comm.timeout_s=200",
)
STAGES = {1: [None], 2: [None, [4, 1]], 4: [None, [1, 1, 1, 2]]}
LAYOUTS = [
    (dp, pp, stages, tied)
    for dp, pp in itertools.product((1, 2, 4), (1, 2, 4))
    if dp * pp <= (8 if EVERY else 4)
    for stages in STAGES[pp]
    for tied in ("true", "false")
]
# (dp, pp, stages, tied, schedule, tail): with one stage both, else each of stages, ties and
# schedules with each other once
PLAIN = [
    (*layout, schedule, tail)
    for layout in LAYOUTS
    for schedule, tail in (("1f1b", 1), ("gpipe", 3))
    if EVERY or layout[1] == 1 or (layout[3] == "true") ^ (layout[2] is None) ^ (schedule == "1f1b")
]
PLAIN = (
    PLAIN
    if EVERY
    else pairwise_cases(PLAIN, lambda case: [*enumerate(map(str, case))], lambda case: case[0] * case[1])
)
DIVIDED = [
    (tp, dp, pp, schedule, sequence, tied, kv_heads)
    for tp, dp, pp in itertools.product((2, 4), (1, 2), (1, 2))
    for schedule in (("1f1b",) if pp == 1 else ("1f1b", "zbv") if EVERY else ("zbv",))
    if tp * dp * pp <= 4 or (tp * dp * pp == 8 and (EVERY or tp == 2))
    for sequence, tied, kv_heads in itertools.product(("true", "false"), ("true", "false"), (2, 4))
    if EVERY
    or (sequence, tied, kv_heads) in (("true", "true", 2), ("false", "false", 4))[tp * dp * pp == 8 :]
]
SPREAD = [
    (kind, cp, tp, dp, pp, schedule, sequence, tied)
    for cp, tp, dp, pp in itertools.product((2, 4), (1, 2, 4), (1, 2), (1, 2))
    for kind in ("ring", "zigzag", "gather", "ulysses")
    if cp * tp * dp * pp <= 4
    or (cp * tp * dp * pp == 8 and (EVERY or (kind, cp, tp, pp) == ("zigzag", 2, 2, 2)))
    if kind != "ulysses" or cp * tp <= HEADS
    for schedule, sequence, tied in itertools.product(("1f1b", "zbv"), ("true", "false"), ("true", "false"))
    if (pp > 1 or schedule == "1f1b") and (tp > 1 or sequence == "true")
    if EVERY
    or (
        schedule == ("1f1b", "zbv")[pp > 1]
        and sequence == "true"
        and tied == ("false", "true")[kind in ("ring", "gather")]
    )
    if EVERY or cp == 2 or kind in ("zigzag", "ulysses")
    if EVERY or (dp, pp) == (1, 1) or kind in ("ring", "zigzag")
]
ASYNCHRONOUS = [  # (tp, cp, context, dp, pp, tied, kv_heads)
    (2, 1, "ring", 1, 1, "true", 2),
    (2, 1, "ring", 1, 1, "false", 1),
    (2, 1, "ring", 1, 2, "true", 2),
    (2, 1, "ring", 2, 1, "false", 1),
    (4, 1, "ring", 1, 1, "true", 2),
    (2, 2, "zigzag", 1, 1, "true", 1),
    (2, 2, "ulysses", 1, 1, "false", 2),
    (2, 2, "zigzag", 1, 2, "true", 1),
    *[(2, 2, "ulysses", 2, 1, "false", 2), (4, 2, "zigzag", 1, 1, "false", 2)] * EVERY,
]
for tp, kind, dp, pp, tied in (
    itertools.product((2, 4), ("", "zigzag", "ulysses"), (1, 2), (1, 2), ("true", "false")) if EVERY else ()
):
    cp = 2 if kind and not (kind == "ulysses" and tp == 4) else 1
    layouts = [(tp, cp, kind if cp > 1 else "ring", dp, pp, tied, kv_heads) for kv_heads in (1, 2, 4)]
    ASYNCHRONOUS += [layout for layout in layouts if tp * cp * dp * pp <= 8 and layout not in ASYNCHRONOUS]
CHUNKS_LONGER = [(4, 1, "ring", 1, 1, "true", 2), (2, 1, "ring", 2, 1, "false", 1)]
SEPARATE = [  # (dp, pp, tp, cp, how layers or sequences are divided, schedule)
    (1, 1, 1, 1, "sequence=true", "1f1b"),
    (1, 1, 1, 1, "sequence=true", "seq1f1b"),
    (1, 2, 1, 1, "sequence=true", "zbv"),
    (1, 2, 1, 1, "sequence=true", "seq1f1b"),
    (1, 1, 2, 1, "sequence=false", "1f1b"),
    (1, 1, 1, 2, "context=zigzag", "1f1b"),
    (1, 1, 1, 2, "context=ulysses", "1f1b"),
    (1, 4, 1, 1, "sequence=true", "1f1b"),
    (1, 2, 2, 1, "sequence=true", "seq1f1b"),
    (2, 1, 2, 1, "async_tp=true", "1f1b"),
    (1, 2, 1, 2, "context=gather", "zbv"),
    (2, 1, 1, 2, "context=ring", "1f1b"),
    (2, 2, 1, 2, "context=zigzag", "zbv"),
]
for degrees in itertools.product((1, 2, 4), repeat=4) if EVERY else ():
    dp, pp, tp, cp = degrees
    divisions = ["sequence=true", "sequence=false", "async_tp=true"][: 3 if tp > 1 else 1 if cp == 1 else 0]
    divisions += ["context=ring", "context=zigzag", "context=gather"] * (cp > 1) + ["context=ulysses"] * (
        1 < cp <= HEADS // tp
    )
    schedules = ["1f1b"] + ["zbv"] * (pp == 2) + ["seq1f1b"] * (cp == 1)
    size = dp * pp * tp * cp
    ways = itertools.product(divisions, schedules) if size <= 4 or (size == 8 and max(degrees) == 2) else ()
    SEPARATE += [(*degrees, *way) for way in ways if (*degrees, *way) not in SEPARATE]
SEPARATE_LONGER = [
    (2, 1, 2, 1, "async_tp=true", "1f1b"), (1, 1, 2, 1, "sequence=false", "1f1b"),
    (1, 4, 1, 1, "sequence=true", "1f1b"), (1, 1, 1, 2, "context=ulysses", "1f1b"),
    (1, 2, 1, 2, "context=gather", "zbv"),
]  # fmt: skip
END = 0  # the byte between documents
# Greatest difference from fp64, relative to the greatest element of the tensor, over all steps.
# AdamW divides a gradient by its own size, so what is next to nothing in a gradient moves a weight
# as much as the rest does: weights differ by a share of the learning rate.
FP64 = {"loss": 1e-10, "norm": 1e-10, "gradient": 1e-10, "weight": 1e-10}
FP32 = {"loss": 1e-6, "norm": 1e-5, "gradient": 5e-4, "weight": 2e-3}


def rows_of(step, batch, sequence):
    """Return the batch of a step, [batch, sequence + 1]: the same on every rank."""
    import torch

    return torch.randint(0, 256, (batch, sequence + 1), generator=torch.Generator().manual_seed(step))


def rows_of_documents(step, batch, sequence):
    """Return 16 rows with very unequal documents.

    Row 0 is one, the last row has many; microbatch 2 has one target, microbatch 3 none.
    """
    import torch

    dice = torch.Generator().manual_seed(step)
    rows = torch.randint(END + 1, 256, (batch, sequence + 1), generator=dice)
    rows[
        torch.rand(rows.shape, generator=dice, dtype=torch.float64) < torch.linspace(0, 0.7, batch)[:, None]
    ] = END
    rows[4:8] = END
    rows[4, 5] = 1
    # at the end of what the first rank of two has, and at the beginning
    rows[1, sequence // 2 - 1] = rows[2, sequence // 2] = END
    return rows


@pytest.mark.parametrize(("dp", "pp", "stages", "tied", "schedule", "tail"), PLAIN)
def test_steps_equal_a_plain_torch_loop(world, dp, pp, stages, tied, schedule, tail):
    extra = (f"pipeline.tail={tail}",) * (pp == 1) + ((f"pipeline.stages={stages}",) if stages else ())
    compare_with_plain_torch(world, dp, pp, tied, schedule, *extra)


@pytest.mark.parametrize(("tp", "dp", "pp", "schedule", "sequence", "tied", "kv_heads"), DIVIDED)
def test_divided_layers_equal_a_plain_torch_loop(world, tp, dp, pp, schedule, sequence, tied, kv_heads):
    """The model's vocabulary of 259 divides by none of these; 2 key-value heads are repeated for tp = 4."""
    divided = (
        f"parallel.tp={tp}",
        f"parallel.sequence={sequence}",
        "model.vocab=259",
        f"model.kv_heads={kv_heads}",
    )
    compare_with_plain_torch(world, dp, pp, tied, schedule, *divided)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(("kind", "cp", "tp", "dp", "pp", "schedule", "sequence", "tied"), SPREAD)
def test_spread_sequences_equal_a_plain_torch_loop(world, kind, cp, tp, dp, pp, schedule, sequence, tied):
    spread = (
        f"parallel.cp={cp}",
        f"parallel.context={kind}",
        f"parallel.tp={tp}",
        f"parallel.sequence={sequence}",
    )
    compare_with_plain_torch(
        world, dp, pp, tied, schedule, *spread, "data.sequence=16", "model.vocab=259", num_steps=FIRST
    )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("tp", "cp", "kind", "dp", "pp", "tied", "kv_heads"), but_for(ASYNCHRONOUS, CHUNKS_LONGER)
)
def test_layers_by_chunks_equal_a_plain_torch_loop(world, tp, cp, kind, dp, pp, tied, kv_heads):
    """16 positions: chunks of 2 to 8.

    A part of the key-value heads is repeated where there are fewer than ranks.
    """
    layout = (
        "parallel.async_tp=true",
        f"parallel.tp={tp}",
        f"parallel.cp={cp}",
        *[f"parallel.context={kind}"] * (cp > 1),
    )
    model = ("data.sequence=16", "model.vocab=259", f"model.kv_heads={kv_heads}")
    compare_with_plain_torch(
        world, dp, pp, tied, "zbv" if pp > 1 else "1f1b", *layout, *model, num_steps=FIRST
    )


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(("dp", "pp", "tp", "cp", "division", "schedule"), but_for(SEPARATE, SEPARATE_LONGER))
def test_separate_documents_equal_documents_by_themselves(world, dp, pp, tp, cp, division, schedule):
    tied = "true" if division in ("sequence=true", "context=ring", "context=ulysses") else "false"
    divided = [f"parallel.{division}"] * (tp * cp > 1) + ["pipeline.segments=4"] * (schedule == "seq1f1b")
    layout = (f"parallel.tp={tp}", f"parallel.cp={cp}", *divided)
    data = ("batch.global=16", "data.documents=separate", "data.sequence=16", "model.vocab=259")
    compare_with_plain_torch(world, dp, pp, tied, schedule, *layout, *data, num_steps=FIRST)


SINGLE = SPREAD if EVERY else [each for each in SPREAD[::3] if math.prod(each[1:5]) <= 4]


@pytest.mark.parametrize(
    ("kind", "cp", "tp", "dp", "pp", "schedule", "sequence", "tied"),
    but_for(
        SINGLE,
        [
            ("zigzag", 2, 2, 1, 1, "1f1b", "true", "false"),
            ("ulysses", 2, 1, 1, 1, "1f1b", "true", "false"),
            ("ring", 2, 1, 2, 1, "1f1b", "true", "true"),
        ],
    ),
)
def test_fp32_stays_within_its_budget(world, kind, cp, tp, dp, pp, schedule, sequence, tied):
    spread = (
        f"parallel.cp={cp}",
        f"parallel.context={kind}",
        f"parallel.tp={tp}",
        f"parallel.sequence={sequence}",
    )
    precise = ("batch.global=16", "data.sequence=16", "model.vocab=259", "precision.compute=fp32")
    compare_with_plain_torch(world, dp, pp, tied, schedule, *spread, *precise, budget=FP32)


def greatest(found, expected):
    """Return the greatest difference, relative to the greatest element."""
    return abs(found - expected).max() / (abs(expected).max() + 1e-300)


def plain_torch(config, ends):
    """Return rows, loss, gradients, their norm, and the weights after each step of a plain loop."""
    weights = initial_weights(config)
    moments = {}
    found = []
    for step in range(1, STEPS + 1):
        rows = (rows_of if ends is None else rows_of_documents)(
            step, config.batch.global_, config.data.sequence
        )
        loss, grads = loss_and_grads(weights, rows, LAYERS, HEADS, config.model.kv_heads, ends)
        norm = adamw(weights, grads, moments, step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=0.5)
        found.append((rows, loss, grads, norm, {name: weight.clone() for name, weight in weights.items()}))
    return found


def compare_with_plain_torch(world, dp, pp, tied, schedule, *extra, budget=FP64, num_steps=STEPS):
    """Train some steps in this layout and on one process.

    losses, norms, gradients and weights agree within the budget.
    """
    import torch

    from mpitrain import config as settings
    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    layout = (f"parallel.dp={dp}", f"parallel.pp={pp}", f"model.tied={tied}", f"pipeline.schedule={schedule}")
    parsed = settings.load(None, (*SETTINGS, *layout, *extra))
    needed = dp * pp * parsed.parallel.tp * parsed.parallel.cp
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    config = resolve(parsed, world.size, 256)
    assert config.model.tied == (tied == "true")
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    ends = END if config.data.documents == "separate" else None
    wrong = []
    key = "plain torch", repr((config.model, config.batch, config.data.sequence)), ends
    expected = once(world, key, lambda: plain_torch(config, ends))

    def compare(what, found, expected, name=""):
        error = greatest(found, expected)
        wrong.extend(
            [f"step {step} {what} {name}: relative error {error:.1e}"] if not error <= budget[what] else []
        )

    for step, (rows, loss, grads, norm, weights) in enumerate(expected[:num_steps], start=1):
        result = actor.run_step(step, actor.cutter.cut(rows.chunk(dp)[mesh["dp"].rank], ends), 1e-2)
        # run_step leaves the gradients as the optimiser got them
        clipped = min(1.0, 0.5 / result.grad_norm)
        for piece in actor.gradients.pieces:
            compare("gradient", piece.grad / clipped, part(grads, piece), piece.spec.name)
        compare("loss", np.array(result.loss), np.array(loss))
        compare("norm", np.array(result.grad_norm), np.array(norm))
        for piece in actor.gradients.pieces:
            compare("weight", piece.weight, part(weights, piece), piece.spec.name)
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:3]}")
