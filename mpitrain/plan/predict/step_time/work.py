"""What one block, and the ends of a model, compute and send for one microbatch on one rank. Integers.

    Product(m, n, k)  C[m, n] = A[m, k] B[k, n], 2 m n k FLOPs
    AttentionCore     attention without its products: FLOPs of what is not masked, scores in bytes
    pass_bytes        read and written by norms, activations, sums: everything between products
    MessageVolume     operation, axis and bytes of its buffer (of all ranks together for all_gather,
                      of each for the others: comm/base/wire.py)

n positions of a microbatch (of this rank of cp), width D, H heads of C, K key-value heads, F hidden
units; tp divides H, K and F. Sequence parallelism (arXiv:2205.05198, section 4.2.2) gathers n D
before a product and scatters it after: as many bytes as the two all-reduces of Megatron-LM
(arXiv:1909.08053, section 3).
"""

from typing import NamedTuple

from mpitrain.plan.declared.published import Latent, ModelShape, RoutedExperts
from mpitrain.plan.declared.traffic import Traffic, communication, in_one
from mpitrain.plan.predict.step_time.layout import StepLayout


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


class AttentionCore(NamedTuple):
    """Attention of a microbatch on one rank: FLOPs of its forward, numbers of the scores, width of a head,
    keys that a query may see.
    """

    flops: int = 0
    scores: int = 0
    head_width: int = 128
    length: int = 2048


class PartWork(NamedTuple):
    """Forward of a part of the model.

    backward: what its backward for inputs sends.
    regathered: what that gathers again meanwhile; weight gradients alone need it.
    """

    products: tuple[Product, ...] = ()
    core: AttentionCore = AttentionCore()
    pass_bytes: int = 0
    kernels: int = 0
    forward: tuple[MessageVolume, ...] = ()
    backward: tuple[MessageVolume, ...] = ()
    regathered: tuple[MessageVolume, ...] = ()


def attention_work(shape: ModelShape, layout: StepLayout) -> PartWork:
    """Return the work of one block's attention."""
    n = layout.positions
    tp = layout.tp
    width = shape.width
    heads = shape.heads // tp
    kv_heads = max(1, shape.kv_heads // tp)
    if shape.latent is not None:
        products = _latent_products(shape, shape.latent, n, heads)
    else:
        features = (heads + 2 * kv_heads) * shape.head_width
        products = (Product(n, features, width), Product(n, width, heads * shape.head_width))
    seen = min(shape.window or layout.sequence, layout.sequence)
    pairs = n * (2 * seen - seen * seen // layout.sequence) // 2
    flops = 2 * pairs * shape.score_width() // tp
    core = AttentionCore(flops, n * layout.sequence * heads, shape.head_width, seen)
    rotated = 2 * n * (heads + kv_heads) * shape.head_width * layout.item
    stream = layout.stream_positions * width * layout.item
    passes = rotated + (4 if layout.fused else 8) * stream + shape.biased * 2 * stream
    forward, backward = _around(layout, n * width * layout.item)
    kernels = 10 if layout.fused else 16
    sent, returned = _context(shape, layout, n, kv_heads)
    again = () if shape.latent else _regathered(layout, n * width * layout.item)
    return PartWork(products, core, passes, kernels, sent + forward, backward + returned, again)


def _latent_products(shape: ModelShape, latent: Latent, n: int, heads: int) -> tuple[Product, ...]:
    q_rank, kv_rank, rotary, value = latent
    queries = heads * (shape.head_width + rotary)
    of_queries = (Product(n, q_rank, shape.width), Product(n, queries, q_rank)) if q_rank else ()
    return (
        *(of_queries or (Product(n, queries, shape.width),)),
        Product(n, kv_rank + rotary, shape.width),
        Product(n, heads * (shape.head_width + value), kv_rank),
        Product(n, shape.width, heads * value),
    )


def _around(
    layout: StepLayout, num_bytes: int
) -> tuple[tuple[MessageVolume, ...], tuple[MessageVolume, ...]]:
    """Return what tp sends around the products of a half of a block, forward and backward."""
    if layout.tp == 1:
        return (), ()
    names = ("gather", "scatter") if layout.sequence_parallel else ("copy", "sum")
    return _volumes(in_one(communication(name, "tp", num_bytes) for name in names))


def _regathered(layout: StepLayout, num_bytes: int) -> tuple[MessageVolume, ...]:
    """Return what a backward gathers again of half a block (arXiv:2205.05198, section 4.2.2)."""
    if not (layout.regathers and layout.can_regather):
        return ()
    return (MessageVolume("all_gather", "tp", num_bytes),)


def _volumes(traffic: Traffic) -> tuple[tuple[MessageVolume, ...], tuple[MessageVolume, ...]]:
    """Return what is declared (plan/declared/traffic.py) as volumes, forward and backward."""
    forward, backward = (
        tuple(MessageVolume(*started) for started in way) for way in (traffic.forward, traffic.backward)
    )
    return forward, backward


def _context(
    shape: ModelShape, layout: StepLayout, n: int, kv_heads: int
) -> tuple[tuple[MessageVolume, ...], tuple[MessageVolume, ...]]:
    """Return what cp sends, forward and backward, as plan/declared/traffic.py has it by kind.

    A ring shifts keys and values of the others, and in the backward their gradients.
    """
    if layout.cp == 1:
        return (), ()
    if layout.context == "ulysses":
        heads, spread = shape.heads // layout.tp, max(kv_heads, layout.cp)
        row = shape.head_width * n * layout.item
        sent = tuple(MessageVolume("all_to_all", "cp", count * row) for count in (heads + 2 * spread, heads))
        return sent, sent
    if layout.context == "gather":
        whole = 2 * kv_heads * shape.head_width * n * layout.cp * layout.item
        return (MessageVolume("all_gather", "cp", whole),), (MessageVolume("reduce_scatter", "cp", whole),)
    hop = 2 * kv_heads * shape.head_width * n * layout.item
    hops = layout.cp - 1
    return (MessageVolume("shift", "cp", hops * hop),), (MessageVolume("shift", "cp", 2 * hops * hop),)


def dense_work(shape: ModelShape, layout: StepLayout) -> PartWork:
    """Return the work of one dense feed-forward."""
    n = layout.positions
    hidden = shape.ffn // layout.tp
    opened = 2 if shape.gated else 1
    products = (Product(n, opened * hidden, shape.width), Product(n, shape.width, hidden))
    stream = layout.stream_positions * shape.width * layout.item
    activated = n * hidden * layout.item * (opened + 1) * (1 if layout.fused else 2)
    passes = activated + (5 if layout.fused else 9) * stream
    forward, backward = _around(layout, n * shape.width * layout.item)
    again = _regathered(layout, n * shape.width * layout.item)
    kernels = 6 if layout.fused else 10
    return PartWork(products, AttentionCore(), passes, kernels, forward, backward, again)


def expert_work(shape: ModelShape, layout: StepLayout, load: float = 1.0) -> PartWork:
    """Return the work of one block's experts on a rank that has `load` times the mean of rows.

    R = n active etp / tp rows come to a rank in the mean: tp ranks have n positions between them,
    and each row is on etp ranks.
    """
    experts = shape.experts
    assert experts is not None
    n = layout.positions
    tokens = n // layout.tp if layout.sequence_parallel else n
    sent_rows = tokens * experts.active * layout.etp
    rows = round(load * sent_rows)
    local = experts.count // layout.ep
    hidden = experts.width // layout.etp
    each = max(1, rows // local)
    products = [Product(each, 2 * hidden, shape.width, local), Product(each, shape.width, hidden, local)]
    products.append(Product(tokens, experts.count, shape.width, narrow=False))
    if experts.shared:
        shared = experts.shared * experts.width // layout.tp
        products += [Product(n, 2 * shared, shape.width), Product(n, shape.width, shared)]
    moved = (sent_rows + rows) * shape.width * layout.item  # permuted, and back with weights
    passes = (
        3 * moved
        + rows * hidden * layout.item * 3
        + 9 * tokens * shape.width * layout.item
        + 6 * tokens * experts.count * 4
    )
    sent = _dispatched(layout, experts, tokens * shape.width * layout.item, load)
    if layout.etp > 1:
        gathered = rows * shape.width * layout.item
        inside = (
            MessageVolume("all_gather", "etp", gathered),
            MessageVolume("reduce_scatter", "etp", gathered),
        )
        sent = (*sent[:1], *inside, *sent[1:])
    around = _around(layout, n * shape.width * layout.item) if experts.shared and layout.tp > 1 else ((), ())
    grouped = 2 * min(local, 8) + 24
    return PartWork(tuple(products), AttentionCore(), passes, grouped, sent + around[0], sent + around[1])


def _dispatched(
    layout: StepLayout, experts: RoutedExperts, once: int, load: float
) -> tuple[MessageVolume, ...]:
    """Return what experts' rows travel by: a copy for each expert, or every token to all ranks.

    once: bytes of each token's row. load: of the rank that receives most.
    """
    if layout.ep == 1:
        return ()
    if layout.dispatch == "allgather":
        whole = once * layout.ep
        return (MessageVolume("all_gather", "ep", whole), MessageVolume("reduce_scatter", "ep", whole))
    operation = "all_to_all_by_node" if layout.dispatch == "hierarchical" else "all_to_all"
    active = experts.active
    sent = MessageVolume(
        operation, "ep", round(load * active * once), active, experts.groups, experts.groups_active
    )
    return (sent, sent)


def _at_an_end(
    name: str, shape: ModelShape, layout: StepLayout
) -> tuple[tuple[MessageVolume, ...], tuple[MessageVolume, ...]]:
    """Return what tp sends at an end of the model, forward and backward. name: of the communication."""
    if layout.tp == 1:
        return (), ()
    return _volumes(communication(name, "tp", layout.positions * shape.width * layout.item))


def head_work(shape: ModelShape, layout: StepLayout) -> PartWork:
    """Return the work of the head and the loss: logits in two passes of 16 bits and some of fp32."""
    n = layout.positions
    vocab = -(-shape.vocab // layout.tp)
    passes = n * vocab * (8 if layout.fused else 20)
    sent, back = _at_an_end("gather", shape, layout)
    return PartWork((Product(n, vocab, shape.width, narrow=False),), AttentionCore(), passes, 12, sent, back)


def embedding_work(shape: ModelShape, layout: StepLayout) -> PartWork:
    """Return the work of the embedding: a lookup, and its sum over tp."""
    sent, back = _at_an_end("scatter", shape, layout)
    stream = layout.stream_positions * shape.width * layout.item
    return PartWork((), AttentionCore(), 4 * stream, 4, sent, back)
