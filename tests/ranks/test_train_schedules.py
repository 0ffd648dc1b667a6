"""Every schedule trains the same model.

Equal losses and weights, bit for bit, however late messages and ranks are.

MPITRAIN_EFFORT=N tries N patterns of delays instead of one.
"""

import hashlib
import random
import time
import weakref

import pytest
from conftest import EVERY, LONG, agree, but_for
from effort import numbers

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]

SETTINGS = (
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "data.sequence=16",
    "batch.micro=1",
    "parallel.zero=0",  # all copies of a weight are whole, and can be compared
    "comm.timeout_s=200",
)
OTHER_ORDER = ("dualpipe", "seq1f1b")  # two copies; sums over segments: equal in fp64 to 1e-10
SEEDS = numbers(range(1), 20)
STEPS = 2 if EVERY or len(SEEDS) > 1 else 1


def config_of(name, world, dp, *extra):
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    pp = world.size // dp
    # two chunks a rank; dualpipe needs 2p microbatches
    sizes = (f"model.layers={2 * pp}", f"batch.global={dp * (2 * pp + 2)}")
    layout = (*sizes, f"parallel.dp={dp}", f"parallel.pp={pp}", f"pipeline.schedule={name}")
    return resolve(settings.load(None, (*SETTINGS, *layout, *extra)), world.size, 256)


def train(world, config, prepare=lambda actor: None, num_steps=2):
    """Return losses and norms, {parameter.

    weight}, (stashes held at most, predicted), and whether copies are equal, after some steps.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    prepare(actor)
    results = []
    for step in range(1, num_steps + 1):
        rows = torch.randint(
            0, 256, (config.batch.global_, 17), generator=torch.Generator().manual_seed(step)
        )
        results.append(
            actor.run_step(step, actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["data"].rank]), 1e-2)
        )
    weights = {piece.spec.name: piece.weight.clone() for piece in actor.gradients.counted}
    every = {name: w for part in world.allgather(weights) for name, w in part.items()}
    predicted = list(plan.training.report.peak_in_flight)
    copies = _copies(actor, world)
    mesh.free()
    return [(r.loss, r.grad_norm) for r in results], every, (results[-1].peak_in_flight, predicted), copies


def _copies(actor, world):
    """Return whether all copies of each stage's parameters, on all ranks, have the same bits."""
    digests = {}
    boxes = [((p.spec.name, p.spec.offset), p.weight) for p in actor.gradients.pieces]
    mine = [(box, hashlib.md5(data.numpy().tobytes()).digest()) for box, data in boxes]
    for found in world.allgather(mine):
        for name, digest in found:
            digests.setdefault(name, set()).add(digest)
    return all(len(found) == 1 for found in digests.values())


def delayed(seed, rank):
    """Return what makes an actor late now and then, before any instruction."""
    dice = random.Random(1000 * seed + rank)

    def late(handler):
        def run(action, work):
            if dice.random() < 0.1:
                time.sleep(dice.random() * 0.003)
            handler(action, work)

        return run

    def prepare(actor):
        actor._handlers = {kind: late(handler) for kind, handler in actor._handlers.items()}

    return prepare


def names_for(world, dp):
    from support.quick_schedules import NAMES, SEARCHED

    return [name for name in (*NAMES, *SEARCHED) if name not in OTHER_ORDER]


@pytest.mark.parametrize(("dp", "tied"), [(1, "true"), pytest.param(2, "false", marks=LONG)])
def test_every_schedule_gives_the_same_bits_and_holds_what_it_promised(world, dp, tied):
    if world.size < 2 * dp:
        pytest.skip(f"dp = {dp} leaves no pipeline")
    if world.size == 2 and not EVERY:
        pytest.skip("4 ranks tell")
    if world.size > 4 and dp == 1 and not EVERY:
        pytest.skip("slow on 8 ranks, where dp = 2 tells")
    wrong = []
    settings = f"model.tied={tied}"
    num_steps = 2 if dp > 1 else STEPS
    losses, weights, _, _ = train(world, config_of("1f1b", world, dp, settings), num_steps=num_steps)
    for name in names_for(world, dp):
        config = config_of(name, world, dp, settings, "comm.synchronous=true")
        found, found_weights, peak, copies = train(world, config, num_steps=num_steps)
        different = [key for key in weights if not weights[key].equal(found_weights[key])]
        if found != losses or different or peak[0] != peak[1] or not copies:
            wrong.append(
                f"{name}: {found} for {losses}, weights differ: {different[:3]}, in flight {peak}, copies "
                f"equal: {copies}"
            )
    agree(world, not wrong, "; ".join(wrong))


@pytest.mark.parametrize("more", [(), pytest.param(("parallel.tp=2", "parallel.pp=1"), marks=LONG)])
def test_a_split_backward_gives_the_same_bits_where_lookups_and_a_head_add_to_one_gradient(world, more):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    found = [
        train(world, config_of(name, world, 1, "model.mtp=2", "model.tied=true", *more))[:2]
        for name in ("1f1b", "zb-h1")
    ]
    different = [key for key, weight in found[0][1].items() if not weight.equal(found[1][1][key])]
    agree(
        world,
        found[0][0] == found[1][0] and not different,
        f"{found[0][0]}, split {found[1][0]}, weights differ: {different[:3]}",
    )


@pytest.mark.parametrize(("dp", "tied"), [(1, "true"), pytest.param(2, "false", marks=LONG)])
@pytest.mark.parametrize("name", OTHER_ORDER)
def test_other_orders_agree_in_fp64(world, name, dp, tied):
    if world.size < 2 * dp:
        pytest.skip(f"dp = {dp} leaves no pipeline")
    fp64 = ("precision.compute=fp64", f"model.tied={tied}")
    losses, weights, _, _ = train(world, config_of("1f1b", world, dp, *fp64))
    found, found_weights, peak, copies = train(
        world, config_of(name, world, dp, *fp64, "comm.synchronous=true")
    )
    worst = max(abs(a - b) / abs(b) for pair in zip(found, losses) for a, b in zip(*pair))
    off = max(
        ((found_weights[key] - weights[key]).abs().max() / weights[key].abs().max()).item() for key in weights
    )
    agree(
        world,
        worst < 1e-10 and off < 1e-10,
        f"{name}: losses {found} for {losses}, weights differ by {off:.1e}",
    )
    agree(world, peak[0] == peak[1] and copies, f"{name}: in flight {peak}, copies equal: {copies}")


@LONG
def test_repeated_parameters_stay_the_same_bits(world):
    """Norms and repeated key-value heads are on several ranks of tp; all copies are updated alike."""
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    layout = (
        f"parallel.tp={world.size}",
        "batch.global=4",
        "model.layers=2",
        "model.heads=8",
        "model.kv_heads=2",
        "model.ffn=64",
    )
    if world.size != 4 and not EVERY:
        pytest.skip("4 ranks tell: two for each key-value head")
    for sequence in ("true", "false"):
        parsed = settings.load(None, (*SETTINGS, *layout, f"parallel.sequence={sequence}"))
        _, _, _, copies = train(world, resolve(parsed, world.size, 256), num_steps=25 if EVERY else 5)
        agree(world, copies, f"copies differ with parallel.sequence = {sequence}")


class Meter:
    """Counts the bytes that autograd keeps for backward, now and at most."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        if tensor.dim() < 3:  # a weight
            return lambda: tensor
        size = tensor.nbytes
        self.now += size
        self.most = max(self.most, self.now)

        def kept():
            return tensor

        weakref.finalize(kept, self._free, size)
        return kept

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize(
    "name",
    ["1f1b", "zb-h1", "zbv", "interleaved", "v-min"] if EVERY else but_for(["zb-h1", "v-min"], ["zb-h1"]),
)
def test_activations_are_freed_on_the_way(world, name):
    """Bytes kept for backward follow the stashes, and don't grow with the number of microbatches."""
    import torch

    if world.size != 4:
        pytest.skip("4 ranks tell")
    most = []
    for microbatches in (2 * world.size, 6 * world.size):
        meter = Meter()
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda kept: kept()):
            train(world, config_of(name, world, 1, f"batch.global={microbatches}"), num_steps=1)
        most.append(meter.most)
        agree(world, meter.now == 0, f"{name}: {meter.now} bytes are still kept after the step")
    agree(
        world,
        most[0] > 0 and most[1] <= most[0],
        f"{name}: at most {most[0]} bytes, then {most[1]} with three times the microbatches",
    )


@LONG
@pytest.mark.parametrize("seed", SEEDS)
def test_late_ranks_and_messages_change_nothing(world, seed):
    if world.size != 4 and len(SEEDS) == 1:
        pytest.skip("4 ranks tell; MPITRAIN_EFFORT=2 or more runs it on others")
    wrong = []
    losses, _, _, _ = train(world, config_of("1f1b", world, 1), num_steps=STEPS)
    for name in names_for(world, 1)[:: 1 if STEPS > 1 else 2]:
        found, _, _, _ = train(
            world, config_of(name, world, 1, "comm.synchronous=true"), delayed(seed, world.rank), STEPS
        )
        wrong += [f"{name}, seed {seed}: {found} for {losses}"] if found != losses else []
    agree(world, not wrong, "; ".join(wrong))
