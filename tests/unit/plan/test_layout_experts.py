"""Experts over folded ranks.

Who shares what, rounds of an exchange, and what is refused with what would work.
"""

import itertools

import numpy as np
import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.expert.rounds import Rounds
from mpitrain.plan.settings.resolve import resolve

MIXTRAL = ("model.family=mixtral",)


def plan_with(num_ranks, *keys):
    return plan_of(resolve(settings.load(None, (*MIXTRAL, *keys)), num_ranks, 64))


@pytest.mark.parametrize(
    ("num_ranks", "keys"),
    [
        (16, ("parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "parallel.etp=2")),
        (16, ("parallel.cp=2", "parallel.ep=4", "parallel.zero=3", "parallel.dp_shard=2")),
        (8, ("parallel.tp=4", "parallel.ep=2", "parallel.zero=2")),
        (6, ("parallel.ep=3", "parallel.pp=2", "experts.count=6")),
    ],
)
def test_every_axis_divides_the_ranks(num_ranks, keys):
    """The ranks of an axis say so alike, and etp x ep x (shard x replicate) are those of one
    pipeline rank, each once.
    """
    plan = plan_with(num_ranks, *keys)
    axes = [plan.axes.of(rank) for rank in range(num_ranks)]
    parallel = plan.config.parallel
    for name in ("tokens", "experts", "expert_shard", "expert_replicate"):
        assert all(tuple(axes[other][name]) == tuple(mine[name]) for mine in axes for other in mine[name]), (
            name
        )
    for rank, mine in enumerate(axes):
        assert rank in mine["experts"] and len(mine["experts"]) == parallel.ep * parallel.etp
        alike = {b for a in mine["expert_shard"] for b in axes[a]["expert_replicate"]}
        assert sorted(
            b
            for a in mine["experts"]
            for b in {d for c in axes[a]["expert_shard"] for d in axes[c]["expert_replicate"]}
        ) == [
            other
            for other in range(num_ranks)
            if plan.axes.grid.coordinates(other)["pp"] == plan.axes.grid.coordinates(rank)["pp"]
        ]
        assert {axes[other]["experts"].index(other) for other in alike} == {mine["experts"].index(rank)}, (
            "they have the same experts"
        )


@pytest.mark.parametrize("seed", range(20))
def test_rounds_bring_each_row_once_and_never_too_many(seed):
    """What each rank says it sends is what the other says it receives.

    Every row in one round, in the order of the experts.
    """
    dice = np.random.default_rng(seed)
    divided = dice.integers(1, 3)
    parts = dice.integers(1, 5)
    here = dice.integers(1, 4)
    counts = np.repeat(
        dice.integers(0, 9, (parts, parts * here)) * dice.integers(0, 2, (parts, 1)), divided, axis=0
    )
    limit = int(dice.integers(1, 30))
    ranks = [Rounds(counts, rank, int(divided), limit) for rank in range(len(counts))]
    assert len({each.num for each in ranks}) == 1
    sent = [[] for _ in ranks]
    for number in range(ranks[0].num):
        rounds = [each[number] for each in ranks]
        for (a, one), (b, other) in itertools.product(enumerate(rounds), repeat=2):
            assert one.sent[b] == other.received[a]
        for rank, each in enumerate(rounds):
            assert sum(each.received) == sum(each.loads) <= limit
            assert (
                each.order is None if len(ranks) == 1 else sorted(each.order) == list(range(sum(each.loads)))
            )
            sent[rank] += range(counts[rank].sum()) if ranks[0].num == 1 else each.rows.tolist()
    assert [sorted(rows) for rows in sent] == [list(range(row.sum())) for row in counts]


@pytest.mark.parametrize(
    ("num_ranks", "keys", "words"),
    [
        (
            4,
            ("parallel.ep=3",),
            r"parallel.ep x parallel.etp = 3 x 1 doesn't divide .* = 4 ranks, .*; use ep = 1, 2, 4",
        ),
        (6, ("parallel.ep=3",), r"experts.count = 8 doesn't divide over parallel.ep = 3; use ep = 1, 2"),
        (
            16,
            ("parallel.ep=16",),
            r"experts.count = 8 doesn't divide over parallel.ep = 16; use ep = 1, 2, 4, 8",
        ),
        (
            2,
            ("parallel.etp=2", "experts.width=33"),
            r"experts.width = 33 doesn't divide over parallel.etp = 2",
        ),
        (1, ("experts.buffer=0.001",), r"a rank can't receive one token at once; use 0.0039 or more"),
        (1, ("experts.active=9",), r"experts.active = 9 of experts.count = 8; send a token to fewer"),
        (1, ("experts.groups=3",), r"experts.groups = 3 doesn't divide experts.count = 8"),
        (
            1,
            ("experts.groups=4", "experts.active=3"),
            r"experts.active = 3, but 1 of 4 groups have 2 experts",
        ),
        (
            1,
            ("experts.bias_rate=0.1",),
            r'experts.bias_rate = 0.1 does nothing with experts.balance = "microbatch"; use "bias"',
        ),
        (
            1,
            ("experts.balance=none", "experts.balance_weight=1.0"),
            r"experts.balance_weight = 1.0 does nothing",
        ),
        (
            1,
            ("model.family=llama", "experts.count=4"),
            r'does nothing with model.family = "llama", which has no experts',
        ),
        (
            2,
            ("model.family=llama", "parallel.ep=2"),
            r'parallel.ep = 2: model.family = "llama" has no experts; use deepseek-v3, glm-4.5, gpt-oss',
        ),
        (1, ("model.family=llama", "run.routing=2"), r"run.routing = 2: .* has no experts"),
        (2, ("parallel.tp=2", "parallel.sequence=false"), r"parallel.sequence = false with experts"),
        (
            2,
            ("parallel.ep=2", "numerics.reproducible=layout"),
            r"tokens of several ranks meet in one product",
        ),
        (
            1,
            ("experts.capacity=1.0", "pipeline.schedule=seq1f1b"),
            r'experts.capacity = 1.0 with pipeline.schedule = "seq1f1b"',
        ),
        (1, ("optimizer.name=muon",), r'optimizer.name = "muon" with experts'),
        (1, ("memory.offload=activations",), r'memory.offload = "activations" with experts'),
        (1, ("precision.compute=fp8",), r'precision.compute = "fp8" with experts'),
    ],
)
def test_what_cannot_be_spread_is_refused(num_ranks, keys, words):
    with pytest.raises(ConfigError, match=words):
        plan_with(num_ranks, *keys)


@pytest.mark.parametrize(
    ("keys", "weight", "rate"),
    [
        ((), 1e-4, 1e-3),
        (("experts.balance=bias",), 1e-4, 1e-3),
        (("experts.balance=none",), 0.0, None),
        (("experts.balance=sequence",), 0.01, None),
        (("experts.balance=sequence", "experts.balance_weight=0.5"), 0.5, None),
    ],
)
def test_weight_and_rate_of_a_family_are_those_of_its_own_balance(keys, weight, rate):
    experts = plan_with(1, "model.family=deepseek-v3", *keys).config.experts
    assert (experts.balance_weight, experts.bias_rate) == (weight, rate)


def test_parameters_and_flops_count_active_experts():
    plan = plan_with(
        1,
        "model.layers=3",
        "experts.shared=1",
        "experts.first=1",
        "model.width=32",
        "experts.width=16",
        "model.ffn=48",
    )
    of_expert = 3 * 16 * 32
    width = 32
    attention = 2 * width * width + 2 * width * 8 * 2
    dense = 3 * width * 48
    head = 64 * width
    sparse = (2 + 1) * of_expert + 8 * width
    active = 3 * attention + dense + 2 * sparse + head
    assert plan.flops_per_token() == 6 * active + 3 * 6 * plan.config.data.sequence * width
    total = sum(
        spec.numel for spec in plan.parameters() if spec.name.endswith("weight") and "experts" in spec.name
    )
    assert total == 2 * 8 * of_expert
