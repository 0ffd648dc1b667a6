"""What is started, before it is: operations in their order, with the axis and the bytes of the buffer.

Integers and names only. Layer.traffic (layer.py) says it for a layer, by layer_traffic.py.

What each rank sends of such a buffer says comm/base/wire.py. Context parallelism, with c ranks, t =
T/c positions on each, B sequences, H query heads, K key-value heads of width C, w bytes per number:

    ring, zigzag  forward   c-1 shifts of keys and values             2 B K t C w  each
                  backward  c-1 of these, and c-1 of their gradients  2 B K t C max(w, 4)
    gather        forward   all-gather of keys and values             2 B K T C w
                  backward  reduce-scatter of their gradients         the same
    ulysses       forward   all-to-all of q, k and v                  B (H + 2 K') t C w
                            all-to-all of the output                  B H t C w
                  backward  all-to-all of the gradients               the same, in reverse

K' = max(K, c).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Started(NamedTuple):
    """One operation. num_bytes: of its buffer, as comm/base/wire.py counts it."""

    operation: str  # as mpitrain.comm.collectives calls it; or send, receive
    axis: str
    num_bytes: int


# communications of a layer (parallel/communication.py): what each starts, and what its backward is
OPERATION = {
    "sum": "all_reduce",
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "exchange": "all_to_all",
}
ADJOINT = {"copy": "sum", "sum": "copy", "gather": "scatter", "scatter": "gather", "exchange": "exchange"}


@dataclass(frozen=True)
class Traffic:
    """What an item of a block starts in its forward, and in its backward for inputs; each in order.

    has_weights: its backward hands over weight gradients, if only of some.
    """

    forward: tuple[Started, ...] = ()
    backward: tuple[Started, ...] = ()
    has_weights: bool = True


LOCAL = Traffic()  # of a local segment


def in_one(items: Iterable[Traffic]) -> Traffic:
    """Return what one item starts that runs these, one after the other in the forward."""
    items = tuple(items)
    forward = tuple(started for item in items for started in item.forward)
    backward = tuple(started for item in reversed(items) for started in item.backward)
    return Traffic(forward, backward)


def communication(name: str, num_bytes: int) -> Traffic:
    """Return what a communication of tp starts. num_bytes: of the longer one of its two buffers."""
    forward, backward = (
        (Started(OPERATION[way], "tp", num_bytes),) if way in OPERATION else ()
        for way in (name, ADJOINT[name])
    )
    return Traffic(forward, backward, has_weights=False)


def chunked(axis: str, size: int, *, gathered: int = 0, scattered: int = 0) -> Traffic:
    """Return what an item starts that computes chunk by chunk (parallel/async_tp.py).

    Both directions send the same, since gather and scatter change places.
    gathered, scattered: bytes of a chunk before the item, and after it; 0: none travels.
    """
    going, coming = (
        (size - 1) * (Started("shift", axis, num_bytes),) if num_bytes else ()
        for num_bytes in (gathered, scattered)
    )
    return Traffic(going + coming, coming + going)


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

    heads, kv_heads: those of this rank, so divided by tp. sequence: the whole.
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
