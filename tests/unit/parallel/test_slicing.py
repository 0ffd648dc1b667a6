"""Which blocks, parameters and buckets a stage has, and which buffers these need."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.model.layers.embedding_and_head import EMBEDDING
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.division.stage_balance import balanced_split
from mpitrain.plan.predict.pool_sizes import needed_by
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules.catalog import placement


def plan(*overrides, ranks):
    return plan_of(resolve(settings.load(None, overrides), ranks, 256))


def stages(*overrides, ranks):
    return plan(*overrides, ranks=ranks).stages


def num_layers(stage):
    return sum(len(stage.blocks[number]) for number in stage.inner)


PLACEMENTS = st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)])


def slowest(counts, costs, ranks, head):
    """Add up the layers of each stage and of each rank; the last stage has the head, too."""
    ends = list(itertools.accumulate(counts))
    stages = [sum(costs[end - n : end]) for n, end in zip(counts, ends)]
    stages[-1] += head
    return max(stages) + max(
        sum(load for load, rank in zip(stages, ranks) if rank == r) for r in range(max(ranks) + 1)
    )


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 8), PLACEMENTS, st.integers(0, 30)
)
def test_every_stage_has_a_layer_and_no_move_helps(costs, num_ranks, name_and_chunks, head):
    ranks = placement(name_and_chunks[0], num_ranks, name_and_chunks[1])
    if len(ranks) > len(costs):
        return
    counts = balanced_split(tuple(costs), ranks, head)
    assert sum(counts) == len(costs) and len(counts) == len(ranks) and min(counts) >= 1
    for stage, neighbour in [
        (s, s + d) for s in range(len(ranks)) for d in (-1, 1) if 0 <= s + d < len(ranks)
    ]:
        moved = list(counts)
        moved[stage] -= 1
        moved[neighbour] += 1
        assert min(moved) < 1 or slowest(moved, costs, ranks, head) >= slowest(counts, costs, ranks, head)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=12), st.integers(0, 20))
def test_two_stages_are_divided_as_well_as_can_be(costs, head):
    best = min(slowest([n, len(costs) - n], costs, (0, 1), head) for n in range(1, len(costs)))
    assert slowest(balanced_split(tuple(costs), (0, 1), head), costs, (0, 1), head) == best


def test_a_head_takes_layers_from_the_last_stage():
    assert balanced_split((1.0,) * 8, (0, 1), 1.0) == [5, 3] or balanced_split((1.0,) * 8, (0, 1), 1.0) == [
        4,
        4,
    ]
    assert balanced_split((1.0,) * 8, (0, 1), 3.0) == [5, 3]
    assert balanced_split((1.0,) * 5, (0, 1, 2, 3, 4), 3.0) == [1, 1, 1, 1, 1]
    assert slowest(balanced_split((1.0,) * 9, (0, 1, 1, 0), 1.0), [1] * 9, (0, 1, 1, 0), 1) == 5 + 3


def test_half_blocks_balance_the_reference_model():
    first, second = stages("model.preset=reference", "parallel.pp=2", "data.sequence=256", ranks=2)
    assert (num_layers(first), num_layers(second)) == (9, 7)
    last = second.specs()
    assert [len(block) for block in last] == [4, 9, 9, 9, 2] and all(".ffn." in spec.name for spec in last[0])


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("pp", [1, 2, 3, 6])
def test_stages_hold_every_parameter_once_but_the_tied_embedding(pp, tied):
    divided = stages(f"parallel.pp={pp}", f"model.tied={tied}", ranks=pp)
    (whole,) = stages(f"model.tied={tied}", ranks=1)
    found = [spec.name for stage in divided for block in stage.specs() for spec in block]
    expected = [spec.name for block in whole.specs() for spec in block]
    assert found == expected
    assert found.count(EMBEDDING) == (2 if tied == "true" else 1)
    assert sum(map(num_layers, divided)) == 12


@pytest.mark.parametrize("bucket_mb", ["0.0001", "0.5", "1000.0"])
def test_parts_walk_all_blocks_from_the_last_to_the_first(bucket_mb):
    for stage in stages("parallel.pp=2", f"comm.bucket_mb={bucket_mb}", ranks=2):
        num_blocks = len(stage.blocks)
        assert [block for part in stage.parts for block in reversed(part)] == list(
            reversed(range(num_blocks))
        )
        assert len(stage.parts) == {"0.0001": num_blocks, "1000.0": 1}.get(bucket_mb, len(stage.parts))
        assert max(stage.reduction.ready) == len(stage.parts) - 1


@pytest.mark.parametrize(("every", "lengths"), [(0, [1] * 6), (2, [2, 2, 2]), (3, [3, 3]), (4, [4, 2])])
def test_groups_that_are_computed_again_have_the_length_asked_for_and_are_walked_whole(every, lengths):
    """However full a bucket is: a group's blocks are there together."""
    asked = "memory.recompute=every-k", f"memory.every={every}"
    (stage,) = stages("model.layers=6", *asked, "comm.bucket_mb=0.0001", ranks=1)
    assert [len(group) for group in stage.groups] == lengths
    # the head, groups, the embedding
    assert stage.parts == [range(7, 8), *reversed(stage.groups), range(1)]


@pytest.mark.parametrize(("settings", "buffers"), [
    (("parallel.zero=2", "parallel.reduce=step"), 1),
    (("parallel.zero=2", "parallel.reduce=microbatch"), 1),
    (("numerics.reproducible=layout", "parallel.zero=0"), 4),
])  # fmt: skip
def test_as_many_gradients_are_lent_as_are_in_use_at_once(settings, buffers):
    """Of one bucket.

    A microbatch's is reduced under the next forward. A tree of 8: sums of 4, 2 and 1, and what the
    last one makes.
    """
    layout = "parallel.dp=2", "batch.global=16", "batch.micro=1", "model.tied=false", "comm.bucket_mb=1000.0"
    found = plan(*layout, *settings, ranks=2)
    (bucket,) = found.stage(0).buckets()
    assert (
        needed_by(found, 0).gradients["dense"].length
        == buffers * map_bucket(bucket.specs, found.axes.divided).length
    )


def test_the_tied_embedding_is_complete_when_its_last_use_is():
    (one,) = stages("comm.bucket_mb=0.001", ranks=1)
    assert one.reduction.ready[-1] == one.reduction.num_parts - 1
    _, last = stages("comm.bucket_mb=0.001", "parallel.pp=2", ranks=2)
    assert last.reduction.ready[-1] == 0
