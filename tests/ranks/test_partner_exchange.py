"""Copies of the state that go to another node, on two ranks that are taken for two nodes."""

import resource
from pathlib import Path

import pytest
from conftest import agree
from training import resolved, train

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]
SETTINGS = ("parallel.dp=2", "parallel.zero=1", "comm.node_ranks=1", "recovery.every=1")
META = {"step": 1}


def node_memory(world, tmp_path):
    """Return a world, and the folder of each node in place of /dev/shm. Collective over `world`."""
    from mpitrain.cluster.rundir import RunDir
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.comm.base.world import World
    from mpitrain.training.saving.memory_folder import NodeMemory

    everyone = World(world, RankStatus())
    path = everyone.on_first_rank("naming a folder", lambda: tmp_path)
    memory = NodeMemory(everyone, RunDir(path), partner=1)
    memory.make(str(path))
    return everyone, memory


def flip_a_byte(folder, number):
    """Change the first copy of a part of the state in memory, as an error of the memory does."""
    from mpitrain.plan.predict.snapshot_bytes import MARKS, META_BYTES

    with open(folder / f"shard-{number}.bin", "r+b") as file:
        file.seek(MARKS + META_BYTES)
        (value,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("damaged", [(), (1,), (0, 1)], ids=str)
def test_a_copy_that_differs_from_what_was_sent_is_not_kept(world, tmp_path, capfd, damaged):
    """damaged: the ranks whose memory changes after the digest was made."""
    from mpitrain.plan.predict.snapshot_bytes import memory_copy_bytes
    from mpitrain.training.saving.in_memory import MemoryCopies
    from mpitrain.training.saving.memory_folder import copied_starts, copies_in

    everyone, memory = node_memory(world, tmp_path)
    taken = []

    def copy_now(actor, microbatches):
        copies = MemoryCopies(actor, everyone, memory, taken.append)
        copies.copy(1, META)
        if world.rank in damaged:
            flip_a_byte(copies_in(memory.own_folder)[0], world.rank)
        predicted = memory_copy_bytes(actor.plan, 0, actor.shards_here)
        taken.append((copies.own_bytes, predicted))

    train(world, resolved(world, *SETTINGS), before=copy_now)
    (start,) = copied_starts([memory.own_folder]).values()
    other = 1 - world.rank
    steps = {number: found for number, (_, found) in start.shards.items()}
    wanted = {world.rank: {1}, other: set() if other in damaged else {1}}
    said = capfd.readouterr().err
    named = f"rank {other}'s state after step 1" in said
    agree(world, steps == wanted and named == (other in damaged), f"{steps}, needed {wanted}: {said}")
    agree(world, len(taken) == 1 and taken[0][0] == taken[0][1], f"bytes taken, predicted: {taken}")
    memory.remove()


def test_where_one_node_has_no_room_no_rank_keeps_memory_for_copies(world, tmp_path):
    from mpitrain.plan.predict.snapshot_bytes import META_BYTES
    from mpitrain.training.saving.in_memory import MemoryCopies
    from mpitrain.training.saving.memory_folder import copies_in

    everyone, memory = node_memory(world, tmp_path)
    said = []

    def begin(actor, microbatches):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (META_BYTES, limits[1]))
        copies = MemoryCopies(actor, everyone, memory, said.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        mapped = str(memory.own_folder) in Path("/proc/self/maps").read_text()
        said.append((copies.due(1), mapped, copies_in(memory.own_folder)))

    train(world, resolved(world, *SETTINGS), before=begin)
    agree(world, said[0].startswith("no copies in memory (recovery.every)"), f"{said}")
    agree(world, said[1] == (False, False, []), f"copies are due, mapped, in the folder: {said[1]}")
    memory.remove()
