"""Which parts of a state go to another node, held against lists of what every rank has; and what it costs."""

import itertools

import pytest

from mpitrain.actor.rehearsal import Rehearsal
from mpitrain.commands.inspect import planned
from mpitrain.errors import ConfigError
from mpitrain.plan.division.domains import DOMAINS, domains_of
from mpitrain.plan.predict.snapshot_bytes import file_bytes, memory_copy_bytes, sent_copy_bytes
from mpitrain.schedules.actions import COPY

SIZES = (
    "model.layers=4",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=64",
    "batch.global=8",
    "recovery.every=1",
)
MOE = ("model.family=mixtral", "experts.count=4", "parallel.ep=2")
LAYOUTS = [  # ranks, of a node, keys, and whether a part of the state is on one node only
    (2, 1, ("parallel.dp=2", "parallel.zero=1"), True),
    (2, 1, ("parallel.dp=2", "parallel.zero=0"), False),
    (2, 2, ("parallel.dp=2", "parallel.zero=1"), False),
    (4, 2, ("parallel.dp=4", "parallel.zero=2", "parallel.dp_shard=2"), False),
    (4, 2, ("parallel.dp=4", "parallel.zero=3"), True),
    (4, 2, ("parallel.dp=2", "parallel.pp=2", "parallel.zero=0"), True),
    (4, 2, ("parallel.tp=2", "parallel.dp=2", "parallel.zero=0"), False),
    (4, 1, ("parallel.tp=2", "parallel.dp=2", "parallel.zero=0"), False),
    (4, 2, (*MOE, "parallel.dp=4", "parallel.zero=0"), False),
    (4, 2, (*MOE, "parallel.dp=4", "parallel.zero=1"), True),
]


def plan_of(ranks, node_ranks, keys):
    return planned(None, (*SIZES, f"comm.node_ranks={node_ranks}", *keys), ranks)


@pytest.mark.parametrize(("ranks", "node_ranks", "keys", "sends"), LAYOUTS, ids=str)
def test_two_nodes_have_each_part_and_no_more_is_sent(ranks, node_ranks, keys, sends):
    plan = plan_of(ranks, node_ranks, keys)
    assert bool(plan.axes.unreplicated) == sends == any(COPY in program for program in plan.training.ranks)
    for rank, domain in itertools.product(range(ranks), domains_of(plan.config)):
        axes = plan.axes.of(rank)
        first, second = plan.axes.holders(rank, DOMAINS[domain].replicate)
        nodes = {other // node_ranks for other in axes[DOMAINS[domain].replicate]}
        assert (second is None) == (len(nodes) == 1) and first in axes[DOMAINS[domain].replicate]
        if sends:
            ring = axes["copies"]
            partner = ring[(ring.index(rank) + 1) % len(ring)]
            assert partner // node_ranks != rank // node_ranks


@pytest.mark.parametrize(("ranks", "node_ranks", "keys", "sends"), LAYOUTS[:6], ids=str)
def test_traffic_and_memory_know_of_copies(ranks, node_ranks, keys, sends):
    plan = plan_of(ranks, node_ranks, keys)
    num_bytes = sent_copy_bytes(plan)
    assert Rehearsal(plan, 0).training().get("copies", []) == ([("shift", num_bytes)] if sends else [])
    least = 2 * file_bytes(num_bytes) if sends else file_bytes(1)
    assert memory_copy_bytes(plan, 0) >= least
    without = planned(None, (*SIZES, "recovery.every=0", *keys), ranks)
    assert memory_copy_bytes(without, 0) == sent_copy_bytes(without) == 0


@pytest.mark.parametrize(
    ("ranks", "keys", "said"),
    [
        (3, ("parallel.pp=3", "model.layers=6", "comm.node_ranks=2"), "3 ranks on 2 nodes with different"),
        (4, ("parallel.pp=4", "recovery.partner=3"), "recovery.partner = 3 of 4 ranks"),
        (4, ("parallel.pp=4", "recovery.partner=4"), "recovery.partner = 4 of 4 ranks"),
        (2, ("parallel.pp=2", "recovery.every=0", "recovery.partner=1"), "recovery.partner = 1 does nothing"),
    ],
)
def test_a_partner_that_can_not_be_is_refused(ranks, keys, said):
    with pytest.raises(ConfigError, match=said):
        planned(None, (*SIZES, *keys), ranks)
