"""What a microbatch leaves behind in a stage between its forward and its backward. Integers and names only.

Numbers kept of a block, with n = B T positions on this rank, width D, H C query and K C key-value features, F hidden units; of a norm's
factor 1 per position, of attention's log-sum-exp H:

    none        attention  2 n D + n + 3 n H C + 2 n K C + n H    unit and normed input | q, k, v, result, result side by side
                ffn        2 n D + n + 4 n F                      the same | gate, silu(gate), up, product
    selective   attention  n D + n + n H C + 2 n K C              input | q, k, v
                ffn        n D + n + 2 n F                        input | gate, up
    full        n D per block; every-k: n D per group

tp divides H, K and F; with `sequence`, it divides what stands before the gather (and after the scatter), too. cp divides n. There the
normed input has travelled, or the result will have: it is kept in selective mode, too.
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


def kept_bytes(config: Config, stage: int, segment: int = 0, segments: int = 1) -> int:
    """Return the bytes that a forward leaves in the memory of a rank of `stage`. On a GPU attention's result is there only once.

    segment: which of the `segments` that a microbatch's sequence is cut into, if it is.
    """
    positions = _positions(config, segments)
    inner = 0 if _offloaded(config) else _inner(config, stage, segment, segments)
    if segments > 1:
        inner += _own_keys(config, stage, positions)  # for later segments
    inner += _mask(config, segment, segments)
    ends = _head(config, positions) if stage == num_stages(config) - 1 else 0
    tokens = (9 if config.parallel.tp > 1 else 8) * positions if stage == 0 else 0
    return (inner + ends) * itemsize_of(config) + tokens


def offloaded_bytes(config: Config, stage: int, segment: int = 0, segments: int = 1) -> int:
    """Return the bytes that a forward leaves in host memory instead."""
    return _inner(config, stage, segment, segments) * itemsize_of(config) if _offloaded(config) else 0


def _offloaded(config: Config) -> bool:
    return config.memory.offload in ("activations", "all")


def _inner(config: Config, stage: int, segment: int, segments: int) -> int:
    """Return the numbers that blocks keep, without embedding and head."""
    positions = _positions(config, segments)
    if config.memory.recompute in ("full", "every-k"):
        return len(groups_of(config, stage)) * _shared(config, positions) * config.model.width
    attentions, ffns = _layers(config, stage)
    inner = attentions * _attention(config, positions) + ffns * _feed_forward(config, positions)
    return inner + segment * _own_keys(config, stage, positions)  # those of earlier segments, copied to beside this one's


def returned_bytes(config: Config, stage: int, segment: int, segments: int) -> int:
    """Return the bytes of gradients of earlier keys and values that wait when the backward of a segment is done: first as one tensor."""
    shares = segments if segment == segments - 1 else segment
    return shares * _own_keys(config, stage, _positions(config, segments)) * itemsize_of(config)


def left_bytes(config: Config, stage: int, segments: int = 1) -> int:
    """Return the bytes that a backward for inputs (I) leaves for the one for weights (W): both factors of every weight gradient."""
    model, tp, positions = config.model, config.parallel.tp, _positions(config, segments)
    attentions, ffns = _layers(config, stage)
    left = attentions * (2 * model.width + 2 * model.width // tp + 2 * _kv_width(config))
    left += ffns * (2 * model.width + 3 * model.ffn // tp)
    if stage == num_stages(config) - 1:
        left += model.width + model.vocab // tp
    return left * positions * itemsize_of(config)


def _layers(config: Config, stage: int) -> tuple[int, int]:
    """Return how many attentions and feed-forwards a stage has."""
    blocks = specs_of(config, stage)
    names = [spec.name for number in inner_blocks(config, stage) for spec in blocks[number]]
    return sum(name.endswith("attention.q.weight") for name in names), sum(name.endswith("ffn.gate.weight") for name in names)


def _own_keys(config: Config, stage: int, positions: int) -> int:
    """Keys and values of one segment in all attentions of a stage."""
    return _layers(config, stage)[0] * 2 * positions * _kv_width(config)


def _kv_width(config: Config) -> int:
    """Key features that this rank computes for each of its positions."""
    model = config.model
    return model.width // model.heads * max(1, model.kv_heads // config.parallel.tp)


def itemsize_of(config: Config) -> int:
    """Return the bytes of a weight or an activation."""
    return {"fp64": 8, "fp32": 4}.get(config.precision.compute, 2)


def _positions(config: Config, segments: int) -> int:
    """Positions of a microbatch, or of its segment, whose heads or hidden units this rank computes."""
    return config.batch.micro * config.data.sequence // (config.parallel.cp * segments)


def _shared(config: Config, positions: int) -> int:
    """Positions of the residual stream that this rank has."""
    parallel = config.parallel
    return positions // (parallel.tp if parallel.sequence else 1)


def _normed(config: Config, positions: int) -> int:
    """What a norm and the products behind it keep of their input."""
    width = config.model.width
    if config.parallel.tp > 1:  # a message is between norm and product
        return _shared(config, positions) * (width + 1) + positions * width
    selective = config.memory.recompute == "selective"
    return positions * ((1 if selective else 2) * width + 1)


def _attention(config: Config, positions: int) -> int:
    model, parallel = config.model, config.parallel
    heads, width = model.heads // parallel.tp, model.width // model.heads
    kv_heads = max(1, model.kv_heads // parallel.tp)
    if parallel.cp > 1 and parallel.context == "gather":
        kv_heads *= parallel.cp
    elif parallel.cp > 1 and parallel.context == "ulysses":
        kv_heads = max(kv_heads, parallel.cp)
    kept = positions * width * (heads + 2 * kv_heads)
    in_pieces = parallel.cp > 1 or (parallel.tp > 1 and parallel.async_tp)  # then attention isn't one segment
    if config.memory.recompute != "selective" or in_pieces:
        kept += positions * heads * (2 * width + 1)
    return _normed(config, positions) + kept


def _feed_forward(config: Config, positions: int) -> int:
    factors = 2 if config.memory.recompute == "selective" else 4
    return _normed(config, positions) + factors * positions * config.model.ffn // config.parallel.tp


def _mask(config: Config, segment: int, segments: int) -> int:
    """What is added to the scores of queries and keys, unless it is causal alone; over cp it is made tile by tile, and not counted."""
    separate = config.data.documents == "separate"
    if config.parallel.cp > 1 or not (separate or segments > 1):
        return 0
    length = config.data.sequence // segments
    return (config.batch.micro if separate else 1) * length * (segment + 1) * length


def _head(config: Config, positions: int) -> int:
    model, tp = config.model, config.parallel.tp
    normed = _normed(config, positions) if tp > 1 else positions * (2 * model.width + 1)
    return normed + positions * model.vocab // tp
