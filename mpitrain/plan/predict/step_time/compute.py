"""Seconds that a rank computes: products by shape, attention by kernel, passes over memory, launches.

Products reach the share of their rate that tiles.py says.
"""

import math
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import item_of
from mpitrain.plan.declared.work import AttentionCore, PartWork, Product
from mpitrain.plan.predict.step_time.machine import GROUPED, MachineRates
from mpitrain.plan.predict.step_time.tiles import OF_CPU, OF_GPU, share_of

# passes over memory that casts to fp8 add to a product's operands, times their bytes: 2.0 fits the step of
# llama3.2-1b on an H100 (docs/guides/gpus.md)
FP8_OVERHEAD = 2.0
SCORE_PASSES_FORWARD = 5.0  # bytes are read or written of each score, 16 bits each, without flash
SCORE_PASSES_BACKWARD = 6.0
# on a CPU: functions between products are operations of torch, which widen 16 bits to 32
PASSES_ON_CPU = 2.3
ITEM_ON_CPU = 4
# torch's and Python's time for a kernel of PartWork, over that of one small operation; in 16 bits attention
# is many more: quickstart on Zen 5, 2026-11-26
CALLS = 6.0
CALLS_16 = 10.0
# keys that attention of a CPU takes at a time, masked or not (kvSplitSize in torch's
# ATen/native/cpu/FlashAttentionKernel.cpp); kernels/attention_cpu_16bit.py, in 16 bits, takes fewer
KEYS_AT_ONCE = 512.0
KEYS_AT_ONCE_16 = 128.0
MEASURED_LENGTH, MEASURED_WIDTH = 512, 128  # of `bench machine` on a CPU
SHORT_LENGTH, SHORT_WIDTH = 128, 64  # and of its short sequences
LENGTH_ON_GPU = 2048  # of `bench machine` on a GPU, and of the figures of jobs/machines/
# positions at which a flash kernel has half of its rate: 512 to 16,384 causal ones on an H100,
# width 128 (arXiv:2407.08608, figure 5), of flash attention 2 and 3 and of cuDNN
HALF_LENGTH = 300.0


def product_seconds(product: Product, machine: MachineRates, dtype: str) -> float:
    """Return the seconds of a product: the longer of computing and reading it; none of an empty one."""
    if not product.flops:
        return 0.0
    m, n, k = product.m, product.n, product.k
    narrow = dtype == "fp8" and product.narrow and "fp8" in machine.products
    kind = dtype if narrow or (dtype != "fp8" and dtype in machine.products) else other_type(machine)
    if product.number > 1:  # of experts, a CPU's by another library (kernels/grouped.py)
        kind = kind + GROUPED if kind + GROUPED in machine.products else kind
    tiles = OF_GPU if machine.on_gpu else machine.tiles.get(kind, OF_CPU)
    rate = machine.products[kind] * share_of(m, n, k, tiles)
    moved = product.number * (m * k + k * n + m * n) * item_of(dtype)
    seconds = max(product.flops / rate, moved / machine.memory_bandwidth)
    casts = FP8_OVERHEAD * product.number * (m * k * 3 + k * n) / machine.memory_bandwidth if narrow else 0.0
    return seconds + casts + machine.launch_s * (0.2 if machine.on_gpu else 1.0) * product.number


def other_type(machine: MachineRates) -> str:
    """Return the type of numbers whose rate stands for that of types without one."""
    return "bf16" if "bf16" in machine.products else next(iter(machine.products))


def core_seconds(
    core: AttentionCore, machine: MachineRates, flash: bool, backward: bool = False, dtype: str = "bf16"
) -> float:
    """Return the seconds of attention proper: of a flash kernel, or of products and passes over scores.

    The backward of a flash kernel has 2.5 times the FLOPs (arXiv:2205.14135, section 3). A CPU's
    rates are those of the kernel that it takes, with scores or without.
    """
    if not core.flops:
        return 0.0
    rate = _rate_of_attention(core, machine, backward, dtype)
    if flash or not machine.on_gpu:
        return (2.5 if backward else 1.0) * core.flops / rate
    passes = SCORE_PASSES_BACKWARD if backward else SCORE_PASSES_FORWARD
    products = 2 * core.flops * (2 if backward else 1) / (0.5 * machine.products[other_type(machine)])
    return products + passes * 2 * core.scores * item_of(dtype) / machine.memory_bandwidth


def _rate_of_attention(core: AttentionCore, machine: MachineRates, backward: bool, dtype: str) -> float:
    """Return FLOP/s of attention by width of heads, length of a sequence and type of numbers."""
    if not machine.on_gpu:
        return _rate_on_a_cpu(core, machine, backward, dtype)
    rate = machine.attention_backward if backward else machine.attention_forward
    if item_of(dtype) > 2 and dtype in machine.products:
        # flash kernels have 16 bits only (Dao-AILab/flash-attention, README); others are taken to reach
        # as much of their products' rate
        rate *= machine.products[dtype] / machine.products[other_type(machine)]
    if core.head_width < 128:
        rate *= machine.attention_narrow
    return rate * _saturated(core.length, LENGTH_ON_GPU, HALF_LENGTH)


def _rate_on_a_cpu(core: AttentionCore, machine: MachineRates, backward: bool, dtype: str) -> float:
    way, keys = "backward" if backward else "forward", KEYS_AT_ONCE
    if item_of(dtype) == 2 and machine.attention_forward_16 > 0:
        way, keys = f"{way}_16", KEYS_AT_ONCE_16
    rate: float = getattr(machine, f"attention_{way}")
    size = core.length * core.head_width / (MEASURED_LENGTH * MEASURED_WIDTH)
    if way in machine.attention_short and size < 1:
        # the power of length times a head's width by which attention's rate falls
        sizes = MEASURED_LENGTH * MEASURED_WIDTH / (SHORT_LENGTH * SHORT_WIDTH)
        exponent = max(0.0, math.log(rate / machine.attention_short[way]) / math.log(sizes))
        rate *= math.pow(size, exponent)
    else:
        rate *= _saturated(core.length, MEASURED_LENGTH, keys)
        rate *= _saturated(core.head_width, MEASURED_WIDTH, 64.0)
    if dtype == "fp64" and {"fp32", "fp64"} <= machine.products.keys():
        rate *= machine.products["fp64"] / machine.products["fp32"]
    return rate


def _saturated(size: float, measured: float, half: float) -> float:
    """Return a rate that is half of its most at `half`, over that at the size that was measured."""
    return size / (size + half) * (measured + half) / measured


class Seconds(NamedTuple):
    """Of a part of the model: forward, backward for inputs, backward for weights.

    core: attention proper of the forward, which selective recomputation repeats without flash.
    under_forward, under_backward: attention that a ring of cp travels under, and what it waits for
    launches.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    core: float = 0.0
    under_forward: float = 0.0
    under_backward: float = 0.0

    def plus(self, other: "Seconds") -> "Seconds":
        return Seconds(*(a + b for a, b in zip(self, other)))


def seconds_of(work: PartWork, machine: MachineRates, dtype: str, flash: bool) -> Seconds:
    """Return what a part computes, in seconds; never less than its kernels take to be launched."""
    of_inputs = [each._replace(n=each.k, k=each.n) for each in work.products]
    of_weights = [each._replace(m=each.n, n=each.k, k=each.m) for each in work.products]
    forward, inputs, weights = (
        sum(product_seconds(each, machine, dtype) for each in products)
        for products in (work.products, of_inputs, of_weights)
    )
    weights += sum(accumulated_seconds(each, machine, dtype) for each in work.products)
    passes = pass_seconds(work, machine, dtype)
    forward += passes
    inputs += 1.5 * passes
    core = core_seconds(work.core, machine, flash, dtype=dtype)
    core_backward = core_seconds(work.core, machine, flash, True, dtype)
    launched = work.kernels * machine.launch_s
    if not machine.on_gpu:  # the host computes, and calls
        calls = (CALLS_16 if item_of(dtype) == 2 else CALLS) * launched
        return Seconds(
            forward + core + calls, inputs + core_backward + calls, weights, core, core, core_backward
        )
    awaited = work.awaited * machine.launch_s
    return Seconds(
        max(forward + core, launched) + awaited,
        max(inputs + core_backward, launched) + awaited,
        weights,
        core,
        max(core, launched - forward),
        max(core_backward, launched - inputs),
    )


def pass_seconds(work: PartWork, machine: MachineRates, dtype: str) -> float:
    """Return the seconds of what is between products of a forward."""
    if machine.on_gpu:
        return work.pass_bytes / machine.memory_bandwidth
    item = item_of(dtype)
    rate = machine.memory_passes or machine.memory_bandwidth / PASSES_ON_CPU
    return max(item, ITEM_ON_CPU) / item * work.pass_bytes / rate


def accumulated_seconds(product: Product, machine: MachineRates, dtype: str) -> float:
    """Return the seconds in which a CPU adds a product to gradients in memory, for each microbatch anew.

    `bench machine` adds to some that caches hold. In 16 bits the product is written and read, too. A GPU's
    rates were fitted to published steps.
    """
    if machine.on_gpu:
        return 0.0
    item = item_of(dtype)
    exact = max(item, ITEM_ON_CPU)
    num_bytes = 2 * exact + (2 * item if item < exact else 0)
    return product.number * product.k * product.n * num_bytes / machine.memory_bandwidth
