"""One plan of a run: everything that follows from its configuration and number of ranks, by integers alone.

    model     what the model is made of (plan/declared/layer.py)
    table     who computes what, in which order (schedules/)
    stages    the layers, parameters, parts and buckets of each stage (plan/division/stages.py)
    training  the program of every pipeline rank, proved (plan/program.py); evaluation: without
              backwards; both not proved yet: lowered_training, lowered_evaluation, for predictions
    axes      which ranks share what (plan/axes.py)
    sizes     how much of a microbatch a rank has (plan/declared/layer.py)

Each part is made when it is first asked for. Ranks that differ only in their place along tp, cp or
dp are described once.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from mpitrain.config import Batch, Data, with_values
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.plan import program
from mpitrain.plan.axes import Axes, axes_of
from mpitrain.plan.declared.layer import Layer, ModelLayers, Sizes
from mpitrain.plan.declared.parameters import Spec, itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.batch_division import BatchDivision, TreeRun, division_of, odd_part
from mpitrain.plan.division.sequence import SequencePlacement, placement_of_rows
from mpitrain.plan.division.stages import StagePlan, stages_of
from mpitrain.plan.program import LoweredPrograms, Programs
from mpitrain.plan.routing import RoutingTrace
from mpitrain.plan.settings.pipeline_table import (
    fewest_microbatches,
    num_microbatches,
    placement_in,
    schedule_of,
    table_of,
)
from mpitrain.plan.settings.recompute import with_every
from mpitrain.schedules.table import Table

# numbers of a step with run.noise_scale: squares of its gradients, of shards of the batch and of all,
# and of the numbers of targets of shards
NOISE = ("squares_of_shards", "squares_of_batch", "squares_of_targets")


@dataclass(frozen=True)
class Plan:
    """The plan of a resolved configuration.

    Raises ScheduleError or ConfigError, whatever part is asked for, if it can't work.
    """

    config: ResolvedConfig
    model: ModelLayers
    run_tables: tuple[Data, Batch] | None = None  # of the run, if this is the plan of some of its steps

    @cached_property
    def table(self) -> Table:
        return table_of(self.config)

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """Of one copy of the model.

        A schedule's name tells where they are; only a table from a file has to be read for it.
        """
        rank_of, copies = placement_in(self.config) or (
            self.table.rank_of[: self.table.depth],
            self.table.copies,
        )
        stages = stages_of(self.config, self.model, rank_of, copies)
        if self.config.memory.recompute != "every-k":
            return stages
        return with_every(stages, (self if self.holds_all else self.shortest).table, self.sizes)

    @cached_property
    def lowered_training(self) -> LoweredPrograms:
        copies = bool(self.axes.unreplicated)
        return program.training(self.config, self.table, self.stages, copies=copies)

    @cached_property
    def lowered_evaluation(self) -> LoweredPrograms:
        return program.evaluation(self.config, self.table, self.stages)

    @cached_property
    def training(self) -> Programs:
        return self.lowered_training.proved()

    @cached_property
    def evaluation(self) -> Programs:
        return self.lowered_evaluation.proved()

    @cached_property
    def axes(self) -> Axes:
        return axes_of(self.config, self.table, self.tied, len(self.metrics))

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.config, self.table.segments, self.config.run.device == "cuda")

    @cached_property
    def placement(self) -> SequencePlacement | None:
        """Where the positions of a sequence are, if it is spread over ranks."""
        return placement_of_rows(self.config)

    @property
    def orders_rows(self) -> bool:
        """Whether rows are in the order that division/sequence.py gives them."""
        placement = self.placement
        return self.config.data.separates and placement is not None and placement.divides_documents

    @property
    def num_microbatches(self) -> int:
        """Of a step, on each data-parallel rank; the last ones of some ranks can be empty."""
        return num_microbatches(self.config)

    @cached_property
    def division(self) -> BatchDivision:
        """How the microbatches of a step are divided over data ranks."""
        return division_of(self.config)

    def run_of(self, dp_rank: int) -> TreeRun:
        """Return the microbatches of a data rank, of each copy of the model."""
        if not self.division.is_even:
            return self.division.run(dp_rank)
        number = self.table.num_microbatches // self.table.segments
        return TreeRun(range(dp_rank * number, (dp_rank + 1) * number), odd_part(number))

    @cached_property
    def shortest(self) -> "Plan":
        """The plan of a step with fewer microbatches in which ranks hold as much, or grow alike with each."""
        return self.with_microbatches(fewest_microbatches(self.config))

    @property
    def holds_all(self) -> bool:
        """Whether a rank holds something of all microbatches at once."""
        return bool(self.shortest is not self and schedule_of(self.config.pipeline.schedule).held == "all")

    def with_microbatches(self, number: int) -> "Plan":
        """Return the plan of a step of so many microbatches, which is this one if it has as many."""
        if number == self.num_microbatches:
            return self
        rows = number * self.config.parallel.dp * self.config.batch.micro
        return self.with_values({"batch.global_": rows})

    def changed(self, **tables: Any) -> "Plan":
        """Return the plan of the same model with other tables of the configuration."""
        return dataclasses.replace(self, config=msgspec.structs.replace(self.config, **tables))

    def with_values(self, values: Mapping[str, Any]) -> "Plan":
        """Return the plan of the same model with other values of some keys, such as "parallel.zero"."""
        return dataclasses.replace(self, config=with_values(self.config, values))

    def at_step(self, step: int) -> "Plan":
        """Return the plan of a step, whose batch or rows may have another size (batch.growth, lengths)."""
        config = self.config
        batch = config.batch
        if not (batch.growth or batch.lengths):
            return self
        sizes = BatchSizes(batch)
        length = sizes.length_at(step) or config.data.sequence
        rows = config.data.sequence // length
        own = Batch(global_=sizes.at(step) * rows, micro=batch.micro * rows)
        plan = self.changed(batch=own, data=msgspec.structs.replace(config.data, sequence=length))
        return dataclasses.replace(plan, run_tables=(config.data, batch))

    @property
    def run_config(self) -> ResolvedConfig:
        """The configuration of the whole run, of which this may be the plan of some steps."""
        if self.run_tables is None:
            return self.config
        data, batch = self.run_tables
        return msgspec.structs.replace(self.config, data=data, batch=batch)

    @property
    def growing(self) -> tuple["Plan", ...]:
        """The plans of all batches and lengths of rows of a run, each proved; none if they never change."""
        batch = self.config.batch
        if not (batch.growth or batch.lengths):
            return ()
        plans = tuple(self.at_step(step) for step in BatchSizes(batch).firsts)
        assert all(plan.training for plan in plans)
        return plans

    def stage(self, number: int) -> StagePlan:
        """Return the stage of the model that stage `number` of the table is."""
        return self.stages[number % self.table.depth]

    def positions(self, cp_rank: int) -> np.ndarray:
        """Return the positions of a sequence that a rank of the context-parallel axis has, [T]."""
        whole = np.arange(self.config.data.sequence)
        return whole if self.placement is None else self.placement.positions(cp_rank)

    def activation_shape(self) -> tuple[int, int, int]:
        """Return what travels between stages, [B, T, D]."""
        parallel = self.config.parallel
        divided = self.table.segments * parallel.cp * (parallel.tp if parallel.sequence else 1)
        return self.config.batch.micro, self.config.data.sequence // divided, self.config.model.width

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the numbers that layers make besides their outputs, and of run.noise_scale."""
        of_layers = sorted({name for layer in self.layers for name in layer.metrics})
        return (*of_layers, *NOISE) if self.config.run.noise_scale else tuple(of_layers)

    @property
    def tied(self) -> bool:
        """Whether the first and the last stage have the same embedding."""
        return any(spec.tied for spec in self.model.first.parameters())

    @cached_property
    def routing(self) -> RoutingTrace | None:
        """Which experts tokens are sent to, if that is replayed."""
        if not self.config.experts.replay:
            return None
        from mpitrain.plan.routing_file import read  # with it comes zipfile

        return read(self.config, self.loads)

    @cached_property
    def loads(self) -> list[Spec]:
        """The loads of the blocks that have experts."""
        return [spec for spec in self.parameters() if spec.group == "load"]

    def parameters(self) -> list[Spec]:
        """Return every parameter of the model once, whole."""
        specs = (spec for stage in self.stages for block in stage.specs() for spec in block)
        return list({spec.name: spec for spec in specs}.values())

    def stored_weights(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return dtype, the optimiser's, and shape of every weight by its name in a checkpoint."""
        dtype = np.dtype(f"<f{itemsizes_of(self.config)[1]}")
        return {f"parameters/{spec.name}": (dtype, spec.shape) for spec in self.parameters()}

    def flops_per_token(self, attended_length: int | None = None) -> float:
        """Return the model FLOPs of a token in a training step, see Layer.flops.

        attended_length: of the sequences that attention crosses; default: data.sequence.
        """
        return self.model.flops(attended_length or self.config.data.sequence)

    def recomputed_flops_per_token(self, attended_length: int | None = None) -> float:
        """Return the FLOPs of a token that memory.recompute and the table's R add to a training step.

        A forward, two of six FLOPs of a weight and a third of attention: of whole blocks, with
        "selective" of attention alone, with R of all that a stage has.
        """
        recompute = self.config.memory.recompute
        sequence = attended_length or self.config.data.sequence
        by_table = self._recomputed_by_table(sequence)
        if recompute in ("full", "every-k"):
            return by_table + self.model.block_flops(sequence) / 3
        if recompute == "selective" and not self.sizes.core_alone:
            return by_table + self.model.core_flops(sequence) / 3
        return by_table

    def _recomputed_by_table(self, sequence: int) -> float:
        table = self.table
        forwards = [
            sum(placed.layer.flops(sequence) for block in stage.blocks for placed in block) / 3
            for stage in self.stages
        ]
        again = (action.stage % table.depth for row in table.ranks for action in row if action.kind == "R")
        return sum(forwards[stage] for stage in again) / (table.num_microbatches * table.copies)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self.model.first, *(layer for block in self.model.blocks for layer in block), self.model.last)
