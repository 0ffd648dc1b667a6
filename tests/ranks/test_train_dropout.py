"""GPT-2 with dropout trains like plain torch with the same masks in every layout, holds what is
predicted and sends what its layers declare. MPITRAIN_EFFORT=all takes every layout.
"""

import pytest
from conftest import EVERY, agree, but_for
from test_model_new_layer import differences

VOCAB = 64
RATES = dict(embedding=0.2, attention=0.3, residual=0.15)
DROPOUT = tuple(f"model.{name}_dropout={rate}" for name, rate in RATES.items())
SETTINGS = (
    "model.family=gpt2", "model.positions=20", "model.layers=4", "model.width=16", "model.ffn=24",
    f"model.vocab={VOCAB}", "model.heads=4", "data.sequence=16", "batch.global=8", "precision.compute=fp64",
    "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.decay=0", "optimizer.clip=0",
    "comm.bucket_mb=0.002", "comm.timeout_s=200", *DROPOUT,
)  # fmt: skip
LAYOUTS = {
    1: (
        "batch.micro=2", "memory.recompute=selective", "pipeline.schedule=seq1f1b memory.recompute=full",
        "batch.micro=4 memory.recompute=every-k memory.every=2", "model.tied=false",
    ),
    2: (
        "tp=2", "tp=2 sequence=false", "tp=2 async_tp=true", "tp=2 memory.recompute=selective",
        "pp=2 pipeline.schedule=zbv", "pp=2 pipeline.schedule=dualpipe batch.micro=2", "dp=2 zero=3",
        "dp=2 zero=0 memory.recompute=full", "cp=2 context=zigzag", "cp=2 context=ring",
        "cp=2 context=gather memory.recompute=selective", "cp=2 context=ulysses",
        "cp=2 context=zigzag memory.recompute=full", "tp=2 pipeline.schedule=seq1f1b",
        "dp=2 memory.offload=activations",
    ),
    4: (
        "tp=4", "tp=2 pp=2 pipeline.schedule=zb-h1", "cp=2 tp=2 context=gather", "cp=2 context=ulysses dp=2",
        "cp=2 tp=2 context=ulysses", "tp=2 dp=2 zero=2", "cp=2 context=zigzag tp=2 async_tp=true",
        "cp=4 context=ring",
    ),
}  # fmt: skip
CASES = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]
ENOUGH = (
    "batch.micro=2", "pipeline.schedule=seq1f1b memory.recompute=full", "tp=2 async_tp=true",
    "tp=2 sequence=false", "pp=2 pipeline.schedule=dualpipe batch.micro=2", "dp=2 zero=3",
    "cp=2 context=zigzag memory.recompute=full", "cp=2 context=ring", "cp=2 context=ulysses",
    "cp=2 context=gather memory.recompute=selective", "tp=2 pipeline.schedule=seq1f1b",
    "tp=2 pp=2 pipeline.schedule=zb-h1", "cp=2 tp=2 context=ulysses", "cp=4 context=ring",
)  # fmt: skip
CASES = CASES if EVERY else [(size, layout) for size, layout in CASES if layout in ENOUGH]
LONGER = [
    (2, "cp=2 context=zigzag memory.recompute=full"), (4, "cp=2 tp=2 context=ulysses"),
    (4, "cp=4 context=ring"), (2, "cp=2 context=ring"), (2, "tp=2 async_tp=true"),
    (2, "cp=2 context=gather memory.recompute=selective"), (2, "tp=2 sequence=false"),
    (2, "pp=2 pipeline.schedule=dualpipe batch.micro=2"),
]  # fmt: skip


def plan_with(world_size, layout, settings=SETTINGS):
    from mpitrain import config
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    return plan_of(resolve(config.load(None, (*settings, *keys)), world_size, VOCAB))


@pytest.mark.few_cases(4)
@pytest.mark.sizes(1, 2)
@pytest.mark.mpi
@pytest.mark.parametrize(("size", "layout"), but_for(CASES, LONGER))
def test_dropout_trains_like_plain_torch_with_the_same_masks(world, size, layout):
    import oracle_dropout

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    plan = plan_with(size, layout)
    has = dict(RATES, blocks=4, heads=4, eps=1e-5, seed=plan.config.run.seed)
    steps = iter((1, 2))
    wrong = differences(
        world,
        plan,
        plan_with(1, "model.tied=false" if "tied=false" in layout else "").parameters(),
        lambda weights, rows: oracle_dropout.loss(weights, rows, has, next(steps)),
    )
    agree(world, not wrong, f"{wrong[:3]}")
