"""What is started, before it is: operations in their order, with the axis and the bytes of the buffer.

Integers and names only.

What each rank sends of such a buffer says comm/base/wire.py. Context parallelism, with c ranks, t = T/c
positions on each, B sequences, H query heads, K key-value heads of width C, w bytes per number:

    ring, zigzag  forward   c-1 shifts of keys and values             2 B K t C w  each
                  backward  c-1 of these, and c-1 of their gradients  2 B K t C max(w, 4)
    gather        forward   all-gather of keys and values             2 B K T C w
                  backward  reduce-scatter of their gradients         the same
    ulysses       forward   all-to-all of q, k and v                  B (H + 2 K') t C w
                            all-to-all of the output                  B H t C w
                  backward  all-to-all of the gradients               the same, in reverse

K' = max(K, c).
"""

from dataclasses import dataclass
from typing import NamedTuple


class Started(NamedTuple):
    """One operation. num_bytes: of its buffer, as comm/base/wire.py counts it."""

    operation: str  # as mpitrain.comm.collectives calls it; or send, receive
    axis: str
    num_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What an item of a block starts in its forward, and in its backward for inputs; each in order."""

    forward: tuple[Started, ...] = ()
    backward: tuple[Started, ...] = ()

    def then(self, following: "Traffic") -> "Traffic":
        """Return what both start, the other one coming after this one in the forward, and before it
        in the backward.
        """
        return Traffic(self.forward + following.forward, following.backward + self.backward)


def attention(
    kind: str,
    axis: str,
    size: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    sequence: int,
    itemsize: int,
) -> Traffic:
    """Return what one attention of `kind` starts on every rank of an axis of `size` ranks.

    batch: sequences.
    heads, kv_heads: those of this rank, so divided by tp.
    sequence: the whole.
    itemsize: bytes per number.
    """
    elements = batch * sequence // size * head_width  # of one head
    kv = 2 * kv_heads * elements
    if kind in ("ring", "zigzag"):
        hop, hop_of_grads = (Started("shift", axis, kv * width) for width in (itemsize, max(itemsize, 4)))
        backward = (hop, *(size - 2) * (hop, hop_of_grads), hop_of_grads) if size > 1 else ()
        return Traffic((size - 1) * (hop,), backward)
    if kind == "gather":
        num_bytes = size * kv * itemsize
        return Traffic(
            (Started("all_gather", axis, num_bytes),), (Started("reduce_scatter", axis, num_bytes),)
        )
    counts = (heads + 2 * max(kv_heads, size), heads)
    packed, out = (Started("all_to_all", axis, count * elements * itemsize) for count in counts)
    return Traffic((packed, out), (out, packed))
