"""Schedules beside the shortest orders, which a solver found (benchmarks/optimal_schedules.py)."""

import json
from statistics import median

import pytest
from conftest import but_for
from folders import GOLDEN

from mpitrain.schedules.auto_choice import fastest
from mpitrain.schedules.catalog import build, placement
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.search.problem import Problem, stage_costs

ROWS = json.loads((GOLDEN / "optimal_schedules.json").read_text())
NAMES = {"plain": "plain-auto", "looped": "interleaved-auto", "v": "v-auto"}
SMALL = [n for n, row in enumerate(ROWS) if row["ranks"] * row["microbatches"] <= 6]
FAR = 0.2  # no searched order is farther from the optimum


def test_the_bound_is_a_bound():
    for row in ROWS:
        chunks = 1 if row["placed"] == "plain" else 2
        costs = stage_costs(placement(NAMES[row["placed"]], row["ranks"], chunks), Times(*row["times"]))
        bound = Problem(costs, row["microbatches"], row["limit"] * chunks).bound
        assert bound <= row["best"] * (1 + 1e-9) and row["lower"] <= row["best"], row


@pytest.mark.parametrize("number", but_for(range(len(ROWS)), longer=set(range(len(ROWS))) - set(SMALL[::3])))
def test_no_searched_order_is_shorter_than_the_optimum_or_far_from_it(number):
    row = ROWS[number]
    times = Times(*row["times"])
    options = Options(times=times, memory_limit=row["limit"], weight_memory=1)
    table = build(NAMES[row["placed"]], row["ranks"], row["microbatches"], options)
    makespan = simulate_table(table, times).makespan
    assert row["lower"] * (1 - 1e-9) <= makespan <= row["best"] * (1 + FAR)


def test_auto_is_at_the_optimum_in_the_median():
    steps = {}
    for row in ROWS:
        if row["ranks"] * row["microbatches"] <= 6:
            key = row["ranks"], row["microbatches"], tuple(row["times"]), row["limit"]
            steps.setdefault(key, []).append(row)
    above = []
    for (num_ranks, num_microbatches, times, limit), rows in steps.items():
        optimum = min(row["best"] for row in rows)
        if min(row["lower"] for row in rows) == optimum:
            options = Options(times=Times(*times), memory_limit=limit)
            choice = fastest(num_ranks, num_microbatches, options)
            above.append(choice.played.timeline.makespan / optimum - 1)
    assert len(above) > 20 and median(above) <= 0.02 and min(above) >= -1e-9
