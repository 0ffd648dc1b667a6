"""What a rank's device computes and copies a second, by the functions that a run calls."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from mpitrain.config import OptimizerTable, Precision
from mpitrain.kernels import fp8
from mpitrain.kernels.activation_functions import GatedProduct
from mpitrain.kernels.attention import PLAIN
from mpitrain.kernels.engine import gradients
from mpitrain.kernels.functions import norm, norm_backward, turned
from mpitrain.kernels.grouped import add_grouped, grouped_product
from mpitrain.kernels.precision import rounds_products
from mpitrain.kernels.products import add_product, product
from mpitrain.kernels.streams import streams_of
from mpitrain.model.attention_functions import attention
from mpitrain.optim.moments import UpdateBatch
from mpitrain.optim.offload import LOAD, torch_threads
from mpitrain.optim.optimizers import adamw
from mpitrain.plan.predict.step_time.compute import SHORT_LENGTH, SHORT_WIDTH
from mpitrain.plan.predict.step_time.machine import GROUPED, SHORT
from mpitrain.plan.predict.step_time.tiles import (
    LARGE,
    OF_CPU,
    OF_GPU,
    SMALL,
    SMALL_SUFFIX,
    Sides,
    share_of,
    share_of_all,
)

REPEATS = 3  # of each, in each round
REPEATS_OF_LINKS = 7
REPEATS_NOW = 3  # beside steps, of each layout
QUEUED = 5  # calls that a GPU is timed over: the time until the first begins is in none
FLOPS_OF_BACKWARD = 2.5  # of a flash kernel's forward (arXiv:2205.14135, section 3)
TINY_CALLS = 300
# attention of a CPU with short sequences and narrow heads: batch, heads, key-value heads, length, width
OF_SHORT = (4, 8, 4, SHORT_LENGTH, SHORT_WIDTH)
BOTH_WAYS = 2.5  # bytes of a forward and its backward, over those of the forward (step_time/compute.py)
HOST_COPIED = 2**24  # numbers of fp32
OF_EXPERTS = ((301, 190, 243, 290), 512, 704)  # rows of each, inputs, outputs: of a CPU


class BenchSizes(NamedTuple):
    """How much is computed: enough to fill a device, little enough to take no minute.

    attention: batch, heads, key-value heads, length, width. copied: numbers of fp32.
    """

    products: tuple[Sides, ...]
    attention: tuple[int, int, int, int, int]
    copied: int


SIZES_OF_GPU = BenchSizes(
    ((8192, 2048, 8192), (8192, 8192, 2048), (8192, 4096, 14336)), (4, 32, 8, 2048, 128), 2**28
)
SIZES_OF_CPU = BenchSizes(LARGE, (1, 8, 4, 512, 128), 2**24)


class Samples(NamedTuple):
    """Rates a second, or seconds, of one thing, repeated."""

    name: str
    values: list[float]


def measured(device: torch.device, dtypes: tuple[str, ...]) -> Iterator[Samples]:
    """Yield all that is measured of a device. dtypes: of products, of which attention takes the first."""
    sizes = SIZES_OF_GPU if device.type == "cuda" else SIZES_OF_CPU
    small = {SMALL_SUFFIX: SMALL} if device.type == "cpu" else {}
    for dtype in dtypes:
        rates = _products(device, dtype, [sizes.products, *small.values()])
        for suffix, rate in zip(("", *small), rates):
            yield Samples(f"products.{dtype}{suffix}", rate)
    if device.type == "cpu":
        for dtype in ("fp32", "bf16"):
            yield Samples(f"products.{dtype}{GROUPED}", _grouped(device, dtype))
    yield from _attention(device, getattr(torch, _torch_name(dtypes[0])), sizes.attention)
    if device.type == "cpu":  # kernels of its own (kernels/attention_cpu_16bit.py)
        yield from _attention(device, torch.bfloat16, sizes.attention, "_16")
        for dtype, suffix in ((torch.float32, SHORT), (torch.bfloat16, f"_16{SHORT}")):
            yield from _attention(device, dtype, OF_SHORT, suffix)
        yield Samples("memory.passes", _passes(device))
    yield Samples("memory.bandwidth", _copies(device, sizes))
    yield Samples("launch_s", _launches(device))


def measured_host(device: torch.device, cores: int) -> Iterator[Samples]:
    """Yield what memory.offload depends on: bytes/s of copies to host memory, and numbers that so many cores
    update a second, with the cast to 16 bits after it.
    """
    streams = streams_of(device)
    sent = streams.on_device(HOST_COPIED, torch.float32)
    arrived = streams.on_host(HOST_COPIED, torch.float32)
    copied = _rates(sent.nbytes, lambda: arrived.copy_(sent, non_blocking=True), device)
    yield Samples("host.copy", copied)
    weights, grads, *moments = (torch.rand(LOAD) for _ in range(4))
    narrow = torch.empty(LOAD, dtype=torch.bfloat16)
    batch = UpdateBatch([weights], [grads], [[moment] for moment in moments])

    def work() -> None:
        adamw.update(OptimizerTable(**adamw.KEYS), batch, 1e-5, 0.1, 1)
        narrow.copy_(weights)

    with torch_threads(cores):
        rates = _rates(LOAD, work, weights.device)
    yield Samples("host.update", rates)


def _torch_name(dtype: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}.get(dtype, "float32")


def rate_of_products(device: torch.device, dtype: str) -> float:
    """Return FLOP/s of large products as they are now, in one type.

    On a CPU by the time of this thread, which doesn't run on while another rank has the core.
    """
    sizes = SIZES_OF_GPU if device.type == "cuda" else SIZES_OF_CPU
    (rates,) = _products(device, dtype, [sizes.products], REPEATS_NOW, time.thread_time)
    return statistics.median(rates)


def _seconds(
    work: Callable[[], object], device: torch.device, now: Callable[[], float] = time.perf_counter
) -> float:
    """Return how long one call takes on the device. now: the clock of a CPU."""
    if device.type != "cuda":
        begin = now()
        work()
        return now() - begin
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    work()
    marks[0].record()
    for _ in range(QUEUED):
        work()
    marks[1].record()
    marks[1].synchronize()
    return marks[0].elapsed_time(marks[1]) / 1e3 / QUEUED


def _rates(amount: float, work: Callable[[], object], device: torch.device) -> list[float]:
    """Return what each call but the first does a second. amount: of a call."""
    return [amount / _seconds(work, device) for _ in range(REPEATS + 1)][1:]


def _products(
    device: torch.device,
    dtype: str,
    groups: Sequence[Sequence[Sides]],
    repeats: int = REPEATS,
    now: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return FLOP/s of each group of products, as they were if these were large.

    A product is y = x W^T, the gradient of x and, added, the gradient of W. Groups take turns, so
    that one isn't measured in a slow second alone.
    """
    make = _fp8_product if dtype == "fp8" else _in_place
    tiles = OF_GPU if device.type == "cuda" else OF_CPU
    exact = [sum(6.0 * math.prod(sides) for sides in each) / share_of_all(each, tiles) for each in groups]
    works = [[make(device, dtype, sides) for sides in each] for each in groups]
    rates: list[list[float]] = [[] for _ in groups]
    for _ in range(repeats + 1):
        for found, flops, some in zip(rates, exact, works):
            found.append(flops / sum(_seconds(work, device, now) for work in some))
    return [found[1:] for found in rates]


def _grouped(device: torch.device, dtype: str) -> list[float]:
    """Return FLOP/s of products of experts, as those of _products()."""
    kind = getattr(torch, _torch_name(dtype))
    loads, k, n = OF_EXPERTS
    rows = sum(loads)
    x, grad = (torch.randn(rows, width, device=device).to(kind) for width in (k, n))
    weights = torch.randn(len(loads), n, k, device=device).to(kind)
    total = torch.zeros(len(loads), n, k, device=device)
    rounded = rounds_products(Precision(compute=dtype), device)

    def work() -> None:
        grouped_product(x, weights, loads)
        grouped_product(grad, weights.transpose(1, 2), loads)
        add_grouped(total, grad, x, loads, rounded)

    exact = 6.0 * rows * k * n / share_of(rows / len(loads), n, k, OF_CPU)
    return _rates(exact, work, device)


def _in_place(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Callable[[], None]:
    rows, k, n = shape
    kind = getattr(torch, _torch_name(dtype))
    x, weight, grad = (torch.randn(size, device=device).to(kind) for size in ((rows, k), (n, k), (rows, n)))
    total = torch.zeros(n, k, device=device, dtype=torch.promote_types(kind, torch.float32))
    rounded = rounds_products(Precision(compute=dtype), device)

    def work() -> None:
        product(x, weight)
        product(grad, weight.t())
        add_product(total, grad, x, rounded)

    return work


def _fp8_product(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Callable[[], None]:
    rows, k, n = shape
    by_rows, by_columns = fp8.MatrixOrder.ROWS, fp8.MatrixOrder.COLUMNS
    x, weight, grad = (
        fp8.quantise_in(torch.randn(size, device=device).bfloat16(), fp8.E4M3, by_rows, by_columns)
        for size in ((rows, k), (n, k), (rows, n))
    )

    def work() -> None:
        fp8.multiply(x[0], weight[0].t(), torch.bfloat16)
        fp8.multiply(grad[0], weight[1], torch.bfloat16)
        fp8.multiply(grad[1].t(), x[1], torch.float32)

    return work


def _attention(
    device: torch.device, kind: torch.dtype, sizes: tuple[int, int, int, int, int], suffix: str = ""
) -> Iterator[Samples]:
    """Yield FLOP/s of causal attention, forward and backward. suffix: of their names."""
    batch, heads, kv_heads, length, width = sizes
    q, k, v = (
        torch.randn(batch, count, length, width, device=device).to(kind).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    flops = 2.0 * batch * heads * length * length * width
    grad = torch.ones_like(q)
    forward, backward = [], []
    num_calls = 1 + QUEUED if device.type == "cuda" else 1  # of _seconds()

    def attend() -> torch.Tensor:
        return attention(q, k, v, PLAIN, again=False, selective=False)[0]

    for _ in range(REPEATS + 1):
        with torch.no_grad():
            forward.append(flops / _seconds(attend, device))
        graphs = [attend() for _ in range(num_calls)]
        # timed by itself: of short sequences the difference of two times is mostly noise
        seconds = _seconds(lambda graphs=graphs: gradients([graphs.pop()], [q, k, v], [grad]), device)
        backward.append(FLOPS_OF_BACKWARD * flops / seconds)
    yield Samples(f"attention.forward{suffix}", forward[1:])
    yield Samples(f"attention.backward{suffix}", backward[1:])


def _copies(device: torch.device, sizes: BenchSizes) -> list[float]:
    """Return bytes/s of a copy, read and written."""
    x = torch.ones(sizes.copied, device=device)
    y = torch.empty_like(x)
    return _rates(2 * x.nbytes, lambda: y.copy_(x), device)


def _passes(device: torch.device) -> list[float]:
    """Return bytes/s of what stands between the products of a block, forward and backward.

    Two norms, rotary positions, a gated product and two sums in fp32, of sizes that caches hold as they do a
    run's. Bytes are what plan/predict/step_time/work.py counts, and the backward 1.5 times the forward's.
    """
    rows, width, hidden = 512, 512, 1408
    heads, head_width = 12, 64
    x, grad = torch.randn(2, rows, width, device=device)
    weight = torch.ones(width, device=device)
    turning = torch.randn(1, heads, rows, head_width, device=device)
    cos, sin = torch.randn(2, rows, head_width // 2, device=device)
    gate, up, grad_of_hidden = torch.randn(3, rows, hidden, device=device)
    gated = GatedProduct()

    def work() -> None:
        total = x
        for _ in range(2):
            _, unit, scale = norm(total, weight, 1e-5)
            total = total + grad
            norm_backward(grad, weight, unit, scale)
        for sense in (1, -1):
            turned(turning, cos, sin, sense)
        made = gated.forward(gate, up)
        gated.backward(grad_of_hidden, gate, up, *made[1:])

    num_bytes = 9 * x.nbytes + 2 * turning.nbytes + 3 * gate.nbytes
    return _rates(BOTH_WAYS * num_bytes, work, device)


def _launches(device: torch.device) -> list[float]:
    """Return the seconds from one small operation to the next, as the host calls them."""
    x = torch.zeros(8, device=device)
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(TINY_CALLS):
            x.add_(1)
        times.append((time.perf_counter() - begin) / TINY_CALLS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return times[1:]
