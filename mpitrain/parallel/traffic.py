"""What context parallelism sends: the operations of one attention in the order in which they are started. Integers only.

c ranks, t = T/c positions on each, B sequences, H query heads, K key-value heads of width C, w bytes per number:

    ring, zigzag   forward   c-1 shifts of keys and values                    2 B K t C w  each
                   backward  c-1 of these, and c-1 of their gradients         2 B K t C max(w, 4)
    gather         forward   all-gather of keys and values                    2 B K t C w (c-1)
                   backward  reduce-scatter of their gradients                the same
    ulysses        forward   all-to-all of q, k and v; of the output          B (H + 2 K') t C w (c-1)/c;  B H t C w (c-1)/c
                   backward  all-to-all of the output's gradient; of theirs   the same, in reverse       K' = max(K, c)
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sent:
    """One operation; `num_bytes` is what each rank sends to others, its own part not counted."""

    direction: str  # forward or backward
    operation: str  # as mpitrain.comm.collectives calls it
    num_bytes: int


def traffic(kind: str, size: int, *, batch: int, heads: int, kv_heads: int, head_width: int, sequence: int, itemsize: int) -> list[Sent]:
    """Return what one attention of `kind` sends, forward and backward, on every rank of an axis of `size` ranks.

    batch: sequences.  heads, kv_heads: those of this rank, so divided by tp.  sequence: the whole.  itemsize: bytes per number.
    """
    elements = batch * sequence // size * head_width  # of one head
    kv = 2 * kv_heads * elements
    if kind in ("ring", "zigzag"):
        hop, hop_of_grads = (Sent("backward", "shift", kv * width) for width in (itemsize, max(itemsize, 4)))
        backward = [hop] + [hop, hop_of_grads] * (size - 2) + [hop_of_grads]
        return [Sent("forward", "shift", hop.num_bytes)] * (size - 1) + (backward if size > 1 else [])
    if kind == "gather":
        num_bytes = kv * itemsize * (size - 1)
        return [Sent("forward", "all_gather", num_bytes), Sent("backward", "reduce_scatter", num_bytes)]
    per_head = elements * itemsize
    packed, out = ((count * per_head) // size * (size - 1) for count in (heads + 2 * max(kv_heads, size), heads))
    return [Sent(direction, "all_to_all", n) for direction, n in zip(2 * ["forward"] + 2 * ["backward"], (packed, out, out, packed))]
