"""The peak of all ranks in FLOP/s, of which MFU is a share. A GPU that ranks share counts once."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from mpitrain.comm.base.world import World
from mpitrain.kernels.products import product
from mpitrain.plan.predict.step_time.machine import known_machine
from mpitrain.training.machine.device_placement import DevicePlacement

COUNTED = (
    "counted: 6 FLOPs per matrix weight and token, causal attention halved; HFU counts recomputation, too"
)

# Dense bf16 peak of the vendors' data sheets, which for NVIDIA's print twice as much, with sparsity:
# that of a machine of jobs/machines/, or FLOP/s. The first that fits a name counts. torch counts each
# half of an MI250X, MI250 as a GPU.
DATA_SHEETS: tuple[tuple[str, str | float, str], ...] = (
    (r"\bGB200\b", "gb200", "NVIDIA GB200 NVL72"),
    (r"\bB200\b", "b200", "NVIDIA HGX B200"),
    (r"\bGH200\b", "gh200-alps", "NVIDIA GH200 Grace Hopper"),
    (r"\bH200 NVL\b", 835e12, "NVIDIA H200 NVL"),
    (r"\bH200\b", "h200", "NVIDIA H200 SXM"),
    (r"\bH100 NVL\b", 835e12, "NVIDIA H100 NVL"),
    (r"\bH100 PCIe\b", 756e12, "NVIDIA H100 PCIe"),
    (r"\bH100 (SXM\w*|80GB HBM3)\b", "h100-80gb", "NVIDIA H100 SXM"),
    (r"\bA100\b", "a100-80gb", "NVIDIA A100"),
    (r"\bL40S\b", 362e12, "NVIDIA L40S"),
    (r"\bMI3(00|25)X\b", "mi300x", "AMD Instinct MI300X and MI325X"),
    (r"\bMI300A\b", 980.6e12, "AMD Instinct MI300A"),
    (r"\bMI250X\b", "mi250x", "AMD Instinct MI250X, one of its two halves"),
    (r"\bMI250\b", 181e12, "AMD Instinct MI250, one of its two halves"),
    (r"\bMI210\b", 181e12, "AMD Instinct MI210"),
)
PART = re.compile(r"\bMIG\b")  # of a GPU: no data sheet has its peak

SIZES_OF_GPU = (2048, 4096, 8192)  # of square matrices; smaller ones leave most of a GPU idle
SIZES_OF_CPU = (512,)
REPEATS = 20
BUSY = 0.8  # share of a core below which a machine that others use is reported


class PeakFlops(NamedTuple):
    """Of one device, or of all ranks together, in FLOP/s, and how it is known."""

    flops: float
    source: str


def data_sheet(name: str) -> PeakFlops | None:
    """Return what a data sheet says of a GPU, by torch's name for it; None if none here does."""
    for pattern, peak, sheet in () if PART.search(name) else DATA_SHEETS:
        if re.search(pattern, name, re.IGNORECASE):
            flops = known_machine(peak).products["bf16"].peak if isinstance(peak, str) else peak
            return PeakFlops(flops, f"{name}, data sheet of {sheet}, dense bf16")
    return None


def peak_of_all(placement: DevicePlacement, dtype: torch.dtype, world: World) -> PeakFlops:
    """Return the peak of all ranks: each GPU's, or what rank 0 measures of its CPU. Collective."""
    asked = placement.first if placement.gpu else world.rank == 0
    mine = _of(placement, dtype) if asked else None
    peaks = [one for one in world.all_gather("the peaks of their devices", mine) if one]
    return gpus_peak(peaks) if placement.gpu else peak_of_ranks(peaks[0], world.size)


def gpus_peak(peaks: Sequence[PeakFlops]) -> PeakFlops:
    """Return the peak of different GPUs together."""
    by_source = defaultdict[str, list[float]](list)
    for one in peaks:
        by_source[one.source].append(one.flops)
    parts = [
        f"{len(flops)} x {sum(flops) / len(flops) / 1e9:,.0f} GFLOP/s ({source})"
        for source, flops in by_source.items()
    ]
    return PeakFlops(sum(one.flops for one in peaks), " + ".join(parts))


def peak_of_ranks(one: PeakFlops, num_ranks: int) -> PeakFlops:
    """Return the peak of ranks that have each as much."""
    return PeakFlops(one.flops * num_ranks, f"{one.flops / 1e9:,.0f} GFLOP/s a rank ({one.source})")


def _of(placement: DevicePlacement, dtype: torch.dtype) -> PeakFlops:
    """Return the peak of this rank's device; what no data sheet has is timed."""
    sheet = data_sheet(placement.gpu.name) if placement.gpu else None
    if sheet:
        return sheet
    multiply = _multiply_on(placement.device)
    if placement.gpu:
        best, kind, n = fastest(
            {dtype}, _fitting(dtype, placement.gpu.memory_bytes), multiply, _seconds_of_gpu
        )
        how = f"timed on {placement.gpu.name}, which no data sheet here has"
    else:
        seconds = ProcessorTime()
        # not every CPU is faster with 16 bits
        dtypes = {dtype} if dtype.itemsize > 4 else {dtype, torch.float32}
        best, kind, n = fastest(dtypes, SIZES_OF_CPU, multiply, seconds)
        how = f"the best of {REPEATS} by processor time{seconds.disturbed()}, on rank 0"
    name = str(kind).removeprefix("torch.")
    return PeakFlops(best, f"{name} product of {n} x {n} matrices, {how}")


def _fitting(dtype: torch.dtype, memory_bytes: int) -> Sequence[int]:
    """Return the sizes that take a small part of a GPU's memory, which ranks may share."""
    return [n for n in SIZES_OF_GPU if 3 * n * n * dtype.itemsize <= memory_bytes / 8] or SIZES_OF_GPU[:1]


def fastest(
    dtypes: Collection[torch.dtype],
    sizes: Sequence[int],
    multiply: Callable[[int, torch.dtype], Callable[[], None]],
    seconds: Callable[[Callable[[], None]], float],
) -> tuple[float, torch.dtype, int]:
    """Return the highest rate of products of n x n matrices in FLOP/s, and its type and n.

    multiply(n, dtype): returns what multiplies once.
    seconds(work): runs it, and returns how long that took on the device.
    """
    rates = []
    for dtype in dtypes:
        for n in sizes:
            work = multiply(n, dtype)
            work()  # chooses its kernel, makes its workspace
            rates.append((2 * n**3 / min(seconds(work) for _ in range(REPEATS)), str(dtype), dtype, n))
    best, _, dtype, n = max(rates)
    return best, dtype, n


def _multiply_on(device: torch.device) -> Callable[[int, torch.dtype], Callable[[], None]]:
    def multiply(n: int, dtype: torch.dtype) -> Callable[[], None]:
        # of alike numbers: a GPU's clock is at its highest
        a = torch.ones(n, n, dtype=dtype, device=device)
        return lambda: product(a, a)

    return multiply


def _seconds_of_gpu(work: Callable[[], None]) -> float:
    """Return how long work takes by the GPU's events: it goes on after the call has returned."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class ProcessorTime:
    """Times work by what the processor spent on this thread: not while others had the core.

    By the wall clock MFU was five times too high with a load of 20 on 2 cores. At the end of each
    product this thread waits for torch's others without sleeping.
    """

    def __init__(self) -> None:
        self._spent_s = self._passed_s = 0.0

    def __call__(self, work: Callable[[], None]) -> float:
        passed = time.perf_counter()
        spent = time.thread_time()
        work()
        spent = time.thread_time() - spent
        passed = time.perf_counter() - passed
        self._spent_s, self._passed_s = self._spent_s + spent, self._passed_s + passed
        return spent

    def disturbed(self) -> str:
        """Return what to say of a machine that others used meanwhile; "" if they didn't."""
        share = self._spent_s / max(self._passed_s, 1e-9)
        return "" if share >= BUSY else f" (busy: it had {share:.0%} of a core)"
