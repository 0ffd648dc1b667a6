"""Buffers that are lent share one arena, and no two lie in the same memory at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.predict.arena import Stay, arena_of, placed
from mpitrain.plan.predict.pool_sizes import needed_by
from mpitrain.plan.settings.resolve import resolve

STAYS = st.lists(
    st.builds(
        lambda n, begin, d: Stay(n, begin, begin + d),
        st.integers(0, 9),
        st.integers(0, 12),
        st.integers(1, 6),
    )
)


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


@given(STAYS)
def test_no_two_that_are_lent_at_once_overlap(stays):
    offsets = placed(stays)
    for i, (length, begin, end) in enumerate(stays):
        for j in range(i):
            if overlap(range(begin, end), range(stays[j].begin, stays[j].end)):
                ranges = [range(offsets[k], offsets[k] + stays[k].length) for k in (i, j)]
                assert not overlap(*ranges) or not length or not stays[j].length, (stays[i], stays[j], ranges)


@given(STAYS)
def test_an_arena_is_no_shorter_than_what_is_lent_at_once_and_no_longer_than_all(stays):
    length = arena_of({"training": stays}).length
    takings = range(max((stay.end for stay in stays), default=0))
    at_once = max((sum(n for n, begin, end in stays if begin <= at < end) for at in takings), default=0)
    assert at_once <= length <= sum(stay.length for stay in stays)


@pytest.mark.parametrize("layers", [4, 5, 6, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_zero_3_lends_the_largest_bucket_and_its_neighbour(layers, num_microbatches):
    """Weights: one in use, one ahead; gradients: one that is added to, one that is reduced.

    Whatever the number of blocks.
    """
    batch = "batch.micro=1", f"batch.global={2 * num_microbatches}"
    plan = plan_of(
        resolve(
            settings.load(None, ("model.tied=false", f"model.layers={layers}", "parallel.zero=3", *batch)),
            2,
            5000,
        )
    )
    lengths = [map_bucket(bucket.specs, 2).length for bucket in plan.stage(0).buckets()]
    head, block, *_, embedding = lengths
    needed = needed_by(plan, 0)
    assert head >= embedding > block and len(set(lengths[1:-1])) == 1
    assert needed.gradients["dense"].length == head + block
    # where a validation's next microbatch begins, or not
    rest = embedding if num_microbatches > 1 else block
    assert needed.weights["dense"].length == head + rest


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb-h1", "zbv", "v-half", "v-min", "dualpipe", "gpipe", "interleaved"]
)
def test_sums_after_each_microbatch_lend_two_buckets_under_every_schedule(schedule):
    """Of a split backward, buffers are taken by the one for weights."""
    more = (
        "model.tied=false",
        "model.layers=12",
        "parallel.zero=2",
        "parallel.pp=2",
        f"pipeline.schedule={schedule}",
        "batch.global=32",
    )
    plan = plan_of(resolve(settings.load(None, more), 4, 256))
    for rank in range(2):
        stages = [plan.stage(number) for number in plan.table.chunks[rank]]
        longest = max(map_bucket(bucket.specs, 2).length for stage in stages for bucket in stage.buckets())
        assert 0 < needed_by(plan, rank).gradients["dense"].length <= 2 * longest
