"""Which step nodes have together in memory: of random inventories, as a list of all parts says."""

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest
from effort import cases

from mpitrain.training.saving.copied_step import NodeInventory, newest_in
from mpitrain.training.saving.memory_folder import CopyFile


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory of a file back")
@pytest.mark.parametrize("generation", [0, 1])
@pytest.mark.parametrize("num_bytes", [64, 4096 - 64, 4096, 1_000_000 - 64, 3 << 20])
def test_of_the_copies_that_are_dropped_the_memory_is_given_back(generation, num_bytes):
    """For a node with as much memory as copies take: the next start needs it for the checkpoint."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "shard-0.bin"
        copies = CopyFile.make(path, num_bytes, num_bytes)
        for number, step in enumerate((7, 8)):
            copies.bytes_of(number)[:] = number + 1
            copies.end(number, step, {"step": step}, copies.digest(number))
        before = os.stat(path).st_blocks
        CopyFile.read(path, num_bytes, num_bytes).drop_others(generation)
        left = CopyFile.read(path, num_bytes, num_bytes)
        assert left.steps() == {7 + generation} and left.meta(generation) == {"step": 7 + generation}
        assert left.digest(generation) == left.marked_digest(generation)
        assert os.stat(path).st_blocks <= before / 2 + 16  # of 512 bytes: two pages
