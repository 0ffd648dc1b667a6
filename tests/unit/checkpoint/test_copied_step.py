"""Which step nodes have together in memory: of random inventories, as a list of all parts says."""

import random

import pytest
from effort import cases

from mpitrain.training.saving.copied_step import NodeInventory, newest_in


def inventories(dice):
    """Return what some nodes have of two starts of some parts, of which each copied one of two steps last."""
    num_nodes, num_shards, last = dice.randint(1, 4), dice.randint(1, 5), dice.randint(2, 9)
    nodes = []
    for first in range(num_nodes):
        shards = {}
        for start in ("copies-a", "copies-b"):
            here = [number for number in range(num_shards) if dice.random() < 0.7]
            if here:
                steps = {number: {last - 1, dice.choice([last, last - 2])} for number in here}
                shards[start] = (num_shards, steps)
        saved = {step: None for step in (last - 2, last + 1) if dice.random() < 0.15}
        nodes.append(NodeInventory(first, [first], saved, shards))
    return nodes


@pytest.mark.parametrize("number", range(cases(20, 5000)))
def test_the_newest_step_is_one_of_which_every_part_is_somewhere(number):
    nodes = inventories(random.Random(f"inventories {number}"))
    saved = {step for node in nodes for step in node.saved}
    whole = set(saved)
    for start in ("copies-a", "copies-b"):
        held = [node.shards[start] for node in nodes if start in node.shards]
        for step in range(12):
            there = {n for _, shards in held for n, steps in shards.items() if step in steps}
            if held and len(there) == held[0][0]:
                whole.add(step)
    newest = newest_in(nodes)
    assert newest.step == max(whole, default=0)
    if newest.start:
        for shard, index in newest.holders.items():
            assert newest.step in nodes[index].shards[newest.start][1][shard]
    if newest.lost:
        assert newest.lost[0] > newest.step
