"""Compiled functions train as they do as they are, and the same bits whatever the stage, the shard,
the schedule or the mode.
"""

import pytest
from conftest import EVERY, LONG, agree, but_for
from training import alone, resolved, same, train, trained

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

ON = "run.compile=true"
# Greatest relative difference of losses and norms from the run as it is, by type; bf16 is rounded
# at fewer places.
BUDGET = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}
SAME = [  # bit for bit as on one rank: (type, settings)
    ("fp32", "memory.recompute=selective"),
    ("bf16", "memory.recompute=full"),
    ("bf16", "memory.recompute=selective memory.offload=activations"),
    ("fp32", "parallel.pp=2 pipeline.schedule=1f1b"),
    ("bf16", "parallel.pp=2 pipeline.schedule=zbv memory.recompute=selective"),
]
FEW = ("model.family=gpt2", "model.kv_heads=2")  # half as many functions to compile as others have
SHARDS = ["parallel.zero=3", "parallel.zero=2 memory.recompute=full"]
OTHERS = [  # layouts with shapes of their own, and models with other functions
    "parallel.tp=2 parallel.async_tp=true model.tied=false",
    "parallel.cp=2",
    "parallel.pp=2 pipeline.schedule=seq1f1b",
]
FAMILIES = [  # with norms of heads; with rotary parts of heads, and shared experts
    "model.family=qwen3",
    "model.family=deepseek-v3 model.kv_heads=2 experts.count=4 experts.active=2 experts.first=1 "
    "experts.groups=1 experts.groups_active=1",
]


def off(found, expected):
    """Return the greatest relative difference of two runs' losses and norms."""
    return max(abs(a - b) / abs(b) for one, other in zip(found[0], expected[0]) for a, b in zip(one, other))


@LONG
@pytest.mark.parametrize(
    "compute", [compute for compute in BUDGET if EVERY or compute not in ("fp64", "fp16")]
)
def test_it_trains_as_without(world, compute):
    _require_budget(world, compute)


def test_what_compiles_least_trains_as_without(world):
    _require_budget(world, "fp32", *FEW)


def _require_budget(world, compute, *settings):
    if world.size > 1:
        pytest.skip("runs on 1 rank")
    typed = (f"precision.compute={compute}", *settings)
    found, expected = (alone(world, *typed, *more) for more in ((ON,), ()))
    agree(
        world,
        0 < off(found, expected) < BUDGET[compute],
        f"{off(found, expected):.1e}: {found[0]} and {expected[0]}",
    )


@LONG
@pytest.mark.parametrize("family", FAMILIES if EVERY else FAMILIES[1:])
def test_other_families_train_as_without(world, family):
    if world.size > 1:
        pytest.skip("runs on 1 rank")
    found, expected = (alone(world, *family.split(), *more) for more in ((ON,), ()))
    agree(
        world,
        off(found, expected) < BUDGET["fp32"],
        f"{off(found, expected):.1e}: {found[0]} and {expected[0]}",
    )


@pytest.mark.parametrize(
    ("compute", "settings", "family"),
    [(*SAME[0], FEW), *(pytest.param(*case, (), marks=LONG) for case in SAME)],
)
def test_bits_are_those_of_one_rank(world, compute, settings, family):
    one = ON, f"precision.compute={compute}", *family
    found = trained(world, *one, *settings.split())
    agree(world, same(found, alone(world, *one)), f"{found[0]}")


@LONG
@pytest.mark.parametrize("settings", SHARDS)
def test_bits_are_those_of_whole_state(world, settings):
    layout = ON, "parallel.dp=2", "precision.compute=bf16"
    expected = trained(world, *layout, "parallel.zero=0")
    found = train(world, resolved(world, *layout, *settings.split()))
    agree(world, same(found, expected), f"{found[0]}")


@LONG
@pytest.mark.parametrize("settings", OTHERS)
def test_other_layouts_train_as_without(world, settings):
    found, expected = (trained(world, *settings.split(), "model.kv_heads=2", *more) for more in ((ON,), ()))
    agree(
        world,
        off(found, expected) < BUDGET["fp32"],
        f"{off(found, expected):.1e}: {found[0]} and {expected[0]}",
    )


PRACTISED = [
    "precision.compute=fp16",
    "memory.offload=optimizer",
    "model.family=mixtral experts.count=4 experts.active=2 experts.balance=bias",
    "model.family=mixtral experts.count=4 experts.active=2 experts.balance=global",
    "parallel.dp=2 parallel.zero=3",
    "parallel.dp=2 parallel.zero=1 optimizer.name=muon",
    "parallel.dp=2 numerics.reproducible=layout",
    "parallel.pp=2 pipeline.schedule=zbv precision.compute=fp16",
]
PRACTISED_LONGER = [
    "model.family=mixtral experts.count=4 experts.active=2 experts.balance=global",
    "parallel.dp=2 numerics.reproducible=layout",
]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("settings", but_for(PRACTISED, PRACTISED_LONGER))
def test_a_step_before_the_first_changes_nothing(world, settings):
    """What compiles for the steps is a step without an update.

    Not of weights, moments, the loss scale or the balance of experts.
    """
    from mpitrain.training.compile_warmup import warm_up

    states = []

    def warmed_up(actor, microbatches):
        states.append((actor.loss_scale.state, actor.place.limit_s, actor.progress.timeout_s))
        warm_up(actor, 1, microbatches)
        states.append((actor.loss_scale.state, actor.place.limit_s, actor.progress.timeout_s))

    found = train(world, resolved(world, *settings.split()), before=warmed_up)
    expected = trained(world, *settings.split())
    agree(
        world,
        same(found, expected) and states[0] == states[1],
        f"{found[0]} instead of {expected[0]}, {states}",
    )
