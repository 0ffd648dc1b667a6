"""The device of a rank, who shares it, the way of its messages, the rank's share of the cores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from mpitrain.cluster.heap import keep_freed_memory
from mpitrain.cluster.threads import num_threads
from mpitrain.comm.base import library
from mpitrain.comm.base.world import World
from mpitrain.comm.device import gpu_probe, gpu_support
from mpitrain.comm.device.gpu_support import Way
from mpitrain.config import Config, Run
from mpitrain.errors import ConfigError
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_gpu_memory
from mpitrain.training.machine import compiler, gpus
from mpitrain.training.machine.determinism import settle
from mpitrain.training.machine.gpus import VENDORS, Gpu, Gpus, share_out

FP8_CAPABILITY = (8, 9)  # of NVIDIA's first GPUs that multiply it
# AMD's with everybody's e4m3 (OCP): gfx942 has one of its own, e4m3fnuz
FP8_ARCHITECTURES = ("gfx950", "gfx1200", "gfx1201")
MOST_LISTED = 4  # shared GPUs in a message


@dataclass(frozen=True)
class DevicePlacement:
    """Where a rank computes; without a GPU, on the CPU. use: makes the device that of the calling thread."""

    device: torch.device
    vendor: str | None = None
    gpu: Gpu | None = None
    # the ranks of its node that compute on the same GPU, itself included
    sharers: tuple[int, ...] = ()
    first: bool = False  # of these
    use: Callable[[], None] | None = None
    # whether operations between products are compiled, on every rank; and why not, where it would be
    compiled: bool = False
    not_compiled: str = ""


CPU = DevicePlacement(torch.device("cpu"))


def place(plan: Plan, world: World, training: bool = True) -> DevicePlacement:
    """Choose this rank's device, make it that of this thread, and set torch's threads. Collective.

    training: without, a rank holds weights alone.
    Raises InputError, alike on all ranks, if no device can do and hold what is asked.
    """
    node_gpus = world.on_every_rank("looking for a device", lambda: looked_for(plan.config))
    found = f"{VENDORS[node_gpus.vendor]}'s GPUs" if node_gpus.vendor else "no GPU"
    world.require_same({"what run.device finds": found})
    compiled, not_compiled = _whether_to_compile(plan.config.run.compile, node_gpus.vendor, world)
    if node_gpus.vendor is None:
        return replace(CPU, compiled=compiled)
    mine = replace(take_turns(node_gpus, world), compiled=compiled, not_compiled=not_compiled)
    mine.use()
    world.on_every_rank("looking at the device", lambda: _require_fp8(plan.config, mine))
    pipeline_ranks = [plan.axes.grid.coordinates(rank)["pp"] for rank in mine.sharers]
    world.on_every_rank(
        "looking at its memory",
        lambda: require_gpu_memory(plan, pipeline_ranks, mine.gpu.name, mine.gpu.memory_bytes, training),
    )
    return mine


def _whether_to_compile(wanted: bool | str, vendor: str | None, world: World) -> tuple[bool, str]:
    """Return whether all ranks compile; why "auto" doesn't. Collective; raises ConfigError."""
    if wanted is True:
        world.on_every_rank("looking for a compiler", lambda: compiler.require(vendor))
        return True, ""
    if wanted is False or vendor != "cuda":  # on AMD's GPUs it was never tried
        return False, ""
    missing = world.first_of("who lacks a compiler", compiler.missing(vendor))
    return not missing, missing


def looked_for(config: Config) -> Gpus:
    """Return the GPUs to choose from, with torch set up; none on CPUs. Raises ConfigError."""
    set_threads(config.run)
    keep_freed_memory()
    if config.run.device == "cpu":
        return Gpus(None, (), "", lambda index: None)
    node_gpus = gpus.torch_gpus()
    if config.run.device == "cuda" and not node_gpus.seen:
        raise ConfigError(
            'run.device = "cuda": torch finds no GPU, neither NVIDIA\'s nor AMD\'s; use "cpu" or "auto"'
        )
    if node_gpus.vendor is not None:
        settle(config.numerics)
    return node_gpus


def _require_fp8(config: Config, placement: DevicePlacement) -> None:
    if config.precision.compute != "fp8":
        return
    has = placement.gpu.architecture
    vendor = placement.vendor
    if vendor == "cuda" and tuple(map(int, has.split("."))) < FP8_CAPABILITY:
        needed = f"compute capability {has}; needed {'.'.join(map(str, FP8_CAPABILITY))} or newer"
    elif vendor == "rocm" and has not in FP8_ARCHITECTURES:
        needed = f"architecture {has}; needed one with OCP's formats ({', '.join(FP8_ARCHITECTURES)})"
    else:
        return
    raise ConfigError(f'precision.compute = "fp8": found a GPU of {needed}; use "bf16"')


def take_turns(node_gpus: Gpus, world: World) -> DevicePlacement:
    """Return a GPU of this rank's, and who shares it. Collective over the ranks of the node."""
    seen = [gpu.identity for gpu in node_gpus.seen]
    ranks, visible = zip(*world.node_gather("which GPUs they see", (world.rank, seen)))
    taken = dict(zip(ranks, share_out(visible)))
    mine = taken[world.rank]
    if mine is None:
        return CPU
    index = seen.index(mine)
    sharers = tuple(rank for rank, gpu in taken.items() if gpu == mine)
    device = torch.device(node_gpus.kind, index)
    first = sharers[0] == world.rank
    use = partial(node_gpus.use, index)
    return DevicePlacement(device, node_gpus.vendor, node_gpus.seen[index], sharers, first, use)


def shared(placement: DevicePlacement, world: World) -> str:
    """Return which ranks share a GPU, in words; nothing if none do. Collective over all ranks."""
    mine = ""
    if placement.first and len(placement.sharers) > 1:
        ranks = " ".join(map(str, placement.sharers))
        mine = f"ranks {ranks} share {placement.gpu.identity} of {library.host()}"
    texts = [text for text in world.all_gather("who shares a GPU", mine) if text]
    more = f"; and {len(texts) - MOST_LISTED} more like that" if len(texts) > MOST_LISTED else ""
    return "; ".join(texts[:MOST_LISTED]) + more


def way_of_messages(placement: DevicePlacement, world: World, wanted: str, timeout_s: float) -> Way:
    """Return the way that messages take from and to devices. Collective over all ranks.

    wanted: comm.device.
    timeout_s: of others that wait for a child process, if one has to try.
    Raises MeshError, alike on all ranks.
    """
    if placement.gpu is None:
        return gpu_support.STAGED
    said = gpu_support.what_it_says(placement.vendor)
    index = str(placement.device.index)
    limit_s = min(gpu_probe.LIMIT_S, timeout_s / 2)
    attempt = partial(gpu_probe.attempt, "mpitrain.training.machine.gpus:buffers", index, limit_s)
    return gpu_support.choose(world, wanted, said, attempt, placement.gpu.name)


def set_threads(run: Run) -> None:
    """Set torch's threads, which bits depend on. Raises ConfigError."""
    torch.set_num_threads(num_threads(run))
