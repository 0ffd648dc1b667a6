"""Which blocks, parameters and buckets a stage has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.schedules.placement import placement
from mpitrain.slicing import EMBEDDING, balanced_split, parts_of, reduction_of, slices, specs_of


def resolve(*overrides, ranks):
    return settings.resolve(settings.load(None, overrides), ranks, 256)


PLACEMENTS = st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)])


@given(st.integers(1, 40), st.integers(1, 12), PLACEMENTS, st.floats(0, 6))
def test_every_stage_has_a_block_and_no_division_is_better(num_blocks, num_ranks, name_and_chunks, head):
    ranks = placement(name_and_chunks[0], num_ranks, name_and_chunks[1])
    num_stages = len(ranks)
    if num_stages > num_blocks:
        return
    counts = balanced_split(num_blocks, ranks, head)
    assert sum(counts) == num_blocks and len(counts) == num_stages and min(counts) >= 1

    def slowest(counts):
        costs = [*counts[:-1], counts[-1] + head]
        return round(max(sum(cost for cost, rank in zip(costs, ranks) if rank == r) for r in range(num_ranks)), 9)

    for stage in range(num_stages):  # moving one block anywhere doesn't help
        for other in range(num_stages):
            moved = list(counts)
            moved[stage] -= 1
            moved[other] += 1
            assert min(moved) < 1 or slowest(moved) >= slowest(counts)


def test_a_head_as_large_as_a_block_takes_one_from_the_last_stage():
    assert balanced_split(8, [0, 1], 1.0) == [5, 3]
    assert balanced_split(6, [0, 1, 2, 3], 0.2) == [2, 2, 1, 1]
    assert balanced_split(5, range(5), 3.0) == [1, 1, 1, 1, 1]
    assert balanced_split(8, [0, 1, 1, 0], 1.0) == [3, 2, 2, 1]


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("pp", [1, 2, 3, 6])
def test_stages_hold_every_parameter_once_but_the_tied_embedding(pp, tied):
    config = resolve(f"parallel.pp={pp}", f"model.tied={tied}", ranks=pp)
    whole = resolve(f"model.tied={tied}", ranks=1)
    found = [spec.name for stage in range(pp) for block in specs_of(config, stage) for spec in block]
    expected = [spec.name for block in specs_of(whole, 0) for spec in block]
    assert found == expected
    assert found.count(EMBEDDING) == (2 if tied == "true" else 1)
    assert [i for stage in slices(config) for i in stage] == list(range(6))


@pytest.mark.parametrize("bucket_mb", ["0.0001", "0.5", "1000.0"])
def test_parts_walk_all_blocks_from_the_last_to_the_first(bucket_mb):
    config = resolve("parallel.pp=2", f"comm.bucket_mb={bucket_mb}", ranks=2)
    for stage in (0, 1):
        parts = parts_of(config, stage)
        assert [block for part in parts for block in reversed(part)] == list(reversed(range(len(specs_of(config, stage)))))
        assert len(parts) == {"0.0001": len(specs_of(config, stage)), "1000.0": 1}.get(bucket_mb, len(parts))
        assert max(reduction_of(config, stage).ready) == len(parts) - 1


def test_the_tied_embedding_is_complete_when_its_last_use_is():
    one = reduction_of(resolve("comm.bucket_mb=0.001", ranks=1), 0)
    assert one.ready[-1] == one.num_parts - 1
    last = reduction_of(resolve("comm.bucket_mb=0.001", "parallel.pp=2", ranks=2), 1)
    assert last.ready[-1] == 0
