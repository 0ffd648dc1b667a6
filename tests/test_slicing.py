"""Which blocks, parameters and buckets a stage has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.slicing import EMBEDDING, balanced_split, parts_of, reduction_of, slices, specs_of


def resolve(*overrides, ranks):
    return settings.resolve(settings.load(None, overrides), ranks, 256)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 6))
def test_every_stage_has_a_block_and_no_division_is_better(num_blocks, num_stages, head):
    if num_stages > num_blocks:
        return
    counts = balanced_split(num_blocks, num_stages, head)
    assert sum(counts) == num_blocks and len(counts) == num_stages and min(counts) >= 1

    def slowest(counts):
        return max([*counts[:-1], counts[-1] + head])

    for stage in range(num_stages):  # moving one block anywhere doesn't help
        for other in range(num_stages):
            moved = list(counts)
            moved[stage] -= 1
            moved[other] += 1
            assert min(moved) < 1 or slowest(moved) >= slowest(counts)


def test_a_head_as_large_as_a_block_takes_one_from_the_last_stage():
    assert balanced_split(8, 2, 1.0) == [5, 3]
    assert balanced_split(6, 4, 0.2) == [2, 2, 1, 1]
    assert balanced_split(5, 5, 3.0) == [1, 1, 1, 1, 1]


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
