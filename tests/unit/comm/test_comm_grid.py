import pytest
from conftest import WITH_LONG
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.comm.base.grid import Grid, split
from mpitrain.errors import MeshError

degrees = st.fixed_dictionaries({name: st.integers(1, 4) for name in ("tp", "cp", "dp", "pp")})


@given(degrees)
def test_rank_and_coordinates_are_inverse(found):
    grid = Grid(found)
    assert [grid.rank(grid.coordinates(rank)) for rank in range(grid.size)] == list(range(grid.size))


@settings(deadline=None)
@given(degrees)
def test_groups_of_an_axis_tile_the_world(found):
    grid = Grid(found)
    for name in found:
        groups = {grid.group(rank, name) for rank in range(grid.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        assert all(len(group) == found[name] for group in groups)


@settings(deadline=None, max_examples=100 if WITH_LONG else 30)
@given(degrees, st.sets(st.sampled_from(["tp", "cp", "dp", "pp"])))
def test_ranks_of_a_group_differ_along_its_axes_only(found, axes):
    grid = Grid(found)

    def elsewhere(rank):
        return {name: at for name, at in grid.coordinates(rank).items() if name not in axes}

    for rank in range(grid.size):
        group = grid.group(rank, *axes)
        assert list(group) == [other for other in range(grid.size) if elsewhere(other) == elsewhere(rank)]
        assert len(group) == 1 or isinstance(group, range) or len(axes) > 1


def test_tp_is_fastest():
    grid = Grid({"tp": 2, "cp": 1, "dp": 2, "pp": 2})
    assert tuple(grid.group(5, "tp")) == (4, 5)
    assert tuple(grid.group(5, "pp")) == (1, 5)
    assert grid.coordinates(5) == {"tp": 1, "cp": 0, "dp": 0, "pp": 1}


def test_degrees_of_zero_and_unknown_axes_are_refused():
    with pytest.raises(MeshError, match="dp = 0"):
        Grid({"dp": 0})
    with pytest.raises(MeshError, match="no axis"):
        Grid({"dp": 2}).group(0, "xp")
    with pytest.raises(MeshError, match=r"pp\(2\) x dp\(2\) = 4 ranks, but mpirun started 3"):
        Grid({"dp": 2, "pp": 2}).require(3)


@given(st.integers(0, 10_000), st.integers(1, 600))
def test_split_gives_every_element_to_one_rank(length, size):
    bounds = split(length, size)
    sizes = [end - begin for begin, end in zip(bounds, bounds[1:])]
    assert bounds[0] == 0 and bounds[-1] == length and len(sizes) == size
    assert max(sizes) - min(sizes) <= 1
