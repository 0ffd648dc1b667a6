"""A step's time: the pipeline played by the schedules' simulator, then data ranks, the update, the rest.

Ranks that differ only in their place along tp, cp, dp or ep do the same: one of each pipeline rank is
played. Of many microbatches the first few are; each further one takes what the slowest rank needs.

    MFU  model FLOPs of a step / (seconds x ranks x peak), PaLM (arXiv:2204.02311, appendix B), of
         causal attention the half that isn't masked
    HFU  the same with what is recomputed (arXiv:2205.05198, section 6.3)
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.plan.declared.published import ModelShape
from mpitrain.plan.predict.step_time.compute import Rates
from mpitrain.plan.predict.step_time.footprint import Footprint, footprint_of
from mpitrain.plan.predict.step_time.layout import StepLayout, require_possible
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.network import RankGroup, seconds
from mpitrain.plan.predict.step_time.stage_seconds import (
    StageSeconds,
    blocks_of_stages,
    fetches_each,
    stages_of,
    state_seconds,
    weights_of_stage,
)
from mpitrain.plan.predict.step_time.work import ITEM
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import Action
from mpitrain.schedules.options import Options
from mpitrain.schedules.play.simulate import Link, simulate
from mpitrain.schedules.table import Table

UPDATE_BYTES = 34  # of each owned number: read weight, moments and gradient, write them and a copy
STRAGGLERS = 0.01  # of a step: the slowest of many ranks, data, logging
MOST_PLAYED = 40_000  # forwards of a table that is played


class Prediction(NamedTuple):
    """What a step is expected to take, in seconds of the slowest pipeline rank.

    exposed: of messages that nothing hides, by axis. bubble: waiting of the schedule.
    sent: of `seconds`, what a faster network would save: the sum of `exposed`.
    """

    seconds: float
    computing: float
    bubble: float
    exposed: Counter[str]
    update: float
    footprint: Footprint
    played: bool

    @property
    def sent(self) -> float:
        return sum(self.exposed.values())

    def at(self, rates: Rates) -> float:
        """Return the seconds of a machine whose rates differ from its file's."""
        sent = min(self.sent, self.seconds)
        return rates.compute * (self.seconds - sent) + rates.network * sent + rates.overhead_s


def predict_step(
    shape: ModelShape, layout: StepLayout, machine: MachineRates, play: bool = True
) -> Prediction:
    """Predict one step. Raises ConfigError for a layout that can't exist.

    play: the schedule; else its bubble is a formula's, which is faster and knows equal stages only.
    """
    require_possible(layout, shape)
    stages = stages_of(shape, layout, machine)
    message = _message_seconds(shape, layout, machine)
    pipeline, in_flight, played = _pipeline_seconds(stages, layout, message, play)
    slowest = max(_ranks(stages, layout), key=lambda held: sum(each.total for each in held))
    count = layout.num_microbatches
    exposed = Counter({axis: 0.0 for axis in ("tp", "cp", "ep", "etp", "dp")})
    for stage in slowest:
        for axis, took in stage.exposed.items():
            exposed[axis] += count * took
    busy = count * sum(stage.total for stage in slowest)
    exposed["dp"] += _state_exposed(shape, layout, machine, slowest)
    update = _update_seconds(shape, layout, machine)
    total = (pipeline + exposed["dp"] * (not fetches_each(layout)) + update) * (1 + STRAGGLERS)
    if fetches_each(layout):
        total += _state_exposed(shape, layout, machine, slowest)
    footprint = footprint_of(shape, layout, in_flight)
    computing = busy - sum(exposed[axis] for axis in ("tp", "cp", "ep", "etp"))
    return Prediction(total, computing, max(0.0, pipeline - busy), exposed, update, footprint, played)


def _ranks(stages: list[StageSeconds], layout: StepLayout) -> list[list[StageSeconds]]:
    """Return the stages that each pipeline rank has."""
    placed = _rank_of(layout)
    return [[each for each, rank in zip(stages, placed) if rank == wanted] for wanted in range(layout.pp)]


def _rank_of(layout: StepLayout) -> tuple[int, ...]:
    name = layout.schedule if layout.schedule in catalog.FAMILIES else "1f1b"
    return catalog.placement(name, layout.pp, layout.chunks)[: layout.pp * layout.chunks]


def _message_seconds(shape: ModelShape, layout: StepLayout, machine: MachineRates) -> float:
    """Return the seconds of an activation from one stage to the next."""
    if layout.pp == 1:
        return 0.0
    num_bytes = layout.positions * shape.width * ITEM // layout.tp  # scattered, arXiv:2104.04473, section 4.1
    far = layout.ranks // layout.pp * 2 > machine.ranks_per_node
    return seconds("send", num_bytes, RankGroup(2, 1 if far else 2), machine)


def _pipeline_seconds(
    stages: list[StageSeconds], layout: StepLayout, message: float, play: bool
) -> tuple[float, list[int], bool]:
    """Return the seconds of all microbatches, stashes in flight by rank, and whether it was played."""
    count = layout.num_microbatches
    slowest = max(sum(stage.total for stage in held) for held in _ranks(stages, layout))
    if layout.pp == 1:
        return count * slowest, [1], True
    played = min(count, _few(count, layout))
    table = _table(layout.schedule, layout.pp, played, layout.chunks) if play else None
    if table is None:
        waiting = (layout.pp - 1) * bubble_share(layout.schedule, layout.chunks)
        return (count + waiting) * slowest, stashes_in_flight(layout), False
    depth = table.depth

    def cost(action: Action) -> float:
        stage = stages[action.stage % depth]
        times = {"F": stage.forward, "I": stage.inputs, "W": stage.weights, "B": stage.inputs + stage.weights}
        return times.get(action.kind, 0.0)

    timeline = simulate(table, cost, Link(0.1 * message, 0.9 * message))
    in_flight = [timeline.peak_in_flight(rank) for rank in range(layout.pp)]
    copies = table.copies
    return timeline.makespan + (count - table.num_microbatches * copies) * slowest, in_flight, True


def bubble_share(schedule: str, chunks: int) -> float:
    """Return the bubble of a schedule over that of 1F1B, (p - 1)(F + B), with F = I = W.

    arXiv:2104.04473, section 2.2: 1 / chunks. arXiv:2401.10241, table 1: a third of it for zb-h1;
    zbv, zb-h2: none, arXiv:2405.15362: v-half a half, v-min two thirds.
    """
    known = {"zb-h1": 1 / 3, "zb-h2": 0.0, "zbv": 0.0, "v-half": 0.5, "v-min": 2 / 3, "dualpipe": 1 / 6}
    return known.get(schedule, 1 / chunks)


def stashes_in_flight(layout: StepLayout) -> list[int]:
    """Return how many microbatches' stashes, of one stage each, every pipeline rank holds at most."""
    pp, chunks = layout.pp, layout.chunks
    count = layout.num_microbatches
    if layout.schedule == "gpipe":
        return [count] * pp
    if layout.schedule in catalog.LOOPED:  # arXiv:2205.05198, section 4.2.3
        return [min(count * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1) for rank in range(pp)]
    if chunks == 2:  # v-shaped: stages of both ways
        share = {"v-half": 0.55, "v-min": 0.4}.get(layout.schedule, 1.0)
        return [min(2 * count, int(2 * pp * share) + 1)] * pp
    more = pp if layout.schedule == "zb-h2" else 0
    return [min(count, pp - rank + more) for rank in range(pp)]


def _few(count: int, layout: StepLayout) -> int:
    """Return how many microbatches are played of many: whole rounds of the pipeline, and the rest."""
    rounds = 4 if layout.pp <= 8 else 3
    most = max(rounds * layout.pp, 2 * layout.pp)
    if count <= most:
        return count
    return most + count % layout.pp if layout.schedule in catalog.LOOPED else most


@lru_cache(maxsize=256)
def _table(schedule: str, pp: int, count: int, chunks: int) -> Table | None:
    """Return the table of a schedule, or None where it isn't defined or too large to be played."""
    looped = schedule in catalog.LOOPED
    if pp * count * chunks > MOST_PLAYED:
        return None
    try:
        return catalog.build(schedule, pp, count, Options(chunks=chunks if looped else None))
    except ScheduleError:
        return None


def _state_exposed(
    shape: ModelShape, layout: StepLayout, machine: MachineRates, slowest: list[StageSeconds]
) -> float:
    """Return the seconds of weights and gradients between data ranks that no computation hides.

    Gradients travel under the last microbatch's backward, weights under the next step's first
    forward; the last bucket of a block has nothing left to hide it.
    """
    if fetches_each(layout):
        return 0.0
    weights = _most_weights(shape, layout)
    gathered, reduced = state_seconds(layout, machine, weights)
    if not layout.overlapped:
        return gathered + reduced
    blocks = max(1, sum(stage.blocks for stage in slowest))
    backward = sum(stage.inputs + stage.weights for stage in slowest)
    forward = sum(stage.forward for stage in slowest)
    last = (gathered + reduced) / blocks
    return last + max(0.0, reduced - backward) + max(0.0, gathered - forward)


def _most_weights(shape: ModelShape, layout: StepLayout) -> tuple[int, int]:
    """Return the weights, dense and experts', of the pipeline rank that has most."""
    blocks = blocks_of_stages(shape, layout)
    placed = _rank_of(layout)
    held = [[0, 0] for _ in range(layout.pp)]
    for stage, (rank, here) in enumerate(zip(placed, blocks)):
        ends = (stage == 0, stage == len(blocks) - 1)
        for kind, numel in enumerate(weights_of_stage(shape, layout, here, ends)):
            held[rank][kind] += numel
    dense, experts = max(held, key=sum)
    return dense, experts


def _update_seconds(shape: ModelShape, layout: StepLayout, machine: MachineRates) -> float:
    dense, experts = _most_weights(shape, layout)
    owned = dense / layout.shards + experts / layout.expert_shards
    return UPDATE_BYTES * owned / machine.memory_bandwidth + 50 * machine.launch_s


def model_flops(shape: ModelShape, layout: StepLayout, halved: bool = True) -> float:
    """Return the model FLOPs of a step."""
    return shape.flops_per_token(layout.sequence, halved) * layout.tokens


def recomputed_flops(shape: ModelShape, layout: StepLayout) -> float:
    """Return the FLOPs of a step that recomputation adds: a third of the blocks' forward and backward."""
    if layout.recompute == "none" or (layout.recompute == "selective" and layout.flash):
        return 0.0
    whole = model_flops(shape, layout)
    core = whole - 6.0 * shape.active_parameters() * layout.tokens
    if layout.recompute == "selective":
        return core / 3
    return (whole - 6.0 * shape.vocab * shape.width * layout.tokens) / 3


def mfu(shape: ModelShape, layout: StepLayout, machine: MachineRates, took: float) -> float:
    """Return model FLOPs utilisation, a share of the peak of bf16 products on the data sheet."""
    peak = machine.peaks.get("bf16") or max(machine.peaks.values())
    return model_flops(shape, layout) / (took * layout.ranks * peak)


def hfu(shape: ModelShape, layout: StepLayout, machine: MachineRates, took: float) -> float:
    """Return hardware FLOPs utilisation: MFU with what is recomputed."""
    whole = model_flops(shape, layout)
    return mfu(shape, layout, machine, took) * (whole + recomputed_flops(shape, layout)) / whole
