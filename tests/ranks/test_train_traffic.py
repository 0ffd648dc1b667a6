"""A step sends what the formulas of the papers say, to the byte.

Per axis, ZeRO stage and schedule, on every rank.

The formulas are written down here again, from the papers alone; what was sent is counted where
messages are posted. Symbols: s tokens of a sequence, h width, m microbatches of a rank, d, t, c, p
ranks of an axis. With n ranks that share N bytes, a reduce-scatter and an all-gather make each rank
send N (n-1)/n, an all-reduce twice as much.
"""

import itertools

import pytest
from conftest import EVERY, LONG, agree, but_for
from support.quick_schedules import NAMES

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]

LAYERS = 8
WIDTH = 64
HEADS = 4
KV_HEADS = 2
FFN = 128
VOCAB = 256
SEQUENCE = 64
BATCH = 16 if EVERY else 8
KV_WIDTH = WIDTH // HEADS * KV_HEADS
BLOCK = 1024  # elements that every parameter and every rank's share are rounded up to
SETTINGS = (
    "model.preset=quickstart",
    f"model.layers={LAYERS}",
    f"model.width={WIDTH}",
    f"model.heads={HEADS}",
    f"model.kv_heads={KV_HEADS}",
    f"model.ffn={FFN}",
    f"model.vocab={VOCAB}",
    "model.tied=false",
    f"data.sequence={SEQUENCE}",
    f"batch.global={BATCH}",
    "comm.transport=messages",
    "comm.timeout_s=200",
)


def padded(*numels, unit=BLOCK):
    """The elements of a buffer: parameters in whole blocks, then a whole number of blocks for each rank."""
    return -(-sum(-(-numel // BLOCK) * BLOCK for numel in numels) // unit) * unit


ONE = (
    WIDTH,
    WIDTH * WIDTH,
    KV_WIDTH * WIDTH,
    KV_WIDTH * WIDTH,
    WIDTH * WIDTH,
    WIDTH,
    FFN * WIDTH,
    FFN * WIDTH,
    FFN * WIDTH,
)
ENDS = [(VOCAB * WIDTH,)], [(WIDTH, VOCAB * WIDTH)]
# the parameters of each block: embedding, layers, final norm and head
MODEL = [*ENDS[0], *[ONE] * LAYERS, *ENDS[1]]


def resolved(world, settings):
    from mpitrain import config
    from mpitrain.plan.settings.resolve import resolve

    parsed = config.load(None, (*SETTINGS, *settings))
    parallel = parsed.parallel
    needed = (parallel.dp or 1) * (parallel.pp or 1) * parallel.tp * parallel.cp
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    return resolve(parsed, world.size, VOCAB)


def is_needed(settings, dp):
    """Whether so many data-parallel ranks tell what two don't.

    Of a shard on some of them, and of what no stage of ZeRO changes.
    """
    return (
        EVERY
        or (dp == 4) == ("parallel.dp_shard=2" in settings)
        or (dp == 4 and settings == ("parallel.zero=0",))
    )


def short(value):
    """Return how a test is called after a value."""
    return (
        ",".join(s.split(".")[-1] for s in value)
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, int)
        else ""
    )


def sent(world, config):
    """Run two steps; return the bytes that this rank posted in the second, by axis, and where it is
    on the pipeline axis.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    generator = torch.Generator().manual_seed(mesh["dp"].rank)
    rows = torch.randint(0, VOCAB, (BATCH // config.parallel.dp, SEQUENCE + 1), generator=generator)
    before = {}
    for step in (1, 2):
        before = {name: usage.num_bytes for name, usage in mesh.usage().items()}
        actor.run_step(step, actor.cutter.cut(rows), 1e-3)
        mesh.progress.drain()
    posted = {name: usage.num_bytes - before[name] for name, usage in mesh.usage().items()}
    rank = mesh["pp"].rank
    mesh.free()
    return posted, rank


def check(world, settings, expected):
    """expected(config, rank of the pipeline) -> {axis: bytes}"""
    config = resolved(world, settings)
    posted, rank = sent(world, config)
    wanted = expected(config, rank)
    found = {axis: posted.get(axis, 0) for axis in wanted}
    agree(world, found == wanted, f"sent {found}, by the formula {wanted}")
    if "shard" in wanted:
        predicted = said_before(config, rank)
        agree(world, predicted == found, f"sent {found}, said before {predicted}")


def said_before(config, rank):
    """Return what predict/link_choices.py says of data ranks, by which the way they exchange is chosen."""
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.predict.link_choices import exchanged

    found = exchanged(plan_of(config), rank)
    return {axis: found.weights[axis] + found.gradients[axis] for axis in ("shard", "replicate")}


# ---------------------------------------------------- data parallelism: arXiv:1910.02054, section 7


def zero_traffic(config, *, reductions=1, gathers=1, weight=4, gradient=4):
    """Ψ parameters: gradients are reduced, weights gathered.

    Over s ranks of a shard and r that have the same one.
    """
    dp = config.parallel.dp
    s = config.parallel.dp_shard or config.parallel.dp
    r = dp // s
    size = padded(*[n for block in MODEL for n in block], unit=BLOCK * s)
    inside = size * (reductions * gradient + gathers * weight) * (s - 1) // s
    return {"shard": inside, "replicate": reductions * 2 * (size // s) * gradient * (r - 1) // r}


def whole_traffic(config, _):
    size = padded(*[n for block in MODEL for n in block])
    d = config.parallel.dp
    return {"replicate": 2 * size * 4 * (d - 1) // d, "shard": 0}


ZERO = [
    (("parallel.zero=0",), whole_traffic),
    (("parallel.zero=1",), lambda config, _: zero_traffic(config)),
    (("parallel.zero=2", "parallel.reduce=step"), lambda config, _: zero_traffic(config)),
    (("parallel.zero=2",), lambda config, _: zero_traffic(config, reductions=BATCH // config.parallel.dp)),
    (
        ("parallel.zero=1", "parallel.reduce=microbatch"),
        lambda config, _: zero_traffic(config, reductions=BATCH // config.parallel.dp),
    ),
    (("parallel.zero=1", "precision.compute=bf16"), lambda config, _: zero_traffic(config, weight=2)),
    (
        ("parallel.zero=2", "precision.compute=bf16", "precision.reduce=bf16", "parallel.reduce=step"),
        lambda config, _: zero_traffic(config, weight=2, gradient=2),
    ),
    (
        ("parallel.zero=1", "precision.compute=fp64"),
        lambda config, _: zero_traffic(config, weight=8, gradient=8),
    ),
    (("parallel.zero=1", "parallel.dp_shard=2"), lambda config, _: zero_traffic(config)),
]


OF_ZERO = [(*case, dp) for case in ZERO for dp in (2, 4) if is_needed(case[0], dp)]
ZERO_LONGER = [
    ("parallel.zero=2", "parallel.reduce=step"),
    ("parallel.zero=1", "parallel.reduce=microbatch"),
    ("parallel.zero=1", "precision.compute=bf16"),
    ("parallel.zero=1", "precision.compute=fp64"),
]


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("settings", "expected", "dp"),
    but_for(OF_ZERO, [case for case in OF_ZERO if case[0] in ZERO_LONGER]),
    ids=short,
)
def test_zero_sends_gradients_once_and_weights_once(world, settings, expected, dp):
    """One bucket, so that only the end of it is padding."""
    check(world, (f"parallel.dp={dp}", "comm.bucket_mb=1000", *settings), expected)


def fetches(blocks_used, ahead):
    """How often each block is fetched: not if it was used at most ahead + 1 uses ago, then it is
    still there.
    """
    count = {}
    last = {}
    for now, block in enumerate(blocks_used):
        if block not in last or now - last[block] > ahead + 1:
            count[block] = count.get(block, 0) + 1
        last[block] = now
    return count


def fetched_traffic(config, order, blocks, *, each=False, kept=False, weight=4):
    """ZeRO-3, section 7.2.2: weights for every forward and every backward, gradients once (or for
    each of m microbatches).
    """
    shards = config.parallel.dp_shard or config.parallel.dp
    replicas = config.parallel.dp // shards
    used = [
        (stage, block)
        for kind, stage in order
        for block in (range(len(blocks[stage])) if kind == "F" else reversed(range(len(blocks[stage]))))
    ]
    sizes = {
        (s, b): padded(*numels, unit=BLOCK * shards) for s in blocks for b, numels in enumerate(blocks[s])
    }
    times = {key: 1 for key in used} if kept else fetches(used, config.parallel.ahead)
    gathered = sum(times[key] * sizes[key] for key in sizes) * weight
    reduced = sum(sizes.values()) * 4 * (sum(kind == "B" for kind, _ in order) // len(blocks) if each else 1)
    inside = (gathered + reduced) * (shards - 1) // shards
    return {"shard": inside, "replicate": reduced // shards * 2 * (replicas - 1) // replicas}


ZERO_3 = [
    (("parallel.reduce=step",), {}),
    (("parallel.gather=step", "parallel.reduce=step"), {"kept": True}),
    ((), {"each": True}),
    (("parallel.ahead=2",), {"each": True}),
    (("precision.compute=bf16",), {"weight": 2, "each": True}),
    (("parallel.dp_shard=2", "parallel.reduce=step"), {}),
]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("settings", "facts", "dp"),
    but_for(
        [(*case, dp) for case in ZERO_3 for dp in (2, 4) if is_needed(case[0], dp)],
        [(("precision.compute=bf16",), {"weight": 2, "each": True}, 2)],
    ),
    ids=short,
)
def test_zero_3_fetches_weights_for_every_use(world, settings, facts, dp):
    def expected(config, _):
        order = [(kind, 0) for _ in range(BATCH // dp) for kind in "FB"]
        return fetched_traffic(config, order, {0: MODEL}, **facts)

    check(world, (f"parallel.dp={dp}", "parallel.zero=3", *settings), expected)


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=LONG) for each in ("gpipe", "zb-h1"))]
)
def test_zero_3_under_a_pipeline_fetches_in_the_order_of_the_schedule(world, schedule):
    """Two stages of half the layers. The backward for weights of a split one needs no weights."""
    half = LAYERS // 2
    m = BATCH // 2
    steps = {
        ("gpipe", 0): "F" * m + "B" * m,
        ("gpipe", 1): "F" * m + "B" * m,
        ("1f1b", 0): "F" + "FB" * (m - 1) + "B",
        ("1f1b", 1): "FB" * m,
        ("zb-h1", 0): "F" + "FB" * (m - 1) + "B",
        ("zb-h1", 1): "FB" * m,
    }

    def expected(config, rank):
        blocks = (MODEL[: 1 + half], MODEL[1 + half :])[rank]
        return fetched_traffic(config, [(kind, rank) for kind in steps[schedule, rank]], {rank: blocks})

    stages = f"pipeline.stages=[{half}, {half}]", "parallel.reduce=step"
    check(
        world,
        ("parallel.dp=2", "parallel.pp=2", "parallel.zero=3", f"pipeline.schedule={schedule}", *stages),
        expected,
    )


# ---------------------------------------------------------------- tensor and context parallelism


def activation(itemsize=4):
    return SEQUENCE * WIDTH * itemsize


@pytest.mark.sizes(2)
@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_reduces_four_times_a_layer(world, t):
    """arXiv:1909.08053, section 3.

    Two all-reduces forward and two backward; one more for each end, and one small one for the loss.
    """

    def expected(config, _):
        # greatest and summed exponential, everything to everyone; the target's score rides along
        loss = SEQUENCE * 2 * 4 * (t - 1)
        return {"tp": BATCH * ((4 * LAYERS + 2) * 2 * activation() * (t - 1) // t + loss)}

    check(world, (f"parallel.tp={t}", "parallel.sequence=false"), expected)


REGATHER = "parallel.regather=true"


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("t", "more"),
    but_for(
        [(2, ()), (4, ()), (2, ("parallel.async_tp=true",)), (2, (REGATHER,)), (4, (REGATHER,))],
        [(2, ("parallel.async_tp=true",))],
    ),
)
def test_sequence_parallelism_sends_no_more_than_tensor_parallelism(world, t, more):
    """arXiv:2205.05198, section 4.2.2: gathers and reduce-scatters in their place.

    What was gathered is kept for the weight gradient, so it isn't gathered twice, unless parallel.regather
    has it: twice a layer. The gradients of norms, and of key-value heads on several ranks, are summed once
    a step.
    """

    def expected(config, _):
        loss = SEQUENCE * 2 * 4 * (t - 1)
        norms = 2 * padded(*[WIDTH] * (2 * LAYERS + 1)) * 4 * (t - 1) // t
        copies = max(1, t // KV_HEADS)
        repeated = 2 * padded(*[KV_WIDTH // KV_HEADS * WIDTH] * 2 * LAYERS) * 4 * (copies - 1) // copies
        each = 10 if REGATHER in more else 8
        whole = (each * LAYERS + 4) * activation()
        return {"tp": BATCH * (whole * (t - 1) // t + loss) + norms, "kv": repeated}

    check(world, (f"parallel.tp={t}", *more), expected)


def ring_traffic(config, _):
    """Keys and values go round forward; both and their gradients backward (arXiv:2310.01889, section 3)."""
    c = config.parallel.cp
    return {"cp": BATCH * LAYERS * 3 * (c - 1) * 2 * SEQUENCE // c * KV_WIDTH * 4}


def gather_traffic(config, _):
    """An all-gather forward and a reduce-scatter backward, of keys and values (arXiv:2407.21783,
    section 3.3.2).
    """
    c = config.parallel.cp
    return {"cp": BATCH * LAYERS * 2 * 2 * SEQUENCE * KV_WIDTH * 4 * (c - 1) // c}


def ulysses_traffic(config, _):
    """All-to-alls of queries, keys, values and the result, and of their gradients
    (arXiv:2309.14509, section 3.2).
    """
    c = config.parallel.cp
    repeats = max(1, c // KV_HEADS)  # heads that are sent to several ranks
    return {
        "cp": BATCH * LAYERS * 2 * (2 * WIDTH + 2 * KV_WIDTH * repeats) * (SEQUENCE // c) * 4 * (c - 1) // c
    }


KINDS = {"ring": ring_traffic, "zigzag": ring_traffic, "gather": gather_traffic, "ulysses": ulysses_traffic}
SPREAD = (
    itertools.product((2, 4), KINDS)
    if EVERY
    else but_for([(2, "ring"), (2, "gather"), (4, "zigzag"), (4, "ulysses")], [(2, "gather")])
)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("c", "kind"), SPREAD)
def test_context_parallelism_sends_keys_and_values(world, c, kind):
    check(world, (f"parallel.cp={c}", f"parallel.context={kind}"), KINDS[kind])


# ---------------------------------------------------------------- pipelines


def path(schedule, p):
    """The ranks that a microbatch goes through, or both ways of them."""
    there = list(range(p))
    back = list(range(p))[::-1]
    if schedule in ("interleaved", "looped-bfs", "interleaved-zb"):
        return [there * 2]
    if schedule in ("zbv", "zbv-auto", "v-half", "v-min", "dualpipev"):
        return [there + back]
    return [there, back] if schedule == "dualpipe" else [there]


# Where a stage of each schedule sends is proved without MPI; here is one for each way through the
# ranks.
PIPELINES = [
    (2, "gpipe"),
    (2, "zbv"),
    (4, "1f1b"),
    (4, "interleaved"),
    (4, "v-half"),
    (4, "dualpipe"),
    (4, "seq1f1b"),
]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("p", "schedule"),
    itertools.product((2, 4), NAMES)
    if EVERY
    else but_for(PIPELINES, [(4, "v-half"), (4, "1f1b"), (4, "seq1f1b")]),
)
def test_stages_send_activations_on_and_gradients_back(world, p, schedule):
    def expected(config, rank):
        ways = path(schedule, p)
        hops = [pair for way in ways for pair in zip(way, way[1:]) if pair[0] != pair[1]]
        return {"links": sum((a == rank) + (b == rank) for a, b in hops) * BATCH // len(ways) * activation()}

    check(world, (f"parallel.pp={p}", f"pipeline.schedule={schedule}"), expected)
