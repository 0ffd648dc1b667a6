"""Compare a layout with one rank: train a shrunken copy of the user's model on both, in fp64.

Loss, gradient norm, every gradient and every updated weight of two steps must agree to 1e-10. The
first in the order of the model that doesn't is named, with the instruction that completes it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.comm.base.world import World, alone
from mpitrain.comm.mesh import Mesh
from mpitrain.config import AttentionTable, Config
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.division.batch_division import round_of, sequences_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.pipeline_table import num_microbatches, placement_in, table_of
from mpitrain.plan.settings.resolve import on_one_rank

TOLERANCE = 1e-10
# of the largest gradient: one below that is zero but for rounding (that of a bias of keys without
# positions), and so is the weight's step, of which adaptive optimisers make any size
ROUNDING = 1e-12
STEPS = 2
VOCAB = 61  # a prime: no tensor-parallel degree divides it
END = 0  # the token that ends a document
LR = 1e-2


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that is wrong on some rank. order: of the model's parameters, to find the first."""

    order: tuple[int, int, int]
    tensor: str
    error: float
    instruction: str
    coordinates: dict[str, int]


def shrunken(config: Config) -> Config:
    """Return a small model of the same structure, layout and schedule, in fp64.

    pipeline.stages, and what makes another result of another layout by definition, are left out.
    """
    model = config.model
    parallel = config.parallel
    stages = parallel.pp * (config.pipeline.chunks or 1)
    segments = config.pipeline.segments or 2
    microbatches = 2 * max(2, parallel.pp)
    if placement_in(config) is None:  # a table from a file is what it is
        segments = table_of(config).segments
        microbatches = num_microbatches(config)
    sequence = 2 * parallel.cp * parallel.tp * segments * 2
    few = max(config.experts.buffer, 0.25)  # of so few tokens less would be less than one
    first = min(1, config.experts.first or 0)
    small = dict(width=8 * parallel.etp, first=first, wire="", buffer=few, capacity=0.0, replay="")
    experts = small if config.experts.count else {}
    sizes = dict(layers=stages + 1, width=4 * model.heads, ffn=8 * parallel.tp)
    changes = {
        "experts": experts,
        "model": dict(sizes, init="", vocab=VOCAB, padding=min(5, model.padding or 0)),
        "attention": _shrunken_attention(config.attention),
        "data": dict(sequence=sequence),
        "batch": dict(global_=round_of(config, parallel.dp) * microbatches, micro=1),
        "precision": dict(compute="fp64", reduce="same"),
        "pipeline": dict(stages=None),
        "comm": dict(bucket_mb=0.002, timeout_s=60.0),
    }
    tables = {
        name: msgspec.structs.replace(getattr(config, name), **values) for name, values in changes.items()
    }
    return msgspec.structs.replace(config, **tables)


def _shrunken_attention(attention: AttentionTable) -> dict[str, Any]:
    """Return the keys that are set: small sizes, no two alike; blocks of each kind come soon."""
    small = dict(head_width=4, window=5, q_rank=10, kv_rank=6, rotary_width=2, value_width=3)
    sizes = {key: size for key, size in small.items() if getattr(attention, key)}
    letters = {key: getattr(attention, key) for key in ("window_blocks", "rotary_blocks")}
    return sizes | {key: "".join(dict.fromkeys(value)) for key, value in letters.items() if value}


def verify(config: Config, world: World) -> list[WrongTensor]:
    """Return what differs on any rank, in the model's order. Collective over all ranks."""
    plan, lone_plan = world.on_every_rank("planning the small model", lambda: _plans_of(shrunken(config)))
    mesh = build_mesh(plan, world.comm)
    lone = build_mesh(lone_plan, alone())
    split_run = _Run(plan, mesh)
    expected = _Run(lone_plan, lone)
    mine = [
        difference
        for step in range(1, STEPS + 1)
        for difference in _compare(step, split_run.step(step), expected.step(step), split_run)
    ]
    mesh.free()
    lone.free()
    differences = [d for part in world.all_gather("what differs", mine) for d in part]
    return sorted(differences, key=lambda difference: difference.order)


def _plans_of(small: Config) -> tuple[Plan, Plan]:
    plans = plan_of(small), plan_of(on_one_rank(small))
    for plan in plans:
        _ = plan.training  # made, and proved, when it is asked for
    return plans


# ---------------------------------------------------------------- running and comparing


class _Run:
    def __init__(self, plan: Plan, mesh: Mesh):
        self.config = plan.config
        self.mesh = mesh
        self.actor = Actor(plan, mesh, torch.device("cpu"))

    def step(self, step: int) -> tuple[float, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Train a step; return loss, norm, gradients before clipping, and weights, by parameter."""
        result = self.actor.run_step(step, self._microbatches(step), LR)
        clip = self.config.optimizer.clip
        clipped = min(1.0, clip / result.grad_norm) if clip else 1.0
        pieces = self.actor.gradients.pieces
        grads = {p.spec.name: p.grad / clipped for p in pieces}
        return result.loss, result.grad_norm, grads, {p.spec.name: p.weight.clone() for p in pieces}

    def _microbatches(self, step: int) -> list[Microbatch]:
        config = self.config
        dice = np.random.default_rng(step)
        rows = dice.integers(END + 1, VOCAB, (config.batch.global_, config.data.sequence + 1))
        separate = config.data.separates
        # the first row is one document, the last has many: ranks count unequal numbers
        if separate:
            rows[dice.random(rows.shape) < np.linspace(0, 0.6, len(rows))[:, None]] = END
        mine = sequences_of(config, self.mesh["dp"].rank)
        here = torch.from_numpy(rows[mine.start : mine.stop])
        return self.actor.cutter.cut(here, END if separate else None)

    def completed_by(self, piece: ParameterShard) -> str:
        """Name the instruction that completes a parameter's gradient."""
        for number, stage in self.actor.stages.items():
            for index, bucket in enumerate(stage.state.buckets):
                if piece.spec in bucket.weights.map.specs:
                    return f"REDUCE{index}@{number}"
        return "NORM"


def _compare(step: int, measured, expected, run: _Run) -> list[WrongTensor]:
    """Compare in the order in which an error travels: loss, gradients, norm, weights."""
    differences = []
    coordinates = run.mesh.coordinates

    def compare(
        order: int, index: int, what: str, instruction: str, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        error = ((a - b).abs().max() / (b.abs().max() + 1e-300)).item()
        if not error <= TOLERANCE:
            place = step, order, index
            what = f"step {step}, {what}"
            differences.append(WrongTensor(place, what, error, instruction, coordinates))

    names = {name: index for index, name in enumerate(expected[2])}
    largest = max(grad.abs().max().item() for grad in expected[2].values())
    compare(0, 0, "the loss", "NORM", torch.tensor(measured[0]), torch.tensor(expected[0]))
    compare(2, 0, "the gradient norm", "NORM", torch.tensor(measured[1]), torch.tensor(expected[1]))
    for piece in run.actor.gradients.pieces:
        name = piece.spec.name
        done = run.completed_by(piece)
        if expected[2][name].abs().max() <= ROUNDING * largest:
            if measured[2][name].numel() and measured[2][name].abs().max() > ROUNDING * largest:
                compare(1, names[name], f"the gradient of {name}", done, measured[2][name], torch.zeros(1))
            continue
        for order, place, what, instruction in ((1, 2, "gradient of", done), (3, 3, "updated", "UPDATE")):
            part = _part(expected[place][name], piece)
            compare(order, names[name], f"the {what} {name}", instruction, measured[place][name], part)
    return differences


def _part(whole: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
    """Return what a rank has of a parameter, given flat: a run of elements of a box."""
    spec = piece.spec
    box = tuple(slice(begin, begin + length) for begin, length in zip(spec.offset, spec.shape))
    return whole.view(spec.whole)[box].reshape(-1)[piece.begin : piece.end]
