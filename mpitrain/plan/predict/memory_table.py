"""The table of `mpitrain memory`, and the one at the end of a run, with the same rows; MB are 10**6 bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.errors import counted
from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.declared.optimizers import num_moments
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import PARTS, SNAPSHOT, MemoryUsage, moment_bytes
from mpitrain.plan.predict.memory_limit import MemoryLimit
from mpitrain.plan.predict.process_memory import ON_A_GPU, ProcessMemory

MEANING = {
    "weights": "with 16-bit types their fp32 masters, too",
    "gathered": "whole weights of ZeRO-3, of blocks in use and prefetched",
    "unreduced": "whole gradients, until they are reduced",
    "activations": "kept for microbatches in flight",
    "recomputed": "activations, for one backward",
    "working": "temporaries of one forward or backward",
    "messages": "buffers of communication",
    "host": "offloaded",
    SNAPSHOT: "in host memory, to save from",
    "staged": "pinned copies of messages, in host memory",
    "library": "Python, torch, MPI, data",
    "lazy initialization": "of torch, MPI and HDF5, kept",
    "kernels": "of oneDNN, one for each shape in 16 bits",
    "fragmentation": "free pieces of the heap",
}
OF_A_PROCESS = "library", "lazy initialization", "kernels", "fragmentation"
STAGED = "staged"
IN_MEMORY = "copies in memory of the node (recovery.every)"
UNCOUNTED = "working", STAGED, *OF_A_PROCESS[1:]  # by a run; they are in what is resident


def on_host(usage: MemoryUsage, copy: int, staged: int = 0) -> int:
    """Return what a process that computes on a GPU takes of its host's memory."""
    return usage.host + copy + staged + sum(ON_A_GPU)


def table_of_usage(
    usages: Sequence[MemoryUsage],
    copies: Sequence[int],
    staged: Sequence[int],
    processes: Sequence[ProcessMemory],
    in_memory: Sequence[int] = (),
) -> str:
    """Draw what a rank of each pipeline rank holds, a column each, and together with what its process has.

    staged: pinned memory of messages, where MPI can't read a GPU's.
    in_memory: copies of the state in memory of the node.
    """
    names = *PARTS, SNAPSHOT, *OF_A_PROCESS
    columns = [(*usage, copy, *rest) for usage, copy, rest in zip(usages, copies, processes, strict=True)]
    rows = [("MB of pipeline rank", *map(str, range(len(columns))))]
    for name, numbers in zip(names, zip(*columns)):
        if any(numbers):
            rows.append((_meant(name), *map(_shown, numbers)))
    rows.append(("on the device", *(_shown(usage.on_device) for usage in usages)))
    rows.append(("process on a CPU", *(_shown(sum(column)) for column in columns)))
    hosted = (on_host(usage, copy) for usage, copy in zip(usages, copies))
    rows.append(("host memory of a process on a GPU", *map(_shown, hosted)))
    if any(staged):
        hosted = (on_host(*rank_bytes) for rank_bytes in zip(usages, copies, staged))
        rows.append(("host memory with staged messages", *map(_shown, hosted)))
    if any(in_memory):
        rows.append((IN_MEMORY, *map(_shown, in_memory)))
    return aligned(rows)


def parameter_line(plan: Plan) -> str:
    """Say how many parameters there are, and how many bytes of state each has and why."""
    config, (narrow, wide) = plan.config, itemsizes_of(plan.config)
    count = sum(spec.numel for spec in plan.parameters())
    moments = num_moments(config.optimizer, "matrix")
    of_moments = moments * moment_bytes(config)
    masters = wide if narrow != wide else 0
    master = f", its master {masters}" if masters else ""
    why = "; 2 less with 16-bit gradients, but microbatches are summed in fp32 here" if masters else ""
    divided = ("nothing", "master and moments", "master, moments and gradient", "all of it")
    total = narrow + masters + wide + of_moments
    return (
        f"{count:,} parameters, {total} bytes each: weight {narrow}{master}, gradient {wide}, moments "
        f"{of_moments}{why}; parallel.zero = {config.parallel.zero} divides {divided[config.parallel.zero]}"
    )


def fit_line(held: Sequence[int], limit: MemoryLimit | None, cheapest: Callable[[MemoryLimit], str]) -> str:
    """Say whether ranks fit into the memory that they have, by how much, and what would.

    held: bytes of a rank of each pipeline rank, on what the limit is of.
    cheapest: says the change; asked only where they don't fit.
    """
    if limit is None:
        return (
            "whether it fits is unknown, since no GPU was found; set run.machine, such as "
            "h100-80gb, or memory.limit_gb"
        )
    total, needed = limit.total_bytes, limit.needed(held)
    who = f"memory limit: {limit.source}; the rank with most memory"
    if limit.of_node:
        who = f"memory limit: {_shown(total)} MB of a node like this one; its {counted(limit.ranks, 'ranks')}"
    ending = "" if limit.of_node and limit.ranks > 1 else "s"
    needs = f"{who} need{ending} {_shown(needed)} MB"
    if needed <= total:
        return f"{needs} and fit{ending}, with {_shown(total - needed)} MB to spare"
    where = " on one node (set comm.node_ranks, or run.machine, if there are more)" * limit.of_node
    return f"{needs}, {_shown(needed - total)} MB too much{where}; {cheapest(limit)}"


class MemoryRow(NamedTuple):
    """Bytes of a part. measured: None where nothing measures it alone."""

    part: str
    predicted: int
    measured: int | None


def compared(
    predicted: MemoryUsage,
    measured: MemoryUsage,
    copies: tuple[int, int],
    process: ProcessMemory,
    bare: int | None,
    most: int | None,
    on_gpu: bool = False,
    staged: int = 0,
    in_memory: tuple[int, int] = (0, 0),
) -> list[MemoryRow]:
    """Return what a rank was to hold, and what it has, part by part.

    copies: to save from, predicted and measured. process: predicted. staged: pinned memory of messages.
    in_memory: copies of the state in memory of the node, predicted and measured.
    bare, most: bytes of the process that no file backs, before it has a model and at most; None:
    nobody knows. What one block works with and all of a process are measured in the last alone.
    """
    names = *PARTS, SNAPSHOT, STAGED, *OF_A_PROCESS
    columns = ((*predicted, copies[0], staged, *process), (*measured, copies[1], 0, bare or 0, 0, 0, 0))
    rows = [
        MemoryRow(_meant(name), expected, None if name in UNCOUNTED else counted)
        for name, expected, counted in zip(names, *columns)
        if expected or counted
    ]
    resident = on_host(predicted, copies[0], staged) if on_gpu else sum(columns[0])
    rows.append(MemoryRow("peak resident", resident, most))
    return [*rows, *([MemoryRow(IN_MEMORY, *in_memory)] if any(in_memory) else [])]


def compare(rows: Sequence[MemoryRow]) -> str:
    """Draw the rows of compared()."""
    head = ("memory of rank 0, MB", "predicted", "measured")
    shown = [(row.part, _shown(row.predicted), _shown(row.measured)) for row in rows]
    return aligned([head, *shown])


def _meant(name: str) -> str:
    return f"{name} ({MEANING[name]})" if name in MEANING else name


def _shown(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.2f}"
