"""What a run says before its first step: what is trained, on what, and how."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mpitrain.actor.actor import Actor
from mpitrain.cluster.crowding import crowded
from mpitrain.comm.base import library
from mpitrain.comm.base.world import World
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.corpus import corpus_of
from mpitrain.errors import counted
from mpitrain.plan.predict.promises import idle_here
from mpitrain.plan.predict.speed_costs import costs
from mpitrain.plan.settings.recompute import recompute_line
from mpitrain.training.corpora import Corpora
from mpitrain.training.machine.determinism import DETERMINISM_MESSAGES
from mpitrain.training.machine.device_placement import DevicePlacement, shared
from mpitrain.training.machine.peak_flops import COUNTED, PeakFlops
from mpitrain.training.validation import Validation

# arXiv:2407.21783, table 4
PUBLISHED = "for comparison, on GPUs: Llama 3 405B 38 to 43 %; above 40 % is excellent"


@dataclass
class Announcements:
    """The lines of a run. peak: that of the MFU."""

    world: World
    actor: Actor
    corpora: Corpora
    placement: DevicePlacement
    validation: Validation
    peak: PeakFlops

    def __post_init__(self) -> None:
        self._plan, self._mesh = self.actor.plan, self.actor.mesh

    def lines(self) -> Iterator[str]:
        """Yield the first lines of a run; "" for one that doesn't apply. Collective over all ranks."""
        yield from self._model_lines()
        yield self._validation_line()
        yield "\n".join(f"{self._plan.table.name}: {note}" for note in self._plan.table.notes)
        yield crowded(library.vendor(), self.world.node.size, self.world.node_cores)
        yield from self._cost_lines()
        yield self.world.first_of("which axes lack shared memory", self._mesh.budget.describe())
        yield f"MFU: relative to {self.peak.source}\n  {COUNTED}\n  {PUBLISHED}"
        kernels = dict.fromkeys(kernel.value for kernel in self.actor.site.attention_kernels)
        yield f"attention: {', '.join(kernels)}" if kernels else ""
        yield self.placement.not_compiled
        if self.actor.compiled:
            compiler = "Triton" if self.placement.gpu else "C++"
            yield f"operations between matrix products are compiled (run.compile), in {compiler}"
        yield from self._device_lines()

    def _model_lines(self) -> Iterator[str]:
        config = self._plan.config
        model = config.model
        count = sum(spec.numel for spec in self._plan.parameters())
        yield (
            f"ranks: {self._mesh.size}, nodes: {self.world.num_nodes}, {self._mesh.grid}; "
            f"{config.pipeline.schedule}, microbatches a rank: {self._plan.division.numbers}; "
            f"{self.placement.device.type}, threads a rank: {torch.get_num_threads()}"
        )
        batch, sequence = counted(config.batch.global_, "sequences"), counted(config.data.sequence, "tokens")
        yield (
            f"{count / 1e6:.2f} M parameters ({counted(model.layers, 'blocks')} of width {model.width}), "
            f"{batch} of {sequence} a step, "
            f"training on {counted(self.corpora.train.num_sequences, 'sequences', ',')} of "
            f"{corpus_of(config.data).source}, in the order {self.corpora.order}"
        )

    def _validation_line(self) -> str:
        config = self._plan.run_config
        asked = config.run.eval_batches * BatchSizes(config.batch).at(1)
        used = f" of {self.corpora.validation.num_sequences:,}"
        validated = self.validation.num_sequences
        if validated < asked:
            used = f", all there are, of {asked:,} asked for (run.eval_batches x batch.global)"
        held_out = self.corpora.validation_description
        return f"validation on {counted(validated, 'sequences', ',')}{used}; held out: {held_out}"

    def _cost_lines(self) -> Iterator[str]:
        if not self._mesh["tp"].one_node:
            tp = f"parallel.tp = {self._plan.config.parallel.tp}"
            yield f"{tp} spans nodes: every layer waits for the network; use a smaller tp"
        yield from costs(self._plan)
        if self.world.rank == 0:
            yield from idle_here(self._plan)
        yield recompute_line(self._plan.stages)

    def _device_lines(self) -> Iterator[str]:
        """Say which GPU, who shares one, and how messages get there. Collective over all ranks."""
        gpu = self.placement.gpu
        wanted = self._plan.config.comm.device
        if gpu is None:
            if wanted != "auto":
                yield f'comm.device = "{wanted}" has no effect: this run computes on CPUs'
            return
        yield f"GPU of rank 0: {gpu}; {self._mesh.way}"
        yield DETERMINISM_MESSAGES[self._plan.config.numerics.deterministic]
        said = shared(self.placement, self.world)
        yield f"{said}: they take turns, and have its memory and its peak together" if said else ""
