"""From a configuration to the list of instructions of every rank, and its proof. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import gather_of
from mpitrain.plan.division.stages import StagePlan
from mpitrain.schedules.actions import COPY, OFFLOAD, PAIR, RECEIVES, SENDS, SPREAD, Action
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.needs import partner
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.proof.check import Proof, check
from mpitrain.schedules.table import Table, forwards


class Programs(NamedTuple):
    """The instructions of a step for every pipeline rank, proved, and the table they come from."""

    table: Table
    ranks: list[list[Action]]
    report: Proof

    def other_ends(self, rank: int) -> dict[Action, int]:
        """Return, for the other end of each of a pipeline rank's messages, its position in its program."""
        wanted = {partner(action) for action in self.ranks[rank] if action.kind in (*SENDS, *RECEIVES)}
        return {action: at for program in self.ranks for at, action in enumerate(program) if action in wanted}


class LoweredPrograms(NamedTuple):
    """Programs before their proof, for predictions, and what they were lowered with.

    reduces: None for an evaluation.
    """

    table: Table
    ranks: list[list[Action]]
    reduces: list[Reduction] | None
    residency: Residency | None
    reduce_each: bool

    def proved(self) -> Programs:
        """Return the programs, proved. Raises ScheduleError with the flaw."""
        table = self.table
        proof = check(
            self.ranks,
            table.num_stages,
            table.num_microbatches,
            copies=table.copies,
            segments=table.segments,
            reduces=self.reduces,
            train=self.reduces is not None,
            residency=self.residency,
            reduce_each=self.reduce_each,
        )
        return Programs(table, self.ranks, proof)


def training(
    config: ResolvedConfig, table: Table, stages: Sequence[StagePlan], *, copies: bool = False
) -> LoweredPrograms:
    """Return the programs of a training step. Raises ConfigError for a choice that does nothing.

    copies: a copy of the state goes to another node.
    """
    parallel = config.parallel
    _refuse_idle_pairs(config, table)
    _refuse_idle_stashes(config, table)
    reduces = [stages[stage % table.depth].reduction for stage in range(table.num_stages)]
    residency = _residency(config, table, stages)
    reduce_each = parallel.reduce == "microbatch"
    # what is left open is settled where links have been measured
    tail = min(config.pipeline.tail or 1, table.num_microbatches)
    head = tail if parallel.zero else 1  # else weights are whole when a step begins
    pairs = config.pipeline.pairs
    programs = lower(
        table, reduces, tail=tail, head=head, residency=residency, reduce_each=reduce_each, pairs=pairs
    )
    if parallel.zero in (1, 2):
        programs = [[*program, SPREAD] for program in programs]
    if copies:
        programs = [[COPY, *program] for program in programs]
    return LoweredPrograms(table, programs, reduces, residency, reduce_each)


def evaluation(config: ResolvedConfig, table: Table, stages: Sequence[StagePlan]) -> LoweredPrograms:
    """Return the programs that only run a table's forwards, in its order."""
    forward = forwards(table)
    residency = _residency(config, table, stages)
    programs = lower(forward, [], train=False, residency=residency)
    return LoweredPrograms(forward, programs, None, residency, reduce_each=False)


def _refuse_idle_pairs(config: ResolvedConfig, table: Table) -> None:
    parallel, pipeline = config.parallel, config.pipeline
    number = sum(actions.count(PAIR) for actions in table.ranks)
    if pipeline.pairs == "parts" and not (number and (parallel.zero == 3 or parallel.reduce == "microbatch")):
        raise ConfigError(
            f'pipeline.pairs = "parts" does nothing: found {number} pairs in pipeline.schedule = '
            f'"{pipeline.schedule}", with parallel.zero = {parallel.zero} and parallel.reduce = '
            f'"{parallel.reduce}"; needed pairs (dualpipe, dualpipev), with parallel.zero = 3 or '
            'parallel.reduce = "microbatch"; change them, or leave pipeline.pairs out'
        )


def _refuse_idle_stashes(config: ResolvedConfig, table: Table) -> None:
    """Raise ConfigError if a table recomputes or offloads what blocks do anyway."""
    kinds = [action.kind for actions in table.ranks for action in actions]
    for key, value, values, kind, does in (
        ("recompute", config.memory.recompute, ("full", "every-k"), "R", "recomputes"),
        ("offload", config.memory.offload, ("activations", "all"), OFFLOAD, "offloads"),
    ):
        if kind in kinds and value in values:
            raise ConfigError(
                f'memory.{key} = "{value}" with {table.name}, which {does} '
                f"{counted(kinds.count(kind), 'microbatches')} "
                f"of a stage itself ({kind}): needed one of them; leave memory.{key} out"
            )


def _residency(config: ResolvedConfig, table: Table, stages: Sequence[StagePlan]) -> Residency | None:
    if config.parallel.zero < 3:
        return None
    uses = tuple(stages[stage % table.depth].uses for stage in range(table.num_stages))
    return Residency(uses, config.parallel.ahead, gather_of(config.parallel))
