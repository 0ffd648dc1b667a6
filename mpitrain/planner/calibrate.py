"""`mpitrain run --calibrate FILE`: what a run measured goes into a machine's file.

    throughput  products in the run's type, attention, passes over memory: one factor, since a run
                measures only their sum
    launches    launch_s instead, where launches are nearly all of computing
    links       bandwidth inside nodes or between them, by the axes that use it; latency instead,
                where that is nearly all of their waiting

A factor makes the part that is predicted as long as it was measured. It is left out, with the
reason, where the part is less than LEAST of the step, and where neither of two constants is nearly
all of it: one number can't tell them apart. pp is the schedule's bubble, which no constant of a
machine explains.
"""

import math
from collections.abc import Callable, Mapping
from datetime import date
from typing import NamedTuple

from msgspec.structs import replace

from mpitrain.errors import counted
from mpitrain.inputs import shown
from mpitrain.plan.predict.memory_limit import limit_of_node
from mpitrain.plan.predict.step_time.machine import (
    LONGEST_LATENCY_S,
    LONGEST_LAUNCH_S,
    Figure,
    MachineFile,
    machine_of,
)
from mpitrain.plan.predict.step_time.resolved_layout import compute_of, layout_of
from mpitrain.plan.predict.step_time.stage_seconds import groups_of
from mpitrain.planner.after_run import NO_PREDICTION, machine_of_run, measured_terms, predicted_terms
from mpitrain.planner.calibration_file import CalibrationFile
from mpitrain.planner.measured_run import MeasuredRun

LEAST = 0.1  # of a measured step: a part that is large enough to tell
CLEAR = 0.8  # of a part: what one kind of constant has to be for the part to be its doing
AS_PREDICTED = 0.02  # of a part: so close, nothing changes
MOST = 10.0  # times: beyond it the constant isn't what the part waited for
HALVINGS = 30  # of the logarithm of a factor
AXES = {"tp": ("tp",), "cp": ("cp",), "ep": ("ep", "etp"), "dp": ("dp", "edp")}  # of each part
LINKS = {"inside": "links inside nodes", "between": "links between nodes", "pair": "links inside pairs"}

Change = Callable[[MachineFile, float], MachineFile]  # a factor, above 1 for what is faster


class Calibrated(NamedTuple):
    """A part, and what became of it: a factor of its speed, or why there is none."""

    what: str
    factor: float = 1.0
    why: str = ""


def calibrate(run: MeasuredRun, file: CalibrationFile, today: date) -> str:
    """Write what a run measured into a machine's file; return what was changed, and why not."""
    if not run.num_steps or not run.counted:
        return "--calibrate: a run of one step measured nothing; nothing was written"
    try:
        before, source = machine_of_run(run)
        after, found = calibrated(run, before)
        predicted = sum(predicted_terms(run, machine_of(after)).values())
    except NO_PREDICTION as error:
        return f"--calibrate: nothing was written: no step is predicted: {error}"
    lines = [_line(each) for each in found]
    changes = any(each.factor != 1.0 for each in found)
    if not changes and file.exists:
        return "\n".join([f"--calibrate: nothing was written to {file.shown}:", *lines])
    where = f"a run of {shown(run.plan.config.model.preset)} on {counted(run.plan.axes.grid.size, 'ranks')}"
    if not file.exists:  # a next run is to find it, whatever this one could tell
        after = _here(after, run)
    trouble = file.write(after, before, today, where)
    if trouble:
        return f"--calibrate: {trouble}"
    if not changes:
        begun = f"--calibrate: {file.shown} begins with the figures of {source}, which this run can't change:"
        return "\n".join([begun, *lines])
    begun = "" if file.exists else f", starting from the figures of {source}"
    step_s = sum(measured_terms(run).values())
    end = f"  with them {1e3 * predicted:,.1f} ms are predicted of a step that took {1e3 * step_s:,.1f} ms"
    return "\n".join([f"calibrated {file.shown}{begun}:", *lines, end])


def _line(each: Calibrated) -> str:
    if each.why:
        return f"  {each.what}: as before, {each.why}"
    return f"  {each.what}: {each.factor:.3g} times as fast as before"


def calibrated(run: MeasuredRun, machine: MachineFile) -> tuple[MachineFile, list[Calibrated]]:
    """Return the machine with the constants that a run measured, and what became of each part.

    Computing comes first: how much of a message it hides depends on it.
    """
    machine, computing = _of_computing(run, machine)
    found = [computing]
    for link, parts in _terms_of_links(run, machine).items():
        machine, changed = _of_link(run, machine, link, parts)
        found.append(changed)
    return machine, found


def _of_computing(run: MeasuredRun, machine: MachineFile) -> tuple[MachineFile, Calibrated]:
    dtype = compute_of(run.plan.config, machine_of(machine))

    def faster(key: str, figure: Figure, factor: float) -> Figure:
        table, _, name = key.partition(".")
        mine = name.partition("_")[0] == dtype if table == "products" else table in ("attention", "memory")
        return _faster(figure, factor) if mine else figure

    def throughput(given: MachineFile, factor: float) -> MachineFile:
        # small and grouped products keep their share of the large ones'
        return given.with_figures(lambda key, figure: faster(key, figure, factor))

    def launches(given: MachineFile, factor: float) -> MachineFile:
        took = _rounded(min(LONGEST_LAUNCH_S[given.device], given.launch_s / factor))
        return replace(given, launch_s=took)

    kinds = {"launches": launches, f"throughput of {dtype} products, attention and memory": throughput}
    return _fitted(run, machine, "computing", ("computing",), kinds)


def _of_link(
    run: MeasuredRun, machine: MachineFile, link: str, parts: tuple[str, ...]
) -> tuple[MachineFile, Calibrated]:
    def latency(given: MachineFile, factor: float) -> MachineFile:
        name = f"{link}_latency_s"
        took = _rounded(min(LONGEST_LATENCY_S, getattr(given.links, name) / factor))
        return replace(given, links=replace(given.links, **{name: took}))

    def bandwidth(given: MachineFile, factor: float) -> MachineFile:
        changed = {link: _faster(getattr(given.links, link), factor)}
        return replace(given, links=replace(given.links, **changed))

    words = f"{LINKS[link]} ({', '.join(parts)})"
    kinds = {f"latency of {words}": latency, f"bandwidth of {words}": bandwidth}
    return _fitted(run, machine, words, parts, kinds)


def _terms_of_links(run: MeasuredRun, machine: MachineFile) -> dict[str, tuple[str, ...]]:
    """Return, by kind of link, the parts of a step that wait for it."""
    rates = machine_of(machine)
    rates = rates.with_ranks_per_node(run.plan.config.comm.node_ranks or run.node_ranks)
    has_experts = bool(run.plan.config.experts.count)
    groups = groups_of(layout_of(run.plan.config, rates), rates)
    found: dict[str, tuple[str, ...]] = {}
    for part, axes in AXES.items():
        used = [groups[axis] for axis in axes if has_experts or axis not in ("ep", "etp", "edp")]
        used = [group for group in used if group.size > 1]
        if used:
            near = "pair" if all(group.paired for group in used) else "inside"
            link = "between" if any(group.nodes > 1 for group in used) else near
            found[link] = (*found.get(link, ()), part)
    return found


def _fitted(
    run: MeasuredRun, machine: MachineFile, what: str, parts: tuple[str, ...], kinds: Mapping[str, Change]
) -> tuple[MachineFile, Calibrated]:
    """Return the machine with one kind of constant changed, so that parts are predicted as measured.

    kinds: of what the first takes without end, nothing else is left; each with its name.
    """

    def predicted(given: MachineFile) -> float:
        found = predicted_terms(run, machine_of(given))
        return sum(found.get(part, 0.0) for part in parts)

    measured = measured_terms(run)
    step_s = sum(measured.values())
    wanted = sum(measured.get(part, 0.0) for part in parts)
    if wanted < LEAST * step_s:
        return machine, Calibrated(what, why=f"{wanted / step_s:.1%} of the step, less than {LEAST:.0%}")
    found = predicted(machine)
    if abs(wanted - found) <= AS_PREDICTED * wanted:
        return machine, Calibrated(what, why="as predicted")
    (first, change_first), (second, change_second) = kinds.items()
    share = 1 - predicted(change_first(machine, math.inf)) / found if found else 0.0
    if 1 - CLEAR < share < CLEAR:
        why = f"{first} are predicted to be {share:.0%} of it, which one number can't separate from the rest"
        return machine, Calibrated(what, why=why)
    name, change = (first, change_first) if share >= CLEAR else (second, change_second)
    factor = _factor(lambda tried: predicted(change(machine, tried)), wanted)
    if factor is None:
        why = f"no factor up to {MOST:g} makes {1e3 * found:,.1f} ms the measured {1e3 * wanted:,.1f} ms"
        return machine, Calibrated(what, why=why)
    return change(machine, factor), Calibrated(name, factor)


def _factor(predicted: Callable[[float], float], wanted: float) -> float | None:
    """Return the speed at which `wanted` seconds are predicted; None: none within MOST."""
    slow, fast = 1 / MOST, MOST
    if not predicted(fast) <= wanted <= predicted(slow):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(slow * fast)
        if predicted(middle) > wanted:
            slow = middle
        else:
            fast = middle
    return math.sqrt(slow * fast)


# ---------------------------------------------------------------- constants


def _here(machine: MachineFile, run: MeasuredRun) -> MachineFile:
    """Return a machine begun with the figures of another, with the memory and the ranks of this node."""
    near = run.node_ranks if run.node_ranks > 1 else machine.ranks_per_node
    if machine.device != "cpu":
        return replace(machine, ranks_per_node=near)
    memory = limit_of_node(max(1, run.node_ranks)).num_bytes
    return replace(machine, ranks_per_node=near, memory_bytes=memory, cores_per_node=run.node_cores)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _faster(figure: Figure, factor: float) -> Figure:
    """Return a figure with another sustained rate, and a peak that isn't below it."""
    sustained = _rounded(figure.sustained * factor)
    if sustained <= figure.peak:
        return replace(figure, sustained=sustained)
    return replace(figure, sustained=sustained, peak=sustained, peak_source="as calibrated")
