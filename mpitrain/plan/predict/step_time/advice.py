"""Rules of the field that a layout breaks, each with the planner's own step before and after.

A line is printed where the planner agrees: a layout that keeps the rule exists, fits into memory as
far as that is known, and is faster. Sources: arXiv:2104.04473 (takeaways 1 to 3),
arXiv:2504.14960 (experts within fast links, whole rather than divided), arXiv:2205.05198
(recomputation), the Ultra-Scale Playbook (tp over nodes), arXiv:1910.02054 (ZeRO-1 sends no more
than plain sums).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import computes_on_gpu, limit_of_rank, require_limit
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL
from mpitrain.plan.predict.step_time.layout import require_possible
from mpitrain.plan.predict.step_time.machine import ON_CPU, ON_GPU, MachineRates, rates_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.stage_seconds import groups_of
from mpitrain.plan.predict.step_time.step import Prediction, is_defined, predict_step
from mpitrain.plan.predict.step_time.step_model import StepModel, step_model
from mpitrain.plan.settings.dispatch import obstacle_to_nodes
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.schedules.catalog import SIMPLEST
from mpitrain.schedules.families.interleaved import INTERLEAVED

MOST_BUBBLE = 0.2
MOST_TP = 0.3  # of a step that waits for tp
MOST_BETWEEN = 0.1  # of a step that waits for other nodes, where no other layout can be compared
AS_FAST = 1.05  # times a step: what is simpler may take so long
FASTER = 0.98  # times a step: what keeps a rule may take so long
FULL = 0.9  # of memory that may be used
LONG = 16384  # positions of a rank, from which activations are most of its memory
AXES = ("tp", "cp", "dp", "ep", "etp", "pp")
HELD_MORE = 0.05  # of memory, that a line mentions

Layouts = Mapping[str, StepLayout]


def judge(plan: Plan, given: Config, planned: Callable[[Config], Plan], node_ranks: int) -> list[str]:
    """Return the advice for a plan. Raises ConfigError for one that memory has no room for.

    given, planned: as require_limit() takes them. node_ranks: as advice_for() takes it.
    """
    return advice_for(plan, node_ranks, require_limit(plan, given, planned, node_ranks))


def advice_for(plan: Plan, node_ranks: int = 0, held: int = 0) -> list[str]:
    """Return a line for each rule that a plan breaks; nothing where none can be judged.

    The figures are those of run.machine, else of a card or a CPU. node_ranks: of a node;
    comm.node_ranks overrides it, 0: as many as the machine has. held: bytes of the rank with most
    memory, 0: not known. Of a planned layout nothing is said against degrees.
    Raises ConfigError for an experts.replay that isn't what the plan needs.
    """
    resolved = plan.config
    name = resolved.run.machine or (ON_GPU if computes_on_gpu(resolved) else ON_CPU)
    rates = rates_of(resolved, node_ranks, name)
    known = bool(resolved.run.machine or resolved.memory.limit_gb)
    limit = limit_of_rank(resolved, plan.axes.grid.size, node_ranks) if known else None
    if limit is not None:
        rates = rates._replace(memory_bytes=limit.num_bytes)
    model = step_model(plan)
    layout = layout_of(resolved, rates, plan.routing)
    found = predict_step(model, layout, rates)
    searched = AXES if resolved.run.layout == "planned" else ()
    lines = advice(model, layout, rates, found, memory_is_known=known, held=held or None, searched=searched)
    return [f"advice, predicted for {name}: {line}" for line in lines]


def advice(
    model: StepModel,
    layout: StepLayout,
    machine: MachineRates,
    found: Prediction,
    memory_is_known: bool = True,
    held: float | None = None,
    searched: Collection[str] = (),
) -> list[str]:
    """Return a line for each rule that a layout breaks; none where it breaks none.

    memory_is_known: the machine is the one that will run it, so what fills its memory is said.
    held: bytes of the rank with most memory by the plan of a run; None: by formulas.
    searched: axes with whose other degrees, kinds and schedules no layout was as good, by plans of a run.
    """
    held = found.footprint.total if held is None else held
    judged = Judged(model, layout, machine, found, memory_is_known, held, searched)
    rules = (
        _tp_beyond_node, _tp_exposed, _context_beyond_node, _experts_beyond_node, _experts_divided,
        _shards_beyond_node, _few_microbatches, _no_zero, _long_sequence, _too_complex, _nearly_full,
    )  # fmt: skip
    return [line for rule in rules if (line := rule(judged))]


class Judged(NamedTuple):
    """A layout on a machine, and its step as the planner predicts it. held: bytes of the fullest rank."""

    model: StepModel
    layout: StepLayout
    machine: MachineRates
    found: Prediction
    memory_is_known: bool
    held: float
    searched: Collection[str]

    def goes_by_node(self, layout: StepLayout) -> bool:
        """Return whether experts' rows can go to nodes first, which experts.dispatch = "auto" then has."""
        job = JobRanks.filling(layout.ranks, self.machine.ranks_per_node)
        return not obstacle_to_nodes(layout.ep, layout.etp, job)

    @property
    def of_tensors(self) -> int:
        """Bytes of memory that tensors may take: formulas know nothing else of a process."""
        return self.machine.memory_bytes - (0 if self.machine.on_gpu else BEFORE_A_MODEL)

    def share(self, axis: str) -> float:
        """Return the share of a step that waits for messages of an axis."""
        return self.found.exposed[axis] / self.found.seconds

    def predicted(self, layouts: Layouts) -> Iterator[tuple[str, Prediction]]:
        """Yield the steps of layouts that can exist and, where memory is known, fit or hold no more."""
        room = max(FULL * self.of_tensors, self.found.footprint.total)
        for change, layout in layouts.items():
            if not layout.dp or not is_defined(layout):
                continue
            try:
                require_possible(layout, self.model)
            except ConfigError:
                continue
            other = predict_step(self.model, layout, self.machine)
            if not self.memory_is_known or other.footprint.total <= room:
                yield change, other

    def advised(self, broken: str, axis: str, layouts: Layouts, use: str) -> str:
        """Return the line of a broken rule with the fastest of the layouts that keep it.

        "" where the planner finds none of them faster, or none can be and little waits for `axis`.
        """
        if axis in self.searched:
            return ""
        others = list(self.predicted(layouts))
        if not others:
            return f"{broken}; {use}" if self.share(axis) >= MOST_BETWEEN else ""
        change, other = min(others, key=lambda each: each[1].seconds)
        if other.seconds > FASTER * self.found.seconds:
            return ""
        return f"{broken}; {use}: {change} takes {self.instead(other)}"

    def instead(self, other: Prediction) -> str:
        """Return seconds of a step, and memory where it differs, of another layout and this one."""
        words = self.seconds_instead(other)
        mine, theirs = self.found.footprint.total, other.footprint.total
        if abs(theirs - mine) <= HELD_MORE * mine:
            return words
        return f"{words}, and {_size(theirs)} a rank instead of {_size(mine)}"

    def seconds_instead(self, other: Prediction) -> str:
        """Return the seconds of both steps in the median, as `mpitrain plan` prints them."""
        middle = self.machine.spread.middle
        return f"{middle * other.seconds:.3g} s a step instead of {middle * self.found.seconds:.3g}"

    def changed(self, **fields: Any) -> StepLayout:
        """Return the layout with other degrees; what goes with them is as a run has it."""
        layout = self.layout.divided_evenly(**fields)
        if layout.rank_of != self.layout.rank_of:
            layout = layout._replace(stages=None)
        if self.layout.dp * self.layout.cp == 1:
            layout = layout._replace(zero=1)
        if layout.pp > 1 and self.layout.pp == 1:
            layout = layout._replace(schedule=SIMPLEST, chunks=1)
        if layout.dispatch == "hierarchical" and not self.goes_by_node(layout):
            layout = layout._replace(dispatch="alltoall")
        return layout


def _tp_beyond_node(judged: Judged) -> str:
    layout, node = judged.layout, judged.machine.ranks_per_node
    if layout.tp <= node:
        return ""
    tp = _divisor(layout.tp, node)
    pp = layout.pp * layout.tp // tp
    return judged.advised(
        f"parallel.tp = {layout.tp} is beyond a node of {counted(node, 'ranks')}: "
        f"{_percent(judged.share('tp'))} of a step waits for its messages",
        "tp",
        {
            f"parallel.tp = {tp} with more data ranks": judged.changed(tp=tp),
            f"parallel.tp = {tp} and parallel.pp = {pp}": judged.changed(tp=tp, pp=pp),
        },
        f"use tp <= {node}, and pp or dp for the rest",
    )


def _tp_exposed(judged: Judged) -> str:
    layout = judged.layout
    beyond = layout.tp > judged.machine.ranks_per_node  # which has its own line
    if layout.tp == 1 or beyond or judged.share("tp") < MOST_TP:
        return ""
    return judged.advised(
        f"parallel.tp = {layout.tp}: {_percent(judged.share('tp'))} of a step waits for its messages, "
        "its matrix products are too small for these links",
        "tp",
        {f"parallel.tp = {tp}": judged.changed(tp=tp) for tp in _divisors_below(layout.tp)},
        "use a smaller tp",
    )


def _context_beyond_node(judged: Judged) -> str:
    layout, node = judged.layout, judged.machine.ranks_per_node
    if layout.cp == 1 or groups_of(layout, judged.machine)["cp"].nodes == 1:
        return ""
    cp = _divisor(layout.cp, max(1, node // layout.tp))
    by_heads = ("ulysses",) * (judged.model.sizes.heads % (layout.tp * layout.cp) == 0)
    kinds = [kind for kind in ("zigzag", "gather", *by_heads) if kind != layout.context]
    others = {f'parallel.context = "{kind}"': judged.changed(context=kind) for kind in kinds}
    return judged.advised(
        f"parallel.cp = {layout.cp} x tp {layout.tp} is beyond a node of {node}: "
        f"{_percent(judged.share('cp'))} of a step waits for keys and values",
        "cp",
        {f"parallel.cp = {cp}": judged.changed(cp=cp), **others},
        f"use cp x tp <= {node}",
    )


def _experts_beyond_node(judged: Judged) -> str:
    layout, node, experts = judged.layout, judged.machine.ranks_per_node, judged.model.experts
    if experts is None or layout.ep == 1 or layout.ep * layout.etp <= node:
        return ""
    ep = _divisor(layout.ep, max(1, node // layout.etp))
    use = f"use ep x etp <= {node}"
    others = {f"parallel.ep = {ep}": judged.changed(ep=ep)}
    if layout.dispatch != "hierarchical":
        use += ', or experts.dispatch = "hierarchical"'
        if judged.goes_by_node(layout):
            others['experts.dispatch = "hierarchical"'] = judged.changed(dispatch="hierarchical")
    if experts.groups_active == experts.groups:
        use += ", or experts.groups, so that a token's experts are on few nodes"
    return judged.advised(
        f"parallel.ep = {layout.ep} x etp {layout.etp} is beyond a node of {node}: "
        f"{_percent(judged.share('ep'))} of a step waits for experts' rows",
        "ep",
        others,
        use,
    )


def _experts_divided(judged: Judged) -> str:
    layout, experts = judged.layout, judged.model.experts
    if experts is None or layout.etp == 1:
        return ""
    others = {"parallel.etp = 1": judged.changed(etp=1)}
    whole = layout.ep * layout.etp
    if experts.count % whole == 0:
        others[f"parallel.ep = {whole} and parallel.etp = 1"] = judged.changed(ep=whole, etp=1)
    return judged.advised(
        f"parallel.etp = {layout.etp} divides each expert: its products get thin, and "
        f"{_percent(judged.share('etp'))} of a step waits for their sums",
        "etp",
        others,
        "use whole experts on more ranks of ep",
    )


def _shards_beyond_node(judged: Judged) -> str:
    layout, node = judged.layout, judged.machine.ranks_per_node
    if not 1 < layout.sharded < layout.dp * layout.cp or layout.sharded * layout.tp <= node:
        return ""
    most = max(1, node // layout.tp)
    sharded = _divisor(layout.sharded, most)
    return judged.advised(
        f"parallel.dp_shard = {layout.sharded} x tp {layout.tp} is beyond a node of {node}: shards are "
        f"gathered from other nodes, and {_percent(judged.share('dp'))} of a step waits for data ranks",
        "dp",
        {f"parallel.dp_shard = {sharded}": judged.changed(sharded=sharded)},
        f"use dp_shard <= {most}",
    )


def _few_microbatches(judged: Judged) -> str:
    layout, found = judged.layout, judged.found
    share = found.bubble / found.seconds
    if layout.pp == 1 or share < MOST_BUBBLE:
        return ""
    count = layout.num_microbatches
    enough = max(4 * layout.pp, 2 * count)
    line = (
        f"{counted(count, 'microbatches')} for {counted(layout.pp, 'stages')}: the bubble is "
        f"{_percent(share)} of a step; raise batch.global, lower batch.micro or parallel.dp until there "
        f"are {enough}"
    )
    more = layout.divided_evenly(batch=enough * layout.dp * layout.micro)
    for _, other in judged.predicted({"": more}):
        line += f" ({_percent(other.bubble / other.seconds)} with batch.global = {more.batch})"
    is_possible = layout.chunks == 1 and 2 * layout.pp <= len(judged.model.blocks) and count % layout.pp == 0
    if "pp" in judged.searched or not is_possible:
        return line
    interleaved = judged.changed(schedule=INTERLEAVED.name, chunks=2)
    for _, other in judged.predicted({"": interleaved}):
        if other.seconds <= FASTER * found.seconds:
            line += f', or use pipeline.schedule = "{INTERLEAVED.name}": {judged.instead(other)}'
    return line


def _no_zero(judged: Judged) -> str:
    layout = judged.layout
    if layout.zero or layout.dp * layout.cp == 1:
        return ""
    for _, other in judged.predicted({"": judged.changed(zero=1)}):
        saved = judged.found.footprint.total - other.footprint.total
        if saved > 0 and other.seconds <= AS_FAST * judged.found.seconds:
            return (
                f"parallel.zero = 0 with dp {layout.dp}: every rank keeps all masters and moments; zero = 1 "
                f"sends no more and saves {_size(saved)} a rank: {judged.instead(other)}"
            )
    return ""


def _long_sequence(judged: Judged) -> str:
    layout, mine = judged.layout, judged.found.footprint
    kept = mine.activations
    if layout.sequence // layout.cp < LONG or layout.recompute != "none" or 2 * kept < mine.total:
        return ""
    if judged.memory_is_known and judged.held < FULL * judged.machine.memory_bytes:
        return ""
    line = (
        f"data.sequence = {layout.sequence} without recomputation: activations are {_size(kept)} of "
        f"{_size(mine.total)} a rank"
    )
    modes = {f'memory.recompute = "{mode}"': judged.changed(recompute=mode) for mode in ("selective", "full")}
    others = [
        (change, other) for change, other in judged.predicted(modes) if 2 * other.footprint.activations < kept
    ]
    if others:
        change, other = min(others, key=lambda each: each[1].seconds)
        return f"{line}; {change} takes {judged.instead(other)}"
    can_shrink = layout.micro > 1 or layout.cp == 1
    return f"{line}; raise parallel.cp, or use a smaller batch.micro" if can_shrink else ""


def _too_complex(judged: Judged) -> str:
    """Return the axes that aren't needed: without them half of the memory is enough, as fast."""
    layout, model = judged.layout, judged.model
    options = {"zero = 3": layout.zero == 3, "tp": layout.tp > 1, "pp": layout.pp > 1}
    used = [name for name, is_used in options.items() if is_used]
    if not (judged.memory_is_known and used) or model.experts is not None:
        return ""
    ones = dict.fromkeys(("tp", "pp", "ep", "etp", "chunks", "zero"), 1)
    simple = layout.divided_evenly(**ones, sharded=0, schedule=SIMPLEST, stages=None)
    for _, other in judged.predicted({"": simple}):
        needed = other.footprint.total
        if needed <= 0.5 * judged.of_tensors and other.seconds <= AS_FAST * judged.found.seconds:
            return (
                f"{' and '.join(used)}: {model.name} fits without, {needed / 1e9:.1f} of "
                f"{judged.machine.memory_bytes / 1e9:.3g} GB a rank with dp {simple.dp} and zero = 1, "
                f"{judged.seconds_instead(other)}; leave it out unless it is measured to be faster"
            )
    return ""


def _nearly_full(judged: Judged) -> str:
    room = judged.machine.memory_bytes
    if not (judged.memory_is_known and FULL * room <= judged.held <= room):
        return ""
    return (
        f"memory nearly full: {judged.held / 1e9:.3g} of {room / 1e9:.3g} GB on the rank with most memory; "
        "allocators retry there, and steps run up to three times slower"
    )


def _divisors_below(number: int) -> list[int]:
    return [each for each in range(1, number) if number % each == 0]


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a degree that is at most so much."""
    return max(each for each in _divisors_below(number) if each <= most)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
