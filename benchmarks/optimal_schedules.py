"""The shortest orders of small steps that exist, by an exact solver, and schedules' distances from them.

    python benchmarks/optimal_schedules.py                                     distances, from TABLE
    pip install ortools; python benchmarks/optimal_schedules.py --solve [--seconds 10]     TABLE anew

TABLE is tests/golden/optimal_schedules.json.

For each size, placement of stages, times and memory limit OR-Tools' CP-SAT looks for the shortest makespan
and proves that there is none below it. What it can't prove in time has a lower bound and the best order
known. Times are whole numbers. Microbatches are alike, so that each stage runs them in their order; a stash
is held whole from its forward to the end of its W. The distance of a fixed schedule is from the optimum with
the smallest of the limits that it fits in; that of `auto` is from the best of all placements.
"""

import argparse
import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median

from mpitrain.errors import ScheduleError
from mpitrain.schedules.catalog import FAMILIES, build, placement
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.played import Played, played
from mpitrain.schedules.search.problem import Problem, stage_costs

SEARCHED = {"plain": "plain-auto", "looped": "interleaved-auto", "v": "v-auto"}
TIMES = (Times(2, 2, 2, 0), Times(10, 20, 10, 4), Times(20, 18, 10, 0))  # even: two chunks halve them
SIZES = [(p, m) for p in (2, 3, 4) for m in (2, 3, 4, 6, 8)]
KINDS = "FIW"
TABLE = Path(__file__).parents[1] / "tests" / "golden" / "optimal_schedules.json"


def limits(num_ranks: int) -> tuple[float, ...]:
    """Return limits of stashes: of v-min and v-half about, of 1F1B, and of twice as much."""
    return tuple(sorted({(num_ranks + 4) // 3, num_ranks // 2 + 1, num_ranks, 2 * num_ranks}))


class ExactSearch:
    """One step as a constraint problem."""

    def __init__(self, problem: Problem, horizon: int):
        from ortools.sat.python import cp_model  # an extra, which only a new table needs

        self.problem = problem
        self.cp_model = cp_model
        self.model = cp_model.CpModel()
        self.makespan = self.model.new_int_var(0, horizon, "makespan")
        costs = (problem.where.forward, problem.where.input, problem.where.weight)
        self.starts = {
            (kind, stage, m): self.model.new_int_var(0, horizon, f"{KINDS[kind]}{m}@{stage}")
            for kind, stage, m in product(
                range(3), range(problem.num_stages), range(problem.num_microbatches)
            )
        }
        self.ends = {key: start + int(costs[key[0]][key[1]]) for key, start in self.starts.items()}
        for key in self.starts:
            self._add_needs(*key)
        for stages in problem.stages:
            self._add_rank(stages, costs)
        self.model.minimize(self.makespan)

    def _add_needs(self, kind: int, stage: int, m: int) -> None:
        """Let a computation wait for its message, for the microbatch before, and W for I."""
        last, between = self.problem.num_stages - 1, self.problem.where.between
        start = self.starts[kind, stage, m]
        if m:
            self.model.add(start >= self.ends[kind, stage, m - 1])
        if kind == 0 and stage:
            self.model.add(start >= self.ends[0, stage - 1, m] + int(between(stage - 1, stage)))
        if kind == 1:
            before = (0, stage, m) if stage == last else (1, stage + 1, m)
            self.model.add(
                start >= self.ends[before] + (0 if stage == last else int(between(stage + 1, stage)))
            )
        if kind == 2:
            self.model.add(start >= self.ends[1, stage, m])
            self.model.add(self.makespan >= self.ends[2, stage, m])

    def _add_rank(self, stages: list[int], costs: tuple[tuple[float, ...], ...]) -> None:
        """Let a rank do one thing at a time, and hold no more stashes than fit."""
        model, number = self.model, self.problem.num_microbatches
        busy = [
            model.new_fixed_size_interval_var(self.starts[kind, stage, m], int(costs[kind][stage]), "")
            for kind, stage, m in product(range(3), stages, range(number))
        ]
        model.add_no_overlap(busy)
        held = []
        for stage, m in product(stages, range(number)):
            size = model.new_int_var(0, self.makespan.proto.domain[1], "")
            end = self.ends[2, stage, m]
            held.append(model.new_interval_var(self.starts[0, stage, m], size, end, ""))
        model.add_cumulative(held, [1] * len(held), int(self.problem.limit))

    def solve(self, best: int, hints: dict[tuple[int, int, int], int], seconds: float) -> tuple[int, int]:
        """Return a lower bound and the shortest makespan known; both are equal if it is proved."""
        self.model.add(self.makespan >= -int(-self.problem.bound // 1))
        self.model.add(self.makespan <= best)
        for key, start in hints.items():
            self.model.add_hint(self.starts[key], start)
        solver = self.cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        if status in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return round(solver.best_objective_bound), round(solver.objective_value)
        return max(-int(-self.problem.bound // 1), round(solver.best_objective_bound)), best


def solved(size: tuple[int, int], placed: str, times: Times, limit: float, seconds: float) -> dict:
    """Return one row of the table."""
    num_ranks, num_microbatches = size
    name, chunks = SEARCHED[placed], 1 if placed == "plain" else 2
    table = build(
        name, num_ranks, num_microbatches, Options(times=times, memory_limit=limit, weight_memory=1)
    )
    timeline = simulate_table(table, times)
    costs = stage_costs(placement(name, num_ranks, chunks), times)
    problem = Problem(costs, num_microbatches, limit * chunks)
    best, lower = round(timeline.makespan), -int(-problem.bound // 1)
    if lower < best:
        hints = {
            (KINDS.index(action.kind), action.stage, action.index): round(start)
            for rank in range(num_ranks)
            for action, start, _ in timeline.computations(rank)
        }
        lower, best = ExactSearch(problem, best).solve(best, hints, seconds)
    row = {"ranks": num_ranks, "microbatches": num_microbatches, "placed": placed, "times": list(times)}
    return {**row, "limit": limit, "lower": lower, "best": best}


# ---------------------------------------------------------------- distances


def made(name: str, row: dict, limit: float) -> Played | None:
    """Return a schedule of a row's size; None if it isn't defined for it."""
    times = Times(*row["times"])
    options = Options(times=times, memory_limit=limit, weight_memory=1).only(FAMILIES[name].takes)
    try:
        table = build(name, row["ranks"], row["microbatches"], options)
    except ScheduleError:
        return None
    return played(table, Options(times=times), most_proved=0)


def distances(rows: list[dict]) -> dict[str, list[float]]:
    """Return each schedule's distances from the optima, and those of `auto` from the best placement's."""
    found: dict[str, list[float]] = defaultdict(list)
    steps: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        steps[row["ranks"], row["microbatches"], *row["times"]].append(row)
    for of_step in steps.values():
        searched: dict[float, list[tuple[float, int, int]]] = defaultdict(list)
        for name, family in FAMILIES.items():
            placed = [row for row in of_step if row["placed"] == family.placed]
            if family.copies > 1 or "segments" in family.takes or not placed:
                continue
            plans = "memory_limit" in family.takes
            fixed = None if plans else made(name, placed[0], 1)
            for row in placed:
                one = made(name, row, row["limit"]) if plans else fixed
                if one is None or max(one.peak_stashes) > row["limit"]:
                    continue
                if row["lower"] == row["best"]:
                    found[name].append(one.timeline.makespan / row["best"] - 1)
                if name in SEARCHED.values():
                    searched[row["limit"]].append((one.timeline.makespan, row["lower"], row["best"]))
                if not plans:
                    break
        for pairs in searched.values():
            makespan, lower, best = (min(values) for values in zip(*pairs))
            if lower == best:  # the optimum of all placements
                found["auto"].append(makespan / best - 1)
    return found


def as_table(found: dict[str, list[float]]) -> str:
    lines = ["| schedule | steps | median | worst |", "|---|---|---|---|"]
    for name in [*(name for name in FAMILIES if name in found), "auto"]:
        above = found[name]
        lines.append(f"| `{name}` | {len(above)} | {median(above):.1%} | {max(above):.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solve", action="store_true")
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    if not arguments.solve:
        print(as_table(distances(json.loads(TABLE.read_text()))))
        return
    rows = []
    for size, times, placed in product(SIZES, TIMES, SEARCHED):
        for limit in limits(size[0]):
            rows.append(solved(size, placed, times, limit, arguments.seconds))
            print(rows[-1], flush=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
