"""Which blocks, parameters and gradient buckets a stage has. Integers and names only: no torch, so that a layout can be proved anywhere.

A stage is a list of blocks. Its backward is divided into parts, one per gradient bucket, from the last block to the first: when a
part is done for the last microbatch, its bucket is complete and can be reduced while the next part runs.

    blocks   embedding | block 0 | block 1 | block 2 | head
    parts    [     part 1      ] [          part 0         ]     bucket k is complete after part k
                                                                 the tied embedding is a bucket of its own, complete last
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mpitrain.config import Config
from mpitrain.schedule import rank_of
from mpitrain.schedules.lower import Reduction

EMBEDDING = "embedding.weight"


@dataclass(frozen=True)
class Spec:
    """What a parameter is, in any layout. std 0: initialised with ones (norms), and not decayed."""

    name: str
    shape: tuple[int, ...]
    std: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def num_stages(config: Config) -> int:
    """Return the stages of the model: `pipeline.chunks` on every pipeline rank."""
    return config.parallel.pp * config.pipeline.chunks


def balanced_split(num_blocks: int, ranks: Sequence[int], head: float) -> list[int]:
    """Divide the blocks over the stages so that the slowest rank is as fast as possible; `head` is the head's cost in blocks.

    ranks: the rank of each stage. Block by block goes to the rank with the least to do, and there to its smallest stage. Where
    two are as good, the last stage gets fewer, for the softmax is not counted.
    """
    costs = [1.0] * len(ranks)
    costs[-1] += head
    counts = [1] * len(ranks)
    loads = [sum(cost for cost, rank in zip(costs, ranks) if rank == r) for r in range(max(ranks) + 1)]
    for _ in range(num_blocks - len(ranks)):
        stage = min(range(len(ranks)), key=lambda s: (round(loads[ranks[s]], 9), round(costs[s], 9), s))
        counts[stage] += 1
        costs[stage] += 1
        loads[ranks[stage]] += 1
    return counts


def slices(config: Config) -> list[range]:
    """Return the decoder blocks of every stage: as configured, or balanced by the weights of their matrix products."""
    model, pipeline = config.model, config.pipeline
    counts = pipeline.stages
    if counts is None:
        block = sum(spec.numel for spec in _block(config, 0))
        counts = balanced_split(model.layers, rank_of(config), model.vocab * model.width / block)
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]


def specs_of(config: Config, stage: int) -> list[list[Spec]]:
    """Return the parameters of each block of a stage, in forward order, without allocating anything."""
    model, every = config.model, slices(config)
    blocks = [_block(config, index) for index in every[stage]]
    if stage == 0:
        blocks.insert(0, [Spec(EMBEDDING, (model.vocab, model.width), 0.02)])
    if stage == len(every) - 1:
        name = EMBEDDING if model.tied else "head.weight"
        blocks.append([Spec("head.norm.weight", (model.width,), 0.0), Spec(name, (model.vocab, model.width), 0.02)])
    return blocks


def parameters_of(config: Config) -> list[Spec]:
    """Return every parameter of the model once, whatever the layout."""
    return list({spec.name: spec for stage in range(num_stages(config)) for block in specs_of(config, stage) for spec in block}.values())


def _block(config: Config, index: int) -> list[Spec]:
    """Return the parameters of one decoder block."""
    model = config.model
    kv_width = model.width // model.heads * model.kv_heads
    return list(block_specs(index, model.width, kv_width, model.ffn, model.layers).values())


def parts_of(config: Config, stage: int) -> list[range]:
    """Divide a stage's blocks into the parts of its backward: from the last, until a bucket is full."""
    itemsize = 8 if config.precision.compute == "fp64" else 4
    limit, blocks = config.comm.bucket_mb * 2**20, specs_of(config, stage)
    parts, end, size = [], len(blocks), 0
    for index in reversed(range(len(blocks))):
        size += itemsize * sum(spec.numel for spec in blocks[index] if not (config.model.tied and spec.name == EMBEDDING))
        if size >= limit or index == 0:
            parts.append(range(index, end))
            end, size = index, 0
    return parts


def reduction_of(config: Config, stage: int) -> Reduction:
    """Tell the schedule after which part each bucket of a stage is complete."""
    num_parts = len(parts_of(config, stage))
    ready = tuple(range(num_parts))
    if config.model.tied and stage == 0:
        ready += (num_parts - 1,)
    elif config.model.tied and stage == num_stages(config) - 1:
        ready += (0,)
    return Reduction(num_parts, ready)


def block_specs(index: int, width: int, kv_width: int, ffn: int, num_layers: int) -> dict[str, Spec]:
    """Return the parameters of decoder block `index`. Projections back into the residual stream start smaller (GPT-2, section 2.3)."""
    std, residual = 0.02, 0.02 / (2 * num_layers) ** 0.5
    shapes = {
        "attention.norm": ((width,), 0.0),
        "attention.q": ((width, width), std),
        "attention.k": ((kv_width, width), std),
        "attention.v": ((kv_width, width), std),
        "attention.output": ((width, width), residual),
        "ffn.norm": ((width,), 0.0),
        "ffn.gate": ((ffn, width), std),
        "ffn.up": ((ffn, width), std),
        "ffn.down": ((width, ffn), residual),
    }
    return {name: Spec(f"blocks.{index}.{name}.weight", shape, std) for name, (shape, std) in shapes.items()}
