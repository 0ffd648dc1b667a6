"""Families train like plain torch in every layout, and their attention holds and sends what its
layers declare.

Norms of heads, biases, sinks, windows, YaRN; latent attention, with and without low-rank queries;
and these with experts. MPITRAIN_EFFORT=all takes every layout for every kind of attention, not a
few for some.
"""

from dataclasses import replace

import pytest
from conftest import EVERY, agree, but_for
from oracle_families import further_loss
from oracle_families import loss as plain_loss
from pairwise_cases import pairwise_cases
from support.quick_schedules import NAMES
from training import of_tensors

from mpitrain.model.layers.latent_attention import latent_heads
from mpitrain.plan.declared.family import ModelFamily
from mpitrain.plan.declared.layer import ModelLayers

WIDTH = 16
FFN = 24
VOCAB = 64
BLOCKS = 4
STEPS = 2 if EVERY else 1  # what a second step finds other than a first is no matter of attention
SETTINGS = (
    f"model.layers={BLOCKS}", f"model.width={WIDTH}", f"model.ffn={FFN}", f"model.vocab={VOCAB}",
    "model.heads=4", "data.sequence=16",
    "batch.global=8", "batch.micro=2", "precision.compute=fp64", "optimizer.name=sgd",
    "optimizer.momentum=0", "optimizer.decay=0",
    "optimizer.clip=0", "comm.bucket_mb=0.002", "comm.timeout_s=200",
)  # fmt: skip
YARN = dict(theta=500.0, yarn_factor=4.0, yarn_length=64, yarn_mscale=0.7)
LATENT = dict(YARN, head_width=4, kv_rank=10, rotary_width=6, value_width=8)
KINDS = {
    "normed": dict(head_width=6, theta=100.0, yarn_factor=1.0, yarn_length=0, yarn_mscale=1.0),
    "sinking": dict(YARN, head_width=8, window=3),
    "latent": dict(LATENT, q_rank=12),
    "latent-plain-queries": dict(LATENT, q_rank=0),
}
SPARSE = {  # families as they are, with their keys
    "qwen3-moe": ("attention.head_width=6", "model.kv_heads=2"),
    "gpt-oss": (*(f"attention.{key}={value}" for key, value in KINDS["sinking"].items()), "model.kv_heads=2"),
    "deepseek-v3": (
        *(f"attention.{key}={value}" for key, value in KINDS["latent"].items()), "experts.first=1",
        "experts.groups=2",
        "experts.groups_active=1",
    ),
}  # fmt: skip
OF_EXPERTS = (
    "experts.count=4",
    "experts.active=2",
    "experts.width=12",
    "experts.balance=none",
    "experts.balance_weight=0",
)
EPS = {"sinking": 1e-5, "gpt-oss": 1e-5}  # of others 1e-6
LIMIT = 0.1  # of gpt-oss's gates, such that it is met
EVERYWHERE = {
    1: (
        "",
        "memory.recompute=selective",
        "pipeline.schedule=seq1f1b",
        "pipeline.schedule=seq1f1b memory.recompute=full",
    ),
    2: (
        "tp=2",
        "tp=2 sequence=false",
        "tp=2 async_tp=true",
        "tp=2 memory.recompute=selective",
        "tp=2 pipeline.schedule=seq1f1b",
        "pp=2 pipeline.schedule=zbv",
        "dp=2 zero=3",
        "dp=2 zero=1 data.documents=separate",
        "dp=2 memory.offload=activations",
    ),
    4: (
        "tp=4",
        "tp=4 sequence=false",
        "tp=4 async_tp=true",
        "tp=2 pp=2",
        "tp=2 dp=2 zero=2",
        "tp=2 pp=2 pipeline.schedule=zb-h1",
    ),
}
SPREAD = {
    2: (
        "cp=2 context=zigzag",
        "cp=2 context=ring",
        "cp=2 context=gather",
        "cp=2 context=ulysses memory.recompute=selective",
        "cp=2 context=zigzag data.documents=separate",
        "cp=2 context=ulysses data.documents=separate",
    ),
    4: (
        "cp=2 context=gather tp=2",
        "cp=2 context=zigzag tp=2 async_tp=true",
        "cp=4 context=ulysses",
        "cp=2 context=ulysses dp=2 zero=3",
    ),
}
WHOLE = {  # with MPITRAIN_EFFORT=all: every schedule, and eight ranks
    2: tuple(f"pp=2 pipeline.schedule={name}" for name in NAMES),
    8: (
        "tp=2 cp=2 pp=2 context=zigzag",
        "tp=4 dp=2 zero=3",
        "cp=2 dp=2 pp=2 context=ulysses pipeline.schedule=zbv zero=2",
        "cp=4 context=ring tp=2",
        "tp=2 pp=4 pipeline.schedule=zb-h2",
        "tp=2 dp=2 pp=2 pipeline.schedule=interleaved",
    ),
}
ENOUGH = (
    "",
    "tp=2",
    "tp=2 sequence=false",
    "dp=2 zero=3",
    "cp=2 context=zigzag",
    "tp=4",
    "cp=2 context=gather tp=2",
)
CASES = [
    (kind, size, layout)
    for kind in KINDS
    for size, layouts in EVERYWHERE.items()
    for layout in (*layouts, *SPREAD.get(size, ()))
    if EVERY or kind in ("sinking", "latent") or layout in ENOUGH
]
FOLDED = {
    1: ("", "memory.recompute=selective experts.buffer=0.3"),
    2: ("tp=2 ep=2", "etp=2", "ep=2 zero=3", "pp=2 pipeline.schedule=zbv"),
    4: ("tp=2 ep=4 experts.buffer=0.4", "ep=2 etp=2 tp=2", "tp=2 pp=2 ep=2 pipeline.schedule=zb-h1"),
}
FOLDED_ON_8 = (
    "tp=2 ep=4 pp=2",
    "ep=4 tp=2 zero=3",
    "cp=2 context=zigzag ep=2 zero=2",
    "tp=2 cp=2 pp=2 ep=4 pipeline.schedule=zbv",
    "ep=2 etp=2 tp=2 pp=2 pipeline.schedule=dualpipe batch.micro=1",
)
CASES += [(kind, size, layout) for kind in SPARSE for size, layouts in FOLDED.items() for layout in layouts]
if EVERY:
    CASES += [
        (kind, size, layout)
        for kind in (*KINDS, *SPARSE)
        for size, layouts in {**WHOLE, 4: SPREAD[4]}.items()
        for layout in layouts
    ]
    CASES += [(kind, 8, layout) for kind in SPARSE for layout in FOLDED_ON_8]
    CASES = list(dict.fromkeys(CASES))
FURTHER = {  # predicted tokens besides the next
    ("sinking", 1): (
        "model.mtp=2 model.mtp_weight=0.7",
        "model.mtp=1 memory.recompute=selective",
        "model.mtp=1 pipeline.schedule=seq1f1b",
    ),
    ("latent", 2): (
        "model.mtp=2 tp=2",
        "model.mtp=1 tp=2 sequence=false model.tied=false",
        "model.mtp=1 tp=2 async_tp=true",
        "model.mtp=1 pp=2",
        "model.mtp=2 pp=2 model.tied=false",
        "model.mtp=1 pp=2 pipeline.schedule=zbv model.tied=false",
        "model.mtp=1 dp=2 zero=3",
        "model.mtp=2 pp=2 pipeline.schedule=dualpipe",
        "model.mtp=2 cp=2 context=zigzag",
        "model.mtp=2 cp=2 context=ring",
        "model.mtp=2 dp=2 zero=2 data.documents=separate model.tied=false",
        "model.mtp=1 cp=2 context=gather data.documents=separate",
    ),
    ("deepseek-v3", 2): (
        "model.mtp=1 tp=2 ep=2",
        "model.mtp=1 pp=2 model.tied=false",
        "model.mtp=1 ep=2 zero=3",
    ),
    ("latent", 4): (
        "model.mtp=1 tp=2 pp=2 pipeline.schedule=zb-h1",
        "model.mtp=2 tp=2 cp=2 context=zigzag model.tied=false",
    ),
    ("deepseek-v3", 4): ("model.mtp=1 tp=2 pp=2 ep=2 pipeline.schedule=dualpipev",),
}
CASES += [(kind, size, layout) for (kind, size), layouts in FURTHER.items() for layout in layouts]


def features(case):
    """Return what meets in a case: a kind, and words of a layout."""
    kind, _, layout = case
    return (
        kind,
        *layout.split(),
        *["plain"] * (not layout),
        *["sequence=true"] * ("tp=" in layout and "sequence=" not in layout),
    )


LONGER = [
    ("normed", 4, "cp=2 context=gather tp=2"),
    ("normed", 2, "cp=2 context=zigzag"),
    ("sinking", 2, "dp=2 zero=1 data.documents=separate"),
    ("sinking", 4, "cp=4 context=ulysses"),
    ("sinking", 4, "cp=2 context=zigzag tp=2 async_tp=true"),
    ("sinking", 4, "tp=4 sequence=false"),
    ("latent", 2, "model.mtp=2 dp=2 zero=2 data.documents=separate model.tied=false"),
    ("qwen3-moe", 4, "ep=2 etp=2 tp=2"),
]
CASES = CASES if EVERY else but_for(pairwise_cases(CASES, features, lambda case: case[1]), LONGER)


def family(config):
    """Blocks of attention of a kind, and a gated feed-forward."""
    from mpitrain.model.layers.attention import Attention
    from mpitrain.model.layers.embedding_and_head import Embedding, Head
    from mpitrain.model.layers.feed_forward import FeedForward
    from mpitrain.model.layers.latent_attention import LatentAttention
    from mpitrain.model.layers.rope import rope_of
    from mpitrain.plan.settings.attention import head_width

    model = config.model
    own = config.attention
    depth = 2 * config.model.layers
    kind = kind_of(config)
    eps = EPS.get(kind, 1e-6)
    if kind == "normed":
        rope = rope_of(own, head_width(config))
        attention = BLOCKS * [
            Attention(model.width, model.heads, model.kv_heads, rope, depth, eps, normed=True)
        ]
    elif kind == "sinking":
        rope = replace(rope_of(own, head_width(config)), rounded=False)
        make = lambda window: Attention(  # noqa: E731
            model.width,
            model.heads,
            model.kv_heads,
            rope,
            depth,
            eps,
            biased=True,
            biased_output=True,
            window=window,
            sinks=True,
        )
        attention = 2 * [make(own.window), make(0)]
    else:
        rope = rope_of(own, own.rotary_width)
        sizes = own.head_width, own.value_width, own.q_rank, own.kv_rank
        attention = BLOCKS * [LatentAttention(model.width, model.heads, *sizes, rope, depth, eps)]
    blocks = tuple((layer, FeedForward(model.width, model.ffn, depth, eps)) for layer in attention)
    return ModelLayers(
        Embedding(model.vocab, model.width, model.tied),
        blocks,
        Head(model.vocab, model.width, model.tied, eps),
    )


def kind_of(config):
    """Return the kind of attention, or the family of its own name."""
    return next((kind for kind, named in NAMED.items() if named == config.model.family), config.model.family)


NORMED = ModelFamily("normed", family, KINDS["normed"])
SINKING = ModelFamily("sinking", family, KINDS["sinking"])
LATENT_QUERIES = ModelFamily("latent", family, KINDS["latent"], heads=latent_heads, grouped=False)
PLAIN_QUERIES = ModelFamily("plain", family, KINDS["latent-plain-queries"], heads=latent_heads, grouped=False)
NAMED = {  # as plug-ins
    kind: f"test_train_families:{name}"
    for kind, name in zip(KINDS, ("NORMED", "SINKING", "LATENT_QUERIES", "PLAIN_QUERIES"))
}


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    from mpitrain.model.families import gpt_oss

    monkeypatch.setattr(gpt_oss, "LIMIT", LIMIT)


def plan_with(kind, world_size, layout):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    own = (
        (*SPARSE[kind], *OF_EXPERTS)
        if kind in SPARSE
        else ()
        if kind.startswith("latent")
        else ("model.kv_heads=2",)
    )
    return plan_of(
        resolve(
            settings.load(None, (*SETTINGS, f"model.family={NAMED.get(kind, kind)}", *own, *keys)),
            world_size,
            VOCAB,
        )
    )


def oracle_of(plan):
    """Return what a model has, as the oracle is told."""
    import msgspec

    kind = kind_of(plan.config)
    own, experts = (msgspec.to_builtins(table) for table in (plan.config.attention, plan.config.experts))
    return dict(
        own, eps=EPS.get(kind, 1e-6), rounded=kind not in ("sinking", "gpt-oss"), experts=experts, limit=LIMIT
    )


def plain_steps(plan, ends):
    """Return of each step of plain torch: (rows, loss, that of further tokens, gradients, weights
    after it).
    """
    import torch
    from test_model_new_layer import initial

    has = oracle_of(plan)
    model = plan.config.model
    found = []
    weights = {spec.name: initial(spec) for spec in plan.parameters()}
    for step in range(1, STEPS + 1):
        rows = torch.randint(1, VOCAB, (8, 17), generator=torch.Generator().manual_seed(step))
        if ends is not None:
            rows[:, 6] = ends  # two documents, each by itself
        parts = [rows] if ends is None else [rows[:, :7], rows[:, 7:]]
        counts = [rows[:, 1:].numel() for rows in parts]
        loss = sum(
            count * plain_loss(weights, rows, BLOCKS, has) for count, rows in zip(counts, parts)
        ) / sum(counts)
        more = (
            sum(further_loss(weights, rows, BLOCKS, has, model.mtp) for rows in parts) / sum(counts)
            if model.mtp
            else torch.zeros(())
        )
        (loss + model.mtp_weight * more).backward()
        grads = {name: weight.grad for name, weight in weights.items()}
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.0 if weight.grad is None else 0.1 * weight.grad
                weight.grad = None
        after = {name: weight.detach().clone() for name, weight in weights.items()}
        found.append((rows, loss.item(), more.item(), grads, after))
    return found


@pytest.mark.few_cases(7)
@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "size", "layout"), CASES)
def test_attention_trains_like_plain_torch_holds_and_sends_what_it_declares(world, kind, size, layout):
    import torch
    from test_rehearsal import recorded
    from test_train_oracle import part
    from training import once

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.plan.predict.memory import predict

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    plan = plan_with(kind, size, layout)
    wrong = []
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    same_model = " ".join(word for word in layout.split() if word.startswith("model."))
    watch = Watch(actor.stages.values(), actor.site.constants())
    dp = plan.config.parallel.dp
    mtp = plan.config.model.mtp
    ends = 0 if plan.config.data.documents == "separate" else None
    steps = once(
        world, ("families", kind, same_model, ends), lambda: plain_steps(plan_with(kind, 1, same_model), ends)
    )
    for step, (rows, loss, more, grads, weights) in enumerate(steps, start=1):
        results = []
        mine = actor.cutter.cut(rows.chunk(dp)[mesh["data"].rank // plan.config.parallel.cp], ends)
        found, _ = recorded(
            mesh, lambda s=step, m=mine, r=results: r.append(actor.run_step(s, m, 0.1, watch=watch))
        )
        wrong += [f"loss {results[0].loss}, not {loss}"] if not abs(results[0].loss - loss) < 1e-10 else []
        if mtp:
            error = abs(results[0].metrics["mtp_loss"] - more)
            wrong += [f"loss of further tokens is off by {error}"] if not error < 1e-10 else []
        trained = [piece for piece in actor.gradients.pieces if piece.spec.trained]
        for piece in trained:
            expected = part(grads, piece)
            error = (piece.grad - expected).abs().max() / (expected.abs().max() + 1e-300)
            wrong += [f"gradient of {piece.spec.name}: {error:.1e}"] if not error < 1e-10 else []
            error = (piece.weight - part(weights, piece)).abs().max()
            wrong += [f"weight {piece.spec.name}: {error:.1e}"] if not error < 1e-10 else []
        declared = Rehearsal(plan, world.rank).training()
        # rows come as they are routed
        wrong += [f"sent {found}, declared {declared}"] if kind in KINDS and found != declared else []
    predicted = predict(plan, actor.shards_here)[actor.pp.rank]
    held = measure(actor, watch)
    wrong += (
        [f"holds {held}, predicted {predicted}"]
        if kind in KINDS and of_tensors(predicted, held) != held
        else []
    )
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:3]}")
