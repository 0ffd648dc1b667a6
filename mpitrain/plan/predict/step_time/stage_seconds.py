"""Seconds of each stage's forward and backward for one microbatch; stages that are alike have the same.

What travels over tp, cp and ep is in them, as far as no computation hides it: a ring of cp under
its attention; tp by the layout's share; ZeRO-3's gathers and reductions under the blocks before.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.work import MessageVolume, PartWork, stream_bytes
from mpitrain.plan.predict.step_time.compute import Seconds, seconds_of
from mpitrain.plan.predict.step_time.expert_load import load_of_fullest
from mpitrain.plan.predict.step_time.machine import HOST_COPY, MachineRates
from mpitrain.plan.predict.step_time.network import RankGroup, group_of, seconds, sent_seconds
from mpitrain.plan.predict.step_time.step_model import (
    FIRST,
    LAST,
    Piece,
    Pieces,
    StepModel,
    Weights,
    of_microbatch,
    tied_weights,
    weights_of,
    works_of,
)
from mpitrain.schedules import catalog

# of what travels beside computation, what it takes from it: copies and sums run on the same cores
SLOWED = 0.1
# of weights that a GPU fetches for each use, and of their gradients: NCCL's kernels take
# processors and memory from what they should hide under. Of MosaicML's steps in
# benchmarks/published_layouts.csv those whose microbatches are small, on 8 to 64 GPUs, say 0.45
# to 0.65
EXPOSED_OF_FETCHES = 0.5
# of what goes to another node, the share that is exposed on a CPU without a core to spare: messages move
# while it computes, but only as far as sockets take them. Two hosts at 1 Gbit/s, a core of an Intel Xeon
# each, ZeRO-1 and -3, 2026-11-27: 0.69, 0.65, 0.72
EXPOSED_WITHOUT_SPARE_CORE = 0.7
# what the host takes to start and end one, and an item of a block around it, over a small operation of torch:
# tp=2 on a Zen 3, 2026-11-28
CALLS_OF_MESSAGE = 160.0


class Part(NamedTuple):
    """A block, or an end: seconds of forward and backward, and what of them is exposed, by axis."""

    forward: float
    inputs: float
    weights: float
    exposed_forward: Mapping[str, float]
    exposed_backward: Mapping[str, float]


class StageSeconds(NamedTuple):
    """Of one stage and microbatch.

    exposed: seconds of it that wait for messages, by axis; exposed_forward: those of the forward.
    """

    forward: float
    inputs: float
    weights: float
    exposed: Mapping[str, float]
    exposed_forward: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of each kind of computation of a microbatch."""
        whole = self.inputs + self.weights
        return {"F": self.forward, "I": self.inputs, "W": self.weights, "B": whole, "R": self.forward}

    def divided(self, share: int) -> "StageSeconds":
        """Return the mean of a microbatch where the stage runs one of `share`."""
        if share == 1:
            return self
        forward, inputs, weights = self.forward / share, self.inputs / share, self.weights / share
        by_axis = (
            {axis: took / share for axis, took in whole.items()}
            for whole in (self.exposed, self.exposed_forward)
        )
        return StageSeconds(forward, inputs, weights, *by_axis)


def groups_of(layout: StepLayout, machine: MachineRates) -> dict[str, RankGroup]:
    """Return the groups of all axes, ranks in the order of the mesh."""
    return {
        "tp": group_of(layout.tp, 1, machine),
        "cp": group_of(layout.cp, layout.tp, machine),
        "dp": group_of(layout.dp * layout.cp, layout.tp, machine),
        "etp": group_of(layout.etp, 1, machine),
        "ep": group_of(layout.ep, layout.etp, machine),
        "edp": group_of(layout.edp, layout.etp * layout.ep, machine),
    }


def stages_of_ranks(layout: StepLayout) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each pipeline rank has, of both copies if there are two.

    The second copy runs backwards: its stage 0 is where the last one of the first is.
    """
    return _stages_of_ranks(layout.rank_of, copies_of(layout))


@lru_cache(maxsize=256)
def _stages_of_ranks(rank_of: tuple[int, ...], copies: int) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in set(rank_of)]
    for stage, rank in enumerate(rank_of):
        held[rank].append(stage)
    if copies > 1:
        held = [[*own, *(len(rank_of) - 1 - stage for stage in own)] for own in held]
    return tuple(map(tuple, held))


def copies_of(layout: StepLayout) -> int:
    """Return how many copies of the model a schedule has, among which microbatches are divided."""
    return catalog.FAMILIES[layout.schedule].copies if layout.schedule in catalog.FAMILIES else 1


def part_of(
    works: Sequence[PartWork], layout: StepLayout, machine: MachineRates, weights: Weights, repeated: bool
) -> Part:
    """Return the seconds of a block or an end.

    weights: its numbers of dense weights, and of experts' weights, on this rank of tp.
    repeated: full recomputation runs its forward again.
    """
    groups = groups_of(layout, machine)
    if layout.tp > 1 and layout.tp_overlap and not machine.on_gpu:
        works = [_in_pieces(each, layout.tp) for each in works]
    computed = Seconds()
    forward: Mapping[str, float] = {}
    backward: Mapping[str, float] = {}
    for work in works:
        seconds_here = seconds_of(work, machine, layout.compute, layout.flash)
        computed = computed.plus(seconds_here)
        exposed = _exposed(work.forward, groups, layout, machine, seconds_here.under_forward)
        exposed_backward = _exposed(work.backward, groups, layout, machine, seconds_here.under_backward)
        # what the ring of cp hides under is used once: a gather of tp also travels while attention waits
        lasts = seconds_here.inputs + exposed_backward.get("cp", 0.0)
        forward = _added(forward, exposed)
        backward = _added(backward, exposed_backward)
        backward = _added(backward, {"tp": _exposed_regather(work, groups, layout, machine, lasts)})
    if layout.hides_dispatch and "ep" in forward and machine.sends_meanwhile:
        # one microbatch's forward beside another's backward: what both compute hides what both send
        hidden = computed.forward + computed.inputs + computed.weights
        share = max(1 - hidden / (forward["ep"] + backward["ep"]), SLOWED)
        forward, backward = ({**way, "ep": share * way["ep"]} for way in (forward, backward))
    inputs = computed.inputs
    if repeated:
        inputs += computed.forward
        backward = _added(backward, forward)
    elif layout.recompute == "selective":
        inputs += layout.again * (computed.forward - computed.core) + layout.repeats_core * computed.core
    whole, whole_inputs = computed.forward + sum(forward.values()), inputs + sum(backward.values())
    part = Part(whole, whole_inputs, computed.weights, forward, backward)
    return _with_fetches(part, layout, machine, weights)


def _with_copies(part: Part, num_bytes: int, machine: MachineRates) -> Part:
    """Return a block whose activations go to host memory after its forward, and come back before its
    backward. A GPU copies while it computes other blocks, which take as long; a CPU can't.
    """
    if not machine.on_gpu:
        copied = 2 * num_bytes / machine.memory_bandwidth
        return part._replace(forward=part.forward + copied, inputs=part.inputs + copied)
    copied = num_bytes / (machine.host_copy or HOST_COPY)
    forward = max(part.forward, copied)
    return part._replace(forward=forward, inputs=max(part.inputs, copied - part.weights))


def _in_pieces(work: PartWork, tp: int) -> PartWork:
    """Return work that is done piece by piece as others' positions come and go (parallel/async_tp.py).

    What stands between a gather and a scatter, all of a feed-forward, does its own positions in two halves.
    """
    parts = [tp] * tp if work.core.flops else [tp] * (tp - 1) + [2 * tp] * 2
    products = tuple(each._replace(m=each.m // part) for each in work.products for part in parts)
    return work._replace(products=products, kernels=len(parts) * work.kernels)


def _added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of both, by axis; axes with none are left out."""
    total = defaultdict[str, float](float, first)
    for axis, took in second.items():
        total[axis] += took
    return {axis: took for axis, took in total.items() if took > 0}


def _exposed(
    sent: Sequence[MessageVolume],
    groups: Mapping[str, RankGroup],
    layout: StepLayout,
    machine: MachineRates,
    core: float,
) -> dict[str, float]:
    """Return the seconds of messages that nothing hides, by axis. core: of attention, over a ring of cp."""
    found = defaultdict[str, float](float)
    under_attention = 0.0  # other messages of cp come before it, and after it
    for each in sent:
        took = sent_seconds(each, groups, machine)
        if took and not machine.on_gpu:
            took += CALLS_OF_MESSAGE * machine.launch_s
        if machine.sends_meanwhile and each.axis == "cp" and each.operation == "shift":
            under_attention += took
            continue
        if machine.sends_meanwhile and each.axis == "tp":
            took *= 1 - layout.tp_overlap
            took *= 0.5 if layout.gathers_fp8 and each.operation == "all_gather" else 1.0
        found[each.axis] += took
    if under_attention:
        found["cp"] += max(under_attention - core, SLOWED * under_attention)
    return found


def _exposed_regather(
    work: PartWork, groups: Mapping[str, RankGroup], layout: StepLayout, machine: MachineRates, under: float
) -> float:
    """Return the seconds of a gather for weight gradients that no computation hides.

    under: seconds of the gradients of inputs, and of waiting for cp's messages, under which a GPU
    sends. On a CPU, MPI moves nothing meanwhile. What a GPU's gather takes from them is in its fitted rates.
    """
    took = sum(sent_seconds(each, groups, machine) for each in work.regathered)
    took *= 0.5 if layout.gathers_fp8 else 1.0
    return max(took - under, 0.0) if machine.on_gpu else took


def fetches_each(layout: StepLayout) -> bool:
    """Return whether weights of ZeRO-3 are fetched for each microbatch.

    They aren't where a pipeline keeps them, or with parallel.gather = "step".
    """
    return layout.zero == 3 and layout.pp == 1 and layout.gather != "step"


def _with_fetches(part: Part, layout: StepLayout, machine: MachineRates, weights: Weights) -> Part:
    """Return the part with ZeRO-3's gathers before forward and backward, and with the reduction of gradients.

    The reduction, where it isn't once for all, follows the gradients of weights: no other stage waits.
    """
    if not (fetches_each(layout) or layout.sums_each):
        return part
    gathered, reduced = state_seconds(layout, machine, weights)
    gathered *= fetches_each(layout)
    reduced *= layout.sums_each
    least = exposed_share(layout, machine)
    forward, exposed = _overlapped(part.forward, gathered, least)
    backward, exposed_backward = _overlapped(part.inputs + part.weights, gathered + reduced, least)
    later = backward - part.inputs - part.weights
    of_weights = later * reduced / (gathered + reduced) if gathered + reduced else 0.0
    return Part(
        forward,
        part.inputs + later - of_weights,
        part.weights + of_weights,
        _added(part.exposed_forward, {"dp": exposed}),
        _added(part.exposed_backward, {"dp": exposed_backward}),
    )


def exposed_share(layout: StepLayout, machine: MachineRates) -> float:
    """Return the share of weights and gradients between data ranks that is exposed at least."""
    if not layout.overlapped:
        return 1.0
    if machine.on_gpu and fetches_each(layout):
        return EXPOSED_OF_FETCHES
    if machine.sends_meanwhile:
        return SLOWED
    return EXPOSED_WITHOUT_SPARE_CORE if groups_of(layout, machine)["dp"].nodes > 1 else 1.0


def _overlapped(computed: float, sent: float, least: float) -> tuple[float, float]:
    """Return how long both take together, and what of it is exposed, of which `least` is a share."""
    exposed = max(sent - computed, least * sent)
    return computed + exposed, exposed


def state_seconds(layout: StepLayout, machine: MachineRates, weights: Weights) -> tuple[float, float]:
    """Return the seconds in which data ranks gather weights and reduce gradients, dense ones and experts'.

    Without ZeRO nothing is gathered, and gradients are summed everywhere.
    """
    gathered = reduced = 0.0
    sharding = (
        (layout.dp * layout.cp, layout.tp, layout.shards),
        (layout.edp, layout.etp * layout.ep, layout.expert_shards),
    )
    for (ranks, stride, shards), numel in zip(sharding, weights):
        shard = group_of(shards, stride, machine)
        copies = group_of(max(1, ranks // shards), stride * shards, machine)
        gathered += seconds("all_gather", numel * (1 if layout.gathers_fp8 else layout.item), shard, machine)
        scattered = seconds("reduce_scatter", numel * layout.wire_bytes, shard, machine)
        reduced += scattered + seconds("all_reduce", numel * layout.wire_bytes // shards, copies, machine)
    return gathered, reduced


def stages_of(model: StepModel, layout: StepLayout, machine: MachineRates) -> list[StageSeconds]:
    """Return the seconds of every stage, from the embedding to the loss."""
    load = load_of_fullest(layout, machine)
    alone = not (fetches_each(layout) or layout.sums_each)  # data ranks send nothing for a microbatch
    own = of_microbatch(layout) if alone else layout
    alike: dict[Pieces, StageSeconds] = {}
    stages = model.stages(layout)
    for pieces in stages:
        if pieces not in alike:
            parts = [(_piece_seconds(model, piece, own, machine, load), count) for piece, count in pieces]
            alike[pieces] = _together(parts)
    return [alike[pieces] for pieces in stages]


@lru_cache(maxsize=1 << 14)  # a search asks for many layouts that differ in their stages
def _piece_seconds(
    model: StepModel, piece: Piece, layout: StepLayout, machine: MachineRates, load: float
) -> Part:
    """Return the seconds of a piece. load: as works_of() takes it."""
    is_block = piece.kind >= 0
    weights = weights_of(model, piece, layout.tp, layout.ep, layout.etp)
    works = works_of(model, layout, load).of(piece)
    part = part_of(works, layout, machine, weights, is_block and layout.recompute == "full")
    # experts' activations can't be offloaded (plan/settings/experts.py)
    if not (layout.offload_activations and is_block) or weights[1]:
        return part
    return _with_copies(part, stash_bytes(layout, works, model.sizes.width), machine)


def weights_of_ranks(model: StepModel, layout: StepLayout) -> tuple[Weights, ...]:
    """Return the weights of each pipeline rank."""
    return _weights_of_ranks(model, division_alone(layout))


def division_alone(layout: StepLayout) -> StepLayout:
    """Return a layout that divides a model alike, and is equal for all that do."""
    return StepLayout(
        1, layout.sequence, 1, tp=layout.tp, ep=layout.ep, etp=layout.etp, pp=layout.pp, chunks=layout.chunks,
        schedule=layout.schedule, stages=layout.stages,
    )  # fmt: skip


@lru_cache(maxsize=256)  # a search asks for many layouts that divide a model alike
def _weights_of_ranks(model: StepModel, layout: StepLayout) -> tuple[Weights, ...]:
    stages = model.stages(layout)
    ranks = []
    for held in stages_of_ranks(layout):
        pieces = [pair for stage in held for pair in stages[stage]]
        of_pieces = [(weights_of(model, piece, layout.tp, layout.ep, layout.etp), n) for piece, n in pieces]
        dense, experts = (sum(count * numbers[which] for numbers, count in of_pieces) for which in (0, 1))
        has_ends = {FIRST, LAST} <= {piece for piece, _ in pieces}
        ranks.append((dense - has_ends * tied_weights(model, layout.tp), experts))
    return tuple(ranks)


def most_weights(model: StepModel, layout: StepLayout) -> Weights:
    """Return the weights of the pipeline rank that has most."""
    return max(weights_of_ranks(model, layout), key=sum)


def stash_bytes(layout: StepLayout, works: Sequence[PartWork], width: int) -> int:
    """Return the bytes that one microbatch leaves in a piece of a block. works: of its layers."""
    if layout.recompute == "full":
        return stream_bytes(layout, width)
    return sum(work.kept for work in works)


def _together(parts: Sequence[tuple[Part, int]]) -> StageSeconds:
    exposed = defaultdict[str, float](float)
    exposed_forward = defaultdict[str, float](float)
    for part, count in parts:
        for axis, took in (*part.exposed_forward.items(), *part.exposed_backward.items()):
            exposed[axis] += count * took
        for axis, took in part.exposed_forward.items():
            exposed_forward[axis] += count * took
    forward, inputs, weights = (
        sum(count * getattr(part, name) for part, count in parts) for name in ("forward", "inputs", "weights")
    )
    return StageSeconds(forward, inputs, weights, exposed, exposed_forward)
