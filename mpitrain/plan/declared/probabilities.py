"""Attention's probabilities in bf16 on a CPU: whether they are kept for the backward, and how many they are.

Integers only.

kernels/attention_cpu_16bit.py makes them again in the backward, or keeps them
(benchmarks/attention.py has both). They grow with the square of a sequence, everything else with
its length.
"""

ROWS = 128  # queries whose probabilities are made at once
LONGEST = 512  # positions of a sequence
# of the head, made fp32 at once; on a device three times 64 MiB
LOGITS = 2**17
LOGITS_ON_A_DEVICE = 2**24
ADDED_AT_ONCE = 2**22  # numbers of a weight's gradient that are made beside their sum
SCORES = 2**18  # that are made at once, if they are of more than one key-value head


def are_kept(length: int, width: int) -> bool:
    """Return whether they are: while those of a head take at most three times as much as its queries.

    width: of a head.
    """
    return length <= min(4 * width, LONGEST)


def count(length: int) -> int:
    """Return how many a head has: queries some at a time, which see the keys up to the last of them."""
    return sum((end - begin) * end for begin in range(0, length, ROWS) for end in [min(begin + ROWS, length)])


def piece(batch: int, heads: int, kv_heads: int, length: int) -> int:
    """Return how many are made at once at most, of some queries of one key-value head at least."""
    rows = min(ROWS, length) * (heads // kv_heads) * length
    return rows * min(max(1, SCORES // rows), batch * kv_heads)
