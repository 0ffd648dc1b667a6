"""What `mpitrain memory` predicts is what a rank allocates."""

import pytest
from conftest import EVERY, WITH_LONG, agree, but_for
from training import of_tensors, one_step

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]

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
    ("parallel.zero=2", "optimizer.name=lion:LION", "optimizer.moments=bf16"),
    ("parallel.zero=2", "numerics.reproducible=layout"),
    ("parallel.zero=0", "numerics.reproducible=layout"),
    ("parallel.zero=3", "parallel.gather=step", "precision.compute=bf16"),
]
LAYOUTS = {
    2: [
        ("parallel.dp=2",),
        ("parallel.dp=1", "parallel.pp=2", "pipeline.schedule=zbv"),
        ("parallel.tp=2",),
        ("parallel.cp=2",),
    ],
    4: [
        ("parallel.dp=4", "parallel.dp_shard=2"),
        ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=1f1b"),
    ],
}
ALONE = [  # (layout, choice): each choice with data parallelism, and each other layout with some
    (layout, choice)
    for layout in [layout for found in LAYOUTS.values() for layout in found]
    for number, choice in enumerate(CHOICES)
    if EVERY
    or (
        layout in LAYOUTS[2][:1] or (number + LAYOUTS[2].index(layout)) % 3 == 0
        if layout in LAYOUTS[2]
        else number % 2
    )
]


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("layout", "choice"), ALONE, ids=",".join)
def test_the_state_that_was_predicted_is_allocated(world, layout, choice):
    """To the byte, on every rank: what a shard holds of padding the optimiser keeps nothing of."""
    if choice[0] == "parallel.zero=0":
        layout = tuple(s for s in layout if "dp_shard" not in s)
    predicted, most, measured = one_step(world, *layout, *choice)
    found = of_tensors(predicted, measured)._replace(activations=measured.activations)
    agree(world, found == measured, f"predicted {predicted}, found {measured}")
    agree(
        world,
        most.moments >= measured.moments and most.host >= measured.host,
        f"at most {most}, found {measured}",
    )
    agree(world, measured.moments <= predicted.weights * 4, f"{measured}")
    offload = "memory.offload=optimizer" in choice or "memory.offload=all" in choice
    agree(
        world,
        not measured.moments and measured.host if offload else not measured.host,
        f"offloaded: {offload}, {measured}",
    )


EXPERTS = "model.family=mixtral", "experts.count=8", "experts.active=2", "precision.compute=bf16"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_that_a_rank_has_alone_are_not_lent(world, zero, ep):
    """To the byte. With ep = dp nothing of them is divided: their weights stay where they are."""
    if world.size != 2:
        pytest.skip("2 ranks tell")
    keys = "parallel.dp=2", f"parallel.ep={ep}", f"parallel.zero={zero}"
    predicted, _, measured = one_step(world, *keys, *EXPERTS)
    found = of_tensors(predicted, measured)._replace(activations=measured.activations)
    agree(world, found == measured, f"predicted {predicted}, found {measured}")


SCHEDULES = ["1f1b", "interleaved", "zbv", "v-min", "dualpipe", "seq1f1b"]
SCHEDULES += ["gpipe", "zb-h1", "zb-h2", "v-half", "dualpipev"] if EVERY else []
HELD = {
    2: [
        *(f"parallel.pp=2 pipeline.schedule={name}" for name in SCHEDULES),
        *(
            f"parallel.pp=2 pipeline.schedule=zb-h1 memory.recompute={mode}"
            for mode in ("selective", "full", "every-k")
        ),
        *(
            f"parallel.pp=2 pipeline.schedule=seq1f1b pipeline.segments=4 memory.recompute={mode}"
            for mode in ("none", "full")
        ),
        "parallel.pp=2 pipeline.schedule=zbv memory.offload=activations",
        "parallel.pp=2 pipeline.schedule=seq1f1b memory.offload=activations",
        "parallel.tp=2 parallel.async_tp=true memory.offload=activations",
        "parallel.cp=2 parallel.context=ulysses memory.recompute=selective memory.offload=activations",
        "parallel.pp=2 precision.compute=bf16",
        *["parallel.pp=2 precision.compute=bf16 run.compile=true"] * WITH_LONG,
        "parallel.pp=2 pipeline.schedule=zb-h1 model.mtp=2",
        "parallel.pp=2 precision.compute=fp16",
        "parallel.pp=2 precision.compute=fp8 pipeline.schedule=zb-h1",
        "parallel.tp=2",
        "parallel.tp=2 parallel.sequence=false",
        *(
            f"parallel.tp=2 parallel.regather=true {more}"
            for more in (
                "memory.recompute=selective",
                "memory.offload=activations precision.compute=bf16",
                "batch.micro=2 model.family=olmo2",
                "precision.compute=fp8 model.kv_heads=2 model.ffn=128",
            )
        ),
        "parallel.cp=2",
        "parallel.cp=2 parallel.context=gather",
        "parallel.cp=2 data.documents=separate data.sequence=2048 model.width=16 model.ffn=16",
        "parallel.cp=2 parallel.context=ulysses",
        "parallel.dp=2 parallel.zero=3",
        "parallel.dp=2 parallel.zero=3 memory.recompute=full",
        "parallel.dp=2 parallel.zero=3 data.documents=separate",
        "parallel.dp=2 data.documents=separate memory.offload=activations pipeline.tail=3",
        "parallel.dp=2 data.documents=separate memory.recompute=selective pipeline.tail=3",
    ],
    4: [
        "parallel.pp=2 parallel.tp=2 pipeline.schedule=zb-h1 data.documents=separate",
        "parallel.pp=2 parallel.tp=2 pipeline.schedule=zb-h1 parallel.regather=true",
        "parallel.pp=2 parallel.tp=2 pipeline.schedule=zbv parallel.regather=true",
        "parallel.cp=2 parallel.tp=2 parallel.regather=true memory.recompute=selective",
        "parallel.pp=4 pipeline.schedule=v-half",
    ],
}


BETWEEN = [
    f"comm.levels={levels} comm.transport={transport} {keys}"
    for levels in ("auto", "one")
    for transport in ("auto", "messages")
    for keys in (
        "parallel.zero=0",
        "parallel.zero=1",
        "parallel.zero=1 precision.reduce=bf16",
        "parallel.zero=2 precision.compute=bf16",
        "parallel.zero=3",
        "parallel.zero=3 parallel.dp_shard=2",
    )
]
BETWEEN_LONGER = [
    "comm.levels=auto comm.transport=auto parallel.zero=1",
    "comm.levels=auto comm.transport=auto parallel.zero=2 precision.compute=bf16",
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "settings", but_for([each for n, each in enumerate(BETWEEN) if EVERY or n % 3 != 2], BETWEEN_LONGER)
)
def test_what_sums_and_gathers_over_nodes_hold_is_predicted(world, settings):
    """On two nodes of two ranks.

    How many are on their way at once, and so the most of it, is a matter of time.
    """
    if world.size != 4:
        pytest.skip("4 ranks tell")
    keys = "parallel.dp=4", "comm.node_ranks=2", "comm.bucket_mb=0.25", *LARGE
    predicted, _, measured = one_step(world, *keys, *settings.split())
    agree(
        world,
        measured.messages <= 1.5 * predicted.messages,
        f"{settings}: predicted {predicted}, held {measured}",
    )


LARGE = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64", "batch.global=8")
HELD_LONGER = [
    (2, "parallel.tp=2 parallel.async_tp=true memory.offload=activations"),
    (2, "parallel.pp=2 pipeline.schedule=seq1f1b pipeline.segments=4 memory.recompute=none"),
    (2, "parallel.tp=2 parallel.regather=true batch.micro=2 model.family=olmo2"),
    (2, "parallel.tp=2 parallel.sequence=false"),
    (2, "parallel.cp=2 parallel.context=gather"),
    (2, "parallel.pp=2 precision.compute=fp16"),
    (4, "parallel.pp=2 parallel.tp=2 pipeline.schedule=zb-h1 data.documents=separate"),
    (4, "parallel.pp=4 pipeline.schedule=v-half"),
]


@pytest.mark.few_cases(7)
@pytest.mark.parametrize(
    ("size", "settings"), but_for([(size, settings) for size in HELD for settings in HELD[size]], HELD_LONGER)
)
def test_the_activations_that_were_predicted_are_held(world, size, settings):
    """Within 5%, at the peak of a step.

    Of what autograd and the stages keep, every storage counted once; in host memory within 2%.
    """
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    predicted, _, held = one_step(world, *LARGE, *settings.split())
    agree(
        world,
        abs(predicted.activations - held.activations) < 0.05 * held.activations,
        f"predicted {predicted}, held {held}",
    )
    recomputed = predicted.activations + predicted.recomputed, held.activations + held.recomputed
    agree(
        world,
        abs(recomputed[0] - recomputed[1]) < 0.08 * recomputed[1],
        f"recomputed, predicted and held: {recomputed}",
    )
    agree(world, abs(predicted.host - held.host) <= 0.02 * held.host, f"predicted {predicted}, held {held}")
    agree(world, (held.host > 0) == ("offload" in settings), f"in host memory: {held}")
