"""What a process takes besides the tensors of a plan: its libraries, their kernels, and holes of its heap.

All but `library` comes with the first steps. Measured as benchmarks/memory.py says.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.plan.activations.peak import put_away
from mpitrain.plan.declared.expert_rows import num_lengths
from mpitrain.plan.declared.parameters import EXPERT, Spec, itemsizes_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage, activations_of, predict_rank
from mpitrain.plan.predict.promises import RECOMPUTE, with_value
from mpitrain.plan.settings.experts import positions

# bytes of a process of this rank before it has a model: Python, torch and MPI, without what is
# mapped from files
LIBRARY = 180_000_000
# what those make with the first step, and HDF5 with the first save, by benchmarks/memory.py on two processors
FIRST_USES = 7_000_000
# the same beside a GPU: torch's build for CUDA; then the driver's, cuBLAS's and the kernels that are loaded
# with the first step. Measured: NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-26
LIBRARY_ON_A_GPU = 430_000_000
FIRST_USES_ON_A_GPU = 820_000_000
# oneDNN keeps a kernel of each shape of a product in 16 bits: 0.04 to 1.2 MB, this in the mean of the
# forward and the gradients of input and weight, by 64 lengths of experts of widths 256 and 512
KERNEL = 700_000
DIRECTIONS = 3  # forward, gradient of the input, of the weight
# how many rows come to an expert, as multiples of what equal loads would bring
FEWEST, MOST = 0.25, 2.5
# torch begins a tensor at a multiple of 64 bytes, and malloc finds that only in a piece some 100 bytes
# longer than the tensor: a hole that one leaves between two others can't take the next of its length.
# MALLOC_MMAP_THRESHOLD_=131072 leaves none, and the kernel clears every page again.
HOLES = 8_000_000
BEFORE_A_MODEL = LIBRARY + FIRST_USES + HOLES
# of what microbatches take. Between tensors that are kept, holes are left by those that a forward makes
# and drops: partial outputs, copies in another type, what was copied to the host.
HOLES_OF_COMPUTED = 0.25
MORE_HOLES = {"tp": 0.25, "16 bits": 0.25, "offload": 0.25}
# and what is recomputed: as much as that, but no more than this share
HOLES_OF_RECOMPUTED = 0.5
# of larger models most tensors are longer than what malloc takes from the heap (cluster/heap.py)
COMPUTED_IN_HEAP = 1 << 30


class ProcessMemory(NamedTuple):
    """Bytes of a process besides its tensors."""

    library: int
    first_uses: int
    kernels: int
    holes: int


ON_A_GPU = ProcessMemory(LIBRARY_ON_A_GPU, FIRST_USES_ON_A_GPU, 0, HOLES)


def processes_memory(plan: Plan, usages: Sequence[MemoryUsage]) -> list[ProcessMemory]:
    """Return what a process of each pipeline rank takes on a CPU besides its `usages`."""
    # one plan for all ranks: its program is made anew
    whole = with_value(plan, RECOMPUTE, "none")
    return [memory_of_process(plan, rank, usage, whole) for rank, usage in enumerate(usages)]


def memory_of_process(plan: Plan, rank: int, usage: MemoryUsage, whole: Plan | None = None) -> ProcessMemory:
    """Return the same of one pipeline rank. whole: the plan without recomputation, if it is made already."""
    config = plan.config
    makes = {
        "tp": config.parallel.tp > 1,
        "16 bits": itemsizes_of(config)[0] == 2,
        "offload": config.memory.offload in ("activations", "all"),
    }
    share = HOLES_OF_COMPUTED + sum(MORE_HOLES[what] for what, is_made in makes.items() if is_made)
    computed = min(usage.computed + (_copied_away(plan, rank) if makes["offload"] else 0), COMPUTED_IN_HEAP)
    dropped = 0  # by a forward, to make them again: how much more there is without that
    if config.memory.recompute != "none":
        whole = with_value(plan, RECOMPUTE, "none") if whole is None else whole
        dropped = max(0, predict_rank(whole, rank).computed - usage.computed)
    holes = HOLES + int(share * computed + min(dropped, HOLES_OF_RECOMPUTED * computed))
    return ProcessMemory(LIBRARY, FIRST_USES, _kernels(plan, rank), holes)


def _copied_away(plan: Plan, rank: int) -> int:
    """Return the bytes of activations that are on the host."""
    plan = plan if plan.holds_all else plan.shortest
    return put_away(plan.lowered_training.ranks[rank], plan.table, activations_of(plan, rank))


def _kernels(plan: Plan, rank: int) -> int:
    """Return what oneDNN keeps of products in 16 bits: those in 32 are MKL's, which keeps nothing."""
    if itemsizes_of(plan.config)[0] != 2:
        return 0
    stages = {number % plan.table.depth for number in plan.table.chunks[rank]}
    specs = [spec for number in stages for spec in _multiplied(plan, number)]
    dense = {spec.shape for spec in specs if spec.domain != EXPERT}
    of_experts = {spec.shape[1:] for spec in specs if spec.domain == EXPERT}
    lengths = _lengths_of_experts(plan) if of_experts else 0
    return KERNEL * DIRECTIONS * (len(dense) + lengths * len(of_experts))


def _multiplied(plan: Plan, number: int) -> list[Spec]:
    """Return the matrices of a stage, and the table by which its last block makes logits."""
    stage = plan.stage(number)
    blocks = stage.specs(stage.shard(0))
    head = [spec for spec in blocks[-1] if spec.group == "table"] if stage.last else []
    return [spec for block in blocks for spec in block if spec.group == "matrix"] + head


def _lengths_of_experts(plan: Plan) -> int:
    """Return how many numbers of rows one expert multiplies in the course of a run."""
    config = plan.config
    sent = config.batch.micro * positions(config, config.parallel) // plan.table.segments
    balanced = sent * config.experts.active * config.parallel.ep * config.parallel.etp / config.experts.count
    return num_lengths(int(FEWEST * balanced), int(MOST * balanced))
