"""The end of a run: what it prints and keeps of all steps, and what it advises to run next.

summary.json has what a run knows at its end alone, for pages (mpitrain report).
"""

import json
from collections.abc import Sequence
from datetime import date
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.actor.memory import measure
from mpitrain.cluster.resident import peak_resident
from mpitrain.cluster.status_board import BUSY
from mpitrain.errors import DONE, STOPPED_EARLY, counted
from mpitrain.inputs import shown, write_regular
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.memory_table import MemoryRow, compare, compared
from mpitrain.plan.predict.process_memory import ON_A_GPU, memory_of_process
from mpitrain.plan.predict.snapshot_bytes import copy_bytes, memory_copy_bytes
from mpitrain.plan.predict.staged_bytes import staged_bytes
from mpitrain.planner.calibration_file import CalibrationFile
from mpitrain.planner.measured_run import MeasuredRun
from mpitrain.report import run_picture
from mpitrain.report.loggers.logger_children import HURRIED_S, PATIENCE_S
from mpitrain.training.checks.comm_report import AxisTotal, RankUsage, axis_totals
from mpitrain.training.early_exit import HURRY, STAY
from mpitrain.training.next_commands import commands
from mpitrain.training.trainer import Trainer

if TYPE_CHECKING:
    from mpitrain.planner.after_run import StepTerms


def finish(trainer: Trainer, calibration: CalibrationFile | None = None) -> int:
    """Print the summary after the last step; return the exit code. Collective over all ranks."""
    code = _summarised(trainer, calibration)
    place = trainer.place
    patience_s = {STAY: PATIENCE_S, HURRY: 0.0}.get(trainer.urgency, HURRIED_S)
    if trainer.config.run.logger_names:  # other ranks do nothing meanwhile
        place.name(place.who, max(place.limit_s, 2 * patience_s))
    with place.at("end", "waiting for loggers", BUSY):
        trainer.report.say(trainer.opened.loggers.end(patience_s))
    return code


def _summarised(trainer: Trainer, calibration: CalibrationFile | None) -> int:
    code = DONE if trainer.code is None else trainer.code
    say, world = trainer.report.say, trainer.world
    trainer.place.enter("end", "printing the summary")
    say(trainer.rundir.lost())
    if code in (DONE, STOPPED_EARLY):  # else they may be all that is left of the last steps
        trainer.memory.end()
    trainer.profiling.close()
    if trainer.urgency == HURRY:
        say(trainer.last_words)
        return code
    usages = trainer.ledger.gather(world)
    say(trainer.ledger.table(usages))
    say(trainer.stragglers.summary())
    most = peak_resident()  # before metrics.jsonl is read, which takes memory
    if trainer.mesh.rank == 0:
        say(run_picture.write(trainer.rundir))
    if code != DONE:
        say(trainer.last_words)
        return code
    if trainer.counts.step >= trainer.watched:  # else nothing was left to do, and nothing measured
        run, memory = _compare_memory(trainer, usages, most)
        if trainer.mesh.rank == 0:
            _compare_step(trainer, run, usages, memory, calibration)
    say(trainer.saver.gathered)
    say(trainer.memory.describe())
    path, prompt = trainer.rundir.path, trainer.opened.prompt
    further = commands(trainer.config, path, prompt, trainer.mesh.size, world.num_nodes)
    say(f"done: {counted(trainer.counts.step, 'steps')}, everything is in {path}\n{further}")
    say(trainer.checks.describe())
    return DONE


def _compare_step(
    trainer: Trainer,
    run: MeasuredRun,
    usages: list[RankUsage],
    memory: list[MemoryRow],
    calibration: CalibrationFile | None,
) -> None:
    """Print a step as predicted and as measured, and write what is known at the end to summary.json."""
    from mpitrain.planner import after_run  # a run needs no planner before

    trainer.place.enter("end", "predicting a step", BUSY)
    terms = after_run.step_terms(run)
    lines = [after_run.compare(run, terms)]
    if calibration is not None:
        from mpitrain.planner.calibrate import calibrate

        lines.append(calibrate(run, calibration, date.today()))
    path = trainer.rundir.summary
    try:
        write_regular(path, json.dumps(run_summary(trainer, usages, memory, terms)).encode())
    except OSError as error:  # a run that is done doesn't fail for it
        lines.append(f"{shown(path)} can't be written: {error.strerror}")
    trainer.report.say("\n".join(filter(None, lines)))


def run_summary(
    trainer: Trainer, usages: Sequence[RankUsage], memory: Sequence[MemoryRow], terms: "StepTerms | None"
) -> dict[str, Any]:
    """Return what summary.json has. usages: of all ranks."""
    num_steps = trainer.ledger.num_steps
    costs = axis_totals(usages, num_steps) if num_steps else {}
    parallel = trainer.plan.config.parallel
    return {
        "nodes": [usage.node for usage in usages],  # name of the node of each rank
        # ranks along each axis, of which the first varies fastest
        "axes": {name: getattr(parallel, name) for name in ("tp", "cp", "dp", "pp")},
        # what each axis cost a rank in a step, by axis: the mean over ranks and steps but the first
        "comm": {name: _axis(cost) for name, cost in costs.items()},
        # how often each rank or link was named as slow (comm.slow_after)
        "slow": dict(trainer.stragglers.named),
        "memory": [row._asdict() for row in memory],  # bytes of rank 0, predicted and measured
        "predicted_s": dict(terms.predicted) if terms else {},  # seconds of a step by term, as predicted
        "measured_s": dict(terms.measured) if terms else {},  # the same as measured
        # predicted seconds of a microbatch by kind of instruction, of each stage
        "stages": list(terms.stages) if terms else [],
    }


def _axis(cost: AxisTotal) -> dict[str, float]:
    total, count = cost.total, cost.count
    return {
        "bytes": total.num_bytes / count,  # sent by a rank
        "blocked_s": total.blocked_s / count,  # seconds of waiting, posting, copying and adding
        "overlapped_s": total.overlapped_s / count,  # seconds under way while the rank did something else
        "worst_s": cost.worst_s,  # blocked_s of the rank that was blocked longest
        "worst_rank": cost.worst_rank,  # that rank
    }


def _compare_memory(
    trainer: Trainer, usages: list[RankUsage], resident_most: int | None
) -> tuple[MeasuredRun, list[MemoryRow]]:
    """Print the memory of this rank as predicted and as measured; return what the run has measured."""
    plan, actor, world = trainer.plan, trainer.actor, trainer.world
    rank = actor.pp.rank
    shards = actor.shards_here
    copies = copy_bytes(plan, rank, shards), trainer.saver.copied_bytes
    in_memory = memory_copy_bytes(plan, rank, shards), trainer.memory.own_bytes
    on_gpu = trainer.device.type == "cuda"
    staged = 0 if trainer.mesh.device_aware or not on_gpu else staged_bytes(plan, rank)
    predicted = predict(plan, shards, on_gpu)[rank]
    measured = measure(actor, trainer.watch)
    process = ON_A_GPU if on_gpu else memory_of_process(plan, rank, predicted)
    bytes_held = predicted, measured, copies, process, trainer.bare, resident_most, on_gpu, staged
    rows = compared(*bytes_held, in_memory)
    trainer.report.say(compare(rows))
    expected, held = sum(predicted) + copies[0] + sum(process), resident_most
    if on_gpu:
        expected = predicted.on_device
        held = torch.cuda.max_memory_allocated(trainer.device)
        reserved = torch.cuda.max_memory_reserved(trainer.device)
        trainer.report.say(
            f"GPU of rank 0, MB at most: {held / 1e6:,.2f} allocated, with what it works with; "
            f"{reserved / 1e6:,.2f} reserved by torch"
        )
    steps_s, gpu = trainer.steps_s, trainer.placement.gpu
    times = median(steps_s) if steps_s else 0.0, len(steps_s)
    comm = [usage.totals for usage in usages], trainer.ledger.num_steps
    node = world.node.size, world.node_cores, gpu.name if gpu else ""
    peak_flops = trainer.peak.flops / world.size
    return MeasuredRun(plan, *times, *comm, *node, peak_flops, expected, held), rows
