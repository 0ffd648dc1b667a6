"""Which blocks and parameters a stage has. Integers and names only: no torch, so that a layout can be proved anywhere.

A stage is a list of blocks; the first and last of them can be half a block, attention or feed-forward.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby

import numpy as np

from mpitrain.comm.grid import split
from mpitrain.config import Config
from mpitrain.layout.balance import balanced_split
from mpitrain.layout.table import rank_of

EMBEDDING = "embedding.weight"


@dataclass(frozen=True)
class Spec:
    """A parameter, or the box of it that a rank holds. std 0: initialised with ones (norms), and not decayed.

    whole, offset: shape of the logical parameter, and where the box lies in it.
    copies: ranks of the tensor-parallel axis that hold this same box; copy: which of them this is.
    partial: each copy has only part of the gradient.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    copies: int = 1
    copy: int = 0
    partial: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` of the tensor-parallel axis; `sequence`: activations between blocks are divided over it too."""

    rank: int = 0
    size: int = 1
    sequence: bool = False


WHOLE = Shard()


def itemsizes_of(config: Config) -> tuple[int, int]:
    """Return the bytes of a number of weights and activations, and of one of gradients and master weights."""
    return {"fp64": (8, 8), "fp32": (4, 4)}.get(config.precision.compute, (2, 4))


def stored_weights(config: Config) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every weight by its name in a checkpoint, which has them as the optimiser does."""
    dtype = np.dtype(f"<f{itemsizes_of(config)[1]}")
    return {f"parameters/{spec.name}": (dtype, spec.shape) for spec in parameters_of(config)}


def num_stages(config: Config) -> int:
    """Return the stages of the model: `pipeline.chunks` on every pipeline rank."""
    return config.parallel.pp * config.pipeline.chunks


def slices(config: Config) -> list[range]:
    """Return the layers of every stage: as configured, or balanced.

    A layer is half a block: layer 2k is the attention of block k, layer 2k+1 its feed-forward.
    """
    counts = config.pipeline.stages
    halves = _balanced(config) if counts is None else [round(2 * count) for count in counts]
    ends = list(accumulate(halves))
    return [range(end - count, end) for count, end in zip(halves, ends)]


def _balanced(config: Config) -> list[int]:
    """Balance by multiplications per token: of weights, and of scores and values in causal attention."""
    model = config.model
    attention, ffn = (sum(spec.numel for spec in _layer(config, layer)) for layer in (0, 1))
    row = (float(attention + config.data.sequence * model.width), float(ffn)) * model.layers
    return balanced_split(row, rank_of(config), float(model.vocab * model.width))


def specs_of(config: Config, stage: int, shard: Shard = WHOLE) -> list[list[Spec]]:
    """Return the parameters of each block of a stage, in forward order, without allocating anything. The ends can be half blocks."""
    model, every = config.model, slices(config)
    blocks = [list(chain(*(_layer(config, i) for i in halves))) for _, halves in groupby(every[stage], lambda layer: layer // 2)]
    if stage == 0:
        blocks.insert(0, [Spec(EMBEDDING, (model.vocab, model.width), 0.02)])
    if stage == len(every) - 1:
        name = EMBEDDING if model.tied else "head.weight"
        blocks.append([Spec("head.norm.weight", (model.width,), 0.0), Spec(name, (model.vocab, model.width), 0.02)])
    return [[shard_of(spec, shard, config.model.kv_heads) for spec in block] for block in blocks]


def shard_of(spec: Spec, shard: Shard, kv_heads: int) -> Spec:
    """Return the box of a parameter that one rank of the tensor-parallel axis holds.

    Rows (of queries, keys, values, gate, up, vocabulary) are divided, or columns (of the projections back into the residual stream).
    Key-value heads are repeated where the axis has more ranks than there are; norms are on every rank.
    """
    dim = 1 if spec.name.endswith(("attention.output.weight", "ffn.down.weight")) else 0
    spec = replace(spec, whole=spec.shape, offset=(0,) * len(spec.shape))
    if len(spec.shape) == 1:
        return replace(spec, copies=shard.size, copy=shard.rank, partial=shard.sequence and shard.size > 1)
    parts, part, copies = shard.size, shard.rank, 1
    if spec.name.endswith(("attention.k.weight", "attention.v.weight")) and shard.size > kv_heads:
        copies = shard.size // kv_heads
        parts, part = kv_heads, shard.rank // copies
    bounds = split(spec.shape[dim], parts)
    shape, offset = list(spec.shape), list(spec.offset)
    shape[dim], offset[dim] = bounds[part + 1] - bounds[part], bounds[part]
    return replace(
        spec, shape=tuple(shape), offset=tuple(offset), copies=copies, copy=shard.rank % copies, partial=copies > 1
    )


def parameters_of(config: Config) -> list[Spec]:
    """Return every parameter of the model once, whatever the layout."""
    return list({spec.name: spec for stage in range(num_stages(config)) for block in specs_of(config, stage) for spec in block}.values())


def _layer(config: Config, layer: int) -> list[Spec]:
    """Return the parameters of one half of a decoder block."""
    model = config.model
    kv_width = model.width // model.heads * model.kv_heads
    specs = block_specs(layer // 2, model.width, kv_width, model.ffn, model.layers)
    half = "ffn" if layer % 2 else "attention"
    return [spec for name, spec in specs.items() if name.startswith(half)]


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
