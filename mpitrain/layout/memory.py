"""`mpitrain memory`: what each rank will hold, and after a run beside it what it held. Nothing is allocated for it.

    weights       of the bucket buffers, padding included, and with 16-bit types their fp32 masters
    gradients     the same; with ZeRO-2 and 3 the shards
    moments       of the optimiser, without padding
    lent          buffers that ZeRO-2 and 3, and sums in a tree, borrow (buffers_needed.py)
    activations   what microbatches leave behind at the peak of the schedule (layout/activations.py; measured: actor/memory_meter.py)
    host          what is offloaded to host memory: masters, moments, gradients, and 16-bit weights on their way back; activations, in
                  buffers that each stage keeps for the next step (16-bit ones but for norms' factors, which are fp32)
    copy to save  in host memory: masters and moments, from which a thread saves (layout/saved.py)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpitrain.config import Config, Optimizer
from mpitrain.layout.activations import Activations
from mpitrain.layout.buffers_needed import needed_by
from mpitrain.layout.domains import domains_of
from mpitrain.layout.held import HeldBucket, held_by
from mpitrain.layout.parameters import itemsizes_of
from mpitrain.layout.plan import Plan
from mpitrain.layout.text import aligned
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table

PARTS, COPY = ("weights", "gradients", "moments", "lent", "activations", "host"), "copy to save"


class Usage(NamedTuple):
    """Bytes of one rank: on its device, and in host memory if that is another place or is treated as such."""

    weights: int
    gradients: int
    moments: int
    lent: int
    activations: int
    host: int = 0

    @property
    def on_device(self) -> int:
        return sum(self) - self.host


def predict(plan: Plan, shards: Mapping[str, int] | None = None, on_gpu: bool = False) -> list[Usage]:
    """Return what a rank of each pipeline rank holds, the first of its tensor-parallel axis.

    shards: its part of a state that is divided, by domain; None: the one that holds most, for not all hold as much padding.
    on_gpu: it computes on one, whether or not run.device asks for that.
    """
    return [predict_rank(plan, rank, shards, on_gpu) for rank in range(plan.config.parallel.pp)]


def predict_rank(plan: Plan, rank: int, shards: Mapping[str, int] | None = None, on_gpu: bool = False) -> Usage:
    """Return what a rank of one pipeline rank holds, as predict() does of all."""
    config, table, training = plan.config, plan.table, plan.training.ranks[rank]
    parallel, narrow, wide = config.parallel, *itemsizes_of(config)
    stages = held_by(plan, rank)
    buckets = [bucket for stage in stages.values() for bucket in stage.buckets]
    owned = [bucket for bucket in buckets if bucket.owned]
    weights = sum(b.weights.kept(divided=parallel.zero == 3) for b in owned) * narrow
    masters = sum(b.weights.kept(divided=True) for b in owned) * wide
    grads = sum(gradient.kept(divided=parallel.zero >= 2) for bucket in buckets for gradient in bucket.gradients) * wide
    offloaded = config.memory.offload in ("optimizer", "all")
    moments, arriving = _updated_at_most(config, owned, shards, offloaded)
    sizes = replace(plan.sizes, on_gpu=True) if on_gpu else plan.sizes
    formulas = {stage: Activations(plan.stage(stage), sizes) for stage in table.chunks[rank]}
    borrowed = needed_by(plan, rank)
    lent = sum(n * length * size for counts, size in zip(borrowed, (narrow, wide)) for (_, length), n in counts.items())
    held, host = _activations(training, table, formulas), _put_away(training, table, formulas)
    if offloaded:
        leaving = 0 if narrow == wide else masters // wide * narrow
        host += masters + leaving + moments + arriving
        return Usage(weights, grads, 0, lent, held, host)
    return Usage(weights + (masters if narrow != wide else 0), grads, moments, lent, held, host)


def _updated_at_most(config: Config, owned: Sequence[HeldBucket], shards: Mapping[str, int] | None, offloaded: bool) -> tuple[int, int]:
    """Return `_updated` of all domains together, each with the given shard or with the one that is most."""
    total = [0, 0]
    for name, domain in domains_of(config).items():
        buckets = [bucket for bucket in owned if bucket.plan.domain == name]
        candidates = range(domain.num_shards(config)) if shards is None else (shards[name],)
        most = max((_updated(config, buckets, each) for each in candidates), key=sum if offloaded else None)
        total = [a + b for a, b in zip(total, most)]
    return total[0], total[1]


def _updated(config: Config, buckets: Sequence[HeldBucket], shard: int) -> tuple[int, int]:
    """Return the bytes of what is updated in a shard of the buckets, without padding: moments, and gradients on the host."""
    _, wide = itemsizes_of(config)
    runs = [(spec, end - begin) for bucket in buckets for spec, begin, end in bucket.weights.layout.runs(shard) if spec.trained]
    kept = sum(count * num_moments(config.optimizer, spec.group) for spec, count in runs)
    return kept * moment_bytes(config), sum(count for _, count in runs) * wide


def moment_bytes(config: Config) -> int:
    """Return the bytes of one number of a moment."""
    return 2 if config.optimizer.moments == "bf16" else itemsizes_of(config)[1]


def num_moments(optimizer: Optimizer, group: str) -> int:
    """Return how many numbers an optimiser keeps of one number of a parameter of a group (Spec.group)."""
    if group in ("load", "bias"):
        return 0
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 1 if optimizer.name == "muon" and group == "matrix" else 2


def _activations(instructions: Sequence[Action], table: Table, stages: dict[int, Activations]) -> int:
    """Return the most that the microbatches of a rank hold at once, between instructions; a pair is one."""
    held, returned, most = Counter[tuple[int, int]](), Counter[tuple[int, int]](), 0
    last = {action[:3]: position for position, action in enumerate(instructions)}
    for position, action in enumerate(instructions):
        kind, index, stage, part = action
        done = last[action[:3]] == position
        if kind == "F":
            first = 0 if part is None else len(stages[stage].stage.parts) - 1 - part
            held[index, stage] = stages[stage].kept(index % table.segments, first)
        elif kind == "B" and not done:
            held[index, stage] = stages[stage].kept(index % table.segments, part + 1)
        elif kind == "I" and done:
            held[index, stage] = stages[stage].left()
        elif kind in ("B", "W") and done:
            del held[index, stage]
            if table.segments > 1:
                microbatch, segment = divmod(index, table.segments)
                returned[microbatch, stage] = stages[stage].returned(segment)
        if position == 0 or instructions[position - 1].kind != "PAIR":
            most = max(most, held.total() + returned.total())
    return most


def _put_away(instructions: Sequence[Action], table: Table, stages: dict[int, Activations]) -> int:
    """Return the bytes that offloaded activations take in host memory, from their forward to the end of their B or I.

    A buffer is used again for what has the same length: in all segments that is all but keys and values, which are longer in each.
    """
    last = {action[:3]: action for action in instructions if action.kind in ("B", "I")}
    held, most, together = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[int]()
    for action in instructions:
        if action.kind == "F" and not action.part:
            held[action.stage, action.index % table.segments] += 1
            most |= held
            together[action.stage] = max(together[action.stage], sum(n for (stage, _), n in held.items() if stage == action.stage))
        elif last.get(action[:3]) == action:
            held[action.stage, action.index % table.segments] -= 1
    keys = {stage: stages[stage].on_host(1) - stages[stage].on_host(0) for stage in together}
    total = sum((stages[stage].on_host(0) - keys[stage]) * count for stage, count in together.items())
    return total + sum(keys[stage] * (segment + 1) * count for (stage, segment), count in most.items())


def table_of_usage(usages: Sequence[Usage], copies: Sequence[int]) -> str:
    """Draw what each pipeline rank holds, in MB of 10**6 bytes: on its device together, and in host memory. copies: to save from."""
    rows = [("rank of pp", *PARTS[:-1], "together", PARTS[-1], COPY)]
    for rank, (usage, copy) in enumerate(zip(usages, copies, strict=True)):
        rows.append((str(rank), *(f"{part / 1e6:.2f}" for part in (*usage[:-1], usage.on_device, usage.host, copy))))
    return aligned(rows)


def compare(predicted: Usage, measured: Usage, copies: tuple[int, int]) -> str:
    """Say in one line what a rank was to hold, and what it has. copies: to save from, predicted and measured."""
    every = [*zip(PARTS, predicted, measured), (COPY, *copies)]
    parts = [f"{name} {a / 1e6:.2f} / {b / 1e6:.2f}" for name, a, b in every if a or b]
    return f"memory of rank 0, MB predicted / measured: {', '.join(parts)}"
