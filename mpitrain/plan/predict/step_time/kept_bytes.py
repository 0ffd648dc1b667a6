"""Bytes that a forward keeps for its backward, by formulas: of attention, of a feed-forward, of experts.

After arXiv:2205.05198, equations 1 to 4, from the shape's own widths.
"""

from mpitrain.plan.declared.published import ModelShape
from mpitrain.plan.predict.step_time.layout import StepLayout


def stash_bytes(shape: ModelShape, layout: StepLayout, num_dense: float, num_sparse: float) -> int:
    """Return the bytes that one microbatch leaves on one stage."""
    if layout.recompute == "full":
        return int((num_dense + num_sparse) * layout.stream_positions * shape.width * layout.item)
    attention = attention_bytes(shape, layout)
    dense = attention + dense_bytes(shape, layout)
    sparse = attention + (expert_bytes(shape, layout) if shape.experts else 0)
    return int(num_dense * dense + num_sparse * sparse)


def attention_bytes(shape: ModelShape, layout: StepLayout) -> int:
    """Return what attention of one block keeps of a microbatch.

    Norm's input and the products' input; q, k, v, result; scores and their softmax
    unless a flash kernel or selective recomputation has none (arXiv:2205.05198, equation 1).
    """
    n = layout.positions
    stream = layout.stream_positions * shape.width * layout.item
    heads = shape.heads // layout.tp
    kv_heads = max(1, shape.kv_heads // layout.tp)
    width = shape.head_width + (shape.latent.rotary_width if shape.latent else 0)
    core = n * layout.item * width * (2 * heads + 2 * kv_heads) + 4 * n * heads
    norm = stream if layout.sequence_parallel else n * shape.width * layout.item
    dropout = norm // 2 if shape.biased else 0
    scores = 0 if layout.flash or layout.recompute == "selective" else 5 * n * layout.sequence * heads
    return norm + _products_input(shape, layout) + core + scores + dropout


def _products_input(shape: ModelShape, layout: StepLayout) -> int:
    """Return the bytes of the input of a layer's first products, as they are kept."""
    divided = layout.sequence_parallel and layout.regathers
    return (layout.stream_positions if divided else layout.positions) * shape.width * layout.item


def dense_bytes(shape: ModelShape, layout: StepLayout) -> int:
    """Return what a dense feed-forward keeps: inputs of norm and products, hidden units."""
    n = layout.positions
    norm = (layout.stream_positions if layout.sequence_parallel else n) * shape.width * layout.item
    hidden = n * shape.ffn // layout.tp * layout.item
    again = layout.flash and layout.recompute == "selective"  # norms and activations, which are cheap
    kept = 3 if shape.gated and not again else 2
    dropout = norm // 2 if shape.biased else 0
    normed = 0 if again and layout.tp == 1 else _products_input(shape, layout)
    return norm + normed + kept * hidden + dropout


def expert_bytes(shape: ModelShape, layout: StepLayout) -> int:
    """Return what experts keep: rows as they came, hidden units, and what is sent back to be weighted."""
    experts = shape.experts
    assert experts is not None
    tokens = layout.positions // (layout.tp if layout.sequence_parallel else 1)
    rows = tokens * experts.active * layout.etp
    hidden = rows * experts.width // layout.etp * layout.item
    shared = 3 * layout.positions * experts.shared * experts.width // layout.tp * layout.item
    return 2 * tokens * shape.width * layout.item + 2 * rows * shape.width * layout.item + 3 * hidden + shared
