"""How many rows of an expert are multiplied at once on a CPU, in 16 bits: one of a few numbers.

oneDNN keeps a kernel of each shape that it has multiplied, and each microbatch brings an expert
another number of rows (kernels/grouped.py).
"""

STEP = 32  # rows: groups are filled up to a multiple of it at least


def padded(num_rows: int) -> int:
    """Return how many rows stand for so many: multiples of 32, from 256 on one of four in each octave."""
    step = max(STEP, 1 << max(0, num_rows.bit_length() - 3))
    return -(-num_rows // step) * step


def num_lengths(fewest: int, most: int) -> int:
    """Return how many numbers of rows stand for all from `fewest` to `most`."""
    count, length = 1, padded(max(1, fewest))
    while length < most:
        count, length = count + 1, padded(length + 1)
    return count
