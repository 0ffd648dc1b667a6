"""Replayed routings, the worst there are.

In rounds, within the predicted memory, the same bits twice, and what one rank computes.
"""

import numpy as np
import pytest
from conftest import EVERY, agree, but_for

pytestmark = pytest.mark.few_ranks

COUNT = 8
ACTIVE = 2
SEQUENCES = 8
LENGTH = 32
LAYERS = 2
STEPS = 1
SETTINGS = (
    "model.family=mixtral", f"model.layers={LAYERS}", "model.width=16", "model.heads=4", "model.kv_heads=4",
    "model.ffn=24", "model.vocab=64",
    f"experts.count={COUNT}", f"experts.active={ACTIVE}", f"data.sequence={LENGTH}",
    f"batch.global={SEQUENCES}",
    f"batch.micro={1 if EVERY else 2}",
    "precision.compute=fp64", "comm.timeout_s=200",
)  # fmt: skip
LAYOUTS = {
    2: ("ep=2", "etp=2", "tp=2 ep=2"),
    4: ("ep=4", "tp=4 ep=2", "cp=2 ep=2 etp=2", "pp=2 ep=2 schedule=dualpipev layers=4 micro=1"),
}
BUFFERS = (0.1, 0.5, 1, 2, 8)
CASES = [
    (layout, pattern, buffer)
    for number, layout in enumerate(each for found in LAYOUTS.values() for each in found)
    for place, pattern in enumerate(("one", "spikes", "alternating", "without"))
    for turn, buffer in enumerate(BUFFERS)
    if EVERY or (turn == (number + 2 * place) % len(BUFFERS) and (number + place) % 2)
]


LONGER = [
    ("tp=4 ep=2", "spikes", 0.5),
    ("cp=2 ep=2 etp=2", "one", 0.1),
    ("pp=2 ep=2 schedule=dualpipev layers=4 micro=1", "spikes", 2),
]


def routing(pattern, shape):
    """Return experts of [steps, sequences, positions, active]."""
    dice = np.random.default_rng(1)
    if pattern == "one":  # every token to the first experts
        return np.broadcast_to(np.arange(ACTIVE), (*shape, ACTIVE))
    if pattern == "without":  # nothing to the first half
        return dice.permuted(np.broadcast_to(np.arange(COUNT // 2, COUNT), (*shape, COUNT // 2)), axis=-1)[
            ..., :ACTIVE
        ]
    spread = dice.permuted(np.broadcast_to(np.arange(COUNT), (*shape, COUNT)), axis=-1)[..., :ACTIVE]
    if pattern == "spikes":
        spread[dice.random(shape) < 0.7] = (COUNT - 1, COUNT - 2)
    else:  # the first experts for one sequence, the last for the next
        spread[:, ::2], spread[:, 1::2] = np.arange(ACTIVE), np.arange(COUNT - ACTIVE, COUNT)
    return spread


def trained(plan, mesh):
    """Return losses, gradients of the last step, and memory as (predicted, measured)."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.plan.predict.memory import predict

    actor = Actor(plan, mesh, torch.device("cpu"))
    losses = []
    watch = Watch(actor.stages.values(), actor.site.constants())
    parallel = plan.config.parallel
    for step in range(1, STEPS + 1):
        rows = torch.randint(0, 64, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        mine = actor.cutter.cut(rows.chunk(parallel.dp)[mesh["data"].rank // parallel.cp])
        losses.append(actor.run_step(step, mine, 0.1, watch=watch).loss)
    memory = predict(plan, actor.shards_here)[actor.pp.rank], measure(actor, watch)
    return losses, {piece: piece.grad.clone() for piece in actor.gradients.pieces}, memory


@pytest.mark.few_cases(2)
@pytest.mark.mpi
@pytest.mark.parametrize(("layout", "pattern", "buffer"), but_for(CASES, LONGER))
def test_any_routing_in_any_buffer(world, tmp_path, layout, pattern, buffer):
    from training import once, part

    from mpitrain import config as settings
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.comm.base.world import alone
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.routing import RoutingTrace
    from mpitrain.plan.settings.resolve import on_one_rank, resolve

    if layout not in LAYOUTS.get(world.size, ()):
        pytest.skip("runs on other ranks")
    shape = STEPS, SEQUENCES, LENGTH
    path = tmp_path / f"{world.rank}.npz"
    RoutingTrace({f"blocks.{block}.ffn.router.load": routing(pattern, shape) for block in range(4)}).write(
        path
    )
    tables = dict(schedule="pipeline", layers="model", micro="batch")
    keys = (f"{tables.get(word.split('=')[0], 'parallel')}.{word}" for word in layout.split())
    config = settings.load(None, (*SETTINGS, *keys, f"experts.buffer={buffer}", f"experts.replay={path}"))
    plan = plan_of(resolve(config, world.size, 64))

    def on_one():
        lone = build_mesh(lone_plan := plan_of(on_one_rank(plan.config)), alone())
        losses, grads, _ = trained(lone_plan, lone)
        lone.free()
        return losses, {piece.spec.name: grad.view(piece.spec.shape) for piece, grad in grads.items()}

    mesh = build_mesh(plan, world)
    losses, grads, (predicted, measured) = trained(plan, mesh)
    again, grads_again, _ = trained(plan, mesh)
    expected, whole = once(
        world, ("routing", pattern, plan.config.model.layers, plan.config.batch.micro), on_one
    )
    wrong = (
        []
        if losses == again and all((a == b).all() for a, b in zip(grads.values(), grads_again.values()))
        else ["other bits"]
    )
    wrong += (
        [f"losses {losses}, not {expected}"]
        if max(abs(a - b) for a, b in zip(losses, expected)) > 1e-12
        else []
    )
    for piece, grad in grads.items():
        error = ((grad - part(whole, piece)).abs().max() / (part(whole, piece).abs().max() + 1e-9)).item()
        wrong += [f"gradient of {piece.spec.name}: {error:.1e}"] if not error < 1e-10 else []
    others = [a == b for a, b in zip(predicted[:4], measured[:4])]
    wrong += (
        []
        if all(others) and measured.activations <= predicted.activations
        else [f"holds {measured}, predicted {predicted}"]
    )
    # then the first rank is full
    if pattern == "one" and "tp" not in layout and "cp" not in layout:
        most = max(world.allgather(measured.activations / predicted.activations))
        wrong += [f"full at {most:.0%} of what was predicted"] if most < 0.95 else []
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:3]}")


# ---------------------------------------------------------------- what can't be replayed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda experts: experts[..., :1],
            r"needed \[steps, batch.global, data.sequence, experts.active\] = \[steps, 8, 32, 2\]",
        ),
        (lambda experts: experts + 7, "an expert twice, or none of 0 to 7"),
        (lambda experts: experts * 0, "an expert twice"),
        (lambda experts: experts.astype(float), "needed"),
        (None, "found nothing of blocks.1.ffn.router.load"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(tmp_path, change, words):
    from mpitrain import config as settings
    from mpitrain.errors import ConfigError
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.routing import RoutingTrace
    from mpitrain.plan.settings.resolve import resolve

    good = routing("spikes", (STEPS, SEQUENCES, LENGTH))
    blocks = {0: good} if change is None else dict.fromkeys(range(LAYERS), change(good))
    RoutingTrace({f"blocks.{block}.ffn.router.load": experts for block, experts in blocks.items()}).write(
        tmp_path / "routing.npz"
    )
    config = resolve(settings.load(None, (*SETTINGS, f"experts.replay={tmp_path}/routing.npz")), 1, 64)
    with pytest.raises(ConfigError, match=words):
        _ = plan_of(config).routing


def read(path):
    """Return what experts.replay = path is taken for."""
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    return plan_of(resolve(settings.load(None, (*SETTINGS, f"experts.replay={path}")), 1, 64)).routing


@pytest.mark.parametrize("first", [np.array(0), np.array([1, 2]), np.array(1.0), np.array("1")])
def test_a_first_step_that_is_none_is_refused(tmp_path, first):
    from mpitrain.errors import ConfigError

    good = routing("spikes", (STEPS, SEQUENCES, LENGTH))
    np.savez(
        tmp_path / "routing.npz",
        first_step=first,
        **{f"blocks.{block}.ffn.router.load": good for block in range(LAYERS)},
    )
    with pytest.raises(ConfigError, match=r"found first_step .*needed one step, from 1 on"):
        read(tmp_path / "routing.npz")


def test_steps_are_replayed_in_their_own_place_and_others_in_turn(tmp_path):
    """A file without a first step is of a version that recorded none."""
    from mpitrain.plan.routing import Routes, RoutingTrace

    blocks = {
        f"blocks.{block}.ffn.router.load": routing("spikes", (4, SEQUENCES, LENGTH))
        for block in range(LAYERS)
    }
    RoutingTrace(blocks, 6).write(tmp_path / "later.npz")
    np.savez(tmp_path / "old.npz", **blocks)
    later = read(tmp_path / "later.npz")
    old = read(tmp_path / "old.npz")
    assert (later.first, later.steps, old.first, old.steps) == (6, 4, 1, 4) and later.digest != old.digest
    assert [later.place(step) for step in (1, 2, 6, 9, 10, 12)] == [3, 0, 0, 3, 0, 2]
    assert [old.place(step) for step in (1, 4, 5)] == [0, 3, 0]
    assert later.lacks(range(6, 10)) == later.lacks(range(10, 10)) == old.lacks(range(1, 5)) == ""
    assert "has steps 6 to 9" in later.lacks(range(1, 9)) and "step 1 goes where step 9 went" in later.lacks(
        range(1, 9)
    )
    assert "step 7 goes where step 3 went" in old.lacks(range(2, 8))
    place = later.experts["blocks.1.ffn.router.load"][1, 3:5]
    assert (
        Routes(7, range(3, 5), later).chosen("blocks.1.ffn.router.load", np.arange(LENGTH)) == place
    ).all()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"text"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    from mpitrain import config as settings
    from mpitrain.errors import ConfigError
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match=r"not a routing trace; give a file that run.routing has made"):
        _ = plan_of(resolve(settings.load(None, (*SETTINGS, f"experts.replay={tmp_path}/x")), 1, 64)).routing


def test_a_trace_that_would_not_fit_in_memory_is_refused_packed(tmp_path, monkeypatch):
    from mpitrain import config as settings
    from mpitrain.errors import ConfigError
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan import routing_file as traces
    from mpitrain.plan.settings.resolve import resolve

    zeros = np.zeros((400, SEQUENCES, LENGTH, ACTIVE), np.uint16)
    np.savez_compressed(
        tmp_path / "x.npz", **{f"blocks.{block}.ffn.router.load": zeros for block in range(LAYERS)}
    )
    monkeypatch.setattr(traces, "MOST_BYTES", 1 << 16)
    assert (tmp_path / "x.npz").stat().st_size < 1 << 16
    with pytest.raises(ConfigError, match=r"found more than .* packed; needed a trace of fewer steps"):
        _ = plan_of(
            resolve(settings.load(None, (*SETTINGS, f"experts.replay={tmp_path}/x.npz")), 1, 64)
        ).routing
