"""One rank at work: it owns a mesh, its stages and a program, and a training step is the walk
through the program.

for instruction in program:  what stands in the list happens, in this order; `place` tells where the
                             rank is
    compute      a stage's forward or backward, segment by segment; between segments messages are
                 moved on
    PAIR         the next two in turns, segment by segment: a forward and a backward, or a part of
                 each
    SEND         starts and returns; all sends are waited for before the update
    RECV         waits; the next receives of the list are posted ahead, so that messages don't wait
                 for us
    SUM, REDUCE  start the sum of one bucket over one axis; NORM waits for all of them
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import torch

from mpitrain.actor.memory_meter import Watch
from mpitrain.actor.reductions import Gradients
from mpitrain.actor.stage import Stage, assemble
from mpitrain.actor.step_totals import Measure, Totals, exchange, together
from mpitrain.actor.trace import Recorder
from mpitrain.cluster.status_board import BUSY, RankStatus
from mpitrain.comm.base.world import ExpectedAction
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.data.documents import IGNORED, Ends, further_targets, separate
from mpitrain.kernels.compiled import functions_of
from mpitrain.model.blocks import Blocks, blocks_of
from mpitrain.model.build_context import BuildContext
from mpitrain.optim.expert_bias import inequality
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.norm import exact_sum, norm
from mpitrain.optim.optimizer import optimizer_of
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.parallel.walk import Walk, run, run_together
from mpitrain.parallel.zero.shards import Weights, reserve, shardings_of
from mpitrain.plan.declared.layer import is_loss
from mpitrain.plan.division.stages import StagePlan
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.pool_sizes import EVALUATION, TRAINING, needed_by
from mpitrain.plan.routing import Routes
from mpitrain.schedules.actions import Action
from mpitrain.schedules.lowering.needs import partner

AHEAD = 2  # receives posted before they are needed
UNRECORDED = Recorder(range(0))
Key = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class StepRequests:
    """What all ranks have to agree on in a step, besides its totals.

    stop: asked when the gradients are there, tells how urgently this rank is to stop, 0 for not at
    all; the result tells it of the rank for which it is most urgent.
    save_progress: a number below 2**53; the result tells the highest that a rank gave.
    skip_update: tells of the loss whether no update is to be made, alike on all ranks.
    """

    stop: Callable[[], int] = lambda: 0
    save_progress: int = 0
    skip_update: Callable[[float], bool] = lambda loss: False


NOTHING = StepRequests()


@dataclass
class StepResult:
    """What a step measured; the same on every rank.

    num_tokens: those whose prediction counts for the loss.
    peak_in_flight: the most stashes that each pipeline rank held at once.
    save_progress: the highest number that a rank was given.
    metrics: by name, what layers made besides their outputs, summed over layers and microbatches.
    skipped, spike: no update was made, because gradients weren't finite, or because of the loss; it
    can be both.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    skipped: bool = False
    spike: bool = False
    stop: int = 0
    save_progress: int = 0
    peak_in_flight: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Work:
    """What is under way in a step."""

    microbatches: list[Microbatch]
    # where the other ends of messages stand in the programs of other ranks
    ends: Mapping[Action, int]
    between: Callable[[], None]  # called between items of a block
    step: int = 0
    lr: float = 0.0
    asked: StepRequests = NOTHING
    peak_in_flight: int = 0
    # of forwards: received, or handed over by a stage of this rank
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    # of outputs, the same; and between the parts of a backward
    grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Action, torch.Tensor] = field(default_factory=dict)  # by the send they wait for
    receiving: dict[Action, Pending] = field(default_factory=dict)
    to_receive: deque[Action] = field(default_factory=deque)
    sending: list[Pending] = field(default_factory=list)
    losses: dict[Key, torch.Tensor] = field(default_factory=dict)
    # by name: what layers made besides their outputs
    metrics: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    result: StepResult = field(default_factory=StepResult)


def call(compute: Callable[[], Work]) -> Work:
    """Compute once."""
    return compute()


class Actor:
    """This rank.

    recorder: notes when instructions ran.
    place: notes where in the program the rank is.
    build: makes what computes of a stage's layers.
    measure: reads the numbers of a step.
    compiled: whether what lies between products is; None: where run.compile = true.
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
    ):
        config = plan.config
        self.plan = plan
        self.config = config
        self.mesh = mesh
        self.progress = mesh.progress
        self.recorder = recorder or UNRECORDED
        self.place = place or RankStatus()
        self.measure = measure or Measure()
        self.pp, self.tp, self.cp, self.data, self.model = (
            mesh[name] for name in ("pp", "tp", "cp", "data", "model")
        )
        self.table = plan.table
        self.training = plan.training.ranks[self.pp.rank]
        self.evaluation = plan.evaluation.ranks[self.pp.rank]
        self.shardings = shardings_of(config, mesh)
        self.loss_scale = LossScale(config.precision)
        self.recorded: list | None = None  # the routing of a step is noted here
        axes = (mesh[name] for name in ("tp", "cp", "experts", "tokens", "experts_near", "experts_far"))
        self.compiled = config.run.compile is True if compiled is None else compiled
        functions = functions_of(self.compiled, config.numerics.deterministic, device)
        self.site = BuildContext(plan, device, *axes, functions)
        self._update_at = self.training.index(Action("UPDATE"))
        self._ends = plan.training.other_ends(self.pp.rank)
        self._ends_of_evaluation = plan.evaluation.other_ends(self.pp.rank)
        self.stages = self._build(build)
        states = {number: stage.state for number, stage in self.stages.items()}
        needed = needed_by(plan, self.pp.rank, (self.tp.rank, mesh["experts"].rank))
        reserve(self.shardings, needed, self.site.dtype, device)
        self.gradients = Gradients(states, self.table, self.training, mesh, needed.waits)
        own = [stage.plan for stage in self.stages.values()]
        self.optimizer = optimizer_of(config, own, self.gradients.pieces, mesh, self._owned[0].master, device)
        self.links = Links(
            mesh["links"],
            self.table.num_stages,
            self.table.num_microbatches,
            synchronous=config.comm.synchronous,
        )
        self._handlers = self._handlers_of_kinds()

    def _handlers_of_kinds(self) -> dict[str, Callable[[Action, Work], None]]:
        """Return what carries out an instruction, by its kind; `_walk` takes PAIR apart."""
        return {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_backward,
            "W": self._weight_backward,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._recv,
            "RECV_B": self._recv,
            "GATHER": self._gather,
            "RELEASE": self._release,
            "SUM": self._sum,
            "REDUCE": self._reduce,
            "NORM": self._norm,
            "UPDATE": self._update,
            "SPREAD": self._spread,
        }

    def _build(self, build: Callable[[StagePlan, Sequence, BuildContext], Blocks]) -> dict[int, Stage]:
        """Build the stages of this rank, by their number in the table.

        The stages of one rank share a tied embedding.
        """
        stages: dict[int, Stage] = {}
        embedding = None
        for number in self.table.chunks[self.pp.rank]:
            self.place.enter("build", f"building stage {number}", BUSY)
            stages[number] = assemble(self.plan.stage(number), self.site, self.shardings, embedding, build)
            embedding = embedding or stages[number].state.embedding
        return stages

    @property
    def shards_here(self) -> dict[str, int]:
        """The number of this rank's shard, by domain."""
        return {name: sharding.rank for name, sharding in self.shardings.items()}

    @property
    def positions(self) -> torch.Tensor:
        """The positions of a sequence that this rank has, [T]."""
        return torch.from_numpy(self.plan.positions(self.cp.rank))

    def cut(
        self, tokens: torch.Tensor, ends: Ends | None = None, counted: torch.Tensor | None = None
    ) -> list[Microbatch]:
        """Cut this data-parallel rank's rows of a step [batch, sequence + 1] into microbatches, and
        these into segments.

        Inputs and targets are those of this rank's positions; targets are one position ahead in the
        row, wherever that is.
        ends: where documents end, if they are separate.
        counted: of each row, whether its targets carry loss; None: all do.
        """
        micro = self.config.batch.micro
        length = len(self.positions) // self.table.segments
        here = self.positions.to(tokens.device)
        documents, targets = (None, tokens[:, 1:]) if ends is None else separate(tokens, ends)
        targets = targets if counted is None else targets.masked_fill(~counted[:, None], IGNORED)
        # queries here meet keys of the whole sequence
        whole = repeat(None) if documents is None else documents.split(micro)
        every = (tokens, targets, *further_targets(targets, self.config.model.mtp if self.last else 0))
        rows = zip(*(each[:, here].split(micro) for each in every), whole)
        cut = [
            (*parts, known)
            for *halves, known in rows
            for parts in zip(*(half.split(length, dim=1) for half in halves))
        ]
        return [
            Microbatch(
                a if self.first else None, b if self.last else None, documents=known, further=tuple(further)
            )
            for a, b, *further, known in cut
        ]

    @property
    def first(self) -> bool:
        """Whether a stage of this rank reads tokens."""
        return any(stage.first for stage in self.stages.values())

    @property
    def last(self) -> bool:
        """Whether a stage of this rank reads targets."""
        return any(stage.last for stage in self.stages.values())

    # ------------------------------------------------------------ single training step

    def run_step(
        self,
        step: int,
        microbatches: list[Microbatch],
        lr: float,
        *,
        asked: StepRequests = NOTHING,
        watch: Watch | None = None,
        sure: Callable[[Callable[[], Work]], Work] = call,
    ) -> StepResult:
        """Run one training step on this rank's microbatches. Collective over all ranks.

        watch: counts what is held after every instruction.
        sure: is given what computes the gradients, and calls it, once or again: each time it does
        the same, from the same weights; the last one's are used.  Raises HangError, naming the
        message waited for.
        """
        before = self.training[: self._update_at]
        after = self.training[self._update_at :]

        def compute_gradients() -> Work:
            self._lend(TRAINING)
            for stage in self.stages.values():
                stage.state.zero_grad()
            if self.recorded:
                self.recorded.clear()  # of a pass before
            self.recorder.begin(step)
            return self._walk(
                before,
                Work(microbatches, self._ends, self._between(watch), step, lr, asked),
                self.recorder,
                watch,
            )

        with nullcontext() if watch is None else watch.watching():
            work = self._walk(after, sure(compute_gradients), self.recorder, watch, len(before))
        self.recorder.end()
        return work.result

    def evaluate(
        self, step: int, microbatches: list[Microbatch], asked: StepRequests = NOTHING
    ) -> tuple[float, float, int]:
        """Return (summed loss, tokens, how urgent it is to stop) of all ranks, without gradients.

        Collective over all ranks.
        """
        self._lend(EVALUATION)
        work = Work(microbatches, self._ends_of_evaluation, self.progress.poll, step, asked=asked)
        with torch.no_grad():
            self._walk(self.evaluation, work, UNRECORDED)
        total = together(self._totals(work, []))
        return math.fsum(total.loss), total.count, total.stop

    def _between(self, watch: Watch | None) -> Callable[[], None]:
        """Return what is done between two items of a block: messages are moved on."""

        def watched() -> None:
            self.progress.poll()
            watch.look_inside()

        return self.progress.poll if watch is None else watched

    def _lend(self, program: str) -> None:
        """Begin a program: its buffers are taken in its order."""
        for sharding in self.shardings.values():
            sharding.weights.begin(program)
            sharding.gradients.begin(program)

    def _walk(
        self,
        instructions: list[Action],
        work: Work,
        recorder: Recorder,
        watch: Watch | None = None,
        first: int = 0,
    ) -> Work:
        """Run instructions, of which the first stands at position `first` of the program."""
        work.to_receive.extend(a for a in instructions if a.kind in ("RECV_F", "RECV_B"))
        self._post_receives(work)
        steps = enumerate(instructions, start=first)
        for position, action in steps:
            self.place.moved(work.step, position, str(action))
            self.progress.poll()
            self.gradients.advance()
            begin = recorder.mark()
            if action.kind == "PAIR":
                forward = next(steps)[1]
                backward = next(steps)[1]
                self._pair(forward, backward, work)
                recorder.add_pair(action, forward, backward, begin, recorder.mark())
            else:
                self._handlers[action.kind](action, work)
                recorder.add(action, begin, recorder.mark())
            if watch is not None:
                watch.look()
        for pending in work.sending:
            pending.wait()
        return work

    # ------------------------------------------------------------ compute

    def _forward(self, action: Action, work: Work) -> None:
        self._end_forward(action, run(self._forward_walk(action, work), work.between), work)

    def _end_forward(self, action: Action, made: torch.Tensor, work: Work) -> None:
        _, m, stage, part = action
        if part is not None and part + 1 < len(self.stages[stage].parts):
            work.inputs[stage, m] = made  # for the next part
        else:
            self._pass_on(action, made, work)

    def _hear(self, name: str, value: torch.Tensor, work: Work) -> None:
        work.metrics.setdefault(name, []).append(value.detach())

    def _backward(self, action: Action, work: Work) -> None:
        self._end_backward(action, run(self._backward_walk(action, work), work.between), work)

    def _end_backward(self, action: Action, grad: torch.Tensor | None, work: Work) -> None:
        if action.index in self.stages[action.stage].stashes:
            work.grads[action.stage, action.index] = grad  # for the next part
        else:
            self._pass_on(action, grad, work)
        self.gradients.added(action)

    def _input_backward(self, action: Action, work: Work) -> None:
        _, m, stage, part = action
        self.gradients.hold(action)
        walk = self.stages[stage].input_backward(m, self._grad_of_output(stage, m, work), part)
        self._end_backward(action, run(walk, work.between), work)

    def _weight_backward(self, action: Action, work: Work) -> None:
        self.gradients.hold(action)
        run(self.stages[action.stage].weight_backward(action.index, action.part), work.between)
        self.gradients.added(action)

    def _pair(self, forward: Action, backward: Action, work: Work) -> None:
        walks = [self._forward_walk(forward, work), self._backward_walk(backward, work)]
        made, grad = run_together(walks, work.between)
        self._end_forward(forward, made, work)
        self._end_backward(backward, grad, work)

    def _forward_walk(self, action: Action, work: Work) -> Walk:
        _, m, stage, part = action
        hear = partial(self._hear, work=work)
        x = work.inputs.pop((stage, m), None)
        # validation is never replayed
        routes = self._routes(stage, m, work) if torch.is_grad_enabled() else None
        walk = self.stages[stage].forward(
            m, x, self._microbatch(stage, m, work), part, hear, self.loss_scale.value, routes
        )
        if torch.is_grad_enabled() and not part:
            held = 1 + sum(stage.num_stashes for stage in self.stages.values())
            work.peak_in_flight = max(work.peak_in_flight, held)
        return walk

    def _backward_walk(self, action: Action, work: Work) -> Walk:
        _, m, stage, part = action
        self.gradients.hold(action)
        return self.stages[stage].backward(m, self._grad_of_output(stage, m, work), part)

    def _grad_of_output(self, stage: int, index: int, work: Work) -> torch.Tensor | None:
        """Return what came from the next stage or the part before.

        Of a loss it is the scale, and None for a scale of 1.
        """
        grad = work.grads.pop((stage, index), None)
        if grad is None and self.loss_scale.dynamic:
            return torch.full((), self.loss_scale.value, device=self.site.device)
        return grad

    def _microbatch(self, stage: int, index: int, work: Work) -> Microbatch:
        return work.microbatches[self._number(stage, index)]

    def _number(self, stage: int, index: int) -> int:
        """Return the number of a microbatch in the step: each copy of the model has its own share of them."""
        return stage // self.table.depth * self.table.num_microbatches + index

    def _routes(self, stage: int, index: int, work: Work) -> Routes | None:
        if self.plan.routing is None and self.recorded is None:
            return None
        batch = self.config.batch
        number = self._number(stage, index) // self.table.segments
        first = self.mesh["dp"].rank * (batch.global_ // self.config.parallel.dp) + number * batch.micro
        return Routes(work.step, range(first, first + batch.micro), self.plan.routing, self.recorded)

    def _pass_on(self, action: Action, made: torch.Tensor | None, work: Work) -> None:
        """Keep an activation or gradient for the stage that needs it, on this rank, or for the send
        that follows.
        """
        if made is None:  # the last backward
            return
        kind, m, stage, _ = action
        if kind == "F" and self.stages[stage].last:
            work.losses[stage, m] = made.detach()
            return
        to, kept, send = (
            (stage + 1, work.inputs, "SEND_F") if kind == "F" else (stage - 1, work.grads, "SEND_B")
        )
        if to in self.stages:
            kept[to, m] = made
        else:
            work.outputs[Action(send, m, stage)] = made.contiguous()

    # ------------------------------------------------------------ messages

    def _send(self, action: Action, work: Work) -> None:
        kind, m, stage, _ = action
        to = stage + 1 if kind == "SEND_F" else stage - 1
        pending = self.links.send(
            kind[-1], to, m, work.outputs.pop(action), self.table.rank_of[to], self._expected(action, work)
        )
        # what has left is freed
        work.sending = [*(earlier for earlier in work.sending if not earlier.done), pending]

    def _recv(self, action: Action, work: Work) -> None:
        kept = work.inputs if action.kind == "RECV_F" else work.grads
        kept[action.stage, action.index] = work.receiving.pop(action).wait()
        self._post_receives(work)

    def _post_receives(self, work: Work) -> None:
        while work.to_receive and len(work.receiving) < AHEAD:
            action = work.to_receive.popleft()
            kind, m, stage, _ = action
            source = stage - 1 if kind == "RECV_F" else stage + 1
            buffer = torch.empty(self.plan.activation_shape(), dtype=self.site.dtype, device=self.site.device)
            work.receiving[action] = self.links.receive(
                kind[-1], stage, m, buffer, self.table.rank_of[source], self._expected(action, work)
            )

    def _expected(self, action: Action, work: Work) -> ExpectedAction:
        """Return what another rank has to do so that a message of this one arrives."""
        end = partner(action)
        return ExpectedAction(str(end), work.ends[end])

    # ------------------------------------------------------------ gradients and update

    def _gather(self, action: Action, work: Work) -> None:
        self.stages[action.stage].state.buckets[action.index].weights.gather()

    def _release(self, action: Action, work: Work) -> None:
        self.stages[action.stage].state.buckets[action.index].weights.release()

    def _sum(self, action: Action, work: Work) -> None:
        self.gradients.sum(action.stage, action.index, action.part)

    def _reduce(self, action: Action, work: Work) -> None:
        self.gradients.reduce(action.stage, action.index, action.part)

    def _norm(self, action: Action, work: Work) -> None:
        self.gradients.wait()
        self._compare_loads(work)
        parts = self._totals(
            work, self.measure.squares(piece.grad for piece in self.gradients.counted if piece.spec.updated)
        )
        total = self.measure.total(parts)
        result = work.result
        # no target, no mean: nothing to learn, the step is skipped
        result.num_tokens = int(total.count)
        count = total.count or math.nan
        result.loss = math.fsum(total.loss) / count
        result.grad_norm = norm(total.squares) / (count * self.loss_scale.value)
        result.stop = total.stop
        result.save_progress = total.save_progress
        result.peak_in_flight = [part.peak for part in parts[:: self.tp.size]]
        sums = {name: math.fsum(numbers) for name, numbers in zip(self.plan.metrics, total.metrics)}
        # A layer's losses are divided as training divides them: by the targets that carry loss, not
        # by all tokens.
        result.metrics = {name: value / (count if is_loss(name) else 1) for name, value in sums.items()}
        result.skipped = not math.isfinite(result.grad_norm)
        result.spike = work.asked.skip_update(result.loss)

    def _compare_loads(self, work: Work) -> None:
        """Tell how unequal the loads of experts are, a mean over blocks."""
        for piece in self.gradients.counted:
            if piece.spec.group == "load":
                for name, value in inequality(piece.grad).items():
                    self._hear(name, value / len(self.plan.loads), work)

    def _update(self, action: Action, work: Work) -> None:
        """Divide by the global number of tokens, clip, and step.

        A step without finite gradients is skipped, and halves the scale.
        """
        scale = 1.0 / (max(1, work.result.num_tokens) * self.loss_scale.value)
        if work.result.num_tokens:  # without a target no gradient tells of the range
            self.loss_scale.update(work.result.skipped)
        if work.result.skipped or work.result.spike:
            return
        clip = self.config.optimizer.clip
        if clip and work.result.grad_norm > clip:
            scale *= clip / work.result.grad_norm
        self.gradients.scale(scale)
        self.optimizer.step(work.lr)
        for weights in self._owned:
            weights.update()

    def settle(self) -> None:
        """Wait for weights that are on their way: what is read next would be written over by them."""
        for weights in self._owned:
            weights.wait()

    def restored(self, num_updates: int) -> None:
        """Take over weights and optimiser state that were read into the pieces.

        Collective over the data axis.
        """
        self.optimizer.set_step(num_updates)
        for weights in self._owned:
            weights.update()
            if weights.whole is not None:
                weights.spread()

    def _spread(self, action: Action | None = None, work: Work | None = None) -> None:
        """Send updated weights to the ranks that share them.

        The next forward waits for each bucket when it needs it.
        """
        for weights in self._owned:
            weights.spread()

    @property
    def _owned(self) -> list[Weights]:
        """The weights that stages of this rank own, in the order of the forward."""
        return [
            bucket.weights
            for stage in self.stages.values()
            for bucket in reversed(stage.state.buckets)
            if bucket.owned
        ]

    def _totals(self, work: Work, squares: list[float]) -> list[Totals]:
        """Return the totals of each part of the model, in the order of its ranks.

        Of all microbatches, on all ranks.
        """
        # the ranks of tp have the same
        losses, metrics = (work.losses, work.metrics) if self.tp.rank == 0 else ({}, {})
        loss = exact_sum(self.measure.numbers(losses[key] for key in sorted(losses)))
        count = self.measure.count(self._microbatch(*key, work).targets for key in losses)
        metrics = tuple(exact_sum(self.measure.numbers(metrics.get(name, ()))) for name in self.plan.metrics)
        mine = Totals(
            loss,
            exact_sum(squares),
            metrics,
            count,
            work.asked.stop(),
            work.peak_in_flight,
            work.asked.save_progress,
        )
        return exchange(together(exchange(mine, self.data)), self.model)
