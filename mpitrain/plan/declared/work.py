"""What a layer computes, sends and keeps for one microbatch on one rank, for Layer.work. Integers.

    Product(m, n, k)  C[m, n] = A[m, k] B[k, n], 2 m n k FLOPs
    AttentionCore     attention without its products: FLOPs of what is not masked, scores in bytes
    pass_bytes        read and written by norms, activations, sums: everything between products
    MessageVolume     operation, axis and bytes of its buffer (of all ranks together for all_gather,
                      of each for the others: comm/base/wire.py)

n positions of a microbatch (of this rank of cp), width D, H heads of C, K key-value heads, F hidden
units; tp divides H, K and F. Sequence parallelism (arXiv:2205.05198, section 4.2.2) gathers n D
before a product and scatters it after: as many bytes as the two all-reduces of Megatron-LM
(arXiv:1909.08053, section 3). What is kept is by equations 1 to 4 of arXiv:2205.05198, from a
layer's own widths.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain.plan.declared.parameters import EXPERT, ROWS, Spec
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import Traffic, attention, communication, in_one


class Product(NamedTuple):
    """C[m, n] = A[m, k] B[k, n], `number` times. narrow: in fp8, where the layout computes in it."""

    m: int
    n: int
    k: int
    number: int = 1
    narrow: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.number


class MessageVolume(NamedTuple):
    """copies: of each row in it, one for each expert of a token. These are in groups_active of all groups."""

    operation: str
    axis: str
    num_bytes: int
    copies: int = 1
    groups: int = 1
    groups_active: int = 1


Volumes = tuple[MessageVolume, ...]


class AttentionCore(NamedTuple):
    """Attention of a microbatch on one rank. flops: of its forward. length: keys that a query may see."""

    flops: int = 0
    scores: int = 0
    head_width: int = 128
    length: int = 2048


class PartWork(NamedTuple):
    """Forward of a part of the model.

    backward: what its backward for inputs sends.
    regathered: what that gathers again meanwhile; weight gradients alone need it.
    kept: bytes that its forward leaves for the backward, unless all of it is recomputed.
    awaited: kernels, each way, that a GPU's host launches after it has waited for the GPU: nothing
    hides them.
    """

    products: tuple[Product, ...] = ()
    core: AttentionCore = AttentionCore()
    pass_bytes: int = 0
    kernels: int = 0
    forward: Volumes = ()
    backward: Volumes = ()
    regathered: Volumes = ()
    kept: int = 0
    awaited: int = 0

    @property
    def product_flops(self) -> int:
        return sum(product.flops for product in self.products)


class HeadSizes(NamedTuple):
    """Heads of a rank. width: of queries and keys; value_width: of values and results."""

    queries: int
    kv: int
    width: int
    value_width: int

    @property
    def score_width(self) -> int:
        """Features of all heads that scores and results are made of, together."""
        return self.queries * (self.width + self.value_width)


def attention_work(
    layout: StepLayout,
    width: int,
    products: tuple[Product, ...],
    heads: HeadSizes,
    *,
    window: int = 0,
    biased: bool = False,
    dropped: bool = False,
    gathered_width: int = 0,
) -> PartWork:
    """Return the work of attention with these products. width: of the residual stream.

    gathered_width: of what tp gathers before attention, where that isn't the layer's input, which a
    backward could gather again. dropped: what is added to the stream has dropout.
    """
    n = layout.positions
    seen = min(window or layout.sequence, layout.sequence)
    pairs = n * (2 * seen - seen * seen // layout.sequence) // 2
    core = AttentionCore(
        2 * pairs * heads.score_width, n * layout.sequence * heads.queries, heads.width, seen
    )
    stream = stream_bytes(layout, width)
    rotated = 2 * n * (heads.queries + heads.kv) * heads.width * layout.item
    passes = rotated + (4 if layout.fused else 8) * stream + biased * 2 * stream
    whole = n * width * layout.item
    forward, backward = around(layout, n * (gathered_width or width) * layout.item, whole)
    sent, returned = _over_cp(layout, heads)
    again = () if gathered_width else regathered(layout, whole)
    scores = 0 if layout.flash or layout.recompute == "selective" else 5 * core.scores
    qkv = n * layout.item * heads.width * (2 * heads.queries + 2 * heads.kv) + 4 * n * heads.queries
    norm = normed_bytes(layout, width)
    kept = norm + input_bytes(layout, width) + qkv + scores + dropped * (norm // 2)
    kernels = 10 if layout.fused else 16
    return PartWork(products, core, passes, kernels, sent + forward, backward + returned, again, kept)


def feed_forward_work(
    layout: StepLayout, width: int, ffn: int, *, gated: bool, biased: bool = False, dropped: bool = False
) -> PartWork:
    """Return the work of a dense feed-forward, around the residual stream of a width."""
    n = layout.positions
    hidden = ffn // layout.tp
    opened = 2 if gated else 1
    products = (Product(n, opened * hidden, width), Product(n, width, hidden))
    activated = n * hidden * layout.item * (opened + 1) * (1 if layout.fused else 2)
    passes = activated + ((5 if layout.fused else 9) + 2 * biased) * stream_bytes(layout, width)
    whole = n * width * layout.item
    forward, backward = around(layout, whole, whole)
    norm = normed_bytes(layout, width)
    cheap_again = layout.flash and layout.recompute == "selective"  # norms and activations
    units = (3 if gated and not cheap_again else 2) * (n * ffn // layout.tp * layout.item)
    normed = 0 if cheap_again and layout.tp == 1 else input_bytes(layout, width)
    kept = norm + normed + units + dropped * (norm // 2)
    kernels = 6 if layout.fused else 10
    again = regathered(layout, whole)
    return PartWork(products, AttentionCore(), passes, kernels, forward, backward, again, kept)


def with_norm(work: PartWork, layout: StepLayout, width: int) -> PartWork:
    """Return work with one more norm of the residual stream, which is read, written and kept."""
    stream = stream_bytes(layout, width)
    passes = (2 if layout.fused else 4) * stream
    kept = 0 if layout.recompute == "selective" else stream
    return work._replace(
        pass_bytes=work.pass_bytes + passes,
        kernels=work.kernels + (1 if layout.fused else 3),
        kept=work.kept + kept,
    )


def together(works: Sequence[PartWork]) -> PartWork:
    """Return what several parts do, one after the other. Their attention has the sizes of the first."""
    cores = [work.core for work in works if work.core.flops] or [AttentionCore()]
    core = cores[0]._replace(flops=sum(one.flops for one in cores), scores=sum(one.scores for one in cores))
    joined: dict[str, Any] = {
        name: tuple(item for work in works for item in getattr(work, name))
        for name in ("products", "forward", "backward", "regathered")
    }
    for name in ("pass_bytes", "kernels", "kept", "awaited"):
        joined[name] = sum(getattr(work, name) for work in works)
    return PartWork(core=core, **joined)


def work_by_parameters(specs: Sequence[Spec], core_flops: float, layout: StepLayout, width: int) -> PartWork:
    """Return the work of a layer that declares none: products with its matrices, the rest as attention.

    core_flops: of a token in a training step, beyond those of products. width: of the residual stream.
    """
    n = layout.positions
    products = []
    for spec in specs:
        if spec.group == "matrix" and len(spec.shape) > 1:
            rows, columns = spec.shape[-2:]
            tp = 1 if spec.divided is None or spec.domain == EXPERT else layout.tp
            by_rows = tp if spec.divided == ROWS else 1
            met = max(1, round(n * spec.active * spec.numel / (rows * columns)))
            products.append(Product(met, rows // by_rows, columns // (tp // by_rows)))
    core = AttentionCore(round(core_flops / 3 * n / layout.tp), length=layout.sequence)
    stream = stream_bytes(layout, width)
    whole = n * width * layout.item
    forward, backward = around(layout, whole, whole)
    kept = sum(n * product.k * layout.item for product in products)
    return PartWork(tuple(products), core, 8 * stream, 16, forward, backward, (), kept)


# ---------------------------------------------------------------- bytes


def stream_bytes(layout: StepLayout, width: int) -> int:
    """Return the bytes of one tensor of the residual stream on a rank."""
    return layout.stream_positions * width * layout.item


def normed_bytes(layout: StepLayout, width: int) -> int:
    """Return the bytes of a norm's input, as it is kept."""
    return (layout.stream_positions if layout.sequence_parallel else layout.positions) * width * layout.item


def input_bytes(layout: StepLayout, width: int) -> int:
    """Return the bytes of the input of a layer's first products, as they are kept."""
    divided = layout.sequence_parallel and layout.regathers
    return (layout.stream_positions if divided else layout.positions) * width * layout.item


# ---------------------------------------------------------------- messages


def around(layout: StepLayout, gathered: int, scattered: int) -> tuple[Volumes, Volumes]:
    """Return what tp sends around the products of half a block, forward and backward. In bytes."""
    if layout.tp == 1:
        return (), ()
    before, after = ("gather", "scatter") if layout.sequence_parallel else ("copy", "sum")
    return _volumes(in_one((communication(before, gathered), communication(after, scattered))))


def at_an_end(name: str, layout: StepLayout, width: int) -> tuple[Volumes, Volumes]:
    """Return what tp sends at an end of the model, forward and backward. name: of the communication."""
    if layout.tp == 1:
        return (), ()
    return _volumes(communication(name, layout.positions * width * layout.item))


def regathered(layout: StepLayout, num_bytes: int) -> Volumes:
    """Return what a backward gathers again of half a block (arXiv:2205.05198, section 4.2.2)."""
    if not (layout.regathers and layout.can_regather):
        return ()
    return (MessageVolume("all_gather", "tp", num_bytes),)


def _volumes(traffic: Traffic) -> tuple[Volumes, Volumes]:
    forward, backward = (
        tuple(MessageVolume(*started) for started in way) for way in (traffic.forward, traffic.backward)
    )
    return forward, backward


def _over_cp(layout: StepLayout, heads: HeadSizes) -> tuple[Volumes, Volumes]:
    if layout.cp == 1:
        return (), ()
    own = {"heads": heads.queries, "kv_heads": heads.kv, "head_width": heads.width, "itemsize": layout.item}
    whole = layout.positions * layout.cp
    return _volumes(attention(layout.context, "cp", layout.cp, batch=1, sequence=whole, **own))
