"""`mpitrain program` and `mpitrain check`.

What a layout would do, without MPI's world, and but for --traffic without torch.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain import config as settings
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.commands.declared_options import MOST_RANKS
from mpitrain.config import Config, LoadedConfig, Parallel
from mpitrain.data.tokenizer import separator, tokenizer_of, vocabulary_of
from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.model.families.catalog import plan_for
from mpitrain.origins import PLANNER, KeyOrigin
from mpitrain.plan.declared.screen import columns
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.link_choices import left_open
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.memory_limit import (
    change_that_fits,
    computes_on_gpu,
    held_by_ranks,
    limit_of_rank,
    require_limit,
)
from mpitrain.plan.predict.memory_table import fit_line, parameter_line, table_of_usage
from mpitrain.plan.predict.model_parts import activation_line, parts_table
from mpitrain.plan.predict.process_memory import processes_memory
from mpitrain.plan.predict.promises import (
    RECOMPUTE,
    REGATHER,
    ZERO,
    by_value,
    idle_axes,
    idle_here,
    idle_schedule,
    idle_values,
)
from mpitrain.plan.predict.snapshot_bytes import copy_bytes, memory_copy_bytes
from mpitrain.plan.predict.speed_costs import costs, zero_line
from mpitrain.plan.predict.staged_bytes import staged_bytes
from mpitrain.plan.predict.step_time.advice import advice_for, judge
from mpitrain.plan.predict.step_time.machine import find_machine
from mpitrain.plan.settings.job_ranks import THERE_ARE, JobRanks
from mpitrain.plan.settings.recompute import recompute_line
from mpitrain.plan.settings.rule_table import idle_settings
from mpitrain.planner.layout_request import LayoutRequest
from mpitrain.planner.run_layout import choose_layout
from mpitrain.schedules.actions import Action, format_program
from mpitrain.schedules.play.draw import MOST_LINES, WIDTH, grid, least_lines
from mpitrain.schedules.proof.check import Proof
from mpitrain.schedules.table import heads_of
from mpitrain.training.run_plan import beginning

PROGRAM_WIDTH = 100  # at most
ORDER = 'data.order = "sorted" takes 16 bytes for each sequence of the corpus, too, on every rank'


def planned(path: str | None, overrides: tuple[str, ...], ranks: JobRanks | int) -> Plan:
    """Read a configuration and plan it for the ranks of a job; a number of them is on one node."""
    if isinstance(ranks, int):
        ranks = JobRanks.filling(ranks, ranks)
    return _plan_of(settings.read(path, overrides), ranks)


def judged_job(
    path: str | None, overrides: tuple[str, ...], num_nodes: int, node_ranks: int, on_gpu: bool
) -> tuple[Plan, list[str]]:
    """Return the plan of a job's run, and what is said of its layout, advice included.

    This computer isn't the one that will run it: without run.machine or memory.limit_gb the layout
    is the default. Raises ConfigError for one that these have no room for.
    """
    given = settings.read(path, overrides)
    ranks = _ranks_of_layout(num_nodes, node_ranks, given.config.recovery.spares)
    lines: list[str] = []
    if given.config.run.machine or given.config.memory.limit_gb:
        given, lines = _chosen(given, ranks)
    plan = _plan_of(given, ranks)
    config = _on_gpu(given.config) if on_gpu else given.config
    judged = _plan_of(given.changed(config, KeyOrigin(PLANNER)), ranks)
    return plan, [*lines, *judge(judged, config, _planned_from(given, ranks), node_ranks)]


def _ranks_of_layout(num_nodes: int, node_ranks: int, spares: int) -> JobRanks:
    """Return the ranks with a place in the layout: spare ones (recovery.spares) are the last."""
    started = num_nodes * node_ranks
    if spares >= started:
        raise ConfigError(
            f"recovery.spares = {spares}: found {counted(started, 'ranks')}, needed more than "
            "spares; ask for more"
        )
    ranks = JobRanks.filling(started - spares, node_ranks)
    return ranks._replace(node_ranks=0) if ranks.size % node_ranks else ranks


def _on_gpu(config: Config) -> Config:
    return settings.with_values(config, {"run.device": "cuda"}) if config.run.device == "auto" else config


def _planned_from(given: LoadedConfig, ranks: JobRanks) -> Callable[[Config], Plan]:
    return lambda config: _plan_of(given.changed(config, KeyOrigin(PLANNER)), ranks)


def _as_run(given: LoadedConfig, num_ranks: int) -> tuple[Plan, list[str], int]:
    """Return the plan of a run, what is said of a layout that wasn't given, and the bytes that count.

    Raises ConfigError for one that the named machine, or memory.limit_gb, has no room for.
    """
    ranks = _ranks_on(given.config, num_ranks)
    chosen, lines = _chosen(given, ranks)
    plan = _plan_of(chosen, ranks)
    return plan, lines, require_limit(plan, chosen.config, _planned_from(chosen, ranks))


def _chosen(given: LoadedConfig, ranks: JobRanks) -> tuple[LoadedConfig, list[str]]:
    """Return the configuration with its layout, and what is said of one that wasn't given."""
    begun, _ = beginning(given)
    config = begun.config
    vocabulary = vocabulary_of(tokenizer_of(config.data))
    separator(config.data, vocabulary)
    config, lines = choose_layout(LayoutRequest(config, begun.origins, ranks, vocabulary))
    return begun.changed(config, KeyOrigin(PLANNER)), lines


def _ranks_on(config: Config, num_ranks: int) -> JobRanks:
    """Return ranks on the nodes of a named machine; without one, on a node of any size."""
    if not config.run.machine:
        return JobRanks(num_ranks, source=THERE_ARE)
    return JobRanks.filling(num_ranks, find_machine(config.run.machine).ranks_per_node)


def _plan_of(given: LoadedConfig, ranks: JobRanks) -> Plan:
    config = beginning(given)[0].config
    tokenizer = tokenizer_of(config.data)
    separator(config.data, tokenizer)
    return plan_for(config, ranks, tokenizer)


def show_program(
    config: str | None, overrides: tuple[str, ...], num_ranks: int, rank: int | None, traffic: bool = False
) -> str:
    """Return the program of one rank, or of every pipeline rank, as pipeline.schedule's files have it.

    traffic: for one rank, add what it sends, as a comment.
    """
    plan, said, _ = _as_run(settings.read(config, overrides), num_ranks)
    width = min(columns() or PROGRAM_WIDTH, PROGRAM_WIDTH)
    notes = [f"# {line}" for line in said]
    with ProgressBar("mpitrain program"):
        programs = plan.training.ranks
    if rank is None:
        if traffic:
            raise ConfigError("--traffic: pipeline ranks send different messages; give --rank, too")
        heads = [f"{what} {number}" for what, number in heads_of(plan.table)]
        texts = (format_program(actions, width, first=f"rank {pp}: ") for pp, actions in enumerate(programs))
        return "\n\n".join([*notes, *heads, *texts])
    if rank >= num_ranks:
        raise ConfigError(
            f"--rank {rank}: this layout has ranks 0 to {num_ranks - 1}; give --ranks the number "
            "of ranks you start"
        )
    at = plan.axes.grid.coordinates(rank)
    title = "\n".join([*notes, ""]) if notes else ""
    title += f"# rank {rank}: tp {at['tp']}, cp {at['cp']}, dp {at['dp']}, pp {at['pp']}"
    if not plan.division.is_even:
        title += f"\n# {_run_of(plan, at['dp'])}"
    return f"{title}\n{format_program(programs[at['pp']], width)}" + (_traffic(plan, rank) if traffic else "")


def _run_of(plan: Plan, dp_rank: int) -> str:
    """Say which microbatches of the step a data rank has, and which of its program are empty."""
    leaves, of_all = plan.division.run(dp_rank).leaves, plan.division.num_microbatches
    words = f"microbatches {leaves.start} to {leaves.stop - 1} of the {of_all} of a step"
    empty = range(len(leaves), plan.num_microbatches)
    return words + (f"; empty: {', '.join(map(str, empty))}" if empty else "")


def _traffic(plan: Plan, rank: int) -> str:
    from mpitrain.actor.rehearsal import Rehearsal

    rehearsal = Rehearsal(plan, rank)
    lines = "\n".join(f"# {line}" for line in rehearsal.table().splitlines())
    return f"\n\n# its messages in a step, {rehearsal.way()}:\n{lines}"


def show_memory(config: str | None, overrides: tuple[str, ...], num_ranks: int) -> str:
    """Return the memory of each pipeline rank, in MB, and what other settings would make of it."""
    given = settings.read(config, overrides)
    ranks = _ranks_on(given.config, num_ranks)
    chosen, said = _chosen(given, ranks)
    if computes_on_gpu(chosen.config):
        chosen = chosen.changed(_on_gpu(chosen.config), KeyOrigin(PLANNER))
    plan = _plan_of(chosen, ranks)
    limit = limit_of_rank(chosen.config, num_ranks, ranks.node_ranks)
    with ProgressBar("mpitrain memory"):
        plan.shortest.training  # noqa: B018  # a schedule that can't run has no memory: proved here
        usages = predict(plan)
        stage_ranks = range(plan.config.parallel.pp)
        copies = [copy_bytes(plan, rank) for rank in stage_ranks]
        in_memory = [memory_copy_bytes(plan, rank) for rank in stage_ranks]
        processes = processes_memory(plan, usages)
        held = held_by_ranks(plan, limit.on_gpu) if limit else []
        planned = _planned_from(chosen, ranks)
        fits = fit_line(held, limit, lambda limit: change_that_fits(plan, chosen.config, planned, limit))
        is_direct = plan.config.comm.device == "direct"
        staged = [0 if is_direct else staged_bytes(plan, rank) for rank in stage_ranks]
        stages = by_value(plan, ZERO)
        modes = by_value(plan, RECOMPUTE, ("none", "selective", "every-k", "full"))
        regathers = by_value(plan, REGATHER)
    lines = [
        *said,
        "Memory of each pipeline rank, of its rank with the largest shard; MB are 10**6 bytes:",
        table_of_usage(usages, copies, staged, processes, in_memory),
        parameter_line(plan),
        parts_table(plan),
        activation_line(plan),
        fits,
        zero_line(given.config, plan.config),
        recompute_line(plan.stages),
        *idle_settings(plan.config, given.origins),
        *costs(plan),
        *(_compared(ZERO, stages) if len(stages) > 1 else ()),
        *idle_values(plan, ZERO, stages),
        *_compared(RECOMPUTE, modes),
        *idle_values(plan, RECOMPUTE, modes),
        *(_compared(REGATHER, regathers) if regathers else ()),
        *idle_values(plan, REGATHER, regathers),
        *idle_axes(plan),
        *idle_schedule(plan),
        *advice_for(plan, held=max(held, default=0)),
        ORDER if plan.config.data.order == "sorted" else "",
    ]
    return "\n".join(filter(None, lines)) + _left_open(plan)


def _compared(key: str, layouts: Mapping[Any, int]) -> list[str]:
    values = "; ".join(f"{str(value).lower()} {held / 1e6:,.2f}" for value, held in layouts.items())
    return [f"total MB of the rank with most memory, by {key}: {values}"]


def _left_open(plan: Plan) -> str:
    """Say what a run over several nodes may choose, at the price of memory."""
    keys = " and ".join(left_open(plan))
    more = (
        "chosen for one node; over several nodes a run may choose a value that needs more memory: "
        "set it to see that"
    )
    return f"\n{keys}: {more}" if keys else ""


def show_proof(config: str | None, overrides: tuple[str, ...], num_ranks: int) -> str:
    """Return what was proved of a layout, and its picture. Raises ScheduleError with the flaw."""
    given = settings.read(config, overrides)
    plan, chosen, held = _as_run(given, num_ranks)
    with ProgressBar("mpitrain check"):
        _, programs, report = plan.training
        said = [
            *chosen,
            zero_line(given.config, plan.config),
            *idle_settings(plan.config, given.origins),
            *costs(plan),
            *idle_here(plan),
            *advice_for(plan, held=held),
        ]
    notes = "".join(f"{note}\n" for note in plan.table.notes)  # of a table from a file
    peaks = ", ".join(map(str, report.peak_in_flight))
    parallel = plan.config.parallel
    name = plan.config.pipeline.schedule
    each = counted(report.num_microbatches, "microbatches")
    matched = counted(report.num_messages, "messages")
    return (
        f"{_picture(plan)}\n\ntp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp} x pp {parallel.pp}, "
        f"{name}, {each} per data rank{_unequal(plan)}\n{notes}"
        f"proved: {report.num_actions} instructions complete and in order, {matched} matched, no "
        "deadlock without buffering\nmicrobatches in flight at most, per pipeline rank: "
        f"{peaks}{_divided(programs, report, parallel)}" + "".join(f"\n{line}" for line in filter(None, said))
    )


def _picture(plan: Plan) -> str:
    width = columns() or WIDTH
    if (lines := least_lines(plan.table, width)) <= MOST_LINES:
        return grid(plan.training.ranks, width=width)
    return (
        f"The grid has {lines:,} lines or more: `mpitrain schedule`, with --out picture.svg, draws "
        "schedules of any size"
    )


def _unequal(plan: Plan) -> str:
    """Say that some microbatches of the program are empty, on some data ranks."""
    if plan.division.is_even:
        return ""
    numbers, most = plan.division.numbers, plan.division.most_subtrees
    return f", of which data ranks have {numbers} and sum up to {most} subtrees of gradients"


def _divided(programs: Sequence[Sequence[Action]], report: Proof, parallel: Parallel) -> str:
    """Say how often gradients are reduced and weights fetched in a step."""
    if parallel.zero < 2:
        return ""
    reductions = ", ".join(str(sum(action.kind == "REDUCE" for action in program)) for program in programs)
    lines = [
        f'reductions of a bucket a step (parallel.reduce = "{parallel.reduce}"), per pipeline rank: '
        f"{reductions}"
    ]
    if parallel.zero == 3:
        counts, most = (", ".join(map(str, numbers)) for numbers in (report.gathers, report.peak_resident))
        gather = f'"{parallel.gather}"' + ', which is "use" until links are measured' * (
            parallel.gather == "auto"
        )
        lines.append(
            f"fetches of a block a step (parallel.gather = {gather}): {counts}; there at once at most: {most}"
        )
    return "".join(f"\n{line}" for line in lines)


def degrees(text: str, overrides: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Read `tp=2,pp=2`; return it as further overrides, and the number of ranks.

    Axes that are left out have degree 1; ep and etp are folded over the ranks of the others.
    """
    axes = ("tp", "cp", "dp", "pp", "ep", "etp")
    sizes = {}
    for word in text.split(","):
        axis, _, degree = word.partition("=")
        # isdigit takes '²', which int() refuses, and digits of other scripts, which TOML refuses
        if axis not in axes or not re.fullmatch("[1-9][0-9]{0,8}", degree):
            raise ConfigError(
                f"--layout {shown(text)}: found '{shown(word)}', needed axes of {', '.join(axes)} "
                "with degrees, such as tp=2,pp=2"
            )
        if axis in sizes:
            raise ConfigError(f"--layout {shown(text)}: found {axis} twice; leave one out")
        sizes[axis] = int(degree)
    num_ranks = math.prod(degree for axis, degree in sizes.items() if axis not in ("ep", "etp"))
    if num_ranks > MOST_RANKS:
        raise ConfigError(f"--layout {shown(text)}: found {num_ranks:,} ranks, needed at most {MOST_RANKS:,}")
    return (*overrides, *(f"parallel.{axis}={sizes.get(axis, 1)}" for axis in axes)), num_ranks
