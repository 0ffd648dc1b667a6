"""Mixtures of experts, however they are spread, against plain torch.

loss, norm, every gradient, and the weights after a step.

A case is a layout and a variant of the model; MPITRAIN_EFFORT=all takes all variants with all
layouts, and two steps of each.
"""

import pytest
from conftest import EVERY, LONG, agree, but_for

pytestmark = pytest.mark.mpi
LAYERS = 4
HEADS = 4
KV_HEADS = 2
LR = 0.3
SETTINGS = (
    "model.family=mixtral", f"model.layers={LAYERS}", "model.width=16", f"model.heads={HEADS}",
    f"model.kv_heads={KV_HEADS}",
    "model.ffn=24", "model.vocab=64", "experts.count=8", "data.sequence=8", "batch.global=8",
    "batch.micro=2", "precision.compute=fp64",
    "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.decay=0", "comm.bucket_mb=0.002",
    "comm.timeout_s=200",
)  # fmt: skip
VARIANTS = {
    "mixtral": (),
    "z": ("experts.balance=none", "experts.z_weight=0.1", "experts.active=1", "model.tied=false"),
    "sequence": ("experts.balance=sequence", "experts.balance_weight=0.3", "experts.active=3",
        "experts.normalised=false"),
    "global": ("experts.balance=global", "experts.balance_weight=0.5", "experts.every=2"),
    "deepseek": (
        "experts.balance=bias", "experts.bias_rate=0.05", "experts.balance_weight=0.2",
        "experts.score=sigmoid", "experts.scale=2.5",
        "experts.groups=4", "experts.groups_active=2", "experts.shared=2", "experts.first=1",
        "experts.width=8", "experts.active=3",
    ),
}  # fmt: skip
LAYOUTS = {
    1: ("", "recompute=full", "recompute=selective", "offload=optimizer", "buffer=0.3"),
    2: (
        "ep=2",
        "etp=2",
        "dp=2 zero=1",
        "dp=2 zero=3",
        "tp=2",
        "tp=2 ep=2",
        "tp=2 etp=2",
        "cp=2 ep=2",
        "pp=2",
        "ep=2 buffer=0.2",
        "etp=2 buffer=0.4 recompute=full",
        "pp=2 schedule=zbv",
        "pp=2 schedule=dualpipev",
        "pp=2 schedule=dualpipe",
        "ep=2 zero=2 reduce=microbatch",
        "pp=2 schedule=seq1f1b",
        "pp=2 schedule=seq1f1b recompute=full",
    ),
    4: (
        "ep=4",
        "ep=2 etp=2",
        "ep=2 zero=3",
        "tp=2 ep=4",
        "tp=2 ep=2 zero=2",
        "tp=2 pp=2 ep=2 schedule=zbv",
        "cp=2 tp=2 ep=4 buffer=0.3",
        "cp=2 pp=2 ep=2 schedule=dualpipev",
        "tp=4 ep=2 buffer=0.2",
        "etp=2 zero=3 dp_shard=2",
        "pp=2 ep=2 schedule=zb-h1 buffer=0.3",
        "pp=2 ep=2 schedule=dualpipe recompute=selective micro=1",
    ),
    8: (
        "ep=8 micro=1",
        "tp=2 cp=2 ep=8",
        "tp=2 cp=2 pp=2 ep=4 schedule=zbv",
        "ep=4 etp=2 zero=3 micro=1",
        "tp=2 pp=2 ep=2 etp=2 zero=1",
        "cp=2 ep=2 zero=3",
    ),
}
ON_NODES = {
    2: ("ep=2 node_ranks=1", "tp=2 ep=2 node_ranks=1 buffer=0.4", "cp=2 ep=2 node_ranks=1 recompute=full"),
    4: (
        "ep=4 node_ranks=2",
        "ep=4 node_ranks=1 buffer=0.6",
        "tp=2 ep=2 etp=2 node_ranks=2",
        "ep=2 etp=2 node_ranks=2 buffer=0.7 zero=3",
        "cp=2 tp=2 ep=4 node_ranks=2 buffer=0.4",
        "pp=2 ep=2 node_ranks=1 schedule=dualpipev micro=1",
        "tp=4 ep=4 node_ranks=2 recompute=selective",
        "pp=2 ep=2 node_ranks=1 schedule=zb-h1 buffer=0.6",
    ),
    8: (
        "ep=8 node_ranks=4 micro=1",
        "ep=4 etp=2 node_ranks=4 buffer=0.6 zero=2 micro=1",
        "tp=2 cp=2 ep=8 node_ranks=2 buffer=0.5",
        "ep=8 node_ranks=2 micro=1",
        "tp=2 pp=2 ep=2 etp=2 node_ranks=2",
        "tp=2 cp=2 pp=2 ep=4 node_ranks=2 schedule=zbv",
    ),
}
TABLES = {"recompute": "memory", "offload": "memory", "buffer": "experts", "schedule": "pipeline",
    "micro": "batch"} | {
    "node_ranks": "comm", "documents": "data", "wire": "experts", "active": "experts", "compute": "precision",
    "global": "batch", "sequence": "data",
}  # fmt: skip


def cases(layouts):
    """Return layouts with variants: a few of each, or all of both."""
    every = [
        each for size, found in layouts.items() for each in (found if EVERY or size < 8 else found[1::2])
    ]
    return [
        (layout, variant)
        for number, layout in enumerate(every)
        for place, variant in enumerate(VARIANTS)
        if EVERY or place == number % len(VARIANTS)
    ]


def plan_of_case(world_size, layout, variant):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    words = [word for word in layout.split() if "=" in word]
    keys = (f"{TABLES.get(word.split('=')[0], 'parallel')}.{word}" for word in words)
    return plan_of(resolve(settings.load(None, (*SETTINGS, *VARIANTS[variant], *keys)), world_size, 64))


def initial(spec):
    import torch

    from mpitrain.parallel.zero.initial import normal

    flat = (
        normal(1, spec.name, 0, spec.numel, spec.std * 5)
        if spec.std
        else torch.full((spec.numel,), spec.constant, dtype=torch.float64)
    )
    return flat.view(spec.shape)


def steps_of(layout, variant):
    """Return how many steps tell.

    What a step changes for the next is the bias of experts, and weights that are gathered.
    """
    return 2 if EVERY or variant == "deepseek" or "zero=" in layout else 1


def taught(actor, weights):
    """Give the actor greater weights than it has at first: experts differ then."""
    from training import part

    for piece in actor.gradients.pieces:
        piece.weight.copy_(part(weights, piece))
    actor.restored(0)


def plain_step(config, weights, rows, lr):
    """Return (loss, the router's losses, norm, gradients) of plain torch, and update the weights."""
    import torch
    from oracle_experts import microbatch_loss

    settings = {key: getattr(config.experts, key) for key in config.experts.__struct_fields__}
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    total = 0.0
    routing = 0.0
    loads = {}
    for microbatch in rows.split(config.batch.micro):
        plain, whole = microbatch_loss(w, microbatch, LAYERS, HEADS, KV_HEADS, settings, loads)
        (whole / rows[:, 1:].numel()).backward()
        total += plain.item() / rows[:, 1:].numel()
        routing += (whole - plain).item() / rows[:, 1:].numel()
    grads = {name: value.grad for name, value in w.items() if value.grad is not None}
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    clip = config.optimizer.clip
    for name, value in weights.items():
        if name in grads:
            value -= lr * min(1.0, clip / norm) * grads[name]
        else:
            load = loads[int(name.split(".")[1])]
            value.copy_(
                load / load.sum()
                if name.endswith("load")
                else value + config.experts.bias_rate * (load.mean() - load).sign()
            )
    return total, routing, norm, grads


def plain_steps(config, weights, num_steps):
    """Return what plain torch computes in each step: (rows, its losses, norm, gradients, weights
    after it).
    """
    import torch

    weights = {name: value.clone() for name, value in weights.items()}
    found = []
    for step in range(1, num_steps + 1):
        rows = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(step))
        results = plain_step(config, weights, rows, LR)
        found.append((rows, *results, {name: value.clone() for name, value in weights.items()}))
    return found


def expected_of(world, config, weights, num_steps):
    """Return plain_steps(), computed once for all layouts of a variant.

    How rows travel and wait doesn't matter to it.
    """
    import msgspec
    from training import once

    experts = {
        key: value
        for key, value in msgspec.to_builtins(config.experts).items()
        if key not in ("buffer", "dispatch", "wire")
    }
    key = "experts", repr((config.model, experts, config.batch)), num_steps
    return once(world, key, lambda: plain_steps(config, weights, num_steps))


CASES = cases(LAYOUTS)
CASES_ON_NODES = cases(ON_NODES)
CUT = [
    (f"pp=2 schedule=seq1f1b{more}", variant)
    for more in ("", " recompute=full")
    for variant in ("mixtral", "sequence", "deepseek")
]
# where a rank has the whole of a microbatch
VARIANTS["capacity"] = ("experts.capacity=0.7", "experts.active=3")
CAPACITY = [
    (layout, "capacity")
    for layout in (
        "",
        "buffer=0.3",
        "ep=2",
        "etp=2",
        "pp=2 schedule=zbv",
        "ep=4",
        "pp=2 ep=2 schedule=zb-h1 buffer=0.3",
    )
]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("layout", "variant"),
    but_for(
        dict.fromkeys(CASES + CUT + CAPACITY),
        [
            ("tp=4 ep=2 buffer=0.2", "mixtral"),
            ("cp=2 tp=2 ep=4 buffer=0.3", "global"),
            ("pp=2 ep=2 schedule=zb-h1 buffer=0.3", "sequence"),
            ("dp=2 zero=1", "sequence"),
            ("pp=2 schedule=zbv", "z"),
        ],
    ),
)
def test_as_plain_torch(world, layout, variant):
    require_ranks(world, LAYOUTS, layout)
    require_as_plain_torch(world, layout, variant)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("layout", "variant"),
    but_for(
        [*CASES_ON_NODES, ("ep=4 node_ranks=2", "capacity")],
        [
            ("ep=4 etp=2 node_ranks=4 buffer=0.6 zero=2 micro=1", "z"),
            ("tp=4 ep=4 node_ranks=2 recompute=selective", "deepseek"),
            ("cp=2 ep=2 node_ranks=1 recompute=full", "sequence"),
            ("ep=2 etp=2 node_ranks=2 buffer=0.7 zero=3", "z"),
            ("pp=2 ep=2 node_ranks=1 schedule=zb-h1 buffer=0.6", "mixtral"),
        ],
    ),
)
def test_rows_that_go_to_nodes_first(world, layout, variant):
    require_ranks(world, ON_NODES, layout)
    assert plan_of_case(world.size, layout, variant).config.experts.dispatch == "hierarchical"
    require_as_plain_torch(world, layout, variant)


def require_ranks(world, layouts, layout):
    if layout not in layouts.get(world.size, ()):
        sizes = [size for size, found in layouts.items() if layout in found]
        pytest.skip(f"runs on {sizes} ranks")


def require_as_plain_torch(world, layout, variant):
    import torch
    from training import part

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    plan = plan_of_case(world.size, layout, variant)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    wrong = []
    config = plan.config
    weights = {spec.name: initial(spec) for spec in plan_of_case(1, "", variant).parameters()}
    taught(actor, weights)
    expected = expected_of(world, config, weights, steps_of(layout, variant))
    for step, (rows, loss, routing, norm, grads, after) in enumerate(expected, start=1):
        mine = actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["data"].rank // config.parallel.cp])
        result = actor.run_step(step, mine, LR)
        wrong += ["nothing was dropped"] if variant == "capacity" and not result.metrics["dropped"] else []
        wrong += [f"step {step}: loss {result.loss}, not {loss}"] if abs(result.loss - loss) > 1e-10 else []
        of_router = result.metrics["balance_loss"] + result.metrics["z_loss"]
        wrong += (
            [f"step {step}: losses of the router {of_router}, not {routing}"]
            if abs(of_router - routing) > 1e-10
            else []
        )
        wrong += (
            [f"step {step}: norm {result.grad_norm}, not {norm}"]
            if abs(result.grad_norm - norm) > 1e-10 * norm
            else []
        )
        clip = min(1.0, config.optimizer.clip / norm)
        for piece in actor.gradients.pieces:
            name = piece.spec.name
            found = [("weight", piece.weight, part(after, piece))]
            found += [("gradient", piece.grad, part(grads, piece) * clip)] if name in grads else []
            for what, value, right in found:
                error = ((value - right).abs().max() / (right.abs().max() + 1e-6)).item()
                wrong += [f"step {step}: {what} of {name}: {error:.1e}"] if not error < 1e-10 else []
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:4]}")


@pytest.mark.parametrize("variant", ["z", "sequence", "global", "deepseek"])
@pytest.mark.parametrize("layout", ["", "ep=2", "cp=2 ep=2", "tp=2", "pp=2 micro=1"])
def test_the_losses_of_a_router_that_are_reported_are_those_that_are_trained(world, layout, variant):
    """Divided by the targets that carry loss.

    The last position of each row ends a document, so its target carries none.
    """
    import torch
    from oracle_experts import microbatch_loss

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    if world.size != (2 if "=2" in layout else 1):
        pytest.skip("runs on other ranks")
    plan = plan_of_case(world.size, f"{layout} documents=separate", variant)
    end = 0
    mesh = build_mesh(plan, world)
    config = plan.config
    actor = Actor(plan, mesh, torch.device("cpu"))
    weights = {s.name: initial(s) for s in plan_of_case(1, "", variant).parameters()}
    taught(actor, weights)
    rows = torch.randint(1, 64, (8, 9), generator=torch.Generator().manual_seed(1))
    rows[:6, 7] = end
    settings = {key: getattr(config.experts, key) for key in config.experts.__struct_fields__}
    expected = 0.0
    for microbatch in rows.split(config.batch.micro):
        plain, whole = microbatch_loss(weights, microbatch, LAYERS, HEADS, KV_HEADS, settings, {})
        expected += (whole - plain).item()
    mine = actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["data"].rank // config.parallel.cp], end)
    metrics = actor.run_step(1, mine, LR).metrics
    mesh.free()
    found = metrics["balance_loss"] + metrics["z_loss"]
    expected = expected / (8 * 8 - 6)
    agree(world, abs(found - expected) < 1e-12 * expected, f"{layout}: {found}, not {expected}")


@pytest.mark.parametrize("layout", ["", "micro=1", "buffer=0.3", "ep=2", "tp=2 ep=2", "cp=2", "pp=2"])
def test_validation_is_dropless_and_the_same_in_every_layout(world, layout):
    import torch
    from oracle_experts import microbatch_loss

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    if world.size != (2 if "=2" in layout else 1):
        pytest.skip("runs on other ranks")
    plan = plan_of_case(world.size, layout, "capacity")
    mesh = build_mesh(plan, world)
    config = plan.config
    actor = Actor(plan, mesh, torch.device("cpu"))
    weights = {s.name: initial(s) for s in plan_of_case(1, "", "capacity").parameters()}
    taught(actor, weights)
    rows = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(1))
    settings = {key: getattr(config.experts, key) for key in config.experts.__struct_fields__}
    expected = microbatch_loss(weights, rows, LAYERS, HEADS, KV_HEADS, {**settings, "capacity": 0.0}, {})[
        0
    ].item()
    found, count, _ = actor.evaluate(
        1, actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["data"].rank // config.parallel.cp])
    )
    mesh.free()
    agree(
        world, count == 64 and abs(found - expected) < 1e-10 * expected, f"{layout}: {found}, not {expected}"
    )


@pytest.mark.parametrize(("wire", "most"), [("bf16", 0.01), ("fp8", 0.06)])
@pytest.mark.parametrize("layout", ["ep=2", "ep=2 node_ranks=1", "ep=4 node_ranks=2", "ep=2 etp=2"])
def test_rounded_rows_change_gradients_by_little(world, layout, wire, most):
    """most: how far the gradient on a rank may be from the unrounded one, over its length.

    Numbers are off by 2**-9 or 2**-4 at most.

    All experts are active: otherwise a token that is nearly undecided between two could choose
    another one in a later layer.
    """
    import torch
    from test_train_oracle import part

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    needed = 4 if "4" in layout or "etp" in layout else 2
    if world.size != needed:
        pytest.skip("runs on other ranks")
    plan = plan_of_case(world.size, f"{layout} wire={wire} active=8", "mixtral")
    pairs = []
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    weights = {s.name: initial(s) for s in plan_of_case(1, "", "mixtral").parameters()}
    taught(actor, weights)
    ((rows, _, _, norm, grads, _),) = expected_of(world, plan.config, weights, 1)
    actor.run_step(1, actor.cutter.cut(rows.chunk(plan.config.parallel.dp)[mesh["data"].rank]), LR)
    clip = min(1.0, plan.config.optimizer.clip / norm)
    for piece in actor.gradients.pieces:
        if piece.spec.name in grads:
            pairs.append((piece.grad.flatten(), part(grads, piece).flatten() * clip))
    found, expected = (torch.cat(each) for each in zip(*pairs))
    error = ((found - expected).norm() / expected.norm()).item()
    mesh.free()
    agree(world, most / 100 < error < most, f"{mesh}: {error:.4f}")


def test_an_expert_with_exactly_the_mean_load_keeps_its_bias(world):
    """In fp32, where dividing counts by the tokens of a step, and clipping them, would leave them
    beside their mean.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    if world.size != 1:
        pytest.skip("1 rank tells")
    plan = plan_of_case(1, "compute=fp32", "deepseek")
    mesh = build_mesh(plan, world)
    even = 0
    actor = Actor(plan, mesh, torch.device("cpu"))
    biases = [piece for piece in actor.gradients.pieces if piece.spec.group == "bias"]
    for step in range(1, 25):
        before = [piece.weight.clone() for piece in biases]
        # 64 tokens, each with 3 of 8 experts
        rows = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(step))
        actor.run_step(step, actor.cutter.cut(rows), LR)
        for piece, bias in zip(biases, before):
            assert piece.grad.sum() == 64 * 3
            even += (piece.grad == 24).sum().item()
            assert torch.equal(piece.weight != bias, piece.grad != 24), (
                f"step {step}, {piece.spec.name}: choices {piece.grad.tolist()}"
            )
    mesh.free()
    assert even > 2, "hardly a case was tried"


OF_COUNTS = (
    "dp=2",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "ep=2 zero=1",
    "tp=2",
    "pp=2 schedule=dualpipe",
    "dp=4 dp_shard=2 zero=3",
)


@pytest.mark.parametrize("layout", but_for(OF_COUNTS, ["tp=2"]))
@pytest.mark.parametrize(
    "precision",
    [
        "compute=bf16",
        pytest.param("compute=fp32", marks=LONG),
        pytest.param("compute=bf16 offload=optimizer", marks=LONG),
        pytest.param("compute=fp16", marks=LONG),
    ],
)
def test_what_is_counted_is_rounded_neither_on_the_wire_nor_where_it_is_used(world, layout, precision):
    """More choices than 16 bits can count: 1,536 tokens with 3 experts each.

    Weights, and gradients on their way, are rounded.
    """
    import msgspec
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    if world.size != (4 if "4" in layout else 2):
        pytest.skip("runs on other ranks")
    plan = plan_of_case(world.size, f"{layout} {precision} micro=4 global=32 sequence=48", "deepseek")
    config = plan.config
    if config.parallel.dp > 1:
        config = msgspec.structs.replace(
            config, precision=msgspec.structs.replace(config.precision, reduce="bf16")
        )
        plan = plan_of(config)
    mesh = build_mesh(plan, world)
    wrong = []
    actor = Actor(plan, mesh, torch.device("cpu"))
    batch = config.batch.global_
    sequence = config.data.sequence
    for step in (1, 2):
        rows = torch.randint(0, 64, (batch, sequence + 1), generator=torch.Generator().manual_seed(step))
        actor.run_step(step, actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["dp"].rank]), LR)
        for piece in (each for each in actor.gradients.pieces if not each.spec.trained):
            wrong += (
                [f"{piece.spec.name}: {piece.grad.sum():g} choices"]
                if piece.grad.sum() != batch * sequence * 3
                else []
            )
            wrong += (
                [f"{piece.spec.name}: {piece.grad.tolist()}"]
                if (piece.grad != piece.grad.round()).any()
                else []
            )
    actor.settle()
    masters = {
        piece.spec.name: piece.weight.flatten() for piece in actor.gradients.pieces if not piece.spec.trained
    }
    for stage in actor.stages.values():
        for bucket in (each for each in stage.state.buckets if each.plan.domain == "counted"):
            kept = bucket.weights.whole if bucket.weights.whole is not None else bucket.weights.shard
            wrong += [f"weights of {kept.dtype}"] if kept.dtype != torch.float32 else []
        if config.parallel.zero < 3:
            used = {spec.name: data.flatten() for spec, data in stage.state.weights() if spec.name in masters}
            wrong += [
                f"{name}: computed with {w.tolist()}"
                for name, w in used.items()
                if not torch.equal(w, masters[name])
            ]
    domains = {bucket.plan.domain for stage in actor.stages.values() for bucket in stage.state.buckets}
    rounds = config.precision.compute != "fp32" or config.precision.reduce == "bf16"
    wrong += [f"buckets of {domains}"] if ("counted" in domains) != rounds else []
    mesh.free()
    agree(world, not wrong, f"{mesh}: {'; '.join(wrong[:4])}")
