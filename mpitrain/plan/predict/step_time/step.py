"""A step's time: the pipeline played by the schedules' simulator, then data ranks, the update, the rest.

Ranks that differ only in their place along tp, cp, dp or ep do the same: one of each pipeline rank
is played. Of many microbatches the first few are; each further one takes what the slowest rank
needs.

    MFU  model FLOPs of a step / (seconds x ranks x peak), PaLM (arXiv:2204.02311, appendix B), of
         causal attention the half that isn't masked
    HFU  the same with what is recomputed (arXiv:2205.05198, section 6.3)
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, cast

from mpitrain.errors import ScheduleError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.footprint import Footprint, footprint_of
from mpitrain.plan.predict.step_time.machine import OF_A_CORE, MachineRates
from mpitrain.plan.predict.step_time.network import RankGroup, seconds
from mpitrain.plan.predict.step_time.optimizer_seconds import update_seconds
from mpitrain.plan.predict.step_time.stage_seconds import (
    CALLS_OF_MESSAGE,
    StageSeconds,
    copies_of,
    exposed_share,
    fetches_each,
    most_weights,
    stages_of,
    stages_of_ranks,
    state_seconds,
)
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import COMPUTE, Action
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.lowering.messages import messages_of, with_messages
from mpitrain.schedules.lowering.needs import Programs
from mpitrain.schedules.options import Options
from mpitrain.schedules.play.simulate import Link, simulate
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.table import Table

# what the work of ranks that take turns on a core takes, times its seconds alone: as UNFILLED
TURN = 1.05
# of the bubble of ranks that take turns, what the others on their core leave: a Zen 3 (2026-11-28) and a
# Zen 5 (2026-11-26), docs/guides/planning.md
UNFILLED = 0.5
STRAGGLERS = 0.01  # of a step: the slowest of many ranks, data, logging
# and of ranks that share a CPU, its clock and caches: what 2 to 8 ranks took of their predictions over what
# one did, in three runs on a Zen 5 (2026-11-28)
STRAGGLERS_OF_A_CPU = 0.04
MOST_PLAYED = 40_000  # forwards of a table that is played


# how the bubble of a step is found; a formula knows equal stages only
Bubble = Literal["played", "formula", "least"]


class PlayedSize(NamedTuple):
    """A schedule and its size: the microbatches are those that are played."""

    schedule: str
    pp: int
    num_microbatches: int
    chunks: int
    segments: int


class Prediction(NamedTuple):
    """What a step is expected to take, in seconds of the slowest pipeline rank.

    exposed: of messages that nothing hides, by axis. bubble: waiting of the schedule.
    """

    seconds: float
    computing: float
    bubble: float
    exposed: Mapping[str, float]
    update: float
    footprint: Footprint

    @property
    def sent(self) -> float:
        """What a faster network would save."""
        return sum(self.exposed.values())

    def times(self, factor: float) -> "Prediction":
        """Return a step all of whose parts take so many times longer."""
        exposed = {axis: factor * took for axis, took in self.exposed.items()}
        seconds, computing, bubble, update = (
            factor * took for took in (self.seconds, self.computing, self.bubble, self.update)
        )
        return Prediction(seconds, computing, bubble, exposed, update, self.footprint)


def least_seconds(model: StepModel, layout: StepLayout, machine: MachineRates) -> float:
    """Return seconds that a played step takes at least."""
    return predict_step(model, layout, machine, "least").seconds


def predict_step(
    model: StepModel, layout: StepLayout, machine: MachineRates, bubble: Bubble = "played"
) -> Prediction:
    """Predict one step of a layout that can exist."""
    found = _undisturbed(model, layout, machine, bubble)
    here = min(layout.ranks, machine.ranks_per_node)
    if not 0 < machine.cores_per_node < here:
        return found
    turns = here / machine.cores_per_node
    slowed = machine.slower(TURN * turns, OF_A_CORE)
    if layout.ranks // layout.pp >= here:  # of one stage: they wait for others at the same time
        return _undisturbed(model, layout, slowed, bubble)
    in_turns = _undisturbed(model, layout, slowed, "formula")
    nodes = -(-layout.ranks // here)
    waiting = (min(nodes, layout.pp) - 1) / layout.num_microbatches
    sends = 2 * layout.num_microbatches * _message_seconds(model, layout, machine, nodes > 1)
    # each stage takes so many times longer: those that a core has alike wait at the same time
    unfilled = UNFILLED * turns * found.bubble
    work = (in_turns.computing + in_turns.update + in_turns.sent) * (1 + stragglers_share(layout, machine))
    # they do all of their work one after the other: a bubble is time for the others that share its
    # core, and stays as far as they wait, too, or the pipeline takes longer than all work
    left = max(work * waiting + sends, unfilled, found.seconds - work)
    return in_turns._replace(seconds=work + left, bubble=left, footprint=found.footprint)


def stragglers_share(layout: StepLayout, machine: MachineRates) -> float:
    """Return what the slowest of the ranks adds to a step, as a share of what all have to do."""
    share_a_cpu = not machine.on_gpu and min(layout.ranks, machine.ranks_per_node) > 1
    return STRAGGLERS_OF_A_CPU if share_a_cpu else STRAGGLERS


def _undisturbed(model: StepModel, layout: StepLayout, machine: MachineRates, bubble: Bubble) -> Prediction:
    """Return the step of ranks that have a core each."""
    stages = stages_of(model, layout, machine)
    message = message_seconds(model, layout, machine)
    slowest = max(_stages_by_rank(stages, layout), key=_microbatch_seconds)
    alone = _microbatch_seconds(slowest)
    pipeline, in_flight = _pipeline_seconds(stages, layout, alone, message, machine.sends_meanwhile, bubble)
    count = layout.num_microbatches
    exposed = dict.fromkeys(("tp", "cp", "ep", "etp", "dp"), 0.0)
    for stage in slowest:
        for axis, took in stage.exposed.items():
            exposed[axis] += count * took
    busy = count * alone
    inside = sum(exposed.values())
    state = state_exposed(model, layout, machine, stages)
    exposed["dp"] += state
    update = update_seconds(model, layout, machine)
    footprint = footprint_of(model, layout, in_flight)
    total = (pipeline + state + update) * (1 + stragglers_share(layout, machine))
    return Prediction(total, busy - inside, max(0.0, pipeline - busy), exposed, update, footprint)


def _stages_by_rank(stages: list[StageSeconds], layout: StepLayout) -> list[list[StageSeconds]]:
    """Return the stages of each pipeline rank, with the seconds of a microbatch.

    Each of two copies runs half of the microbatches, so a stage takes half of its time in the mean.
    """
    shared = [stage.divided(copies_of(layout)) for stage in stages]
    return [[shared[stage] for stage in held] for held in stages_of_ranks(layout)]


def _microbatch_seconds(stages: list[StageSeconds]) -> float:
    return sum(stage.total for stage in stages)


def message_seconds(model: StepModel, layout: StepLayout, machine: MachineRates) -> float:
    """Return the seconds of an activation from one stage to the next."""
    if layout.pp == 1:
        return 0.0
    return _message_seconds(model, layout, machine, layout.ranks // layout.pp * 2 > machine.ranks_per_node)


def _message_seconds(model: StepModel, layout: StepLayout, machine: MachineRates, far: bool) -> float:
    """Return the seconds of an activation to a stage on the same node or, far, on another."""
    # scattered over tp, arXiv:2104.04473, section 4.1
    num_bytes = layout.positions * model.sizes.width * layout.item // layout.tp
    took = seconds("send", num_bytes, RankGroup(2, 1 if far else 2), machine)
    return took if machine.on_gpu else took + CALLS_OF_MESSAGE * machine.launch_s


def _pipeline_seconds(
    stages: list[StageSeconds],
    layout: StepLayout,
    slowest: float,
    message: float,
    meanwhile: bool,
    bubble: Bubble,
) -> tuple[float, tuple[int, ...]]:
    """Return the seconds of all microbatches, and stashes in flight by rank.

    slowest: seconds of a microbatch on the rank that computes longest.
    """
    count = layout.num_microbatches
    if layout.pp == 1:
        return count * slowest, (1,)
    if bubble == "least" and layout.schedule in catalog.FAMILIES and not _is_too_large(_played(layout)):
        return _least_pipeline_seconds(stages, layout, slowest), stashes_in_flight(layout)
    table = table_of(layout) if bubble == "played" else None
    if table is None:
        waiting = (layout.pp - 1) * bubble_share(layout.schedule, layout.chunks)
        return (count + waiting) * slowest, stashes_in_flight(layout)
    timeline = play_pipeline(stages, layout, table, message, meanwhile)
    in_flight = tuple(-(-timeline.peak_in_flight(rank) // table.segments) for rank in range(layout.pp))
    played = table.num_microbatches * table.copies // table.segments
    return timeline.makespan + (count - played) * slowest, in_flight


def _least_pipeline_seconds(stages: list[StageSeconds], layout: StepLayout, slowest: float) -> float:
    """Return the seconds that no order of a pipeline's computations can do without.

    A rank waits for the forwards before its first stage. After its last one come the backwards
    before that stage; where they are split, only after the last gradient of inputs, and some
    gradients of weights may be put off until then.
    """
    count = layout.num_microbatches
    whole = count * slowest
    if copies_of(layout) > 1:
        return whole
    # whether gradients of weights are put off: the table of two ranks says so
    table = _table(PlayedSize(layout.schedule, 2, 4, layout.chunks, layout.segments))
    splits = table is None or any(action.kind == "I" for row in table.ranks for action in row)
    for held in stages_of_ranks(layout):
        before = stages[: min(held)]
        busy = count * sum(stages[stage].total for stage in held)
        put_off = splits * count * sum(stages[stage].weights for stage in held)
        filled = sum(stage.forward for stage in before) / layout.segments
        drained = sum(stage.inputs + (not splits) * stage.weights for stage in before) / layout.segments
        whole = max(whole, filled + busy, filled + busy - put_off + drained)
    return whole


def play_pipeline(
    stages: list[StageSeconds], layout: StepLayout, table: Table, message: float, meanwhile: bool
) -> Timeline:
    """Play the table of a layout with the seconds of stages and of a message between them.

    meanwhile: messages travel under computation; else who sends has to wait until they have.
    Segments of a sequence take equal shares. Of a PAIR each half takes its own time: a rank has one
    compute resource.
    """
    times = [stage.by_kind() for stage in stages]
    message /= table.segments

    def cost(action: Action) -> float:
        if action.kind not in COMPUTE:
            return 0.0
        sends = not meanwhile and messages_of(table, action)[1] is not None
        took = times[action.stage % table.depth][action.kind] / table.segments
        return took + (message if sends else 0.0)

    link = Link(0.1 * message, 0.9 * message if meanwhile else 0.0)
    return simulate(_programs(_played(layout)), cost, link)


def bubble_share(schedule: str, chunks: int) -> float:
    """Return the bubble of a schedule over that of 1F1B, (p - 1)(F + B), with F = I = W.

    arXiv:2104.04473, section 2.2: 1 / chunks, unless the schedule's own paper has another.
    """
    family = catalog.FAMILIES.get(schedule)
    return 1 / chunks if family is None or family.bubble is None else family.bubble


def stashes_in_flight(layout: StepLayout) -> tuple[int, ...]:
    """Return how many microbatches' stashes, of one stage each, every pipeline rank holds at most."""
    pp, chunks, count = layout.pp, layout.chunks, layout.num_microbatches
    family = catalog.FAMILIES.get(layout.schedule, ONE_F_ONE_B)
    if family.held == "all":
        return (count * chunks,) * pp
    if family.placed == "looped":  # arXiv:2205.05198, section 4.2.3
        return tuple(min(count * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1) for rank in range(pp))
    if chunks == 2:  # v-shaped: stages of both ways
        return (min(2 * count, int(2 * pp * family.stashes) + 1),) * pp
    return tuple(min(count, int(pp * family.stashes) - rank) for rank in range(pp))


def _played(layout: StepLayout) -> PlayedSize:
    """Return what is played of a layout: of many microbatches whole rounds of the pipeline, and the rest."""
    count, most = layout.num_microbatches, layout.pp * (4 if layout.pp <= 8 else 3)
    if count > most:
        count = most + (count % layout.pp if layout.schedule in catalog.LOOPED else 0)
    return PlayedSize(layout.schedule, layout.pp, count, layout.chunks, layout.segments)


def table_of(layout: StepLayout) -> Table | None:
    """Return the table that is played of a layout."""
    return _table(_played(layout))


def is_defined(layout: StepLayout) -> bool:
    """Return whether a schedule of the catalogue exists for so many ranks and microbatches.

    What is too large to be played counts as defined, and so does a schedule of the user's own.
    """
    if layout.schedule not in catalog.FAMILIES or table_of(layout) is not None:
        return True
    return _is_too_large(_played(layout))


def _is_too_large(played: PlayedSize) -> bool:
    return played.pp * played.num_microbatches * played.chunks * played.segments > MOST_PLAYED


@lru_cache(maxsize=256)
def _table(played: PlayedSize) -> Table | None:
    """Return the table of a schedule, or None where it isn't defined or too large to be played."""
    family = catalog.FAMILIES.get(played.schedule)
    if family is None or _is_too_large(played):
        return None
    options = Options(
        chunks=played.chunks if "chunks" in family.takes else None,
        segments=played.segments if "segments" in family.takes else None,
    )
    try:
        return catalog.build(played.schedule, played.pp, played.num_microbatches, options)
    except ScheduleError:
        return None


@lru_cache(maxsize=64)
def _programs(played: PlayedSize) -> Programs:
    """Return a table with its messages: a search plays few tables many times."""
    return with_messages(cast(Table, _table(played)))


def state_exposed(
    model: StepModel, layout: StepLayout, machine: MachineRates, stages: list[StageSeconds]
) -> float:
    """Return the seconds of weights and gradients between data ranks that no computation hides.

    Gradients travel under the last microbatch's backward, weights under the next step's first
    forward; the last bucket of a block has nothing left to hide it. A rank that computes less than
    the slowest one waits for it anyway: so no faster computation makes a step longer.
    """
    gathered, reduced = state_seconds(layout, machine, most_weights(model, layout))
    gathered *= not fetches_each(layout)  # else microbatches have it
    reduced *= not layout.sums_each
    ranks = _stages_by_rank(stages, layout)
    slowest = max(map(_microbatch_seconds, ranks))
    forward = max(sum(stage.forward for stage in held) for held in ranks)
    backward = max(sum(stage.inputs + stage.weights for stage in held) for held in ranks)
    last = min(1.0, layout.pp / (len(model.blocks) * copies_of(layout)))
    hiding = (reduced, slowest - forward), (gathered, slowest - backward)
    exposed = sum(max(last * sent, sent - (1 - last) * computed) for sent, computed in hiding)
    if layout.overlapped and machine.sends_meanwhile:
        return exposed
    return max(exposed_share(layout, machine) * (gathered + reduced), exposed)


def model_flops(model: StepModel, layout: StepLayout) -> float:
    """Return the model FLOPs of a step."""
    return model.flops_per_token(layout.sequence) * layout.tokens


def recomputed_flops(model: StepModel, layout: StepLayout) -> float:
    """Return the FLOPs of a step that recomputation adds: a third of the blocks' forward and backward."""
    if layout.repeats_core:
        return model.layers.core_flops(layout.sequence) / 3 * layout.tokens
    if layout.recompute != "full":
        return 0.0
    return model.layers.block_flops(layout.sequence) / 3 * layout.tokens


def mfu(model: StepModel, layout: StepLayout, machine: MachineRates, took: float) -> float:
    """Return model FLOPs utilisation, a share of the peak of bf16 products on the data sheet."""
    peak = machine.peaks.get("bf16") or max(machine.peaks.values())
    return model_flops(model, layout) / (took * layout.ranks * peak)


def hfu(model: StepModel, layout: StepLayout, machine: MachineRates, took: float) -> float:
    """Return hardware FLOPs utilisation: MFU with what is recomputed."""
    whole = model_flops(model, layout)
    return mfu(model, layout, machine, took) * (whole + recomputed_flops(model, layout)) / whole
