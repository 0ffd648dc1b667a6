"""What an operation on an axis of a mesh will make this rank send, by comm/base/wire.py."""

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import Array, is_narrow, on_device
from mpitrain.comm.base.wire import phases, sent_bytes, sent_messages
from mpitrain.comm.transports import messages, mpi_collectives, shared

TRANSPORTS: dict[object, str] = {messages: "messages", mpi_collectives: "collectives", shared: "shared"}


def predicted(operation: str, num_bytes: int, axis: Axis, x: Array, root: int = 0) -> tuple[int, int]:
    """Return messages and bytes of an operation with a buffer of `num_bytes`, started with `x`.

    root: of an operation that has one.
    """
    narrow = is_narrow(x)
    itemsize = x.dtype.itemsize
    levels = None
    if axis.near is not None and axis.far is not None:
        places = (axis.near.rank, axis.near.size), (axis.far.rank, axis.far.size)
        levels = phases(operation, num_bytes, *places, itemsize=itemsize, narrow=narrow, root=root)
    if levels is None:
        transport = TRANSPORTS[
            axis.one_level(x, pairs=operation.startswith("all_to_all"), num_bytes=num_bytes)
        ]
        return _sent(operation, num_bytes, axis, itemsize, transport, root, not on_device(x))
    total = [0, 0]
    for far, kind, length, width, of in levels:
        level = axis.far if far else axis.near
        assert level is not None  # or there are no phases
        by_messages = narrow and not far and kind == "reduce_scatter"
        module = messages if by_messages else level.by_size(length)
        sent = _sent(kind, length, level, width, TRANSPORTS[module], of, not on_device(x))
        for at, number in enumerate(sent):
            total[at] += number
    return total[0], total[1]


def _sent(
    operation: str, num_bytes: int, axis: Axis, itemsize: int, transport: str, root: int, in_rounds: bool
) -> tuple[int, int]:
    what = operation, num_bytes, axis.size, axis.rank
    return (
        sent_messages(*what, itemsize=itemsize, transport=transport, root=root, in_rounds=in_rounds),
        sent_bytes(*what, itemsize=itemsize, transport=transport, root=root),
    )
