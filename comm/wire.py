"""What an operation makes a rank send: formulas, in integers. What is really posted is counted in comm/account.py.

n ranks, a buffer of N bytes (of all ranks together for all_gather, of each for the others), S of them this rank's shard (grid.split):

    reduce_scatter   N - S            N (n-1)/n, if n divides the buffer
    all_gather       S (n-1)          the same
    all_reduce       the two together, 2 N (n-1)/n; `messages` up to SMALL bytes: N (n-1), everything to everyone in log2(n) rounds
    all_to_all       N (n-1)/n        parts of equal size; all_to_all_v: N, the own part isn't counted
    shift, send      N                receive, barrier: 0

`shared` reads instead, as many bytes: S (n-1) to reduce, N - S to gather. It exchanges and shifts by messages.
"""

from mpitrain.comm.grid import split

SMALL = 1 << 13  # bytes up to which an all-reduce of `messages` gathers everything everywhere: one phase of log2(size) messages


def sent_bytes(operation: str, num_bytes: int, size: int, rank: int = 0, *, itemsize: int = 1, transport: str = "messages") -> int:
    """Return the bytes that coordinate `rank` of an axis of `size` ranks sends, or reads, for a buffer of `num_bytes`.

    itemsize: bytes per element, which no shard divides.
    """
    if operation in ("shift", "send", "all_to_all_v"):
        return num_bytes * (size > 1)
    if operation in ("receive", "barrier"):
        return 0
    if operation == "all_to_all":
        return num_bytes // size * (size - 1)
    if operation == "all_reduce" and transport == "messages" and num_bytes <= SMALL:
        return num_bytes * (size - 1)
    begin, end = split(num_bytes // itemsize, size)[rank : rank + 2]
    shard = (end - begin) * itemsize
    to_reduce, to_gather = num_bytes - shard, shard * (size - 1)
    if transport == "shared":
        to_reduce, to_gather = to_gather, to_reduce
    return {"reduce_scatter": to_reduce, "all_gather": to_gather, "all_reduce": to_reduce + to_gather}[operation]
