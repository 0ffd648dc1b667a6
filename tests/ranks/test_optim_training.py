"""Training with SGD and Muon on several ranks.

Equal to a plain torch loop in fp64; the same bits however ZeRO divides the state.
"""

import pytest
from conftest import EVERY, WITH_LONG, agree, but_for
from oracle import loss_and_grads, muon_step, sgd_step
from training import STEPS, initial_weights, once, part, whole_weights

pytestmark = pytest.mark.mpi(min_size=2)
HEADS = 4
SETTINGS = (
    "model.layers=4",
    "model.width=32",
    f"model.heads={HEADS}",
    "model.ffn=100",
    "model.vocab=259",
    "data.sequence=16",
    "batch.global=8",
    "batch.micro=2",
    "optimizer.clip=0.5",
    "comm.bucket_mb=0.03",
    "comm.timeout_s=200",
)
DEGREES = {"dp": 1, "pp": 1, "tp": 1, "cp": 1}
LAYOUTS = [
    "dp=2 zero=0",
    "dp=2 zero=1 tied=false",
    "dp=2 zero=2 transport=collectives",
    "dp=2 zero=3 transport=messages",
    "tp=2",
    "tp=2 sequence=false tied=false",
    "pp=2 schedule=zbv",
    "cp=2 zero=2",
    "tp=4 transport=collectives",  # 2 key-value heads: each on two ranks
    "dp=2 tp=2 zero=2",
    "dp=2 tp=2 zero=3 kv_heads=1 transport=messages",
    "dp=2 pp=2 zero=1 schedule=1f1b",
    "dp=4 dp_shard=2 zero=2",
    "dp=2 cp=2 zero=3 tied=false",
    "dp=4 zero=2 layers=1 width=16 ffn=16 tied=false",  # the last rank has a part of the head only
    "pp=2 tp=2 schedule=dualpipe",
    "dp=2 tp=2 pp=2 zero=1 schedule=zbv",
]
LAYOUTS += ["dp=2 tp=4 zero=2 tied=false"] * EVERY
TP_4 = "tp=4 transport=collectives"
DIVIDED = [
    "dp=2",
    "cp=2 tied=false",
    "dp=4",
    "dp=2 tp=2",
    "dp=4 dp_shard=2",
    "dp=2 pp=2 schedule=zbv",
    "dp=2 tp=2 pp=2 schedule=1f1b",
]
EVERY_SECOND = slice(None, None if WITH_LONG else -1, 2)  # the last ones take eight ranks
OPTIMIZERS = {
    "sgd": (("momentum=0.8", "nesterov=true"), sgd_step, dict(momentum=0.8, nesterov=True)),
    "muon": ((), muon_step, dict(momentum=0.95, nesterov=True, ns_steps=5, betas=(0.9, 0.95), eps=1e-8)),
}


def resolved(world, name, layout, *given):
    """Return the configuration of a layout written as above."""
    from mpitrain import config
    from mpitrain.plan.settings.resolve import resolve

    chosen = DEGREES | {"kv_heads": 2} | dict(word.split("=") for word in layout.split())
    tables = {"schedule": "pipeline", "transport": "comm"} | dict.fromkeys(
        ("tied", "kv_heads", "layers", "width", "ffn"), "model"
    )
    words = [f"{tables.get(key, 'parallel')}.{key}={value}" for key, value in chosen.items()]
    needed = 1
    for degree in DEGREES:
        needed *= int(chosen[degree])
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    keys = (f"optimizer.{key}" for key in (f"name={name}", *OPTIMIZERS[name][0]))
    return resolve(config.load(None, (*SETTINGS, *words, *keys, *given)), world.size, 256)


def rows_of(step):
    import torch

    return torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(step))


def steps(world, config, compare):
    """Take some steps on this mesh; call compare(actor, step, result) after each."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    for step in range(1, STEPS + 1):
        rows = rows_of(step).chunk(config.parallel.dp)[mesh["dp"].rank]
        compare(actor, step, actor.run_step(step, actor.cutter.cut(rows), 1e-2))
    mesh.free()


def plain_torch(config, name):
    """Return the loss, and the weights after each step of a plain loop."""
    weights = initial_weights(config)
    states = {}
    found = []
    _, update, settings = OPTIMIZERS[name]
    for step in range(1, STEPS + 1):
        loss, grads = loss_and_grads(
            weights, rows_of(step), config.model.layers, HEADS, config.model.kv_heads
        )
        norm = sum(grad.square().sum() for grad in grads.values()).sqrt().item()
        clipped = {key: grad * min(1.0, 0.5 / norm) for key, grad in grads.items()}
        update(weights, clipped, states, step, 1e-2, decay=0.1, **settings)
        found.append((loss, {key: weight.clone() for key, weight in weights.items()}))
    return found


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("name", "layout"),
    but_for(
        [(name, layout) for name in OPTIMIZERS for layout in LAYOUTS[:: 1 if EVERY or name == "muon" else 3]],
        [("muon", TP_4)],
    ),
)
def test_steps_equal_a_plain_torch_loop(world, name, layout):
    config = resolved(world, name, layout, "precision.compute=fp64")
    wrong = []
    every = once(world, (name, repr(config.model)), lambda: plain_torch(config, name))

    def compare(actor, step, result):
        loss, weights = every[step - 1]
        wrong.extend(
            [f"step {step}: loss {result.loss}, {loss} of the loop"]
            if abs(result.loss - loss) > 1e-10
            else []
        )
        for piece in actor.gradients.pieces:
            expected = part(weights, piece)
            error = ((piece.weight - expected).abs().max() / expected.abs().max()).item()
            wrong.extend([f"step {step}: {piece.spec.name} {error:.1e}"] if not error < 1e-10 else [])

    steps(world, config, compare)
    agree(world, not wrong, f"{config.parallel}: {wrong[:3]}")


@pytest.mark.parametrize("precision", ["fp32", "fp64"] if EVERY else ["fp32"])
@pytest.mark.parametrize(
    ("name", "layout"),
    but_for(
        [
            (name, layout)
            for name in OPTIMIZERS
            for layout in (DIVIDED if EVERY else DIVIDED[EVERY_SECOND] if name == "muon" else DIVIDED[::4])
        ],
        [("sgd", "dp=4 dp_shard=2")],
    ),
)
def test_the_bits_are_the_same_for_every_stage_of_zero(world, name, layout, precision):
    """Weights and momentum: state that was saved in one division is read in another."""
    found = {}
    undivided = " ".join(word for word in layout.split() if not word.startswith("dp_shard"))
    for zero in (0, 1, 2, 3):
        config = resolved(
            world,
            name,
            f"{layout if zero else undivided} zero={zero} reduce=step",
            f"precision.compute={precision}",
        )
        lines = []
        mine = []

        def note(actor, step, result, lines=lines, mine=mine):
            lines.append((result.loss, result.grad_norm))
            first = actor.mesh["replicate"].rank == 0
            for piece in actor.gradients.counted if first and step == STEPS else ():
                for state, x in (("weight", piece.weight), *actor.optimizer.moments(piece)):
                    mine.append(
                        ((f"{state} {piece.spec.name}", piece.spec.offset, piece.begin), x.numpy().copy())
                    )

        steps(world, config, note)
        found[zero] = lines, whole_weights(each for part in world.allgather(mine) for each in part)
    lines, tensors = found[0]
    for zero in (1, 2, 3):
        agree(world, found[zero][0] == lines, f"zero={zero}: {found[zero][0]} instead of {lines}")
        different = [key for key, x in tensors.items() if not (found[zero][1][key] == x).all()]
        agree(
            world, found[zero][1].keys() == tensors.keys() and not different, f"zero={zero}: {different[:3]}"
        )


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "layout", but_for(LAYOUTS if EVERY else LAYOUTS[EVERY_SECOND], [TP_4, "dp=4 dp_shard=2 zero=2"])
)
def test_muon_sends_an_element_at_most_once_to_where_it_is_needed_and_back(world, layout):
    """In order and to the byte as a rehearsal has it.

    Of key-value heads that are repeated one copy goes, and all get theirs back.
    """
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.declared.parameters import Shard

    config = resolved(world, "muon", layout)
    declared = Rehearsal(plan_of(config), world.rank).training().get("matrix", [])
    wrong = []

    def note(actor, step, result):
        axis = actor.mesh["matrix"]
        shards = [Shard(rank, config.parallel.tp) for rank in range(config.parallel.tp)]
        found = axis.account.log or []
        axis.account.log = []
        sent = sum(axis.comm.allgather(sum(num_bytes for _, num_bytes in found)))
        specs = [
            spec
            for shard in shards
            for stage in actor.stages.values()
            for block in stage.plan.specs(shard)
            for spec in block
        ]
        every = 4 * sum(
            spec.numel * (1 + (spec.copy == 0))
            for spec in specs
            if len(spec.shape) == 2 and "blocks" in spec.name
        )
        if step > 1:  # the log begins now
            wrong.extend([f"{found}, declared {declared}"] if axis.size > 1 and found != declared else [])
            wrong.extend(
                [f"{sent} of {every} bytes"] if not (0 < sent < every if axis.size > 1 else sent == 0) else []
            )

    steps(world, config, note)
    agree(world, not wrong, wrong[:1])
