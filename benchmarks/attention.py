"""Attention on a CPU, piece by piece against torch's own, both directions, as ratios within one run.

By kernels/attention_cpu_16bit.py; in fp32 where MKL is slow by attention_cpu_fp32.py, of which the
lengths from where on it is taken are printed.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--turns 20]

They take turns; the table has the median of each in ms of this thread's processor time, and how
many times as long torch's needs. The backward in 16 bits makes the probabilities again; where a
layer keeps them, the last column has its time with those.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from mpitrain.kernels import attention_cpu_16bit, attention_cpu_fp32
from mpitrain.kernels.processor import mkl_is_slow

SHAPES = [(6, 2, 64), (8, 8, 64), (8, 2, 128)]  # query heads, key-value heads, width
LENGTHS = (128, 256, 512, 1024, 2048)
aten = torch.ops.aten


def timed(turns: int, *functions) -> list[float]:
    """Return the median time of each function in ms."""
    found = [[] for _ in functions]
    for turn in range(turns + 2):
        for times, function in zip(found, functions):
            begin = time.thread_time()
            function()
            if turn >= 2:
                times.append(1e3 * (time.thread_time() - begin))
    return [statistics.median(times) for times in found]


def row(dtype: torch.dtype, heads: int, kv_heads: int, width: int, length: int, turns: int) -> str:
    """Time one shape, and return its line of the table."""
    q, grad = (torch.randn(1, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, length, kv_heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    there = partial(attention_cpu_16bit.attend, q, k, v)
    back = partial(attention_cpu_16bit.attend_backward, grad, q, k, v)
    if dtype == torch.float32 and mkl_is_slow():
        there = partial(attention_cpu_fp32.attend, q, k, v, True)
        back = partial(attention_cpu_fp32.attend_backward, grad, q, k, v, out, lse, True)
    forward = timed(
        turns, there, lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    )
    ways = [
        back,
        lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True),
    ]
    if attention_cpu_16bit.fits(q) and attention_cpu_16bit.keeps(q, None):
        made = attention_cpu_16bit.attend(q, k, v, keep=True)[1]
        ways.append(lambda: attention_cpu_16bit.attend_backward(grad, q, k, v, kept=made))
    *backward, kept = timed(turns, *ways) if len(ways) == 3 else (*timed(turns, *ways), None)
    what = f"{str(dtype).removeprefix('torch.')}, {heads}/{kv_heads} heads of {width}, {length:5}"
    times = (f"{ours:8.2f}  {theirs:8.2f}  {theirs / ours:5.2f}" for ours, theirs in (forward, backward))
    notes = "  taken" * attention_cpu_fp32.fits(q, k) + (f"  kept {kept:.2f}" if kept else "")
    return f"{what:36}" + "    ".join(times) + notes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    print(f"{'tokens':>36}" + 2 * "    ours   torch's  ratio    ")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in SHAPES:
            for length in LENGTHS:
                print(row(dtype, *shape, length, turns), flush=True)


if __name__ == "__main__":
    main()
