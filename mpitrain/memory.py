"""What a microbatch leaves behind in a stage between its forward and its backward. Integers and names only.

Numbers kept of a block, with n = B T positions on this rank, width D, H C query and K C key-value features, F hidden units; of a norm's
factor 1 per position, of attention's log-sum-exp H:

    none        attention  2 n D + n + 3 n H C + 2 n K C + n H    unit and normed input | q, k, v, result, result side by side
                ffn        2 n D + n + 4 n F                      the same | gate, silu(gate), up, product
    selective   attention  n D + n + n H C + 2 n K C              input | q, k, v
                ffn        n D + n + 2 n F                        input | gate, up
    full        n D per block; every-k: n D per group

tp divides H, K and F; with `sequence`, it divides what stands before the gather (and after the scatter), too. cp divides n. There the
normed input has travelled, or the result will have: it is kept in selective mode, too. Masks of documents are not counted.
"""

import math

from mpitrain.config import Config
from mpitrain.slicing import num_stages, specs_of


def groups_of(config: Config, stage: int) -> list[range]:
    """Return the groups of a stage's blocks that are computed again together; embedding and head are in none.

    With ZeRO-3 a group is one block: weights are fetched and dropped block by block.
    """
    if config.memory.recompute not in ("full", "every-k"):
        return []
    inner = inner_blocks(config, stage)
    every = 1
    if config.memory.recompute == "every-k" and config.parallel.zero < 3:
        every = config.memory.every or max(1, round(math.sqrt(len(inner))))
    return [inner[i : i + every] for i in range(0, len(inner), every)]


def inner_blocks(config: Config, stage: int) -> range:
    """Return the numbers of a stage's blocks without embedding and head."""
    return range(stage == 0, len(specs_of(config, stage)) - (stage == num_stages(config) - 1))


def kept_bytes(config: Config, stage: int) -> int:
    """Return the bytes that a microbatch leaves in the memory of a rank of `stage`. On a GPU attention's result is there only once."""
    memory, blocks = config.memory, specs_of(config, stage)
    if memory.offload == "activations":
        inner = 0
    elif memory.recompute in ("full", "every-k"):
        inner = len(groups_of(config, stage)) * _shared(config) * config.model.width
    else:
        names = [spec.name for number in inner_blocks(config, stage) for spec in blocks[number]]
        num_attentions = sum(name.endswith("attention.q.weight") for name in names)
        num_ffns = sum(name.endswith("ffn.gate.weight") for name in names)
        inner = num_attentions * _attention(config) + num_ffns * _feed_forward(config)
    ends = (_head(config) if stage == num_stages(config) - 1 else 0) * _itemsize(config)
    tokens = (9 if config.parallel.tp > 1 else 8) * _positions(config) if stage == 0 else 0
    return inner * _itemsize(config) + ends + tokens


def _itemsize(config: Config) -> int:
    return {"fp64": 8, "fp32": 4}.get(config.precision.compute, 2)


def _positions(config: Config) -> int:
    """Positions of a microbatch whose heads or hidden units this rank computes."""
    segments = (config.pipeline.segments or 1) if config.pipeline.schedule == "seq1f1b" else 1
    return config.batch.micro * config.data.sequence // (config.parallel.cp * segments)


def _shared(config: Config) -> int:
    """Positions of the residual stream that this rank has."""
    parallel = config.parallel
    return _positions(config) // (parallel.tp if parallel.sequence else 1)


def _normed(config: Config) -> int:
    """What a norm and the products behind it keep of their input."""
    width = config.model.width
    if config.parallel.tp > 1:  # a message is between norm and product
        return _shared(config) * (width + 1) + _positions(config) * width
    selective = config.memory.recompute == "selective"
    return _positions(config) * ((1 if selective else 2) * width + 1)


def _attention(config: Config) -> int:
    model, parallel = config.model, config.parallel
    positions, heads, width = _positions(config), model.heads // parallel.tp, model.width // model.heads
    kv_heads = max(1, model.kv_heads // parallel.tp)
    if parallel.cp > 1 and parallel.context == "gather":
        kv_heads *= parallel.cp
    elif parallel.cp > 1 and parallel.context == "ulysses":
        kv_heads = max(kv_heads, parallel.cp)
    kept = positions * width * (heads + 2 * kv_heads)
    in_pieces = parallel.cp > 1 or (parallel.tp > 1 and parallel.async_tp)  # then attention isn't one segment
    if config.memory.recompute != "selective" or in_pieces:
        kept += positions * heads * (2 * width + 1)
    return _normed(config) + kept


def _feed_forward(config: Config) -> int:
    factors = 2 if config.memory.recompute == "selective" else 4
    return _normed(config) + factors * _positions(config) * config.model.ffn // config.parallel.tp


def _head(config: Config) -> int:
    model, tp = config.model, config.parallel.tp
    normed = _normed(config) if tp > 1 else _positions(config) * (2 * model.width + 1)
    return normed + _positions(config) * model.vocab // tp
