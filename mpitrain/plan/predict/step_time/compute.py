"""Seconds that a rank computes: products by shape, attention by kernel, passes over memory, launches.

A product reaches its sustained rate only if it is large and aligned. With sides m, n, k its rate is
that times m / (m + ROWS) n / (n + ROWS) k / (k + DEPTH): what tiles at the edges, waves and the
beginning of a product lose (the shape of fig. 5 of arXiv:2401.14489). Sides that no 64 divides lose
a quarter, heads that no 8 divides as much (arXiv:2401.14489, section 5).
"""

from typing import NamedTuple

from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.work import ITEM, AttentionCore, PartWork, Product

ROWS = 128.0
DEPTH = 64.0
UNALIGNED = 0.75
# passes over memory that casts to fp8 add to a product's operands, times their bytes: 2.0 fits the step of
# llama3.2-1b on an H100 (docs/guides/gpus.md)
FP8_OVERHEAD = 2.0
SCORE_PASSES_FORWARD = 5.0  # bytes are read or written of each score, 16 bits each, without flash
SCORE_PASSES_BACKWARD = 6.0


def shape_share(m: float, n: float, k: float) -> float:
    """Return the share of the sustained rate that a product of these sides reaches."""
    share = m / (m + ROWS) * n / (n + ROWS) * k / (k + DEPTH)
    return share * UNALIGNED if n % 64 or k % 64 else share


def product_seconds(product: Product, machine: MachineRates, dtype: str) -> float:
    """Return the seconds of a product: the longer of computing and reading it; none of an empty one."""
    if not product.flops:
        return 0.0
    m, n, k = product.m, product.n, product.k
    narrow = dtype == "fp8" and product.narrow and "fp8" in machine.products
    rate = machine.products["fp8" if narrow else _rate_of_products(machine, dtype)]
    rate *= shape_share(m, n, k)
    moved = product.number * (m * k + k * n + m * n) * ITEM
    seconds = max(product.flops / rate, moved / machine.memory_bandwidth)
    casts = FP8_OVERHEAD * product.number * (m * k * 3 + k * n) / machine.memory_bandwidth if narrow else 0.0
    return seconds + casts + machine.launch_s * 0.2 * product.number


def _rate_of_products(machine: MachineRates, dtype: str) -> str:
    """Return the type whose rate is that of products in a type, but for those that fp8 takes."""
    return dtype if dtype != "fp8" and dtype in machine.products else _wide(machine)


def _wide(machine: MachineRates) -> str:
    return "bf16" if "bf16" in machine.products else next(iter(machine.products))


def core_seconds(
    core: AttentionCore,
    machine: MachineRates,
    flash: bool,
    backward: bool = False,
) -> float:
    """Return the seconds of attention proper: of a flash kernel, or of products and passes over scores.

    The backward of a flash kernel has 2.5 times the FLOPs (arXiv:2205.14135, section 3).
    """
    if not core.flops:
        return 0.0
    rate = machine.attention_backward if backward else machine.attention_forward
    if core.head_width % 8:
        rate *= UNALIGNED
    if core.head_width < 128:
        rate *= 0.8 if core.head_width >= 64 else 0.5
    if flash:
        return (2.5 if backward else 1.0) * core.flops / rate
    passes = SCORE_PASSES_BACKWARD if backward else SCORE_PASSES_FORWARD
    products = 2 * core.flops * (2 if backward else 1) / (0.5 * machine.products[_wide(machine)])
    return products + passes * 2 * core.scores * ITEM / machine.memory_bandwidth


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

    def times(self, factor: float) -> "Seconds":
        return Seconds(*(factor * each for each in self))


def seconds_of(work: PartWork, machine: MachineRates, dtype: str, flash: bool) -> Seconds:
    """Return what a part computes, in seconds; never less than its kernels take to be launched."""
    forward = sum(product_seconds(each, machine, dtype) for each in work.products)
    inputs = sum(product_seconds(_of_inputs(each), machine, dtype) for each in work.products)
    weights = sum(product_seconds(_of_weights(each), machine, dtype) for each in work.products)
    passes = work.pass_bytes / machine.memory_bandwidth
    forward += passes
    inputs += 1.5 * passes
    core = core_seconds(work.core, machine, flash)
    core_backward = core_seconds(work.core, machine, flash, True)
    launched = work.kernels * machine.launch_s
    return Seconds(
        max(forward + core, launched),
        max(inputs + core_backward, launched),
        max(weights, 0.3 * launched),
        core,
        max(core, launched - forward),
        max(core_backward, launched - inputs),
    )


def _of_inputs(product: Product) -> Product:
    return product._replace(n=product.k, k=product.n)


def _of_weights(product: Product) -> Product:
    return product._replace(m=product.n, n=product.k, k=product.m)
