"""Rules of the field that a layout breaks, each in one line with this model's and machine's numbers.

Sources: arXiv:2104.04473 (takeaways 1 to 3), arXiv:2504.14960 (experts within fast links), the
Ultra-Scale Playbook (tp over nodes), arXiv:1910.02054 (ZeRO-1 sends no more than plain sums).
"""

from mpitrain.plan.declared.published import ModelShape
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.layout import StepLayout
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.network import group_of, seconds
from mpitrain.plan.predict.step_time.step import Prediction, predict_step, stashes_in_flight

MOST_BUBBLE = 0.2
MOST_TP = 0.3  # of a step that waits for tp
AS_FAST = 1.05  # times a step: what is simpler may take so long
FULL = 0.9  # of memory that may be used


def advice(
    shape: ModelShape,
    layout: StepLayout,
    machine: MachineRates,
    found: Prediction,
    memory_is_known: bool = True,
    held: float | None = None,
) -> list[str]:
    """Return a line for each rule that a layout breaks; none where it breaks none.

    memory_is_known: the machine is the one that will run it, so what fills its memory is said.
    held: bytes of the fullest rank by the plan of a run; None: by formulas.
    """
    rules = (
        _tp_beyond_node(shape, layout, machine),
        _tp_exposed(layout, found),
        _experts_beyond_node(shape, layout, machine, found),
        _shards_beyond_node(layout, machine),
        _few_microbatches(shape, layout, found),
        _no_zero(shape, layout),
        _too_complex(shape, layout, machine, found) if memory_is_known else "",
        _nearly_full(machine, found.footprint.total if held is None else held) if memory_is_known else "",
    )
    return [line for line in rules if line]


def _tp_beyond_node(shape: ModelShape, layout: StepLayout, machine: MachineRates) -> str:
    if layout.tp <= machine.ranks_per_node:
        return ""
    num_bytes = layout.positions * shape.width * layout.item
    groups = (group_of(layout.tp, 1, machine), group_of(machine.ranks_per_node, 1, machine))
    took = [1e3 * seconds("all_gather", num_bytes, group, machine) for group in groups]
    return (
        f"parallel.tp = {layout.tp} is beyond a node of {machine.ranks_per_node} ranks: one gather of a "
        f"block takes {took[0]:.2f} ms, within a node {took[1]:.2f}; "
        f"use tp <= {machine.ranks_per_node}, and pp or dp for the rest"
    )


def _tp_exposed(layout: StepLayout, found: Prediction) -> str:
    share = found.exposed["tp"] / found.seconds
    if layout.tp == 1 or share < MOST_TP or layout.num_microbatches < 1:
        return ""
    return (
        f"parallel.tp = {layout.tp}: {100 * share:.0f} % of a step waits for its messages, products are too "
        "thin for these links; use a smaller tp"
    )


def _experts_beyond_node(
    shape: ModelShape, layout: StepLayout, machine: MachineRates, found: Prediction
) -> str:
    beyond = layout.ep * layout.etp > machine.ranks_per_node
    share = found.exposed["ep"] / found.seconds
    if shape.experts is None or not beyond or share < 0.15:
        return ""
    change = f"use ep x etp <= {machine.ranks_per_node}"
    if layout.dispatch != "hierarchical":
        change += ', or experts.dispatch = "hierarchical"'
    if shape.experts.groups_active == shape.experts.groups:
        change += ", or experts.groups, so that a token's experts are on few nodes"
    return (
        f"parallel.ep = {layout.ep} x etp {layout.etp} is beyond a node of "
        f"{machine.ranks_per_node}: {100 * share:.0f} % of a step waits for experts' rows; {change}"
    )


def _shards_beyond_node(layout: StepLayout, machine: MachineRates) -> str:
    if not layout.sharded or layout.sharded >= layout.dp * layout.cp:
        return ""
    if layout.sharded * layout.tp <= machine.ranks_per_node:
        return ""
    return (
        f"parallel.dp_shard = {layout.sharded} x tp {layout.tp} is beyond a node of "
        f"{machine.ranks_per_node}: shards are gathered at {machine.between / 1e9:.3g} GB/s "
        f"instead of {machine.inside / 1e9:.3g}; use dp_shard <= "
        f"{max(1, machine.ranks_per_node // layout.tp)}"
    )


def _few_microbatches(shape: ModelShape, layout: StepLayout, found: Prediction) -> str:
    share = found.bubble / found.seconds
    if layout.pp == 1 or share < MOST_BUBBLE:
        return ""
    count = layout.num_microbatches
    can_interleave = layout.chunks == 1 and 2 * layout.pp <= shape.layers and count % layout.pp == 0
    other = ', or use pipeline.schedule = "interleaved"' if can_interleave else ""
    enough = max(4 * layout.pp, 2 * count)
    return (
        f"{count} microbatches for {layout.pp} stages: the bubble is {100 * share:.0f} % of a step; raise "
        f"batch.global, lower batch.micro or parallel.dp until there are {enough}{other}"
    )


def _no_zero(shape: ModelShape, layout: StepLayout) -> str:
    if layout.zero or layout.dp * layout.cp == 1:
        return ""
    numel = shape.parameters() / (layout.tp * layout.pp)
    saved = 12 * numel * (1 - 1 / (layout.dp * layout.cp)) / 1e9
    return (
        f"parallel.zero = 0 with dp {layout.dp}: every rank keeps all masters and moments; zero = "
        f"1 sends no more and saves {saved:.1f} GB a rank"
    )


def _too_complex(shape: ModelShape, layout: StepLayout, machine: MachineRates, found: Prediction) -> str:
    """Return the axis that isn't needed: what is simpler fits in a half of the memory, and is as fast."""
    asked = [
        name
        for name, on in (("zero = 3", layout.zero == 3), ("tp", layout.tp > 1), ("pp", layout.pp > 1))
        if on
    ]
    simple = layout._replace(tp=1, pp=1, ep=1, etp=1, chunks=1, zero=1, sharded=0, schedule="1f1b")
    if not asked or shape.experts is not None or layout.batch % (simple.dp * simple.micro):
        return ""
    needed = footprint_of(shape, simple, stashes_in_flight(simple)).total
    if needed > 0.5 * machine.memory_bytes:
        return ""
    if predict_step(shape, simple, machine).seconds > AS_FAST * found.seconds:
        return ""
    return (
        f"{' and '.join(asked)}: {shape.name} fits without, {needed / 1e9:.1f} of "
        f"{machine.memory_bytes / 1e9:.0f} GB a rank with dp {simple.dp} and zero = 1; leave it "
        "out unless it is measured to be faster"
    )


def _nearly_full(machine: MachineRates, held: float) -> str:
    if held < FULL * machine.memory_bytes:
        return ""
    return (
        f"memory nearly full: {held / 1e9:.1f} of {machine.memory_bytes / 1e9:.0f} GB on the fullest rank; "
        "allocators retry there, and steps run up to three times slower"
    )
