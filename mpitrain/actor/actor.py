"""One rank at work: it owns a mesh, its stages and a program, and walks through it in a training step.

for instruction in program:  what stands in the list happens, in this order; `place` tells where the
                             rank is
    F, B, I, W   a stage's forward or backward, segment by segment; between segments messages are
                 moved on (stage_compute.py)
    O            has the next forward put what it keeps into host memory
    R            the forward again of a microbatch whose F kept its input alone
    PAIR         the next two in turns, segment by segment: a forward and a backward, or parts
    SEND         starts and returns; all sends are waited for before the update (pipeline_messages.py)
    RECV         waits; the next receives of the list are posted ahead
    COPY         starts sending a copy of the state to another node (partner_copies.py)
    SUM, REDUCE  start the sum of one bucket over one axis (reductions.py); NORM waits for all of
                 them, and for COPY (update.py)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch

from mpitrain.actor.memory_meter import Watch
from mpitrain.actor.pipeline_messages import PipelineMessages
from mpitrain.actor.profiler import Profiler
from mpitrain.actor.reductions import Gradients
from mpitrain.actor.stage import Stage
from mpitrain.actor.stage_compute import Compute
from mpitrain.actor.step_totals import Measure, StepTotals, together
from mpitrain.actor.step_work import NOTHING_ASKED, StepRequests, StepResult, Work, number_in_step
from mpitrain.actor.trace import Recorder
from mpitrain.actor.update import Update, owned_weights
from mpitrain.cluster.status_board import BUSY, RankStatus
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.kernels.compiled import functions_of
from mpitrain.model.blocks import Blocks, blocks_of
from mpitrain.model.build_context import BuildContext
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.optimizer import optimizer_of
from mpitrain.parallel.microbatch import Microbatch, MicrobatchCutter
from mpitrain.parallel.zero.shards import reserve, zero_groups_of
from mpitrain.plan.division.stages import StagePlan
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.pool_sizes import EVALUATION, TRAINING, needed_by
from mpitrain.schedules.actions import Action

UNRECORDED = Recorder(range(0))


GradientPass = Callable[[], Work]  # computes the gradients of a step: its program up to the update
PassRunner = Callable[[GradientPass], Work]  # runs a gradient pass, once or again


def run_once(gradient_pass: GradientPass) -> Work:
    """Run a gradient pass once, and compare it with nothing."""
    return gradient_pass()


class Actor:
    """This rank.

    recorder: notes when instructions ran.
    place: notes where in the program the rank is.
    build: makes what computes of a stage's layers.
    measure: reads the numbers of a step.
    compiled: whether operations between products are; None: where run.compile = true.
    training: without, it has no gradients and no masters, and only evaluates.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        recorder: Recorder | None = None,
        place: RankStatus | None = None,
        build: Callable[[StagePlan, Sequence, BuildContext], Blocks] = blocks_of,
        measure: Measure | None = None,
        compiled: bool | None = None,
        training: bool = True,
    ):
        config = plan.config
        self.plan = plan
        self.config = config
        self.mesh = mesh
        self.progress = mesh.progress
        self.recorder = recorder or UNRECORDED
        self.profiler = Profiler(device)
        self.place = place or RankStatus()
        self.measure = measure or Measure()
        self.pp, self.tp, self.cp = (mesh[name] for name in ("pp", "tp", "cp"))
        self.table = plan.table
        self.training = plan.training.ranks[self.pp.rank]
        self.evaluation = plan.evaluation.ranks[self.pp.rank]
        self.zero_groups = zero_groups_of(config, mesh)
        self.loss_scale = LossScale(config.precision)
        axes = (mesh[name] for name in ("tp", "cp", "experts", "tokens", "experts_near", "experts_far"))
        self.compiled = config.run.compile is True if compiled is None else compiled
        functions = functions_of(self.compiled, config.numerics.deterministic, device)
        self.site = BuildContext(plan, device, *axes, functions, training)
        self._update_at = self.training.index(Action("UPDATE"))
        self._ends = plan.training.other_ends(self.pp.rank)
        self._ends_of_evaluation = plan.evaluation.other_ends(self.pp.rank)
        self.stages = self._build(build)
        first = any(stage.first for stage in self.stages.values())
        last = any(stage.last for stage in self.stages.values())
        self.cutter = MicrobatchCutter(plan, self.cp.rank, first, last)
        states = {number: stage.state for number, stage in self.stages.items()}
        needed = needed_by(plan, self.pp.rank, (self.tp.rank, mesh["experts"].rank), mesh["dp"].rank)
        reserve(self.zero_groups, needed, self.site.dtype, device, training)
        self.gradients = Gradients(plan, states, self.training, mesh, needed.waits)
        plans = [stage.plan for stage in self.stages.values()]
        owned = owned_weights(self.stages)
        self.optimizer = optimizer_of(config, plans, self.gradients.pieces, mesh, owned[0].master, device)
        sizes = self.table.num_stages, self.table.num_microbatches
        links = Links(mesh["links"], *sizes, synchronous=config.comm.synchronous)
        self._totals = StepTotals(plan, mesh, self.measure)
        self._messages = PipelineMessages(plan, links, self.site)
        self.compute = Compute(plan, self.stages, self.gradients, self.loss_scale, device, mesh["dp"].rank)
        self._update = Update(
            plan, mesh, owned, self.gradients, self.optimizer, self.loss_scale, self._totals
        )
        # what sends copies of the state to another node; None: no part of it is on one node only
        self.partner_copies = self._update.partner_copies
        self._handlers = self._handlers_of_kinds()

    def _handlers_of_kinds(self) -> dict[str, Callable[[Action, Work], None]]:
        """Return what carries out an instruction, by its kind; `_walk` takes PAIR apart."""
        compute, messages, update = self.compute, self._messages, self._update
        return {
            "COPY": update.copy,
            "F": compute.forward,
            "B": compute.backward,
            "I": compute.backward,
            "W": compute.weight_backward,
            "R": compute.recompute,
            "O": compute.offload,
            "SEND_F": messages.send,
            "SEND_B": messages.send,
            "RECV_F": messages.receive,
            "RECV_B": messages.receive,
            "GATHER": compute.gather,
            "RELEASE": compute.release,
            "SUM": self.gradients.sum,
            "REDUCE": self.gradients.reduce,
            "NORM": update.norm,
            "UPDATE": update.update,
            "SPREAD": update.spread,
        }

    def _build(self, build: Callable[[StagePlan, Sequence, BuildContext], Blocks]) -> dict[int, Stage]:
        """Build the stages of this rank, by number in the table; they share a tied embedding."""
        stages: dict[int, Stage] = {}
        embedding = None
        for number in self.table.chunks[self.pp.rank]:
            self.place.enter("build", f"building stage {number}", BUSY)
            stages[number] = Stage(self.plan.stage(number), self.site, self.zero_groups, embedding, build)
            embedding = embedding or stages[number].state.embedding
        return stages

    @property
    def shards_here(self) -> dict[str, int]:
        """The number of this rank's shard, by domain."""
        return {name: zero_group.rank for name, zero_group in self.zero_groups.items()}

    # ------------------------------------------------------------ single training step

    def run_step(
        self,
        step: int,
        microbatches: list[Microbatch],
        lr: float,
        *,
        asked: StepRequests = NOTHING_ASKED,
        watch: Watch | None = None,
        pass_runner: PassRunner = run_once,
    ) -> StepResult:
        """Run one training step on this rank's microbatches. Collective over all ranks.

        asked: its `stop` is called once, whatever number of passes there is.
        watch: counts what is held after every instruction.
        pass_runner: runs the gradient pass, once or again; the gradients of the last one are used.
        Raises HangError, naming the message waited for.
        """
        asked = replace(asked, stop=cache(asked.stop))
        before = self.training[: self._update_at]
        after = self.training[self._update_at :]

        def compute_gradients() -> Work:
            self._lend(TRAINING)
            for stage in self.stages.values():
                stage.state.zero_grad()
            if self.compute.recorded:  # the routing of a pass before
                self.compute.recorded.clear()
            self.gradients.squares_of_shards = []
            self.recorder.begin(step)
            work = Work(microbatches, self._ends, self._between(watch), step, lr, asked)
            return self._walk(before, work, self.recorder, watch)

        with nullcontext() if watch is None else watch.watching():
            work = self._walk(after, pass_runner(compute_gradients), self.recorder, watch, len(before))
        self.recorder.end()
        return work.result

    def evaluate(
        self, step: int, microbatches: list[Microbatch], asked: StepRequests = NOTHING_ASKED
    ) -> tuple[float, float, int]:
        """Return (summed loss, tokens, how urgent it is to stop) of all ranks. Collective."""
        self._lend(EVALUATION)
        work = Work(microbatches, self._ends_of_evaluation, self.progress.poll, step, asked=asked)
        with torch.no_grad():
            self._walk(self.evaluation, work, UNRECORDED)
        total = together(self._totals.of(work, []))
        return math.fsum(total.loss), total.count, total.stop

    def score(self, microbatches: list[Microbatch]) -> dict[int, torch.Tensor]:
        """Return the loss and the likeliest token of each position, [2, B, T], without gradients.

        By the number of the microbatch; on ranks of the last stage alone. Collective over all
        ranks: before the next program they have to wait for one another.
        """
        self._lend(EVALUATION)
        scored = [replace(microbatch, scoring=True) for microbatch in microbatches]
        work = Work(scored, self._ends_of_evaluation, self.progress.poll)
        with torch.no_grad():
            self._walk(self.evaluation, work, UNRECORDED)
        return {number_in_step(self.table, *key): made for key, made in work.losses.items()}

    def _between(self, watch: Watch | None) -> Callable[[], None]:
        """Return what is done between two items of a block: messages are moved on."""

        def watched() -> None:
            self.progress.poll()
            watch.look_inside()

        return self.progress.poll if watch is None else watched

    def _lend(self, program: str) -> None:
        """Begin a program: its buffers are taken in its order."""
        for zero_group in self.zero_groups.values():
            zero_group.weights.begin(program)
            zero_group.gradients.begin(program)

    def _walk(
        self,
        instructions: list[Action],
        work: Work,
        recorder: Recorder,
        watch: Watch | None = None,
        first: int = 0,
    ) -> Work:
        """Run instructions, of which the first stands at position `first` of the program."""
        self._messages.begin(instructions, work)
        steps = enumerate(instructions, start=first)
        for position, action in steps:
            self.place.moved(work.step, position, str(action))
            self.progress.poll()
            self.gradients.advance()
            begin = recorder.mark()
            if action.kind == "PAIR":
                forward = next(steps)[1]
                backward = next(steps)[1]
                with self.profiler.instruction(forward, backward):
                    self.compute.pair(forward, backward, work)
                recorder.add_pair(action, forward, backward, begin, recorder.mark())
            else:
                with self.profiler.instruction(action):
                    self._handlers[action.kind](action, work)
                recorder.add(action, begin, recorder.mark())
            if watch is not None:
                watch.look()
        for pending in work.sending:
            pending.wait()
        return work

    # ------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Wait for weights that are on their way: what is read next would be written over by them."""
        self._update.settle()

    def restored(self, num_updates: int) -> None:
        """Take over what was read into the pieces. Collective over the data axis."""
        self._update.restored(num_updates)
