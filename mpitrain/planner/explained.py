"""Say why: computing and sending by axis, what the runner-up lost, what binds."""

import math
from collections.abc import Mapping, Sequence

from mpitrain.errors import counted
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.stage_seconds import groups_of
from mpitrain.plan.predict.step_time.step import Prediction
from mpitrain.plan.predict.step_time.step_model import StepModel, works_of
from mpitrain.planner.candidates import FixedKeys
from mpitrain.planner.search import Candidate

TERMS = ("computing", "bubble", "tp", "cp", "ep", "etp", "dp", "update", "stragglers")


def terms_of(found: Prediction) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on; all of them are the step."""
    terms = {
        "computing": found.computing,
        "bubble": found.bubble,
        **{axis: took for axis, took in found.exposed.items() if took > 0},
        "update": found.update,
    }
    return {**terms, "stragglers": max(0.0, found.seconds - sum(terms.values()))}


def why_lost(best: Candidate, other: Candidate, drawback: str) -> str:
    """Say what a layout pays more for than the best one, most of all. drawback: of one that is faster."""
    mine, theirs = terms_of(best.found), terms_of(other.found)
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in TERMS}
    name = max(more, key=more.__getitem__)
    lost = other.found.seconds / best.found.seconds - 1
    if lost <= 0:
        faster = f"{-100 * lost:.1f} % faster" if lost <= -5e-4 else "as fast"
        return f"{faster}, but {drawback}"
    if lost < 5e-4:
        return "as fast (+0.0 %)"
    if more[name] <= 0:
        return f"{100 * lost:+.1f} %"
    words = {
        "computing": "computes longer",
        "bubble": "has a larger bubble",
        "update": "updates longer",
        "stragglers": "loses more to the slowest ranks",
    }
    what = words.get(name, f"waits longer for {name}")
    return f"{100 * lost:+.1f} %: it {what}, {more[name]:.3g} s of {other.found.seconds:.3g}"


def balance(model: StepModel, layout: StepLayout, machine: MachineRates) -> list[str]:
    """Return arithmetic intensity, and for each axis computing over sending, and where it would bind.

    Intensity is FLOPs over bytes of the products of a block; a card needs peak / bandwidth of it
    (arXiv:1810.09868; Ultra-Scale Playbook, "Compute and memory").
    """
    model_works = works_of(model, layout, 1.0)
    works = model_works.kinds[-1]
    products = [product for work in works for product in work.products]
    flops = sum(work.product_flops for work in works)
    moved = sum(2 * each.number * (each.m * each.k + each.k * each.n + each.m * each.n) for each in products)
    dtype = layout.compute if layout.compute in machine.products else next(iter(machine.products))
    needed = machine.products[dtype] / machine.memory_bandwidth
    bound = "compute-bound" if flops / moved > needed else "memory-bound"
    lines = [
        f"arithmetic intensity of a block's products: {flops / moved:.0f} FLOP/byte; "
        f"{machine.name} needs {needed:.0f}: {bound}"
    ]
    computed = flops / machine.products[dtype]
    groups = groups_of(layout, machine)
    by_axis: dict[str, float] = {}
    for work in works:
        for sent in work.forward:
            by_axis[sent.axis] = by_axis.get(sent.axis, 0.0) + sent.num_bytes
    for axis, num_bytes in by_axis.items():
        if groups[axis].size > 1:
            rate = num_bytes / computed
            place = "inside a node" if groups[axis].nodes == 1 else f"over {groups[axis].nodes} nodes"
            lines.append(
                f"{axis} {groups[axis].size} ({place}): a block's forward computes "
                f"{1e3 * computed:.3g} ms and sends {num_bytes / 1e6:.3g} MB; at "
                f"{rate / 1e9:.3g} GB/s it would wait as long as it computes"
            )
    head = model_works.last.product_flops
    blocks = sum(
        count * work.product_flops
        for kind, (_, count) in zip(model_works.kinds, model.layers.kinds)
        for work in kind
    )
    lines.append(f"the head is {head / (head + blocks):.1%} of the forward's matrix products")
    return lines


def rules(best: Candidate, others: Sequence[Candidate], machine: MachineRates, fixed: FixedKeys) -> list[str]:
    """Return the rules of the field that decided, which what the user fixed leaves no room for.

    others: that fit, too.
    """
    layout = best.layout
    found = []
    if 1 < layout.tp <= machine.ranks_per_node and "parallel.tp" not in fixed:
        found.append(f"tp within a node of {machine.ranks_per_node}")
    if layout.zero == 1 and "parallel.zero" not in fixed:
        found.append("ZeRO-1: it sends no more than an all-reduce")
    if layout.pp > 1 and not {"parallel.pp", "batch.micro"} <= {*fixed}:
        found.append(f"{counted(layout.num_microbatches, 'microbatches')} for {counted(layout.pp, 'stages')}")
    if layout.ep > 1 and layout.tp > layout.etp == 1 and "parallel.etp" not in fixed:
        found.append("experts divided apart from tp")
    as_fast = [each for each in others if each.found.seconds <= best.found.seconds]
    if any(each.complexity > best.complexity for each in as_fast):
        found.append("of layouts that are as fast, the simpler")
    return found


def binding(refused: Mapping[str, int], tried: int, limit: float, is_empty: bool) -> str:
    """Say which constraints leave layouts out, the most frequent first, or why nothing is left."""
    if not tried:
        return "no layout divides these ranks and the model"
    words = "; ".join(
        f"{reason} {number:,}" for reason, number in sorted(refused.items(), key=lambda x: -x[1]) if number
    )
    if not is_empty:
        return f"{counted(tried, 'layouts', ',')}; left out: {words or 'none'}"
    hint = f"; no rank may hold more than {limit / 1e9:.3g} GB" if refused.get("memory") else ""
    return f"none of {counted(tried, 'layouts', ',')} is left: {words}{hint}"


def idle_degrees(model: StepModel, ranks: int, fixed: FixedKeys) -> str:
    """Say which fixed degrees can't be on these ranks and this model, "" if that isn't it."""
    degrees = {axis: fixed.get(f"parallel.{axis}") for axis in ("tp", "cp", "pp", "dp")}
    named = {axis: degree for axis, degree in degrees.items() if degree}
    inside = math.prod(named.values())
    words = " x ".join(f"{axis} {size}" for axis, size in named.items())
    if ranks % inside or (len(named) == 4 and ranks != inside):
        are = f" = {inside} doesn't make" if len(named) > 1 else " of"
        return f"{words}{are} {counted(ranks, 'ranks')}"
    stages = fixed.get("parallel.pp", 1) * fixed.get("pipeline.chunks", 1)
    few = stages > model.sizes.layers
    return f"{counted(stages, 'stages')} of {counted(model.sizes.layers, 'blocks')}" if few else ""
