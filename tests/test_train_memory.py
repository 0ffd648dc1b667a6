"""What `mpitrain memory` predicts is what a rank allocates."""

import pytest
from conftest import agree
from test_train_zero import resolved

pytestmark = pytest.mark.mpi(min_size=2)

CHOICES = [
    ("parallel.zero=0",),
    ("parallel.zero=1", "precision.compute=bf16"),
    ("parallel.zero=2", "optimizer.name=muon"),
    ("parallel.zero=1", "optimizer.moments=bf16"),
    ("parallel.zero=0", "memory.offload=all", "optimizer.moments=bf16"),
    ("parallel.zero=2", "memory.offload=optimizer", "precision.compute=bf16"),
    ("parallel.zero=3", "optimizer.moments=bf16", "optimizer.name=muon", "precision.compute=bf16"),
    ("parallel.zero=3", "precision.compute=bf16"),
    ("parallel.zero=3", "model.tied=false", "optimizer.name=sgd"),
    ("parallel.zero=2", "numerics.reproducible=layout"),
    ("parallel.zero=0", "numerics.reproducible=layout"),
]
LAYOUTS = {
    2: [("parallel.dp=2",), ("parallel.dp=1", "parallel.pp=2", "pipeline.schedule=zbv"), ("parallel.tp=2",), ("parallel.cp=2",)],
    4: [("parallel.dp=4", "parallel.dp_shard=2"), ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=1f1b")],
}


def one_step(world, *settings):
    """Run a step; return what was predicted for this rank and for the one with the largest shard, and what was measured."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.layout.memory import predict
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.training.trainer import build_mesh

    config = resolved(world, *settings)
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    shape = config.batch.global_, config.data.sequence + 1
    rows = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).chunk(config.parallel.dp)[mesh["dp"].rank]
    watch = Watch(actor.stages.values(), actor.site.constants())
    actor.run_step(1, actor.cut(rows, 7 if config.data.documents == "separate" else None), 1e-3, watch=watch)
    predicted, measured = [predict(plan, shards)[actor.pp.rank] for shards in (actor.shards_here, None)], measure(actor, watch)
    mesh.free()
    return *predicted, measured


@pytest.mark.parametrize("choice", CHOICES, ids=",".join)
@pytest.mark.parametrize("layout", [layout for found in LAYOUTS.values() for layout in found], ids=",".join)
def test_the_state_that_was_predicted_is_allocated(world, layout, choice):
    """To the byte, on every rank: what a shard holds of padding the optimiser keeps nothing of."""
    if choice[0] == "parallel.zero=0":
        layout = tuple(s for s in layout if "dp_shard" not in s)
    predicted, most, measured = one_step(world, *layout, *choice)
    agree(world, predicted == measured._replace(activations=predicted.activations), f"predicted {predicted}, found {measured}")
    agree(world, most.moments >= measured.moments and most.host >= measured.host, f"at most {most}, found {measured}")
    agree(world, measured.moments <= predicted.weights * 4, f"{measured}")
    offload = "memory.offload=optimizer" in choice or "memory.offload=all" in choice
    agree(world, not measured.moments and measured.host if offload else not measured.host, f"offloaded: {offload}, {measured}")


SCHEDULES = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe", "dualpipev", "seq1f1b"]
HELD = {
    2: [
        *(f"parallel.pp=2 pipeline.schedule={name}" for name in SCHEDULES),
        *(f"parallel.pp=2 pipeline.schedule=zb-h1 memory.recompute={mode}" for mode in ("selective", "full", "every-k")),
        *(f"parallel.pp=2 pipeline.schedule=seq1f1b pipeline.segments=4 memory.recompute={mode}" for mode in ("none", "full")),
        "parallel.pp=2 pipeline.schedule=zbv memory.offload=activations",
        "parallel.pp=2 pipeline.schedule=seq1f1b memory.offload=activations",
        "parallel.tp=2 parallel.async_tp=true memory.offload=activations",
        "parallel.cp=2 parallel.context=ulysses memory.recompute=selective memory.offload=activations",
        "parallel.pp=2 precision.compute=bf16",
        "parallel.pp=2 precision.compute=fp8 pipeline.schedule=zb-h1",
        "parallel.tp=2",
        "parallel.tp=2 parallel.sequence=false",
        "parallel.cp=2",
        "parallel.cp=2 parallel.context=gather",
        "parallel.cp=2 parallel.context=ulysses",
        "parallel.dp=2 parallel.zero=3",
        "parallel.dp=2 parallel.zero=3 memory.recompute=full",
        "parallel.dp=2 parallel.zero=3 data.documents=separate",
        "parallel.dp=2 data.documents=separate",
        "parallel.dp=2 data.documents=separate memory.offload=activations",
        "parallel.dp=2 data.documents=separate memory.recompute=selective",
    ],
    4: ["parallel.pp=2 parallel.tp=2 pipeline.schedule=zb-h1 data.documents=separate", "parallel.pp=4 pipeline.schedule=v-half"],
}


LARGE = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64", "batch.global=8")


@pytest.mark.parametrize(("size", "settings"), [(size, settings) for size in HELD for settings in HELD[size]])
def test_the_activations_that_were_predicted_are_held(world, size, settings):
    """Within 5%, at the peak of a step: of what autograd and the stages keep, every storage counted once; in host memory within 2%."""
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    predicted, _, held = one_step(world, *LARGE, *settings.split())
    agree(world, abs(predicted.activations - held.activations) < 0.05 * held.activations, f"predicted {predicted}, held {held}")
    agree(world, abs(predicted.host - held.host) <= 0.02 * held.host, f"predicted {predicted}, held {held}")
    agree(world, (held.host > 0) == ("offload" in settings), f"in host memory: {held}")
