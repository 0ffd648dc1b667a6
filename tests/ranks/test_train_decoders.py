"""Families with blocks of their own train like plain torch in every layout, hold what is predicted and send
what their layers declare. MPITRAIN_EFFORT=all takes every layout for every family, not a few for some.
"""

import pytest
from conftest import EVERY, WITH_LONG, agree, but_for
from family_settings import FAMILIES
from pairwise_cases import pairwise_cases
from support.quick_schedules import NAMES
from test_model_new_layer import differences

from mpitrain.schedules.catalog import FAMILIES as SCHEDULES

VOCAB = 64
SETTINGS = (
    "model.layers=4", "model.width=16", "model.ffn=24", f"model.vocab={VOCAB}", "model.heads=4",
    "data.sequence=16", "batch.global=8", "precision.compute=fp64", "optimizer.name=sgd",
    "optimizer.momentum=0", "optimizer.decay=0", "optimizer.clip=0", "comm.bucket_mb=0.002",
    "comm.timeout_s=200",
)  # fmt: skip
TWO_CHUNKS = [name for name, schedule in SCHEDULES.items() if schedule.placed in ("looped", "v")]
LAYOUTS = {
    1: ("", "memory.recompute=selective", "pipeline.schedule=seq1f1b memory.recompute=full"),
    2: (
        "tp=2", "tp=2 sequence=false", "tp=2 async_tp=true", "tp=2 memory.recompute=selective",
        "pp=2 pipeline.schedule=zbv", "pp=2 pipeline.schedule=dualpipe", "dp=2 zero=3",
        "dp=2 zero=1 data.documents=separate", "cp=2 context=zigzag", "cp=2 context=ring",
        "cp=2 context=gather", "cp=2 context=ulysses", "cp=2 context=zigzag data.documents=separate",
        "tp=2 pipeline.schedule=seq1f1b", "dp=2 memory.offload=activations",
    ),
    4: (
        "tp=4", "tp=2 pp=2 pipeline.schedule=zb-h1", "cp=2 tp=2 context=gather", "cp=2 context=ulysses dp=2",
        "tp=2 dp=2 zero=2", "cp=2 context=zigzag tp=2 async_tp=true",
    ),
    8: (
        "tp=2 cp=2 pp=2", "tp=4 dp=2 zero=3", "cp=2 dp=2 pp=2 pipeline.schedule=zbv zero=2",
        "tp=2 cp=2 dp=2 context=zigzag zero=3", "tp=2 dp=2 pp=2 pipeline.schedule=interleaved",
        "tp=2 pp=4 pipeline.schedule=zb-h2", "cp=2 pp=4 context=ulysses", "dp=8 zero=3",
        "cp=4 tp=2 context=ring", "tp=2 dp=2 pp=2 pipeline.schedule=dualpipe zero=1",
    ),
}  # fmt: skip
if EVERY:
    LAYOUTS[2] += tuple(f"pp=2 pipeline.schedule={name}" for name in NAMES)
    LAYOUTS[4] += tuple(f"pp=4 pipeline.schedule={name}" for name in NAMES if name not in TWO_CHUNKS)
CASES = [
    (family, size, layout)
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for family in FAMILIES
    if EVERY or size < 8
    # refused with experts: rows are of positions that tp divides, and of other numbers each time
    if family != "glm-4.5" or not any(word in layout for word in ("sequence=false", "memory.offload"))
]


def features(case):
    """Return what meets in a case."""
    family, _, layout = case
    return (family, *[word for word in layout.split() if not word.startswith("pp=")], *["one"] * (not layout))


def keys_of(case):
    """Return what meets in a case, whatever value a key has."""
    return tuple(dict.fromkeys(word.partition("=")[0] for word in features(case)))


CASES += [
    ("glm-4.5", 2, "ep=2"), ("glm-4.5", 2, "etp=2"), ("glm-4.5", 4, "tp=2 ep=4"),
    ("glm-4.5", 4, "ep=2 dp=2 pp=2 zero=2"),
    *[
        ("glm-4.5", 8, layout)
        for layout in ("tp=2 ep=4 pp=2", "ep=4 dp=4 tp=2 zero=3", "ep=2 etp=2 tp=2 cp=2 pp=2")
        if EVERY
    ],
]  # fmt: skip
if not EVERY:
    CASES = pairwise_cases(CASES, features if WITH_LONG else keys_of, lambda case: case[1])
    LONGER = [
        ("llama", 4, "cp=2 tp=2 context=gather"), ("llama", 4, "cp=2 context=zigzag tp=2 async_tp=true"),
        ("glm-4.5", 4, "tp=2 ep=4"), ("glm-4.5", 4, "ep=2 dp=2 pp=2 zero=2"),
        ("gpt2", 4, "cp=2 context=ulysses dp=2"), ("llama", 2, "tp=2 memory.recompute=selective"),
    ]  # fmt: skip
    CASES = but_for(CASES, [case for case in LONGER if case in CASES])


def plan_with(family, world_size, layout):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    given = (*SETTINGS, f"model.family={family}", *FAMILIES[family], *keys)
    return plan_of(resolve(settings.load(None, given), world_size, VOCAB))


def meaning(config):
    """Return what the oracle is given of a configuration."""
    import msgspec

    model = config.model
    own, experts = (msgspec.to_builtins(table) for table in (config.attention, config.experts))
    gemma = model.family.startswith("gemma")
    return dict(
        own, experts=experts, eps=model.eps, logit_cap=model.logit_cap, blocks=model.layers,
        head_width=own["head_width"] or model.width // model.heads, plus_one=gemma, gelu=gemma,
        sequence=config.data.sequence,
        scale=model.width**0.5 if gemma else 1.0, whole=model.family.startswith("olmo"),
    )  # fmt: skip


@pytest.mark.few_cases(6)
@pytest.mark.mpi
@pytest.mark.parametrize(("family", "size", "layout"), CASES)
def test_a_family_trains_like_plain_torch_holds_and_sends_what_it_declares(world, family, size, layout):
    import oracle_decoders

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    plan = plan_with(family, size, layout)
    has = meaning(plan.config)
    whole = plan_with(family, 1, "").parameters()
    wrong = differences(
        world,
        plan,
        whole,
        lambda weights, rows: oracle_decoders.loss(weights, rows, has),
        routed=bool(plan.config.experts.count),
    )
    agree(world, not wrong, f"{wrong[:3]}")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_logits_are_capped_in_other_types_too(compute):
    """In fp32 products of matrices are views, whose change in place autograd watches."""
    import torch

    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    plan = plan_with(
        "gemma2", 1, f"precision.compute={compute} data.sequence=128 model.width=64 model.vocab=256"
    )
    stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu")))
    rows = torch.randint(256, (1, 129), generator=torch.Generator().manual_seed(1))
    loss = run(stage.forward(0, None, Microbatch(rows[:, :-1], rows[:, 1:])))
    run(stage.backward(0, None, None))
    assert abs(loss.item() / 128 - 5.545) < 0.1
