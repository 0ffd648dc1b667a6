"""Clocks of nodes, compared by messages."""

import time
from types import SimpleNamespace

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_clocks_of_other_hosts_are_found_to_differ(world, monkeypatch, hosts):
    """Every host's clock is 1000 s behind that of the one before; ranks of a host have one clock_offset."""
    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.comm.meters import clock_offset

    number = world.rank % hosts
    monkeypatch.setattr(clock_offset, "host", lambda: f"host {number}")
    monkeypatch.setattr(
        clock_offset, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() - 1000.0 * number)
    )
    everyone = World(world, NULL_REPORTER)
    found = clock_offset.offset_to_first_rank(everyone)
    everyone.node.Free()
    agree(world, abs(found - 1000.0 * number) < 1.0 and (number or found == 0), f"{found} on host {number}")
