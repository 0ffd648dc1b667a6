"""How long a training takes with failures: what a save costs, how often to save, what is left.

Young (CACM 17, 1974) and Daly (FGCS 22, 2006): the best interval is sqrt(2 stall mtbf). A save in
the background stops training for the copy alone, and has to end before the next one begins.
"""

import math
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import HOST_COPY, MachineRates
from mpitrain.plan.predict.step_time.optimizer_seconds import owned_numbers
from mpitrain.plan.predict.step_time.step_model import StepModel

SAVE_BYTES = 12  # of a parameter in a checkpoint: fp32 weight and two moments
SAVE_RATE = 1e9  # bytes/s that a node writes, a guess until they are measured
# bytes/s that a file system sustains of all nodes together, a guess; Llama 3's did 2e12
# (arXiv:2407.21783, section 3.3.1)
STORAGE_RATE = 2e11
LEAST_EVERY_S = 300.0  # between saves: more often is nobody's practice
MOST_WRITING = 0.2  # of the time: what storage sustains beside its other users
RESTART_S = 600.0  # until a failed job is started again, a guess
REPLACE_S = 60.0  # until a run has left a lost node for a spare one of its job, a guess
# between failures of a node: 419 in 54 days of 2,048 nodes (arXiv:2407.21783, table 5)
NODE_HOURS = 6334
GUESS, PREDICTED = "assumed", "predicted"


class SaveTimes(NamedTuple):
    """Seconds of a save, and of the stall of training in it; who says so, in words."""

    took_s: float
    stall_s: float
    took_source: str
    stall_source: str

    @property
    def in_background(self) -> bool:
        return self.stall_s < self.took_s

    def describe(self) -> str:
        """Return them in a few words."""
        took = f"saves of {self.took_s:.2g} s ({self.took_source})"
        if not self.in_background:
            return took
        return f"{took} that stall training for {self.stall_s:.2g} s ({self.stall_source})"


class Goodput(NamedTuple):
    """days, gpu_hours: without failures.

    save_s: of a save, stall_s: of them training stands still. save_every_s: the best interval.
    restart_s: from a failure until the job trains again. share: of time that trains.
    """

    steps: int
    days: float
    gpu_hours: float
    save_s: float
    stall_s: float
    save_every_s: float
    restart_s: float
    share: float


class CopiesInMemory(NamedTuple):
    """What recovery.every and spare nodes leave of a training.

    every: the best number of steps between copies. share: of time that trains.
    """

    every: int
    share: float


def save_times(
    model: StepModel, layout: StepLayout, machine: MachineRates, blocking: bool, stated_s: float = 0.0
) -> SaveTimes:
    """Return what a save takes.

    blocking: run.save is "blocking". stated_s: the stall, as a run measured it; 0: it is predicted.
    """
    rate, source = machine.storage_write or SAVE_RATE, GUESS
    if machine.storage_write:
        source = f"by storage.write of {machine.name}"
    together = rate * _nodes(layout, machine)
    took = SAVE_BYTES * model.num_parameters / min(together, max(STORAGE_RATE, machine.storage_write))
    if stated_s:
        took_source = source if took >= stated_s else "as stated"
        return SaveTimes(max(took, stated_s), stated_s, took_source, "as stated")
    if blocking:
        return SaveTimes(took, took, source, source)
    known = machine.host_copy or not machine.on_gpu
    return SaveTimes(took, min(took, copy_s(model, layout, machine)), source, PREDICTED if known else GUESS)


def copy_s(model: StepModel, layout: StepLayout, machine: MachineRates) -> float:
    """Return how long a rank copies its state to memory of the node."""
    copied = SAVE_BYTES * owned_numbers(model, layout)
    rate = (machine.host_copy or HOST_COPY) if machine.on_gpu else machine.memory_bandwidth / 2
    return copied / rate


def _nodes(layout: StepLayout, machine: MachineRates) -> int:
    return -(-layout.ranks // machine.ranks_per_node)


def goodput(
    layout: StepLayout, machine: MachineRates, seconds: float, tokens: float, hours: float, save: SaveTimes
) -> Goodput:
    """Return how long a training of so many tokens takes, and the best interval of saves.

    seconds: of a step. hours: between failures of a node, of which any ends the job.
    """
    steps = math.ceil(tokens / layout.tokens)
    mtbf = 3600 * hours / _nodes(layout, machine)
    every = max(math.sqrt(2 * save.stall_s * mtbf), LEAST_EVERY_S, save.took_s / MOST_WRITING)
    late = save.took_s if save.in_background else 0.0  # what is still being written is lost, too
    restart = RESTART_S + machine.start_s + save.took_s  # the checkpoint is read as fast as it is written
    lost = save.stall_s / every + (every / 2 + late + restart) / mtbf
    took = steps * seconds
    gpu_hours = took * layout.ranks / 3600
    share = max(0.0, 1 - lost)
    return Goodput(steps, took / 86400, gpu_hours, save.took_s, save.stall_s, every, restart, share)


def with_copies(
    saved: Goodput, layout: StepLayout, machine: MachineRates, seconds: float, hours: float, copying_s: float
) -> CopiesInMemory:
    """Return the same where copies are in memory of two nodes each, and a spare node replaces a lost one.

    saved: without; as much is saved on disk. seconds: of a step. copying_s: of a copy, see copy_s(). It
    is sent under the next step, so that a lost node takes along the step under way and the one before.
    """
    mtbf = 3600 * hours / _nodes(layout, machine)
    steps = max(1, round(math.sqrt(2 * copying_s * mtbf) / seconds))
    every = steps * seconds
    restart = REPLACE_S + machine.start_s
    lost = saved.stall_s / saved.save_every_s + copying_s / every + (every / 2 + seconds + restart) / mtbf
    return CopiesInMemory(steps, max(0.0, 1 - lost))
